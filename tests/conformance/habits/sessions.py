"""Sessions one after the other, side by side, and what comes after them."""

from __future__ import annotations

from tests.conformance.habit import habit
from tests.conformance.loop import Loop


@habit("two trainings in turn")
def two_sessions(run: Loop) -> None:
    other = run.second()
    run.start()
    other.start()
    for _ in range(2):
        run.update()
        other.update()
    other.close()
    run.note_model("other", other.model)
    run.update()


@habit("accelerated again after close()", "session", "optimizer's momentum")
def again(run: Loop) -> None:
    run.start()
    run.update(times=2)
    run.close()
    run.start()
    run.update(times=2)


@habit("accelerated twice", "session")
def twice(run: Loop) -> None:
    run.start()
    run.update()
    run.start()
    run.update()


@habit("closed in an epoch, plain loop after it", "session", "optimizer's momentum", "one update")
def plain_after(run: Loop) -> None:
    run.start()
    run.epoch(limit=2)
    run.close()
    run.alone(times=2)


@habit("plain loop, then accelerated")
def plain_before(run: Loop) -> None:
    run.alone(times=2)
    run.start()
    run.update(times=2)
