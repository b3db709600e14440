"""Data and model parallelism at once, through ``accelerate()``: one mesh, one strategy."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

import slipstream
from slipstream.errors import MismatchError, ModelError, StrategyError, UsageError
from slipstream.optim import Lamb
from tests.harness.counters import collectives
from tests.harness.ranks import Ranks
from tests.parallel.models import CASES, LENGTH, WORDS, gpt2, images, resnet

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
    config = strategy(name, plan, **gradients)
    session = slipstream.accelerate(model, second, strategy=config)
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


@dataclass(frozen=True)
class Task:
    """A model without its loss, which a pipeline computes itself, and how it is shared."""

    build: Callable[[], torch.nn.Module]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    batch: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
    blocks: tuple[str, ...]
    plan: dict[str, Any]


class Logits(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).logits


def next_word(logits: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), words[:, 1:].flatten())


def words(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    seed = torch.Generator().manual_seed(step)
    found = torch.randint(WORDS, (4, LENGTH), generator=seed)
    return found, found


TASKS = {
    "gpt2": Task(
        lambda: Logits(gpt2(n_layer=4).inner),
        next_word,
        words,
        tuple(f"inner.transformer.h.{number}" for number in range(4)),
        {"tensor": {"ranks": 2}},
    ),
    "resnet": Task(
        lambda: Logits(resnet().inner),
        F.cross_entropy,
        images,
        (
            "inner.resnet.encoder.stages.0",
            "inner.resnet.encoder.stages.1",
            "inner.resnet.encoder.stages.1.layers.1",
            "inner.resnet.pooler",
        ),
        {
            "tensor": {
                "ranks": 2,
                "plan": {
                    "*.layer.1.convolution": "column",
                    "*.layer.1.normalization": "channels",
                    "*.layer.2.convolution": "row",
                },
            }
        },
    ),
}


def shared(
    name: str, *, tensor: bool, schedule: str | None, ranks: int = 2, micro_batches: int = 2
) -> dict[str, Any]:
    """The strategy's settings of ranks that share a model."""
    config = dict(TASKS[name].plan) if tensor else {}
    if schedule is not None:
        stages = 2 * ranks if schedule in ("interleaved_1f1b", "zero_bubble") else ranks
        cut = TASKS[name].blocks[-(stages - 1) :]
        sizes = {"ranks": ranks, "micro_batches": micro_batches}
        config["pipeline"] = {"cut": cut, "schedule": schedule, **sizes}
    return config


def trains_alike(name: str, parallel: dict[str, Any], gradients: dict[str, Any]) -> None:
    """Data, stages and split layers in any mixture, against one process on all micro-batches."""
    task = TASKS[name]
    torch.manual_seed(dist.get_rank())
    whole, model = task.build().double(), task.build().double()
    for mine in whole.state_dict().values():
        dist.broadcast(mine, 0)
    if dist.get_rank() == 0:
        model.load_state_dict(whole.state_dict())
    first = torch.optim.AdamW(whole.parameters(), lr=0.005)
    second = torch.optim.AdamW(model.parameters(), lr=0.005)
    config = {"parallel": parallel, "gradients": gradients}
    session = slipstream.accelerate(model, second, strategy=config)
    parts = parallel["pipeline"]["micro_batches"] if "pipeline" in parallel else 1
    replicas = session.data_size
    for number in range(STEPS):
        losses = []
        for replica in range(replicas):
            pairs = zip(
                *(t.chunk(parts) for t in task.batch(replicas * number + replica)), strict=True
            )
            found = [task.loss(whole(x), y) for x, y in pairs]
            torch.stack(found).mean().div(replicas).backward()
            losses.append(float(torch.stack(found).mean()))
        norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
        first.step()
        first.zero_grad()
        x, y = task.batch(replicas * number + session.data_rank)
        loss = session.forward_backward(task.loss, (x,), target=y)
        torch.testing.assert_close(session.clip_grad_norm_(0.5).double(), norm, rtol=1e-6, atol=0)
        assert session.step()
        assert float(loss) == pytest.approx(losses[session.data_rank], rel=1e-8), number
    assert "parallel" in session.report()
    state = session.full_state_dict()
    session.load_full_state_dict(state)
    session.close()
    for key, value in whole.state_dict().items():
        assert torch.equal(model.state_dict()[key], state[key]), key
        if "running" not in key and "tracked" not in key:  # of all replicas, here of the first
            torch.testing.assert_close(state[key], value, rtol=1e-6, atol=1e-8, msg=key)


