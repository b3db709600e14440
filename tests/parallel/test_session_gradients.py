"""Gradient exchange beside tensor parallelism: bytes, codecs, replicas, overflows."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist

import slipstream
from slipstream.errors import UsageError
from tests.harness.counters import collectives
from tests.harness.ranks import Ranks
from tests.parallel.models import CASES
from tests.parallel.session_tasks import TENSOR, sgd, strategy


def exchanges_shards_only() -> None:
    model = CASES["gpt2"].build()
    with slipstream.accelerate(model, sgd(model), strategy=TENSOR) as session:
        for number in range(3):
            loss = session.model(*CASES["gpt2"].batch(number))
            with collectives() as log:
                session.backward(loss)
            session.step()
        local = sum(p.numel() for p in model.parameters()) * 4
        assert sum(s.num_bytes for s in session.segments) == local
        assert sum(c.num_bytes for c in log if c.kind == "all_reduce") < 2 * local


def test_a_rank_exchanges_the_gradients_of_its_shards(four: Ranks) -> None:
    four.run(exchanges_shards_only)


def codecs_resume(codec: dict[str, Any]) -> None:
    """What codecs keep belongs to a share: a resumed run goes on bit for bit."""
    runs = []
    config = {**TENSOR, "gradients": {"codec": codec}}
    for interrupted in (False, True):
        torch.manual_seed(0)
        model = CASES["gpt2"].build()
        optimizer = sgd(model)
        session = slipstream.accelerate(model, optimizer, strategy=config)
        losses = []
        for number in range(6):
            if interrupted and number == 3:
                saved = session.checkpoint("model", "session")
                session.close()
                model = CASES["gpt2"].build()
                optimizer = sgd(model)
                session = slipstream.accelerate(model, optimizer, strategy=config)
                session.restore(saved)
                fewer = saved["session"]["codecs"][:3]
                with pytest.raises(UsageError, match="is of 3 ranks, this run has 4"):
                    session.load_state_dict({**saved["session"], "codecs": fewer})
            loss = session.model(*CASES["gpt2"].batch(2 * number + session.data_rank))
            session.backward(loss)
            session.step()
            losses.append(float(loss))
        runs.append(losses)
        session.close()
    assert runs[0] == runs[1]


@pytest.mark.parametrize("kind", ["onebit", "powersgd"])
def test_codec_state_resumes_with_its_shards(four: Ranks, kind: str) -> None:
    four.run(codecs_resume, {"kind": kind, "start_step": 0})


def replicas_stay_alike(plan: str, codec: dict[str, Any], split: object) -> None:
    """Shares differ in size, so do the segments of a rank; replicas must not notice."""
    torch.manual_seed(0)
    model = CASES["gpt2"].build()
    whole_shapes = {name: p.shape for name, p in model.named_parameters()}
    config = strategy("gpt2", plan, codec=codec, split=split)
    with slipstream.accelerate(model, sgd(model), strategy=config) as session:
        for number in range(4):
            loss = session.model(*CASES["gpt2"].batch(2 * number + session.data_rank))
            session.backward(loss)
            session.step()
        replicas, shards = {}, {}
        for name, p in model.named_parameters():
            whole = p.shape == whole_shapes[name]
            (replicas if whole else shards)[name] = p.detach()
        assert len(replicas) > 10
        gathered: list[Any] = [None] * 4
        dist.all_gather_object(gathered, replicas)
        for other in gathered[1:]:
            assert all(torch.equal(other[name], gathered[0][name]) for name in replicas)
        gathered = [None] * 4
        dist.all_gather_object(gathered, shards)
        for rank in (0, 1):
            same = [torch.equal(gathered[rank][n], gathered[rank + 2][n]) for n in shards]
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
    config = {**TENSOR, "gradients": {"codec": codec}}
    with slipstream.accelerate(model, sgd(model), strategy=config) as session:
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
def test_an_overflow_in_one_shard_skips_the_update_of_all(four: Ranks, codec) -> None:
    four.run(overflows_together, codec)


def a_scaler_sees_it_everywhere(accumulate: int = 1) -> None:
    """A gradient overflows in one share alone: the scaler of each rank backs off."""
    torch.manual_seed(0)
    model = CASES["gpt2"].build()
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=4.0)
    weight = model.inner.transformer.h[0].mlp.c_fc.weight
    scales = []
    with slipstream.accelerate(model, optimizer, strategy=TENSOR) as session:
        for number in range(3):
            infinite = number == 1 and dist.get_rank() == 1
            for micro in range(1, accumulate + 1):
                by = float("inf") if infinite else 1.0
                handle = weight.register_hook(lambda g, by=by: g * by)
                with session.no_sync() if micro < accumulate else nullcontext():
                    session.backward(scaler.scale(session.model(*CASES["gpt2"].batch(number))))
                handle.remove()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
    assert scales == [4.0, 2.0, 2.0]
    assert session.skipped == 1


def test_a_scaler_backs_off_on_all_ranks(two: Ranks) -> None:
    two.run(a_scaler_sees_it_everywhere)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_scaler_backs_off_on_all_replicas(four: Ranks, accumulate: int) -> None:
    four.run(a_scaler_sees_it_everywhere, accumulate)
