"""Updates that go wrong without an error: found within two checks, and named."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from copy import deepcopy
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import slipstream
from slipstream.errors import ProofError, UsageError
from slipstream.tuner import online_search
from tests.checks.seeded import FAULTS, Made, Outcome, is_found, seeded
from tests.harness.models import Dealt, Sliced
from tests.harness.ranks import RankFailure
from tests.parallel.models import CASES
from tests.parallel.session_tasks import strategy as parallel_strategy

BAD, EVERY = 1, 2
"""The rank, and updates from one check to the next."""
ON_OTHERS = ("residual lost", "rank skipped in its host")
"""Faults that need a codec, or hosts."""
CODECS: dict[str, dict[str, Any]] = {
    "int8": {"kind": "int8", "error_feedback": True},
    "onebit": {"kind": "onebit", "start_step": 0},
    "powersgd": {"kind": "powersgd", "rank": 1, "start_step": 0},
}


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


# The faults, at random places; ``benchmarks.wrong_updates`` seeds each of them in many runs.


def small() -> Made:
    model = nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))

    def loss(trained: nn.Module, number: int, stream: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * number + stream)
        return trained(torch.randn(8, 6, generator=generator)).square().mean()

    return model, torch.optim.Adam(model.parameters(), lr=0.01), loss


def ends_right(fault: str, outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        assert is_found(fault, outcome), outcome
        assert outcome.named, outcome
    assert len({outcome.said for outcome in outcomes}) == 1


@pytest.mark.parametrize("split", ["single", "per_layer"])
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault not in ON_OTHERS])
def test_what_goes_wrong_is_found_and_named(three, fault, split):
    run = 1 if split == "single" else 2
    gradients = {"split": split, "transport": "flat"}
    ends_right(fault, three.run(seeded, small, fault, run, gradients))


@pytest.mark.parametrize("fault", ["average divided twice", "stale buffer", "same data"])
def test_where_each_updates_a_shard_too(three, fault):
    gradients = {"split": "per_layer", "transport": "sharded"}
    ends_right(fault, three.run(seeded, small, fault, 0, gradients))


def split_gpt2() -> Made:
    case = CASES["gpt2"]
    model = case.build()

    def loss(trained: nn.Module, number: int, stream: int) -> torch.Tensor:
        return trained(*case.batch(100 * number + stream))

    return model, torch.optim.Adam(model.parameters(), lr=0.01), loss


SHARED = {
    "segment lost from then on: own gradients": None,
    "average divided twice": None,
    "sign flipped": r"ranks (0, 2|1, 3) differ from one another in parameters: ",
}


@pytest.mark.parametrize(("fault", "words"), SHARED.items(), ids=SHARED)
def test_where_ranks_share_a_model_too(four, fault, words):
    """Those that hold the same part of it say so; the others lose them."""
    parallel = parallel_strategy("gpt2", "known")["parallel"]
    outcomes = four.run(seeded, split_gpt2, fault, 1, {"split": "per_layer"}, parallel)
    assert {outcome.kind for outcome in outcomes} <= {"ProofError", "ExchangeError", "HangError"}
    proved = [outcome for outcome in outcomes if outcome.kind == "ProofError"]
    assert len(proved) in (2, 4)
    for outcome in proved:
        assert outcome.named if words is None else re.search(words, outcome.said), outcome


@pytest.mark.parametrize("codec", CODECS)
def test_what_a_codec_keeps_must_stay(three, codec):
    gradients = {"split": "per_layer", "codec": CODECS[codec]}
    ends_right("residual lost", three.run(seeded, small, "residual lost", 3, gradients))


def test_a_rank_that_a_host_leaves_out_is_named(four):
    found = four.run(seeded, small, "rank skipped in its host", 0, {"transport": "hierarchical"})
    ends_right("rank skipped in its host", found)


def overflowed_exponent() -> str:
    with opened({"checks": {"every": 100}}) as session:
        updates(session, 0, 3)
        if session.rank == BAD:
            with torch.no_grad():
                session.model[3].weight[0, 0] = torch.inf
        with pytest.raises(ProofError) as caught:
            update(session, 3)
        session.model.zero_grad()
        return str(caught.value)


def test_a_weight_is_named_that_makes_gradients_infinite(three):
    for said in three.run(overflowed_exponent):
        assert said.startswith("update 4: gradients are infinite or NaN, and rank 1 differs from")
        assert "in parameters: 3.weight is the first" in said


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


def test_averages_are_proved_before_ranks_train_on_their_own(three):
    fault, warms_up = "segment lost from then on: zeros sent", {"warm_up": 100}
    ends_right(fault, three.run(seeded, small, fault, 0, {"transport": "flat"}, None, warms_up))


# No false alarm.


def rolled_back() -> int:
    with opened({"local": {"steps": 2}, "checks": {"every": 2}}) as session:
        updates(session, 0, 2)
        saved = deepcopy(session.checkpoint())
        updates(session, 2, 6)
        session.restore(saved)
        updates(session, 10, 16)  # other data
        return int(session.updates)


def test_meetings_of_before_a_restore_do_not_count(three):
    assert three.run(rolled_back) == [8] * 3


def repaired_by_a_restore() -> int:
    with opened({"gradients": {"codec": CODECS["int8"]}, "checks": {"every": 4}}) as session:
        updates(session, 0, 2)
        saved = deepcopy(session.checkpoint())
        if session.rank == BAD:
            for named in session._loop.engine._codecs._attached:
                for residual in named.compressor.residuals:
                    residual.error.zero_()
        update(session, 2)
        session.restore(saved)
        updates(session, 2, 5)
        return int(session.updates)


def test_a_residual_that_was_restored_is_lost_no_longer(three):
    assert three.run(repaired_by_a_restore) == [5] * 3


def flushed_after_a_skip() -> tuple[bool, bool, list[str]]:
    checks = {"every": 1, "nonfinite": "skip"}
    sampled: list[str] = []
    with opened({"gradients": {"accumulate": 2}, "checks": checks}) as session:
        updates(session, 0, 3)
        factor = torch.inf if session.rank == BAD else 1.0
        session.backward(session.model(torch.randn(8, 6)).square().mean() * factor)
        skipped = not session.step()
        update(session, 4)  # half a window

        def note(*_: object) -> None:
            for sample in session._loop.engine._samples.buckets:
                sampled.extend(sample.names)

        session.optimizer.register_step_pre_hook(note)
        return skipped, session.flush(), sampled


def test_the_average_of_a_flush_is_proved_and_not_that_of_a_skipped_update(three):
    for skipped, flushed, sampled in three.run(flushed_after_a_skip):
        assert (skipped, flushed) == (True, True)
        assert sampled
        assert len({*sampled}) == len(sampled)


def mended_by_the_script() -> bool:
    with opened({"checks": {"every": 1, "nonfinite": "allow"}}) as session:
        weight = session.model[0].weight
        weight.register_hook(lambda g: g * (torch.inf if session.rank == BAD else 1.0))
        updates(session, 0, 2, lambda: weight.grad.nan_to_num_(0.0, 0.0, 0.0))
        return session.updates == 2


def test_gradients_that_the_script_mends_are_no_wrong_average(three):
    assert three.run(mended_by_the_script) == [True] * 3


STRATEGIES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "sharded": {"gradients": {"transport": "sharded"}},
    "a part replicated": {"gradients": {"transport": {"kind": "sharded", "replicated": 0.5}}},
    "direct": {"gradients": {"transport": "direct"}},
    "shared memory": {"gradients": {"transport": "shared_memory"}},
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
    with (
        patch.object(online_search, "CALIBRATION_SECONDS", 0.2),
        opened({**strategy, "checks": {"every": 1, "replay": True}}) as session,
    ):
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


class OfTheFirst(torch.optim.SGD):
    """Keeps the state of all parameters on rank 0, and nothing on others."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            rows = len(p) if dist.get_rank() == 0 else 0
            kept = self.state[p].setdefault("momentum", torch.zeros(rows, *p.shape[1:]))
            kept.add_(p.grad if rows else 0.0)
            p.sub_(p.grad, alpha=0.1)


