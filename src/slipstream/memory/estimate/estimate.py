"""What training takes before it runs: parameters, gradients, optimizer and activations, in bytes.

Never trains: a forward of two samples and one of three tell the rest; one sample alone may take
less than its share, as tensors with an axis of length one need no copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from slipstream.errors import ModelError
from slipstream.memory.estimate.peak import Saved
from slipstream.memory.estimate.saved_bytes import Inputs, saved_by, saved_on_meta
from slipstream.strategy import Offload
from slipstream.strategy.memory import Operation

Regions = Sequence[Sequence[str]]


class Affine(NamedTuple):
    """Bytes that grow with the batch: ``fixed + each * batch``."""

    fixed: int
    each: int

    def at(self, batch: int) -> int:
        """Bytes of a batch of so many samples."""
        return self.fixed + self.each * batch


@dataclass(frozen=True)
class Estimate:
    """What a rank takes in training.

    Attributes:
        parameters: bytes, with buffers, and with fp32 masters where there are any.
        gradients: bytes of those of trainable parameters.
        optimizer: bytes of its state.
        two: what a forward of two samples saves.
        three: what one of three samples saves.
    """

    parameters: int
    gradients: int
    optimizer: int
    two: Saved
    three: Saved

    @property
    def state(self) -> int:
        """Bytes that do not depend on the batch."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def blocks(self) -> list[str]:
        """Paths of the repeated blocks."""
        return list(self.two.blocks)

    def of_block(self, path: str | None) -> Affine:
        """What a block saves; None: what is saved outside of blocks."""
        return _affine(*(s.num_bytes(s.of(path)) for s in (self.two, self.three)))

    def activations(
        self,
        regions: Regions = (),
        config: Offload | None = None,
        keep: Sequence[Operation] = (),
    ) -> Affine:
        """The most saved bytes at a time where ``regions`` of blocks are computed again but for the
        results of ``keep``, and what is kept leaves as ``config`` says. Exact as `Saved.peak` is,
        and as long as it grows by the same for each sample.
        """
        return _affine(*(saved.peak(regions, config, keep) for saved in (self.two, self.three)))

    @property
    def passing(self) -> Affine:
        """What backward needs besides: a gradient as large as the largest tensor saved. A rule of
        thumb, rather too much: most gradients come when part of what is saved has gone.
        """
        return _affine(self.two.largest, self.three.largest)

    def total(
        self,
        regions: Regions = (),
        config: Offload | None = None,
        keep: Sequence[Operation] = (),
    ) -> Affine:
        """All of it. Left out are buffers of libraries and what the allocator loses."""
        saved, passing = self.activations(regions, config, keep), self.passing
        return Affine(self.state + saved.fixed + passing.fixed, saved.each + passing.each)

    def max_batch(
        self,
        memory_bytes: int,
        regions: Regions = (),
        config: Offload | None = None,
        keep: Sequence[Operation] = (),
    ) -> int:
        """The largest batch that fits; 0: none does.

        Raises:
            ModelError: three samples save no more than two.
        """
        total = self.total(regions, config, keep)
        if total.each <= 0:
            raise ModelError(
                "a forward of three samples saves no more than one of two, so that any batch would "
                "fit; the inputs must be of as many samples as are asked for, and something trained"
            )
        return max((memory_bytes - total.fixed) // total.each, 0)


def estimate(
    model: nn.Module,
    inputs_of: Callable[[int], Inputs],
    optimizer: torch.optim.Optimizer | None = None,
    *,
    blocks: Sequence[str] | None = None,
) -> Estimate:
    """Estimate what training ``model`` takes, from shapes where they tell, else from two forwards.

    In the precision that is installed: `half_weights` is told from shapes, masters included;
    `autocast` from forwards on the model's own device, as it chooses by device what it casts.

    Args:
        model: in training mode.
        inputs_of: arguments by name, for so many samples.
        optimizer: None: without.
        blocks: paths; None: those that repeat.

    Raises:
        ModelError: the optimizer cannot be estimated.
        UsageError: recomputation or offload is installed, which hides what is saved; call this
            before, and ask `Estimate.max_batch` for them.

    Example:
        >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
        >>> found = estimate(model, lambda n: {"input": torch.ones(n, 8)})
        >>> found.state, found.activations(), found.activations(regions=[["0"], ["1"], ["2"]])
        (1728, Affine(fixed=0, each=128), Affine(fixed=0, each=128))
    """

    def saved(batch: int) -> Saved:
        try:
            return saved_on_meta(model, inputs_of(batch), blocks)
        except ModelError:
            return saved_by(model, inputs_of(batch), blocks)

    return Estimate(*state_bytes(model, optimizer), saved(2), saved(3))


def state_bytes(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> tuple[int, int, int]:
    """Bytes of the parameters (with buffers and masters), of their gradients, and of the state of
    ``optimizer``: exact.

    A parameter whose gradients are wider than itself (``grad_dtype``) has a master as wide.

    Example:
        >>> state_bytes(nn.Linear(9, 10))
        (400, 400, 0)
    """
    held = [*model.parameters(), *model.buffers()]
    wide = {p: p.numel() * _update_dtype(p).itemsize for p in model.parameters()}
    return (
        sum(tensor.nbytes for tensor in held)
        + sum(num_bytes for p, num_bytes in wide.items() if _update_dtype(p) != p.dtype),
        sum(num_bytes for p, num_bytes in wide.items() if p.requires_grad),
        optimizer_bytes(optimizer) if optimizer is not None else 0,
    )


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes that the state of ``optimizer`` takes after its first update: exact, without memory.

    A twin of it makes an update of shapes, on the meta device.

    Raises:
        ModelError: that cannot be done with this optimizer.

    Example:
        >>> parameter = nn.Parameter(torch.ones(1000))
        >>> optimizer_bytes(torch.optim.SGD([parameter], momentum=0.9))
        4000
    """
    groups = []
    for group in optimizer.param_groups:
        shapes = [
            torch.empty_like(p, device="meta", dtype=_update_dtype(p)).requires_grad_()
            for p in group["params"]
        ]
        for shape, parameter in zip(shapes, group["params"], strict=True):
            shape.grad = torch.empty_like(shape) if parameter.requires_grad else None
        plain: dict[str, Any] = {
            name: False for name in ("fused", "foreach", "capturable") if name in group
        }
        groups.append({**group, **plain, "params": shapes})
    try:
        twin = type(optimizer)(groups, lr=groups[0]["lr"])  # type: ignore[call-arg]
        twin.step()
    except (NotImplementedError, RuntimeError, TypeError) as error:
        raise ModelError(
            f"the state of {type(optimizer).__name__} cannot be told from shapes: {error}; make "
            "one update, and add up what optimizer.state holds"
        ) from error
    kept = [value for state in twin.state.values() for value in state.values()]
    return sum(value.nbytes for value in kept if isinstance(value, torch.Tensor))


def _update_dtype(parameter: torch.Tensor) -> torch.dtype:
    """In which an optimizer works on a parameter: that of its gradients."""
    return parameter.grad_dtype or parameter.dtype


def _affine(two: int, three: int) -> Affine:
    """The line through the bytes of two samples and of three."""
    return Affine(3 * two - 2 * three, three - two)
