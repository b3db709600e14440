"""Activations of blocks leave in forward and are back when backward needs them.

Never copies by itself: a store does; and never says which blocks: the policy does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Self
from weakref import ReferenceType, WeakKeyDictionary, WeakValueDictionary, ref

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from slipstream.errors import StrategyError, UsageError
from slipstream.memory.blocks import blocks_of, matching
from slipstream.memory.disk_store import DiskStore
from slipstream.memory.free_space import free_disk_bytes, free_host_bytes, share
from slipstream.memory.host_store import HostStore
from slipstream.memory.policy import Policy
from slipstream.memory.replaced import Replaced
from slipstream.memory.store import Store, Traffic
from slipstream.strategy import Offload


def offload(
    model: nn.Module,
    wish: Offload | None = None,
    *,
    local_ranks: int = 1,
    rank: int = 0,
    store: Store | None = None,
) -> Offloader:
    """Move what blocks of ``model`` save for backward out of the device's memory, and back in time.

    Each block is one that repeats in the model, or a module that ``wish`` names. What it saves in
    forward leaves while the next one computes, and comes back while the one behind it goes
    backward. Together with recomputation (which must come first), only the blocks' inputs are
    saved, and leave. Storages move as a whole and once, however many tensors share them.
    Parameters, buffers, small tensors and what is no plain dense tensor stay.

    Exactness: bitwise; the same bits come back. As in torch, backward raises a RuntimeError where a
    saved tensor was changed in place since, as long as that tensor is known anywhere.

    Args:
        model: on one device.
        wish: what goes where; None: the defaults.
        local_ranks: how many processes on this host do so: each takes its share of what is free.
        rank: of this process, for errors.
        store: another place than ``wish`` names; the offloader closes it.

    Raises:
        StrategyError: there is nothing that repeats, a pattern matches nothing, all blocks would
            stay, or the device's memory is the host's own.
        OffloadError: the place is not there or too small; also later, when it is full.

    Reference: torchtune's and Megatron-LM's activation offloading.

    Example:
        >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
        >>> with offload(model, Offload(to="disk", min_bytes=0)) as offloader:
        ...     model(torch.ones(4, 8)).sum().backward()
        >>> offloader.traffic.bytes_out == offloader.traffic.bytes_back > 0
        True
    """
    wish = Offload() if wish is None else wish
    blocks = offloaded_blocks(model, wish)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if store is None:
        store = _store(wish, device, local_ranks, rank)
    policy = Policy(wish.keep_last, wish.prefetch)
    return Offloader(blocks, policy, store, device, wish.min_bytes)


def offloaded_blocks(model: nn.Module, wish: Offload) -> dict[str, nn.Module]:
    """The blocks that ``wish`` speaks of, by path, in the order of the model; those stay, too,
    that ``keep_last`` keeps.

    Raises:
        StrategyError: as of `offload`.
    """
    device = next((p.device.type for p in model.parameters()), "cpu")
    if wish.to == "host" and device == "cpu":
        raise StrategyError(
            "memory.offload to host: the model is on the CPU, whose activations are in the host's "
            "memory already; use {to: disk}, or move the model to a GPU before"
        )
    if wish.modules is None:
        paths = blocks_of(model)
    else:
        paths = matching(model, wish.modules, "memory.offload.modules")
    if not paths:
        raise StrategyError(
            f"memory.offload: {type(model).__name__} has no repeated blocks; name its modules: "
            "memory.offload.modules"
        )
    if wish.keep_last >= len(paths):
        raise StrategyError(
            f"memory.offload.keep_last {wish.keep_last}: the model has {len(paths)} blocks, so "
            f"nothing would leave; allowed: at most {len(paths) - 1}"
        )
    return {path: model.get_submodule(path) for path in paths}


def _store(wish: Offload, device: torch.device, local_ranks: int, rank: int) -> Store:
    """The place that ``wish`` names; it takes no more than its share of what is free."""
    if wish.to == "host":
        return HostStore(device, share(free_host_bytes(), local_ranks), rank)
    budget = share(free_disk_bytes(wish.folder), local_ranks)
    return DiskStore(wish.folder, budget, rank)


class Offloader:
    """What `offload` has put around a model; ``close`` takes it off. Also a context manager.

    Several forwards may go before a backward, a graph may be used twice or never.

    """

    def __init__(
        self,
        blocks: Mapping[str, nn.Module],
        policy: Policy,
        store: Store,
        device: torch.device,
        min_bytes: int,
    ) -> None:
        self._policy, self._store, self._device, self._min = policy, store, device, min_bytes
        self._paths = tuple(blocks)
        self._saving = set(range(len(blocks)))  # positions of those that save anything
        self._pass = _Pass()
        self._last: _Call | None = None  # whose tensors are on their way out
        self._reached: ReferenceType[_Call] = ref(_Call("", 0, self._pass))  # dead already
        self._known: WeakKeyDictionary[Any, ReferenceType[_Away]] = WeakKeyDictionary()
        self._closed = False
        self._around = [
            Replaced(module, partial(self._forward, position, path, module))
            for position, (path, module) in enumerate(blocks.items())
        ]

    @property
    def blocks(self) -> list[str]:
        """Paths of the blocks whose activations leave, as far as is known yet."""
        return [self._paths[i] for i in sorted(self._saving) if self._leaves(i)]

    @property
    def traffic(self) -> Traffic:
        """Bytes moved so far, and the time for which the training waited for them."""
        return self._store.traffic

    @property
    def reserved_bytes(self) -> int:
        """What the store takes up, of host memory or disk."""
        return self._store.reserved_bytes

    def close(self) -> None:
        """Take everything off the model; what is away is lost, so no backward may be pending."""
        if self._closed:
            return
        self._closed = True
        for replaced in reversed(self._around):
            replaced.remove()
        self._last = None
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Forward.

    def _forward(
        self,
        position: int,
        path: str,
        module: nn.Module,
        forward: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """A block's forward, in which autograd saves what `_pack` makes of tensors."""
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        call = self._begin(position, path)
        own = {t.untyped_storage() for t in (*module.parameters(), *module.buffers())}
        pack = partial(self._pack, call, own) if self._leaves(position) else partial(_Kept, call)
        with saved_tensors_hooks(pack, self._unpack):
            result = forward(*args, **kwargs)
        # One block is under way while the next computes: its memory is free from here on.
        if self._last is not None:
            self._last.settle(self._store)
        self._last = call
        return result

    def _leaves(self, position: int) -> bool:
        return self._policy.leaves(position, self._saving)

    def _begin(self, position: int, path: str) -> _Call:
        """A block is called, maybe as the first of a pass."""
        last = self._pass
        if position <= last.position:
            if last.position == len(self._paths) - 1:  # it was a whole one
                self._saving = last.saving or self._saving
            self._pass = _Pass()
        self._pass.position = position
        return _Call(path, position, self._pass)

    def _pack(self, call: _Call, own: set[Any], tensor: torch.Tensor) -> _Kept | _Sent:
        """What autograd is to keep in the place of ``tensor``."""
        if not self._may_leave(tensor):
            return _Kept(call, tensor)
        storage = tensor.untyped_storage()
        if storage in own or storage.nbytes() < self._min:
            return _Kept(call, tensor)
        known = self._known.get(storage)
        away = known() if known is not None else None
        if away is None or away.version != tensor._version:
            away = _Away(self._store, call, tensor)
            self._known[storage] = ref(away)
        return _Sent(call, tensor, away)

    def _may_leave(self, tensor: torch.Tensor) -> bool:
        """Whether it is a plain dense tensor, whose bytes are all there is to it."""
        plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
        return (
            plain
            and tensor.device == self._device
            and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        )

    # Backward.

    def _unpack(self, packed: _Kept | _Sent) -> torch.Tensor:
        """The tensor again; the first one of a block fetches those of the blocks before it."""
        call = packed.call
        if self._closed and isinstance(packed, _Sent):
            raise UsageError(
                f"backward through {call.path} after its activations were given up: close() the "
                "offloader, or the session, after the last backward"
            )
        if self._reached() is not call:
            self._reached = ref(call)
            earlier = dict(call.within.away)
            for position in self._policy.ahead(call.position, earlier):
                earlier[position].fetch(self._store)
        return packed.tensor()