MESHES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "2 data x 2 stages": ({"tensor": False, "schedule": "1f1b"}, {}),
    "2 data x 2 stages, gpipe": (
        {"tensor": False, "schedule": "gpipe", "micro_batches": 4},
        {"split": "per_layer"},
    ),
    "2 data x 2 stages, interleaved": ({"tensor": False, "schedule": "interleaved_1f1b"}, {}),
    "2 data x 2 stages, zero bubble": (
        {"tensor": False, "schedule": "zero_bubble"},
        {"split": "single"},
    ),
    "2 data x 2 tensor": ({"tensor": True, "schedule": None}, {}),
    "2 stages x 2 tensor": ({"tensor": True, "schedule": "1f1b"}, {}),
    "4 stages": ({"tensor": False, "schedule": "1f1b", "ranks": 4, "micro_batches": 4}, {}),
}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", TASKS)
def test_every_mesh_trains_as_one_process(four: Ranks, name: str, mesh: str) -> None:
    parallel, gradients = MESHES[mesh]
    four.run(trains_alike, name, shared(name, **parallel), gradients)


@pytest.fixture(scope="module")
def eight() -> Iterator[Ranks]:
    with Ranks(8) as ranks:
        yield ranks


@pytest.mark.parametrize("name", TASKS)
def test_data_stages_and_tensor_train_as_one_process(eight: Ranks, name: str) -> None:
    eight.run(trains_alike, name, shared(name, tensor=True, schedule="1f1b"), {})


def stages_with(gradients: dict[str, Any], trace: dict[str, Any]) -> None:
    """Codecs, accumulation and loss scales beside a pipeline: it trains, and replicas agree."""
    torch.manual_seed(0)
    task = TASKS["gpt2"]
    model = task.build()
    config = {"parallel": shared("gpt2", tensor=True, schedule="1f1b"), "gradients": gradients}
    accumulate = gradients.get("accumulate", 1)
    losses = []
    with slipstream.accelerate(model, sgd(model), strategy={**config, "trace": trace}) as session:
        for number in range(4 * accumulate):
            x, y = task.batch(0)
            loss = session.forward_backward(task.loss, (x,), target=y, loss_scale=8.0)
            assert session.step() == ((number + 1) % accumulate == 0)
            losses.append(float(loss))
        kept = session.state_dict()
        session.load_state_dict(kept)
        with pytest.raises(UsageError, match=r"call session\.forward_backward"):
            session.backward(loss.requires_grad_())
        own = {n: p.detach() for n, p in model.named_parameters() if session._shared.holds(n)}
        every: list[Any] = [None] * 8
        dist.all_gather_object(every, (losses, own))
    assert losses[-1] < losses[0]
    assert all(other[0] == losses for other in every)
    for rank in range(4):
        mine, theirs = every[rank][1], every[rank + 4][1]
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize(
    "gradients",
    [{"codec": {"kind": "onebit", "start_step": 1}}, {"codec": "half", "accumulate": 2}],
    ids=["onebit", "half, accumulated"],
)
def test_codecs_and_accumulation_go_with_stages(eight: Ranks, gradients, tmp_path) -> None:
    eight.run(stages_with, gradients, {"steps": 1, "folder": str(tmp_path)})
    assert list(tmp_path.iterdir())


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
    config = {**TENSOR, "gradients": {"codec": codec}}
    for interrupted in (False, True):
        torch.manual_seed(0)
        model = CASES["gpt2"].build()
        optimizer = sgd(model)
        session = slipstream.accelerate(model, optimizer, strategy=config)
        losses = []
        for number in range(6):
            if interrupted and number == 3:
                kept, full = session.state_dict(), session.full_state_dict()
                session.close()
                model = CASES["gpt2"].build()
                optimizer = sgd(model)
                session = slipstream.accelerate(model, optimizer, strategy=config)
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
    config = strategy("gpt2", plan, codec=codec, split=split)
    with slipstream.accelerate(model, sgd(model), strategy=config) as session:
        for number in range(4):
            loss = session.model(*CASES["gpt2"].batch(2 * number + session.data_rank))
            session.backward(loss)
            session.step()
        shared = session._shared.split.shards
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
def test_an_overflow_in_one_share_skips_the_update_of_all(four: Ranks, codec) -> None:
    four.run(overflows_together, codec)


