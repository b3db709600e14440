"""``local: auto`` averages gradients while it measures, then meets as chosen, or goes on so."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slipstream
from slipstream import codecs
from slipstream.errors import StrategyError
from slipstream.local import delay_trial
from slipstream.local.meeting import Meeting
from slipstream.planner.forecast import Forecast
from slipstream.planner.iteration.local_cost import change_bytes
from slipstream.planner.iteration.traced import traced_strategy
from slipstream.planner.network.costs import CodecCost
from slipstream.planner.search import rare_meetings
from slipstream.strategy import LocalConfig, Strategy
from slipstream.trace import read
from slipstream.transport.requests import ExchangeSteps
from slipstream.tuner import local_search
from tests.harness.ranks import Ranks
from tests.local.reference import Reference, flat
from tests.local.test_training import adamw, build, loss_of
from tests.planner.networks import ethernet_profile

DECIDED = local_search.WINDOW + 2
"""The update after which ranks meet: those that settle, and those that are traced."""
UPDATES = 30
SLOW = 1e3
"""Bits a second."""


def on_a_link_of(rate: float, patch: pytest.MonkeyPatch) -> None:
    """Let this rank measure this; so slow that nothing is hidden, and the fastest is chosen."""
    patch.setattr(rare_meetings, "STEPS", (8,))
    codecs = {"int8": CodecCost(ratio=0.25), "int4": CodecCost(ratio=0.13)}
    network = ethernet_profile(2).scaled(2, 1, rate).model_copy(update={"codecs": codecs})
    patch.setattr(local_search, "calibrate", lambda *_, **__: network)
    patch.setattr(delay_trial, "NOTICED", 2.0)  # a test of the first choice, not of its delay


def trained(
    rate: float | None, local: Any, half: bool = False, folder: str = ""
) -> tuple[Tensor, dict[str, Any], str]:
    """This rank's parameters, its ``local`` as chosen, and the report; ``half`` of it restored."""
    with pytest.MonkeyPatch.context() as patch:  # a rank runs other tests afterwards
        patch.setattr(local_search, "CALIBRATION_SECONDS", 0.5)
        if rate is not None:
            on_a_link_of(rate, patch)
        return run(
            {"local": local} | ({"trace": {"steps": 5, "folder": folder}} if folder else {}), half
        )


def run(strategy: Any, half: bool, updates: int = UPDATES) -> tuple[Tensor, dict[str, Any], str]:
    model = build()
    session = slipstream.accelerate(model, adamw(model), None, strategy)
    for update in range(1, updates + 1):
        session.backward(loss_of(model, session.rank, update))
        session.step()
        if half and update == UPDATES // 2:
            part = session.checkpoint(sharded=True)
            parts: list[Any] = [None] * session.world_size
            torch.distributed.all_gather_object(parts, part)
            session.close()
            model = build()
            session = slipstream.accelerate(model, adamw(model), None, strategy)
            session.restore(parts)
    own, report = flat(model.parameters()), session.report()
    chosen = session.state_dict()["local"]["config"]
    session.close()
    return own, chosen, report


def test_it_meets_as_it_chose_from_the_update_on_that_it_chose_after(two: Ranks) -> None:
    found = two.run(trained, SLOW, {"auto": True, "lr": 0.5, "momentum": 0.6})
    config = LocalConfig.model_validate(found[0][1])
    assert (config.auto, config.lr, config.momentum) == (False, 0.5, 0.6)
    assert config.steps >= 8  # how many, and with which delay, depends on how fast this machine is
    assert config.warm_up == DECIDED
    reference = Reference(build, adamw, config, 2)
    with torch.no_grad(), torch.enable_grad():
        reference.train(loss_of, UPDATES)
    for rank, (own, _, report) in enumerate(found):
        torch.testing.assert_close(own, reference.parameters(rank), rtol=1e-9, atol=1e-11)
        assert "meetings" in report


