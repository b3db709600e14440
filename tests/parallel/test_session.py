"""Data and model parallelism at once, through ``accelerate()``: one mesh, one strategy."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from torch.nn import functional as F

import slipstream
from slipstream.errors import MismatchError, StrategyError, UsageError
from slipstream.optim import Lamb
from tests.harness.counters import collectives
from tests.harness.ranks import Ranks
from tests.parallel.models import CASES, LENGTH, WORDS, gpt2

STEPS = 20
TENSOR = {"parallel": {"tensor": {"ranks": 2}}}


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


def strategy(name: str, plan: str, **gradients: Any) -> dict[str, Any]:
    """The strategy that splits a model's layers over two ranks."""
    model = CASES[name].build()
    places = [place.document() for place in CASES[name].plans[plan](model)]
    tensor = {"ranks": 2, "plan": places}
    return {"parallel": {"tensor": tensor}, "gradients": gradients}


def trains_as_one_process(name: str, plan: str, gradients: dict[str, Any]) -> None:
    """Two replicas of two ranks each, against one process on both replicas' batches."""
    case = CASES[name]
    torch.manual_seed(dist.get_rank())
    whole = case.build().double()
    model = case.build().double()
    for mine in whole.state_dict().values():
        dist.broadcast(mine, 0)
    if dist.get_rank() == 0:
        model.load_state_dict(whole.state_dict())
    first = torch.optim.AdamW(whole.parameters(), lr=0.01)
    second = torch.optim.AdamW(model.parameters(), lr=0.01)
    wish = strategy(name, plan, **gradients)
    session = slipstream.accelerate(model, second, strategy=wish)
    assert (session.data_size, session.data_rank) == (2, dist.get_rank() // 2)
    for number in range(STEPS):
        losses = []
        for replica in range(2):
            loss = whole(*case.batch(2 * number + replica))
            (loss / 2).backward()
            losses.append(float(loss))
        norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
        first.step()
        first.zero_grad()
        loss = session.model(*case.batch(2 * number + session.data_rank))
        session.backward(loss)
        torch.testing.assert_close(session.clip_grad_norm_(0.5).double(), norm, rtol=1e-5, atol=0)
        assert session.step()
        assert float(loss) == pytest.approx(losses[session.data_rank], rel=1e-6), number
    state = session.full_state_dict()
    session.close()
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-6, msg=name)
        assert torch.equal(model.state_dict()[name], state[name])


@pytest.mark.parametrize(
    ("name", "plan", "gradients"),
    [
        ("gpt2", "known", {}),
        ("gpt2", "with vocabulary", {"split": "per_layer", "overlap": False}),
        ("gpt2", "with sequence", {"split": "single"}),
        ("llama", "known", {"split": {"kind": "by_bytes", "megabytes": 0.01}}),
    ],
)
def test_data_and_tensor_parallel_train_as_one_process(four, name, plan, gradients) -> None:
    four.run(trains_as_one_process, name, plan, gradients)


# Stages.


def cut(schedule: str = "1f1b", ranks: int = 2, micro_batches: int = 2) -> dict[str, Any]:
    stages = 2 * ranks if schedule in ("interleaved_1f1b", "zero_bubble") else ranks
    blocks = [f"inner.transformer.h.{number}" for number in range(1, stages)]
    return {
        "pipeline": {
            "ranks": ranks,
            "cut": blocks,
            "schedule": schedule,
            "micro_batches": micro_batches,
        }
    }


class Batch:
    """GPT-2 without its loss, which a pipeline computes itself; four blocks, tied embeddings."""

    @staticmethod
    def build() -> torch.nn.Module:
        model = gpt2(n_layer=4)
        model.forward = partial(Batch.logits, model)
        return model

    @staticmethod
    def logits(model: torch.nn.Module, words: torch.Tensor) -> torch.Tensor:
        return model.inner(input_ids=words).logits

    @staticmethod
    def loss(logits: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), words[:, 1:].flatten())

    @staticmethod
    def batch(step: int) -> torch.Tensor:
        seed = torch.Generator().manual_seed(step)
        return torch.randint(WORDS, (4, LENGTH), generator=seed)


def stages_train_as_one_process(parallel: dict[str, Any], gradients: dict[str, Any]) -> None:
    """Data, stages and split layers in any mixture, against one process on all batches."""
    torch.manual_seed(dist.get_rank())
    whole, model = Batch.build().double(), Batch.build().double()
    for mine in whole.state_dict().values():
        dist.broadcast(mine, 0)
    if dist.get_rank() == 0:
        model.load_state_dict(whole.state_dict())
    first = torch.optim.AdamW(whole.parameters(), lr=0.01)
    second = torch.optim.AdamW(model.parameters(), lr=0.01)
    wish = {"parallel": parallel, "gradients": gradients}
    session = slipstream.accelerate(model, second, strategy=wish)
    replicas = session.data_size
    for number in range(STEPS):
        losses = []
        for replica in range(replicas):
            words = Batch.batch(replicas * number + replica)
            loss = Batch.loss(whole(words), words)
            (loss / replicas).backward()
            losses.append(float(loss))
        norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
        first.step()
        first.zero_grad()
        words = Batch.batch(replicas * number + session.data_rank)
        loss = session.forward_backward(Batch.loss, (words,), target=words)
        torch.testing.assert_close(session.clip_grad_norm_(0.5).double(), norm, rtol=1e-6, atol=0)
        assert session.step()
        assert float(loss) == pytest.approx(losses[session.data_rank], rel=1e-8), number
    assert "parallel" in session.report()
    state = session.full_state_dict()
    session.load_full_state_dict(state)
    session.close()
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-6, atol=1e-8, msg=name)
        assert torch.equal(model.state_dict()[name], state[name]), name


