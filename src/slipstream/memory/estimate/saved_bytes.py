"""What a forward keeps for backward, by block, counted without keeping it.

Never runs a backward, and never allocates what it counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from slipstream.errors import ModelError, UsageError
from slipstream.memory.blocks import blocks_of
from slipstream.memory.estimate.peak import Saved
from slipstream.memory.forward_override import ForwardOverride
from slipstream.memory.recompute import selective
from slipstream.pytree import mapped, tensors
from slipstream.strategy.memory import Operation

Inputs = Mapping[str, Any]
"""Arguments of a model by name."""


def saved_by(model: nn.Module, inputs: Inputs, blocks: Sequence[str] | None = None) -> Saved:
    """Count what ``model(**inputs)`` saves for backward, where model and inputs are.

    Nothing that is saved is held, so that it takes the memory of a forward without gradients.
    Parameters and buffers do not count. Exact: every storage once, as long as it is; but what a
    model passes to ``torch.utils.checkpoint`` in its own code is not seen.

    Args:
        model: left as it is, but for what a forward changes (running statistics, random state).
        inputs: of one forward.
        blocks: paths; None: those that repeat.

    Raises:
        UsageError: recomputation or offload is installed, which hides what is saved.

    Example:
        >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
        >>> saved = saved_by(model, {"input": torch.ones(2, 8)})
        >>> saved.total, saved.peak(regions=[["0"], ["1"], ["2"]])
        (256, 256)
    """
    own = [*model.parameters(), *model.buffers()]
    return _counted(model, own, lambda: model(**inputs), blocks)


def saved_on_meta(
    model: nn.Module,
    inputs: Inputs,
    blocks: Sequence[str] | None = None,
) -> Saved:
    """As `saved_by` in no time and no memory: all tensors are shapes, on torch's meta device.

    Exact where operations save the same there as on the model's own device.

    Raises:
        ModelError: the forward looks at values, or runs under autocast, which leaves shapes as they
            are: these do not tell what it saves.
        UsageError: as of `saved_by`.
    """
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    shapes = {name: _shape_of(tensor) for name, tensor in named.items()}
    given = {name: mapped(value, _shape_of) for name, value in inputs.items()}
    try:
        return _counted(
            model,
            list(shapes.values()),
            lambda: torch.func.functional_call(model, shapes, (), given),
            blocks,
        )
    except (NotImplementedError, RuntimeError) as error:
        raise ModelError(
            f"what the forward of {type(model).__name__} saves cannot be told from shapes: "
            f"{str(error).splitlines()[0]}; run it on real tensors: saved_by(model, inputs)"
        ) from error


def _counted(
    model: nn.Module,
    own: Iterable[torch.Tensor],
    run: Callable[[], object],
    blocks: Sequence[str] | None,
) -> Saved:
    """Count what ``run`` saves, by the blocks of ``model``, but for ``own``."""
    _check_plain(model)
    device = next((p.device.type for p in model.parameters()), "cpu")
    census = _Census(own, device)
    paths = blocks_of(model) if blocks is None else blocks
    around = [
        ForwardOverride(model.get_submodule(path), partial(census.block, path)) for path in paths
    ]
    try:
        with torch.enable_grad(), saved_tensors_hooks(census.pack, _never):
            run()
    finally:
        for replaced in reversed(around):
            replaced.remove()
    return census.saved()


def _check_plain(model: nn.Module) -> None:
    """Refuse a model whose saved tensors are seen by hooks inside of those that count.

    Raises:
        UsageError: names the module and the way out.
    """
    for path, module in model.named_modules():
        if isinstance(vars(module).get("forward"), ForwardOverride):
            raise UsageError(
                f"what {path or 'the model'} saves cannot be counted while recomputation or "
                "offload is installed, which hides it; count before, or close() it first, and say "
                "what it does: regions=recomputed.regions, wish=Offload(...)"
            )
        if getattr(module, "gradient_checkpointing", False) is True:
            raise UsageError(
                f"what {path or 'the model'} saves cannot be counted while it computes activations "
                "again itself; call model.gradient_checkpointing_disable(), and say what is "
                "computed again: regions=[[path], ...]"
            )


class _Census:
    """Numbers storages as they are saved; knows each as long as it lives, and holds none.

    Args:
        own: tensors that do not count.
        device: kind of that of the model.
    """

    def __init__(self, own: Iterable[torch.Tensor], device: str) -> None:
        self._device = device
        self._own = WeakSet(tensor.untyped_storage() for tensor in own)
        self._numbers: WeakKeyDictionary[torch.UntypedStorage, int] = WeakKeyDictionary()
        self._sizes: list[int] = []
        self._blocks: dict[str, set[int]] = {}
        self._inputs: dict[str, set[int]] = {}
        self._results: dict[str, dict[Operation, set[int]]] = {}
        self._elsewhere: set[int] = set()
        self._current = self._elsewhere

    def block(self, path: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """In the place of a block's forward."""
        self._inputs.setdefault(path, set()).update(self._numbers_of((args, kwargs)))
        results = self._results.setdefault(path, {})

        def see(operation: Operation, result: Any) -> None:
            results.setdefault(operation, set()).update(self._numbers_of(result))

        outer, self._current = self._current, self._blocks.setdefault(path, set())
        try:
            with selective.watched(see):
                return forward(*args, **kwargs)
        finally:
            self._current = outer

    def pack(self, tensor: torch.Tensor) -> None:
        """Autograd keeps nothing.

        Raises:
            ModelError: autocast does not reach shapes.
        """
        if tensor.is_meta and self._device != "meta" and torch.is_autocast_enabled(self._device):
            raise ModelError(
                "what a forward saves under autocast cannot be told from shapes, which it leaves "
                "as they are; run it on real tensors: saved_by(model, inputs)"
            )
        if (number := self._number(tensor)) is not None:
            self._current.add(number)

    def saved(self) -> Saved:
        """What was counted."""
        return Saved(
            dict(enumerate(self._sizes)),
            {path: frozenset(found) for path, found in self._blocks.items()},
            {path: frozenset(found) for path, found in self._inputs.items()},
            {
                path: {operation: frozenset(numbers) for operation, numbers in found.items()}
                for path, found in self._results.items()
            },
            frozenset(self._elsewhere),
        )

    def _numbers_of(self, value: Any) -> set[int]:
        """Of the tensors in there."""
        numbers = map(self._number, tensors(value))
        return {number for number in numbers if number is not None}

    def _number(self, tensor: torch.Tensor) -> int | None:
        if tensor.layout is not torch.strided:
            return None
        storage = tensor.untyped_storage()
        if storage in self._own:
            return None
        if storage not in self._numbers:
            self._numbers[storage] = len(self._sizes)
            self._sizes.append(storage.nbytes())
        return self._numbers[storage]


def _never(packed: object) -> torch.Tensor:
    raise AssertionError("a forward that is only counted has no backward")


def _shape_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without memory of the same shape and strides."""
    shape = torch.empty_like(tensor, device="meta")
    return shape.requires_grad_(tensor.requires_grad)