@pytest.mark.parametrize("more", [{}, {"warm_up": 20}], ids=["at once", "after a warm-up"])
def test_a_restored_run_keeps_the_choice(two: Ranks, more: dict[str, Any]) -> None:
    local = {"auto": True, **more}
    straight, resumed = (two.run(trained, SLOW, local, half) for half in (False, True))
    for (own, chosen, _), (again, same, _) in zip(straight, resumed, strict=True):
        assert torch.equal(own, again)
        assert chosen == same


def test_where_it_does_not_pay_gradients_are_averaged_to_the_end(two: Ranks) -> None:
    auto = {"auto": True, "updates": 900, "warm_up": 200}  # which begins no meeting
    plain = two.run(trained, None, {"steps": 1, "warm_up": UPDATES + 1})
    found = two.run(trained, SLOW, auto)
    for (own, chosen, report), (other, *_) in zip(found, plain, strict=True):
        assert torch.equal(own, other)
        assert chosen["auto"]
        assert "700 updates are fewer than 100 meetings" in " ".join(report.split())
    for (own, *_), (other, *_, report) in zip(
        found, two.run(trained, SLOW, auto, True), strict=True
    ):
        assert torch.equal(own, other)
        assert "as in the run that was saved" in " ".join(report.split())


@pytest.mark.parametrize("pays", [True, False], ids=["meets", "averages"])
def test_a_trace_says_what_was_chosen(two: Ranks, pays: bool, tmp_path: Path) -> None:
    local = {"auto": True} | ({} if pays else {"updates": UPDATES})
    (_, chosen, _), _ = two.run(trained, SLOW, local, False, str(tmp_path))
    trace = read(tmp_path / "trace.json")
    said = traced_strategy(trace).local
    assert said == (LocalConfig.model_validate(chosen) if pays else None)
    if not pays:
        assert Forecast.of(trace, ethernet_profile(2)).exact()


def test_on_a_real_link_it_measures_and_goes_on(two: Ranks) -> None:
    (first, chosen, report), (second, also, _) = two.run(trained, None, "auto")
    assert "measures the first updates" not in report
    assert re.search(r"\d+% of the speed", " ".join(report.split()))
    assert chosen == also
    assert first.isfinite().all()
    assert second.isfinite().all()


def test_alone_there_is_nothing_to_choose() -> None:
    own, chosen, _ = trained(None, "auto")
    assert chosen["auto"]
    assert own.isfinite().all()


def test_what_auto_chooses_is_not_given_beside_it() -> None:
    with pytest.raises(StrategyError, match="auto with steps, codec: auto chooses steps, "):
        Strategy.load({"local": {"auto": True, "steps": 4, "codec": "int8"}})
    with pytest.raises(StrategyError, match="updates is only for auto"):
        Strategy.load({"local": {"updates": 100}})


def restored_before_the_choice() -> list[Tensor]:
    """A run saved while it measures goes on, and has not chosen yet."""
    ended = []
    for half in (False, True):
        model = build()
        session = slipstream.accelerate(model, adamw(model), None, {"local": "auto"})
        for update in range(1, DECIDED):
            session.backward(loss_of(model, session.rank, update))
            session.step()
            if half and update == 4:
                parts: list[Any] = [None] * session.world_size
                torch.distributed.all_gather_object(parts, session.checkpoint(sharded=True))
                session.close()
                model = build()
                session = slipstream.accelerate(model, adamw(model), None, {"local": "auto"})
                session.restore(parts)
        assert session.state_dict()["local"]["config"]["auto"]
        session.close()
        ended.append(flat(model.parameters()))
    return ended


def test_a_run_restored_before_the_choice_measures_anew(two: Ranks) -> None:
    for straight, resumed in two.run(restored_before_the_choice):
        assert torch.equal(straight, resumed)


def traced_with_a_table(folder: str) -> None:
    """A run whose largest parameter has sparse gradients, under plain averaging."""
    model = nn.Sequential(nn.Embedding(50, 4, sparse=True), nn.Flatten(), nn.Linear(8, 1))
    strategy = {"trace": {"steps": 2, "skip": 2, "folder": folder}}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with slipstream.accelerate(model, optimizer, None, strategy) as session:
        for _ in range(5):
            session.backward(model(torch.tensor([[1, 2]])).mean())
            session.step()


