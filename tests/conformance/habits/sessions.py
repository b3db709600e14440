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


@habit("accelerated again after close()", "session")
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


@habit("closed, plain loop after it")
def plain_after(run: Loop) -> None:
    run.start()
    run.update(times=2)
    run.close()
    run.alone(times=2)


@habit("plain loop, then accelerated")
def plain_before(run: Loop) -> None:
    run.alone(times=2)
    run.start()
    run.update(times=2)


@habit("closed in the middle of an epoch", "session")
def closed_in_epoch(run: Loop) -> None:
    run.start()
    run.epoch(limit=2)
    run.close()
    run.alone()


@habit("accelerated inside an open window of gradients")
def started_with_gradients(run: Loop) -> None:
    """Gradients of before, which plain torch would add to."""
    run.model.head(run.model.head.weight.detach()).sum().backward()
    run.optimizer.zero_grad()
    run.start()
    run.update(times=2)
