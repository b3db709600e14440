"""Chooses split points that balance the stages of a pipeline.

By measured forward times, or, where no batch is at hand, by numbers of parameters.

The model is not split here: `balance` returns the paths to pass to `Pipeline`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slipstream.comm.groups import Group, group_of
from slipstream.errors import ModelError, SlipstreamError, StrategyError
from slipstream.parallel.pipeline import shape_inference
from slipstream.parallel.pipeline.micro_batches import MicroBatch
from slipstream.parallel.pipeline.split_points import SplitPoints, is_list
from slipstream.parallel.pipeline.stages import Stages


def balance(
    model: nn.Module,
    sample_args: tuple[Any, ...],
    stages: int,
    *,
    sample_kwargs: dict[str, Any] | None = None,
    runs: int = 5,
    process_group: dist.ProcessGroup | None = None,
) -> list[str]:
    """Paths at which to split ``model`` into ``stages`` of about equal forward time.

    A stage may begin at any child of a ``ModuleList`` or ``Sequential`` where one tensor flows. The
    time from each such module to the next is the median of ``runs`` forwards; rank 0 measures for
    all ranks. The split is optimal for these times. Collective, if there are several ranks.

    Args:
        model: whole; buffers and random states are restored.
        sample_args: of one micro-batch.
        stages: how many: ranks times stages a rank.
        sample_kwargs: as ``sample_args``.
        runs: how many forwards to measure.
        process_group: None: all ranks.

    Raises:
        StrategyError: fewer than one stage, or more than the model has candidates for.

    Example:
        >>> model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
        >>> balance(model, (torch.ones(512, 512),), stages=2)
        ['1']
    """
    group = group_of(process_group)
    result: list[list[str] | SlipstreamError] = [[]]
    if group.rank == 0:
        batch = MicroBatch(sample_args, sample_kwargs or {}, None)
        try:
            result[0] = _balanced_paths(model, batch, stages, runs)
        except SlipstreamError as error:
            result[0] = error
    if group.size > 1:
        dist.broadcast_object_list(result, group=group.members, group_src=0)
    if isinstance(result[0], SlipstreamError):
        raise result[0]
    return result[0]


def balance_parameters(model: nn.Module, stages: int) -> list[str]:
    """Paths at which to split ``model`` into ``stages`` of about equal numbers of parameters.

    Needs no batch, so it does not know whether one tensor flows before a path, as `balance` does:
    the pipeline's first forward tells. Embeddings do not count, as looking up takes no time; a head
    that is tied to one does.

    Raises:
        StrategyError: fewer than one stage, or more than the model has candidates for.

    Example:
        >>> model = nn.Sequential(nn.Embedding(999, 8), nn.Linear(8, 8), nn.Linear(8, 8))
        >>> balance_parameters(model, stages=2)
        ['2']
    """
    paths = candidates(model)[1:]  # the first begins the first stage
    if not 1 <= stages <= len(paths) + 1:
        raise _too_many(model, stages, paths, "at which a stage could begin")
    costs = [0]
    for path, module in model.named_modules(remove_duplicate=False):
        if len(costs) <= len(paths) and path == paths[len(costs) - 1]:
            costs.append(0)
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            costs[-1] += sum(p.numel() for p in module._parameters.values() if p is not None)
    return [paths[start - 1] for start in balanced(costs, stages)]


def _too_many(model: nn.Module, stages: int, paths: Sequence[str], what: str) -> StrategyError:
    return StrategyError(
        f"{stages} stages; allowed: 1 to {len(paths) + 1}, as {type(model).__name__} has "
        f"{len(paths)} modules {what}; or choose the paths yourself"
    )


def balanced(costs: Sequence[float], parts: int) -> list[int]:
    """The indices at which parts 1, 2, ... begin, so that the largest sum of a part is smallest.

    Exact: dynamic programming in O(``len(costs)``^2 ``parts``). On a tie parts begin as early as
    possible.

    Raises:
        StrategyError: fewer costs than parts, or no part.

    Example:
        >>> balanced([1, 1, 1, 3], 2)
        [3]
    """
    if not 1 <= parts <= len(costs):
        raise StrategyError(f"{len(costs)} pieces in {parts} parts; allowed: 1 to {len(costs)}")
    total = [*accumulate(costs, initial=0.0)]
    # best[end]: of costs[:end] the smallest largest sum, and where the parts after the first begin
    best: list[tuple[float, list[int]]] = [(sum_, []) for sum_ in total]
    for part in range(2, parts + 1):
        best_with_part = [(float("inf"), [0])] * part
        for end in range(part, len(total)):
            best_with_part.append(
                min(
                    (max(best[start][0], total[end] - total[start]), [*best[start][1], start])
                    for start in range(part - 1, end)
                )
            )
        best = best_with_part
    return best[-1][1]


def candidates(model: nn.Module) -> list[str]:
    """Modules at which a stage may begin: the children of lists, but not modules inside of those.

    A child that only wraps another list is replaced by the children of that list.

    Example:
        >>> block = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
        >>> candidates(nn.Sequential(block, nn.Linear(2, 2)))
        ['0.0', '0.1', '1']
    """
    return list(_chain(model, ""))


def _chain(module: nn.Module, path: str) -> Iterator[str]:
    for name, child in module.named_children():
        inner = f"{path}.{name}".removeprefix(".")
        nested = []
        if not is_list(module) or is_list(child) or len(list(child.children())) == 1:
            nested = list(_chain(child, inner))
        yield from nested or ([inner] if is_list(module) else [])


def _balanced_paths(model: nn.Module, batch: MicroBatch, stages: int, runs: int) -> list[str]:
    paths = [path for path in candidates(model) if _can_split_at(model, batch, path)]
    if not 1 <= stages <= len(paths) + 1:
        raise _too_many(model, stages, paths, "before which one tensor flows")
    if stages == 1:
        return []
    with shape_inference.state_restored(model):
        times = [_forward_times(model, batch, paths) for _ in range(runs + 1)]
    costs = [median(column) for column in zip(*times[1:], strict=True)]  # the first one warms up
    return [paths[start - 1] for start in balanced(costs, stages)]


def _can_split_at(model: nn.Module, batch: MicroBatch, path: str) -> bool:
    stages = Stages(model, SplitPoints.of(model, [path]))
    try:
        shape_inference.sequential_forward(stages, batch, None, Group((0,), None, False, 0))
    except ModelError:
        return False
    return True


def _forward_times(model: nn.Module, batch: MicroBatch, paths: Sequence[str]) -> list[float]:
    """Seconds of one forward up to the first path, from each to the next, and from the last on."""
    device = shape_inference.device_of(model)
    times: list[float] = []

    def mark(*_: object) -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter())

    handles = [model.get_submodule(path).register_forward_pre_hook(mark) for path in paths]
    try:
        with torch.no_grad():
            mark()
            model(*batch.args, **batch.kwargs)
            mark()
    finally:
        for handle in handles:
            handle.remove()
    return [after - before for before, after in pairwise(times)]
