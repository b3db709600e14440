"""What ``accelerate()`` installed, and the few verbs of a training loop.

Never composes techniques (``api`` does) and never averages a gradient itself (the engine does).
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import torch
from torch import nn

from slipstream.calibration.adaptive_codec import CodecDecision
from slipstream.cluster.connect import Cluster
from slipstream.codecs.compressor import any_infinite
from slipstream.data.uneven_inputs import UnevenInputLoader
from slipstream.errors import UsageError
from slipstream.gradients.engine import Engine
from slipstream.gradients.momentum import MomentumCorrection
from slipstream.gradients.segments import SegmentStats
from slipstream.memory import Offloader, Recomputed
from slipstream.parallel.dims import ParallelDims
from slipstream.parallel.model import ModelParallel
from slipstream.parallel.pipeline.pipeline import Pipeline
from slipstream.precision.model_precision import ModelPrecision
from slipstream.session import report
from slipstream.session.accumulation import Window
from slipstream.session.state import Saving
from slipstream.session.tracing import Recording
from slipstream.strategy import Strategy, overview
from slipstream.strategy.overview import plain_text
from slipstream.transport.channel import Channel
from slipstream.tuner.online_split import OnlineSplit

M = TypeVar("M", bound=nn.Module)
O = TypeVar("O", bound=torch.optim.Optimizer)  # noqa: E741 - the field's letter for it


@dataclass(frozen=True, slots=True)
class Installed:
    """The parts that ``accelerate()`` has put together; None where one process needs none."""

    cluster: Cluster
    strategy: Strategy
    trainable_names: tuple[str, ...]
    engine: Engine | None
    channel: Channel | None
    dims: ParallelDims
    shared: ModelParallel | None
    precision: ModelPrecision
    recomputed: Recomputed | None
    loader: UnevenInputLoader | None
    online_split: OnlineSplit | None
    momentum_correction: MomentumCorrection
    verdict: CodecDecision | None
    recording: Recording | None
    offloader: Offloader | None
    undo: ExitStack
    """Takes them off the user's objects; the session makes it its own."""


