"""``transport: auto``: all ranks switch at one step, and the fastest transport stays."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import slipstream
from slipstream.errors import ClusterError
from slipstream.planner.forecast import Forecast
from slipstream.planner.iteration import model as iteration_model
from slipstream.planner.iteration.plan import CommPlan
from slipstream.planner.iteration.workload import Workload
from slipstream.planner.network.profile import NetworkProfile
from slipstream.session import exchanging
from slipstream.strategy import ByIndexConfig
from slipstream.trace import read
from slipstream.transport import place as transport_place
from slipstream.transport.hosts import Hosts
from slipstream.transport.place import Place, find_place
from slipstream.transport.requests import AllReduce
from slipstream.transport.switch import Switch
from slipstream.tuner import online_search
from slipstream.tuner.predicted_choices import predict_choices
from slipstream.tuner.turns import SETTLING, TURNS
from tests.harness.ranks import PerRank, Ranks

UPDATES = 24
WINDOW = UPDATES // (2 * TURNS)
AUTO: dict[str, Any] = {"gradients": {"transport": {"kind": "auto", "updates": UPDATES}}}


def fewer_is_slower(workload: Workload, plan: CommPlan, network: NetworkProfile) -> float:
    """The simulator's place: what it says of a network this busy is another thing in each run."""
    return 1.0 / len(plan.cuts)


def train(
    updates: int,
    settings: dict[str, Any],
    seconds: tuple[float, ...] = (),
    state: dict[str, Any] | None = None,
    delay: float = 0.0,
    apart: bool = True,
) -> dict[str, Any]:
    """What carried each update, whether it began when backward had ended, the segments after it,
    losses, parameters, report and state.

    ``seconds`` (measured in each window) stand in for the clock, where given, and four of twelve
    gradients for the split that is optimal. ``apart``: each rank is on a host of its own.
    """
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    used: list[str] = []
    after: list[bool] = []
    last = next(model.parameters())  # to be ready

    def started(switch: Switch, request: Any) -> Any:
        if isinstance(request, AllReduce) and not used[-1]:
            used[-1] = switch.config.kind
            after.append(last.grad is not None)
        return switch._used.start(request)

    def place(device: torch.device, group: Any) -> Place:
        return Place.apart(device, group.size()) if apart else find_place(device, group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchanging, "find_place", place)
        # its own file: test_online_sharded
        patch.setattr(exchanging, "why_not_sharded", lambda *_: "not in this test")
        patch.setattr(Switch, "start", started)
        patch.setattr(online_search, "CALIBRATION_SECONDS", 0.2)
        patch.setattr(Forecast, "optimal_split", lambda *_: ByIndexConfig(last=(3, 11)))
        patch.setattr(iteration_model, "predict", fewer_is_slower)
        if seconds:
            windows = iter(seconds)
            patch.setattr(online_search, "iterations", lambda trace: [next(windows)])
        session = slipstream.accelerate(model, optimizer, strategy=settings)
        if state is not None:
            session.load_state_dict(state)
        losses, segments = [], []
        for step in range(updates):
            used.append("")
            inputs = torch.linspace(0, 1, 32).view(4, 8) * (step + session.rank + 1) / updates
            time.sleep(delay)
            loss = session.model(inputs).square().mean()
            losses.append(float(loss.detach()))
            session.backward(loss)
            session.step()
            segments.append([len(segment.gradients) for segment in session.segments])
        report, state = session.report(full=True), session.state_dict()
        session.close()
    parameters = torch.cat([p.detach().flatten() for p in model.parameters()])
    return {
        "used": used,
        "after": after,
        "segments": segments,
        "losses": torch.tensor(losses),
        "parameters": parameters.tolist(),
        "report": " ".join(row.split("│")[2].strip() for row in report.splitlines() if "│" in row),
        "state": state,
    }


