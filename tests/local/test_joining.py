"""A job that asks to join is taken in, or told why not; what it takes over fits together."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import LambdaLR

import slipstream
from slipstream.cli.store import open_store
from slipstream.errors import ClusterError, UsageError
from slipstream.local import rendezvous
from slipstream.local.open_carrier import _floats, _layout, _values
from slipstream.local.rendezvous import Rendezvous
from slipstream.local.view import View
from tests.local.reference import flat
from tests.local.test_beginnings import another, still
from tests.local.test_rendezvous import apart, joined
from tests.local.test_training import build, loss_of, sgd

pytestmark = pytest.mark.process


@pytest.fixture
def three() -> Iterator[list[Rendezvous]]:
    """Jobs that have not joined; two of them begin."""
    with apart(3) as islands:
        yield islands


def test_who_waits_for_others_in_vain_is_told(
    three: list[Rendezvous], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "JOIN", timedelta(seconds=0.3))
    with pytest.raises(ClusterError, match=r"1 have asked to join, .*at_least is 2"):
        three[0].join(trained=False)
    three[0].leave()
    with pytest.raises(ClusterError, match=r"2 have asked to join, 1 of them are gone, .*is 2"):
        three[1].join(trained=False)


def test_a_newcomer_waits_for_a_round_of_any_length(
    three: list[Rendezvous], monkeypatch: pytest.MonkeyPatch
) -> None:
    view = joined(three[:2])
    monkeypatch.setattr(rendezvous, "JOIN", timedelta(seconds=0.3))
    found: list[View] = []
    newcomer = threading.Thread(target=lambda: found.append(three[2].join(trained=False)))
    newcomer.start()
    while not three[2].island:
        time.sleep(0.01)
    time.sleep(1)  # longer than JOIN
    assert newcomer.is_alive()
    opened = three[0].open(view.admitting(3))
    newcomer.join()
    assert found == [opened]


def test_a_newcomer_waits_for_those_that_stand_still(
    three: list[Rendezvous], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took them for dead, and the run for lost."""
    view = joined(three[:2])
    monkeypatch.setattr(rendezvous, "DEAD", 0.1)  # less than from beat to beat
    found: list[View] = []
    newcomer = threading.Thread(target=lambda: found.append(three[2].join(trained=False)))
    newcomer.start()
    while not three[2].island:
        time.sleep(0.01)
    newcomer.join(1)
    opened = three[0].open(view.admitting(3))
    newcomer.join()
    assert found == [opened]


def test_who_comes_after_the_end_is_told_so(three: list[Rendezvous]) -> None:
    joined(three[:2])
    three[0].end()
    for island in three[:2]:
        island.leave()
    with pytest.raises(ClusterError, match="has ended"):
        three[2].join(trained=False)


def test_a_state_that_other_jobs_do_not_have_is_refused() -> None:
    store = open_store(0)
    local = {"steps": 2, "rendezvous": {"store": f"127.0.0.1:{store.port}", "at_least": 1}}
    model = nn.Linear(2, 1)
    with slipstream.accelerate(model, SGD(model.parameters(), 0.1), None, {"local": local}) as one:
        one.load_state_dict(one.state_dict())
        one.backward(model(torch.ones(1, 2)).sum())
        one.step()
        with pytest.raises(UsageError, match=r"load_state_dict\(\) at update 1 of jobs"):
            one.load_state_dict(one.state_dict())


def with_buffer(length: int) -> nn.Module:
    model = nn.Linear(2, 1)
    model.register_buffer("seen", torch.zeros(length))
    return model


@pytest.mark.parametrize(
    "other",
    [(with_buffer(4), SGD), (with_buffer(3).double(), SGD), (with_buffer(3), Adam)],
    ids=["buffers", "types", "optimizer"],
)
def test_a_job_with_another_model_or_optimizer_is_refused(
    other: tuple[nn.Module, type[torch.optim.Optimizer]],
) -> None:
    store = open_store(0)
    local = {"steps": 2, "rendezvous": {"store": f"127.0.0.1:{store.port}", "at_least": 1}}
    first, (model, kind) = with_buffer(3), other
    with (
        slipstream.accelerate(first, SGD(first.parameters(), 0.1), None, {"local": local}),
        pytest.raises(ClusterError, match="model or optimizer of this job differs"),
    ):
        slipstream.accelerate(model, kind(model.parameters(), 0.1), None, {"local": local})


def test_a_job_with_other_shares_of_the_data_is_refused() -> None:
    store = open_store(0)
    place = {"store": f"127.0.0.1:{store.port}", "at_least": 1}
    one, other = build(), build()
    local: dict[str, Any] = {"steps": 2, "rendezvous": place}
    with slipstream.accelerate(one, sgd(one), None, {"local": local}):
        place["at_least"] = 2
        with pytest.raises(ClusterError, match="strategy local, model or optimizer of this job"):
            slipstream.accelerate(other, sgd(other), None, {"local": local})


