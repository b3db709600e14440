"""Gradients that are infinite or NaN: named before the update, skipped, or allowed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import slipstream
from slipstream.codecs import Ranks as CodecRanks
from slipstream.errors import NonFiniteError
from slipstream.gradients.buckets import DenseBucket, SparseBucket
from slipstream.gradients.compressed import CompressedBucket, CompressionPlan
from slipstream.gradients.finite import all_finite, first_nonfinite
from slipstream.strategy import Strategy, codec_of

BAD, AT = 1, 3  # the rank, and the update after which its gradient is not finite

STRATEGIES: dict[str, dict[str, Any]] = {
    "flat": {"gradients": {"transport": "flat"}},
    "direct, per layer": {"gradients": {"transport": "direct", "split": "per_layer"}},
    "sharded": {"gradients": {"transport": "sharded"}},
    "sharded, per layer": {"gradients": {"transport": "sharded", "split": "per_layer"}},
    "bf16, per layer": {
        "gradients": {"codec": {"kind": "half", "dtype": "bf16"}, "split": "per_layer"}
    },
    "onebit, per layer": {
        "gradients": {"codec": {"kind": "onebit", "start_step": 1}, "split": "per_layer"}
    },
    "shared memory": {"gradients": {"transport": "shared_memory"}},
    "accumulate": {"gradients": {"accumulate": 2}},
    "no overlap": {"gradients": {"overlap": False}},
    "bf16": {"gradients": {"codec": {"kind": "half", "dtype": "bf16"}}},
    "fp16, sharded": {
        "gradients": {"codec": {"kind": "half", "dtype": "fp16"}, "transport": "sharded"}
    },
    "int8": {"gradients": {"codec": "int8"}},
    "powersgd": {"gradients": {"codec": "powersgd"}},
    "local warm-up": {"local": {"warm_up": 100}},
    "autocast": {"precision": {"kind": "autocast", "dtype": "bf16"}},
}


class Words(nn.Module):
    """Sparse and dense gradients, large ones and small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 64, sparse=True)
        self.inner = nn.Linear(64, 300)
        self.out = nn.Linear(300, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.inner(self.table(x)).relu())
        return out


