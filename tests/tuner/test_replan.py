"""A search that begins anew when updates become slower or faster: when, on all ranks alike, and to
the same bits."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

import slipstream
from slipstream.errors import UsageError
from slipstream.session import exchanging
from slipstream.session.update_sharding import UpdateSharding
from slipstream.trace import read
from slipstream.transport.place import Place
from slipstream.tuner import online_search, speed_watch
from slipstream.tuner.change import ChangeDetector
from tests.harness.ranks import PerRank, Ranks
from tests.harness.reference import equal

SEARCH, LASTS = 24, 8
"""Updates of a search, and those that a change must last."""
SEEN = SEARCH + 2 * LASTS + 1
"""The update after which a change is known that is there from the end of `STEADY` on."""
STEADY = SEARCH + LASTS
AUTO: dict[str, Any] = {"gradients": {"transport": {"kind": "auto", "updates": SEARCH}}}
OFTEN = {"gradients": {"transport": {**AUTO["gradients"]["transport"], "replan": "may_shard"}}}
CHOICES = {  # seconds of flat, direct, sharded, and sharded with a third replicated
    "flat": (1.0, 2.0, 3.0, 4.0) * 2,
    "direct": (4.0, 1.0, 3.0, 2.0) * 2,
    "sharded": (4.0, 3.0, 1.0, 2.0) * 2,
}


class Training:
    """A model whose clock goes as a test says; ``kept`` says what each search finds fastest.

    Args:
        strategy: of the session.
        kept: by each search in turn.
        cost: seconds of the backward pass of an update.
        state: to go on from.
    """

    def __init__(
        self,
        strategy: dict[str, Any],
        kept: tuple[str, ...] = ("direct",),
        cost: Callable[[int], float] = lambda number: 1.0,
        state: dict[str, Any] | None = None,
    ) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(8, 33), nn.Tanh(), nn.Linear(33, 5), nn.Linear(5, 1))
        self.model[2].bias.requires_grad_(False)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = AdamW(trained, lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 50)
        self.cost, self.clock, self.number = cost, 0.0, 0
        self.windows = chain.from_iterable(CHOICES[name] for name in kept)
        self.choices: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            self.patch(patch)
            self.session = slipstream.accelerate(self.model, self.optimizer, strategy=strategy)
        if state is not None:
            self.number = state["number"]
            self.session.restore(state["all"])
            self.schedule.load_state_dict(state["schedule"])

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        """Each rank on a host of its own, with a clock of its own."""
        patch.setattr(exchanging, "find_place", lambda dev, group: Place.apart(dev, group.size()))
        patch.setattr(speed_watch, "perf_counter", lambda: self.clock)
        patch.setattr(speed_watch, "BLOCK", LASTS)
        patch.setattr(speed_watch, "ChangeDetector", partial(ChangeDetector, LASTS, 1e-3))
        patch.setattr(online_search, "iterations", lambda trace: [next(self.windows)])

    def loss(self) -> torch.Tensor:
        """Of the next batch of this rank."""
        start = float(10 * self.number + self.session.rank)
        loss = self.model(torch.linspace(start, start + 3, 32).sin().view(4, 8)).square().mean()
        loss.register_hook(self.compute)
        return loss

    def compute(self, gradient: torch.Tensor) -> None:
        """Take the time of a backward pass."""
        self.clock += self.cost(self.number)

    def update(self) -> None:
        """Once."""
        self.number += 1
        self.session.backward(self.loss())
        self.session.step()
        self.schedule.step()

    def train(self, updates: int, loop: Callable[[Training], None] | None = None) -> None:
        """Update so often; note what is in use."""
        with pytest.MonkeyPatch.context() as patch:
            self.patch(patch)
            for _ in range(updates):
                (loop or Training.update)(self)
                if self.search is not None:
                    self.choices.append(self.search.choice.transport.kind)

    @property
    def search(self) -> Any:
        return self.session._loop.search

    @property
    def searches_from(self) -> list[int]:
        """Updates after which a search began anew."""
        if self.search is None:
            return []
        said = [*self.search._earlier[1:], self.search.outcome]
        return [int(one.split("from update ")[1].split()[0]) for one in said if "again" in one]

    def state(self) -> dict[str, Any]:
        """Everything, whole, on every rank."""
        everything = copy.deepcopy(self.session.checkpoint())
        return {
            "all": everything,
            "schedule": self.schedule.state_dict(),
            "number": self.number,
        }

    def end(self) -> dict[str, Any]:
        """Close; returns what a test compares."""
        state, report = self.state(), self.session.report(full=True)
        again = self.searches_from
        self.session.close()
        return {
            "model": {n: p.detach().clone() for n, p in self.model.named_parameters()},
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "choices": self.choices,
            "again": again,
            "state": state,
            "report": " ".join(
                row.split("│")[2].strip() for row in report.splitlines() if "│" in row
            ),
        }


def steps(*levels: tuple[int, float]) -> Callable[[int], float]:
    """Seconds of an update: each level from the update after the one named on."""
    return lambda number: next(level for since, level in reversed(levels) if number > since)


def trained(
    updates: int,
    strategy: dict[str, Any],
    kept: tuple[str, ...] = ("direct",),
    cost: tuple[tuple[int, float], ...] = ((0, 1.0),),
    loop: Callable[[Training], None] | None = None,
) -> dict[str, Any]:
    training = Training(strategy, kept, steps(*cost))
    training.train(updates, loop)
    return training.end()


ONCE, SLOW, AGAIN = ((0, 1.0),), ((0, 1.0), (STEADY, 4.0)), SEEN + SEARCH
BACK = AGAIN + LASTS
"""After it the speed of the start is back."""
THERE_AND_BACK = (*SLOW, (BACK, 1.0))
BACK_SEEN = BACK + 2 * LASTS + 1


def test_there_and_back_all_ranks_search_at_one_update_to_the_same_bits(two: Ranks) -> None:
    end = BACK_SEEN + SEARCH + 2
    answers = two.run(trained, end, OFTEN, ("direct", "sharded", "direct"), THERE_AND_BACK)
    plain = two.run(trained, end, {})
    for answer, expected in zip(answers, plain, strict=True):
        assert answer["again"] == [SEEN, BACK_SEEN]
        assert set(answer["choices"][SEARCH : SEEN - 1]) == {"direct"}
        assert set(answer["choices"][AGAIN : BACK_SEEN - 1]) == {"sharded"}
        assert set(answer["choices"][end - 2 :]) == {"direct"}
        assert equal(answer["model"], expected["model"])
        assert equal(answer["optimizer"], expected["optimizer"])
    report = answers[0]["report"]
    assert (
        f"searched again from update {SEEN} of this session on, as in {LASTS} updates backward and "
        "exchanges" in report
    )
    assert "took 4.000 s instead of 1.000 s" in report
    assert "sharded kept instead of direct" in report


def test_sharded_does_not_begin_in_the_middle_unless_it_may(two: Ranks) -> None:
    for answer in two.run(trained, AGAIN + 2, AUTO, ("direct", "direct"), SLOW):
        assert answer["again"] == [SEEN]
        assert "sharded" not in answer["choices"][SEARCH:]
        assert "not sharded" in answer["report"]
    for answer in two.run(trained, AGAIN + 2, AUTO, ("sharded", "sharded"), SLOW):
        assert answer["choices"][-1] == "sharded"  # as it was before


def test_the_clock_of_one_rank_decides_nothing(two: Ranks) -> None:
    alone = PerRank(ONCE, SLOW)  # the other one would have waited for a rank that is slow
    for answer in two.run(trained, 6 * LASTS, AUTO, ("direct",), alone):
        assert answer["again"] == []


def gathering() -> tuple[float, list[int]]:
    """Seconds that forward has waited; and searches where it waits for 9 s until `STEADY`."""
    training = Training(AUTO, ("sharded", "sharded"))
    training.train(SEARCH + 2)
    really = training.session._loop.sharding.waited
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            UpdateSharding, "waited", property(lambda _: 9.0 * min(training.number, STEADY))
        )
        training.train(SEEN + 1 - training.number)
        return really, training.end()["again"]


def test_the_wait_for_parameters_counts(two: Ranks) -> None:
    for really, again in two.run(gathering):
        assert really > 0
        assert again == [SEEN]


def without(replan: bool) -> tuple[list[int], Any]:
    transport = {**AUTO["gradients"]["transport"], "replan": replan}
    training = Training({"gradients": {"transport": transport}}, ("direct",), steps(*SLOW))
    training.train(SEEN + 2 * LASTS)
    watch = training.search.watch
    return training.end()["again"], watch


def test_replan_false_watches_nothing(two: Ranks) -> None:
    assert two.run(without, False) == [([], None)] * 2


def pausing(training: Training) -> None:
    """Evaluates, saves and waits between updates, on one rank for longer."""
    training.clock += 100.0 * (1 + training.session.rank) * (training.number > STEADY)
    with torch.no_grad():
        training.model(torch.ones(2, 8))
    training.update()
    training.clock += 50.0
    if training.number % 40 == 0:
        training.session.checkpoint()


def accumulating(training: Training) -> None:
    """Two passes by ``no_sync``, clipped, stepped by hand."""
    training.number += 1
    with training.session.no_sync():
        training.session.backward(training.loss())
    training.session.backward(training.loss())
    training.session.clip_grad_norm_(1.0)
    training.optimizer.step()
    training.optimizer.zero_grad()


def flushing(training: Training) -> None:
    """Exchanges in ``flush()`` alone, which takes all the time there is."""
    training.number += 1
    engine, cost = training.session._loop.engine, training.cost
    end, training.cost = engine.end, lambda number: 0.0
    with training.session.no_sync():
        training.session.backward(training.loss())
    training.cost = cost
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "end", lambda: (training.compute(torch.empty(0)), end()))
        training.session.flush()


@pytest.mark.parametrize("loop", [pausing, accumulating, flushing], ids=lambda loop: loop.__name__)
def test_what_users_do_beside_it(two: Ranks, loop: Callable[[Training], None]) -> None:
    for cost, again in ((ONCE, []), (SLOW, [SEEN])):
        updates = SEEN + 2
        for answer in two.run(trained, updates, AUTO, ("direct", "direct"), cost, loop):
            assert answer["again"] == again


def resumed(at: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """An undisturbed run, and one that goes on from its checkpoint after ``at`` updates."""
    kept, cost = ("sharded", "direct"), steps(*SLOW)
    undisturbed = Training(OFTEN, kept, cost)
    undisturbed.train(at)
    saved = undisturbed.state()
    undisturbed.train(AGAIN + 2 * LASTS - at)
    again = Training(OFTEN, kept[1:], cost, saved)
    again.train(AGAIN + 2 * LASTS - at)
    return undisturbed.end(), again.end()


@pytest.mark.parametrize(
    "at", [STEADY + LASTS, SEEN + 3, AGAIN + 1], ids=["suspecting", "searching", "after"]
)
def test_a_checkpoint_around_it_goes_on(two: Ranks, at: int) -> None:
    for undisturbed, again in two.run(resumed, at):
        assert again["choices"][-1] == "direct"
        assert equal(again["model"], undisturbed["model"])
        assert equal(again["state"]["all"]["optimizer"], undisturbed["state"]["all"]["optimizer"])


def delayed(seconds: float) -> tuple[list[str], dict[str, torch.Tensor]]:
    """By real clocks: what was in use after each update, and the parameters."""
    training = Training(AUTO)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speed_watch, "BLOCK", LASTS)
        for number in range(SEEN + SEARCH + LASTS):
            training.number = number
            loss = training.loss()
            if number > STEADY:
                loss.register_hook(lambda gradient: time.sleep(seconds))
            training.session.backward(loss)
            training.session.step()
            training.choices.append(str(training.search.choice))
    ended = training.end()
    return ended["choices"], ended["model"]


def test_a_rank_that_is_delayed_does_not_split_the_decision(two: Ranks) -> None:
    first, second = two.run(delayed, PerRank(0.0, 0.02))
    assert first[0] == second[0]
    assert equal(first[1], second[1])


def traced(folder: Path) -> None:
    strategy = {**AUTO, "trace": {"steps": 2, "skip": 0, "folder": str(folder)}}
    training = Training(strategy, ("direct", "flat"), steps((0, 1.0), (STEADY + 4, 4.0)))
    training.train(AGAIN + LASTS)
    training.end()


def test_the_trace_after_it_says_why(two: Ranks, tmp_path: Path) -> None:
    two.run(traced, tmp_path)
    first, second = (read(tmp_path / name) for name in ("trace.json", "trace-2.json"))
    assert "again" not in first.meta["search"]
    assert "took 4.000 s instead of 1.000 s" in second.meta["search"]
    assert "flat kept instead of direct" in second.meta["search"]
    assert second.meta["strategy"]["gradients"]["transport"]["kind"] == "flat"
    assert {e.step for e in second.events}.isdisjoint(e.step for e in first.events)


def damaged(speed: Any) -> str:
    training = Training(AUTO)
    state = training.session.state_dict() | {"speed": speed}
    with pytest.raises(UsageError) as found:
        training.session.load_state_dict(state)
    training.session.close()
    return str(found.value)


def test_a_damaged_state_is_refused(two: Ranks) -> None:
    speed = {"patience": 1, "before": [1.0, 2.0, float("nan"), 0.0]}
    for text in two.run(damaged, speed):
        assert "speed.before[2]: nan; allowed: a number from 0 on" in text
