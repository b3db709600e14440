"""Errors of a training loop: what was called where, and the line to write instead.

Never decides whether something is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping

from slipstream.errors import NonFiniteError, UsageError


def gradients_kept() -> UsageError:
    """An update by hand has left its gradients, and backward comes again."""
    return UsageError(
        "the gradients of the last optimizer.step() are still there, and backward() would "
        "add to them; call optimizer.zero_grad() before the next backward(), or "
        "session.step() instead of optimizer.step(): it does both"
    )


def gradients_unscaled(name: str) -> UsageError:
    """There are gradients of the script's own where scaled ones are added to them."""
    return UsageError(
        f"{name} has a gradient before the first backward() of an update, to which scaled "
        "gradients would be added and then divided by the loss scale; call optimizer.zero_grad() "
        "before it"
    )


def combined_under_codec() -> UsageError:
    """Averages of several passes were read and combined, under a codec with a memory."""
    return UsageError(
        "these gradients are not those of the last backward(), and averages of an earlier one were "
        "zeroed before: gradients.codec owes what it has left out of each average to the next, and "
        "of all but the last nobody would get it; use codec: half or int8 without error_feedback, "
        "or leave the codec out"
    )


def sums_zeroed(window: str) -> UsageError:
    """Gradients that a window had gathered are gone, as in loops that zero them before backward."""
    return UsageError(
        f"the gradients were zeroed inside {window}, whose update would miss what they held; leave "
        "optimizer.zero_grad() out, session.step() does it after the update, or call it only where "
        "session.step() has returned True; where it is there for gradients of another model's "
        "loss, freeze this model before its forward there: model.requires_grad_(False)"
    )


def others_in_window(name: str, window: str) -> UsageError:
    """A loss of another session has added to the sums of an open window."""
    return UsageError(
        f"the backward() of another session has added gradients to {name} inside {window}, whose "
        "update would take them for its own; freeze this model before its forward there, "
        "model.requires_grad_(False), and thaw it behind that backward(); where both losses are "
        "meant, train both models in one session: accelerate(nn.ModuleList([one, other]), ...)"
    )


def others_kept(name: str) -> str:
    """A loss of another session has left gradients to which a backward pass adds."""
    return (
        f"{name} has gradients that the backward() of another session has left in no_sync(), and "
        "this update will hold them, too. If they are not meant, as those of a generator's loss in "
        "its discriminator, call optimizer.zero_grad() before this backward(), or freeze the model "
        "before its forward there: model.requires_grad_(False)"
    )


def met_since_forward() -> UsageError:
    """A graph was there before a meeting, as of a generator while its discriminator is updated."""
    return UsageError(
        "parameters were changed in place between the forward of this loss and its backward(), "
        "most often by a meeting of ranks (local), which the update before it has ended with: "
        "compute the forward after that update; or give models that train in turns a session "
        "each, whose meetings leave the others alone"
    )


def step_without_backward() -> UsageError:
    """There is nothing to update with."""
    return UsageError(
        "step() without a backward() before it: call session.backward(loss) first, "
        "then session.step(), once each for every batch; where optimizer.step() was "
        "called, the update is done: leave one of the two out"
    )


def updated_without_step() -> UsageError:
    """The script makes the updates itself, of which nothing tells the session."""
    return UsageError(
        "parameters change between backward() and the zeroing of gradients, and no optimizer has "
        "made a step: updates by hand, as p.data.add_(p.grad, alpha=-lr), or by a class that is no "
        "torch.optim.Optimizer. This session takes them for skipped ones: session.updates stays "
        "at 0, checks and checkpoints wait for an update, codecs forget what they owe, meetings "
        "of local undo them. Call session.step(), which calls optimizer.step(); "
        "torch.optim.SGD(model.parameters(), lr=lr) makes the update of that line"
    )


def step_by_closure() -> UsageError:
    """An optimizer that computes gradients inside its step."""
    return UsageError(
        "optimizer.step(closure): a session averages gradients in backward(), before the "
        "step; call session.backward(loss), then session.step(), without a closure"
    )


def step_by_hand_inside(window: str) -> UsageError:
    """``optimizer.step()`` where gradients are not averaged."""
    return UsageError(
        f"optimizer.step() inside {window}: the gradients are sums of this rank so "
        "far; call session.step() after every backward(); optimizer.step() and zero_grad() may "
        "take its place where session.sync_gradients is True, and only there"
    )


def other_step(optimizer: object) -> UsageError:
    """Another optimizer updates the model where gradients are not averaged, or gone."""
    return UsageError(
        f"the step of another optimizer ({type(optimizer).__name__}) of parameters of this "
        "model, where their averaged gradients are not there: call it after the "
        "session.backward() that ends a window and before session.step(), which zeroes the "
        "gradients of all parameters; or give accelerate() one optimizer with groups"
    )


def other_step_late(optimizer: object) -> UsageError:
    """Another optimizer updates by sums of which the session has dropped a part."""
    return UsageError(
        f"the step of another optimizer ({type(optimizer).__name__}), for which the script has "
        "kept gradients of an earlier update: optimizer.step() and zero_grad() of the optimizer "
        "that accelerate() got end an update of all parameters, and backward() has dropped them; "
        "give accelerate() the optimizer that steps most rarely, or zero the gradients of both in "
        "every update"
    )


