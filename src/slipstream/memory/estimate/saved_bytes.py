"""Count what a forward saves for backward, by block, without saving it.

Runs no backward, and takes no more memory than a forward without gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from slipstream.errors import ModelError, UsageError
from slipstream.memory.blocks import blocks_of
from slipstream.memory.estimate.saved_storages import SavedStorages
from slipstream.memory.forward_override import ForwardOverride, is_wrapped
from slipstream.memory.recompute import selective
from slipstream.pytree import mapped, tensors
from slipstream.strategy.memory import KeptOperation

ModelInputs = Mapping[str, Any]
"""Arguments of a model by name."""


def saved_by(
    model: nn.Module, inputs: ModelInputs, blocks: Sequence[str] | None = None
) -> SavedStorages:
    """Count what ``model(**inputs)`` saves for backward, on the device where both are.

    Exact: each storage counts once and in full. Parameters and buffers do not count. What the
    model's own code passes to ``torch.utils.checkpoint`` is not seen.

    Args:
        model: changed only as by any forward (running statistics, random state).
        inputs: of one forward.
        blocks: paths; None: the repeated blocks.

    Raises:
        UsageError: recomputation or offload is installed; they hide what is saved.

    Example:
        >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
        >>> saved = saved_by(model, {"input": torch.ones(2, 8)})
        >>> saved.peak(), saved.peak(regions=[["0"], ["1"], ["2"]])
        (256, 256)
    """
    state = [*model.parameters(), *model.buffers()]
    return _counted(model, state, lambda: model(**inputs), blocks)


def saved_on_meta(
    model: nn.Module, inputs: ModelInputs, blocks: Sequence[str] | None = None
) -> SavedStorages:
    """Count as `saved_by` does, with tensors on torch's meta device: no computation, no memory.

    Exact if operations save the same there as on the model's own device.

    Raises:
        ModelError: the forward reads values of tensors, or runs under autocast, which does not cast
            meta tensors.
        UsageError: see `saved_by`.
    """
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    state = {name: _on_meta(tensor) for name, tensor in named.items()}
    meta_inputs = {name: mapped(value, _on_meta) for name, value in inputs.items()}
    try:
        run = partial(torch.func.functional_call, model, state, (), meta_inputs)
        return _counted(model, state.values(), run, blocks)
    except (NotImplementedError, RuntimeError) as error:
        raise ModelError(
            f"what the forward of {type(model).__name__} saves cannot be counted on the meta "
            f"device: {str(error).splitlines()[0]}; use real tensors: saved_by(model, inputs)"
        ) from error


def _counted(
    model: nn.Module, state: Iterable[Tensor], run: Callable[[], Any], blocks: Sequence[str] | None
) -> SavedStorages:
    """Count what ``run`` saves, by the blocks of ``model``, without the tensors in ``state``."""
    _check_plain(model)
    device = next((p.device.type for p in model.parameters()), "cpu")
    counter = _Counter(state, device)
    overrides = [
        ForwardOverride(model.get_submodule(path), partial(counter.block_forward, path))
        for path in (blocks_of(model) if blocks is None else blocks)
    ]
    try:
        with torch.enable_grad(), saved_tensors_hooks(counter.pack, _no_backward):
            run()
    finally:
        for override in reversed(overrides):
            override.remove()
    return counter.saved


def _check_plain(model: nn.Module) -> None:
    """Refuse a model with other hooks on saved tensors: they would hide these from the counter.

    Raises:
        UsageError: names the module and the fix.
    """
    for path, module in model.named_modules():
        if is_wrapped(module):
            raise UsageError(
                f"what {path or 'the model'} saves cannot be counted while recomputation or "
                "offload is installed, which hides it; count before installing it or after "
                "close(), and describe it: regions=recomputed.regions, offload=OffloadConfig(...)"
            )
        if getattr(module, "gradient_checkpointing", False) is True:
            raise UsageError(
                f"what {path or 'the model'} saves cannot be counted while it uses its own "
                "gradient checkpointing; call model.gradient_checkpointing_disable(), and describe "
                "what is recomputed: regions=[[path], ...]"
            )


class _Counter:
    """Numbers storages as they are saved. References them weakly, so that none is kept alive.

    Args:
        state: parameters and buffers, which do not count.
        device: type of the model's device.

    Attributes:
        saved: what was counted so far.
    """

    def __init__(self, state: Iterable[Tensor], device: str) -> None:
        self._device = device
        self._state = WeakSet(tensor.untyped_storage() for tensor in state)
        self._numbers: WeakKeyDictionary[torch.UntypedStorage, int] = WeakKeyDictionary()
        self.saved = SavedStorages()
        self._current = self.saved.elsewhere  # where `pack` adds to

    def block_forward(
        self, path: str, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """The forward of a block, which notes its inputs, results and saved tensors."""
        self.saved.inputs.setdefault(path, set()).update(self._numbers_in((args, kwargs)))
        results = self.saved.results.setdefault(path, {})

        def see(operation: KeptOperation, result: Any) -> None:
            results.setdefault(operation, set()).update(self._numbers_in(result))

        outer, self._current = self._current, self.saved.blocks.setdefault(path, set())
        try:
            with selective.WatchOperations(see):
                return forward(*args, **kwargs)
        finally:
            self._current = outer

    def pack(self, tensor: Tensor) -> None:
        """Count a tensor that autograd saves; autograd keeps None instead.

        Raises:
            ModelError: a meta tensor is saved under autocast, which does not cast it.
        """
        if tensor.is_meta and self._device != "meta" and torch.is_autocast_enabled(self._device):
            raise ModelError(
                "what a forward saves under autocast cannot be counted on the meta device, where "
                "nothing is cast; use real tensors: saved_by(model, inputs)"
            )
        if (number := self._number(tensor)) is not None:
            self._current.add(number)

    def _numbers_in(self, value: Any) -> set[int]:
        """Numbers of the storages of all tensors in a nested value."""
        return {n for n in map(self._number, tensors(value)) if n is not None}

    def _number(self, tensor: Tensor) -> int | None:
        """The number of a tensor's storage; None if it does not count."""
        if tensor.layout is not torch.strided:
            return None
        storage = tensor.untyped_storage()
        if storage in self._state:
            return None
        if storage not in self._numbers:
            self._numbers[storage] = len(self.saved.sizes)
            self.saved.sizes.append(storage.nbytes())
        return self._numbers[storage]


def _no_backward(packed: object) -> Tensor:
    raise AssertionError("a counted forward has no backward")


def _on_meta(tensor: Tensor) -> Tensor:
    """A tensor of the same shape and strides on the meta device."""
    shape = torch.empty_like(tensor, device="meta")
    return shape.requires_grad_(tensor.requires_grad)
