"""Updates that go wrong without an error: found within two checks, and named."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import slipstream
from slipstream.errors import ProofError
from slipstream.gradients.buckets import DenseBucket
from tests.harness.ranks import RankFailure, Ranks

BAD, EVERY, AT = 1, 2, 5
"""The rank, updates from one check to the next, and updates before the fault."""


@pytest.fixture(scope="module")
def three() -> Iterator[Ranks]:
    with Ranks(3) as ranks:
        yield ranks


def opened(strategy: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return slipstream.accelerate(model, optimizer, strategy=strategy)


def update(session: Any, step: int, before: Callable[[], None] | None = None) -> None:
    generator = torch.Generator().manual_seed(100 * step + session.rank)
    batch = torch.randn(8, 6, generator=generator)
    session.backward(session.model(batch).square().mean())
    if before is not None:
        before()
    session.step()


def updates(session: Any, start: int, stop: int, before: Callable[[], None] | None = None) -> None:
    for step in range(start, stop):
        update(session, step, before)


# The faults: each on the bad rank, but where it says otherwise.


def flip(bit: int) -> Callable[[Any], None]:
    def flip_one(session: Any) -> None:
        with torch.no_grad():
            word = session.model[0].weight.view(torch.int32)[3, 2]
            word ^= torch.tensor(1 << (bit % 31) if bit != 31 else -(1 << 31), dtype=torch.int32)

    return flip_one


def keep_statistics(session: Any) -> None:
    """Those of the first rank do not arrive any more."""
    session._loop.engine._buffers.arrived = lambda: None


def change_rate(session: Any) -> None:
    session.optimizer.param_groups[0]["lr"] = 0.02


def step_twice(session: Any) -> None:
    for state in session.optimizer.state.values():
        state["step"] += 1
    with torch.no_grad():
        session.model[3].bias.sub_(0.01)


def forget_moments(session: Any) -> None:
    session.optimizer.state[session.model[3].weight]["exp_avg"].zero_()


AFTERWARDS = {
    "sign flipped": (flip(31), "rank 1 differs from the other ranks in parameters: 0.weight"),
    "exponent flipped": (flip(25), "rank 1 differs from the other ranks in parameters: 0.weight"),
    "mantissa flipped": (flip(0), "rank 1 differs from the other ranks in parameters: 0.weight"),
    "statistics kept": (keep_statistics, "in buffers: 1.running_mean is the first"),
    "another rate": (
        change_rate,
        "in the optimizer's settings: lr of group 0 is the first (0.01 and 0.02)",
    ),
    "stepped twice": (step_twice, "in the optimizer's state: step of 0.weight is the first"),
    "moments lost": (forget_moments, "in the optimizer's state: exp_avg of 3.weight is the first"),
}


def with_a_fault(fault: str, strategy: dict[str, Any]) -> str:
    checks = {"checks": {"every": EVERY}}
    with opened({**strategy, **checks}) as session:
        for step in range(AT):
            update(session, step)
        if session.rank == BAD:
            AFTERWARDS[fault][0](session)
        with pytest.raises(ProofError) as caught:
            updates(session, AT, AT + 2 * EVERY)
        session.model.zero_grad()
        return str(caught.value)


@pytest.mark.parametrize("fault", AFTERWARDS)
def test_ranks_that_drift_apart_are_named(three, fault):
    said = three.run(with_a_fault, fault, {})
    assert len({*said}) == 1
    assert AFTERWARDS[fault][1] in said[0]
    assert f"rank {BAD} differs from the other ranks" in said[0]


@pytest.mark.parametrize("transport", ["flat", "sharded"])
@pytest.mark.parametrize("fault", ["statistics kept", "another rate"])
def test_on_other_transports_too(three, fault, transport):
    said = three.run(with_a_fault, fault, {"gradients": {"transport": transport}})
    assert f"rank {BAD} differs from the other ranks" in said[0]


# Averages.


def lose_own(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exchange of the bad rank is lost: it goes on with its own gradients."""
    if session.rank == BAD:
        complete, finish = DenseBucket.complete, DenseBucket.finish
        kept: dict[int, torch.Tensor] = {}

        def keep(bucket: DenseBucket, scale: torch.Tensor) -> None:
            complete(bucket, scale)
            kept[id(bucket)] = bucket.flat * session.world_size

        def restore(bucket: DenseBucket) -> None:
            bucket.flat.copy_(kept[id(bucket)])
            finish(bucket)

        monkeypatch.setattr(DenseBucket, "complete", keep)
        monkeypatch.setattr(DenseBucket, "finish", restore)


