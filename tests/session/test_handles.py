"""The stack of handles: closed in reverse, also after errors; the report outlives them."""

from __future__ import annotations

from contextlib import suppress

import pytest

from slipstream.session.handles import HandleStack
from slipstream.strategy import Row


class Technique:
    """Notes its end in a log."""

    def __init__(self, name: str, log: list[str], *, fails: bool = False) -> None:
        self.name, self.log, self.fails = name, log, fails

    def close(self) -> None:
        self.log.append(f"close {self.name}")
        if self.fails:
            raise ValueError(self.name)

    def leave(self) -> None:
        self.log.append(f"leave {self.name}")

    def report_rows(self) -> list[Row]:
        return [Row(self.name, "closed" if self.log else "open", "")]


def test_handles_close_in_reverse_and_report_in_order() -> None:
    log: list[str] = []
    with HandleStack() as handles:
        for name in "abc":
            handles.add(Technique(name, log))
        assert [row.setting for row in handles.report_rows()] == ["a", "b", "c"]
    assert log == ["close c", "close b", "close a"]


def test_a_handle_that_fails_to_close_keeps_no_other_open() -> None:
    log: list[str] = []
    handles = HandleStack()
    first = handles.add(Technique("a", log), on_error=lambda: log.append("leave a"))
    assert first.name == "a"
    handles.add(Technique("b", log, fails=True))
    with pytest.raises(ValueError, match="b"):
        handles.close()
    assert log == ["close b", "leave a"]


def test_after_an_error_a_collective_close_is_left_out() -> None:
    log: list[str] = []
    with suppress(KeyError), HandleStack() as handles:
        handles.add(Technique("a", log))
        collective = Technique("b", log)
        handles.add(collective, on_error=collective.leave)
        raise KeyError
    assert log == ["leave b", "close a"]


def test_the_report_of_a_stack_that_was_taken_over_is_that_of_its_last_moment() -> None:
    log: list[str] = []
    with HandleStack() as handles:
        handles.add(Technique("a", log))
        kept = handles.pop_all()
    assert log == handles.report_rows() == []
    before = kept.report_rows()
    kept.close()
    assert log == ["close a"]
    assert kept.report_rows() == before == [Row("a", "open", "")]