def deals_its_work_out(kind: type[Dealt | Sliced | OfTheFirst]) -> int:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3))
    strategy = {"checks": {"every": 2}}
    with slipstream.accelerate(model, kind(model.parameters()), strategy=strategy) as session:
        updates(session, 0, 4)
        return int(session.updates)


@pytest.mark.parametrize("kind", [Dealt, Sliced, OfTheFirst])
def test_an_optimizer_that_deals_its_work_out_raises_no_alarm(three, kind):
    assert three.run(deals_its_work_out, kind) == [4, 4, 4]


def trains_in_turn() -> int:
    """Generator and discriminator in one session: the graph of one is there before the other's
    update, so that its batch norm has statistics of this rank."""
    generator = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 6))
    critic = nn.Linear(6, 1)
    first, second = (torch.optim.SGD(m.parameters(), lr=0.01) for m in (critic, generator))
    both = nn.ModuleList([generator, critic])
    with slipstream.accelerate(both, first, strategy={"checks": {"every": 1}}) as session:
        for step in range(4):
            seed = torch.Generator().manual_seed(100 * step + session.rank)
            made = generator(torch.randn(8, 6, generator=seed))
            session.backward(critic(made.detach()).square().mean())
            first.step()
            both.zero_grad()
            session.backward(critic(made).mean())
            second.step()
            both.zero_grad()
        assert session.between_updates  # which counts the last one
        return int(session.updates)


