"""Codecs for those who keep DistributedDataParallel: a communication hook and its state.

Never changes the model or DDP beyond ``register_comm_hook``.

[Note: One thread]
DDP calls its hook for every bucket and waits for none of them. A codec that exchanges twice, P and
then Q, could so be halfway through one bucket on one rank while another rank has gone on to the
next, and collectives that do not belong together would meet. (torch's own PowerSGD hook does that
on gloo with several buckets.) Here all buckets go, one after the other, through one thread with a
process group of its own.
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

from slipstream.codecs import HalfCodec, Ranks
from slipstream.codecs.compressor import is_finite
from slipstream.errors import ModelError, UsageError
from slipstream.gradients.compressed import (
    CodecStates,
    CompressionPlan,
    NamedCompressor,
    NamedState,
)
from slipstream.gradients.momentum import MomentumCorrection, check_momentum_correction
from slipstream.gradients.segments import parameters_of
from slipstream.strategy import (
    Adaptive,
    Auto,
    Codec,
    Dgc,
    Flat,
    Half,
    PlainCodec,
    Strategy,
    Transport,
    codec_of,
)
from slipstream.transport.channel import Channel, Label
from slipstream.transport.requests import AllReduce, Exchange
from slipstream.transport.transport import make_transport

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket
else:
    from torch.distributed import GradBucket


@dataclass(slots=True)
class _Part:
    """The gradients of one DDP bucket that share a codec: where they lie, and how they travel."""

    slices: list[slice]
    values: torch.Tensor
    codec: NamedCompressor | None
    is_finite: bool = True


class DdpCodec:
    """The state of ``codec_hook``: a codec for the gradients of a DDP model.

    Args:
        ddp: the wrapped model; all ranks make this object at the same time.
        codec: as ``gradients.codec`` of a strategy: ``"half"``, ``{"kind": "powersgd", "rank": 2}``
            or one of the types in ``slipstream.strategy``.
        optimizer: only for DGC, which applies its momentum.
        loss_scale: returns the present loss scale, e.g. ``scaler.get_scale``: what a codec keeps
            from step to step must not be in its units. The codec forgets a step whose gradients
            are not finite. They are NaN on all ranks then, which ``GradScaler`` skips; without
            one, compare ``skipped`` before and after ``backward()``.
        transport: as ``gradients.transport`` of a strategy.

    Raises:
        ModelError: not a DDP model, DGC without an optimizer that it can take over, or
            ``transport: auto``.
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
        transport: Transport = Flat(),  # noqa: B008 - a frozen value
    ) -> None:
        if not isinstance(ddp, DistributedDataParallel):
            raise ModelError(
                f"DdpCodec takes a model wrapped in DistributedDataParallel, not a "
                f"{type(ddp).__name__}; without DDP, name the codec in the strategy of accelerate()"
            )
        config = Strategy.load({"gradients": {"codec": codec}}).gradients.codec
        if isinstance(config, Adaptive):
            raise ModelError(
                "DdpCodec has no segments, among which adaptive chooses; name the codec "
                f"itself, e.g. {config.codec.kind!r}, or use accelerate()"
            )
        if isinstance(transport, Auto):
            raise ModelError(
                "DdpCodec cannot search for a transport: DDP does not say when an update is over; "
                "name one of the others (Flat(), Direct()), or use accelerate()"
            )
        trainables = parameters_of(ddp.module, trainable=True)
        self._names = {id(t.parameter): t.name for t in trainables}
        members = dist.get_process_group_ranks(ddp.process_group)
        self._ranks = Ranks(dist.get_rank(ddp.process_group), len(members))
        self._correction: MomentumCorrection | None = None
        if optimizer is not None:
            check_momentum_correction(optimizer, trainables, config)
            self._correction = MomentumCorrection(optimizer, trainables, config, len(members))
        elif any(isinstance(codec_of(config, t.name), Dgc) for t in trainables):
            raise ModelError("the codec dgc applies momentum: DdpCodec(..., optimizer=...)")
        momenta = self._correction.momenta if self._correction else {}
        self._plan = CompressionPlan(partial(codec_of, config), self._ranks, momenta)
        group = dist.new_group(members, use_local_synchronization=True)
        assert group is not None
        single = make_transport(transport, group)
        self._channel = Channel(single, [single], next(ddp.parameters()).device)
        self._loss_scale = loss_scale
        self._parts: dict[tuple[int, ...], list[_Part]] = {}
        self._states = CodecStates(self._correction.buffers if self._correction else {})
        self.step = self.skipped = 0

    def start(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Exchange a bucket after those before it; DDP waits for the future."""
        if bucket.index() == 0:
            self._channel.wait()  # nothing is in flight by now: raises errors of the last backward
            if self._correction is not None:
                self._correction.check()
        buffer = bucket.buffer()
        if buffer.is_sparse:
            names = ", ".join(self._names[id(p)] for p in bucket.parameters())
            raise ModelError(
                f"{names}: sparse gradients, which DdpCodec does not compress; accelerate() does"
            )
        devices: list[int | str | torch.device] | None = [buffer.device] if buffer.is_cuda else None
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        parts = self._parts_of(bucket.parameters(), buffer)
        last, loss_scale = bucket.is_last(), self._loss_scale()

        def exchange() -> Exchange:
            try:
                for part in parts:
                    yield from self._average(part, buffer, loss_scale)
                if last:
                    self._settle()
            except Exception as error:
                future.set_exception(error)  # type: ignore[arg-type]
                raise
            future.set_result(buffer)

        label = Label("allreduce", lambda: f"rank {self._ranks.rank}, bucket {bucket.index()}")
        self._channel.start(label, exchange())
        return future

    def _average(self, part: _Part, buffer: torch.Tensor, loss_scale: float) -> Exchange:
        """Average the gradients of one part, in place; only codecs need their true size."""
        if part.codec is None:
            loss_scale = 1.0
        views = [_real(buffer[where]) for where in part.slices]
        sizes = [view.numel() for view in views]
        *pieces, padding = part.values.split([*sizes, part.values.numel() - sum(sizes)])
        for view, piece in zip(views, pieces, strict=True):
            torch.mul(view, 1.0 / self._ranks.count / loss_scale, out=piece)
        padding.zero_()
        if part.codec is None:
            yield AllReduce(part.values)
            part.is_finite = is_finite(part.values)
        else:
            flags = torch.zeros(1, dtype=torch.uint8, device=buffer.device)
            part.is_finite = yield from part.codec.exchange(part.values, flags, self.step)
        for view, piece in zip(views, pieces, strict=True):
            torch.mul(piece, loss_scale, out=view)

    def _settle(self) -> None:
        finite = all(part.is_finite for parts in self._parts.values() for part in parts)
        self._states.settle(finite)
        self.step += finite
        self.skipped += not finite

    def _parts_of(self, parameters: Sequence[torch.Tensor], buffer: torch.Tensor) -> list[_Part]:
        """How the gradients of a bucket travel; DDP changes its buckets after the first step."""
        key = tuple(map(id, parameters))
        if key not in self._parts:
            for other in [other for other in self._parts if set(key) & set(other)]:
                self._states.detach(_codecs(self._parts.pop(other)))
            self._parts[key] = self._lay_out(parameters, buffer)
            self._states.attach(_codecs(self._parts[key]))
        return self._parts[key]

    def _lay_out(self, parameters: Sequence[torch.Tensor], buffer: torch.Tensor) -> list[_Part]:
        names = [self._names[id(p)] for p in parameters]
        stops = accumulate((p.numel() for p in parameters), initial=0)
        slices = [slice(*pair) for pair in pairwise(stops)]
        positions_of: dict[PlainCodec | None, list[int]] = {}
        for position, name in enumerate(names):
            positions_of.setdefault(self._plan.codec_of(name), []).append(position)
        parts = []
        for codec, positions in positions_of.items():
            named, dtype = None, _real(buffer).dtype
            numel = sum(_real(buffer[slices[i]]).numel() for i in positions)
            if isinstance(codec, Half):
                dtype = HalfCodec(codec.dtype).wire_dtype
            elif codec is not None:
                inside = [names[i] for i in positions]
                chosen = [parameters[i] for i in positions]
                seed = crc32(inside[0].encode())
                named = self._plan.compressor(codec, inside, chosen, num_flags=1, seed=seed)
                numel, dtype = named.compressor.num_values, named.compressor.works_in
            values = torch.zeros(numel, dtype=dtype, device=buffer.device)
            parts.append(_Part([slices[i] for i in positions], values, named))
        return parts

    # State.

    def codec_state(self) -> NamedState:
        """What the codecs keep on this rank, by parameter; every rank saves its own."""
        return self._states.state()

    def state_dict(self) -> dict[str, object]:
        """What this rank needs to go on bit for bit: every rank saves its own."""
        rank, count = self._ranks.rank, self._ranks.count
        return {"rank": rank, "ranks": count, "step": self.step, "codec": self.codec_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict()`` of the same rank, before the next backward.

        Raises:
            UsageError: the state is another rank's, or of another number of ranks.
        """
        if state["ranks"] != self._ranks.count:
            raise UsageError(
                f"this state is of {state['ranks']} ranks, this run has {self._ranks.count}; "
                "accelerate() redistributes it, DdpCodec does not"
            )
        if state["rank"] != self._ranks.rank:
            raise UsageError(
                f"this state is of rank {state['rank']}, this is rank {self._ranks.rank}: what a "
                "codec keeps differs from rank to rank; save and load one state a rank"
            )
        self.step, self._parts, self._states = state["step"], {}, CodecStates(state["codec"])

    def close(self) -> None:
        """End the thread and give the optimizer its momentum back; DDP must not go on."""
        self._channel.close()
        if self._correction is not None:
            self._correction.give_back()


def codec_hook(state: DdpCodec, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The hook: ``ddp.register_comm_hook(DdpCodec(ddp, "int8"), codec_hook)``."""
    return state.start(bucket)


def _codecs(parts: Sequence[_Part]) -> list[NamedCompressor]:
    return [part.codec for part in parts if part.codec is not None]


def _real(values: torch.Tensor) -> torch.Tensor:
    """The values as a row of real numbers, without a copy."""
    return torch.view_as_real(values).view(-1) if values.is_complex() else values
