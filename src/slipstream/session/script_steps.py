"""Steps of optimizers that the script calls by itself, as they are seen by hooks.

[Note: Who calls optimizer.step()]
``session.step()`` does, or the script by hand: old loops, and ``torch.amp.GradScaler``, which skips
the call where gradients overflowed, or tells a fused optimizer to skip. Hooks on the optimizer make
both the same update. Where backward comes again without one, and the gradients were zeroed
meanwhile, the script has skipped the update.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist

from slipstream.local.training import LocalTraining
from slipstream.session import messages
from slipstream.session.accumulation import AccumulationWindow
from slipstream.session.drift import warn_of_none_that_meet
from slipstream.session.exchanging import GradientExchange
from slipstream.session.given import Given
from slipstream.session.step_hooks import StepHooks, collectives_so_far
from slipstream.session.updates import ModelUpdates
from slipstream.session.zeroing import is_zero


class ScriptSteps:
    """Makes an update of each step by hand, and watches the optimizers beside the session's.

    Args:
        hooks: tell of every step.
        given: the model and its optimizer.
        exchange: averages the gradients.
        window: says where the script is.
        updates: are begun and ended here, too.
        local: holds the meetings of ranks that train on their own; None: they do not.
    """

    def __init__(
        self,
        hooks: StepHooks,
        given: Given,
        exchange: GradientExchange,
        window: AccumulationWindow,
        updates: ModelUpdates,
        local: LocalTraining | None,
    ) -> None:
        self._optimizer, self._trained = given.optimizer, {*given.model.parameters()}
        self._engine, self._sharding = exchange.engine, exchange.sharding
        self._momentum, self._window = exchange.momentum, window
        self._updates, self._local, self._progress = updates, local, given.progress
        # whether the update by hand that is under way is skipped; None: there is none
        self._skip: bool | None = None
        self._by_own = False  # inside a step with gradients of the script's own
        self._collectives = 0  # when a step began
        self._collectives_before: int | None = None  # that of another optimizer; None: none began
        # others that have stepped, and behind which update; None: that was told
        self._others: WeakKeyDictionary[torch.optim.Optimizer, int | None] = WeakKeyDictionary()
        data = given.dims.data
        self._first_rank = data is not None and dist.get_rank(data) == 0
        # weak: the hooks call back, and a circle would keep the groups of a session that is over
        self._hooks = ref(hooks)
        hooks.attach(self._begins, self._ends, self._other_begins, self._other_ends)

    def backward_begins(self) -> None:
        """Forget a step by hand that has begun, and has raised since."""
        if (hooks := self._hooks()) is not None:
            hooks.broken_off()

    def _begins(self, closure: object) -> None:
        """``optimizer.step()`` is called, by the session or by hand."""
        if self._local is not None:
            self._collectives = collectives_so_far()
        self._skip, self._by_own = None, False  # also of a step before that has raised
        if self._updates.stepping:
            return
        self._updates.check_whole()
        if closure is not None:
            raise messages.step_by_closure()
        if not self._window.backward_done and not self._window.open:
            self._by_own = self._has_own_gradients()
            if self._by_own and self._momentum.momenta:
                raise messages.own_gradients_with_momentum()
            if self._by_own and self._local is not None:
                self._local.check_outside("step")
                self._local.check()
            return
        if not self._window.update_due:
            if self._engine.failed:
                raise messages.failed_before("optimizer.step")
            raise messages.step_by_hand_inside(str(self._window))
        self._skip = self._updates.begin(by_hand=True)

    def _has_own_gradients(self) -> bool:
        """Whether the script, which never calls `backward`, has set gradients; not those of zero,
        at a rate of zero, by which torch.distributed.checkpoint lets an optimizer make its state.
        Elsewhere a step more may be one that a rank makes by mistake, and alone."""
        if self._progress.passes:
            return False
        groups = self._optimizer.param_groups
        held = [p for group in groups for p in group["params"]]
        if all(p.grad is None for p in held):
            return False
        return any(group.get("lr") != 0 for group in groups) or not all(map(is_zero, held))

    def _ends(self) -> None:
        if self._local is not None and self._collectives != collectives_so_far():
            self._local.check_shared_step(self._optimizer)
        skip, self._skip = self._skip, None
        by_own, self._by_own = self._by_own, False
        if by_own:
            self._updates.end_own()
        elif skip is not None:
            with self._updates.kept.unchanged():
                self._updates.end(skip)
            self._updates.kept.used = True

    def _other_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """Another optimizer of the script steps: right for parameters of this model only where
        averaged gradients are there. Where the update is skipped, it leaves them alone, too. The
        one that this optimizer is around (SAM calls it `base_optimizer`) steps inside of its step
        alone, unless that is no step of an ``Optimizer``, of which nobody would be told."""
        self._collectives_before = None if self._local is None else collectives_so_far()
        updates, window = self._updates, self._window
        if updates.stepping:
            return
        hooked = isinstance(self._optimizer, torch.optim.Optimizer)
        held = vars(self._optimizer).items() if hooked else ()
        if window.open and (name := next((n for n, v in held if v is optimizer), None)):
            raise messages.inner_step(self._optimizer, name)
        shared = [p for g in optimizer.param_groups for p in g["params"] if p in self._trained]
        if not shared:
            return
        # by whole averages, which it could not have under `sharded`
        self._sharding.watch.notice()
        updates.kept.check_other_step(optimizer, shared)
        if updates.kept.used:
            if self._engine.nonfinite and not updates.nonfinite.are_finite(shared):
                updates.nonfinite.refuse(updates.count)
        elif window.update_due:
            self._take_part(optimizer, shared)
        elif window.open or all(p.grad is None for p in shared):
            raise messages.other_step(optimizer)

    def _take_part(
        self, optimizer: torch.optim.Optimizer, shared: list[torch.nn.Parameter]
    ) -> None:
        """Let another optimizer step where an update is due, or leave its parameters alone."""
        updates, nonfinite = self._updates, self._updates.nonfinite
        if nonfinite.skips_itself(optimizer):  # no step is made
            for parameter in shared:
                parameter.grad = None
            return
        # others it lets step where their own gradients are finite
        finite = nonfinite.would_raise and nonfinite.are_finite(shared)
        skips = not finite and nonfinite.skips(updates.count)
        updates.other_skips = bool(updates.other_skips) or skips
        for parameter in shared if updates.other_skips or updates.without_batch else ():
            parameter.grad = None
        updates.zeroing.used_by_another()

    def _other_ends(self, optimizer: torch.optim.Optimizer) -> None:
        if self._local is not None:
            before, self._collectives_before = self._collectives_before, None
            exchanged = before not in (None, collectives_so_far())
            self._local.stepped(optimizer, exchanged=exchanged)
            if self._first_rank and self._progress.passes:
                self._look_at_other(optimizer)
        if self._updates.drift is not None:
            self._updates.drift.stepped(optimizer)

    def _look_at_other(self, optimizer: torch.optim.Optimizer) -> None:
        """Tell of one that trains parameters which no rank shares, at its second update: those of
        inner loops end within one."""
        count = self._updates.count
        if self._others.setdefault(optimizer, count) not in (None, count):
            self._others[optimizer] = None
            warn_of_none_that_meet(optimizer)
