"""A session's checkpoint: the states of its model, its optimizer and its training, as one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipstream.errors import ModelError, SlipstreamError
from slipstream.local.model import of_one_rank
from slipstream.pytree import plain_numbers
from slipstream.session import messages
from slipstream.session.checkpoint_format import PARTS, Part
from slipstream.session.loop import TrainingLoop
from slipstream.session.state import SessionState


class Checkpointing:
    """Gathers checkpoints of a session between two updates, and goes on from them.

    Args:
        loop: has the model, its optimizer, and the number of updates.
        state: of the training beside them.
        rank: of this process.
    """

    def __init__(self, loop: TrainingLoop, state: SessionState, rank: int) -> None:
        self._loop, self._state, self._rank = loop, state, rank
        self._taken: int | None = None  # updates when a checkpoint was taken last
        self._began = 0  # updates when the session was opened or restored

    def gather(self, wanted: tuple[Part, ...] = PARTS, *, sharded: bool = False) -> dict[str, Any]:
        """Collect parts as ``Session.checkpoint`` returns them; gradients of an open update are in
        none."""
        loop, whole, state = self._loop, self._loop.whole, dict[str, Any]()
        self._taken = loop.updates.count
        if "model" in wanted:
            state["model"] = whole.full_state_dict()
        if "optimizer" in wanted:
            state["optimizer"] = (
                whole.sharded_optimizer_state_dict()
                if sharded
                else whole.full_optimizer_state_dict()
            )
        if "session" in wanted:
            state["session"] = self._state.state(loop.updates.count, "session.checkpoint")
        if sharded and self._rank:
            state = {part: value for part, value in state.items() if part == "optimizer"}
        numbers: dict[str, Any] = plain_numbers(state)
        return numbers

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `gather` returned, on all ranks; raises as ``Session.restore``."""
        self.check_no_gradients("restore")
        if "session" in state:  # before anything is loaded
            self._state.check(state["session"])
        self._state.check_alike(state, self._loop.updates.count, self._taken, self._began)
        whole = self._loop.whole
        if "model" in state:
            whole.load_full_state_dict(state["model"])
        if "optimizer" in state:
            try:
                kept = state["optimizer"]
                if self._loop.local is None:
                    kept = of_one_rank(kept, self._rank)
                whole.load_full_optimizer_state_dict(kept)
            except SlipstreamError:
                raise
            except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
                words = str(error).strip().partition("\n")[0]
                raise ModelError(f"the state is another optimizer's: {words}") from error
        if "session" in state:
            self.load(state["session"])

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from the session's part alone, which was checked."""
        loop = self._loop
        loop.updates.count = self._began = self._state.load(state)
        loop.momentum_correction.restored()
        if loop.proof is not None:
            loop.proof.forget()

    def check_whole(self, wanted: tuple[Part, ...]) -> None:
        """Refuse to gather shares where an exchange was broken off.

        Raises:
            UsageError: these parts lie on all ranks, which are out of step.
        """
        loop = self._loop
        gathers = "optimizer" in wanted or loop.precision.masters is not None
        if gathers and loop.sharding.is_sharded and loop.engine.failed:
            raise messages.shares_out_of_step()

    def check_window(self, verb: str) -> None:
        """Refuse to save inside an accumulation window.

        Raises:
            UsageError: its gradients would be lost.
        """
        self._loop.check_engine(verb)
        if self._gradients_wait():
            raise messages.window_lost(verb)

    def check_restore(self, verb: str) -> None:
        """Refuse to restore where an exchange was broken off, and what other jobs would not have.

        Raises:
            UsageError: the ranks are out of step, or those jobs train on.
        """
        self._loop.check_engine(verb)
        if self._loop.local is not None:
            self._loop.local.check_restore(verb)

    def check_no_gradients(self, verb: str) -> None:
        """Refuse to restore between a backward pass and its update.

        Raises:
            UsageError: gradients of the state before are there.
        """
        if self._gradients_wait():
            raise messages.restored_under_gradients(verb)

    def _gradients_wait(self) -> bool:
        """Whether gradients wait for an update, but for one that no step can make."""
        self._loop.updates.leave_out()
        return self._loop.window.open
