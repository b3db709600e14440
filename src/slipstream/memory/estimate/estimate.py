"""Estimate what training takes, before it runs: parameters, gradients, optimizer, activations.

Activations follow from a forward of two samples and one of three. (One sample may take less than
its share: tensors with an axis of length one need no copies.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from slipstream.errors import ModelError
from slipstream.memory.estimate.saved_bytes import ModelInputs, saved_by, saved_on_meta
from slipstream.memory.estimate.saved_storages import SavedStorages
from slipstream.strategy import OffloadConfig
from slipstream.strategy.memory import KeptOperation

Regions = Sequence[Sequence[str]]
"""Paths of the blocks of each region that is recomputed."""


class Affine(NamedTuple):
    """Bytes as a function of the batch: ``fixed + each * batch``."""

    fixed: int
    each: int

    def at(self, batch: int) -> int:
        """Bytes of a batch of so many samples."""
        return self.fixed + self.each * batch


@dataclass(frozen=True)
class Estimate:
    """The memory that one rank needs for training.

    Attributes:
        parameters: bytes of parameters and buffers, and of fp32 masters if there are any.
        gradients: bytes of the gradients of trainable parameters.
        optimizer: bytes of the optimizer's state.
        two: what a forward of two samples saves.
        three: what a forward of three samples saves.
    """

    parameters: int
    gradients: int
    optimizer: int
    two: SavedStorages
    three: SavedStorages

    @property
    def state(self) -> int:
        """Bytes that do not depend on the batch."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def blocks(self) -> list[str]:
        """Paths of the blocks."""
        return list(self.two.blocks)

    def of_block(self, path: str | None) -> Affine:
        """Bytes that a block saves; None: that are saved outside of blocks."""
        return _affine(self.two.num_bytes(path), self.three.num_bytes(path))

    def activations(
        self,
        regions: Regions = (),
        offload: OffloadConfig | None = None,
        keep: Sequence[KeptOperation] = (),
    ) -> Affine:
        """Peak bytes of saved tensors with recomputed ``regions``, ``offload`` and ``keep``; see
        `SavedStorages.peak`. Exact if each sample adds the same.
        """
        two, three = (saved.peak(regions, offload, keep) for saved in (self.two, self.three))
        return _affine(two, three)

    @property
    def passing(self) -> Affine:
        """Bytes that backward needs besides: one gradient as large as the largest saved tensor.

        A rule of thumb, rather too high: most gradients are computed after some of what was saved
        has been freed.
        """
        return _affine(self.two.largest, self.three.largest)

    def total(
        self,
        regions: Regions = (),
        offload: OffloadConfig | None = None,
        keep: Sequence[KeptOperation] = (),
    ) -> Affine:
        """All bytes, without buffers of libraries and what the allocator wastes."""
        saved, passing = self.activations(regions, offload, keep), self.passing
        return Affine(self.state + saved.fixed + passing.fixed, saved.each + passing.each)

    def max_batch(
        self,
        memory_bytes: int,
        regions: Regions = (),
        offload: OffloadConfig | None = None,
        keep: Sequence[KeptOperation] = (),
    ) -> int:
        """The largest batch that fits into ``memory_bytes``; 0: none does.

        Raises:
            ModelError: three samples save no more than two.
        """
        total = self.total(regions, offload, keep)
        if total.each <= 0:
            raise ModelError(
                "a forward of three samples saves no more than one of two, so any batch would fit; "
                "inputs_of(n) must return n samples, and the model must have trainable parameters"
            )
        return max((memory_bytes - total.fixed) // total.each, 0)


def estimate(
    model: nn.Module,
    inputs_of: Callable[[int], ModelInputs],
    optimizer: Optimizer | None = None,
) -> Estimate:
    """Estimate what training ``model`` takes: on the meta device if possible, else from two real
    forwards.

    Installed precision counts: `half_weights` on the meta device, masters included; `autocast` from
    real forwards, as it chooses what to cast by device.

    Args:
        model: in training mode.
        inputs_of: returns the model's keyword arguments for so many samples.
        optimizer: None: none.

    Raises:
        ModelError: the optimizer cannot be estimated.
        UsageError: recomputation or offload is installed, which hides what is saved; call this
            before, and describe them to `Estimate.max_batch`.

    Example:
        >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
        >>> found = estimate(model, lambda n: {"input": torch.ones(n, 8)})
        >>> found.state, found.activations(), found.activations(regions=[["0"], ["1"], ["2"]])
        (1728, Affine(fixed=0, each=128), Affine(fixed=0, each=128))
    """

    def saved(batch: int) -> SavedStorages:
        try:
            return saved_on_meta(model, inputs_of(batch))
        except ModelError:
            return saved_by(model, inputs_of(batch))

    return Estimate(*state_bytes(model, optimizer), saved(2), saved(3))


def state_bytes(model: nn.Module, optimizer: Optimizer | None = None) -> tuple[int, int, int]:
    """Bytes of parameters (with buffers and masters), of gradients, and of the state of
    ``optimizer``. Exact.

    A parameter whose gradient has another dtype (``grad_dtype``) has a master of that dtype.

    Example:
        >>> state_bytes(nn.Linear(9, 10))
        (400, 400, 0)
    """
    parameters = list(model.parameters())
    update_bytes = {p: p.numel() * _update_dtype(p).itemsize for p in parameters}
    masters = sum(update_bytes[p] for p in parameters if _update_dtype(p) != p.dtype)
    return (
        sum(tensor.nbytes for tensor in (*parameters, *model.buffers())) + masters,
        sum(update_bytes[p] for p in parameters if p.requires_grad),
        optimizer_bytes(optimizer) if optimizer is not None else 0,
    )


def optimizer_bytes(optimizer: Optimizer) -> int:
    """Bytes of the state of ``optimizer`` after its first update. Exact; allocates nothing.

    A new optimizer of the same type makes one update on the meta device.

    Raises:
        ModelError: the optimizer cannot work on the meta device.

    Example:
        >>> parameter = nn.Parameter(torch.ones(1000))
        >>> optimizer_bytes(torch.optim.SGD([parameter], momentum=0.9))
        4000
    """
    groups = []
    for group in optimizer.param_groups:
        on_meta = []
        for parameter in group["params"]:
            dtype = _update_dtype(parameter)
            twin = torch.empty_like(parameter, device="meta", dtype=dtype).requires_grad_()
            twin.grad = torch.empty_like(twin) if parameter.requires_grad else None
            on_meta.append(twin)
        # The plain implementation, as the others accept only certain devices.
        plain = dict.fromkeys({"fused", "foreach", "capturable"} & group.keys(), False)
        groups.append({**group, **plain, "params": on_meta})
    given = {"lr": groups[0]["lr"]} if "lr" in groups[0] else {}
    try:
        meta_optimizer = type(optimizer)(groups, **given)
        meta_optimizer.step()
    except Exception as error:  # its class may take, and refuse, anything
        raise ModelError(
            f"the state of {type(optimizer).__name__} cannot be computed on the meta device: "
            f"{error}; make one update, and add up the bytes of optimizer.state"
        ) from error
    states = [state for state in meta_optimizer.state.values() if isinstance(state, dict)]
    values = [value for state in states for value in state.values()]
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))


def _update_dtype(parameter: torch.Tensor) -> torch.dtype:
    """The dtype in which an optimizer updates a parameter: that of its gradient."""
    return parameter.grad_dtype or parameter.dtype


def _affine(two: int, three: int) -> Affine:
    """The line through the bytes of two and of three samples."""
    return Affine(3 * two - 2 * three, three - two)