class _Pass:
    """One forward of the model: what its blocks have sent away, as long as something needs it."""

    def __init__(self) -> None:
        self.position = -1  # of the last call
        self.saving: set[int] = set()
        self.away: WeakValueDictionary[int, _Call] = WeakValueDictionary()


class _Call:
    """One forward of a block, and what it has sent away."""

    def __init__(self, path: str, position: int, within: _Pass) -> None:
        self.path, self.position, self.within = path, position, within
        self.sent: list[ReferenceType[_Away]] = []  # weak: autograd alone says what is needed

    def settle(self, store: Store) -> None:
        """What it has sent no longer takes up the device's memory."""
        for away in self._alive():
            away.settle(store)

    def fetch(self, store: Store) -> None:
        """Begin to bring everything back, in the order in which backward needs it."""
        for away in reversed(self._alive()):
            if away.raw is None:
                store.fetch(away.ticket)

    def _alive(self) -> list[_Away]:
        return [away for weak in self.sent if (away := weak()) is not None]


class _Away:
    """A storage that has left, for all tensors that share it."""

    def __init__(self, store: Store, call: _Call, tensor: torch.Tensor) -> None:
        self._store, self.version = store, tensor._version
        self._original: torch.Tensor | None = tensor.detach()  # knows of changes while it leaves
        self.ticket = store.put(_bytes_of(tensor), call.path)
        self.users = 0  # tensors that were saved
        self._served = 0  # of them since it is back
        self.raw: torch.Tensor | None = None
        self.changed = False
        call.sent.append(ref(self))
        call.within.away[call.position] = call

    def settle(self, store: Store) -> None:
        """It no longer takes up memory; what was changed while it was copied is no good."""
        store.settle(self.ticket)
        self._check()
        self._original = None

    def take(self) -> torch.Tensor:
        """Its bytes; kept until all who share it have them."""
        self._check()
        if self.raw is None:
            self.raw, self._served = self._store.take(self.ticket), 0
        raw = self.raw
        self._served += 1
        if self._served >= self.users:
            self.raw = None
        return raw

    def _check(self) -> None:
        if self._original is not None and self._original._version != self.version:
            self.changed = True

    def __del__(self) -> None:
        if hasattr(self, "ticket"):  # the store may have refused it
            self._store.drop(self.ticket)


