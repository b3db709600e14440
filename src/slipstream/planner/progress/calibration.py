"""The losses of short runs of one training, each under another strategy, and their file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from slipstream.errors import StrategyError, TraceError
from slipstream.files.document import MIB, Unreadable, decoded, parse_json, read_bytes
from slipstream.files.write import write_whole
from slipstream.planner.progress.curve import LEAST_UPDATES
from slipstream.strategy import Strategy
from slipstream.trace.event import ITERATION, Trace, is_meeting

LONGEST = 64 * MIB
NORMS = {"own_norm2", "average_norm2"}
"""Arguments of an event."""
MADE_BY = "slipstream tune --allow-lossy --to-loss LOSS -- train.py"
"""The command that writes the file."""


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class LossRun(_Value):
    """One run from the start of the training.

    Attributes:
        strategy: its document.
        seconds: of an update, the mean.
        error: relative standard error of ``seconds``.
        losses: of each update, the mean over ranks; the first update's first.
        cosine: between what two ranks changed from meeting to meeting; None: they had no meetings.
    """

    strategy: dict[str, Any]
    seconds: float = Field(gt=0, allow_inf_nan=False)
    error: float = Field(ge=0, allow_inf_nan=False)
    cosine: float | None = Field(default=None, ge=-1, le=1)
    losses: Annotated[tuple[FiniteFloat, ...], Field(min_length=1)]


class LossCalibration(_Value):
    """Runs on the same batches from the same start; that of data parallelism comes first.

    Attributes:
        runs: one a strategy.
        noise: the gradient noise scale over the batch of an update (McCandlish et al., "An
            empirical model of large-batch training", https://arxiv.org/abs/1812.06162); None: it
            was not measured.
        cosine: between gradients of two ranks in one update; None: likewise.
        ranks: that share a batch; None: it is not known.
        model: name of its class; None: likewise.
    """

    runs: Annotated[tuple[LossRun, ...], Field(min_length=1)]
    noise: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    cosine: float | None = Field(default=None, ge=-1, le=1)
    ranks: int | None = Field(default=None, ge=1)
    model: str | None = None

    def problem(self, trace: Trace) -> str | None:
        """Say why it is not of the training of a trace; None: it may be."""
        for name, of_losses, key in (
            ("ranks", self.ranks, "world_size"),
            ("model", self.model, "model"),
        ):
            of_trace = trace.meta.get(key)
            if None not in (of_losses, of_trace) and of_losses != of_trace:
                return f"{name}: {of_losses} in the file of losses, {of_trace} in the trace"
        return None

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file that `save` wrote.

        Raises:
            TraceError: it cannot be read, or is none; says which command writes one.
        """
        try:
            content = parse_json(decoded(read_bytes(path, LONGEST)))
            if content is None:
                raise Unreadable("it is empty")
            found = cls.model_validate_json(json.dumps(content))
            for run in found.runs:
                Strategy.load(run.strategy)
            short = next((run for run in found.runs[:1] if len(run.losses) < LEAST_UPDATES), None)
            if short is None:
                return found
            problem = f"{len(short.losses)} losses of the first run; at least {LEAST_UPDATES}"
        except OSError as error:
            problem = f"cannot be read: {error.strerror}"
        except (Unreadable, StrategyError) as error:
            problem = str(error)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            problem = f"{'.'.join(map(str, first['loc'])) or 'it'}: {first['msg']}"
        raise TraceError(f"{path}: {problem}. Give the file of losses that `{MADE_BY}` writes.")

    def save(self, path: str | Path) -> None:
        """Write it as JSON.

        Raises:
            TraceError: the file cannot be written.
        """
        try:
            write_whole(path, self.model_dump_json(indent=1) + "\n")
        except OSError as error:
            problem = f"{path}: cannot be written: {error.strerror}; choose another file"
            raise TraceError(problem) from error


def mathematics(strategy: Strategy) -> str:
    """Write down the settings that decide the loss of an update: strategies where they are equal
    have the same losses, but for the order of sums.

    Example:
        >>> direct = Strategy().with_gradients(transport="direct")
        >>> mathematics(direct) == mathematics(Strategy())
        True
        >>> mathematics(Strategy.load({"gradients": {"codec": "int8"}}))
        '{"codec": "int8"}'
    """
    document = strategy.document()
    gradients = document.get("gradients", {})
    found = {name: gradients[name] for name in ("codec", "accumulate") if name in gradients}
    found |= {name: document[name] for name in ("local", "precision") if name in document}
    if strategy.compute.exactness == "lossy":
        found["compute"] = document["compute"]
    return json.dumps(found, sort_keys=True)


def losses_of(trace: Trace) -> tuple[float, ...]:
    """Losses of the updates of a trace, the mean over ranks.

    Raises:
        TraceError: an update has none.

    Example:
        >>> from slipstream.trace import Event
        >>> spans = [Event("iteration", rank, 0, 0.0, 1.0, {"loss": 2.0 + rank}) for rank in (0, 1)]
        >>> losses_of(Trace(tuple(spans)))
        (2.5,)
    """
    steps: dict[int, list[float | None]] = {}
    for event in _iterations(trace):
        steps.setdefault(event.step, []).append(event.args.get("loss"))
    means = []
    for step, found in sorted(steps.items()):
        known = [loss for loss in found if loss is not None]
        if not known:
            raise TraceError(
                f"update {step} of the trace has no loss: it was not finite, or the script does "
                "not call session.backward(loss)"
            )
        means.append(fmean(known))
    return tuple(means)


def noise_of_gradients(trace: Trace) -> tuple[float, float] | None:
    """Measure the gradient noise scale over the batch of an update, and the cosine between the
    gradients of two ranks; None: the trace has no norms, or a single rank.

    With ``n`` ranks, ``own`` the mean squared norm of a rank's gradient and ``mean`` that of the
    average, ``(n * mean - own) / (n - 1)`` is the squared norm of the true gradient, and
    ``(own - mean) / (n - 1)`` the variance of the average (McCandlish et al. 2018, appendix A).

    Example:
        >>> from slipstream.trace import Event
        >>> norms = {"own_norm2": 3.0, "average_norm2": 2.0}
        >>> spans = [Event("iteration", rank, 0, 0.0, 1.0, norms) for rank in range(2)]
        >>> noise, cosine = noise_of_gradients(Trace(tuple(spans)))
        >>> noise, round(cosine, 3)
        (1.0, 0.333)
    """
    wholes = [event.args for event in _iterations(trace)]
    with_norms = [args for args in wholes if args.keys() >= NORMS]  # what is not finite is left out
    ranks = len({event.rank for event in trace.events})
    if not with_norms or ranks < 2:
        return None
    own, mean, true = _norms(with_norms, ranks)
    if true <= 0 or own <= mean:  # all noise, or none
        return None
    return (own - mean) / (ranks - 1) / true, true / own


def cosine_of_changes(trace: Trace) -> float | None:
    """Measure the cosine between what two ranks changed since they last met, over all fragments
    and meetings; None: the trace has no norms of them, or a single rank.

    The nearer to 1, the more ranks learn the same meanwhile; at 0 all that the average keeps is the
    ``n``-th part of what each has learned. Weights of ranks count as equal.

    Example:
        >>> from slipstream.trace import Event
        >>> norms = {"update": 4, "own_norm2": 3.0, "average_norm2": 2.0}
        >>> spans = [Event("meeting1", rank, 4, 0.0, 1.0, norms) for rank in range(2)]
        >>> round(cosine_of_changes(Trace(tuple(spans))), 3)
        0.333
    """
    meetings: dict[tuple[str, int], dict[int, Mapping[str, float]]] = {}
    for event in trace.events:
        if is_meeting(event.name) and event.args.keys() >= NORMS:
            key = event.name, event.args["update"]
            meetings.setdefault(key, {})[event.rank] = event.args  # its pieces have the same
    ranks = max(map(len, meetings.values()), default=0)
    whole = [args for one in meetings.values() if len(one) == ranks for args in one.values()]
    if ranks < 2 or not any(args["own_norm2"] for args in whole):
        return None
    own, _, shared = _norms(whole, ranks)
    return min(max(shared / own, -1.0), 1.0)  # a codec's mean may be longer


def _norms(found: Sequence[Mapping[str, float]], ranks: int) -> tuple[float, float, float]:
    """Mean squared norms: of a rank, of the average, of what ranks have in common."""
    own = fmean(args["own_norm2"] for args in found)
    mean = fmean(args["average_norm2"] for args in found)
    return own, mean, (ranks * mean - own) / (ranks - 1)


def _iterations(trace: Trace) -> Iterable[Any]:
    return (event for event in trace.events if event.name == ITERATION)