def inner_step(outer: object, name: str) -> UsageError:
    """An optimizer around another one, of which the script lets that one alone step."""
    kind = type(outer).__name__
    return UsageError(
        f"the step of the optimizer that {kind} has as {name}, outside of {kind}.step(): "
        f"accelerate() got the {kind}, so this session would take the update for a skipped one; "
        f"give it the one that steps, accelerate(model, optimizer.{name}), or call session.step()"
    )


def clip_outside(where: str) -> UsageError:
    """``clip_grad_norm_`` of anything but the gradients of an update."""
    return UsageError(
        f"clip_grad_norm_() {where}: it clips the average gradient of an update, so it belongs "
        "between the backward() that ends the window and its step(); call it only where "
        "session.sync_gradients is True"
    )


def clip_with_momentum() -> UsageError:
    """DGC's averages contain momentum."""
    return UsageError(
        "clip_grad_norm_() with gradients.codec dgc: the gradients contain the momentum of earlier "
        "updates; set the codec's clip, which clips each rank's gradient before, or use another "
        "codec"
    )


def own_gradients_with_momentum() -> UsageError:
    """Gradients that no backward pass has made, to which DGC would add no momentum."""
    return UsageError(
        "optimizer.step() with gradients of the script's own, under gradients.codec dgc, which "
        "applies the optimizer's momentum and weight decay to the averages of session.backward() "
        "alone: these would have none; call session.backward(sum((p * own).sum() for each "
        "parameter p and its own gradient)), which averages them, or use another codec"
    )


def nonfinite(found: Mapping[int, tuple[bool, str]], step: int) -> NonFiniteError:
    """Gradients that are infinite or NaN: ``found`` by rank, whether its own were, and the first
    parameter whose average is."""
    name = next((name for _, name in found.values() if name), "")
    ranks = [rank for rank, (own, _) in found.items() if own]
    many = "ranks" if len(ranks) > 1 else "rank"
    before = f"before the exchange on {many} {', '.join(map(str, ranks))}"
    if not ranks:
        before = "and was finite on every rank before the exchange"
    return NonFiniteError(
        f"update {step + 1}: the gradient of {name or 'a parameter'} is infinite or NaN, {before}. "
        f"The parameters are still those of update {step}. Look at the loss and the batch there; a "
        "lower learning rate or session.clip_grad_norm_() may help; checks.nonfinite: skip leaves "
        "such updates out, allow makes them"
    )


def broken_off(update: int) -> UsageError:
    """An exception in a step, on one rank maybe."""
    return UsageError(
        f"update {update} was broken off by an exception in optimizer.step(), and "
        "the other ranks may have made it; end this run and resume from a checkpoint"
    )


def failed_before(verb: str) -> UsageError:
    """A verb after a backward that failed, whose gradients are nobody's."""
    return UsageError(
        f"{verb}() after a backward() that has failed: the ranks are out of step, and this session "
        "trains, saves and restores no more; end this run and start again from the newest "
        'checkpoint (session.checkpoint("model") still has the parameters of the last update)'
    )


def window_lost(verb: str) -> UsageError:
    """A checkpoint holds no gradients of an open window."""
    return UsageError(
        f"{verb}() inside an accumulation window would lose the gradients gathered so far; "
        "call it after a step() that returned True, or after session.flush(), which "
        "updates with them"
    )


def restored_under_gradients(verb: str) -> UsageError:
    """Another state would be updated with gradients of this one."""
    return UsageError(
        f"{verb}() after a backward() that no update has used: its gradients are of the "
        "state before; call it before backward(), or after a step() that returned True, or "
        "after session.flush()"
    )


def shares_out_of_step() -> UsageError:
    """A checkpoint of what lies on all ranks, after an exception that broke off an exchange."""
    return UsageError(
        "checkpoint() after a backward() that has failed: under gradients.transport sharded its "
        "parts lie on all ranks, which are out of step now, and are gathered no more; resume from "
        "an earlier checkpoint, or let each rank save its own part: "
        'session.checkpoint("model", "optimizer", sharded=True)'
    )


def never_updated(backwards: int) -> UsageError:
    """The session ends, and has trained nothing."""
    return UsageError(
        f"{backwards} backward() and no update in this session: call session.step() "
        "after every backward(), also where session.sync_gradients is False (or optimizer.step() "
        "of the optimizer that accelerate() got)"
    )


def flag_of_ddp() -> str:
    """A loop as that of nanoGPT has its model in no wrapper any more."""
    return (
        "model.require_backward_grad_sync is False, which only DistributedDataParallel obeys: "
        "gradients are averaged in this backward(), too, as in each one; write "
        "`with session.no_sync():` around the backward passes before the last one of an update, or "
        "gradients: {accumulate: 4} and session.step() after each, and leave out the division of "
        "the loss by 4"
    )


def dropped(passes: int, accumulate: int) -> str:
    """The session ends inside a window."""
    window = f"{passes} of the {accumulate} backward passes of an accumulation window"
    return (
        "this session closes with gradients that no update has used, of "
        f"{window if accumulate > 1 else 'the last backward passes'}; call "
        "session.flush() before close() to update with them"
    )
