"""One cell on one rank: the habit by plain torch, then by the technique, and the verdict."""

from __future__ import annotations

import contextlib
import gc
import signal
import traceback
import warnings
from socket import gethostname
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.errors import ExchangeError, SlipstreamError
from tests.conformance.habit import Habit
from tests.conformance.loop import Loop
from tests.conformance.plain import Plain
from tests.conformance.techniques import Technique
from tests.harness.reference import TOLERANCE as OF_MODELS, digest

RANKS = 2
TOLERANCE = {**OF_MODELS, torch.float64: 1e-10}
"""A Swin rounds more often than the models of ``tests/harness``."""


class Verdict(NamedTuple):
    """What became of a cell on one rank.

    Attributes:
        outcome: equal, refused or wrong.
        text: of the error, or what is wrong.
        follows: whether the error is only that another rank is gone.
        digest: of the model in the end, for comparison with other ranks.
    """

    outcome: str
    text: str = ""
    follows: bool = False
    digest: str = ""


def judge(technique: Technique, habit: Habit, rank: int) -> Verdict:
    """Run a habit on both sides; leaves no session open."""
    with _as_before():
        try:
            plain = _plain_side(technique, habit, rank)
        except SlipstreamError as error:  # of an optimizer of ours
            return Verdict("refused", f"{type(error).__name__}: {error}")
        except Exception as error:
            return Verdict("wrong", f"plain torch: {type(error).__name__}: {_line(error)}")
        ours = technique.loop(technique, rank, RANKS)
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                warnings.showwarning = lambda message, *_, **__: ours.warned.append(str(message))  # type: ignore[assignment]
                habit.run(ours)
                del caught
                ours.end()
        except (Exception, KeyboardInterrupt) as error:
            verdict = _of_error(error, ours, plain)
            with contextlib.suppress(Exception):
                ours.abandon(error)
            return verdict
        theirs = dict(plain.model.named_buffers()) if habit.own_buffers else {}
        if rank:
            ours.model.load_state_dict(theirs, strict=False)
        problem = _difference(technique, habit, ours, plain)
        if problem:
            return Verdict("wrong", problem)
        ours.model.load_state_dict(theirs, strict=False)  # the same bits on all ranks
        return Verdict("equal", digest=digest(ours.model))


def _plain_side(technique: Technique, habit: Habit, rank: int) -> Plain:
    """What plain torch makes of a habit; the same for many techniques."""
    key = habit.name, *technique.plain_key
    if key not in _plain_sides:
        plain = Plain(technique, rank, RANKS)
        habit.run(plain)
        plain.remember()
        torch.set_default_dtype(torch.float32)
        _plain_sides[key] = plain
    return _plain_sides[key]


_plain_sides: dict[tuple[object, ...], Plain] = {}


def _of_error(error: BaseException, ours: Loop, plain: Plain) -> Verdict:
    if not isinstance(error, SlipstreamError):
        places = traceback.extract_tb(error.__traceback__)
        of_ours = [place for place in places if "slipstream/" in place.filename] or places[-1:]
        where = f"{of_ours[-1].filename.rpartition('/')[2]}:{of_ours[-1].lineno}"
        return Verdict("wrong", f"{type(error).__name__}: {_line(error)} ({where})")
    if problem := _off_the_road(ours, plain):
        return Verdict("wrong", f"refused too late, {problem}: {_line(error)}")
    return Verdict("refused", f"{type(error).__name__}: {error}", isinstance(error, ExchangeError))


def _off_the_road(ours: Loop, plain: Plain) -> str | None:
    """Where a training has been refused its parameters must be those of some update."""
    if ours.technique.shares_batches:  # a rank has a part of the model
        return None
    try:
        now = {n: p.detach().clone() for n, p in ours.model.named_parameters()}
    except SlipstreamError:  # of others, which are not there any more
        return None
    distances = []
    for number, then in enumerate(plain.trajectory):
        pairs = [(now[n], p) for n, p in then.items() if n in now and now[n].shape == p.shape]
        distances.append((_apart(ours.technique, pairs, plain.trajectory[0]), number))
    nearest, number = min(distances)
    return f"{nearest:.1e} from the nearest update, {number}" if nearest > 1 else None