TENSOR_2 = TENSOR["parallel"]
MESHES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "2 data x 2 stages": (cut(), {}),
    "2 data x 2 stages, gpipe": (cut("gpipe"), {"split": "per_layer"}),
    "2 data x 2 stages, interleaved": (cut("interleaved_1f1b"), {"accumulate": 1}),
    "2 data x 2 stages, zero bubble": (cut("zero_bubble"), {"split": "single"}),
    "2 stages x 2 tensor": ({**cut(), **TENSOR_2}, {}),
    "4 stages": (cut(ranks=4, micro_batches=4), {}),
}


@pytest.mark.parametrize(("parallel", "gradients"), MESHES.values(), ids=MESHES)
def test_stages_train_as_one_process(four: Ranks, parallel, gradients) -> None:
    four.run(stages_train_as_one_process, parallel, gradients)


@pytest.fixture(scope="module")
def eight() -> Iterator[Ranks]:
    with Ranks(8) as ranks:
        yield ranks


def test_data_stages_and_tensor_train_as_one_process(eight: Ranks) -> None:
    eight.run(stages_train_as_one_process, {**cut(), **TENSOR_2}, {})


def exchanges_shares_only() -> None:
    model = CASES["gpt2"].build()
    with slipstream.accelerate(model, sgd(model), strategy=TENSOR) as session:
        for number in range(3):
            loss = session.model(*CASES["gpt2"].batch(number))
            with collectives() as log:
                session.backward(loss)
            session.step()
        own = sum(p.numel() for p in model.parameters()) * 4
        assert sum(s.num_bytes for s in session.segments) == own
        assert sum(c.num_bytes for c in log if c.kind == "all_reduce") < 2 * own


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_a_rank_exchanges_the_gradients_of_its_share(four: Ranks) -> None:
    four.run(exchanges_shares_only)


def codecs_resume(codec: dict[str, Any]) -> None:
    """What codecs keep belongs to a share: a resumed run goes on bit for bit."""
    runs = []
    wish = {**TENSOR, "gradients": {"codec": codec}}
    for interrupted in (False, True):
        torch.manual_seed(0)
        model = CASES["gpt2"].build()
        optimizer = sgd(model)
        session = slipstream.accelerate(model, optimizer, strategy=wish)
        losses = []
        for number in range(6):
            if interrupted and number == 3:
                kept, full = session.state_dict(), session.full_state_dict()
                session.close()
                model = CASES["gpt2"].build()
                optimizer = sgd(model)
                session = slipstream.accelerate(model, optimizer, strategy=wish)
                session.load_full_state_dict(full)
                session.load_state_dict(kept)
                with pytest.raises(UsageError, match="is of 3 ranks, this run has 4"):
                    session.load_state_dict({**kept, "codecs": kept["codecs"][:3]})
            loss = session.model(*CASES["gpt2"].batch(2 * number + session.data_rank))
            session.backward(loss)
            session.step()
            losses.append(float(loss))
        runs.append(losses)
        session.close()
    assert runs[0] == runs[1]


@pytest.mark.parametrize("kind", ["onebit", "powersgd"])
def test_codecs_keep_what_is_of_their_share(four: Ranks, kind: str) -> None:
    four.run(codecs_resume, {"kind": kind, "start_step": 0})


def replicas_stay_alike(plan: str, codec: dict[str, Any], split: object) -> None:
    """Shares differ in size, so do the segments of a rank; replicas must not notice."""
    torch.manual_seed(0)
    model = CASES["gpt2"].build()
    wish = strategy("gpt2", plan, codec=codec, split=split)
    with slipstream.accelerate(model, sgd(model), strategy=wish) as session:
        for number in range(4):
            loss = session.model(*CASES["gpt2"].batch(2 * number + session.data_rank))
            session.backward(loss)
            session.step()
        shared = session._shared.shards
        replicas = {n: p.detach() for n, p in model.named_parameters() if n not in shared}
        assert len(replicas) > 10
        every: list[Any] = [None] * 4
        dist.all_gather_object(every, replicas)
        for other in every[1:]:
            assert all(torch.equal(other[name], every[0][name]) for name in replicas)
        every = [None] * 4
        own = {n: p.detach() for n, p in model.named_parameters() if n in shared}
        dist.all_gather_object(every, own)
        for rank in (0, 1):
            same = [torch.equal(every[rank][n], every[rank + 2][n]) for n in own]
            assert all(same)