@pytest.mark.parametrize(("seconds", "kept"), [((2, 1, 4, 3), "direct"), ((1, 2, 3, 2), "flat")])
def test_all_ranks_switch_at_one_step_and_keep_the_faster(
    three: Ranks, seconds: tuple[float, ...], kept: str
) -> None:
    answers = three.run(train, UPDATES + 3, AUTO, seconds)
    turns = (["flat"] * WINDOW + ["direct"] * WINDOW) * TURNS
    for answer in answers:
        assert answer["used"] == turns + [kept] * 3
        assert answer["state"]["transport"]["kind"] == kept
        assert answer["state"]["split"] is None
        assert answer["parameters"] == answers[0]["parameters"]
    report = answers[0]["report"]
    assert "measured in turn, by transport: flat:" in report
    assert f"; {kept} kept" in report


def test_the_loss_is_that_of_a_fixed_transport(three: Ranks) -> None:
    searched = three.run(train, UPDATES + 3, AUTO, (2, 1, 4, 3))
    fixed = three.run(train, UPDATES + 3, {"gradients": {"transport": "flat"}})
    for mine, other in zip(searched, fixed, strict=True):
        torch.testing.assert_close(mine["losses"], other["losses"], rtol=1e-5, atol=1e-6)


def test_a_slow_rank_does_not_split_the_decision(three: Ranks) -> None:
    delay = PerRank(0.0, 0.02, 0.0)
    answers = three.run(train, UPDATES + 2, AUTO, (), None, delay)
    for answer in answers:
        assert answer["used"] == answers[0]["used"]
        assert answer["parameters"] == answers[0]["parameters"]
        assert answer["state"]["transport"] == answers[0]["state"]["transport"]
        assert answer["report"] == answers[0]["report"]
    assert set(answers[0]["used"][:UPDATES]) == {"flat", "direct"}


def test_by_default_a_search_takes_60_updates(three: Ranks) -> None:
    config = {"gradients": {"transport": "auto"}}
    for answer in three.run(train, 61, config, (2, 1, 2, 1)):
        assert answer["used"] == (["flat"] * 15 + ["direct"] * 15) * TURNS + ["direct"]


def test_a_resumed_run_goes_on_with_the_choice(three: Ranks) -> None:
    state = three.run(train, UPDATES, AUTO, (2, 1, 2, 1))[0]["state"]
    for answer in three.run(train, 3, AUTO, (), state):
        assert answer["used"] == ["direct"] * 3
        assert "chosen before the checkpoint" in answer["report"]
        assert answer["state"]["transport"] == state["transport"]


def test_a_state_without_a_choice_is_no_choice(three: Ranks) -> None:
    state = three.run(train, 3, AUTO)[0]["state"]
    assert state["transport"] is None
    del state["transport"]  # as earlier versions wrote it
    for answer in three.run(train, UPDATES + 1, AUTO, (2, 1, 2, 1), state):
        assert answer["used"][-1] == "direct"


BOTH = {"gradients": {**AUTO["gradients"], "split": {"kind": "optimal", "steps": 2}}}


def test_transports_and_splits_are_chosen_together(three: Ranks) -> None:
    answers = three.run(train, UPDATES + 2, BOTH, (4, 2, 3, 1) * TURNS)
    for answer in answers:
        tried = set(zip(answer["used"], map(tuple, answer["segments"]), strict=True))
        assert {("flat", (12,)), ("flat", (4, 8))} <= tried
        assert "direct" in answer["used"]  # by the split that is best on the network as it is now
        assert answer["used"] == answers[0]["used"]
        assert answer["segments"] == answers[0]["segments"]
        assert answer["segments"][-1] in ([4, 8], [12])
        assert answer["state"]["transport"]["kind"] == answer["used"][-1]
        assert answer["state"]["split"] is not None
        assert answer["parameters"] == answers[0]["parameters"]
    assert "predicted" in answers[0]["report"]
    assert "kept" in answers[0]["report"]
    state = answers[0]["state"]
    for answer in three.run(train, 3, BOTH, (), state):
        assert answer["used"] == [answers[0]["used"][-1]] * 3
        assert answer["segments"] == [answers[0]["segments"][-1]] * 3
    # where the split is open, too, a transport alone is half a choice
    for answer in three.run(train, 3, BOTH, (), {**state, "split": None}):
        assert "chosen before the checkpoint" not in answer["report"]


