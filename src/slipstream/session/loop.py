"""The inside of a training loop, in one fixed order: backward passes, then an update.

Each part does its own work (engine, precision, tracer, accumulation window); here they are called.

[Note: Who calls optimizer.step()]
``step()`` does, or the script by hand: old loops, and ``torch.amp.GradScaler``, which skips the
call where gradients overflowed, or tells a fused optimizer to skip. Hooks on the optimizer make
both the same update. Where backward comes again without one, and the gradients were zeroed
meanwhile, the script has skipped the update.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch

from slipstream.errors import UsageError
from slipstream.kernels.surroundings import outside_autocast
from slipstream.local.training import LocalTraining
from slipstream.parallel.whole_model import WholeModel
from slipstream.precision.model_precision import ModelPrecision
from slipstream.session import messages
from slipstream.session.accumulation import AccumulationWindow
from slipstream.session.by_hand import UpdatesByHand
from slipstream.session.exchanging import GradientExchange
from slipstream.session.given import Given
from slipstream.session.members import Members
from slipstream.session.nonfinite import NonfiniteGradients
from slipstream.session.other_losses import OtherLosses
from slipstream.session.proof import Proof
from slipstream.session.step_hooks import StepHooks, collectives_so_far
from slipstream.session.tracing import Tracer
from slipstream.session.zeroing import Zeroing, drop_shards, is_zero
from slipstream.strategy import keeps_state

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

    Attributes:
        engine: averages the gradients.
        steps: updates so far.
        skipped: updates that were skipped, because of gradients that were not finite or that the
            script has zeroed.
        backwards: backward passes so far.
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
    ) -> None:
        # Not ``given`` itself: its handles would close a circle, see below.
        self.model, self.optimizer, self.device = given.model, given.optimizer, given.cluster.device
        self.engine, self.momentum_correction = exchange.engine, exchange.momentum
        self.sharding, self.search = exchange.sharding, exchange.search
        self.dims, self.window, self.precision = given.dims, window, precision
        self.tracer, self.members, self.local = tracer, members, local
        self.progress, self.explaining, self.proof = given.progress, given.explaining, proof
        self._nonfinite = NonfiniteGradients(given, exchange, window, precision, local, proof)
        codec = given.strategy.gradients.codec
        self._owes = codec is not None and keeps_state(codec)  # a part to later updates
        self._retained = False  # the graph of the last backward pass
        self._looked = False  # at averages that no update has used, of a graph that stayed
        self._emptied = False  # by the script, before the step that begins
        self.steps = self.skipped = self.backwards = 0
        self._in_no_sync = 0  # of the backward passes
        self._other_losses = OtherLosses(self.model)
        self._parameters = tuple(self.model.parameters())
        self._zeroing = Zeroing(self.model, self.optimizer)
        named = self.model.named_parameters()
        here = [p for name, p in named if p.requires_grad and self.whole.is_local(name)]
        self._by_script = UpdatesByHand(here)
        # weak: the hooks call back, and a circle would keep the groups of a session that is over
        self._hooks: Callable[[], StepHooks | None] = lambda: None
        self._compared = False  # the first batches of ranks that share the model
        # Where in an update the loop is:
        self._local_only = False  # inside no_sync()
        self._backward_done = False  # step() is next
        self._exchanged = False  # by the last backward pass: the averages are there
        self._alone = False  # all backward passes of this update so far were in no_sync()
        self._updating = False  # inside an update of step()
        self._by_hand: bool | None = None  # inside one by hand; True: it is skipped
        self._by_own = False  # inside one by hand, with gradients of the script's own
        self._used = False  # by one by hand, which leaves the gradients
        self._dropped: set[torch.Tensor] = set()  # parameters that had kept theirs until then
        self._other_skips: bool | None = None  # another optimizer, this update; None: made no step
        self._broken_off = False  # an update has begun and not ended
        self._collectives = 0  # when a step began
        self._collectives_before: int | None = None  # that of another optimizer; None: none began
        self._meetings_due: list[bool] = []  # of ended updates: whether this rank has changed

    @property
    def whole(self) -> WholeModel:
        """The model as it is updated now; completes parameters that are still on their way."""
        return self.sharding.model

    @property
    def window_open(self) -> bool:
        """Whether gradients were gathered that no update has used yet."""
        return self.window.contributions > 0 or self.window.passes > 0

    @property
    def update_follows(self) -> bool:
        """Whether ``step()`` after this, or the next, backward pass updates."""
        return self.window.last and not self._local_only

    @property
    def update_due(self) -> bool:
        """Whether the averages of an update are there: ``step()`` is next."""
        return self._backward_done and self.update_follows and self._exchanged

    @property
    def failed(self) -> bool:
        """Whether the ranks may be out of step: no collective may follow."""
        met = self.local is None or not self.local.failed
        return self._broken_off or self.engine.failed or self.whole.failed or not met

    def attach(self, hooks: StepHooks) -> None:
        """Learn of every step of the optimizer."""
        self._hooks = ref(hooks)
        hooks.attach(self._step_begins, self._step_ends, self._other_steps, self._other_ends)

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
            if self.proof is not None and self.update_follows:  # with its collectives, on all ranks
                self.proof.replay(part, self.steps)
            # others wait for the collectives of this rank, and it adds nothing of its own loss
            gradient = torch.zeros_like(part) if dummy_batch else None
            try:
                part.backward(gradient, retain_graph=retain_graph)
            except RuntimeError as error:
                has_met = self.local is not None and self.local.meetings > 0
                if has_met and "modified by an inplace operation" in str(error):
                    raise messages.met_since_forward() from error
                raise

        self._run_backward(run, loss_scale, graph_waits=retain_graph)

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
        self._must_be_whole()
        if (hooks := self._hooks()) is not None:  # a step by hand may have raised meanwhile
            hooks.broken_off()
        if self.local is not None:
            self.local.check()
            self.window.island = None if self.local.warms_up else self.local.island.ranks
        self.sharding.watch.end()
        if self._used and not self._zeroing.done:
            raise messages.gradients_kept()
        if self._used:
            self._dropped = {p for p in self._parameters if not is_zero(p)}
            for parameter in self._dropped:  # those of zero stay, by which an optimizer decays
                parameter.grad = None
            self._used = False
        elif self._dropped:  # those that the script has zeroed since begin anew
            self._dropped = {p for p in self._dropped if not is_zero(p)}
        self._other_losses.warn_if_kept(stacklevel=4)
        if given not in (1.0, self.window.loss_scale):
            self._zeroing.used_by_another()  # or its scaler has skipped the step
        self.settle(in_forward=True)
        self._zeroing.check_sum(self._window)
        self.whole.check_gradients()
        self.momentum_correction.check_loads()
        loss_scale = self.precision.take(given)
        self.window.check_scale(loss_scale)
        if loss_scale != 1.0 and not self.window_open and not self._zeroing.done:
            raise messages.gradients_unscaled(self._zeroing.name_of_left())
        if not self._compared:
            compare(value)
            self._compared = True
        return loss_scale

    def _run_backward(
        self, run: Callable[[bool], None], loss_scale: float, *, graph_waits: bool = False
    ) -> None:
        """``run`` a backward pass, told whether it is of a dummy batch; average the gradients if an
        update follows it. ``graph_waits``: for another pass."""
        self._retained = graph_waits
        begins = not self.window_open
        self._alone = self._local_only and (begins or self._alone)
        dummy_batch = self.window.count()
        self.whole.complete()
        if begins and self.search is not None:
            self.search.install_due()
        self.members.check_model()
        self.tracer.backward_begins(dummy_batch=dummy_batch)
        exchange = self.update_follows
        if self.proof is not None and exchange:
            self.proof.begin(self.steps)
        scale = self.window.scale
        self.engine.begin(exchange=exchange, scale=scale, loss_scale=loss_scale, dummy=dummy_batch)
        self._exchanged = False  # from here on averages may be mixed with gradients of this rank
        self._nonfinite.pass_begins()
        try:
            with self._other_losses.passing():
                run(dummy_batch)
            self.tracer.backward_ends()
            began = time.perf_counter()
            self.engine.end()
            self.progress.waited += time.perf_counter() - began
            if exchange:
                self._nonfinite.show()
            if exchange and self._without_batch:
                self._zero()
            if not graph_waits or len(self._meetings_due) > 1:  # not for ever
                self._meet()
        except BaseException as error:  # an interrupt, too, which the script may survive
            self.engine.abort(error)
            self.whole.abort(error)
            raise
        self.whole.note_gradients()
        self._backward_done, self._exchanged = True, exchange
        if exchange and not self.sharding.is_sharded:  # else gradients have no values to use
            self._by_script.note()
        # what no_sync() has gathered may be thrown away
        self._zeroing.note(in_window=not exchange and not self._local_only)
        self.backwards += 1
        self.progress.passes += 1
        self._in_no_sync += self._local_only
        if self.backwards == UNUSED * self.window.accumulate > UNUSED:
            unused = self.complaint()  # as where step() is called in sync_gradients alone
            if isinstance(unused, UsageError):
                warnings.warn(str(unused), stacklevel=4)
        self.tracer.exchanged(self.engine.ready)
        if exchange and self.search is not None and self.search.watches:
            self.sharding.watch.begin(self._parameters)

    @property
    def _without_batch(self) -> bool:
        """Whether no batch of this update is one of this rank, which trains on its own, or of its
        island: they make no update."""
        return self.local is not None and not self.window.contributions

    def _zero(self) -> None:
        """Leave gradients of zero, at which scalers, clipping and scripts may look."""
        for parameter in self._parameters:
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward passes add up gradients on this rank, and ``step()`` updates nothing."""
        self._must_be_whole()
        if self._exchanged:  # averages; sums of this rank are its own to throw away
            self.settle(in_forward=True)
        if self._used:
            drop_shards(self._parameters)
        before, self._local_only = self._local_only, True
        self.engine.local_only(True)
        try:
            with self._other_losses.taken():
                yield
        finally:
            self._local_only = before
            self.engine.local_only(before)
        # sums of a look that was taken inside no_sync() are thrown away
        sums = self.window.passes and not (self._exchanged or self._alone)
        if self.window.accumulate > 1 and sums:
            self._other_losses.check(self._window)

    # Updates.

    def step(self) -> bool:
        """End a backward pass; whether parameters were updated, the same on every rank.

        Raises:
            UsageError: there was no backward pass since the last call.
        """
        self._must_be_whole()
        self.check_engine("step")
        if not self._backward_done:
            raise messages.step_without_backward()
        if not self.update_follows:
            self._backward_done = False
            if not self._local_only:
                self.window.advance()
            return False
        self._exchange_sums()
        return self._update()

    def flush(self, max_norm: float | None) -> bool:
        """Update with what an accumulation window has so far; raises as ``Session.flush``."""
        self._must_be_whole()
        if self._local_only:
            raise UsageError("flush() inside no_sync(); call it after the with block")
        if not self.window_open:
            return False
        if max_norm is not None and self.momentum_correction.momenta:
            raise messages.clip_with_momentum()
        self._exchange_sums()
        if max_norm is not None:
            self.whole.clip_grad_norm_(max_norm)
        return self._update()

    def _exchange_sums(self) -> None:
        """Average what the window has gathered, where its last backward pass has not: it was in
        ``no_sync()``, or is not the last."""
        self.sharding.watch.end()
        self._zeroing.check_sum(self._window)
        if self.update_due:
            return
        if self.window.accumulate > 1:
            self._other_losses.check(self._window)
        self.whole.check_gradients()
        self.whole.complete()
        self.tracer.flush_begins()
        if self.proof is not None:
            self.proof.begin(self.steps)
        began = time.perf_counter()
        self.engine.begin(exchange=True, scale=self.window.scale, loss_scale=self.window.loss_scale)
        try:
            self.engine.end()
        except BaseException as error:
            self.engine.abort(error)
            raise
        self.progress.waited += time.perf_counter() - began
        self.tracer.flushed()
        self.whole.note_gradients()

    def settle(self, *, in_forward: bool = False) -> None:
        """End an update whose gradients the script has zeroed: it has skipped it, unless another
        optimizer has made it. ``in_forward``: a graph waits for its backward."""
        # the script may be in no_sync() by now, where Lightning zeroes
        due = self._exchanged or self.update_follows
        if self._backward_done and due and self._zeroing.done_since:
            if self._alone:
                self._forget_look()
            else:
                self._nonfinite.drop()
                if self._other_skips is None:
                    self._check_by_hand()
                self._end_update(self._other_skips, late=True)
        if not in_forward:
            self._meet()
        elif self.local is not None and self._meetings_due and not self.local.evaluates:
            with torch.inference_mode(False):  # as in `_meet`
                self.local.send_ahead(self._meetings_due[0])

    def _check_by_hand(self) -> None:
        """Say, once, that the script updates parameters by itself.

        Raises:
            UsageError: where gradients, or what becomes of parameters, would be wrong.
        """
        if not self._by_script.count():
            return
        error = messages.updated_by_hand()
        owes = self._owes and self.dims.control is not None
        if owes or self.momentum_correction.momenta or self.local is not None:
            raise error
        warnings.warn(str(error), stacklevel=6)

    def _forget_look(self) -> None:
        """Forget gradients that this rank has gathered alone and thrown away, for an adversarial
        example, say: they are no update, which all ranks would have to count."""
        self._backward_done = False
        self._zeroing.forget()
        self.window.close()
        self.engine.updated(self.steps, used=False, late=True)

    @property
    def left_out(self) -> bool:
        """Whether no step can make this update; `leave_out` forgets it."""
        return self.update_due and self.engine.nonfinite

    @property
    def uncounted(self) -> int:
        """Updates that have ended before the last meetings were told of them, and one that this
        rank skips: the script may zero its gradients later."""
        return len(self._meetings_due) + self.left_out

    def leave_out(self) -> None:
        """Forget an update that no step can make, as its averages are not finite: a scaler of the
        script has skipped it, and the script zeroes its gradients before the next backward."""
        if self.left_out:
            self._clear()
            self._end_update(None, late=True)
        self.settle()

    def _meet(self) -> None:
        """Tell the meetings of updates that have ended, where no graph is waiting for backward: its
        parameters must stay as they are. That is so but where a script has skipped an update,
        which shows when it calls backward again; or, by zeroed gradients, while it evaluates.
        """
        while self.local is not None and self._meetings_due and not self.local.evaluates:
            began = time.perf_counter()
            with torch.inference_mode(False):  # that of an evaluation: what is made here stays
                self.local.updated(self._meetings_due.pop(0))
            self.progress.waited += time.perf_counter() - began

    def _update(self) -> bool:
        skip = self._begin_update()
        if not skip:
            self._updating = True
            try:
                self.optimizer.step()
            except BaseException as error:
                # what slipstream refuses, it refuses before the first change
                self._broken_off = not isinstance(error, UsageError)
                self.whole.complete()
                raise
            finally:
                self._updating = False
        self._clear()
        self._end_update(skip)
        return not skip

    def _clear(self) -> None:
        for parameter in self._parameters:  # also those that the optimizer does not hold
            parameter.grad = None
        # behind it, as it may fill what is there; without set_to_none, which not every one takes
        self.optimizer.zero_grad()
        self._used = False

    def _begin_update(self, *, by_hand: bool = False) -> bool:
        """Check gradients and members before ``optimizer.step()``; return whether to skip it."""
        if self.local is not None:
            self.local.check_outside("step")
        self.sharding.watch.end()
        self.members.check_optimizer()
        groups = self.optimizer.param_groups
        if self._dropped and any(p in self._dropped for g in groups for p in g["params"]):
            raise messages.gradients_kept()  # of a frozen layer, which this step would move
        self.whole.check_gradients()
        self.engine.check_averages()
        if self._owes:
            self._check_owed()
        if self.proof is not None:
            self.proof.before_update()
        skip = bool(self._other_skips) or self._nonfinite.skips(self.steps, by_hand=by_hand)
        self.tracer.update_begins()
        if not skip:
            self.momentum_correction.check()
        if skip or self._without_batch:  # an optimizer leaves parameters without a gradient alone
            for parameter in self._parameters:
                parameter.grad = None
        self._broken_off = True
        return skip

    def _check_owed(self) -> None:
        """Refuse a combination of averages that were read one after the other: what a codec leaves
        out of all but the last, nobody gets.

        Raises:
            UsageError: that is what the gradients are.
        """
        if self._looked and self._zeroing.replaced:
            raise messages.combined_under_codec()
        self._emptied = self._zeroing.done_since

    def _end_update(self, skip: bool | None, *, late: bool = False) -> None:
        """Count the update and tell every part of its end; ``skip``: gradients overflowed; None:
        the script made no step. ``late``: a graph may wait for its backward."""
        self._backward_done = self._exchanged = False
        self._other_skips = None
        worked = skip is False and self.window.contributions > 0
        if skip is False:
            self.steps += 1
            self._by_script.stepped()
        else:
            self.skipped += 1
        self.progress.reached(self.steps)
        self._zeroing.forget()
        self.window.close()
        if skip is not None:
            self.precision.updated(skip)
        # another optimizer may have made the finite part of it: codecs keep nothing of the rest
        used = skip is False and not self.engine.nonfinite and not self._emptied
        self._looked = skip is None and self._retained and not self.engine.nonfinite
        self._emptied = False
        self.engine.updated(self.steps, used=used, late=late)
        self.tracer.update_ends()  # last, as it may change the split
        if self.local is not None:  # after it: a meeting is no work of the optimizer
            self._meetings_due.append(worked)
            if not late:
                self._meet()
        self._broken_off = False
        if self.proof is not None:
            self.proof.updated(self.steps, used=skip is False)

    def _step_begins(self, closure: object) -> None:
        """``optimizer.step()`` is called, here or by hand."""
        if self.local is not None:
            self._collectives = collectives_so_far()
        self._by_hand, self._by_own = None, False  # also of a step before that has raised
        if self._updating:
            return
        self._must_be_whole()
        if closure is not None:
            raise messages.step_by_closure()
        if not self._backward_done and not self.window_open:
            self._by_own = self._has_own_gradients()
            if self._by_own and self.momentum_correction.momenta:
                raise messages.own_gradients_with_momentum()
            if self._by_own and self.local is not None:
                self.local.check_outside("step")
                self.local.check()
            return
        if not self.update_due:
            raise messages.step_by_hand_inside(self._window)
        self._by_hand = self._begin_update(by_hand=True)

    def _has_own_gradients(self) -> bool:
        """Whether the script, which never calls `backward`, has set gradients; not those of zero,
        at a rate of zero, by which torch.distributed.checkpoint lets an optimizer make its state.
        Elsewhere a step more may be one that a rank makes by mistake, and alone."""
        if self.backwards:
            return False
        groups = self.optimizer.param_groups
        held = [p for group in groups for p in group["params"]]
        if all(p.grad is None for p in held):
            return False
        return any(group.get("lr") != 0 for group in groups) or not all(map(is_zero, held))

    def _step_ends(self) -> None:
        if self.local is not None and self._collectives != collectives_so_far():
            self.local.check_shared_step(self.optimizer)
        skip, self._by_hand = self._by_hand, None
        if skip is None:
            if self._by_own:
                self._count_own()
            return
        with self._gradients_kept():
            self._end_update(skip)
        self._used = True

    def _count_own(self) -> None:
        """Count an update with gradients of the script's own, which no backward pass has made."""
        self._by_own = False
        self.window.trained_alone()
        self.steps += 1
        self._by_script.stepped()
        self.progress.reached(self.steps)
        with self._gradients_kept():
            self.engine.updated(self.steps)
        if self.local is not None:
            self._meetings_due.append(True)
            self._meet()
        if self.proof is not None:
            self.proof.updated(self.steps, used=True)

    @contextmanager
    def _gradients_kept(self) -> Iterator[None]:
        """Leave gradients as they are, until the script zeroes them."""
        left = [(p, p.grad) for p in self._parameters]
        yield
        for parameter, gradient in left:
            parameter.grad = gradient

    def _other_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Another optimizer of the script steps: right for parameters of this model only where
        averaged gradients are there. Where the update is skipped, it leaves them alone, too. The
        one that this optimizer is around (SAM calls it `base_optimizer`) steps inside of its step
        alone, unless that is no step of an ``Optimizer``, of which nobody would be told."""
        self._collectives_before = None if self.local is None else collectives_so_far()
        if self._updating:
            return
        hooked = isinstance(self.optimizer, torch.optim.Optimizer)
        held = vars(self.optimizer).items() if hooked else ()
        if self.window_open and (name := next((n for n, v in held if v is optimizer), None)):
            raise messages.inner_step(self.optimizer, name)
        trained = {*self._parameters}
        shared = [p for g in optimizer.param_groups for p in g["params"] if p in trained]
        if shared:  # by whole averages, which it could not have under `sharded`
            self.sharding.watch.notice()
        if not self._dropped.isdisjoint(shared):
            raise messages.other_step_late(optimizer)
        if self._used:
            if shared and self.engine.nonfinite and not self._nonfinite.are_finite(shared):
                self._nonfinite.refuse(self.steps)
            return
        if shared and self.update_due:
            if self._nonfinite.skips_itself(optimizer):  # no step is made
                for parameter in shared:
                    parameter.grad = None
                return
            # others it lets step where their own gradients are finite
            finite = self._nonfinite.would_raise and self._nonfinite.are_finite(shared)
            skips = not finite and self._nonfinite.skips(self.steps)
            self._other_skips = bool(self._other_skips) or skips
            for parameter in shared if self._other_skips or self._without_batch else ():
                parameter.grad = None
            self._zeroing.used_by_another()
        elif shared and (self.window_open or all(p.grad is None for p in shared)):
            raise messages.other_step(optimizer)

    def _other_ends(self, optimizer: torch.optim.Optimizer) -> None:
        if self.local is not None:
            before, self._collectives_before = self._collectives_before, None
            exchanged = before not in (None, collectives_so_far())
            self.local.stepped(optimizer, exchanged=exchanged)

    # What is refused.

    @property
    def _window(self) -> str:
        if self._local_only:
            return "no_sync()"
        if self._backward_done and self.window.last:
            return "a window whose last backward() was in no_sync()"
        return f"an accumulation window of {self.window.accumulate} backward passes"

    def check_clip(self) -> None:
        """Refuse to clip what is not the gradient of an update.

        Raises:
            UsageError: says where clipping has a meaning.
        """
        self._must_be_whole()
        self.sharding.watch.end()  # what follows reads gradients on behalf of the script
        if self.momentum_correction.momenta:
            raise messages.clip_with_momentum()
        if self.update_due:
            return
        where = f"inside {self._window}" if self.window_open else "without a backward() before it"
        raise messages.clip_outside(where)

    def complaint(self) -> UsageError | str | None:
        """An error at the end, where nothing was ever trained, or a warning of what is dropped."""
        if not self.window_open or (self.backwards < 2 and self.window.accumulate == 1):
            return None
        awaiting = self.backwards - self._in_no_sync  # a step(), each of them
        if not self.steps + self.skipped and awaiting >= 2 * self.window.accumulate:
            return messages.never_updated(self.backwards)
        return messages.dropped(self.window.passes, self.window.accumulate)

    def check_engine(self, verb: str) -> None:
        """Refuse what follows a backward pass that has failed.

        Raises:
            UsageError: says how to go on.
        """
        if self.engine.failed:
            raise messages.failed_before(verb)

    def _must_be_whole(self) -> None:
        if self._broken_off and self.dims.control is not None:
            raise messages.broken_off(self.steps + 1)
        self.whole.check_in_step()


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
