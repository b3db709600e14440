"""What autograd keeps in the place of tensors whose storages have left, or have not.

Never decides what leaves: the offloader does. References go one way: from what autograd keeps to
the storage that is away, and from there to the call of a block; so that what nobody needs any more
is dropped, however the graph came to its end.
"""

from __future__ import annotations

from weakref import ReferenceType, WeakValueDictionary, ref

import torch

from slipstream.memory.offload.store import Store


class Pass:
    """One forward of the model: what its blocks have sent away, as long as something needs it.

    Attributes:
        position: of the last block that was called.
        saving: positions of blocks that save anything.
        sending: of those some of which leaves.
        small: bytes of the largest storage that is too small to leave.
        away: calls that have sent something, by position.
    """

    def __init__(self) -> None:
        self.position = -1
        self.saving: set[int] = set()
        self.sending: set[int] = set()
        self.small = 0
        self.away: WeakValueDictionary[int, Call] = WeakValueDictionary()


class Call:
    """One forward of a block, and what it has sent away."""

    def __init__(self, path: str, position: int, within: Pass) -> None:
        self.path, self.position, self.within = path, position, within
        self.sent: list[
            ReferenceType[OffloadedStorage]
        ] = []  # weak: autograd alone says what is needed

    def settle(self, store: Store) -> None:
        """What it has sent no longer takes up the device's memory."""
        for away in self._alive():
            away.settle(store)

    def fetch(self, store: Store) -> None:
        """Begin to bring everything back, in the order in which backward needs it."""
        for away in reversed(self._alive()):
            if away.raw is None:
                store.fetch(away.ticket)

    def _alive(self) -> list[OffloadedStorage]:
        return [away for weak in self.sent if (away := weak()) is not None]


class OffloadedStorage:
    """A storage that has left, for all tensors that share it."""

    def __init__(self, store: Store, call: Call, tensor: torch.Tensor) -> None:
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


class ResidentTensor:
    """A tensor that stays."""

    def __init__(self, call: Call, tensor: torch.Tensor) -> None:
        call.within.saving.add(call.position)
        # Detached, for a tensor that holds its own graph would never be freed.
        self.call, self._tensor, self._version = call, tensor.detach(), tensor._version

    def tensor(self) -> torch.Tensor:
        if self._tensor._version != self._version:
            raise _changed(self._tensor.shape, self.call.path)
        return self._tensor


class OffloadedTensor:
    """A tensor whose storage has left: how it lies in there."""

    def __init__(self, call: Call, tensor: torch.Tensor, away: OffloadedStorage) -> None:
        self.call, self._away, self._original = call, away, ref(tensor)
        self._dtype, self._shape, self._stride = tensor.dtype, tensor.shape, tensor.stride()
        self._offset = tensor.storage_offset()
        away.users += 1
        call.within.saving.add(call.position)
        call.within.sending.add(call.position)

    def tensor(self) -> torch.Tensor:
        raw = self._away.take()
        original = self._original()
        moved_on = original is not None and original._version != self._away.version
        if moved_on or self._away.changed:
            raise _changed(self._shape, self.call.path)
        empty = torch.empty(0, dtype=self._dtype, device=raw.device)
        return empty.set_(raw.untyped_storage(), self._offset, self._shape, self._stride)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is a dense tensor whose bytes are all there is to it."""
    dense = type(tensor) is torch.Tensor and tensor.layout is torch.strided
    return dense and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())


def _changed(shape: torch.Size, path: str) -> RuntimeError:
    """What torch says in this case."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: a tensor of shape {list(shape)} that {path} has saved"
    )


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage of a tensor as bytes, one axis."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
