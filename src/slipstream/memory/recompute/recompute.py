"""Recompute activations in backward instead of keeping them, as a strategy says."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from slipstream.errors import StrategyError, UsageError
from slipstream.memory.blocks import blocks_of, matching
from slipstream.memory.forward_override import is_wrapped
from slipstream.memory.recompute.budget import Region, RegionParts
from slipstream.memory.recompute.chain import Chain
from slipstream.memory.recompute.region_planner import Decision, RegionPlanner, RegionPrediction
from slipstream.strategy import Row
from slipstream.strategy.memory import (
    BudgetBytesConfig,
    BudgetConfig,
    CheckpointsConfig,
    EveryConfig,
    RecomputeConfig,
)


def recompute(
    model: nn.Module,
    config: RecomputeConfig,
    *,
    agree: Callable[[Decision], Decision] | None = None,
) -> Recomputed:
    """Recompute activations of ``model`` in backward, as ``config`` says, from now on.

    Built on ``torch.utils.checkpoint``. Recomputation runs under the same autocast and with the
    same random numbers (of torch, ``random``, ``numpy.random`` and generators that modules have),
    and buffers such as running statistics are updated once. Parameters and settings of modules are
    those of the forward (`StateReplay`). Exactness: bitwise.

    Regions of several blocks and budgets are chosen at the end of the first forward with gradients,
    from how the model passes tensors between blocks and from measured costs. Until the next forward
    every block is recomputed by itself.

    Visible to the user: hooks on modules inside of blocks run in recomputation, too, and for a
    budget forward pre-hooks four more times in the first forward, where blocks are measured. With
    ``keep`` a graph supports one backward; torch refuses ``retain_graph`` and double backward.

    Args:
        model: keeps its names, hooks and classes. Call the model itself, not only parts of it.
        config: which modules, or which budget.
        agree: maps the decision of this rank to the decision that all ranks follow; called once, in
            the first forward. None: every rank follows its own.

    Raises:
        StrategyError: no module matches, or the model has no repeated blocks; in the first forward:
            the budget is too low.
        UsageError: the model recomputes already; in a forward: the model does not call its blocks
            as in the first forward, or a block changes its input in place; in backward: a parameter
            was changed in place since the forward.

    Example:
        >>> import torch
        >>> layers = [nn.TransformerEncoderLayer(8, 2, 16) for _ in range(4)]
        >>> model = nn.Sequential(*layers)
        >>> recomputed = recompute(model, EveryConfig(every=2))
        >>> model(torch.ones(3, 1, 8)).sum().backward()
        >>> recomputed.regions
        (('0', '1'), ('2', '3'))
        >>> recomputed.close()
    """
    check_recompute(model, config)
    return Recomputed(model, config, agree or (lambda decision: decision))


def check_recompute(model: nn.Module, config: RecomputeConfig) -> None:
    """Raise what `recompute` would raise, without installing anything.

    Raises:
        StrategyError, UsageError: see `recompute`.
    """
    for path, module in model.named_modules():
        if is_wrapped(module):
            raise UsageError(
                f"memory.recompute: the forward of {path or 'the model'} is already overridden; "
                "close() that technique first (recomputation is installed before offload)"
            )
        if getattr(module, "gradient_checkpointing", False) is True:
            raise UsageError(
                f"memory.recompute: {path or 'the model'} uses its own gradient checkpointing; "
                "call model.gradient_checkpointing_disable(), or leave it out of TrainingArguments"
            )
    _paths_to_recompute(model, config)


def _paths_to_recompute(model: nn.Module, config: RecomputeConfig) -> list[str]:
    if isinstance(config, CheckpointsConfig):
        return matching(model, config.checkpoints, "memory.recompute.checkpoints")
    paths = blocks_of(model)
    if not paths:
        raise StrategyError(
            f"memory.recompute {config.kind}: {type(model).__name__} has no repeated blocks "
            "(modules of one class and size in a ModuleList, ModuleDict or Sequential); name the "
            "modules to recompute: memory.recompute: {checkpoints: [path, ...]}"
        )
    return paths


class Recomputed:
    """The recomputation that `recompute` installed on a model; ``close()`` removes it."""

    def __init__(
        self, model: nn.Module, config: RecomputeConfig, agree: Callable[[Decision], Decision]
    ) -> None:
        paths = _paths_to_recompute(model, config)
        self._keep = () if isinstance(config, BudgetConfig | BudgetBytesConfig) else config.keep
        self._chain = Chain({path: model.get_submodule(path) for path in paths}, self._keep)
        self._planner: RegionPlanner | None = None
        if not isinstance(config, CheckpointsConfig) and config != EveryConfig(keep=self._keep):
            self._planner = RegionPlanner(model, self._chain, config, agree)

    @property
    def regions(self) -> tuple[tuple[str, ...], ...]:
        """Paths of the modules of each region; a region keeps only its input."""
        layout = self._chain.layout
        return tuple(layout.names(part) for part in layout.parts if isinstance(part, Region))

    @property
    def parts(self) -> RegionParts:
        """The plan by numbers of blocks: kept blocks, and regions with their inner regions."""
        return self._chain.layout.parts

    @property
    def prediction(self) -> RegionPrediction | None:
        """The measured and predicted costs of a budget, after the first forward."""
        return self._planner.prediction if self._planner is not None else None

    def report_rows(self) -> list[Row]:
        """Report what was installed, for the overview of the session."""
        regions, recomputed = self.regions, sum(map(len, self.regions))
        kept = len(self._chain.blocks) - recomputed
        results = f" (results of {', '.join(self._keep)} kept)" if self._keep else ""
        value = f"{recomputed} modules recomputed{results} in {len(regions)} regions, {kept} kept"
        prediction = self.prediction
        if self._chain.observer is not None:
            note = "until the end of the first forward"
        elif prediction is None:
            note = ", ".join(map(_span, regions))
        else:
            note = (
                f"predicted: {prediction.num_bytes / 2**20:.3g} of "
                f"{prediction.plain_bytes / 2**20:.3g} MiB, and {prediction.seconds:.3g} instead "
                f"of {prediction.plain_seconds:.3g} s"
            )
        return [Row("memory.recompute", value, note)]

    def close(self) -> None:
        """Restore the forward of every module; idempotent."""
        if self._planner is not None:
            self._planner.close()
        self._chain.close()


def _span(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
