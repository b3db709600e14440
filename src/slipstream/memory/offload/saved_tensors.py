"""Stand-ins that autograd saves for tensors whose storages are offloaded, or stay in memory.

[Note: Lifetime]
Strong references point one way: from what autograd saves to the offloaded storage, and from there
to the call of the block that saved it. Whatever ends a graph (backward, an error, a loss that is
thrown away) therefore drops its storages, and their space in the store.
"""

from __future__ import annotations

from weakref import ReferenceType, WeakValueDictionary, ref

import torch

from slipstream.memory.offload.store import TensorStore


class ForwardPass:
    """One forward of the model, and what its blocks saved.

    Attributes:
        position: of the block that was called last.
        saving: positions of blocks that saved anything.
        offloading: positions of blocks that offloaded anything.
        largest_small: bytes of the largest storage that was too small to be offloaded.
        offloaded_calls: block calls with offloaded storages in use, by position.
    """

    def __init__(self) -> None:
        self.position = -1
        self.saving: set[int] = set()
        self.offloading: set[int] = set()
        self.largest_small = 0
        self.offloaded_calls: WeakValueDictionary[int, BlockCall] = WeakValueDictionary()


class BlockCall:
    """One forward of a block, and the storages that it offloaded."""

    def __init__(self, path: str, position: int, forward_pass: ForwardPass) -> None:
        self.path, self.position, self.forward_pass = path, position, forward_pass
        self.storages: list[ReferenceType[OffloadedStorage]] = []  # weak: see [Note: Lifetime]

    def settle(self) -> None:
        """Release the device memory of the offloaded storages."""
        for storage in self._alive():
            storage.settle()

    def fetch(self) -> None:
        """Start to bring back all storages, in the order in which backward needs them."""
        for storage in reversed(self._alive()):
            storage.fetch()

    def _alive(self) -> list[OffloadedStorage]:
        return [storage for weak in self.storages if (storage := weak()) is not None]


class OffloadedStorage:
    """A storage in the store, for all saved tensors that share it.

    Attributes:
        version: version counter of the tensor when it was copied.
        changed: whether the tensor was changed in place while it was copied.
        users: number of saved tensors that share the storage.
    """

    def __init__(self, store: TensorStore, call: BlockCall, tensor: torch.Tensor) -> None:
        self._store, self.version = store, tensor._version
        self._original: torch.Tensor | None = tensor.detach()  # shares the version counter
        self._ticket = store.put(_bytes_of(tensor), call.path)
        self.changed = False
        self.users = 0
        self._served = 0  # users that took the bytes since they are back
        self._raw: torch.Tensor | None = None  # the bytes while they are back
        call.storages.append(ref(self))
        call.forward_pass.offloaded_calls[call.position] = call

    def settle(self) -> None:
        """Release the memory of the original."""
        self._store.settle(self._ticket)
        self._notice_change()
        self._original = None

    def fetch(self) -> None:
        """Start to bring the bytes back."""
        if self._raw is None:
            self._store.fetch(self._ticket)

    def take(self) -> torch.Tensor:
        """The bytes; they stay in memory until every user has taken them."""
        self._notice_change()
        if self._raw is None:
            self._raw, self._served = self._store.take(self._ticket), 0
        raw = self._raw
        self._served += 1
        if self._served >= self.users:
            self._raw = None
        return raw

    def _notice_change(self) -> None:
        if self._original is not None and self._original._version != self.version:
            self.changed = True

    def __del__(self) -> None:
        if hasattr(self, "_ticket"):  # not if put() raised
            self._store.drop(self._ticket)


class ResidentTensor:
    """A saved tensor that stays in memory."""

    def __init__(self, call: BlockCall, tensor: torch.Tensor) -> None:
        call.forward_pass.saving.add(call.position)
        # Detached: an output that its own node saves would keep that node alive for ever.
        self.call, self._tensor, self._version = call, tensor.detach(), tensor._version

    def tensor(self) -> torch.Tensor:
        if self._tensor._version != self._version:
            raise _changed_in_place(self._tensor.shape, self.call.path)
        return self._tensor


class OffloadedTensor:
    """A saved tensor whose storage is offloaded: its layout in that storage."""

    def __init__(self, call: BlockCall, tensor: torch.Tensor, storage: OffloadedStorage) -> None:
        self.call, self._storage, self._original = call, storage, ref(tensor)
        self._dtype, self._shape, self._stride = tensor.dtype, tensor.shape, tensor.stride()
        self._offset = tensor.storage_offset()
        storage.users += 1
        call.forward_pass.saving.add(call.position)
        call.forward_pass.offloading.add(call.position)

    def tensor(self) -> torch.Tensor:
        raw, original = self._storage.take(), self._original()
        changed_later = original is not None and original._version != self._storage.version
        if changed_later or self._storage.changed:
            raise _changed_in_place(self._shape, self.call.path)
        empty = torch.empty(0, dtype=self._dtype, device=raw.device)
        return empty.set_(raw.untyped_storage(), self._offset, self._shape, self._stride)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is dense and fully described by dtype, shape, strides and its bytes."""
    dense = type(tensor) is torch.Tensor and tensor.layout is torch.strided
    return dense and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())


def _changed_in_place(shape: torch.Size, path: str) -> RuntimeError:
    """The error that torch raises for its own saved tensors."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: a tensor of shape {list(shape)} that {path} has saved"
    )


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage of a tensor as bytes, shape (num_bytes,)."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