def test_a_trace_says_how_large_a_change_of_tables_with_sparse_gradients_is(
    two: Ranks, tmp_path: Path
) -> None:
    two.run(traced_with_a_table, str(tmp_path))
    trace = read(tmp_path / "trace.json")
    work = Forecast.of(trace, ethernet_profile(2)).workload
    assert trace.meta["change_bytes"] == change_bytes(work) == 4 * (50 * 4 + 8 + 1)


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        patch.setattr(delay_trial, "perf_counter", lambda: self.now)


@pytest.mark.parametrize(
    ("waits", "works", "delay"),
    [(0.0, 0.5, 1), (0.005, 0.5, 1), (0.5, 0.0, 2), (1.5, 0.0, 3), (9.0, 0.0, 4), (0.05, 0.0, 1)],
    ids=["no wait", "unnoticed", "an update", "two", "no end", "enough as it is"],
)
def test_the_delay_grows_by_what_a_meeting_was_waited_for(
    waits: float, works: float, delay: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = LocalConfig(steps=16, fragments=4, delay=1)
    clock, cpu = Clock(monkeypatch), torch.device("cpu")
    trial = delay_trial.DelayTrial(config, codecs.Ranks(0, 1), cpu)
    sent, found = torch.zeros(3), dict[int, int | None]()
    for update in range(1, 38):
        clock.now += 61.0 if update == 20 else 1.0  # a pause of the script is no computing
        with trial.meeting():
            if update % 4 == 1:
                clock.now += works
                with trial.waiting():
                    clock.now += waits if update > 17 else 100.0  # the first round is no measure
            if update % 4 == 1 and update > 4:
                found[update] = trial.longer(update, sent)
            if update % 4 == 0:
                sent = trial.seconds(update)
    assert found == {**dict.fromkeys(range(5, 37, 4)), 37: delay}


WAITED = 0.2  # many times an update, on a busy machine too


def waited_for(patch: pytest.MonkeyPatch) -> None:
    """Let rank 0 choose a short delay, and each exchange take some updates."""
    on_a_link_of(SLOW, patch)
    patch.setattr(delay_trial, "NOTICED", 0.01)
    chosen = LocalConfig(steps=8, fragments=2, delay=1), "a short delay"
    patch.setattr(local_search.LocalSearch, "_choose", lambda *_: chosen)
    exchange = Meeting.exchange

    def slow(meeting: Meeting, step: int) -> ExchangeSteps:
        time.sleep(WAITED)
        yield from exchange(meeting, step)

    patch.setattr(Meeting, "exchange", slow)


def trained_while_waiting(half: bool) -> tuple[Tensor, dict[str, Any], str]:
    with pytest.MonkeyPatch.context() as patch:
        waited_for(patch)
        return run({"local": "auto"}, half, 2 * UPDATES)


@pytest.mark.parametrize("half", [False, True], ids=["straight", "restored meanwhile"])
def test_all_ranks_take_a_longer_delay_where_they_wait(two: Ranks, half: bool) -> None:
    for rank, (own, chosen, report) in enumerate(two.run(trained_while_waiting, half)):
        config = LocalConfig.model_validate(chosen)
        assert config.delay == 2  # a quarter of a round
        said = re.search(r"delay 2 since update (\d+)", " ".join(report.split()))
        assert said is not None
        since = int(said[1])
        assert since > DECIDED + 2 * config.steps  # one round to settle, one to measure
        reference = Reference(build, adamw, config.model_copy(update={"delay": 1}), 2)

        def loss(
            model: nn.Module,
            of: int,
            update: int,
            reference: Reference = reference,
            config: LocalConfig = config,
            since: int = since,
        ) -> Tensor:
            if update > since:
                reference.config = config
            return loss_of(model, of, update)

        with torch.no_grad(), torch.enable_grad():
            reference.train(loss, 2 * UPDATES)
        torch.testing.assert_close(own, reference.parameters(rank), rtol=1e-9, atol=1e-11)
