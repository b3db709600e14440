"""Chains of operations of a model, each in one operation that keeps less, from outside."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, get_args

from torch import fx, nn

from slipstream.errors import UsageError
from slipstream.fusion.block_graph import Untraceable, record
from slipstream.fusion.chains import CHAIN_PARTS, Chains
from slipstream.fusion.steps import Role, as_start, may_start
from slipstream.kernels.compiled import check_compiler
from slipstream.memory.forward_override import ForwardReplacement
from slipstream.strategy import Row
from slipstream.strategy.compute import Pattern

PATTERNS: tuple[Pattern, ...] = get_args(Pattern)


def fuse_patterns(model: nn.Module, patterns: Iterable[Pattern] = PATTERNS) -> FusedPatterns:
    """Run chains of a model's operations as one each, until ``close()`` of the result.

    - ``bn_act``: batch norm and an activation, with a residual between them or without.
    - ``add_act``: a sum and an activation.
    - ``relu_depthwise``: ReLU and a depthwise convolution.

    The activations are relu, relu6, sigmoid, tanh, gelu, silu and hardswish. Where a chain is
    expected, its first layer returns a tensor that is computed when it is asked for (``late``); the
    forwards of all modules run as they are, so settings, hooks and methods may change at any time.
    Blocks are recorded once by torch.fx to see where chains may be; a block that it cannot follow
    is left alone, and the report says why. Names of parameters, hooks and ``state_dict()`` do not
    change.

    Exactness: reordered; in evaluation batch norm and activation are torch's.

    Raises:
        UsageError: an unknown pattern, or no compiler on a host without CUDA.
        ModelError: in a later forward, an input of a chain is changed in place before its end.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        >>> fused = fuse_patterns(model)
        >>> fused.report_rows()[0].value
        '1 batch norm + activation'
        >>> model(torch.zeros(2, 3, 8, 8)).shape
        torch.Size([2, 8, 6, 6])
        >>> fused.close()

    Source: the graph passes of Paddle's Fleet; they rewrite a whole program, here each block.
    """
    wanted = frozenset(patterns)
    if not wanted or wanted - set(PATTERNS):
        raise UsageError(f"patterns are {sorted(wanted)}; allowed: some of {', '.join(PATTERNS)}")
    if wanted & {"bn_act", "add_act"}:
        check_compiler("fusion of chains")
    return FusedPatterns(model, wanted)


class FusedPatterns:
    """A model with fused chains; made by `fuse_patterns`."""

    def __init__(self, model: nn.Module, patterns: frozenset[Pattern]) -> None:
        self._overrides: list[ForwardReplacement] = []
        self._found: Counter[str] = Counter()
        self._ran: Counter[str] = Counter()
        self._num_blocks = 0
        self._skipped: dict[str, str] = {}
        graphs: dict[nn.Module, fx.Graph] = {}
        for block in _blocks(model):
            try:
                graphs[block] = record(block)
            except Untraceable as reason:
                if _may_hold_chains(block):
                    self._skipped.setdefault(type(block).__name__, str(reason))
        starts: dict[nn.Module, set[Role]] = {}
        for block in graphs:
            chains = Chains(block, graphs, patterns)
            self._num_blocks += bool(chains.found)
            self._found.update(chains.found)
            for layer, role in chains.starts:
                starts.setdefault(layer, set()).add(role)
        for layer, roles in starts.items():
            call = partial(_call, layer, roles, self._count)
            self._overrides.append(ForwardReplacement(layer, call))

    def close(self) -> None:
        """Restore the model; idempotent."""
        while self._overrides:
            self._overrides.pop().remove()

    @property
    def num_chains(self) -> int:
        """Number of chains found."""
        return self._found.total()

    def report_rows(self) -> list[Row]:
        """Report how many chains were found, and which blocks were left alone."""
        found = ", ".join(f"{count} {name}" for name, count in self._found.items()) or "none found"
        blocks = f"in {self._num_blocks} blocks" if self._num_blocks else ""
        if blocks and self._ran:
            blocks += f"; {self._ran.total()} ran as one operation so far"
        skipped = "; ".join(f"{name}: {reason}" for name, reason in self._skipped.items())
        rows = [Row("fused chains", found, blocks)]
        return (
            [*rows, Row("not looked into", str(len(self._skipped)), skipped)] if skipped else rows
        )

    @property
    def ran(self) -> dict[str, int]:
        """Runs of chains as one operation, by the chain's name."""
        return dict(self._ran)

    def _count(self, name: str) -> None:
        self._ran[name] += 1


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The modules with a forward of their own, and sequences of modules."""
    for module in model.modules():
        known = has_own_forward(module) or type(module).forward is nn.Sequential.forward
        if known and "forward" not in vars(module):
            yield module


def has_own_forward(module: nn.Module) -> bool:
    """Whether its forward is none of torch's: only there a sum may be part of a chain."""
    kind = type(module)
    return not kind.__module__.startswith("torch.") and kind.forward is not nn.Module.forward


def _may_hold_chains(block: nn.Module) -> bool:
    """Whether a chain would be expected in its forward."""
    return any(isinstance(child, CHAIN_PARTS) for child in block.children())


def _call(
    layer: nn.Module,
    roles: set[Role],
    ran: Callable[[str], None],
    forward: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """A layer at the start of a chain."""
    if not kwargs and may_start(layer, roles, args):
        return forward(as_start(args[0], roles, ran))
    return forward(*args, **kwargs)
