"""Activations that are computed again in backward instead of kept, as a strategy says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from slipstream.errors import StrategyError, UsageError
from slipstream.memory.blocks import blocks_of, matching
from slipstream.memory.forward_override import Forward, ForwardOverride
from slipstream.memory.recompute.block_dataflow import Call, Observer
from slipstream.memory.recompute.budget import (
    Cost,
    Parts,
    Region,
    cheapest,
    peak_bytes,
    seconds,
    segments,
)
from slipstream.memory.recompute.chain import Chain
from slipstream.memory.recompute.measure import measure
from slipstream.strategy import Row
from slipstream.strategy.memory import Budget, BudgetBytes, Checkpoints, Every, Recompute

Decision = tuple[Sequence[str], Parts] | StrategyError
"""The blocks in order and what becomes of them, or why that cannot be."""


def recompute(
    model: nn.Module, config: Recompute, *, agree: Callable[[Decision], Decision] | None = None
) -> Recomputed:
    """Compute activations of ``model`` again in backward, as ``config`` says, from now on.

    On ``torch.utils.checkpoint``: autocast and random numbers (of torch, ``random`` and
    ``numpy.random``) are the same the second time, and buffers such as running statistics are
    updated once. Regions of several blocks and budgets are settled at the end of the first forward
    with gradients, from how blocks follow one another and what they take; until the next forward
    blocks are computed again one by one. Exactness: bitwise.

    What is not hidden: hooks on modules inside of blocks run as often as these do, for a budget
    four times more in the first forward, where blocks are measured. With ``keep`` a graph goes
    through backward once; torch refuses ``retain_graph`` and double backward.

    Args:
        model: its names, hooks and classes stay; to be called itself, not only parts of it.
        wish: which modules, or which budget.
        agree: gives the decision that all ranks follow for that of this rank; None: its own.
            Called once in the first forward.

    Raises:
        StrategyError: no module matches, or nothing repeats; on the first forward: the budget is
            too low.
        UsageError: the model does this already; on a forward: the model calls blocks in a
            way that cannot be followed, or a block changes its input in place.

    Example:
        >>> import torch
        >>> layers = [nn.TransformerEncoderLayer(8, 2, 16) for _ in range(4)]
        >>> model = nn.Sequential(*layers)
        >>> recomputed = recompute(model, Every(every=2))
        >>> model(torch.ones(3, 1, 8)).sum().backward()
        >>> recomputed.regions
        (('0', '1'), ('2', '3'))
        >>> recomputed.close()
    """
    check_recompute(model, config)
    return Recomputed(model, config, agree or (lambda own: own))


def check_recompute(model: nn.Module, config: Recompute) -> None:
    """Find out, before anything is installed, that `recompute` would refuse.

    Raises:
        StrategyError, UsageError: as of `recompute`.
    """
    for path, module in model.named_modules():
        if isinstance(vars(module).get("forward"), ForwardOverride):
            raise UsageError(
                f"memory.recompute: the forward of {path or 'the model'} is replaced already; "
                "close() what did it, and recompute before you offload"
            )
        if getattr(module, "gradient_checkpointing", False) is True:
            raise UsageError(
                f"memory.recompute: {path or 'the model'} computes activations again itself; call "
                "model.gradient_checkpointing_disable()"
            )
    _targets(model, config)


def _targets(model: nn.Module, config: Recompute) -> list[str]:
    """Paths of the modules that ``config`` is about."""
    if isinstance(config, Checkpoints):
        return matching(model, config.checkpoints, "memory.recompute.checkpoints")
    found = blocks_of(model)
    if not found:
        raise StrategyError(
            f"memory.recompute {config.kind}: {type(model).__name__} has no repeated blocks "
            "(modules of one class and size in a ModuleList, ModuleDict or Sequential); name what "
            "to compute again: memory.recompute: {checkpoints: [path, ...]}"
        )
    return found


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the blocks of a model take in an iteration; see ``budget``.

    Attributes:
        num_bytes: the most that they hold at a time.
        plain_bytes: where everything is kept.
        seconds: of their forward and backward.
        plain_seconds: where nothing is computed again.
        costs: what was measured of each block.
    """

    num_bytes: int
    plain_bytes: int
    seconds: float
    plain_seconds: float
    costs: tuple[Cost, ...]