CODECS = ({"kind": "half"}, *({"kind": k, "start_step": 0} for k in ("onebit", "powersgd")))


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec["kind"])
def test_codecs_go_on_when_the_transport_changes(three: Ranks, codec: dict[str, Any]) -> None:
    config = {"gradients": {**AUTO["gradients"], "codec": codec}}
    answers = three.run(train, UPDATES + 2, config, (2, 1, 2, 1))
    assert all(answer["parameters"] == answers[0]["parameters"] for answer in answers)
    assert all(abs(value) < 1e3 for value in answers[0]["parameters"])
    assert "direct kept" in answers[0]["report"]


def test_a_trace_names_the_transport_that_was_chosen(three: Ranks, tmp_path: Path) -> None:
    config = AUTO | {"trace": {"steps": 2, "skip": 0, "folder": str(tmp_path)}}
    three.run(train, UPDATES + SETTLING + 2, config, (2, 1, 2, 1))
    trace = read(tmp_path / "trace.json")
    assert {event.step for event in trace.events} == {UPDATES + SETTLING + n for n in range(2)}
    assert trace.meta["strategy"]["gradients"]["transport"] == {"kind": "direct"}


ON_ONE_HOST = {"gradients": {**AUTO["gradients"], "split": "per_layer"}}


def on_one_host() -> list[dict[str, Any]]:
    """A search, two runs that go on from it, searches without memory to share, or hosts; and one
    for splits, too."""
    after = train(UPDATES + 2, ON_ONE_HOST, (3, 2, 1) * TURNS, apart=False)
    beside = train(3, ON_ONE_HOST, (), {**after["state"], "overlap": None}, apart=False)
    resumed = train(3, ON_ONE_HOST, (), after["state"], apart=False)

    def refused(name: str) -> int:
        raise OSError(errno.ENOMEM, "no memory")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "memfd_create", refused)
        without = train(UPDATES + 2, ON_ONE_HOST, (1, 1), apart=False)

    def unreachable(*_: object) -> Hosts:
        raise ClusterError("no sockets")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport_place, "find_hosts", unreachable)
        unknown = train(UPDATES, ON_ONE_HOST, (2, 1) * TURNS, apart=False)
    networks: list[NetworkProfile] = []

    def predicted(*known: Any) -> Any:
        networks.append(known[0].network)
        return predict_choices(*known)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(online_search, "predict_choices", predicted)
        both = train(UPDATES, BOTH, (4, 3, 2, 1) * TURNS, apart=False)
    curves = [set(network.networks["world"].curves) for network in networks]
    return [after, beside, resumed, without, unknown, {**both, "curves": curves}]


def test_on_one_host_shared_memory_is_tried_beside_and_after_backward(three: Ranks) -> None:
    by_rank = three.run(on_one_host)
    for after, beside, resumed, without, unknown, both in by_rank:
        kinds, ends = ["flat"] * 4 + ["shared_memory"] * 8, [False] * 8 + [True] * 4
        assert after["used"] == kinds * TURNS + ["shared_memory"] * 2
        assert after["after"][1:] == (ends * TURNS + [True] * 2)[1:]  # the first is observed
        assert after["state"]["overlap"] is False
        assert "shared_memory after backward kept" in after["report"]
        assert resumed["used"] == beside["used"] == ["shared_memory"] * 3
        assert (resumed["after"], beside["after"]) == ([True] * 3, [False] * 3)
        assert without["used"] == ["flat"] * (UPDATES + 2)
        assert without["state"]["transport"]["kind"] == "flat"
        assert "no other transport can be used here" in without["report"]
        assert unknown["used"] == (["flat"] * 6 + ["direct"] * 6) * TURNS
        assert {"flat", "shared_memory"} == set(both["used"])
        measured = {"all_reduce", "shared_memory_all_reduce"}
        assert both["curves"] == ([measured] if both is by_rank[0][-1] else [])
        of_rank = (after, beside, resumed, without, unknown, both)
        for one, first in zip(of_rank, by_rank[0], strict=True):
            assert one["parameters"] == first["parameters"]
        torch.testing.assert_close(after["losses"], without["losses"], rtol=1e-5, atol=1e-6)


def test_one_process_has_nothing_to_choose() -> None:
    answer = train(2, AUTO)
    assert answer["used"] == ["", ""]
    assert "none" in answer["report"]
    assert answer["state"]["transport"] is None
