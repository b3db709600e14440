"""From a ready gradient to an averaged gradient: hooks count, full segments leave in order.

Never touches the optimizer, the loss or the data; which gradients share a segment is ``layout``'s
to say.

[Note: One backward]
``begin`` opens it. Each gradient that autograd has accumulated calls ``_on_gradient``: it is scaled
into its bucket, and a segment whose gradients are all there goes to the channel, strictly in
segment order, while backward still runs. ``end`` sends what is left (segments with unused
parameters, and all of them where the strategy asks for no overlap), waits, and leaves the averages
in ``parameter.grad``. All ranks thus issue the same exchanges in the same order, whatever their
graphs did.

The first backward that exchanges has no buckets yet: it is observed, the ranks agree on the ready
order, the segments are laid out, and everything is sent after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist

from slipstream.errors import ExchangeError
from slipstream.gradients.buckets import Bucket, DenseBucket, SparseBucket, Transport
from slipstream.gradients.buffers import Buffers
from slipstream.gradients.compressed import CodedBucket, CompressionPlan, NamedState
from slipstream.gradients.interface import GradientEngine
from slipstream.gradients.layout import Gradient, plan_segments
from slipstream.gradients.messages import (
    averaged_already,
    came_again,
    came_outside,
    failed,
    frozen_no_more,
    out_of_step,
)
from slipstream.gradients.ready_order import Observer, ReadyOrder
from slipstream.gradients.report_rows import exchange_rows
from slipstream.gradients.segments import (
    BucketSlot,
    NamedParameter,
    Segment,
    SegmentStats,
    gradients_of,
    lay_out,
)
from slipstream.strategy import Row, Split
from slipstream.trace.event import BUFFERS, allreduce
from slipstream.trace.recorder import Recorder, Stamp
from slipstream.transport.channel import Channel, Label


@dataclass(slots=True)
class _Backward:
    """The backward pass under way."""

    exchange: bool
    scale: torch.Tensor  # of no axes: half the cost of a Python number, once a gradient
    raised: torch.Tensor  # the same with the loss scale, which fp16 keeps while it travels
    fills: bool = False  # whether gradients go into their buckets as they come
    due: list[int] = field(default_factory=list)
    next_shipment: int = 0
    stamps: list[Stamp | None] | None = None  # when each gradient was there; None: not recorded


class Engine(GradientEngine):
    """Averages the gradients of ``trainables`` over the ranks of the channel's groups.

    Args:
        trainables: every parameter that requires a gradient, tied ones once.
        frozen: the other parameters, which must stay frozen.
        buffers: gives the model's buffers, kept equal to those of the first rank.
        split: which gradients share an exchange.
        overlap: exchange while backward still runs, else strictly after it.
        transport: begins to leave the sum over a group in a tensor.
        coding: what makes gradients smaller for the wire.
        channel: runs exchanges in order beside backward.
        control: a group of CPU tensors for agreements, apart from the channel's.
        anywhere: whether a flag is up on any rank that shares this model: where gradients of one
            overflow, none of them may update.
        recorder: None when nothing is recorded.

    Exactness: reordered against one process on the joined batch; bitwise where the order of the sum
    is the same (two ranks).
    """

    def __init__(
        self,
        trainables: Sequence[NamedParameter],
        frozen: Sequence[NamedParameter],
        buffers: Callable[[], Iterable[torch.Tensor]],
        *,
        split: Split,
        overlap: bool,
        transport: Transport,
        coding: CompressionPlan,
        channel: Channel,
        control: dist.ProcessGroup,
        any_rank: Callable[[bool], bool] = bool,
        recorder: Recorder | None = None,
    ) -> None:
        self._trainables, self._frozen = list(trainables), list(frozen)
        self._buffers = Buffers(buffers)
        self.split, self._overlap, self._transport = split, overlap, transport
        self._coding = coding
        self._channel, self._control, self._recorder = channel, control, recorder
        self._any_rank, self._rank = any_rank, dist.get_rank()
        self._device = trainables[0].parameter.device
        self._order: ReadyOrder | None = None
        self._observer: Observer | None = None
        self._shipments: list[Segment] = []
        self._places: list[BucketSlot] = []
        self._backward: _Backward | None = None
        self._local_only = False
        self._lost: str | None = None
        self._averaged = False
        self._ready: list[Stamp | None] | None = None
        self._kept: NamedState = {}  # of codecs, as long as there are no buckets
        self._lossy = False  # whether finite gradients may come back infinite, or codecs remember
        self._loss_scale = 1.0
        self.overflowed = False
        self.step = 0
        self._hooks = [
            t.parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, index))
            for index, t in enumerate(self._trainables)
        ]

    # What the session calls, in this order.

    def begin(self, *, exchange: bool, scale: float, loss_scale: float = 1.0) -> None:
        """Open a backward pass; with ``exchange`` it ends in sums over ranks times ``scale``.

        ``loss_scale``: of which ``scale`` takes the inverse; what travels in fp16 loses it only
        when it is there, as small gradients would be 0 without it.

        A second one before ``updated`` adds to the averages of the first, but not where codecs
        would take those for gradients of this rank.
        """
        if self._lost:
            raise out_of_step(self._lost)
        if exchange and self._averaged and self._coded:
            raise averaged_already()
        thawed = [t.name for t in self._frozen if t.parameter.requires_grad]
        if thawed:
            raise frozen_no_more(thawed)
        self._loss_scale = loss_scale
        factors = torch.tensor([scale, scale * loss_scale], dtype=torch.float64)
        self._backward = _Backward(exchange, *factors)
        self._ready = None
        if not exchange:
            return
        if self._recorder is not None and self._recorder.active:
            self._ready = self._backward.stamps = [None] * len(self._trainables)
        if self._averaged:
            self._keep_averages(scale)
        if self._order is None:
            self._observer = Observer(len(self._trainables))
        else:
            self._open(self._backward)
            self._backward.fills = self._overlap
        if self._buffers:
            self._buffers.stage()
            facts = {"bytes": self._buffers.num_bytes}
            text = partial(failed, self._at, "the broadcast of the buffers")
            self._channel.start(Label(BUFFERS, text, facts), self._buffers.start)

    def end(self) -> None:
        """Close the backward pass: returns when ``parameter.grad`` holds the averages."""
        backward, self._backward = self._backward, None
        assert backward is not None
        if not backward.exchange:
            return
        try:
            if self._observer is not None:
                self.install(self._agree(self._observer))
                self._observer = None
                self._open(backward)
            self._send(backward, everything=True)
            self.overflowed = False
            self._channel.wait()
            self.overflowed = self._any_rank(self.overflowed)
        except Exception as error:
            self._lost = str(error)
            raise
        for bucket in self._coded:  # what codecs have learned they keep if all is finite
            bucket.settle(not self.overflowed)
        if self._buffers:
            self._buffers.restore()
        self._averaged = True

    def updated(self, step: int) -> None:
        """The gradients were used and are gone; ``step`` updates are done."""
        self.step = step
        self._averaged = False

    def abort(self, error: BaseException) -> None:
        """Backward itself raised: the ranks are out of step from here on."""
        if self._backward is not None and self._backward.exchange:
            self._lost = repr(error)
        self._backward = None
        self._observer = None

    def local_only(self, on: bool) -> None:
        """Whether gradients may arrive outside ``begin`` and ``end``, and stay on this rank."""
        self._local_only = on

    def close(self) -> None:
        """Remove the hooks; gradients become tensors of their own again."""
        for hook in self._hooks:
            hook.remove()
        for trainable in self._trainables:
            if self._shipments and trainable.parameter.grad is not None:
                trainable.parameter.grad = trainable.parameter.grad.clone()
        self._shipments, self._places = [], []

    @property
    def in_flight(self) -> bool:
        """Whether exchanges were started that nobody has waited for."""
        return self._channel.in_flight

    def report_rows(self) -> list[Row]:
        """What is exchanged, for the overview."""
        return exchange_rows(self.segments, self.codec_state)

    @property
    def _at(self) -> str:
        return f"rank {self._rank}, step {self.step}"

    # The layout, once the ready order is agreed.

    @property
    def order(self) -> ReadyOrder | None:
        """The agreed ready order; None before the first exchange."""
        return self._order

    @property
    def segments(self) -> tuple[SegmentStats, ...]:
        """The segments in the order of their exchange; empty before the first exchange."""
        return tuple(shipment.summary for shipment in self._shipments)

    @property
    def gradients(self) -> tuple[Gradient, ...]:
        """Every gradient in the agreed ready order; empty before the first exchange."""
        if self._order is None:
            return ()
        sparse_dims = [self._order.sparse_dims[i] for i in self._order.order]
        return tuple(gradients_of([self._trainables[i] for i in self._order.order], sparse_dims))

    def cuts(self, split: Split) -> tuple[int, ...]:
        """Behind the last gradient of each segment that a split would make."""
        assert self._order is not None
        ready = [self._trainables[i] for i in self._order.order]
        sparse_dims = [self._order.sparse_dims[i] for i in self._order.order]
        gradients = gradients_of(ready, sparse_dims, self._coding)
        return tuple(segment.stop for segment in plan_segments(gradients, split))

    @property
    def ready(self) -> list[Stamp | None] | None:
        """When each gradient of the last recorded backward was there, in ready order."""
        if self._ready is None or self._order is None:
            return None
        return [self._ready[index] for index in self._order.order]

    def install(self, order: ReadyOrder, split: Split | None = None) -> None:
        """Lay out segments and buckets for a ready order, and from now on a split, of all ranks."""
        self.split = split or self.split
        kept = self.codec_state()
        self._shipments, self._places = [], []  # their memory is needed for the new ones
        self._shipments, self._places = lay_out(self._trainables, order, self.split, self._coding)
        every = (bucket for shipment in self._shipments for bucket in shipment.buckets)
        self._lossy = any(b.may_overflow or isinstance(b, CodedBucket) for b in every)
        self._order = order
        self.load_codec_state(kept)

    # What codecs keep between exchanges, by parameter.

    @property
    def _coded(self) -> list[CodedBucket]:
        every = (bucket for shipment in self._shipments for bucket in shipment.buckets)
        return [bucket for bucket in every if isinstance(bucket, CodedBucket)]

    def codec_state(self) -> NamedState:
        """What codecs keep on this rank, or kept of gradients that travel uncoded by now."""
        own = {name: state for b in self._coded for name, state in b.state().items()}
        return {**self._kept, **own}

    def load_codec_state(self, kept: NamedState) -> None:
        """Go on from ``codec_state()``, of another split maybe."""
        coded = {name for bucket in self._coded for name in bucket.names}
        self._kept = {name: state for name, state in kept.items() if name not in coded}
        for bucket in self._coded:
            bucket.load(kept)

    # One backward.

    def _open(self, backward: _Backward) -> None:
        assert self._order is not None
        backward.due = list(self._order.firings)
        for shipment in self._shipments:
            shipment.missing = len(shipment.names)

    def _keep_averages(self, scale: float) -> None:
        """Averages that all ranks hold already must come out of the next sum as they are."""
        factor = 1 / (scale * dist.get_world_size(self._control))
        if factor != 1:  # some rank has no batch of its own: it adds the averages all the same
            for trainable in self._trainables:
                if trainable.parameter.grad is not None:
                    trainable.parameter.grad.mul_(factor)

    def _on_gradient(self, index: int, parameter: torch.Tensor) -> None:
        """Autograd has added to ``parameter.grad``; small layers feel each microsecond here."""
        backward = self._backward
        if backward is not None and backward.stamps is not None:
            assert self._recorder is not None
            backward.stamps[index] = self._recorder.stamp(self._device)
        if backward is None or not backward.fills:
            self._look_on(backward, index, parameter)
            return
        due = backward.due[index] = backward.due[index] - 1
        if due:
            if due < 0:
                assert self._order is not None
                raise came_again(self._at, self._trainables[index].name, self._order.firings[index])
            return
        place = self._places[index]
        bucket = place.bucket
        bucket.fill(place.slot, backward.raised if bucket.may_overflow else backward.scale)
        shipment = place.shipment
        shipment.missing -= 1
        if not shipment.missing:
            self._send(backward)

    def _look_on(self, backward: _Backward | None, index: int, parameter: torch.Tensor) -> None:
        """A gradient that is not to be filled in now: observed, left for later, or a mistake."""
        if backward is None:
            if not self._local_only:
                raise came_outside(self._trainables[index].name)
        elif backward.exchange and self._observer is not None:
            assert parameter.grad is not None
            self._observer.saw(index, parameter.grad)

    def _send(self, backward: _Backward, everything: bool = False) -> None:
        """Hand segments to the channel in order, as far as they are full (or all of them)."""
        while backward.next_shipment < len(self._shipments):
            shipment = self._shipments[backward.next_shipment]
            if shipment.missing and not everything:
                return
            for bucket in shipment.buckets:
                bucket.complete(backward.raised if bucket.may_overflow else backward.scale)
            if self._recorder is not None and self._recorder.active:
                shipment.ready = self._recorder.stamp(self._device)
            self._start(backward.next_shipment)
            backward.next_shipment += 1

    def _start(self, index: int) -> None:
        """Hand one segment to the channel: dense buckets at once, sparse gradients staged."""
        shipment = self._shipments[index]
        what = f"the exchange of segment {index + 1} of {len(self._shipments)}"
        text = partial(failed, self._at, what, shipment.names)
        for bucket in sorted(shipment.buckets, key=lambda b: isinstance(b, SparseBucket)):
            label = Label(allreduce(index + 1), text, self._facts(index, bucket))
            landed = partial(self._land, bucket)
            match bucket:
                case CodedBucket():
                    self._channel.stage(label, partial(bucket.exchange, self.step), landed)
                case DenseBucket():
                    self._channel.start(label, partial(bucket.start, self._transport), landed)
                case SparseBucket():
                    self._channel.stage(label, bucket.exchange, landed)

    def _land(self, bucket: Bucket) -> None:
        """The averages of one bucket are here, those of others may be on their way."""
        if self._lossy and not bucket.is_finite:
            self.overflowed = True
        bucket.finish()
        if bucket.may_overflow and isinstance(bucket, DenseBucket):
            bucket.unscale(self._loss_scale)

    def _facts(self, index: int, bucket: Bucket) -> dict[str, object]:
        """What the trace says of an exchange."""
        recorder = self._recorder
        if recorder is None or not recorder.active:
            return {}
        return {
            "segment": index,
            "bytes": bucket.num_bytes,
            "wire_bytes": self._shipments[index].wire_bytes,
            "gradients": len(self._shipments[index].names),
            "collectives": len(self._shipments[index].buckets),
            "ready": self._shipments[index].ready,
        }

    def _agree(self, observer: Observer) -> ReadyOrder:
        try:
            return observer.agree(self._control)
        except RuntimeError as error:  # a peer is gone before its first exchange
            what = "the agreement on the order of the gradients"
            raise ExchangeError(f"{failed(self._at, what)}: {error}") from error
