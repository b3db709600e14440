"""Alarms: the first one counts, and whether one was none."""

from __future__ import annotations

import pytest
from torch._C._distributed_c10d import HashStore

from slipstream.checks.alarm import Alarm, AlarmKind, Alarms, AlarmVerdict
from slipstream.checks.autopsy import RankCase
from slipstream.checks.limits import STILL
from tests.checks.test_autopsy import case

TIMEOUT = 100.0


def looked(*cases: RankCase) -> dict[int, RankCase]:
    return {one.state.rank: one for one in cases}


LONG, SHORT = STILL * TIMEOUT, STILL * TIMEOUT / 4
SEEN = case(0, still=LONG).model_copy(update={"computing": (1,)})
STILL_ONES = looked(case(0, still=LONG), case(1, still=LONG))
MOVED = looked(case(0, still=LONG), case(1, still=SHORT))


@pytest.mark.parametrize(
    ("kind", "cases", "silent", "was_none"),
    [
        ("silent", looked(SEEN), {1}, True),
        ("silent", looked(SEEN), {1, 2}, False),
        ("silent", looked(case(0)), {1}, False),
        ("silent", looked(case(0), case(1)), set(), True),
        ("still", STILL_ONES, set(), False),
        ("still", MOVED, set(), True),
        ("still", MOVED, {2}, False),
        ("left", MOVED, set(), False),
        ("failed", MOVED, set(), False),
    ],
)
def test_an_alarm_was_none(
    kind: AlarmKind, cases: dict[int, RankCase], silent: set[int], was_none: bool
) -> None:
    alarm = Alarm(rank=0, kind=kind, reason="a test")
    assert alarm.was_none(cases, dict.fromkeys(silent), TIMEOUT) is was_none


def test_the_first_alarm_counts_until_the_next() -> None:
    store = HashStore()
    ours, theirs = Alarms(store), Alarms(store)
    first = Alarm(rank=0, kind="still", reason="no sign of life")
    assert ours.asked() is None
    assert ours.ask(first)
    assert not theirs.ask(Alarm(rank=1, kind="silent", reason="rank 2 is silent"))
    assert theirs.asked() == first
    theirs.tell(case(1))
    assert ours.told(range(3)) == [1]
    assert ours.cases([1]) == {1: case(1)}
    assert theirs.verdict() is None
    ours.judge(AlarmVerdict())
    assert theirs.verdict() == AlarmVerdict()
    theirs.next()
    assert theirs.asked() is None
    assert theirs.ask(Alarm(rank=1, kind="silent", reason="rank 2 is silent"))
