"""Codecs for those who keep DistributedDataParallel: a communication hook and its state.

Never changes the model or DDP beyond ``register_comm_hook``.

[Note: One thread]
DDP calls its hook for every bucket and waits for none of them. A codec that exchanges twice, P and
then Q, would so be halfway through one bucket on a rank while another rank has gone on to the next,
and collectives that do not belong together would meet. (torch's own PowerSGD hook does that on gloo
with several buckets.) Here all buckets go, one after the other, through one thread with a process
group of its own.
"""

# No `from __future__ import annotations`: DDP compares a hook's annotations with classes.

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from slipstream.codecs import Compressor, HalfCodec, Momentum, Ranks, make_compressor
from slipstream.codecs.compressor import is_finite
from slipstream.errors import ModelError, UsageError
from slipstream.gradients.compressed import NamedState, carry
from slipstream.gradients.momentum import MomentumCorrection, check_momentum_correction
from slipstream.gradients.segments import parameters_of
from slipstream.strategy import Adaptive, Codec, Dgc, Half, PlainCodec, Strategy, codec_of
from slipstream.transport.channel import Channel, Label

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket
else:
    from torch.distributed import GradBucket


@dataclass(slots=True)
class _Part:
    """The gradients of one bucket that share a codec: where they lie, and how they travel."""

    names: list[str]
    slices: list[slice]
    compressor: Compressor | None
    values: torch.Tensor
    is_finite: bool = True


