"""Diagnoses, and the checks that make them: each says what it reads, what is healthy, the fix."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from slipstream.strategy.setting import FrozenModel

HealthStatus = Literal["wrong", "warning", "unknown", "ok"]
"""The worst first. ``unknown``: something could not be read; ``read`` says what and why."""
STATUSES: tuple[HealthStatus, ...] = ("wrong", "warning", "unknown", "ok")

Facts = TypeVar("Facts")


class Diagnosis(FrozenModel):
    """A check's result on one or more hosts.

    Attributes:
        check: its name.
        status: whether it is well.
        hosts: those that it is about.
        read: what was found there.
        healthy: what should be found.
        fix: what to do; empty if it is well.
    """

    check: str
    status: HealthStatus
    hosts: tuple[str, ...]
    read: str
    healthy: str
    fix: str = ""


class Verdict(NamedTuple):
    """A judgement, before the check adds what it knows itself.

    Without a ``fix`` it has the check's, without ``hosts`` those of the facts.
    """

    status: HealthStatus
    read: str
    fix: str = ""
    hosts: tuple[str, ...] = ()


Judge = Callable[[Facts], Iterable[Verdict]]


@dataclass(frozen=True)
class HealthCheck(Generic[Facts]):
    """A question to the facts, and a row of the table in docs/doctor.md.

    Attributes:
        name: of the check.
        reads: files, variables and commands.
        healthy: what should be found.
        effect: what is wrong otherwise, and what that does.
        fix: what to do then.
        judge: yields verdicts; none where the check does not apply.
    """

    name: str
    reads: str
    healthy: str
    effect: str
    fix: str
    judge: Judge[Facts]

    def diagnose(self, facts: Facts, hosts: tuple[str, ...]) -> Iterator[Diagnosis]:
        """Judge the facts of these hosts."""
        for verdict in self.judge(facts):
            fix = "" if verdict.status == "ok" else verdict.fix or self.fix
            yield Diagnosis(
                check=self.name,
                status=verdict.status,
                hosts=verdict.hosts or hosts,
                read=verdict.read,
                healthy=self.healthy,
                fix=fix,
            )


def health_check(
    name: str, *, reads: str, healthy: str, effect: str, fix: str
) -> Callable[[Judge[Any]], HealthCheck[Any]]:
    """Make a check of the function below; arguments as in `HealthCheck`.

    Example:
        >>> @health_check("answer", reads="a number", healthy="42", effect="odd", fix="ask again")
        ... def answer(number):
        ...     yield Verdict("ok" if number == 42 else "wrong", str(number))
        >>> [(found.status, found.fix) for found in answer.diagnose(7, ("node0",))]
        [('wrong', 'ask again')]
    """
    return lambda judge: HealthCheck(name, reads, healthy, effect, fix, judge)


def merged(diagnoses: Iterable[Diagnosis]) -> list[Diagnosis]:
    """Join those that say the same of several hosts; the worst come first, else the order stays.

    Example:
        >>> words = {"check": "load", "status": "ok", "read": "little", "healthy": ""}
        >>> both = [Diagnosis(hosts=(host,), **words) for host in "ab"]
        >>> [found.hosts for found in merged(both)]
        [('a', 'b')]
    """
    joined: dict[Diagnosis, tuple[str, ...]] = {}
    for found in diagnoses:
        same = found.model_copy(update={"hosts": ()})
        joined[same] = (*joined.get(same, ()), *found.hosts)
    together = [same.model_copy(update={"hosts": hosts}) for same, hosts in joined.items()]
    return sorted(together, key=lambda found: STATUSES.index(found.status))
