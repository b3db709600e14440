"""The updates of a model: what is checked before one, and who is told when it has ended."""

from __future__ import annotations

from slipstream.errors import UsageError, warn
from slipstream.local.training import LocalTraining
from slipstream.precision.model_precision import ModelPrecision
from slipstream.session import messages
from slipstream.session.accumulation import AccumulationWindow
from slipstream.session.drift import FirstDrift
from slipstream.session.due_meetings import DueMeetings
from slipstream.session.exchanging import GradientExchange
from slipstream.session.given import Given
from slipstream.session.kept_gradients import KeptGradients
from slipstream.session.members import Members
from slipstream.session.nonfinite import NonfiniteGradients
from slipstream.session.proof import Proof
from slipstream.session.stepless_updates import SteplessUpdates
from slipstream.session.tracing import Tracer
from slipstream.session.zeroing import Zeroing
from slipstream.strategy import keeps_state


class ModelUpdates:
    """Begins and ends updates, whoever steps the optimizer: `make`, or the script by hand.

    The arguments are those of `TrainingLoop`.

    Attributes:
        count: updates so far.
        skipped: updates that were skipped, because of gradients that were not finite or that the
            script has zeroed.
        stepping: whether the optimizer steps for `make`.
        broken_off: whether an update has begun and not ended.
        other_skips: whether another optimizer has to skip this update; None: it has made no step.
        zeroing: sees whether the script has zeroed gradients.
        kept: gradients that an update has left to the script.
        nonfinite: looks for gradients that are not finite.
        stepless: sees parameters that change without a step of an optimizer.
        drift: of ranks after their first update; None: they were compared, or are alone.
        graph_stays: whether the last backward pass has retained its graph.
        meetings: of ranks that train on their own.
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
        model, self._optimizer = given.model, given.optimizer
        self._engine, self._momentum = exchange.engine, exchange.momentum
        self._sharding, self._window, self._precision = exchange.sharding, window, precision
        self._tracer, self._members, self._local, self._proof = tracer, members, local, proof
        self._control, self._progress = given.dims.control, given.progress
        codec = given.strategy.gradients.codec
        self._owes = codec is not None and keeps_state(codec)  # a part to later updates
        self._parameters = tuple(model.parameters())
        self.zeroing = Zeroing(model, self._optimizer)
        self.kept = KeptGradients(self._parameters, self.zeroing)
        self.nonfinite = NonfiniteGradients(given, exchange, window, precision, local, proof)
        is_local = exchange.sharding.model.is_local
        named = model.named_parameters()
        here = {name: p for name, p in named if p.requires_grad and is_local(name)}
        self.stepless = SteplessUpdates([*here.values()])
        self.drift: FirstDrift | None = None
        if given.dims.data is not None and local is None:
            self.drift = FirstDrift(here, given.dims.data)
        self.meetings = DueMeetings(local, given.progress)
        self.count = self.skipped = 0
        self.stepping = self.broken_off = False
        self.other_skips: bool | None = None
        self.graph_stays = False
        self._looked = False  # at averages that no update has used, of a graph that stayed
        self._emptied = False  # by the script, before the step that begins

    def exchange_begins(self) -> None:
        """Begin to compare ranks after their first update: before their gradients leave."""
        try:
            if self.drift is not None:
                self.drift.show()
        except BaseException as error:
            self._engine.fail(error)
            raise

    def exchanged(self) -> None:
        """Compare ranks after their first update, where an exchange of gradients ends."""
        try:
            if self.drift is not None and self.drift.compare():
                self.drift = None
        except BaseException as error:  # the engine has ended this pass, and would go on
            self._engine.fail(error)
            raise

    @property
    def in_flight(self) -> bool:
        """Whether a comparison was begun that nobody has waited for."""
        return self.drift is not None and self.drift.in_flight

    def check_whole(self) -> None:
        """Refuse to go on where this rank may be out of step with others.

        Raises:
            UsageError: an update was broken off.
        """
        if self.broken_off and self._control is not None:
            raise messages.broken_off(self.count + 1)
        self._sharding.model.check_in_step()

    @property
    def without_batch(self) -> bool:
        """Whether no batch of this update is one of this rank, which trains on its own, or of its
        island: they make no update."""
        return self._local is not None and not self._window.contributions

    def make(self) -> bool:
        """Step the optimizer, unless the update must be skipped; whether it was made."""
        skip = self.begin()
        if not skip:
            self.stepping = True
            try:
                self._optimizer.step()
            except BaseException as error:
                # what slipstream refuses, it refuses before the first change
                self.broken_off = not isinstance(error, UsageError)
                self._sharding.model.complete()
                raise
            finally:
                self.stepping = False
        self._clear()
        self.end(skip)
        return not skip

    def _clear(self) -> None:
        self.kept.clear()
        # behind it, as it may fill what is there; without set_to_none, which not every one takes
        self._optimizer.zero_grad()
        self.kept.used = False

    def begin(self, *, by_hand: bool = False) -> bool:
        """Check gradients and members before ``optimizer.step()``; return whether to skip it."""
        if self._local is not None:
            self._local.check_outside("step")
        self._sharding.watch.end()
        self._members.check_optimizer()
        self.kept.check_step(self._optimizer)
        self._sharding.model.check_gradients()
        self._engine.check_averages()
        if self._owes:
            self._check_owed()
        if self._proof is not None:
            self._proof.before_update()
        skip = bool(self.other_skips) or self.nonfinite.skips(self.count, by_hand=by_hand)
        self._tracer.update_begins()
        if not skip:
            self._momentum.check()
        if skip or self.without_batch:  # an optimizer leaves parameters without a gradient alone
            self.kept.clear()
        self.broken_off = True
        return skip

    def _check_owed(self) -> None:
        """Refuse a combination of averages that were read one after the other: what a codec leaves
        out of all but the last, nobody gets.

        Raises:
            UsageError: that is what the gradients are.
        """
        if self._looked and self.zeroing.replaced:
            raise messages.combined_under_codec()
        self._emptied = self.zeroing.done_since

    def end(self, skip: bool | None, *, late: bool = False) -> None:
        """Count the update and tell every part of its end; ``skip``: gradients overflowed; None:
        the script made no step. ``late``: a graph may wait for its backward."""
        self.other_skips = None
        worked = skip is False and self._window.contributions > 0
        if skip is False:
            self.count += 1
            self.stepless.stepped()
            if self.drift is not None:
                self.drift.updated(sharded=self._sharding.is_sharded)
        else:
            self.skipped += 1
        self._progress.reached(self.count)
        self.zeroing.forget()
        self._window.close()
        if skip is not None:
            self._precision.updated(skip)
        # another optimizer may have made the finite part of it: codecs keep nothing of the rest
        used = skip is False and not self._engine.nonfinite and not self._emptied
        self._looked = skip is None and self.graph_stays and not self._engine.nonfinite
        self._emptied = False
        self._engine.updated(self.count, used=used, late=late)
        self._tracer.update_ends()  # last, as it may change the split
        self.meetings.add(worked)  # after it: a meeting is no work of the optimizer
        if not late:
            self.meetings.hold()
        self.broken_off = False
        if self._proof is not None:
            self._proof.updated(self.count, used=skip is False)

    def end_own(self) -> None:
        """Count an update with gradients of the script's own, which no backward pass has made."""
        self._window.trained_alone()
        self.count += 1
        self.stepless.stepped()
        self._progress.reached(self.count)
        with self.kept.unchanged():
            self._engine.updated(self.count)
        self.meetings.add(True)
        self.meetings.hold()
        if self._proof is not None:
            self._proof.updated(self.count, used=True)

    # Updates without a step.

    def settle(self, *, in_forward: bool = False) -> None:
        """End an update whose gradients the script has zeroed: it has skipped it, unless another
        optimizer has made it. ``in_forward``: a graph waits for its backward."""
        # the script may be in no_sync() by now, where Lightning zeroes
        due = self._window.exchanged or self._window.update_follows
        if self._window.backward_done and due and self.zeroing.done_since:
            if self._window.alone:
                self._forget_look()
            else:
                self.nonfinite.drop()
                if self.other_skips is None:
                    self._check_stepless()
                self.end(self.other_skips, late=True)
        if in_forward:
            self.meetings.send_ahead()
        else:
            self.meetings.hold()

    def _forget_look(self) -> None:
        """Forget gradients that this rank has gathered alone and thrown away, for an adversarial
        example, say: they are no update, which all ranks would have to count."""
        self.zeroing.forget()
        self._window.close()
        self._engine.updated(self.count, used=False, late=True)

    def _check_stepless(self) -> None:
        """Say, once, that the script updates parameters by itself.

        Raises:
            UsageError: where gradients, or what becomes of parameters, would be wrong.
        """
        if not self.stepless.count():
            return
        error = messages.updated_without_step()
        owes = self._owes and self._control is not None
        if owes or self._momentum.momenta or self._local is not None:
            raise error
        warn(str(error))

    @property
    def left_out(self) -> bool:
        """Whether no step can make this update; `leave_out` forgets it."""
        return self._window.update_due and self._engine.nonfinite

    @property
    def uncounted(self) -> int:
        """Updates that have ended before the last meetings were told of them, and one that this
        rank skips: the script may zero its gradients later."""
        return len(self.meetings) + self.left_out

    def leave_out(self) -> None:
        """Forget an update that no step can make, as its averages are not finite: a scaler of the
        script has skipped it, and the script zeroes its gradients before the next backward."""
        if self.left_out:
            self._clear()
            self.end(None, late=True)
        self.settle()
