"""Loaders that are uneven, endless or say a wrong length."""

from __future__ import annotations

from tests.conformance.habit import habit
from tests.conformance.loop import Loader, Loop

NEEDS = ("session", "own batches")


@habit("the session's loader, whole or left by break", "session")
def own_loader(run: Loop) -> None:
    run.loader = Loader((3, 3))
    run.start()
    for limit in (None, 2, None):
        run.epoch(limit)


@habit("a look at the first batch before each pass", "session")
def first_batch_seen(run: Loop) -> None:
    run.start()
    for limit in (None, 2, 1):
        run.look()
        run.epoch(limit)


@habit("uneven loaders", *NEEDS)
def uneven(run: Loop) -> None:
    run.loader = Loader((3, 2))
    run.start()
    for _ in range(2):
        run.epoch()


@habit("uneven streams without a length", *NEEDS)
def uneven_streams(run: Loop) -> None:
    run.loader = Loader((2, 3), stream=True)
    run.start()
    for _ in range(2):
        run.epoch()


@habit("endless stream, left by break", *NEEDS)
def endless(run: Loop) -> None:
    run.loader = Loader((None, None), stream=True)
    run.start()
    for _ in range(2):
        run.epoch(limit=2)


@habit("length says too much on one rank", *NEEDS, apart=True)
def says_too_much(run: Loop) -> None:
    run.loader = Loader((4, 2), says=4)
    run.start()
    run.epoch()


@habit("length says too little on one rank", *NEEDS, "one update", apart=True)
def says_too_little(run: Loop) -> None:
    run.loader = Loader((3, 5), says=3)
    run.start()
    run.epoch()


@habit("length says too little on all ranks", *NEEDS, apart=True)
def says_too_little_everywhere(run: Loop) -> None:
    run.loader = Loader((4, 4), says=2)
    run.start()
    run.epoch()


@habit("uneven loaders, accumulation across epochs", *NEEDS)
def uneven_windows(run: Loop) -> None:
    run.loader = Loader((3, 2))
    run.start(accumulate=2)
    for _ in range(2):
        run.epoch()