@pytest.mark.parametrize("split", ["single", {"kind": "by_bytes", "megabytes": 0.005}, "per_layer"])
@pytest.mark.parametrize(
    "codec",
    [
        {"kind": "onebit", "start_step": 0},
        {"kind": "int8", "rounding": "stochastic"},
        {"kind": "dgc", "density": 0.1, "warmup_steps": 0},
    ],
    ids=lambda codec: codec["kind"],
)
def test_replicas_stay_bit_for_bit_alike_under_codecs(four: Ranks, codec, split) -> None:
    four.run(replicas_stay_alike, "with vocabulary", codec, split)


def overflows_together(codec: dict[str, Any] | None) -> None:
    """A gradient overflows in one share of one replica: no rank updates."""
    torch.manual_seed(0)
    model = CASES["gpt2"].build()
    wish = {**TENSOR, "gradients": {"codec": codec}}
    with slipstream.accelerate(model, sgd(model), strategy=wish) as session:
        block = model.inner.transformer.h[0].mlp.c_fc
        for number in range(4):
            loss = session.model(*CASES["gpt2"].batch(number))
            handle = None
            if number == 2 and dist.get_rank() == 1:
                handle = block.weight.register_hook(lambda g: g * float("inf"))
            before = [p.clone() for p in model.parameters()]
            session.backward(loss * 4, loss_scale=4.0)
            assert session.step() == (number != 2)
            if handle is not None:
                handle.remove()
            same = all(map(torch.equal, before, model.parameters()))
            assert same == (number == 2)
        assert session.skipped == 1
        assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("codec", [None, {"kind": "int8"}, {"kind": "onebit", "start_step": 0}])
def test_an_overflow_in_one_share_skips_the_update_of_all(four: Ranks, codec) -> None:
    four.run(overflows_together, codec)


def alone_on_the_data_axis() -> None:
    model = CASES["gpt2"].build()
    wish = {"parallel": {"tensor": {"ranks": 4}}}
    batches = [CASES["gpt2"].batch(0)] * 3
    with slipstream.accelerate(model, sgd(model), batches, strategy=wish) as session:
        assert (session.data_size, session.data_rank) == (1, 0)
        losses = []
        for batch in session.loader:
            loss = session.model(*batch)
            session.backward(loss)
            assert session.step()
            losses.append(float(loss))
        every: list[Any] = [None] * 4
        dist.all_gather_object(every, losses)
        assert every == [losses] * 4
        assert losses[-1] < losses[0]
        assert "tensor" in session.report()


def test_all_ranks_may_share_one_model(four: Ranks) -> None:
    four.run(alone_on_the_data_axis)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "ranks": ({"parallel": {"tensor": {"ranks": 3}}}, "take 3 ranks, but 4 were started"),
    "optimal": ({**TENSOR, "gradients": {"split": "optimal"}}, "with gradients.split optimal"),
    "adaptive": (
        {**TENSOR, "gradients": {"codec": {"kind": "adaptive", "codec": "int8"}}},
        "with gradients.codec adaptive",
    ),
    "heads": (
        {"parallel": {"tensor": {"ranks": 4, "plan": {"*.attn.c_attn": "column", "no": "row"}}}},
        "no module matches 'no'",
    ),
}


def refused(wish: dict[str, Any], said: str) -> None:
    model = CASES["gpt2"].build()
    shapes = [p.shape for p in model.parameters()]
    with pytest.raises(StrategyError, match=re.escape(said)):
        slipstream.accelerate(model, sgd(model), strategy=wish)
    assert shapes == [p.shape for p in model.parameters()]


@pytest.mark.parametrize(("wish", "said"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_go_together_is_refused_with_the_reason(four, wish, said) -> None:
    four.run(refused, wish, said)


def lamb_is_refused() -> None:
    model = CASES["gpt2"].build()
    with pytest.raises(StrategyError, match="with Lamb: its trust ratio"):
        slipstream.accelerate(model, Lamb(model.named_parameters(), lr=0.01), strategy=TENSOR)
    plan = {} if dist.get_rank() else {"parallel": {"tensor": {"ranks": 2}}}
    with pytest.raises(MismatchError, match="the strategy"):
        slipstream.accelerate(model, sgd(model), strategy=plan)


def test_layerwise_optimizers_and_strategies_that_differ_are_refused(four: Ranks) -> None:
    four.run(lamb_is_refused)


def different_batches() -> None:
    assert slipstream.data_share(TENSOR) == (dist.get_rank() // 2, 2)
    model = CASES["gpt2"].build()
    with slipstream.accelerate(model, sgd(model), strategy=TENSOR) as session:
        loss = session.model(*CASES["gpt2"].batch(dist.get_rank()))
        with pytest.raises(MismatchError, match="ranks 0 and 1 share the layers"):
            session.backward(loss)


def test_ranks_that_share_a_model_must_train_on_the_same_batches(four: Ranks) -> None:
    four.run(different_batches)
