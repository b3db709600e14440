"""What a forward keeps for backward, by block, counted without keeping it.

Never runs a backward, and never allocates what it counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from slipstream.errors import ModelError
from slipstream.memory import selective
from slipstream.memory.blocks import blocks_of
from slipstream.memory.measure import tensors
from slipstream.memory.replaced import Replaced
from slipstream.strategy import Offload
from slipstream.strategy.memory import Operation

Inputs = Mapping[str, Any]
"""Arguments of a model by name."""


@dataclass(frozen=True)
class Saved:
    """What a forward keeps for backward: which storages, each known by a number.

    Attributes:
        sizes: bytes of each.
        blocks: those that each block saves, by path.
        inputs: those of the tensors that each block is called with.
        results: those that operations in each block return, of operations that can be kept.
        elsewhere: those that are saved outside of blocks.
    """

    sizes: Mapping[int, int]
    blocks: Mapping[str, frozenset[int]]
    inputs: Mapping[str, frozenset[int]]
    results: Mapping[str, Mapping[Operation, frozenset[int]]]
    elsewhere: frozenset[int]

    def num_bytes(self, storages: Iterable[int]) -> int:
        """Of storages, each once."""
        return sum(self.sizes[storage] for storage in set(storages))

    def of(self, path: str | None) -> frozenset[int]:
        """What a block saves; None: what is saved outside of blocks."""
        return self.elsewhere if path is None else self.blocks[path]

    @property
    def total(self) -> int:
        """Bytes where everything is kept."""
        return self.num_bytes(self.elsewhere.union(*self.blocks.values()))

    @property
    def largest(self) -> int:
        """Bytes of the largest storage."""
        return max((self.sizes[s] for s in self.elsewhere.union(*self.blocks.values())), default=0)

    def kept(
        self, regions: Sequence[Sequence[str]], keep: Sequence[Operation] = ()
    ) -> frozenset[int]:
        """What is kept from forward to backward where ``regions`` of blocks are computed again but
        for the results of ``keep``.
        """
        inside = {path for region in regions for path in region}
        plain = [saved for path, saved in self.blocks.items() if path not in inside]
        inputs = [self.inputs[region[0]] for region in regions]
        return self.elsewhere.union(*plain, *inputs, self._results(inside, keep))

    def peak(
        self,
        regions: Sequence[Sequence[str]] = (),
        wish: Offload | None = None,
        keep: Sequence[Operation] = (),
    ) -> int:
        """The most bytes at a time that are saved: where backward computes a region again, with all
        that is kept for it and the regions before it; less what has left. Results of ``keep`` do
        not leave.

        Never too low for saved tensors: what is saved outside of blocks counts throughout, though
        that behind them is used up first.
        """
        parts = [*regions, *([p] for p in self.blocks if all(p not in r for r in regions))]
        order = {path: number for number, path in enumerate(self.blocks)}
        parts.sort(key=lambda part: order[part[0]])
        own = [self.inputs[p[0]] if p in regions else self.blocks[p[0]] for p in parts]
        results = [self._results(p, keep) if p in regions else frozenset() for p in parts]
        most = self.num_bytes(self.elsewhere)
        for number, part in enumerate(parts):
            here = self.elsewhere.union(*(self.blocks[path] for path in part), own[number])
            here = here.union(*results[: number + 1])
            stays = range(number) if wish is None else self._there(number, len(parts), wish)
            most = max(most, self.num_bytes(here.union(*(own[i] for i in stays))))
        return most

    def _results(self, paths: Iterable[str], keep: Sequence[Operation]) -> frozenset[int]:
        """Of these operations in these blocks."""
        found = (self.results[path].get(operation) for path in paths for operation in keep)
        return frozenset().union(*(storages for storages in found if storages is not None))

    def _there(self, number: int, count: int, wish: Offload) -> list[int]:
        """Parts that are in memory when backward is at one: fetched ahead, or never gone; in
        forward it is the one before that may still be on its way out.
        """
        first = min(number - max(wish.prefetch, 1), count - wish.keep_last)
        return list(range(max(first, 0), number + 1))


def saved_by(model: nn.Module, inputs: Inputs, blocks: Sequence[str] | None = None) -> Saved:
    """Count what ``model(**inputs)`` saves for backward, where model and inputs are.

    Nothing that is saved is held, so that it takes the memory of a forward without gradients.
    Parameters and buffers do not count. Exact: every storage once, as long as it is.

    Args:
        model: left as it is, but for what a forward changes (running statistics, random state).
        inputs: of one forward.
        blocks: paths; None: those that repeat.

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
    dtype: torch.dtype | None = None,
) -> Saved:
    """As `saved_by` in no time and no memory: all tensors are shapes, on torch's meta device.

    Exact where operations save the same there as on the model's own device.

    Args:
        dtype: of all floats; None: as the model and the inputs are.

    Raises:
        ModelError: the forward looks at values, so that shapes do not tell what it saves.
    """
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    shape = partial(_shape_of, dtype=dtype)
    shapes = {name: shape(tensor) for name, tensor in named.items()}
    given = {name: _mapped(value, shape) for name, value in inputs.items()}
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
    census = _Census(own)
    paths = blocks_of(model) if blocks is None else blocks
    around = [Replaced(model.get_submodule(path), partial(census.block, path)) for path in paths]
    try:
        with torch.enable_grad(), saved_tensors_hooks(census.pack, _never):
            run()
    finally:
        for replaced in reversed(around):
            replaced.remove()
    return census.saved()


class _Census:
    """Numbers storages as they are saved; knows each as long as it lives, and holds none."""

    def __init__(self, own: Iterable[torch.Tensor]) -> None:
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
        """Autograd keeps nothing."""
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


def _shape_of(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """A tensor without memory of the same shape and strides."""
    to = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    shape = torch.empty_like(tensor, device="meta", dtype=to)
    return shape.requires_grad_(tensor.requires_grad)


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``value`` with its tensors changed, in lists and mappings too."""
    match value:
        case torch.Tensor():
            return change(value)
        case Mapping():
            return {name: _mapped(inner, change) for name, inner in value.items()}
        case list() | tuple():
            return type(value)(_mapped(inner, change) for inner in value)
        case _:
            return value