def alone_on_the_data_axis() -> None:
    model = CASES["gpt2"].build()
    config = {"parallel": {"tensor": {"ranks": 4}}}
    batches = [CASES["gpt2"].batch(0)] * 3
    with slipstream.accelerate(model, sgd(model), batches, strategy=config) as session:
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


def sessions_that_end_in_an_error() -> None:
    """What is left is a part of the model, which no session takes for the whole."""
    for tensor, schedule in ((True, None), (False, "1f1b")):
        parallel = shared("gpt2", tensor=tensor, schedule=schedule)
        model = TASKS["gpt2"].build()
        session = slipstream.accelerate(model, sgd(model), strategy={"parallel": parallel})
        with pytest.raises(ZeroDivisionError), session:
            raise ZeroDivisionError
        with pytest.raises(UsageError, match="has a part of it only; build it anew"):
            slipstream.accelerate(model, sgd(model))
        model = TASKS["gpt2"].build()
        slipstream.accelerate(model, sgd(model), strategy={"parallel": parallel}).close()
        slipstream.accelerate(model, sgd(model), strategy={"parallel": parallel}).close()


def test_a_part_of_a_model_is_not_taken_for_the_whole(four: Ranks) -> None:
    four.run(sessions_that_end_in_an_error)


def evaluates_and_resumes(parallel: dict[str, Any]) -> None:
    """Evaluation between updates, and an optimizer's state that outlives the session."""
    task = TASKS["gpt2"]
    runs = []
    for interrupted in (False, True):
        torch.manual_seed(0)
        model = task.build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        config = {"parallel": parallel}
        session = slipstream.accelerate(model, optimizer, strategy=config)
        for number in range(4):
            x, y = task.batch(number)
            if interrupted and number == 2:
                saved = session.full_state_dict(), session.full_optimizer_state_dict()
                session.close()
                kept = optimizer.state_dict()["state"]
                for index, values in saved[1]["state"].items():
                    assert all(map(torch.equal, values.values(), kept[index].values()))
                model = task.build()
                optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
                session = slipstream.accelerate(model, optimizer, strategy=config)
                session.load_full_state_dict(saved[0])
                session.load_full_optimizer_state_dict(saved[1])
            loss = session.forward_backward(task.loss, (x,), target=y)
            session.step()
        logits = session.evaluate(task.batch(9)[0])
        assert not logits.requires_grad
        if "pipeline" in parallel:
            with pytest.raises(UsageError, match="split into stages; allowed: forward_backward"):
                session.model(x)
        runs.append((float(loss), logits))
        session.close()
        torch.testing.assert_close(model.eval()(task.batch(9)[0]), logits)
    assert runs[0][0] == runs[1][0]
    assert torch.equal(runs[0][1], runs[1][1])


