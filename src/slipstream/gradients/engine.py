"""From a ready gradient to an averaged one: hooks count, full segments are exchanged in order.

Never touches the optimizer, the loss or the data. ``layout`` decides which gradients share a
segment, the channel's transport how a segment travels.

[Note: One backward]
``begin`` opens it. Each gradient that autograd has accumulated calls ``_on_gradient``: it is scaled
into its bucket, and a segment whose gradients are all there goes to the channel, strictly in
segment order, while backward still runs. ``end`` sends the rest (segments with unused parameters,
and all of them where the strategy asks for no overlap), waits, and leaves the averages in
``parameter.grad``. So all ranks start the same exchanges in the same order, whatever their graphs
did.

The first backward that exchanges has no buckets yet: it is observed, the ranks agree on the ready
order, the segments are laid out, and everything is sent after it.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from slipstream.checks.sketch import AverageSamples
from slipstream.errors import ExchangeError, SlipstreamError
from slipstream.gradients.buckets import Bucket
from slipstream.gradients.buffers import Buffers
from slipstream.gradients.compressed import (
    CodecSample,
    CodecStates,
    CompressionPlan,
    NamedState,
)
from slipstream.gradients.finite import first_nonfinite
from slipstream.gradients.interface import GradientEngine, drop_unused, is_unused
from slipstream.gradients.last_hooks import LastHooks
from slipstream.gradients.layout import Gradient, plan_segments
from slipstream.gradients.messages import (
    backward_repeated,
    exchange_failed,
    gradient_behind_average,
    gradient_outside,
    gradient_repeated,
    gradient_taken,
    out_of_step,
    sum_changed,
    unfrozen,
)
from slipstream.gradients.ready_order import Observer, ReadyOrder
from slipstream.gradients.report_rows import exchange_rows
from slipstream.gradients.sampling import SampledGradients
from slipstream.gradients.segments import (
    BucketSlot,
    GradientLayout,
    NamedParameter,
    SegmentStats,
    gradients_of,
    in_ready_order,
    lay_out,
    parameters_of,
    sparse_tables,
)
from slipstream.gradients.shards import ShardedGradient, Shards
from slipstream.gradients.untouched import Untouched
from slipstream.strategy import Row, SplitConfig
from slipstream.trace.event import BUFFERS, allreduce
from slipstream.trace.recorder import Stamp
from slipstream.transport.channel import Channel, Label


@dataclass(slots=True)
class _Backward:
    """The backward pass under way."""

    exchange: bool
    loss_scale: float
    looks: bool  # whether gradients are finite
    # As tensors without axes: multiplying by a Python number costs twice as much, once a gradient.
    scale: torch.Tensor
    scale_fp16: torch.Tensor  # with the loss scale, which gradients in fp16 keep while they travel
    observer: Observer | None = None  # in the first backward that exchanges
    fills: bool = False  # whether gradients are copied into their buckets as they come
    unused: frozenset[int] = frozenset()  # parameters, before a dummy batch
    slots: Sequence[BucketSlot] = ()
    due: list[int] = field(default_factory=list)  # accumulations still to come, by parameter
    next_segment: int = 0
    sampled: SampledGradients | None = None  # for a proof
    stamps: list[Stamp | None] | None = None  # when each gradient was ready; None: not recorded

    def scale_for(self, bucket: Bucket) -> torch.Tensor:
        return self.scale_fp16 if bucket.may_overflow else self.scale


class Engine(GradientEngine):
    """Averages the gradients of ``trainables`` over the ranks of the channel's transports.

    Args:
        model: its buffers are kept equal to those of the first rank, and its other parameters must
            stay frozen.
        trainables: every parameter whose gradient this rank exchanges, tied ones once.
        split: which gradients share an exchange.
        overlap: exchange while backward still runs, else strictly after it.
        compression_plan: which codec compresses which gradient.
        channel: runs exchanges in order beside backward.
        control: a group of CPU tensors for agreements, used by nothing else meanwhile.
        looks: whether gradients that are not finite are looked for, where there is no loss scale.
        any_rank: whether a flag is up on any rank that shares this model: where gradients overflow
            on one, none of them may update.

    Attributes:
        overlap: as given; may be changed between two backwards, on all ranks alike.

    Exactness: reordered against one process on the joined batch; bitwise where the order of the sum
    is the same (two ranks).
    """

    def __init__(
        self,
        model: nn.Module,
        trainables: Sequence[NamedParameter],
        *,
        split: SplitConfig,
        overlap: bool,
        compression_plan: CompressionPlan,
        channel: Channel,
        control: dist.ProcessGroup,
        looks: bool = False,
        any_rank: Callable[[bool], bool] = bool,
    ) -> None:
        self._trainables = list(trainables)
        self._frozen = parameters_of(model, trainable=False)
        tables = sparse_tables(model)
        self._sparse = [i for i, t in enumerate(self._trainables) if t.parameter in tables]
        self._buffers = Buffers(model.named_buffers)
        self.split, self.overlap, self._plan = split, overlap, compression_plan
        self._channel, self._control, self._any_rank = channel, control, any_rank
        self._looks = looks
        self._found: list[torch.Tensor] = []  # of each bucket that has landed
        self._samples: AverageSamples | None = None  # of the next exchange
        self._shards = compression_plan.shards
        names = [t.name for t in self._trainables]
        self._compresses = compression_plan.ever_compresses(names)
        self._first_steps = compression_plan.first_steps(names)
        self._layout: GradientLayout | None = None
        self._codecs = CodecStates()
        self._backward: _Backward | None = None
        self._stamps: list[Stamp | None] | None = None
        self._local_only = False
        self._averaged = self._undone = False
        self._mixed: str | None = None  # a parameter with a gradient of this rank on its average
        self._failure: str | None = None
        self._observer: Observer | None = None  # until the first exchange
        self._untouched = Untouched(self._trainables)
        self._dummies: set[int] = set()  # without gradient but by dummy batches, in this window
        self._unsettled = False  # whether codecs have learned from an exchange without an update
        self.overflowed = self.nonfinite = False
        self.step = 0
        self._hooks = LastHooks([t.parameter for t in self._trainables], self._on_gradient)

    # What the session calls, in this order.

    def begin(
        self, *, exchange: bool, scale: float, loss_scale: float = 1.0, dummy: bool = False
    ) -> None:
        """Open a backward pass; with ``exchange`` it ends in sums over ranks times ``scale``.

        A second one before ``updated`` adds to the averages of the first. Where codecs are at work
        it raises, as they would take those averages for gradients of this rank. Without a backward
        pass before ``end``, the gradients that have accumulated are exchanged.

        Args:
            exchange: whether gradients are exchanged; else they accumulate on this rank.
            scale: of the sums; the inverse of ``loss_scale`` is part of it.
            loss_scale: gradients that travel as fp16 keep it until they arrive, as small ones would
                become 0 without it.
            dummy: whether the batch is a dummy batch, whose gradients of zero are no use.

        Raises:
            UsageError: an earlier backward failed, or this one is not allowed now.
        """
        if self._failure:
            raise out_of_step(self._failure)
        if exchange and self._averaged and self._compresses:
            raise backward_repeated()
        self._check_mixed()
        if self._untouched.check_sums() and self._shards is not None:
            self._shards.clear()  # averages to which these sums would have been added
        self._hooks.come_last()
        thawed = [t.name for t in self._frozen if t.parameter.requires_grad]
        if thawed:
            raise unfrozen(thawed)
        buffers = self._buffers.stage() if exchange and self._buffers else None
        scales = torch.tensor([scale, scale * loss_scale], dtype=torch.float64)
        looks = self._looks and loss_scale == 1.0
        backward = self._backward = _Backward(exchange, loss_scale, looks, *scales)
        self._stamps = None
        if self._shards is not None:
            self._shards.begin()
        if exchange or not dummy:
            drop_unused(self._trainables[i].parameter for i in self._dummies)
            self._dummies.clear()
        if dummy:
            each = enumerate(self._trainables)
            backward.unused = frozenset(i for i, t in each if t.parameter.grad is None)
        if self._layout is None:
            backward.observer = Observer(len(self._trainables))
        if self._averaged and not self._undone:  # before gradients of this rank are added to them
            self._undo_average(scale)
            self._undone = True
        if not exchange:
            return
        if self._channel.recording:
            self._stamps = backward.stamps = [None] * len(self._trainables)
        if self._layout is not None:
            self._open(backward, self._layout)
            backward.fills = self.overlap
            if self._samples is not None and not self._averaged:
                backward.sampled = SampledGradients(
                    self._samples,
                    self._trainables,
                    self._layout,
                    self._plan,
                    scale,
                    self._shards,
                )
        if buffers is not None:
            describe = partial(exchange_failed, self._at, "the broadcast of the buffers")
            args = {"bytes": self._buffers.num_bytes}
            label = Label(BUFFERS, describe, args, "the broadcast of the buffers")
            self._channel.start(label, buffers)

    def end(self) -> None:
        """Close the backward pass: returns when ``parameter.grad`` holds the averages.

        Raises:
            ExchangeError: an exchange failed; names rank, step, segment and parameters.
            UsageError: the script has changed sums of a window by their ``data``.
        """
        backward = self._backward
        assert backward is not None
        if backward.observer:
            self._observer = backward.observer
        if not backward.exchange:
            self._dummies |= backward.unused
        elif backward.unused:
            late = (i for i in backward.unused if not backward.fills or backward.due[i] > 0)
            drop_unused(self._trainables[i].parameter for i in late)
        if backward.exchange:
            self._exchange(backward)
        else:
            self._untouched.note_sums()
        self._backward = None

    def check_averages(self) -> None:
        """Refuse to update with gradients that were changed, where a codec has added momentum."""
        self._check_mixed()
        self._untouched.check_averages()

    def _check_mixed(self) -> None:
        if self._mixed is not None:
            raise gradient_behind_average(self._mixed)

    @torch.no_grad()  # gradients of the script's own may have a graph
    def _exchange(self, backward: _Backward) -> None:
        """Send what was not sent under backward, and wait for everything."""
        if self._layout is None:
            self._open(backward, self._first_layout())
        if backward.fills and self._layout is not None:
            for segment in self._layout.segments:
                for bucket in segment.buckets:
                    bucket.check_gone()
        self._send(backward, everything=True)
        self.overflowed = False
        self._found.clear()
        self._channel.wait()
        moved = self._untouched.moved()
        self.nonfinite = bool(self._found) and bool(torch.stack(self._found).any())
        if self._any_rank(self.overflowed or self.nonfinite):
            self.overflowed, self.nonfinite = not backward.looks, backward.looks
        if moved is not None:  # behind all that ranks do together
            raise sum_changed(moved)
        if backward.sampled is not None:
            backward.sampled.averages()
        self._unsettled = True
        if self._plan.momenta:
            self._untouched.note_averages()
        if self._buffers:
            self._buffers.arrived()
        self._averaged, self._undone = True, False

    def updated(self, step: int, *, used: bool = True, late: bool = False) -> None:
        """The gradients are gone; ``step`` updates are done. Where they were not ``used``, codecs
        return to the state before their exchange. ``late``: a graph may have saved the buffers.

        Where a codec begins to work, or works in another way from here on, the gradients are laid
        out anew, for the bytes that travel now.
        """
        before, now = (bisect(self._first_steps, at) for at in (self.step, step))
        self.step, self._plan = step, replace(self._plan, step=step)
        if self._unsettled:
            self._codecs.settle(used and not self.overflowed)
        self._unsettled = self._averaged = self._undone = False
        self._mixed = None
        self._dummies.clear()
        self._untouched.forget()
        if late:
            self._buffers.forget()
        else:
            self._buffers.restore()
        if self._shards is not None:
            self._shards.clear()
        if before != now and self._layout is not None:
            self.install(self._layout.order)

    def abort(self, error: BaseException) -> None:
        """Backward or its exchange raised: the ranks are out of step from here on."""
        if self._backward is not None and self._backward.exchange:
            self.fail(error)
        self._backward = None

    def fail(self, error: BaseException) -> None:
        self._failure = str(error) if isinstance(error, SlipstreamError) else repr(error)

    def averages(self, parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
        """The averages that this rank's update will use: ``parameter.grad``, or its shards of
        them."""
        if self._shards is None:
            return super().averages(parameters)
        self._shards.adopt()  # what the script has assigned meanwhile
        shards, asked = self._shards.gradients, [*parameters]
        whole = super().averages(p for p in asked if p not in shards)
        return [*(shards[p] for p in asked if p in shards), *whole]

    def nonfinite_here(self) -> tuple[bool, str]:
        assert self._layout is not None
        buckets = [bucket for segment in self._layout.segments for bucket in segment.buckets]
        own = any(bool(bucket.nonfinite_here) for bucket in buckets)
        if self._shards is None:
            named = ((t.name, t.parameter.grad) for t in self._trainables)
        else:
            of_shards = self._shards.gradients
            named = ((t.name, of_shards.get(t.parameter)) for t in self._trainables)
        return own, first_nonfinite(named)

    def local_only(self, on: bool) -> None:
        """Whether gradients may arrive outside ``begin`` and ``end``, and stay on this rank."""
        self._local_only = on

    def close(self) -> None:
        """Remove the hooks; gradients become tensors of their own again."""
        self._hooks.close()
        if self._shards is not None:
            self._shards.clear()
        if self._layout is not None:
            for trainable in self._trainables:
                gradient = trainable.parameter.grad
                if gradient is not None:
                    shared = isinstance(gradient, ShardedGradient)  # nobody has the whole
                    trainable.parameter.grad = None if shared else gradient.clone()
        self._layout, self._codecs = None, CodecStates()

    @property
    def buffers_alike(self) -> bool:  # type: ignore[override]
        """Whether buffers are those of the first rank, unchanged since."""
        return self._buffers.alike

    @property
    def failed(self) -> bool:
        """Whether an exchange was broken off, so that the ranks are out of step."""
        return self._failure is not None

    @property
    def in_flight(self) -> bool:
        """Whether exchanges were started that nobody has waited for."""
        return self._channel.in_flight

    def report_rows(self) -> list[Row]:
        """Report what is exchanged, for the overview."""
        later = self._first_steps[bisect(self._first_steps, self.step) :]
        return exchange_rows(self.segments, self._codecs.num_bytes, *later[:1])

    @property
    def _at(self) -> str:
        return f"rank {dist.get_rank()}, step {self.step}"

    # The layout, once the ready order is agreed.

    @property
    def order(self) -> ReadyOrder | None:
        """The agreed ready order; None before the first exchange."""
        return self._layout.order if self._layout is not None else None

    @property
    def segments(self) -> tuple[SegmentStats, ...]:
        """The segments in the order of their exchange; empty before the first exchange."""
        return tuple(s.stats for s in self._layout.segments) if self._layout is not None else ()

    @property
    def gradients(self) -> tuple[Gradient, ...]:
        """Every gradient in the agreed ready order; empty before the first exchange."""
        if self._layout is None:
            return ()
        return tuple(gradients_of(*in_ready_order(self._trainables, self._layout.order)))

    def split_points(self, split: SplitConfig) -> tuple[int, ...]:
        """The index behind the last gradient of each segment that ``split`` would make."""
        assert self._layout is not None
        ready, sparse_dims = in_ready_order(self._trainables, self._layout.order)
        gradients = gradients_of(ready, sparse_dims, self._plan)
        return tuple(segment.stop for segment in plan_segments(gradients, split))

    @property
    def ready(self) -> list[Stamp | None] | None:
        """When each gradient of the last backward was ready, in ready order; None: not recorded."""
        if self._stamps is None or self._layout is None:
            return None
        return [self._stamps[index] for index in self._layout.order.order]

    def install(self, order: ReadyOrder, split: SplitConfig | None = None) -> None:
        """Lay out segments and buckets for a ready order, and a new split if given.

        Every rank calls it with the same values, between two backwards.
        """
        self.split = split or self.split
        self._codecs.detach()
        self._layout = None  # frees the old buckets before the new ones are allocated
        self._layout = lay_out(self._trainables, order, self.split, self._plan)
        self._codecs.attach(self._layout.compressors)

    def use_shards(self, shards: Shards | None) -> None:
        """Deliver averages to ``shards`` from now on, or whole ones to all ranks.

        Every rank calls it alike, between two updates.
        """
        if self._shards is not None:
            self._shards.end()
        self._shards, self._plan = shards, replace(self._plan, shards=shards)
        if self._layout is not None:
            self.install(self._layout.order)

    # What codecs keep between exchanges, by parameter.

    def codec_state(self) -> NamedState:
        """State of codecs on this rank, gradients included that travel uncompressed by now."""
        return self._codecs.state()

    def codec_sample(self) -> CodecSample:
        """Some values of it, which are enough to see that it was lost."""
        return self._codecs.sample()

    def load_codec_state(self, states: NamedState) -> None:
        """Go on from ``codec_state()``, of another split maybe."""
        self._codecs.load(states)

    # One backward.

    def _open(self, backward: _Backward, layout: GradientLayout) -> None:
        """Count all gradients as missing, and let the transport post its receives."""
        backward.slots, backward.due = layout.slots, list(layout.order.firings)
        for segment in layout.segments:
            segment.missing = len(segment.names)
            for bucket in segment.buckets:
                bucket.part_from_script()
        self._channel.prepare(layout.requests)

    def _undo_average(self, scale: float) -> None:
        """Scale averages, which all ranks hold, so that the next sum leaves them as they are."""
        factor = 1 / (scale * dist.get_world_size(self._control))
        if factor != 1:  # some rank has no batch of its own, but adds the averages all the same
            for trainable in self._trainables:
                if trainable.parameter.grad is not None:
                    trainable.parameter.grad.mul_(factor)

    def _on_gradient(self, index: int, parameter: torch.Tensor) -> None:
        """Take in an accumulated gradient; each microsecond counts for small layers."""
        backward = self._backward
        if backward is not None and backward.stamps is not None:
            backward.stamps[index] = self._channel.stamp()
        if backward is None or not backward.fills:
            self._on_unfilled(backward, index, parameter)
            return
        due = backward.due[index] = backward.due[index] - 1
        if due:
            if due < 0:
                assert self._layout is not None
                name, firings = self._trainables[index].name, self._layout.order.firings[index]
                raise gradient_repeated(self._at, name, firings)
            return
        slot = backward.slots[index]
        bucket, segment = slot.bucket, slot.segment
        if backward.sampled is not None:
            backward.sampled.own(index)
        if backward.unused and index in backward.unused and is_unused(parameter):
            parameter.grad = None
        else:
            scale = backward.scale_fp16 if bucket.may_overflow else backward.scale
            bucket.fill(slot.index, scale)
        segment.missing -= 1
        if not segment.missing:
            self._send(backward)

    def _on_unfilled(self, backward: _Backward | None, index: int, parameter: torch.Tensor) -> None:
        """Observe a gradient that is not copied now, leave it for ``end``, or refuse it."""
        if backward is None:
            name = self._trainables[index].name
            if not self._local_only:
                raise gradient_outside(name)
            if self._averaged and not self._undone:
                self._mixed = name  # refused where it is used: the script may zero it before
            self._untouched.forget_sums()
        elif backward.observer is not None:
            if parameter.grad is None:
                raise gradient_taken(self._trainables[index].name)
            backward.observer.saw(index, parameter.grad)

    def sample(self, samples: AverageSamples | None) -> None:
        self._samples = samples

    def _send(self, backward: _Backward, everything: bool = False) -> None:
        """Hand segments to the channel in order, as far as they are full (or all of them)."""
        assert self._layout is not None
        segments = self._layout.segments
        while backward.next_segment < len(segments):
            segment = segments[backward.next_segment]
            if segment.missing and not everything:
                return
            if backward.sampled is not None:
                backward.sampled.complete(backward.next_segment)
            for bucket in segment.buckets:
                bucket.complete(backward.scale_for(bucket))
                if backward.looks:
                    bucket.look()
            if self._channel.recording:
                segment.ready = self._channel.stamp()
            self._start(backward, self._layout)
            backward.next_segment += 1

    def _start(self, backward: _Backward, layout: GradientLayout) -> None:
        """Hand the buckets of the next segment to the channel."""
        index = backward.next_segment
        segment = layout.segments[index]
        what = f"segment {index + 1} of {len(layout.segments)}"
        describe = partial(exchange_failed, self._at, f"the exchange of {what}", segment.names)
        for bucket in segment.buckets:
            args: dict[str, object] = {}
            if self._channel.recording:
                args = {
                    "segment": index,
                    "bytes": bucket.num_bytes,
                    "wire_bytes": segment.wire_bytes,
                    "gradients": len(segment.names),
                    "collectives": len(segment.buckets),
                    "ready": segment.ready,
                }
            label = Label(allreduce(index + 1), describe, args, what, segment.names)
            land = partial(self._land, bucket, backward, layout.checks_finite)
            self._channel.start(label, bucket.exchange(self.step), land)

    def _land(self, bucket: Bucket, backward: _Backward, checks_finite: bool) -> None:
        """Take in the averages of one bucket; those of others may still be in flight."""
        if backward.looks:
            self._found.append(bucket.nonfinite)
        if checks_finite and not bucket.is_finite:
            self.overflowed = True
        bucket.finish(backward.loss_scale)

    def _first_layout(self) -> GradientLayout:
        observer = self._observer or Observer(len(self._trainables))
        try:
            order = observer.agree(self._control, self._sparse)
        except RuntimeError as error:  # a peer is gone before its first exchange
            what = "the agreement on the order of the gradients"
            raise ExchangeError(f"{exchange_failed(self._at, what)}: {error}") from error
        self.install(order)
        assert self._layout is not None
        return self._layout