def _apart(technique: Technique, pairs: Any, start: dict[str, Tensor]) -> float:
    tolerance = max((_tolerance(technique, b.dtype) for _, b in pairs), default=1.0)
    return max((_units(a, b, tolerance) for a, b in pairs), default=0.0)


def _tolerance(technique: Technique, dtype: torch.dtype) -> float:
    if technique.bound is not None:
        return max(technique.bound, TOLERANCE.get(dtype, 0.0))
    return TOLERANCE.get(dtype, 1e-12)


def _units(a: Tensor, b: Tensor, tolerance: float) -> float:
    """How far two tensors lie apart, in units of the tolerance."""
    if a.shape != b.shape:
        return float("inf")
    if not a.numel():
        return 0.0
    a, b = (t.detach().to(torch.complex128) for t in (a, b))
    apart = (a - b).abs().where(a != b, 0.0)  # the same infinite value is no NaN apart
    return float((apart / (tolerance * (1 + b.abs()))).nan_to_num(float("inf")).max())


def _difference(technique: Technique, habit: Habit, ours: Loop, plain: Plain) -> str | None:
    """What a technique has made otherwise; None: nothing."""
    found, expected = ours.model.state_dict(), plain.model.state_dict()
    if found.keys() != expected.keys():
        return f"other names: {sorted(found.keys() ^ expected.keys())[:4]}"
    if len(ours.noted) != len(plain.noted):
        return f"{len(ours.noted)} values noted, {len(plain.noted)} by plain torch"
    pairs = [(n, found[n], expected[n]) for n in found]
    pairs += [(m[0], m[1], t[1]) for m, t in zip(ours.noted, plain.noted, strict=True)]
    coarsest = max((TOLERANCE.get(b.dtype, 0.0) for _, _, b in pairs), default=0.0)
    bf16 = TOLERANCE[torch.bfloat16] if habit.bf16 else 0.0
    tolerance = max(coarsest, bf16, technique.bound or 0.0)
    worst = max(((_units(a, b, tolerance), n) for n, a, b in pairs), default=(0.0, ""))
    if worst[0] > 1:
        return f"{worst[1]} is off by {worst[0] * tolerance:.1e}"
    return _moved(technique, ours, plain)


def _moved(technique: Technique, ours: Loop, plain: Plain) -> str | None:
    """A lossy technique must have moved the parameters about as plain torch has, and each of
    them."""
    if technique.bound is None:
        return None
    start, now = plain.trajectory[0], dict(ours.model.named_parameters())
    off = way = 0.0
    for name, end in plain.model.named_parameters():
        if name not in start or start[name].shape != end.shape or not end.numel():
            continue
        from_, to, got = (_wide(t) for t in (start[name], end, now[name]))
        of_this = float((to - from_).norm())
        if of_this > 1e-6 and float((got - from_).norm()) < 0.1 * of_this:
            return f"{name} has hardly moved"
        off, way = off + float((got - to).norm()) ** 2, way + of_this**2
    if off > technique.bound**2 * way:
        return f"off by {(off / way) ** 0.5:.2f} of the way; allowed: {technique.bound}"
    return None


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.complex128)


def _line(error: BaseException) -> str:
    words = " ".join(str(error).split()).replace(f"(host {gethostname()})", "(host a)")
    return words.partition(" (slipstream autopsy")[0][:300]  # which names a folder of this machine


@contextlib.contextmanager
def _as_before() -> Any:
    """Gives back what habits change in the process."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        signal.signal(signal.SIGINT, handler)
        gc.collect(0)
