"""The inside of a training loop, in one fixed order: backward passes, then an update.

Each part does its own work (engine, precision, tracer, accumulation window); here they are called.
An update itself is in ``updates``, and that of a script which steps by hand in ``script_steps``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from slipstream.errors import UsageError, warn
from slipstream.kernels.surroundings import outside_autocast
from slipstream.local.training import LocalTraining
from slipstream.parallel.whole_model import WholeModel
from slipstream.precision.model_precision import ModelPrecision
from slipstream.session import messages
from slipstream.session.accumulation import AccumulationWindow
from slipstream.session.exchanging import GradientExchange
from slipstream.session.given import Given
from slipstream.session.members import Members
from slipstream.session.other_losses import OtherLosses
from slipstream.session.proof import Proof
from slipstream.session.script_steps import ScriptSteps
from slipstream.session.step_hooks import StepHooks
from slipstream.session.tracing import Tracer
from slipstream.session.updates import ModelUpdates

if TYPE_CHECKING:
    from slipstream.parallel.pipeline.pipeline import Pipeline

UNUSED = 100
"""Windows whose backward passes are there without any update, before a warning says so."""


class TrainingLoop:
    """Backward passes and updates of one model.

    Args:
        given: the model, whose gradients are cleared after an update; the optimizer, which steps
            once per update; ranks that share the model, which are compared.
        exchange: averages the gradients; says who updates what.
        window: counts the backward passes of an update.
        precision: scales the loss.
        tracer: records the spans.
        members: the parameters that are trained.
        local: holds the meetings of ranks that train on their own; None: they do not.
        proof: compares ranks now and then; None: it is not asked for.
        step_hooks: tell of every step of an optimizer, whoever calls it.

    Attributes:
        engine: averages the gradients.
        updates: begins, ends and counts the updates.
    """

    def __init__(
        self,
        given: Given,
        exchange: GradientExchange,
        *,
        window: AccumulationWindow,
        precision: ModelPrecision,
        tracer: Tracer,
        members: Members,
        local: LocalTraining | None,
        proof: Proof | None,
        step_hooks: StepHooks,
    ) -> None:
        # Not ``given`` itself: its handles would close a circle, see `ScriptSteps`.
        self.device, self.dims = given.cluster.device, given.dims
        self.engine, self.momentum_correction = exchange.engine, exchange.momentum
        self.sharding, self.search = exchange.sharding, exchange.search
        self.window, self.precision, self.tracer = window, precision, tracer
        self.members, self.local, self.proof = members, local, proof
        self.progress, self.explaining = given.progress, given.explaining
        self.updates = ModelUpdates(
            given,
            exchange,
            window=window,
            precision=precision,
            tracer=tracer,
            members=members,
            local=local,
            proof=proof,
        )
        self._script_steps = ScriptSteps(step_hooks, given, exchange, window, self.updates, local)
        self._other_losses = OtherLosses(given.model)
        self._model, self._parameters = given.model, tuple(given.model.parameters())
        self._flag_seen = given.dims.data is None or local is not None  # so it does no harm
        self._in_no_sync = 0  # of the backward passes
        self._compared = False  # the first batches of ranks that share the model

    @property
    def whole(self) -> WholeModel:
        """The model as it is updated now; completes parameters that are still on their way."""
        return self.sharding.model

    @property
    def failed(self) -> bool:
        """Whether the ranks may be out of step: no collective may follow."""
        met = self.local is None or not self.local.failed
        return self.updates.broken_off or self.engine.failed or self.whole.failed or not met

    # Backward passes.

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run what is inside without autocast, and explain an exchange that fails."""
        with self.explaining(), outside_autocast(self.device):
            yield

    def backward(self, loss: torch.Tensor, *, retain_graph: bool, loss_scale: float) -> None:
        """Backward of one loss; raises as ``Session.backward``."""
        loss_scale = self._open_backward(loss_scale, self.dims.check_same_loss, loss)
        if loss_scale == 1.0:  # else it may be scaled
            self.tracer.sees_loss(loss)

        def run(dummy_batch: bool) -> None:
            if dummy_batch and not _may_communicate(loss):
                return  # such a rank takes part in the exchange, with zeros
            part = self.precision.scaled(loss)
            weight = self.window.weight
            part = part * weight if weight != 1.0 else part
            part = part / self.window.accumulate if self.window.accumulate > 1 else part
            # with the collectives of the proof, which all ranks take part in
            if self.proof is not None and self.window.update_follows:
                self.proof.replay(part, self.updates.count)
            # others wait for the collectives of this rank, and it adds nothing of its own loss
            gradient = torch.zeros_like(part) if dummy_batch else None
            try:
                part.backward(gradient, retain_graph=retain_graph)
            except RuntimeError as error:
                has_met = self.local is not None and self.local.meetings > 0
                if has_met and "modified by an inplace operation" in str(error):
                    raise messages.met_since_forward() from error
                raise

        self._run_backward(run, loss_scale, graph_stays=retain_graph)

    def pipeline_backward(
        self,
        pipeline: Pipeline,
        loss_fn: Callable[[Any, Any], torch.Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: Any,
        *,
        loss_scale: float,
    ) -> torch.Tensor:
        """Forward and backward of all micro-batches; raises as ``Session.forward_backward``."""
        batch = (args, kwargs, target)
        loss_scale = self._open_backward(loss_scale, self.dims.check_same_batch, batch)
        self.tracer.forward_begins(args, kwargs)
        scale = loss_scale * self.window.weight / self.window.accumulate
        loss = torch.full((), torch.nan)  # of a dummy batch, which is not computed

        def run(dummy_batch: bool) -> None:
            nonlocal loss
            if not dummy_batch:
                loss = pipeline.forward_backward(loss_fn, args, kwargs, target, scale=scale)

        self._run_backward(run, loss_scale)
        return loss

    def _open_backward(self, given: float, compare: Callable[[Any], None], value: object) -> float:
        """Begin a backward pass; returns its loss scale.

        Ranks that share a model need the same batches; the first ones are compared.
        """
        updates, zeroing = self.updates, self.updates.zeroing
        updates.check_whole()
        self._script_steps.backward_begins()
        if self.local is not None:
            self.local.check()
            self.window.island = None if self.local.warms_up else self.local.island.ranks
        self.sharding.watch.end()
        updates.kept.backward_begins()
        self._other_losses.warn_if_kept()
        if given not in (1.0, self.window.loss_scale):
            zeroing.used_by_another()  # or its scaler has skipped the step
        updates.settle(in_forward=True)
        zeroing.check_sum(str(self.window))
        self.whole.check_gradients()
        self.momentum_correction.check_loads()
        loss_scale = self.precision.take(given)
        self.window.check_scale(loss_scale)
        if loss_scale != 1.0 and not self.window.open and not zeroing.done:
            raise messages.gradients_unscaled(zeroing.name_of_left())
        if not self._compared:
            compare(value)
            self._compared = True
        return loss_scale

    def _run_backward(
        self, run: Callable[[bool], None], loss_scale: float, *, graph_stays: bool = False
    ) -> None:
        """``run`` a backward pass, told whether it is of a dummy batch; average the gradients if an
        update follows it. ``graph_stays``: for another pass."""
        updates, window = self.updates, self.window
        updates.graph_stays = graph_stays
        begins = not window.open
        dummy_batch = window.count()
        self.whole.complete()
        if begins and self.search is not None:
            self.search.install_due()
        self.members.check_model()
        self.tracer.backward_begins(dummy_batch=dummy_batch)
        exchange = window.update_follows
        if exchange and not self._flag_seen:
            self._warn_of_flag()
        if exchange:
            self._exchange_begins()
        scale = window.scale
        self.engine.begin(exchange=exchange, scale=scale, loss_scale=loss_scale, dummy=dummy_batch)
        window.exchanged = False  # from here on averages may be mixed with gradients of this rank
        updates.nonfinite.pass_begins()
        try:
            with self._other_losses.passing():
                run(dummy_batch)
            self.tracer.backward_ends()
            began = time.perf_counter()
            self.engine.end()
            self.progress.waited += time.perf_counter() - began
            if exchange:
                updates.exchanged()
                updates.nonfinite.show()
            if exchange and updates.without_batch:
                self._zero()
            if not graph_stays or len(updates.meetings) > 1:  # not for ever
                updates.meetings.hold()
        except BaseException as error:  # an interrupt, too, which the script may survive
            self.engine.abort(error)
            self.whole.abort(error)
            raise
        self.whole.note_gradients()
        window.backward_done, window.exchanged = True, exchange
        if exchange and not self.sharding.is_sharded:  # else gradients have no values to use
            updates.stepless.note()
        # what no_sync() has gathered may be thrown away
        updates.zeroing.note(in_window=not exchange and not window.in_no_sync)
        self.progress.passes += 1
        self._in_no_sync += window.in_no_sync
        if self.progress.passes == UNUSED * window.accumulate > UNUSED:
            unused = self.complaint()  # as where step() is called in sync_gradients alone
            if isinstance(unused, UsageError):
                warn(str(unused))
        self.tracer.exchanged(self.engine.ready)
        if exchange and self.search is not None and self.search.watches:
            self.sharding.watch.begin(self._parameters)

    def _exchange_begins(self) -> None:
        """Compare what is compared before gradients leave; an engine that has failed refuses to."""
        if self.engine.failed:
            return
        if self.proof is not None:
            self.proof.begin(self.updates.count)
        self.updates.exchange_begins()

    def _warn_of_flag(self) -> None:
        """Tell of a loop that wants no exchange here, and says so to DistributedDataParallel."""
        if getattr(self._model, "require_backward_grad_sync", True) is False:
            self._flag_seen = True
            warn(messages.flag_of_ddp())

    def _zero(self) -> None:
        """Leave gradients of zero, at which scalers, clipping and scripts may look."""
        for parameter in self._parameters:
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward passes add up gradients on this rank, and ``step()`` updates nothing."""
        updates, window = self.updates, self.window
        updates.check_whole()
        if window.exchanged:  # averages; sums of this rank are its own to throw away
            updates.settle(in_forward=True)
        updates.kept.no_sync_begins()
        before, window.in_no_sync = window.in_no_sync, True
        self.engine.local_only(True)
        try:
            with self._other_losses.taken():
                yield
        finally:
            window.in_no_sync = before
            self.engine.local_only(before)
        # sums of a look that was taken inside no_sync() are thrown away
        sums = window.passes and not (window.exchanged or window.alone)
        if window.accumulate > 1 and sums:
            self._other_losses.check(str(window))

    # Updates.

    def step(self) -> bool:
        """End a backward pass; whether parameters were updated, the same on every rank.

        Raises:
            UsageError: there was no backward pass since the last call.
        """
        self.updates.check_whole()
        self.check_engine("step")
        if not self.window.backward_done:
            raise messages.step_without_backward()
        if not self.window.update_follows:
            self.window.advance()
            return False
        self._exchange_sums()
        return self.updates.make()

    def flush(self, max_norm: float | None) -> bool:
        """Update with what an accumulation window has so far; raises as ``Session.flush``."""
        self.updates.check_whole()
        if self.window.in_no_sync:
            raise UsageError("flush() inside no_sync(); call it after the with block")
        if not self.window.open:
            return False
        if max_norm is not None and self.momentum_correction.momenta:
            raise messages.clip_with_momentum()
        self._exchange_sums()
        if max_norm is not None:
            self.whole.clip_grad_norm_(max_norm)
        return self.updates.make()

    def _exchange_sums(self) -> None:
        """Average what the window has gathered, where its last backward pass has not: it was in
        ``no_sync()``, or is not the last."""
        self.sharding.watch.end()
        self.updates.zeroing.check_sum(str(self.window))
        if self.window.update_due:
            return
        if self.window.accumulate > 1:
            self._other_losses.check(str(self.window))
        self.whole.check_gradients()
        self.whole.complete()
        self.tracer.flush_begins()
        self._exchange_begins()
        began = time.perf_counter()
        self.engine.begin(exchange=True, scale=self.window.scale, loss_scale=self.window.loss_scale)
        try:
            self.engine.end()
            self.updates.exchanged()
        except BaseException as error:
            self.engine.abort(error)
            raise
        self.progress.waited += time.perf_counter() - began
        self.tracer.flushed()
        self.whole.note_gradients()

    # What is refused.

    def check_clip(self) -> None:
        """Refuse to clip what is not the gradient of an update.

        Raises:
            UsageError: says where clipping has a meaning.
        """
        self.updates.check_whole()
        self.sharding.watch.end()  # what follows reads gradients on behalf of the script
        if self.momentum_correction.momenta:
            raise messages.clip_with_momentum()
        if self.window.update_due:
            return
        self.check_engine("clip_grad_norm_")
        where = f"inside {self.window}" if self.window.open else "without a backward() before it"
        raise messages.clip_outside(where)

    def complaint(self) -> UsageError | str | None:
        """An error at the end, where nothing was ever trained, or a warning of what is dropped."""
        backwards, updates, window = self.progress.passes, self.updates, self.window
        if not window.open or (backwards < 2 and window.accumulate == 1):
            return None
        awaiting = backwards - self._in_no_sync  # a step(), each of them
        if not updates.count + updates.skipped and awaiting >= 2 * window.accumulate:
            return messages.never_updated(backwards)
        return messages.dropped(window.passes, window.accumulate)

    def check_engine(self, verb: str) -> None:
        """Refuse what follows a backward pass that has failed.

        Raises:
            UsageError: says how to go on.
        """
        if self.engine.failed:
            raise messages.failed_before(verb)


def _may_communicate(loss: torch.Tensor) -> bool:
    """Whether the backward of a loss runs a function of Python: those of synchronised batch norm,
    of ``slipstream.comm`` and of a script's own gathers wait for other ranks."""
    seen: set[Any] = set()
    due: list[Any] = [loss.grad_fn]
    while due:
        node = due.pop()
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return True
        if node is not None and node not in seen:
            seen.add(node)
            due.extend(following for following, _ in node.next_functions)
    return False
