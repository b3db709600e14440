"""What the engine's errors say: where, which parameters, the likely cause and the way out.

Never decides whether something is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.errors import ExchangeError, ModelError, UsageError


def failed(at: str, what: str, names: Sequence[str] = ()) -> str:
    """``what`` (of the gradients ``names``) did not come to an end ``at`` a rank and step."""
    carried = f" ({in_short(names)})" if names else ""
    return (
        f"{at}: {what}{carried} failed. Most often another rank has ended, failed or skipped this "
        "step: look at the first error of all ranks; loaders of different length belong into "
        "accelerate(model, optimizer, loader)"
    )


def came_again(at: str, name: str, firings: int) -> ExchangeError:
    """More gradients for one parameter than the ranks have agreed on."""
    return ExchangeError(
        f"{at}: parameter {name} got a gradient more than {firings} time(s) in one backward, "
        "unlike in the first step, after its segment may have been sent; the model's graph changes "
        "between steps (reentrant checkpointing of shared layers): use "
        "checkpoint(use_reentrant=False) or set gradients.overlap: false, which is right for "
        "every graph"
    )


def came_outside(name: str) -> UsageError:
    """A gradient that no exchange would ever carry."""
    return UsageError(
        f"parameter {name} got a gradient outside session.backward(), which would never be "
        "averaged over ranks; call session.backward(loss) instead of loss.backward(), or use "
        "`with session.no_sync():` for gradients that stay local"
    )


def averaged_already() -> UsageError:
    """A second exchange of one update, which a codec cannot tell from gradients of this rank."""
    return UsageError(
        "backward() was called twice before step(), and gradients.codec has sent the first "
        "gradients already; call step() after every backward() and let gradients.accumulate add "
        "them up, or use `with session.no_sync():` around the first one"
    )


def sparse_without_momentum(name: str) -> ModelError:
    """DGC holds the momentum of a parameter whose gradients it cannot code."""
    return ModelError(
        f"parameter {name} has sparse gradients, which the codec dgc does not take, but it holds "
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


def frozen_no_more(names: Sequence[str]) -> UsageError:
    """Parameters that the engine does not carry require gradients now."""
    return UsageError(
        f"parameters frozen at accelerate() require gradients now: {in_short(names)}; close() the "
        "session and accelerate() again after changing requires_grad"
    )


def in_short(names: Sequence[str]) -> str:
    """First and last of many parameter names."""
    if len(names) <= 3:
        return ", ".join(names)
    return f"{names[0]} ... {names[-1]}, {len(names)} gradients"
