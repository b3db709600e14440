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

from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal
from zlib import crc32

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from slipstream.cluster.groups import new_group
from slipstream.codecs import HalfCodec, Ranks
from slipstream.codecs.compressor import is_finite
from slipstream.ddp._checks import checked, nonfinite_gradients, other_parameters
from slipstream.ddp._groups import Arrived, Backward, BucketGroup, Routes, grouped, real_row
from slipstream.ddp._momentum import MomentumWatch
from slipstream.errors import ExchangeError, ModelError, UsageError
from slipstream.gradients.buckets import scale_into
from slipstream.gradients.compressed import (
    CodecStates,
    CompressionPlan,
    NamedCompressor,
    NamedState,
)
from slipstream.gradients.momentum import MomentumCorrection, check_momentum_correction
from slipstream.gradients.segments import parameters_of
from slipstream.strategy import (
    CodecConfig,
    DgcConfig,
    HalfConfig,
    TransportConfig,
    codec_of,
)
from slipstream.transport.channel import Channel, Label
from slipstream.transport.requests import AllGather, AllReduce, ExchangeSteps
from slipstream.transport.transport import make_transport

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket
else:
    from torch.distributed import GradBucket


class DdpCodec:
    """The state of ``codec_hook``: a codec for the gradients of a DDP model.

    Args:
        ddp: the wrapped model; all ranks make this object at the same time.
        codec: as ``gradients.codec`` of a strategy: ``"half"``, ``{"kind": "powersgd", "rank": 2}``
            or one of the types in ``slipstream.strategy``.
        optimizer: only for DGC, which applies its momentum.
        loss_scale: returns the present loss scale, e.g. ``scaler.get_scale``: what a codec keeps
            from step to step must not be in its units.
        nonfinite: what becomes of gradients that are infinite or NaN on any rank. ``raise``:
            ``backward()`` raises on all ranks, before any update, with the rank and the parameter.
            ``allow``: they are so on all ranks, and the codec forgets the step; ``GradScaler``
            skips it, others compare ``skipped`` before and after ``backward()``. None: ``allow``
            with a ``loss_scale``, else ``raise``.
        transport: as ``gradients.transport`` of a strategy.

    Raises:
        ModelError: not a DDP model, DGC without an optimizer that it can take over, or
            ``transport: auto`` or ``sharded``.
        StrategyError: no such codec or transport.
        UsageError: no such ``nonfinite``.

    Accumulate under ``ddp.no_sync()``; save ``state_dict()`` on every rank; call ``close()`` before
    the process group is destroyed.

    Exactness: that of the codec; bitwise the same on all ranks, and bitwise the same run where it
    resumes from ``state_dict()`` under a new DDP model, whatever that one's buckets are.

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
        codec: CodecConfig | str | Mapping[str, object],
        *,
        optimizer: torch.optim.Optimizer | None = None,
        loss_scale: Callable[[], float] | None = None,
        nonfinite: Literal["raise", "allow"] | None = None,
        transport: TransportConfig | str | Mapping[str, object] = "flat",
    ) -> None:
        config, way = checked(ddp, codec, transport, nonfinite)
        assert isinstance(ddp, DistributedDataParallel)
        trainables = parameters_of(ddp.module, trainable=True)
        # torch tells nowhere else which parameters DDP averages: those that required a gradient
        # when it was made.
        buckets = ddp.reducer._get_zeros_like_grad_buckets()
        averaged = {p: bucket.buffer().dtype for bucket in buckets for p in bucket.parameters()}
        del buckets  # as large as all gradients
        names = {p: name for name, p in reversed(list(ddp.module.named_parameters()))}
        self._names = {p: name for p, name in names.items() if p in averaged}
        self._dtypes = averaged
        members = dist.get_process_group_ranks(ddp.process_group)
        self._ranks = Ranks(dist.get_rank(ddp.process_group), len(members))
        self._correction: MomentumCorrection | None = None
        if optimizer is not None:
            check_momentum_correction(optimizer, trainables, config)
            self._correction = MomentumCorrection(optimizer, trainables, config, len(members))
        elif any(isinstance(codec_of(config, t.name), DgcConfig) for t in trainables):
            raise ModelError("the codec dgc applies momentum: DdpCodec(..., optimizer=...)")
        momenta = self._correction.momenta if self._correction else {}
        self._plan = CompressionPlan(partial(codec_of, config), self._ranks, momenta)
        # torch names a group that its members alone make by the number of groups: one that ended
        # would leave its addresses to the next.
        self._ends_group = len(members) == dist.get_world_size()
        alone = not self._ends_group
        group = new_group(members, like=ddp.process_group, members_alone=alone)
        assert group is not None
        self._own_group = group
        single = make_transport(way, group)
        self._channel = Channel(single, [single], next(ddp.parameters()).device)
        self._loss_scale = loss_scale or (lambda: 1.0)
        self._raises = nonfinite == "raise" or (nonfinite is None and loss_scale is None)
        self._finds_unused = bool(ddp.find_unused_parameters)
        self._bucket_bytes = int(ddp.bucket_bytes_cap)
        self._states = CodecStates(self._correction.buffers if self._correction else {})
        self._lay_out()
        self._backward = Backward(open=False)
        self._watch: MomentumWatch | None = None
        if optimizer is not None:
            momentous = {p: name for p, name in self._names.items() if name in momenta}
            self._watch = MomentumWatch(ddp, optimizer, momentous, self._used, self._loss_scale)
        self._closed = False
        self.step = self.skipped = 0

    def start(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Take the gradients of a bucket, and exchange what is complete; DDP waits for the future.

        Raises:
            UsageError: after ``close()``, or the optimizer's momentum was changed under DGC.
            ModelError: sparse gradients, or parameters of another model than the hook's.
            ExchangeError: an exchange of the last backward failed.
            NonFiniteError: gradients are infinite or NaN, and are not allowed to be; where DDP
                waits for the bucket, which makes a RuntimeError of it.
        """
        if self._closed:
            raise UsageError(
                "a backward after DdpCodec.close(): DDP cannot drop a hook; wrap the module in "
                "DistributedDataParallel anew, with a DdpCodec of its own or none"
            )
        buffer, row = bucket.buffer(), real_row(bucket.buffer())
        if buffer.is_sparse:
            names = ", ".join(self._names.get(p, "?") for p in bucket.parameters())
            raise ModelError(
                f"{names}: sparse gradients, which DdpCodec does not compress; accelerate() does"
            )
        route = self._routes.of(bucket.parameters(), row)
        _, group, slot = route[0]
        # Under static_graph all buckets of the first backward say that they are number 0 (2.15).
        if not self._backward.open or group.has(slot):
            self._begin()
        devices: list[int | str | torch.device] | None = [buffer.device] if buffer.is_cuda else None
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        arrived = Arrived(buffer, future, missing=len(route))
        self._backward.add(arrived)
        for where, group, slot in route:
            group.put(slot, arrived, row[where])
            if not group.missing:
                self._backward.started += 1
                self._start(group)
        if bucket.is_last() and self._backward.started < len(self._groups):
            missing = [group.names[i] for group in self._groups for i in group.not_come()]
            raise other_parameters(f"not {', '.join(missing)}")
        # What `set_exception` stores DDP would take for a tensor; an error of `then` it raises.
        return future.then(lambda averaged: averaged.wait())

    def _begin(self) -> None:
        """A new backward: raise errors of the last one, and drop what that left unfinished."""
        if self._backward.error is not None:
            raise ExchangeError(
                f"an exchange failed earlier ({self._backward.error}), and ranks may be out of "
                "step since: start the run again from its last checkpoint"
            ) from self._backward.error
        self._channel.wait()  # of an earlier backward, so in flight on no rank
        if self._correction is not None:
            self._correction.check()
        if self._backward.open:  # it raised halfway, on every rank: else DDP would still wait
            self._states.settle(counts=False)
            if self._watch is not None:
                self._watch.forget()
        if self._watch is not None:
            self._watch.backward_begins()
        self._backward = Backward()
        for group in self._groups:
            group.reset()

    def _start(self, group: BucketGroup) -> None:
        loss_scale, backward = self._loss_scale(), self._backward
        number, is_last = backward.started, backward.started == len(self._groups)

        def exchange() -> ExchangeSteps:
            try:
                yield from self._average(group, loss_scale)
                if is_last:
                    self._settle()
                    backward.finish()
                sources, group.sources = group.sources, []  # DDP may free its buckets now
                for arrived, _ in sources:
                    arrived.taken_back()
            except Exception as error:
                backward.fail(error)
                raise

        label = Label("allreduce", lambda: f"rank {self._ranks.rank}, exchange {number}")
        self._channel.start(label, exchange())

    def _average(self, group: BucketGroup, loss_scale: float) -> ExchangeSteps:
        """Average the gradients of a group, in place; only codecs need their true size."""
        if group.codec is None:
            loss_scale = 1.0
        rows = [row for _, row in group.sources]
        sizes = [row.numel() for row in rows]
        *pieces, padding = group.values.split([*sizes, group.values.numel() - sum(sizes)])
        for row, piece in zip(rows, pieces, strict=True):
            scale_into(piece, row, 1.0 / self._ranks.count / loss_scale)
        padding.zero_()
        if group.codec is None:
            yield AllReduce(group.values)
            group.is_finite = is_finite(group.values)
        else:
            yield from self._compress(group, group.codec, pieces)
        if self._raises and not group.is_finite:  # alike on all ranks
            yield from self._raise_nonfinite(group, rows)
        for row, piece in zip(rows, pieces, strict=True):
            torch.mul(piece, loss_scale, out=row)

    def _compress(
        self, group: BucketGroup, codec: NamedCompressor, pieces: Sequence[torch.Tensor]
    ) -> ExchangeSteps:
        """Let the codec sum the pieces; what it owes to an unused parameter stays owed.

        Where DDP looks for unused parameters, it throws away what the hook returns for those that
        no rank has used. It does not tell the hook which: a gradient of zeros counts as unused.
        """
        flags = torch.zeros(group.num_flags, dtype=torch.uint8, device=group.values.device)
        if group.num_flags > 1:
            flags[:-1] = torch.stack([piece.any() for piece in pieces])
        group.is_finite = yield from codec.exchange(group.values, flags, self.step)
        unused = [slot for slot, used in enumerate(flags[:-1].tolist()) if not used]
        codec.compressor.forget(unused)
        for slot in unused if group.is_finite else ():
            pieces[slot].zero_()

    def _raise_nonfinite(
        self, group: BucketGroup, rows: Sequence[torch.Tensor]
    ) -> Generator[AllGather, None, None]:
        """Raise on every rank; name the ranks whose own gradients are not finite."""
        own = next((slot for slot, row in enumerate(rows) if not is_finite(row)), -1)
        found = torch.full((self._ranks.count, 1), -1, device=group.values.device)
        yield AllGather(found.new_full((1,), own), found)
        slots = dict(enumerate(found.flatten().tolist()))
        raise nonfinite_gradients(
            {rank: group.names[slot] for rank, slot in slots.items() if slot >= 0},
            group.names[0],
            self.step + self.skipped + 1,
        )

    def _settle(self) -> None:
        finite = all(group.is_finite for group in self._groups)
        if self._watch is None or not finite:
            self._states.settle(finite)
        self.step += finite
        self.skipped += not finite

    def _used(self, used: bool) -> None:
        """An update has used the averages of the last backward, or they were thrown away."""
        if not all(group.is_finite for group in self._groups):
            return  # settled
        self._states.settle(used)
        if not used:
            self.step, self.skipped = self.step - 1, self.skipped + 1

    def _lay_out(self) -> None:
        """Make the groups of all parameters that DDP averages."""
        kinds = {
            p: (self._plan.codec_of(name), p.device, p.dtype, self._dtypes[p])
            for p, name in self._names.items()
        }
        chosen = grouped(kinds, self._bucket_bytes)
        self._groups = [self._group(parameters) for parameters in chosen]
        pairs = zip(self._groups, chosen, strict=True)
        places = {p: (group, i) for group, inside in pairs for i, p in enumerate(inside)}
        self._routes = Routes(places)
        self._states.attach([group.codec for group in self._groups if group.codec is not None])

    def _group(self, parameters: Sequence[torch.Tensor]) -> BucketGroup:
        dtype = self._dtypes[parameters[0]]
        names = [self._names[p] for p in parameters]
        codec, named, num_flags = self._plan.codec_of(names[0]), None, 1
        numel = sum(p.numel() * (2 if p.is_complex() else 1) for p in parameters)
        late = [name for name in names if name not in self._plan.momenta]
        if codec is not None and codec.takes_momentum and late:
            raise ModelError(
                f"{', '.join(late)}: DDP averages what did not require a gradient when DdpCodec "
                "took over the optimizer's momentum; make DdpCodec before freezing"
            )
        if isinstance(codec, HalfConfig):
            dtype = HalfCodec(codec.dtype).wire_dtype
        elif codec is not None:
            num_flags = len(parameters) + 1 if self._finds_unused else 1
            seed = crc32(names[0].encode())
            named = self._plan.compressor(codec, names, parameters, num_flags=num_flags, seed=seed)
            numel, dtype = named.compressor.num_values, named.compressor.works_in
        values = torch.zeros(numel, dtype=dtype, device=parameters[0].device)
        return BucketGroup(names, values, named, num_flags)

    # State.

    def codec_state(self) -> NamedState:
        """State of the codecs on this rank, by parameter; every rank saves its own."""
        return self._states.state()

    def state_dict(self) -> dict[str, object]:
        """State with which this rank goes on bit for bit: every rank saves its own."""
        rank, count = self._ranks.rank, self._ranks.count
        return {
            "rank": rank,
            "ranks": count,
            "step": self.step,
            "bucket_bytes": self._bucket_bytes,
            "codec": self.codec_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict()`` of the same rank, before the next backward.

        Raises:
            UsageError: the state is another rank's, or of another number of ranks, or holds
                parameters that this model does not have.
        """
        if missing := sorted({"rank", "ranks", "step", "codec"} - {*state}):
            raise UsageError(
                f"this state lacks {', '.join(missing)}; allowed: what state_dict() of a DdpCodec "
                "returned on this rank"
            )
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
        unknown = sorted(set(state["codec"]) - set(self._names.values()))
        if unknown:
            raise UsageError(
                f"this state holds what a codec owes to {', '.join(unknown)}, which this model "
                "does not have; load it into the model that it was saved with"
            )
        if self._watch is not None:
            self._watch.forget()
        if self._correction is not None:
            self._correction.restored()
        self.step = state["step"]
        self._bucket_bytes = state.get("bucket_bytes", self._bucket_bytes)
        self._states = CodecStates(state["codec"])
        self._lay_out()

    def close(self) -> None:
        """End the thread and, where DDP has trained on the whole world, the process group; give
        the optimizer its momentum back. DDP must not go on. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._channel.close()
        if self._watch is not None:
            self._watch.close()
        if self._correction is not None:
            self._correction.give_back()
        # An exchange has ended: no rank is still connecting to this one.
        at_rest = self._backward.started and self._channel.arrived and not self._backward.error
        is_there = self._own_group in dist.distributed_c10d._world.pg_map
        if self._ends_group and at_rest and is_there:
            dist.destroy_process_group(self._own_group)
        del self._channel, self._own_group  # its connections end with the last reference

    def __deepcopy__(self, memo: dict[int, object]) -> "DdpCodec":
        """Itself: a copy of a DDP model, e.g. for an average of weights, has no hook at work."""
        return self

    def __reduce__(self) -> str:
        raise UsageError(
            "a DdpCodec has a thread and a process group, and cannot be pickled, nor can the DDP "
            "model that it is registered on; save ddp.module.state_dict() and "
            "DdpCodec.state_dict() of every rank"
        )


def codec_hook(state: DdpCodec, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The hook: ``ddp.register_comm_hook(DdpCodec(ddp, "int8"), codec_hook)``."""
    return state.start(bucket)
