"""Data and model parallelism through ``accelerate()`` train as one process does, on any mesh."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import slipstream
from slipstream.errors import UsageError
from tests.harness.ranks import Ranks
from tests.parallel.models import CASES
from tests.parallel.session_tasks import (
    STEPS,
    TASKS,
    one_process,
    parallel_config,
    sgd,
    strategy,
)


def trains_as_one_process(name: str, plan: str, gradients: dict[str, Any]) -> None:
    """Two replicas of two ranks each, against one process on both replicas' batches."""
    case = CASES[name]
    plain = one_process(CASES, name, replicas=2, lr=0.01)
    torch.manual_seed(1 + dist.get_rank())
    model = case.build().double()
    if dist.get_rank() == 0:  # the session starts all ranks from the first one's values
        model.load_state_dict(plain.before)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    config = strategy(name, plan, **gradients)
    session = slipstream.accelerate(model, optimizer, strategy=config)
    assert (session.data_size, session.data_rank) == (2, dist.get_rank() // 2)
    for number in range(STEPS):
        loss = session.model(*case.batch(2 * number + session.data_rank))
        session.backward(loss)
        norm = session.clip_grad_norm_(0.5).double()
        torch.testing.assert_close(norm, plain.norms[number], rtol=1e-5, atol=0)
        assert session.step()
        expected = plain.losses[number][session.data_rank]
        assert float(loss) == pytest.approx(expected, rel=1e-6), number
    state = session.checkpoint("model")["model"]
    session.close()
    for name, value in plain.after.items():
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


def trains_alike(name: str, parallel: dict[str, Any], gradients: dict[str, Any]) -> None:
    """Data, stages and split layers in any mixture, against one process on all micro-batches."""
    task = TASKS[name]
    ranks_of_a_model = (parallel.get("pipeline") or {}).get("ranks", 1) * (
        parallel.get("tensor") or {}
    ).get("ranks", 1)
    replicas = dist.get_world_size() // ranks_of_a_model
    parts = parallel["pipeline"]["micro_batches"] if "pipeline" in parallel else 1
    plain = one_process(TASKS, name, replicas=replicas, lr=0.005, parts=parts)
    torch.manual_seed(1 + dist.get_rank())
    model = task.build().double()
    if dist.get_rank() == 0:  # the session starts all ranks from the first one's values
        model.load_state_dict(plain.before)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005)
    config = {"parallel": parallel, "gradients": gradients}
    session = slipstream.accelerate(model, optimizer, strategy=config)
    assert session.data_size == replicas
    for number in range(STEPS):
        x, y = task.batch(replicas * number + session.data_rank)
        loss = session.forward_backward(task.loss, (x,), target=y)
        norm = session.clip_grad_norm_(0.5).double()
        torch.testing.assert_close(norm, plain.norms[number], rtol=1e-6, atol=0)
        assert session.step()
        expected = plain.losses[number][session.data_rank]
        assert float(loss) == pytest.approx(expected, rel=1e-8), number
    report = session.report()
    assert "parallel" in report
    assert ("begin at" in report) == ("pipeline" in parallel)
    state = session.checkpoint("model")["model"]
    session.restore({"model": state})
    session.close()
    for key, value in plain.after.items():
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
    "2 data x 2 stages, cut by parameters": (
        {"tensor": False, "schedule": "interleaved_1f1b", "cut": False},
        {},
    ),
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
    four.run(trains_alike, name, parallel_config(name, **parallel), gradients)


@pytest.fixture(scope="module")
def eight() -> Iterator[Ranks]:
    with Ranks(8) as ranks:
        yield ranks


@pytest.mark.parametrize("name", TASKS)
def test_data_stages_and_tensor_train_as_one_process(eight: Ranks, name: str) -> None:
    eight.run(trains_alike, name, parallel_config(name, tensor=True, schedule="1f1b"), {})


def stages_with(gradients: dict[str, Any], trace: dict[str, Any]) -> None:
    """Codecs, accumulation and loss scales beside a pipeline: it trains, and replicas agree."""
    torch.manual_seed(0)
    task = TASKS["gpt2"]
    model = task.build()
    config = {
        "parallel": parallel_config("gpt2", tensor=True, schedule="1f1b"),
        "gradients": gradients,
    }
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
        is_local = session._loop.sharding.model.is_local
        local = {n: p.detach() for n, p in model.named_parameters() if is_local(n)}
        gathered: list[Any] = [None] * 8
        dist.all_gather_object(gathered, (losses, local))
    assert losses[-1] < losses[0]
    assert all(other[0] == losses for other in gathered)
    for rank in range(4):
        mine, theirs = gathered[rank][1], gathered[rank + 4][1]
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize(
    "gradients",
    [{"codec": {"kind": "onebit", "start_step": 1}}, {"codec": "half", "accumulate": 2}],
    ids=["onebit", "half, accumulated"],
)
def test_codecs_and_accumulation_go_with_stages(eight: Ranks, gradients, tmp_path) -> None:
    eight.run(stages_with, gradients, {"steps": 1, "folder": str(tmp_path)})
    assert list(tmp_path.iterdir())


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
        gathered: list[Any] = [None] * 4
        dist.all_gather_object(gathered, losses)
        assert gathered == [losses] * 4
        assert losses[-1] < losses[0]
        assert "tensor" in session.report()


def test_all_ranks_may_train_one_model(four: Ranks) -> None:
    four.run(alone_on_the_data_axis)


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
                saved = session.checkpoint("model", "optimizer")
                session.close()
                kept = optimizer.state_dict()["state"]
                for index, values in saved["optimizer"]["state"].items():
                    assert all(map(torch.equal, values.values(), kept[index].values()))
                model = task.build()
                optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
                session = slipstream.accelerate(model, optimizer, strategy=config)
                session.restore(saved)
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
    four.run(evaluates_and_resumes, parallel_config("gpt2", tensor=True, schedule=schedule))
