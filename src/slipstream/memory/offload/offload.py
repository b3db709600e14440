"""Activations of blocks leave in forward and are back when backward needs them.

Never copies by itself: a store does; and never says which blocks: the policy does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Self
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from slipstream.errors import StrategyError, UsageError
from slipstream.memory.blocks import blocks_of, matching
from slipstream.memory.forward_override import ForwardOverride
from slipstream.memory.offload.pcie import beside
from slipstream.memory.offload.place import open_store
from slipstream.memory.offload.policy import Policy
from slipstream.memory.offload.saved import (
    Call,
    OffloadedStorage,
    OffloadedTensor,
    Pass,
    ResidentTensor,
    is_plain,
)
from slipstream.memory.offload.store import Store, Traffic
from slipstream.strategy import Offload, Row


def offload(
    model: nn.Module,
    config: Offload | None = None,
    *,
    local_ranks: int = 1,
    rank: int = 0,
    store: Store | None = None,
) -> Offloader:
    """Move what blocks of ``model`` save for backward out of the device's memory, and back in time.

    Each block is one that repeats in the model, or a module that ``config`` names. What it saves in
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
        store: another place than ``config`` names; the offloader closes it.

    Raises:
        StrategyError: there is nothing that repeats, a pattern matches nothing, all blocks would
            stay, or the device's memory is the host's own.
        UsageError: activations of this model leave already.
        OffloadError: the place is not there or too small; also later, when it is full.

    Reference: torchtune's and Megatron-LM's activation offloading.

    Example:
        >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
        >>> with offload(model, Offload(to="disk", min_bytes=0)) as offloader:
        ...     model(torch.ones(4, 8)).sum().backward()
        >>> offloader.traffic.bytes_out == offloader.traffic.bytes_back > 0
        True
    """
    config = Offload() if config is None else config
    blocks, device = offloaded_blocks(model, config), _device(model)
    if store is None:
        store = open_store(config, device, local_ranks, rank)
    policy = Policy(config.keep_last, config.prefetch)
    return Offloader(blocks, policy, store, device, config.min_bytes)


def offloaded_blocks(model: nn.Module, config: Offload) -> dict[str, nn.Module]:
    """The blocks that ``config`` speaks of, by path, in the order of the model; those stay, too,
    that ``keep_last`` keeps.

    Raises:
        StrategyError, UsageError: as of `offload`.
    """
    for path, module in model.named_modules():
        if isinstance(vars(module).get("forward"), _Offloaded):
            raise UsageError(
                f"memory.offload: what {path or 'the model'} saves leaves already; close() what "
                "does that first, and name all modules at once: memory.offload.modules"
            )
    if config.to == "host" and _device(model).type == "cpu":
        raise StrategyError(
            "memory.offload to host: the model is on the CPU, whose activations are in the host's "
            "memory already; use {to: disk}, or move the model to a GPU before"
        )
    if config.modules is None:
        paths = blocks_of(model)
    else:
        paths = matching(model, config.modules, "memory.offload.modules")
    if not paths:
        raise StrategyError(
            f"memory.offload: {type(model).__name__} has no repeated blocks (a ScriptModule is "
            "none); name its modules: memory.offload.modules"
        )
    if config.keep_last >= len(paths):
        raise StrategyError(
            f"memory.offload.keep_last {config.keep_last}: the model has {len(paths)} blocks, so "
            f"nothing would leave; allowed: at most {len(paths) - 1}"
        )
    return {path: model.get_submodule(path) for path in paths}


def check_offload(model: nn.Module, config: Offload, local_ranks: int = 1, rank: int = 0) -> None:
    """Find out, before anything is installed, that `offload` would refuse.

    Raises:
        StrategyError, UsageError, OffloadError: as of `offload`.
    """
    offloaded_blocks(model, config)
    open_store(config, _device(model), local_ranks, rank).close()


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


class _Offloaded(ForwardOverride):
    """The forward of a block whose activations leave; a type of its own, to know it again."""


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
        self._pass, self._furthest = Pass(), 0
        self._whole: Pass | None = None  # the last that came to the end and saved anything
        self._last: Call | None = None  # whose tensors are on their way out
        self._reached: ReferenceType[Call] = ref(Call("", 0, self._pass))  # dead already
        self._known: WeakKeyDictionary[Any, ReferenceType[OffloadedStorage]] = WeakKeyDictionary()
        self._closed = False
        self._around = [
            _Offloaded(module, partial(self._forward, position, path, module))
            for position, (path, module) in enumerate(blocks.items())
        ]

    @property
    def blocks(self) -> list[str]:
        """Paths of the blocks of which something leaves; before a forward: that are to leave."""
        seen = self._seen
        leaving = filter(self._leaves, range(len(self._paths))) if seen is None else seen.sending
        return [self._paths[position] for position in sorted(leaving)]

    @property
    def traffic(self) -> Traffic:
        """Bytes moved so far, and the time for which the training waited for them."""
        return self._store.traffic

    @property
    def reserved_bytes(self) -> int:
        """What the store takes up, of host memory or disk."""
        return self._store.reserved_bytes

    def report_rows(self) -> list[Row]:
        """What became of it, for the overview."""
        gone, traffic, left = self.blocks, self.traffic, len(self._paths) - len(self.blocks)
        value = f"{len(gone)} blocks leave, {left} stay"
        if not gone:
            return [Row("memory.offload", "nothing leaves", self._why_nothing())]
        note = f"{gone[0]} to {gone[-1]}"
        if traffic.bytes_out:
            note = (
                f"{traffic.bytes_out / 2**30:.3g} GiB out, {traffic.bytes_back / 2**30:.3g} back; "
                f"waited {traffic.seconds_waited:.3g} s; "
                f"takes {self.reserved_bytes / 2**30:.3g} GiB"
            )
        if others := beside(self._device):
            note += f"; the PCIe link is shared with {', '.join(others)}"
        return [Row("memory.offload", value, note)]

    def _why_nothing(self) -> str:
        """Of a whole pass."""
        seen = self._seen
        if seen is None or not seen.small:
            return f"blocks save no plain dense tensors on {self._device}"
        return (
            f"all that blocks save is below min_bytes ({self._min / 2**20:.3g} MiB); the largest "
            f"is {seen.small / 2**20:.3g} MiB"
        )

    def close(self) -> None:
        """Take everything off the model; what is away is lost, so no backward may be pending."""
        if self._closed:
            return
        for replaced in reversed(self._around):
            replaced.remove()  # may refuse, until what stands on top has gone
        self._closed = True
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
        held = (*module.parameters(), *module.buffers())
        own = {t.untyped_storage() for t in held if t.layout is torch.strided}
        pack = (
            partial(self._pack, call, own)
            if self._leaves(position)
            else partial(ResidentTensor, call)
        )
        with saved_tensors_hooks(pack, self._unpack):
            result = forward(*args, **kwargs)
        # One block is under way while the next computes: its memory is free from here on.
        if self._last is not None:
            self._last.settle(self._store)
        self._last = call
        return result

    def _leaves(self, position: int) -> bool:
        saving = range(len(self._paths)) if self._whole is None else self._whole.saving
        return self._policy.leaves(position, saving)

    @property
    def _seen(self) -> Pass | None:
        """The last whole pass, maybe the present one."""
        return self._pass if self._is_whole(self._pass) else self._whole

    def _is_whole(self, one: Pass) -> bool:
        """Whether a pass came to the end, and saved anything."""
        return one.position == self._furthest and bool(one.saving)

    def _begin(self, position: int, path: str) -> Call:
        """A block is called, maybe as the first of a pass."""
        last = self._pass
        if position <= last.position:
            if self._is_whole(last):
                self._whole = last
            self._pass = Pass()
        self._furthest = max(self._furthest, position)
        self._pass.position = position
        return Call(path, position, self._pass)

    def _pack(
        self, call: Call, own: set[Any], tensor: torch.Tensor
    ) -> ResidentTensor | OffloadedTensor:
        """What autograd is to keep in the place of ``tensor``."""
        if tensor.device != self._device or not is_plain(tensor):
            return ResidentTensor(call, tensor)
        storage = tensor.untyped_storage()
        if storage in own:
            return ResidentTensor(call, tensor)
        if storage.nbytes() < self._min:
            call.within.small = max(call.within.small, storage.nbytes())
            return ResidentTensor(call, tensor)
        known = self._known.get(storage)
        away = known() if known is not None else None
        if away is None or away.version != tensor._version:
            away = OffloadedStorage(self._store, call, tensor)
            self._known[storage] = ref(away)
        return OffloadedTensor(call, tensor, away)

    # Backward.

    def _unpack(self, packed: ResidentTensor | OffloadedTensor) -> torch.Tensor:
        """The tensor again; the first one of a block fetches those of the blocks before it."""
        call = packed.call
        if self._closed and isinstance(packed, OffloadedTensor):
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