class Recomputed:
    """What `recompute` put on a model; ``close()`` takes it off."""

    def __init__(
        self, model: nn.Module, config: Recompute, agree: Callable[[Decision], Decision]
    ) -> None:
        paths = _targets(model, config)
        keep = () if isinstance(config, Budget | BudgetBytes) else config.keep
        self._keep = keep
        self._chain = Chain({path: model.get_submodule(path) for path in paths}, keep)
        self._settling: _Settling | None = None
        self._around: ForwardOverride | None = None
        if not isinstance(config, Checkpoints) and config != Every(keep=keep):
            self._settling = self._chain.watch = _Settling(self._chain, config, agree)
            self._around = ForwardOverride(
                model, self._forward
            )  # no hook, for that would be copied

    @property
    def regions(self) -> tuple[tuple[str, ...], ...]:
        """Modules of which only the input is kept, those together that are one region."""
        layout = self._chain.layout
        return tuple(layout.names(part) for part in layout.parts if isinstance(part, Region))

    @property
    def parts(self) -> Parts:
        """The same with blocks that are kept, and with regions in regions, by number of blocks."""
        return self._chain.layout.parts

    @property
    def prediction(self) -> Prediction | None:
        """What was measured and chosen, of a budget after the first forward."""
        return self._settling.prediction if self._settling is not None else None

    def report_rows(self) -> list[Row]:
        """What became of it, for the overview."""
        regions, again = self.regions, sum(map(len, self.regions))
        kept = len(self._chain.blocks) - again
        but = f" but for {', '.join(self._keep)}" if self._keep else ""
        value = f"{again} modules computed again{but} in {len(regions)} regions, {kept} kept"
        if self._chain.watch is not None:
            return [Row("memory.recompute", value, "until the end of the first forward")]
        if self.prediction is None:
            return [Row("memory.recompute", value, ", ".join(map(_span, regions)))]
        found = self.prediction
        note = (
            f"at most {found.num_bytes / 2**20:.3g} of {found.plain_bytes / 2**20:.3g} MiB, and "
            f"{found.seconds:.3g} instead of {found.plain_seconds:.3g} s, as predicted"
        )
        return [Row("memory.recompute", value, note)]

    def close(self) -> None:
        """Every module has its own forward again."""
        if self._around is not None:
            self._around.remove()
        if self._settling is not None:
            self._settling.close()
        self._chain.close()

    def _forward(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        """In the place of the model's own forward."""
        self._chain.begin()
        if self._settling is None or self._chain.watch is None:
            return forward(*args, **kwargs)
        self._settling.restart()
        output = forward(*args, **kwargs)
        if self._chain.watch is not None:
            self._settling.settle()
        return output


class _Settling:
    """Watches blocks in a first forward, and decides on regions; a ``Watch`` of a chain."""

    def __init__(
        self,
        chain: Chain,
        config: Every | Budget | BudgetBytes,
        agree: Callable[[Decision], Decision],
    ) -> None:
        self._chain, self._config, self._agree = chain, config, agree
        self._inside = False  # of a forward of the model
        self.prediction: Prediction | None = None
        self._reset()

    def _reset(self) -> None:
        self._observer = Observer()
        self._costs: list[Cost] = []

    def close(self) -> None:
        """Agree with nobody any more: a process group ends with the last that holds it."""
        self._agree = lambda own: own

    def restart(self) -> None:
        """A forward of the model begins; what another has left does not count."""
        self._reset()
        self._inside = True

    def begins(self, name: str, forward: Forward, call: Call) -> None:
        """A block is about to run: see how it follows the one before it, and measure it.

        Raises:
            UsageError: it runs a second time, so that a budget cannot be kept.
        """
        if name in self._observer.order:
            if self._inside and not isinstance(self._config, Every):
                raise UsageError(
                    f"memory.recompute {self._config.kind}: {name} is called twice in one forward, "
                    "but a budget is divided among blocks that are called once; use "
                    "memory.recompute: {every: 1}"
                )
            self.settle()
            self._chain.begin()
            return
        self._observer.before(name, call)
        if not isinstance(self._config, Every):
            self._costs.append(measure(self._chain.blocks[name], forward, call))

    def ends(self, call: Call, output: Any) -> None:
        """It has run."""
        self._observer.after(call, output)

    def settle(self) -> None:
        """Choose the regions, the same on all ranks.

        Raises:
            StrategyError: the budget is too low.
        """
        self._inside = False
        if not self._observer.order:
            return  # without gradients
        try:
            own: Decision = (tuple(self._observer.order), self._parts())
        except StrategyError as error:
            own = error
        decided = self._agree(own)
        if isinstance(decided, StrategyError):
            self._reset()
            raise decided
        order, parts = decided
        links = self._observer.links if list(order) == self._observer.order else {}
        self._chain.watch = None
        self._chain.install(order, parts, links)
        if self._costs:
            plain = tuple(range(len(self._costs)))
            self.prediction = Prediction(
                peak_bytes(parts, self._costs),
                peak_bytes(plain, self._costs),
                seconds(parts, self._costs),
                seconds(plain, self._costs),
                tuple(self._costs),
            )
        self._reset()

    def _parts(self) -> Parts:
        order, links = self._observer.order, self._observer.links
        borders = {number for number, name in enumerate(order) if name not in links}
        match self._config:
            case Every():
                return segments(len(order), self._config.every, borders)
            case Budget():
                limit = int(self._config.budget * sum(cost.saved for cost in self._costs))
            case BudgetBytes():
                limit = self._config.budget_bytes
        try:
            return cheapest(self._costs, limit, borders)
        except StrategyError as error:
            raise StrategyError(f"memory.recompute.{self._config.kind}: {error}") from None


def _span(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