def dense() -> nn.Module:
    """Its second layer's gradient is large where it travels by itself, and copied at once."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 600), nn.Linear(600, 1))


@contextmanager
def bad_gradient(parameter: nn.Parameter, value: float) -> Iterator[None]:
    """Inside, one value of the gradient of a parameter is ``value``."""

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        if gradient.is_sparse:
            gradient._values().view(-1)[-1] = value
            return gradient
        spoilt = gradient.clone()
        spoilt.view(-1)[-1] = value
        return spoilt

    handle = parameter.register_hook(spoil)
    try:
        yield
    finally:
        handle.remove()


def update(session: Any, *, bad: str = "", value: float = torch.nan) -> bool:
    """One update; ``bad``: the parameter whose gradient is not finite on the bad rank."""
    sparse = isinstance(session.model, Words)
    batch = torch.arange(5) if sparse else torch.ones(2, 4)
    updated = False
    for _ in range(session.strategy.gradients.accumulate):
        loss = session.model(batch).square().mean()
        if bad and session.rank in (BAD, session.world_size - 1):
            with bad_gradient(session.model.get_parameter(bad), value):
                session.backward(loss)
        else:
            session.backward(loss)
        updated = session.step()
    return updated


def opened(strategy: dict[str, Any], nonfinite: str | None, model: nn.Module | None = None) -> Any:
    model = model or dense()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    checks = {} if nonfinite is None else {"checks": {"nonfinite": nonfinite}}
    return slipstream.accelerate(model, optimizer, strategy={**strategy, **checks})


def values(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def raises(strategy: dict[str, Any], value: float, sparse: bool = False) -> str:
    name = "table.weight" if sparse else "1.weight"
    with opened(strategy, None, Words() if sparse else None) as session:
        for _ in range(AT):
            update(session)
        session.checkpoint("model")  # parameters that are still on their way arrive
        before = values(session.model)
        with pytest.raises(NonFiniteError) as caught:
            update(session, bad=name, value=value)
        assert all(map(torch.equal, before, values(session.model)))
        session.optimizer.zero_grad()
    return str(caught.value)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_ranks_name_rank_update_and_parameter(two, strategy, value):
    first, second = two.run(raises, STRATEGIES[strategy], value)
    assert first == second
    assert f"update {AT + 1}: the gradient of" in first
    assert f"before the exchange on rank {BAD}." in first
    assert f"those of update {AT}" in first
    # codecs of blocks or directions spread what is not finite
    assert "gradient of 1.weight" in first or strategy in ("int8", "powersgd")


@pytest.mark.parametrize("transport", ["flat", "direct"])
def test_sparse_gradients_are_looked_at(two, transport):
    strategy = {"gradients": {"transport": transport}}
    for said in two.run(raises, strategy, torch.nan, True):
        assert "the gradient of table.weight is infinite or NaN, before the exchange on" in said


def skips(strategy: dict[str, Any]) -> None:
    with opened(strategy, "skip") as session:
        done = [update(session, bad="1.weight" if i == AT else "") for i in range(2 * AT)]
        session.checkpoint("model")
        skipping, skipped = values(session.model), session.skipped
    with opened(strategy, None) as session:
        for _ in range(2 * AT - 1):
            update(session)
        session.checkpoint("model")
        assert all(map(torch.equal, skipping, values(session.model)))
    assert (done.count(False), skipped) == (1, 1)


@pytest.mark.parametrize("strategy", ["flat", "sharded", "accumulate", "bf16", "int8"])
def test_an_update_may_be_skipped_as_if_it_had_never_been(two, strategy):
    two.run(skips, STRATEGIES[strategy])


def allows(strategy: dict[str, Any]) -> bool:
    with opened(strategy, "allow") as session:
        for i in range(AT + 1):
            assert update(session, bad="1.weight" if i == AT else "")
        return all_finite(values(session.model))


@pytest.mark.parametrize("strategy", ["flat", "accumulate"])
def test_it_may_be_allowed(two, strategy):
    assert two.run(allows, STRATEGIES[strategy]) == [False, False]


def made_finite(how: str, by_hand: bool) -> list[torch.Tensor]:
    """As StyleGAN3 (zeros) and SpeechBrain (None) do behind ``backward()``."""
    with opened({"gradients": {"codec": {"kind": "onebit", "start_step": 1}}}, None) as session:
        for _ in range(AT):
            update(session)
        with bad_gradient(session.model.get_parameter("1.weight"), torch.nan):
            session.backward(session.model(torch.ones(2, 4)).square().mean())
        for parameter in session.model.parameters():
            if how == "zeros":
                parameter.grad.nan_to_num_(0)
            elif not all_finite([parameter.grad]):
                parameter.grad = None
        if by_hand:
            session.optimizer.step()
            session.optimizer.zero_grad()
        else:
            assert session.step()
        update(session)
        assert session.updates == AT + 2
        return values(session.model)


@pytest.mark.parametrize("how", ["zeros", "None"])
def test_gradients_that_the_script_has_made_finite_are_used(two, how):
    mine, others = two.run(made_finite, how, False)
    assert all(map(torch.equal, mine, others))
    assert all(map(torch.equal, mine, two.run(made_finite, how, True)[0]))
    assert all_finite(mine)


def overflows_under_way() -> str:
    strategy = {"gradients": {"codec": {"kind": "half", "dtype": "fp16"}}}
    with opened(strategy, None) as session:
        update(session)
        session.backward(session.model(torch.ones(2, 4)).mean() * 1e8)
        with pytest.raises(NonFiniteError) as caught:
            session.step()
        session.optimizer.zero_grad()
    return str(caught.value)


def test_what_16_bits_cannot_hold_counts(two):
    for said in two.run(overflows_under_way):
        assert "before the exchange on ranks 0, 1." in said


def on_its_own() -> str | None:
    strategy = {"local": {"steps": 4}}
    with opened(strategy, None) as session:
        update(session)
        if session.rank != BAD:
            return None
        with pytest.raises(NonFiniteError) as caught:
            update(session, bad="1.weight")
        session.optimizer.zero_grad()
        session._loop.engine.abort(caught.value)  # the others have left: nobody meets this rank
        return str(caught.value)


def test_a_rank_that_trains_on_its_own_names_itself(two):
    _, said = two.run(on_its_own)
    assert "update 2: the gradient of 1.weight" in said
    assert f"before the exchange on rank {BAD}." in said


@pytest.mark.parametrize("sparse", [False, True])
def test_one_process_raises_too(sparse):
    said = raises({}, torch.nan, sparse)
    assert "the gradient of table.weight" in said if sparse else "of 1.weight" in said
    assert "before the exchange on rank 0." in said


def test_a_loss_scale_skips_by_itself():
    with opened({}, None) as session:
        loss = session.model(torch.ones(2, 4)).square().mean()
        with bad_gradient(session.model.get_parameter("1.weight"), torch.inf):
            session.backward(loss * 2.0, loss_scale=2.0)
        assert not session.step()


# Whether gradients are finite.


@pytest.mark.parametrize("size", [1, 3, 100, 2**14, 2**17 + 1])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_one_value_is_found_wherever_it_is(size, value, dtype):
    for place in {0, size // 2, size - 1}:
        gradient = torch.ones(size, dtype=dtype)
        gradient[place] = value
        assert not all_finite([torch.ones(3), gradient])


def test_large_values_are_finite():
    largest = torch.finfo(torch.float32).max
    assert all_finite([torch.full((100,), largest), torch.full((2**15,), -largest)])
    assert all_finite([])
    assert not all_finite([torch.tensor([complex(torch.inf, 0.0)]).conj()])
    assert all_finite([torch.tensor([1.0 + 2.0j]).conj()])
    assert all_finite([torch.zeros(0), torch.zeros(3)])


def test_the_first_name_counts():
    bad = torch.tensor([torch.nan])
    assert first_nonfinite([("a", None), ("b", torch.ones(2)), ("c", bad), ("d", bad)]) == "c"
    assert first_nonfinite([("b", torch.ones(2))]) == ""


def test_buckets_of_all_kinds_look_on_the_device_of_their_gradients():
    """As the engine joins what they have found, whichever share an exchange; meta is no CPU."""
    weight = nn.Parameter(torch.zeros(3, 2, device="meta"))
    config = Strategy.load({"gradients": {"codec": "topk"}}).gradients.codec
    plan = CompressionPlan(partial(codec_of, config), CodecRanks(0, 2), {})
    buckets = [
        DenseBucket([weight]),
        SparseBucket(weight, 1, 2),
        plan.bucket(["weight"], [weight], 0),
    ]
    assert isinstance(buckets[-1], CompressedBucket)
    assert {bucket.nonfinite.device.type for bucket in buckets} == {"meta"}