class Session(Generic[M, O]):
    """A model, its optimizer and its loader under a strategy; made by ``slipstream.accelerate``.

    Attributes:
        model: the user's model, unchanged.
        optimizer: the user's optimizer.
        strategy: what was asked for.
        rank: this process among all, counted from 0.
        world_size: how many processes train together.
        data_rank: this process among those that train on other data than it does, from 0; as
            ``rank``, unless ranks share a model.
        data_size: how many those are, itself counted; shard the data by these two.
        skipped: updates that did not happen, as gradients were not finite.

    Also a context manager: leaving it closes the session.
    """

    def __init__(self, model: M, optimizer: O, installed: Installed) -> None:
        self.model = model
        self.optimizer = optimizer
        self.strategy = installed.strategy
        self.rank = installed.cluster.rank
        self.world_size = installed.cluster.world_size
        self._cluster: Cluster | None = installed.cluster
        self._engine = installed.engine
        self._channel = installed.channel
        self._dims: ParallelDims | None = installed.dims
        self.data_rank, self.data_size = installed.dims.data_rank, installed.dims.data_size
        self._shared = installed.shared
        self._precision = installed.precision
        self._recomputed = installed.recomputed
        self._loader = installed.loader
        self._online_split = installed.online_split
        self._momentum_correction = installed.momentum_correction
        self._verdict = installed.verdict
        self._recording = installed.recording
        self._offloader = installed.offloader
        self._saving: Saving | None = Saving(
            model,
            installed.strategy,
            installed.trainable_names,
            installed.engine,
            installed.dims,
            installed.shared,
            installed.online_split,
            installed.precision,
        )
        self._parameters = tuple(model.parameters())
        self._steps = 0
        self._window = Window(self.strategy.gradients.accumulate, self.data_size, self._loader)
        self._unscaled = False  # on one process, as the engine does it by the way
        self.skipped = 0
        self._backward_done = False
        self._compared = False  # whether ranks that share a model have compared their first losses
        self._local = False
        self._closed = False
        self._last_segments: tuple[SegmentStats, ...] = ()
        self._undo = installed.undo.pop_all()
        atexit.register(self._take_off, SystemExit, SystemExit(), None)

    # The loop.

    @property
    def loader(self) -> UnevenInputLoader:
        """The loader, giving the same number of batches on every rank.

        Raises:
            UsageError: ``accelerate()`` got no loader.
        """
        if self._loader is None:
            raise UsageError(
                "this session has no loader; pass it: accelerate(model, optimizer, loader)"
            )
        return self._loader

    @property
    def _pipeline(self) -> Pipeline | None:
        return self._shared.pipeline if self._shared is not None else None

    @property
    def segments(self) -> tuple[SegmentStats, ...]:
        """What is exchanged together; empty on one process and before the first exchange."""
        return self._engine.segments if self._engine else self._last_segments

    def backward(
        self, loss: torch.Tensor, *, retain_graph: bool = False, loss_scale: float = 1.0
    ) -> None:
        """Compute gradients of ``loss / accumulate`` and, where an update follows, average them.

        On return ``parameter.grad`` holds the average over ranks (read it, clip it); inside an
        accumulation window or ``no_sync`` it holds the sum of this rank so far. Called twice before
        ``step()``, the gradients add up (with a codec other than ``half`` that is refused: it would
        code them twice).

        Args:
            loss: a tensor of one element.
            retain_graph: as torch's.
            loss_scale: by what ``loss`` was multiplied, so that small gradients survive in fp16;
                averages come out divided by it. ``step()`` skips the update if one overflowed. With
                a loss scale in the strategy the session does both by itself.

        Raises:
            UsageError: the session is closed, ``loss`` is not a scalar, the scale changed inside
            an accumulation window, there is one in the strategy, too, or a codec has sent this
            update's gradients already.
            MismatchError: ranks that share layers have different first losses.
            ExchangeError: another rank is gone, or the graph changed in a way that overlap cannot
            follow.
        """
        self._must_be_open("backward")
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            seen = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss)
            raise UsageError(f"backward() takes a loss of one element, not {seen}; use loss.mean()")
        if self._pipeline is not None:
            raise UsageError(
                "backward() of a model that is cut into stages; call "
                "session.forward_backward(loss_fn, (inputs,), target=target) instead of forward, "
                "loss and backward"
            )
        loss_scale = self._precision.take(loss_scale)
        self._window.check_scale(loss_scale)
        self._compare(loss)
        accumulate = self.strategy.gradients.accumulate

        def run() -> None:
            share = self._precision.scaled(loss)
            share = share / accumulate if accumulate > 1 else share
            share.backward(retain_graph=retain_graph)

        self._exchange_after(run, loss_scale)

    def forward_backward(
        self,
        loss_fn: Callable[[Any, Any], torch.Tensor],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        target: Any = None,
        *,
        loss_scale: float = 1.0,
    ) -> torch.Tensor:
        """Forward, ``loss_fn(output, target)`` and `backward` in one; the way to train a model that
        is cut into stages, where every rank gives the same batch and gets the same loss.

        Args:
            loss_fn: a mean over samples; in a pipeline called on the last stage, once for each
                micro-batch.
            args: of the model; in a pipeline tensors are split along their first axis.
            kwargs: as ``args``.
            target: as ``args``.
            loss_scale: gradients are computed of ``loss * loss_scale``; see `backward`.

        Returns:
            The loss, not scaled, without a graph; in a pipeline NaN for a filler of the loader,
            which is not computed once more.

        Raises:
            UsageError: as `backward`.
            ExchangeError: another rank is gone, or a stage has failed.

        Example:
            >>> import torch, slipstream
            >>> model = torch.nn.Linear(2, 1)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> x, y = torch.ones(4, 2), torch.ones(4, 1)
            >>> with slipstream.accelerate(model, optimizer) as session:
            ...     loss = session.forward_backward(torch.nn.functional.mse_loss, (x,), target=y)
            ...     updated = session.step()
            >>> loss.shape, updated
            (torch.Size([]), True)
        """
        self._must_be_open("forward_backward")
        if self._pipeline is None:
            loss = loss_fn(self.model(*args, **(kwargs or {})), target)
            self.backward(loss * loss_scale if loss_scale != 1.0 else loss, loss_scale=loss_scale)
            return loss.detach()
        loss_scale = self._precision.take(loss_scale)
        self._window.check_scale(loss_scale)
        if not self._compared:
            assert self._dims is not None
            self._dims.check_same_batch((args, kwargs, target))
            self._compared = True
        if self._recording is not None:
            self._recording.forward_begins(args, kwargs or {})
        scale = loss_scale / self.strategy.gradients.accumulate
        losses: list[torch.Tensor] = []

        def run() -> None:
            assert self._pipeline is not None
            losses.append(
                self._pipeline.forward_backward(loss_fn, args, kwargs, target, scale=scale)
            )

        self._exchange_after(run, loss_scale)
        return losses[0] if losses else torch.full((), torch.nan)

    def _exchange_after(self, run: Callable[[], None], loss_scale: float) -> None:
        """``run`` a backward; where an update follows it, average the gradients."""
        dummy_batch = self._window.count()
        if self._recording is not None:
            self._recording.backward_begins(dummy_batch=dummy_batch)
        exchange = self._window.last and not self._local
        if self._engine is not None:
            scale = self._window.scale
            self._engine.begin(exchange=exchange, scale=scale, loss_scale=loss_scale)
        elif self._unscaled and self._gradients():  # averages to which this backward adds
            torch._foreach_mul_(self._gradients(), loss_scale)
        try:
            if not dummy_batch:
                run()
        except BaseException as error:
            if self._engine is not None:
                self._engine.abort(error)
            raise
        if self._recording is not None:
            self._recording.backward_ends()
        if self._engine is not None:
            self._engine.end()
        elif exchange and loss_scale != 1.0 and self._gradients():
            torch._foreach_mul_(self._gradients(), 1.0 / loss_scale)
            self._unscaled = True
        if self._recording is not None:
            self._recording.exchanged(self._engine.ready if self._engine else None)
        self._backward_done = True

    def step(self) -> bool:
        """Update the parameters and zero the gradients; call it after every ``backward``.

        Returns:
            True when parameters were updated; False inside an accumulation window or ``no_sync``,
            and where gradients were infinite or NaN on some rank although a loss scale or a codec
            depends on them: all ranks then skip the update and keep what codecs had learned before.

        Raises:
            UsageError: there was no backward since the last step, or the session is closed.
        """
        self._must_be_open("step")
        if not self._backward_done:
            raise UsageError(
                "step() without a backward() before it: call session.backward(loss) first, "
                "then session.step(), once each for every batch"
            )
        self._backward_done = False
        if self._local:
            return False
        if not self._window.advance():
            return False
        overflowed = self._overflowed()
        self._update(skip=overflowed)
        return not overflowed

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients stay on this rank and add up; the next backward outside averages them.

        Raises:
            UsageError: the session is closed.
        """
        self._must_be_open("no_sync")
        before, self._local = self._local, True
        if self._engine is not None:
            self._engine.local_only(True)
        try:
            yield
        finally:
            self._local = before
            if self._engine is not None:
                self._engine.local_only(before)

    # State, report, end.

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on bit for bit: count of updates, ready order, split, loss
        scale, and what the codecs of every rank keep.

        The same on every rank; the model's and the optimizer's state are theirs to save. Where a
        codec keeps something, every rank must call it, as it is gathered from all.

        Raises:
            UsageError: inside an accumulation window, whose gradients no checkpoint holds.
            ExchangeError: another rank is gone.
        """
        self._must_be_open("state_dict")
        if self._window.contributions:
            raise UsageError(
                "state_dict() inside an accumulation window would lose the gradients gathered so "
                "far; call it after a step() that returned True"
            )
        assert self._saving is not None
        return self._saving.state(self._steps)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state_dict()``; every rank loads the same state, on any number of ranks.

        On another number of ranks, what codecs have not sent yet is dealt out among them: its sum
        stays what it was, and a warning says so.

        Raises:
            UsageError: the state is another version's or another model's.
            MismatchError: ranks load different states.
        """
        self._must_be_open("load_state_dict")
        assert self._saving is not None
        self._steps = self._saving.load(state)

    def full_state_dict(self) -> dict[str, Any]:
        """``model.state_dict()`` of the whole model, on every rank, for any number of ranks.

        Where ranks share a model, all of them must call it; else it is the model's own.

        Raises:
            UsageError: the session is closed.
        """
        self._must_be_open("full_state_dict")
        return dict(
            self.model.state_dict() if self._shared is None else self._shared.full_state_dict()
        )

    def load_full_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take this rank's part of what `full_state_dict` or an unsplit model gave.

        Raises:
            ModelError: the state is another model's.
            UsageError: the session is closed.
        """
        self._must_be_open("load_full_state_dict")
        if self._shared is None:
            self.model.load_state_dict(state)
        else:
            self._shared.load_full_state_dict(state)

    def full_optimizer_state_dict(self) -> dict[str, Any]:
        """``optimizer.state_dict()`` as of the whole model, on every rank, for any number of ranks.

        Where ranks share a model, all of them must call it; else it is the optimizer's own.

        Raises:
            UsageError: the session is closed.
        """
        self._must_be_open("full_optimizer_state_dict")
        if self._shared is None:
            return self.optimizer.state_dict()
        return self._shared.full_optimizer_state_dict()

    def load_full_optimizer_state_dict(self, state: dict[str, Any]) -> None:
        """Take this rank's part of what `full_optimizer_state_dict` gave.

        Raises:
            UsageError: the session is closed.
        """
        self._must_be_open("load_full_optimizer_state_dict")
        if self._shared is None:
            self.optimizer.load_state_dict(state)
        else:
            self._shared.load_full_optimizer_state_dict(state)

    @torch.no_grad()
    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns, without a graph, also where it is cut into stages: then every
        rank gives the same batch and gets the result.

        Raises:
            UsageError: the session is closed.
        """
        self._must_be_open("evaluate")
        if self._pipeline is None:
            return self.model(*args, **kwargs)
        return self._pipeline.evaluate(args, kwargs)

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """As ``torch.nn.utils.clip_grad_norm_`` on the whole model, also where ranks share it; call
        it between ``backward()`` and ``step()``. Returns the norm before.

        Raises:
            UsageError: the session is closed.
        """
        self._must_be_open("clip_grad_norm_")
        if self._shared is None:
            return torch.nn.utils.clip_grad_norm_(self._parameters, max_norm)
        return self._shared.clip_grad_norm_(max_norm)

    def report(self) -> str:
        """The strategy and what became of it, as a table in plain text."""
        rows = report.rows(
            self._engine, self.segments, self._online_split, self._verdict, self.skipped
        )
        rows = self._precision.rows(self.skipped) + rows
        if self._offloader is not None:
            rows.insert(0, self._offloader.row)
        if self._recomputed is not None:
            rows.insert(0, self._recomputed.row)
        if self._shared is not None:
            rows[:0] = self._shared.report_rows()
        return plain_text(overview(self.strategy, rows))

    def close(self) -> None:
        """Take everything off the model again; a trace still open is written. Twice is once."""
        if self._closed:
            return
        if self._recording is not None:
            self._recording.write(self._traced())
        self._take_off(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._take_off(kind, error, trace)

    # Inside.

    def _must_be_open(self, verb: str) -> None:
        if self._closed:
            raise UsageError(
                f"{verb}() after close(); call slipstream.accelerate() again for a new session"
            )

    def _compare(self, loss: torch.Tensor) -> None:
        """Ranks that share layers must have the same batches: compare their first losses."""
        if self._shared is not None and not self._compared:
            assert self._dims is not None
            self._dims.check_same_loss(loss)
            self._compared = True

    def _gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self._parameters if p.grad is not None]

    def _overflowed(self) -> bool:
        """Whether this update must not happen; the same on every rank."""
        if self._engine is not None and self._engine.overflowed:
            return True  # on all ranks that share this model
        if self._window.loss_scale == 1.0 and not self._precision.scales:
            return False
        values = [g._values() if g.is_sparse else g for g in self._gradients()]
        infinite = [any_infinite(value) for value in values]
        assert self._dims is not None
        return self._dims.any_rank(bool(infinite) and bool(torch.stack(infinite).any()))

    def _update(self, skip: bool) -> None:
        if self._recording is not None:
            self._recording.update_begins()
        self.skipped += skip
        if not skip:
            self._momentum_correction.check()
            self.optimizer.step()
            self._steps += 1
        self.optimizer.zero_grad(set_to_none=True)
        for parameter in self._parameters:  # those that the optimizer does not hold, too
            parameter.grad = None
        self._window.close()
        self._precision.updated(skip)
        self._unscaled = False
        if self._engine is not None:
            self._engine.updated(self._steps)
        if self._recording is not None:
            self._recording.update_ends(self._traced)

    def _traced(self) -> dict[str, Any]:
        """What a trace says of the session."""
        return report.trace_meta(self.model, self.strategy, self._engine, self.segments)

    def _take_off(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Undo what ``accelerate()`` did, in reverse order.

        After an error without a collective, as the other ranks may not come to one any more: what
        they share stays split.
        """
        self._closed = True
        atexit.unregister(self._take_off)
        in_flight = self._channel is not None and self._channel.in_flight
        if self._engine is not None:
            self._last_segments = self._engine.segments
        try:
            self._undo.__exit__(kind, error, trace)
        finally:
            # No reference may outlive this: a gloo group ends its threads when it is freed, and one
            # still there when the interpreter ends aborts the process after a run that went well.
            cluster, self._cluster = self._cluster, None
            self._engine = self._channel = self._saving = self._online_split = None
            self._recording = self._dims = self._shared = None
            if cluster is not None and not in_flight:  # freeing a group that waits for a peer hangs
                cluster.close()
