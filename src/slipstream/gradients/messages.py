"""Errors of the engine: place, parameters, likely cause and way out.

Never decides whether something is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.errors import ExchangeError, ModelError, UsageError


def exchange_failed(at: str, what: str, names: Sequence[str] = ()) -> str:
    """``what`` (of the gradients ``names``) failed ``at`` a rank and step."""
    carried = f" ({abbreviated(names)})" if names else ""
    return (
        f"{at}: {what}{carried} failed. Most often another rank has ended, failed or skipped this "
        "step: look at the first error of all ranks; pass loaders of unequal length to "
        "accelerate(model, optimizer, loader)"
    )


def gradient_repeated(at: str, name: str, firings: int) -> ExchangeError:
    """More gradients for one parameter than the ranks agreed on."""
    return ExchangeError(
        f"{at}: parameter {name} got a gradient more than {firings} time(s) in one backward, "
        "unlike in the first step, after its segment may have been sent; the model's graph changes "
        "between steps (reentrant checkpointing of shared layers; a loss whose backward computes "
        "parts of the batch again, as GradCache): use checkpoint(use_reentrant=False) or set "
        "gradients.overlap: false, which is right for every graph"
    )


def gradient_outside(name: str) -> UsageError:
    """A gradient that no exchange would ever carry."""
    return UsageError(
        f"parameter {name} got a gradient outside session.backward(), which would never be "
        "averaged over ranks; call session.backward(loss) instead of loss.backward(), or use "
        "`with session.no_sync():` for gradients that stay local; where the loss is that of "
        "another session, as a GAN's generator, freeze this model before its forward there, "
        "model.requires_grad_(False), or call that backward() inside this session's no_sync() and "
        "zero these gradients behind it"
    )


def gradient_behind_average(name: str) -> UsageError:
    """A gradient of this rank alone, in an update whose averages are there already."""
    return UsageError(
        f"parameter {name} got a gradient in no_sync() outside session.backward(), on top of an "
        "average that waits for step(), so that each rank would update it in its own way; zero "
        "the gradients before the next step() or backward(), or call session.backward(loss) inside"
    )


def gradient_came_late(name: str) -> UsageError:
    """A hook of the script has set a gradient that was on its way to other ranks."""
    return UsageError(
        f"the gradient of {name} was set in backward after its own hooks had run, when it was on "
        "its way to other ranks already: change it in a hook of that parameter "
        "(register_post_accumulate_grad_hook), or after session.backward(); or send all gradients "
        "when backward is over: gradients: {overlap: false}"
    )


def gradient_taken(name: str) -> UsageError:
    """A hook has used the gradient of this rank."""
    return UsageError(
        f"{name} has no gradient at the end of its backward: a hook "
        "(register_post_accumulate_grad_hook) has set it to None, maybe after an update with the "
        "gradient of this rank alone; let session.step() update after all gradients were averaged"
    )


def backward_repeated() -> UsageError:
    """A second exchange for one update: a codec would take averages for gradients of this rank."""
    return UsageError(
        "backward() was called twice before step(), and gradients.codec has sent the first "
        "gradients already; call step() after every backward() and let gradients.accumulate add "
        "them up, or use `with session.no_sync():` around the first one; where that was for "
        "another optimizer, which makes no step now, call its zero_grad() before the second"
    )


def average_changed(name: str) -> UsageError:
    """DGC's averages contain momentum."""
    return UsageError(
        f"the gradient of parameter {name} was changed after backward(), but with gradients.codec "
        "dgc it contains the momentum of earlier updates; instead of clipping set the codec's "
        "clip, instead of a GradScaler call session.backward(loss * scale, loss_scale=scale) or "
        "set precision.loss_scale, or use another codec"
    )


def sum_changed(name: str) -> UsageError:
    """The gradient of an unfinished window was clipped or replaced."""
    return UsageError(
        f"the gradient of parameter {name} was changed inside an accumulation window or no_sync(), "
        "where it is the sum of this rank so far, so that each rank would change it in its own "
        "way; clip or change gradients after the backward() that ends the window, where "
        "session.sync_gradients is True"
    )


def sparse_without_momentum(name: str) -> ModelError:
    """DGC applies the momentum of a parameter whose gradients it cannot compress."""
    return ModelError(
        f"parameter {name} has sparse gradients, which the codec dgc does not take, but it applies "
        "the momentum of the optimizer's whole group; give the parameter a group of its own and "
        f"no codec: gradients.codec: {{kind: by_name, rules: [{{match: {name!r}}}, "
        "{match: '*', codec: dgc}]}"
    )


def out_of_step(cause: str) -> UsageError:
    """A backward after one that failed."""
    return UsageError(
        f"an earlier backward failed ({cause}), so the ranks are out of step; end this run and "
        "resume from a checkpoint"
    )


def unfrozen(names: Sequence[str]) -> UsageError:
    """Parameters require gradients now that were frozen at the start."""
    return UsageError(
        f"parameters frozen at accelerate() require gradients now: {abbreviated(names)}; close() "
        "the session and accelerate() again after changing requires_grad (with a framework: "
        "fit(), train(), prepare() or setup() once more)"
    )


def abbreviated(names: Sequence[str]) -> str:
    """All of up to three parameter names, else the first, the last and their number."""
    if len(names) <= 3:
        return ", ".join(names)
    return f"{names[0]} ... {names[-1]}, {len(names)} gradients"


def sparse_in_shards(name: str) -> ModelError:
    """A sparse gradient has rows of its own on every rank: there is nothing to cut."""
    return ModelError(
        f"parameter {name} has sparse gradients, of which ranks cannot take shards; build its "
        "module with sparse=False, or use gradients: {transport: direct}"
    )