def adam_of(order: tuple[int, ...]) -> Adam:
    """An optimizer whose parameters got their state in this order."""
    parameters = [nn.Parameter(torch.full((3,), float(n))) for n in range(3)]
    optimizer = Adam(parameters)
    for index in order:
        parameters[index].grad = torch.full((3,), float(index + 1))
        optimizer.step()
        parameters[index].grad = None
    return optimizer


def test_optimizer_states_lie_alike_in_all_jobs() -> None:
    one, other, less = (
        _floats({"optimizer": adam_of(order).state_dict()}) for order in ((0, 1), (1, 0), (0, 2))
    )
    torch.testing.assert_close(_values(one), _values(other))
    assert _layout(one) == _layout(other) != _layout(less)
    assert len(_values(one)) == len(_values(less))


def test_what_an_optimizer_keeps_of_itself_is_in_no_mean() -> None:
    optimizer = adam_of((0, 1))
    plain = _floats({"optimizer": optimizer.state_dict()})
    state: Any = optimizer.state
    state |= {"updates": 2, "norms": {"largest": torch.ones(3)}}
    own = _floats({"optimizer": optimizer.state_dict()})
    assert own.keys() == plain.keys()
    assert _layout(own) == _layout(plain)


def outer_of_a_loaded_model(port: int, model: nn.Module, loaded: nn.Module) -> Tensor:
    local = {"steps": 2, "rendezvous": {"store": f"127.0.0.1:{port}", "at_least": 2}}
    with slipstream.accelerate(model, still(model), None, {"local": local}) as session:
        model.load_state_dict(loaded.state_dict())
        for update in range(2):
            session.backward(loss_of(model, 0, update))
            session.step()
        with session.evaluating():
            return flat(model.parameters())


def test_all_jobs_begin_with_the_model_that_their_script_loads() -> None:
    store = open_store(0)
    models, loaded = [build(), build()], another()  # built here: jobs share one random state
    with ThreadPoolExecutor(2) as jobs:
        for outer in jobs.map(outer_of_a_loaded_model, [store.port] * 2, models, [loaded] * 2):
            assert torch.equal(outer, flat(loaded.parameters()))


def trains_until(port: int, model: nn.Module, begun: Event, ended: Event) -> None:
    place = {"store": f"127.0.0.1:{port}", "at_least": 1, "timeout": 20}
    local = {"steps": 2, "rendezvous": place}
    optimizer = sgd(model)
    schedule = LambdaLR(optimizer, falling)
    with slipstream.accelerate(model, optimizer, None, {"local": local}) as session:
        while not ended.is_set():
            session.backward(loss_of(model, 0, session.updates))
            session.step()
            schedule.step()
            if session.updates == 3:
                begun.set()


def falling(update: int) -> float:
    return 1 / (1 + update)


def test_a_newcomer_is_told_of_a_schedule_that_begins_anew(tmp_path: Path) -> None:
    store, begun, ended = open_store(0), Event(), Event()
    first, model = build(), build()
    place = {"store": f"127.0.0.1:{store.port}", "at_least": 1, "timeout": 20}
    local = {"steps": 2, "rendezvous": place}
    optimizer = sgd(model)
    early = LambdaLR(optimizer, falling)
    with ThreadPoolExecutor(1) as jobs:
        other = jobs.submit(trains_until, store.port, first, begun, ended)
        try:
            assert begun.wait(60) or other.result(0)
            with slipstream.accelerate(model, optimizer, None, {"local": local}) as session:
                late = LambdaLR(optimizer, falling, last_epoch=session.updates - 1)
                assert optimizer.param_groups[0]["lr"] == 0.1 * falling(session.updates)
                saved = slipstream.Checkpoints(tmp_path, also={"early": early, "late": late})
                with pytest.warns(UserWarning, match="no state of early, which begins anew"):
                    assert saved.restore(session) == session.updates
                ended.set()
        finally:  # the other one would go on for ever
            ended.set()
        other.result()


def restored_alone(port: int, model: nn.Module, state: dict[str, Any]) -> str:
    place = {"store": f"127.0.0.1:{port}", "at_least": 2, "timeout": 20}  # half of it in vain
    local = {"steps": 2, "rendezvous": place}
    with slipstream.accelerate(model, still(model), None, {"local": local}) as session:
        session.restore(state)
        try:
            session.backward(loss_of(model, 0, 0))
        except ClusterError as error:
            return str(error)
        session.step()
    return ""


def saved_after(updates: int) -> dict[str, Any]:
    model = build()
    with slipstream.accelerate(model, sgd(model), None, {"local": {"steps": 1}}) as session:
        for update in range(updates):
            session.backward(loss_of(model, 0, update))
            session.step()
        return session.checkpoint()


def test_jobs_of_a_start_that_restore_different_states_are_refused() -> None:
    """As where each has a folder of its own, and all were killed a moment after one had saved."""
    store = open_store(0)
    models, states = [build(), build()], [saved_after(1), saved_after(2)]
    with ThreadPoolExecutor(2) as jobs:
        found = [*jobs.map(restored_alone, [store.port] * 2, models, states)]
    assert "" in found
    assert any("loaded model or restored state of this job differs" in text for text in found)
