"""Offload the activations of blocks in forward, and bring them back before backward needs them.

A store copies (`HostStore`, `DiskStore`); this file decides what is copied when.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Self
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from slipstream.errors import StrategyError, UsageError
from slipstream.kernels.surroundings import needs_plain_functions
from slipstream.memory.blocks import blocks_of, matching
from slipstream.memory.forward_override import Forward, ForwardOverride
from slipstream.memory.offload import saved_tensors as saved
from slipstream.memory.offload.open_store import open_store
from slipstream.memory.offload.pcie import gpus_sharing_link
from slipstream.memory.offload.store import TensorStore, Traffic
from slipstream.memory.untraced import leave_to_python
from slipstream.strategy import OffloadConfig, Row


def offload(
    model: nn.Module,
    config: OffloadConfig | None = None,
    *,
    local_ranks: int = 1,
    rank: int = 0,
    store: TensorStore | None = None,
) -> Offloader:
    """Move what blocks of ``model`` save for backward out of device memory, and back in time.

    Blocks are the repeated ones of the model, or the modules that ``config`` names. What a block
    saves in forward is copied out while the next block computes, and copied back while the block
    after it goes through backward. With recomputation (installed first) blocks save only their
    inputs, and these are offloaded. A storage is copied as a whole and once, however many tensors
    share it. Parameters, buffers, small tensors and tensors that are not plain and dense stay.

    Exactness: bitwise; the same bits come back. As in torch, backward raises a RuntimeError if a
    saved tensor was changed in place in the meantime; the change is noticed as long as the tensor
    is referenced anywhere.

    Args:
        model: on one device.
        config: what goes where; None: the defaults.
        local_ranks: number of processes on this host that offload; each takes its share of the
            free space.
        rank: of this process, for error messages.
        store: used instead of the one that ``config`` names; closed by the offloader.

    Raises:
        StrategyError: the model has no repeated blocks, a pattern matches nothing, ``keep_last``
            keeps all blocks, or the model is on the CPU and ``config`` names the host.
        UsageError: offload is already installed on the model.
        OffloadError: the store cannot be opened or has too little space; in a forward: it is full.

    Reference: activation offloading of torchtune and Megatron-LM.

    Example:
        >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
        >>> with offload(model, OffloadConfig(to="disk", min_bytes=0)) as offloader:
        ...     model(torch.ones(4, 8)).sum().backward()
        >>> offloader.traffic.bytes_out == offloader.traffic.bytes_back > 0
        True
    """
    config = OffloadConfig() if config is None else config
    blocks, device = _blocks(model, config), _device(model)
    if store is None:
        store = open_store(config, device, local_ranks, rank)
    return Offloader(blocks, config, store, device)


def check_offload(
    model: nn.Module, config: OffloadConfig, local_ranks: int = 1, rank: int = 0
) -> None:
    """Raise what `offload` would raise, without installing anything.

    Raises:
        StrategyError, UsageError, OffloadError: see `offload`.
    """
    _blocks(model, config)
    open_store(config, _device(model), local_ranks, rank).close()


def _blocks(model: nn.Module, config: OffloadConfig) -> dict[str, nn.Module]:
    """The blocks by path, in the order of the model; with those that ``keep_last`` keeps."""
    for path, module in model.named_modules():
        if isinstance(vars(module).get("forward"), _OffloadOverride):
            raise UsageError(
                f"memory.offload: {path or 'the model'} is already offloaded; call close() on that "
                "offloader first, and name all modules at once: memory.offload.modules"
            )
    if config.to == "host" and _device(model).type == "cpu":
        raise StrategyError(
            "memory.offload to host: the model is on the CPU, so its activations are in host "
            "memory already; use {to: disk}, or move the model to a GPU first"
        )
    named = config.modules
    paths = matching(model, named, "memory.offload.modules") if named else blocks_of(model)
    if not paths:
        raise StrategyError(
            f"memory.offload: {type(model).__name__} has no repeated blocks (a ScriptModule does "
            "not count); name the modules to offload: memory.offload.modules"
        )
    if config.keep_last >= len(paths):
        raise StrategyError(
            f"memory.offload.keep_last {config.keep_last}: the model has {len(paths)} blocks, so "
            f"nothing would be offloaded; allowed: at most {len(paths) - 1}"
        )
    return {path: model.get_submodule(path) for path in paths}


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


class _OffloadOverride(ForwardOverride):
    """A type of its own, so that `offload` recognises models it is installed on."""


class Offloader:
    """The offload that `offload` installed on a model; ``close`` removes it. A context manager.

    Several forwards may run before a backward, and a graph may go through backward twice or never.
    """

    def __init__(
        self,
        blocks: Mapping[str, nn.Module],
        config: OffloadConfig,
        store: TensorStore,
        device: torch.device,
    ) -> None:
        leave_to_python()
        self._config, self._store, self._device = config, store, device
        self._paths = tuple(blocks)
        self._pass, self._last_position = saved.ForwardPass(), 0
        self._complete_pass: saved.ForwardPass | None = None  # the last one before the current one
        self._copying: saved.BlockCall | None = None  # its tensors are on their way out
        self._in_backward: ReferenceType[saved.BlockCall] | None = None
        self._storages = WeakKeyDictionary[Any, ReferenceType[saved.OffloadedStorage]]()
        self._closed = False
        self._overrides = [
            _OffloadOverride(module, partial(self._forward, position, module))
            for position, module in enumerate(blocks.values())
        ]

    @property
    def blocks(self) -> list[str]:
        """Paths of the blocks that offloaded anything; before the first forward: that will."""
        observed = self._observed_pass
        if observed is not None:
            return [self._paths[position] for position in sorted(observed.offloading)]
        return [path for i, path in enumerate(self._paths) if self._is_offloaded(i)]

    @property
    def traffic(self) -> Traffic:
        """Bytes copied so far, and the seconds that training waited for copies."""
        return self._store.traffic

    @property
    def reserved_bytes(self) -> int:
        """Host memory or disk space that the store occupies."""
        return self._store.reserved_bytes

    def report_rows(self) -> list[Row]:
        """Report what was offloaded, for the overview of the session."""
        blocks, traffic = self.blocks, self.traffic
        if not blocks:
            return [Row("memory.offload", "nothing is offloaded", self._why_nothing())]
        value = f"{len(blocks)} blocks offloaded, {len(self._paths) - len(blocks)} kept"
        note = f"{blocks[0]} to {blocks[-1]}"
        if traffic.bytes_out:
            note = (
                f"{traffic.bytes_out / 2**30:.3g} GiB out, {traffic.bytes_back / 2**30:.3g} back; "
                f"waited {traffic.seconds_waited:.3g} s; "
                f"occupies {self.reserved_bytes / 2**30:.3g} GiB"
            )
        if others := gpus_sharing_link(self._device):
            note += f"; the PCIe link is shared with {', '.join(others)}"
        return [Row("memory.offload", value, note)]

    def _why_nothing(self) -> str:
        observed = self._observed_pass
        if observed is None or not observed.largest_small:
            return f"blocks save no plain dense tensors on {self._device}"
        return (
            f"all that blocks save is below min_bytes ({self._config.min_bytes / 2**20:.3g} MiB); "
            f"the largest is {observed.largest_small / 2**20:.3g} MiB"
        )

    def close(self) -> None:
        """Remove the offload; idempotent. Offloaded tensors are lost: call it after backward."""
        if self._closed:
            return
        for override in reversed(self._overrides):
            override.remove()  # raises if a later override is still installed
        self._closed = True
        self._copying = None
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Forward.

    def _forward(
        self, position: int, module: nn.Module, forward: Forward, *args: Any, **kwargs: Any
    ) -> Any:
        """The forward of a block, in which autograd saves what `_pack` returns for tensors."""
        if not torch.is_grad_enabled() or needs_plain_functions():
            return forward(*args, **kwargs)
        call = self._begin_call(position)
        state_storages: set[Any] | None = None
        if self._is_offloaded(position):
            state = (*module.parameters(), *module.buffers())
            state_storages = {t.untyped_storage() for t in state if t.layout is torch.strided}
        pack = partial(self._pack, call, state_storages)
        with saved_tensors_hooks(pack, self._unpack):
            result = forward(*args, **kwargs)
        # Copies of a block overlap with the next block's forward and are awaited at its end, so a
        # slow store holds the forward back instead of filling memory.
        if self._copying is not None:
            self._copying.settle()
        self._copying = call
        return result

    def _is_offloaded(self, position: int) -> bool:
        """Whether a block is offloaded: not the last ``keep_last`` of those that save anything, as
        backward begins with them."""
        complete = self._complete_pass
        saving = range(len(self._paths)) if complete is None else complete.saving
        return sum(later > position for later in saving) >= self._config.keep_last

    @property
    def _observed_pass(self) -> saved.ForwardPass | None:
        """The last complete pass, the current one included."""
        return self._pass if self._is_complete(self._pass) else self._complete_pass

    def _is_complete(self, forward_pass: saved.ForwardPass) -> bool:
        """Whether a pass reached the last block, and saved anything."""
        return forward_pass.position == self._last_position and bool(forward_pass.saving)

    def _begin_call(self, position: int) -> saved.BlockCall:
        """A block is called; a new pass begins if it does not come after the last one called."""
        if position <= self._pass.position:
            if self._is_complete(self._pass):
                self._complete_pass = self._pass
            self._pass = saved.ForwardPass()
        self._last_position = max(self._last_position, position)
        self._pass.position = position
        return saved.BlockCall(self._paths[position], position, self._pass)

    def _pack(
        self, call: saved.BlockCall, state_storages: set[Any] | None, tensor: torch.Tensor
    ) -> saved.ResidentTensor | saved.OffloadedTensor:
        """Pack a tensor for autograd; None: the block keeps everything."""
        if state_storages is None or tensor.device != self._device or not saved.is_plain(tensor):
            return saved.ResidentTensor(call, tensor)
        storage = tensor.untyped_storage()
        if storage in state_storages:
            return saved.ResidentTensor(call, tensor)
        if storage.nbytes() < self._config.min_bytes:
            seen = call.forward_pass
            seen.largest_small = max(seen.largest_small, storage.nbytes())
            return saved.ResidentTensor(call, tensor)
        known = self._storages.get(storage)
        offloaded = known() if known is not None else None
        if offloaded is None or offloaded.version != tensor._version:
            offloaded = saved.OffloadedStorage(self._store, call, tensor)
            self._storages[storage] = ref(offloaded)
        return saved.OffloadedTensor(call, tensor, offloaded)

    # Backward.

    def _unpack(self, packed: saved.ResidentTensor | saved.OffloadedTensor) -> torch.Tensor:
        """The saved tensor; the first one of a block fetches those of the blocks before it."""
        call = packed.call
        if self._closed:
            if isinstance(packed, saved.OffloadedTensor):
                raise UsageError(
                    f"backward through {call.path} after its activations were dropped; close() the "
                    "offloader, or the session, after the last backward"
                )
        elif self._in_backward is None or self._in_backward() is not call:
            self._in_backward = ref(call)
            offloaded = dict(call.forward_pass.offloaded_calls)  # a snapshot: entries may die
            earlier = sorted((p for p in offloaded if p < call.position), reverse=True)
            for position in earlier[: self._config.prefetch]:
                offloaded[position].fetch()
        return packed.tensor()
