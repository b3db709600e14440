"""Finds the cuts that make the slowest stage fastest, from a measurement of the model.

Never cuts a model: it returns the paths to give to `Pipeline`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slipstream.errors import ModelError, SlipstreamError, StrategyError
from slipstream.parallel.pipeline.micro_batches import MicroBatch
from slipstream.parallel.pipeline.shape_inference import unchanged, walk
from slipstream.parallel.pipeline.split_points import cut_model
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
    """Paths at which to cut ``model`` into ``stages`` of about equal forward time.

    A cut may go before any child of a ``ModuleList`` or ``Sequential`` at which one tensor flows.
    The time from each to the next is the median of ``runs`` forwards; rank 0 measures for all.
    Exactness: the best cuts for these times. Collective where there are several ranks.

    Args:
        model: whole; buffers and random states stay as they are.
        sample_args: of one micro-batch.
        stages: how many; ranks times stages a rank.
        sample_kwargs: as ``sample_args``.
        runs: forwards to measure.
        process_group: None: all ranks.

    Raises:
        StrategyError: fewer than one stage, or more than the model has places to cut.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> balance(model, (torch.ones(1, 2),), stages=2)
        ['1']
    """
    said: list[list[str] | SlipstreamError] = [[]]
    joined = dist.is_available() and dist.is_initialized()
    if not joined or dist.get_rank(process_group) == 0:
        batch = MicroBatch(sample_args, sample_kwargs or {}, None)
        try:
            said[0] = _measured(model, batch, stages, runs)
        except SlipstreamError as error:
            said[0] = error
    if joined:
        dist.broadcast_object_list(said, group=process_group, group_src=0)
    if isinstance(said[0], SlipstreamError):
        raise said[0]
    return said[0]


def balanced(costs: Sequence[float], parts: int) -> list[int]:
    """Where the second part and those after it begin, so that the largest sum of a part is least.

    Exact: a dynamic programme in ``len(costs)`` squared times ``parts``. On a tie parts begin
    as early as they can.

    Raises:
        StrategyError: fewer costs than parts, or no part.

    Example:
        >>> balanced([1, 1, 1, 3], 2)
        [3]
    """
    if not 1 <= parts <= len(costs):
        raise StrategyError(f"{len(costs)} pieces in {parts} parts; allowed: 1 to {len(costs)}")
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    # best[end]: the least largest sum of costs[:end], and where the parts after the first begin
    best: list[tuple[float, list[int]]] = [(sum_, []) for sum_ in total]
    for part in range(2, parts + 1):
        nexts = [(float("inf"), [0])] * part
        for end in range(part, len(total)):
            nexts.append(
                min(
                    (max(best[start][0], total[end] - total[start]), [*best[start][1], start])
                    for start in range(part - 1, end)
                )
            )
        best = nexts
    return best[-1][1]


def candidates(model: nn.Module) -> list[str]:
    """Modules at which one tensor may flow: children of lists, but for what is inside of them.

    A child that holds nothing but one other list is not one module but a chain of its own.

    Example:
        >>> block = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
        >>> candidates(nn.Sequential(block, nn.Linear(2, 2)))
        ['0.0', '0.1', '1']
    """
    return list(_chain(model, ""))


def _chain(module: nn.Module, path: str) -> Iterator[str]:
    for name, child in module.named_children():
        inner = f"{path}.{name}".removeprefix(".")
        found = []
        if not _is_list(module) or _is_list(child) or len(list(child.children())) == 1:
            found = list(_chain(child, inner))
        yield from found or ([inner] if _is_list(module) else [])


def _is_list(module: nn.Module) -> bool:
    """Whether it does no more than call its children in turn, or leaves that to its parent."""
    return type(module).forward in (nn.Module.forward, nn.Sequential.forward)


def _measured(model: nn.Module, batch: MicroBatch, stages: int, runs: int) -> list[str]:
    places = [path for path in candidates(model) if _flows(model, batch, path)]
    if not 1 <= stages <= len(places) + 1:
        raise StrategyError(
            f"{stages} stages; allowed: 1 to {len(places) + 1}, as {type(model).__name__} has "
            f"{len(places)} modules before which one tensor flows; or choose cuts yourself"
        )
    if stages == 1:
        return []
    with unchanged(model, _device(model)):
        times = [_times(model, batch, places) for _ in range(runs + 1)]
    costs = [median(column) for column in zip(*times[1:], strict=True)]
    return [places[start - 1] for start in balanced(costs, stages)]


def _flows(model: nn.Module, batch: MicroBatch, path: str) -> bool:
    """Whether the model can be cut there."""
    try:
        walk(Stages(model, cut_model(model, [path])), batch, None, None, _device(model))
    except ModelError:
        return False
    return True


def _times(model: nn.Module, batch: MicroBatch, places: Sequence[str]) -> list[float]:
    """Seconds of one forward up to the first place, from each to the next, and from the last on."""
    marks: list[float] = []
    clock = partial(_now, _device(model))

    def mark(*_: object) -> None:
        marks.append(clock())

    handles = [model.get_submodule(path).register_forward_pre_hook(mark) for path in places]
    try:
        with torch.no_grad():
            start = clock()
            model(*batch.args, **batch.kwargs)
            end = clock()
    finally:
        for handle in handles:
            handle.remove()
    times = [start, *marks, end]
    return [after - before for before, after in pairwise(times)]


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))