class _Kept:
    """A tensor that stays."""

    def __init__(self, call: _Call, tensor: torch.Tensor) -> None:
        call.within.saving.add(call.position)
        # Detached, for a tensor that holds its own graph would never be freed.
        self.call, self._tensor, self._version = call, tensor.detach(), tensor._version

    def tensor(self) -> torch.Tensor:
        if self._tensor._version != self._version:
            raise _changed(self._tensor.shape, self.call.path)
        return self._tensor


class _Sent:
    """A tensor whose storage has left: how it lies in there."""

    def __init__(self, call: _Call, tensor: torch.Tensor, away: _Away) -> None:
        self.call, self._away, self._original = call, away, ref(tensor)
        self._dtype, self._shape, self._stride = tensor.dtype, tensor.shape, tensor.stride()
        self._offset = tensor.storage_offset()
        away.users += 1
        call.within.saving.add(call.position)

    def tensor(self) -> torch.Tensor:
        raw = self._away.take()
        original = self._original()
        moved_on = original is not None and original._version != self._away.version
        if moved_on or self._away.changed:
            raise _changed(self._shape, self.call.path)
        empty = torch.empty(0, dtype=self._dtype, device=raw.device)
        return empty.set_(raw.untyped_storage(), self._offset, self._shape, self._stride)


def _changed(shape: torch.Size, path: str) -> RuntimeError:
    """What torch says in this case."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: a tensor of shape {list(shape)} that {path} has saved"
    )


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage of a tensor as bytes, one axis."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