def test_buffers_of_a_forward_that_waits_for_its_backward_raise_no_alarm(three):
    assert three.run(trains_in_turn) == [8, 8, 8]


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


# Inputs, which are compared, too.


class WithExtra(nn.Module):
    """Takes one more input than it uses."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, extra: object = None) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)
        return out


EXTRAS: dict[str, Callable[[], object]] = {
    "nothing": lambda: None,
    "rows that are sparse": lambda: torch.eye(3).to_sparse_csr(),
    "nested": lambda: torch.nested.as_nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.as_nested_tensor(
        [torch.ones(2), torch.ones(3)], layout=torch.jagged
    ),
    "no data": lambda: torch.empty(3, device="meta"),
    "a view": lambda: torch.ones(1, 2).expand(3, 2).t(),
}


def with_extra(extra: str) -> list[str]:
    """Two forwards an update, of which the second gets the same on all ranks."""
    model = WithExtra()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        warnings.catch_warnings(record=True) as caught,
        slipstream.accelerate(model, optimizer, strategy={"checks": {"every": 1}}) as session,
    ):
        warnings.simplefilter("always", UserWarning)
        for step in range(3):
            generator = torch.Generator().manual_seed(100 * step + session.rank)
            own = session.model(torch.randn(8, 6, generator=generator), EXTRAS[extra]())
            fixed = session.model(torch.ones(8, 6))
            session.backward((own - fixed).square().mean())
            session.step()
    return [str(w.message) for w in caught if "same" in str(w.message)]


@pytest.mark.parametrize("extra", EXTRAS)
def test_inputs_of_any_kind_raise_no_alarm(three, extra):
    assert three.run(with_extra, extra) == [[]] * 3


def test_a_compiled_model_is_not_replayed():
    layers = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 1))
    model: Any = torch.compile(layers, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checks = {"checks": {"every": 2, "replay": True}}
    with slipstream.accelerate(model, optimizer, strategy=checks) as session:
        session.backward(model(torch.ones(2, 4)).square().mean())
        session.step()
        loss = model(torch.ones(2, 4)).square().mean()
        with pytest.raises(UsageError, match=r"donated_buffer = False before it is compiled"):
            session.backward(loss)