@pytest.mark.parametrize("schedule", [None, "1f1b"], ids=["split", "split and staged"])
def test_models_are_evaluated_and_optimizers_resumed(four: Ranks, schedule) -> None:
    four.run(evaluates_and_resumes, shared("gpt2", tensor=True, schedule=schedule))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "ranks": ({"parallel": {"tensor": {"ranks": 3}}}, "take 3 ranks, but 4 were started"),
    "optimal": ({**TENSOR, "gradients": {"split": "optimal"}}, "with gradients.split optimal"),
    "adaptive": (
        {**TENSOR, "gradients": {"codec": {"kind": "adaptive", "codec": "int8"}}},
        "with gradients.codec adaptive",
    ),
    "no such module": ({"parallel": {"pipeline": {"ranks": 2, "cut": ["inner.h"]}}}, "inner.h"),
    "cuts": (
        {"parallel": {"pipeline": {"ranks": 4, "cut": ["inner.transformer.h.1"]}}},
        "cut at 1 modules makes 2 stages, on 4 ranks",
    ),
    "sequence": (
        {
            "parallel": {
                "tensor": {"ranks": 2, "sequence": True},
                "pipeline": {"ranks": 2, "cut": ["inner.transformer.h.1"]},
            }
        },
        "parallel.pipeline with inner.transformer.h.0.attn.c_attn split along the sequence",
    ),
    "heads": (
        {"parallel": {"tensor": {"ranks": 4, "plan": {"*.attn.c_attn": "column", "no": "row"}}}},
        "no module matches 'no'",
    ),
}


def refused(config: dict[str, Any], said: str) -> None:
    model = CASES["gpt2"].build()
    shapes = [p.shape for p in model.parameters()]
    with pytest.raises((StrategyError, ModelError), match=re.escape(said)):
        slipstream.accelerate(model, sgd(model), strategy=config)
    assert shapes == [p.shape for p in model.parameters()]


@pytest.mark.parametrize(("config", "said"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_go_together_is_refused_with_the_reason(four, config, said) -> None:
    four.run(refused, config, said)


def lamb_is_refused() -> None:
    model = CASES["gpt2"].build()
    with pytest.raises(StrategyError, match="with Lamb: it works with whole"):
        slipstream.accelerate(model, Lamb(model.named_parameters(), lr=0.01), strategy=TENSOR)
    with pytest.raises(StrategyError, match="with Adafactor: it works with whole"):
        slipstream.accelerate(model, torch.optim.Adafactor(model.parameters()), strategy=TENSOR)
    frozen = TASKS["gpt2"].build()
    frozen.inner.transformer.requires_grad_(False)
    frozen.inner.transformer.h[3].requires_grad_(True)
    config = {"parallel": shared("gpt2", tensor=False, schedule="1f1b")}
    with pytest.raises(ModelError, match="pipeline rank 0 have no parameter that requires"):
        slipstream.accelerate(frozen, sgd(frozen), strategy=config)
    whole = TASKS["gpt2"].build()
    indices = {**config, "gradients": {"split": {"kind": "by_index", "last": [1, 51]}}}
    with pytest.raises(StrategyError, match=r"with gradients\.split by_index"):
        slipstream.accelerate(whole, sgd(whole), strategy=indices)
    plan = {} if dist.get_rank() else {"parallel": {"tensor": {"ranks": 2}}}
    with pytest.raises(MismatchError, match="the strategy"):
        slipstream.accelerate(model, sgd(model), strategy=plan)


def test_layerwise_optimizers_and_strategies_that_differ_are_refused(four: Ranks) -> None:
    four.run(lamb_is_refused)


def different_batches_of_stages() -> None:
    task, model = TASKS["gpt2"], TASKS["gpt2"].build()
    config = {"parallel": shared("gpt2", tensor=False, schedule="1f1b")}
    with slipstream.accelerate(model, sgd(model), strategy=config) as session:
        x, y = task.batch(dist.get_rank())
        with pytest.raises(MismatchError, match="ranks 0 and 1 train one model, but got different"):
            session.forward_backward(task.loss, (x,), target=y)


def different_batches() -> None:
    assert slipstream.data_share(TENSOR) == (dist.get_rank() // 2, 2)
    model = CASES["gpt2"].build()
    with slipstream.accelerate(model, sgd(model), strategy=TENSOR) as session:
        loss = session.model(*CASES["gpt2"].batch(dist.get_rank()))
        with pytest.raises(MismatchError, match="ranks 0 and 1 train the layers"):
            session.backward(loss)


def test_ranks_that_share_a_model_must_train_on_the_same_batches(four: Ranks) -> None:
    four.run(different_batches)
    four.run(different_batches_of_stages)