def send_zeros(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the bad rank sends is lost on its way."""
    if session.rank == BAD:
        complete = DenseBucket.complete

        def blank(bucket: DenseBucket, scale: torch.Tensor) -> None:
            complete(bucket, scale)
            bucket.flat.zero_()

        monkeypatch.setattr(DenseBucket, "complete", blank)


def divide_twice(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    complete = DenseBucket.complete

    def divide(bucket: DenseBucket, scale: torch.Tensor) -> None:
        complete(bucket, scale)
        bucket.flat.div_(session.world_size)

    monkeypatch.setattr(DenseBucket, "complete", divide)


AVERAGES = {
    "own gradients": (lose_own, "rank 1 did not get the average of all ranks, but has its own"),
    "zeros sent": (send_zeros, "the gradients of rank 1 are missing in the average"),
    "divided twice": (divide_twice, "the average was divided by the number of ranks twice"),
}


def with_a_wrong_average(fault: str, strategy: dict[str, Any]) -> str:
    with opened({**strategy, "checks": {"every": EVERY}}) as session:
        for step in range(AT):
            update(session, step)
        with pytest.MonkeyPatch.context() as monkeypatch:
            AVERAGES[fault][0](session, monkeypatch)
            with pytest.raises(ProofError) as caught:
                updates(session, AT, AT + 2 * EVERY)
        session.model.zero_grad()
        return str(caught.value)


@pytest.mark.parametrize("split", ["single", "per_layer"])
@pytest.mark.parametrize("fault", AVERAGES)
def test_wrong_averages_are_named(three, fault, split):
    strategy = {"gradients": {"split": split, "transport": "flat"}}
    for said in three.run(with_a_wrong_average, fault, strategy):
        assert AVERAGES[fault][1] in said
        assert "the segment of" in said


def divides_by_hand() -> list[str]:
    with opened({"checks": {"every": EVERY}}) as session, warnings.catch_warnings(record=True) as w:
        warnings.simplefilter("always")

        def divide() -> None:
            for p in session.model.parameters():
                p.grad /= session.world_size

        updates(session, 0, 3 * EVERY, divide)
    return [str(warning.message) for warning in w if "divided" in str(warning.message)]


def test_gradients_that_the_script_divides_again_are_warned_of(three):
    for said in three.run(divides_by_hand):
        assert len(said) == 1
        assert "leaves the average already" in said[0]


def sampled(split: str) -> set[str]:
    """The gradients that some proofs have sampled together."""
    found: set[str] = set()
    with opened({"gradients": {"split": split}, "checks": {"every": EVERY}}) as session:

        def note() -> None:
            samples = session._loop.engine._samples
            for sample in samples.buckets if samples is not None else ():
                found.update(sample.names)

        updates(session, 0, 8 * EVERY, note)
    return found


@pytest.mark.parametrize("split", ["single", "per_layer"])
def test_every_gradient_is_sampled_in_its_turn(three, split):
    for found in three.run(sampled, split):
        assert found == {f"{layer}.{name}" for layer in (0, 1, 3) for name in ("weight", "bias")}


def lost_residual() -> str | None:
    codec = {"kind": "onebit", "start_step": 0}
    strategy = {"gradients": {"codec": codec}, "checks": {"every": EVERY, "timeout": None}}
    with opened(strategy) as session:
        for step in range(2 * EVERY):
            update(session, step)
        if session.rank != BAD:
            return None
        engine = session._loop.engine
        state = engine.codec_state()
        for values in state.values():
            for key in values:
                values[key] = torch.zeros_like(values[key])
        engine.load_codec_state(state)
        with pytest.raises(ProofError) as caught:
            update(session, 2 * EVERY)
        engine.fail(caught.value)
        return str(caught.value)


def test_what_a_codec_keeps_must_stay(three):
    said = three.run(lost_residual)[BAD]
    assert said is not None
    assert "what the codec keeps of" in said
    assert "on this rank (its residual) was lost or changed since the last update" in said


def same_data() -> list[str]:
    with opened({"checks": {"every": EVERY}}) as session, warnings.catch_warnings(record=True) as w:
        warnings.simplefilter("always")
        for _ in range(3 * EVERY):
            session.backward(session.model(torch.linspace(0, 1, 48).view(8, 6)).square().mean())
            session.step()
    return [str(warning.message) for warning in w if "same data" in str(warning.message)]


def test_ranks_on_the_same_data_are_warned_of_once(three):
    for said in three.run(same_data):
        assert len(said) == 1
        assert "ranks 0, 1, 2 had the same gradients bit for bit" in said[0]


def drifts_from_others(folder: str) -> None:
    checks = {"every": 2, "timeout": 10.0, "folder": folder}
    strategy = {"local": {"steps": 2}, "checks": checks}
    with opened(strategy) as session:
        for step in range(6):
            update(session, step)
        if session.rank == BAD:
            session._loop.local._meetings[0].outer[3] += 1.0
        updates(session, 6, 14)


def test_what_ranks_share_that_train_on_their_own_is_compared(three, tmp_path):
    with pytest.raises(RankFailure) as caught:
        three.run(drifts_from_others, str(tmp_path))
    found = [e for e in caught.value.errors.values() if isinstance(e, ProofError)]
    assert found  # whoever looks last; the others end because it has ended
    assert all("the outer parameters of fragment 1" in str(error) for error in found)
    assert len(caught.value.errors) == 3


# No false alarm.

STRATEGIES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "sharded": {"gradients": {"transport": "sharded"}},
    "per layer, accumulate": {"gradients": {"split": "per_layer", "accumulate": 2}},
    "bf16": {"gradients": {"codec": {"kind": "half", "dtype": "bf16"}}},
    "int8": {"gradients": {"codec": "int8"}},
    "powersgd": {"gradients": {"codec": {"kind": "powersgd", "start_step": 2}}},
    "onebit": {"gradients": {"codec": {"kind": "onebit", "start_step": 3}}},
    "autocast": {"precision": {"kind": "autocast", "dtype": "bf16"}},
    "half weights": {"precision": {"kind": "half_weights", "dtype": "bf16"}},
    "local": {"local": {"steps": 2, "warm_up": 3}},
    "fragments": {"local": {"steps": 4, "fragments": 2, "delay": 1, "codec": "int8"}},
    "auto": {"gradients": {"split": "optimal", "transport": "auto"}},
    "fused": {"compute": {"fuse_optimizer": "elementwise"}},
}


def trains_well(strategy: dict[str, Any], updates: int) -> int:
    with opened({**strategy, "checks": {"every": 1, "replay": True}}) as session:
        for step in range(updates):
            update(session, step)
            if step + 1 == updates // 2:
                session.restore(session.checkpoint())
        return int(session.updates)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_false_alarm(three, strategy):
    accumulate = STRATEGIES[strategy].get("gradients", {}).get("accumulate", 1)
    updates = 12 * accumulate
    if "local" in STRATEGIES[strategy]:
        updates = 12
    assert three.run(trains_well, STRATEGIES[strategy], updates) == [updates // accumulate] * 3


class Unsteady(torch.autograd.Function):
    """A kernel whose results differ from call to call."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        Unsteady.calls += 1
        return gradient * (1 + 1e-6 * Unsteady.calls)


def test_a_device_that_computes_wrongly_is_named():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checks = {"checks": {"every": 1, "replay": True}}
    with slipstream.accelerate(model, optimizer, strategy=checks) as session:
        loss = Unsteady.apply(model(torch.ones(2, 4))).square().mean()
        with pytest.raises(ProofError, match="the gradient of weight was computed twice"):
            session.backward(loss)