class DdpCodec:
    """The state of ``codec_hook``: a codec for the gradients of a DDP model.

    Args:
        ddp: the wrapped model; all ranks make this object at the same time.
        codec: as ``gradients.codec`` of a strategy: ``"half"``, ``{"kind": "powersgd", "rank": 2}``
            or one of the types in ``slipstream.strategy``.
        optimizer: only for DGC, which takes over its momentum.
        loss_scale: gives the present loss scale, e.g. ``scaler.get_scale``: what is kept from step
            to step must not be in its units. The codec forgets a step whose gradients are not
            finite: they are NaN on all ranks then, which ``GradScaler`` skips; without one, compare
            ``skipped`` before and after ``backward()``.

    Raises:
        ModelError: not a DDP model, or DGC without an optimizer that it can take over.
        StrategyError: no such codec.

    Accumulate under ``ddp.no_sync()``; save ``state_dict()`` on every rank; call ``close()`` before
    the process group is destroyed.

    Exactness: that of the codec; one bucket after the other, so bitwise the same on all ranks.

    Example:
        >>> store = dist.HashStore()
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> ddp = DistributedDataParallel(nn.Linear(64, 64))
        >>> hook = DdpCodec(ddp, {"kind": "powersgd", "rank": 2, "start_step": 0})
        >>> ddp.register_comm_hook(hook, codec_hook)
        >>> ddp(torch.ones(1, 64)).sum().backward()
        >>> hook.step, hook.skipped
        (1, 0)
        >>> hook.close()
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        ddp: nn.Module,
        codec: Codec | str | Mapping[str, object],
        *,
        optimizer: torch.optim.Optimizer | None = None,
        loss_scale: Callable[[], float] = lambda: 1.0,
    ) -> None:
        if not isinstance(ddp, DistributedDataParallel):
            raise ModelError(
                f"DdpCodec takes a model wrapped in DistributedDataParallel, not a "
                f"{type(ddp).__name__}; without DDP, name the codec in the strategy of accelerate()"
            )
        self._codec = Strategy.load({"gradients": {"codec": codec}}).gradients.codec
        if isinstance(self._codec, Adaptive):
            raise ModelError(
                "DdpCodec does not know segments, which adaptive chooses among; name the codec "
                f"itself, e.g. {self._codec.codec.kind!r}, or use accelerate()"
            )
        trainables = parameters_of(ddp.module, trainable=True)
        self._names = {id(t.parameter): t.name for t in trainables}
        self._momentum_correction: MomentumCorrection | None = None
        members = dist.get_process_group_ranks(ddp.process_group)
        self._ranks = Ranks(dist.get_rank(ddp.process_group), len(members))
        if optimizer is not None:
            check_momentum_correction(optimizer, trainables, self._codec)
            self._momentum_correction = MomentumCorrection(
                optimizer, trainables, self._codec, self._ranks.count
            )
        elif any(isinstance(codec_of(self._codec, t.name), Dgc) for t in trainables):
            raise ModelError("the codec dgc takes over momentum: DdpCodec(..., optimizer=...)")
        group = dist.new_group(members, use_local_synchronization=True)
        assert group is not None
        device = next(ddp.parameters()).device
        self._channel = Channel(group, [group], device)
        self._loss_scale = loss_scale
        self._parts: dict[tuple[int, ...], list[_Part]] = {}
        self._kept: NamedState = (
            self._momentum_correction.buffers if self._momentum_correction else {}
        )
        self.step = 0
        self.skipped = 0

    def start(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Exchange a bucket behind those before it; DDP waits for the future."""
        if bucket.index() == 0:
            self._channel.wait()  # for none any more: errors of the last backward
            if self._momentum_correction is not None:
                self._momentum_correction.check()
        buffer = bucket.buffer()
        if buffer.is_sparse:
            names = ", ".join(self._names[id(p)] for p in bucket.parameters())
            raise ModelError(
                f"{names}: sparse gradients, which DdpCodec does not code; accelerate() does"
            )
        devices: list[int | str | torch.device] | None = [buffer.device] if buffer.is_cuda else None
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        parts = self._parts_of(bucket.parameters(), buffer)
        run = partial(self._exchange, buffer, parts, bucket.is_last(), self._loss_scale(), future)
        label = Label("allreduce", lambda: f"rank {self._ranks.rank}, bucket {bucket.index()}")
        self._channel.stage(label, run)
        return future

    def _exchange(
        self,
        buffer: torch.Tensor,
        parts: Sequence[_Part],
        last: bool,
        loss_scale: float,
        future: torch.futures.Future[torch.Tensor],
        group: dist.ProcessGroup,
    ) -> None:
        try:
            for part in parts:
                self._send(part, buffer, loss_scale, group)
            if last:
                self._settle()
        except Exception as error:
            future.set_exception(error)  # type: ignore[arg-type]
            raise
        future.set_result(buffer)

    def _send(
        self, part: _Part, buffer: torch.Tensor, loss_scale: float, group: dist.ProcessGroup
    ) -> None:
        """Average the gradients of one part, in place; only what is kept needs their true size."""
        loss_scale = 1.0 if part.compressor is None else loss_scale
        scale = 1.0 / self._ranks.count / loss_scale
        stop = 0
        for place in part.slices:
            start, stop = stop, stop + _real(buffer[place]).numel()
            torch.mul(_real(buffer[place]), scale, out=part.values[start:stop])
        part.values[stop:] = 0
        if part.compressor is None:
            dist.all_reduce(part.values, group=group)
            part.is_finite = is_finite(part.values)
        else:
            unsound = torch.zeros(1, dtype=torch.uint8, device=buffer.device)
            carry(part.compressor.exchange(part.values, unsound, self.step), group)
            part.is_finite = not unsound
            if not part.is_finite:
                part.values.fill_(torch.nan)
        stop = 0
        for place in part.slices:
            start, stop = stop, stop + _real(buffer[place]).numel()
            torch.mul(part.values[start:stop], loss_scale, out=_real(buffer[place]))

    def _settle(self) -> None:
        every = [part for parts in self._parts.values() for part in parts]
        is_finite = all(part.is_finite for part in every)
        for compressor in (part.compressor for part in every if part.compressor is not None):
            if is_finite:
                compressor.commit()
            else:
                compressor.rollback()
        self.step += is_finite
        self.skipped += not is_finite

    def _parts_of(self, parameters: Sequence[torch.Tensor], buffer: torch.Tensor) -> list[_Part]:
        """How the gradients of a bucket travel; DDP changes its buckets after the first step."""
        key = tuple(map(id, parameters))
        if key not in self._parts:
            self._kept = self.codec_state()
            mine = set(key)
            self._parts = {k: parts for k, parts in self._parts.items() if not mine & set(k)}
            self._parts[key] = self._lay_out(parameters, buffer)
        return self._parts[key]

    def _lay_out(self, parameters: Sequence[torch.Tensor], buffer: torch.Tensor) -> list[_Part]:
        names = [self._names[id(p)] for p in parameters]
        stops = accumulate((p.numel() for p in parameters), initial=0)
        slices = [slice(*pair) for pair in pairwise(stops)]
        positions: dict[PlainCodec | None, list[int]] = {}
        for position, name in enumerate(names):
            positions.setdefault(codec_of(self._codec, name), []).append(position)
        parts = []
        for codec, inside in positions.items():
            chosen = [parameters[i] for i in inside]
            numel = sum(2 * p.numel() if p.is_complex() else p.numel() for p in chosen)
            compressor, dtype = None, _real(buffer).dtype
            if isinstance(codec, Half):
                dtype = HalfCodec(codec.dtype).wire_dtype
            elif codec is not None:
                momentum_correction = (
                    self._momentum_correction.momenta if self._momentum_correction else {}
                )
                compressor = make_compressor(
                    codec,
                    chosen,
                    self._ranks,
                    momenta=[momentum_correction.get(names[i], Momentum(0.0)) for i in inside],
                    num_flags=1,
                    seed=crc32(names[inside[0]].encode()),
                )
                compressor.load([self._kept.get(names[i], {}) for i in inside])
                numel, dtype = compressor.num_values, compressor.works_in
            values = torch.zeros(numel, dtype=dtype, device=buffer.device)
            part = _Part(
                [names[i] for i in inside], [slices[i] for i in inside], compressor, values
            )
            parts.append(part)
        return parts

    # State.

    def codec_state(self) -> NamedState:
        """What the codecs keep on this rank, by parameter; every rank saves its own."""
        found = dict(self._kept)
        for part in (part for parts in self._parts.values() for part in parts):
            if part.compressor is not None:
                pairs = zip(part.names, part.compressor.state(), strict=True)
                found.update({name: state for name, state in pairs if state})
        return found

    def state_dict(self) -> dict[str, object]:
        """What this rank needs to go on bit for bit: every rank saves its own."""
        place = {"rank": self._ranks.rank, "ranks": self._ranks.count}
        return {**place, "step": self.step, "codec": self.codec_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict()`` of the same rank, before the next backward.

        Raises:
            UsageError: the state is another rank's, or of another number of ranks.
        """
        if state["ranks"] != self._ranks.count:
            raise UsageError(
                f"this state is of {state['ranks']} ranks, this run has {self._ranks.count}; "
                "accelerate() deals it out among them, DdpCodec does not"
            )
        if state["rank"] != self._ranks.rank:
            raise UsageError(
                f"this state is of rank {state['rank']}, this is rank {self._ranks.rank}: what a "
                "codec keeps differs from rank to rank; save and load one state a rank"
            )
        self.step, self._kept, self._parts = state["step"], state["codec"], {}

    def close(self) -> None:
        """End the thread and give the optimizer its momentum back; DDP must not go on."""
        self._channel.close()
        if self._momentum_correction is not None:
            self._momentum_correction.give_back()


def codec_hook(state: DdpCodec, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The hook: ``ddp.register_comm_hook(DdpCodec(ddp, "int8"), codec_hook)``."""
    return state.start(bucket)


def _real(values: torch.Tensor) -> torch.Tensor:
    """The values as a row of real numbers, without a copy."""
    return torch.view_as_real(values).view(-1) if values.is_complex() else values
