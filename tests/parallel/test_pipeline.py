"""A pipeline of real ranks against one process: the same losses, gradients and weights."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from slipstream import comm
from slipstream.parallel import Pipeline
from tests.harness.ranks import Ranks
from tests.parallel.staged import CASES, make

STEPS = 5
TWO = [
    ("gpipe", 1, 2),
    ("gpipe", 4, 2),
    ("1f1b", 2, 2),
    ("1f1b", 4, 2),
    ("interleaved_1f1b", 4, 4),
    ("zero_bubble", 4, 2),
    ("zero_bubble", 2, 4),
]
FOUR = [
    ("gpt2", "1f1b", 4, 4),
    ("gpt2", "gpipe", 2, 4),
    ("positions", "zero_bubble", 4, 4),
    ("resnet", "interleaved_1f1b", 4, 8),
]


def one_process(name: str, parts: int) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """The whole batch at once, except where batch statistics depend on its parts."""
    return _train_alone(name, parts if CASES[name].batch_statistics else 1)


@cache
def _train_alone(name: str, parts: int) -> tuple[list[torch.Tensor], dict[str, Any]]:
    case = CASES[name]
    model, optimizer = make(case)
    losses = []
    for step in range(STEPS):
        args, kwargs, target = case.batch(step)
        chunks = [x.chunk(parts) for x in (*args, *kwargs.values(), target)]
        total = 0.0
        for *inputs, y in zip(*chunks, strict=True):
            given = dict(zip(kwargs, inputs[len(args) :], strict=True))
            loss = case.loss(model(*inputs[: len(args)], **given), y) / parts
            loss.backward()
            total += loss.detach()
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return losses, model.state_dict()


def pipelined(name: str, schedule: str, parts: int, stages: int) -> tuple[Any, Any, Any]:
    case = CASES[name]
    model, optimizer = make(case)
    names = list(model.state_dict())
    pipeline = Pipeline(model, cut=case.cuts[stages], schedule=schedule, micro_batches=parts)  # type: ignore[arg-type]
    losses = []
    for step in range(STEPS):
        args, kwargs, target = case.batch(step)
        losses.append(pipeline.forward_backward(case.loss, args, kwargs, target))
        optimizer.step()
        optimizer.zero_grad()
    full = pipeline.full_state_dict()
    assert [*model.state_dict(keep_vars=True)] == names
    pipeline.close()
    return losses, full, model.state_dict()


def check(team: Ranks, name: str, schedule: str, parts: int, stages: int) -> None:
    losses, state = one_process(name, parts)
    for own_losses, full, closed in team.run(pipelined, name, schedule, parts, stages):
        torch.testing.assert_close(own_losses, losses, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(full, state, rtol=1e-8, atol=1e-10)
        assert closed.keys() == full.keys() == state.keys()
        assert all(torch.equal(closed[key], full[key]) for key in full)
    assert losses[-1] != losses[0]


@pytest.mark.parametrize(("schedule", "parts", "stages"), TWO)
@pytest.mark.parametrize("name", ["gpt2", "resnet", "positions"])
def test_two_ranks_train_as_one_process(two, name, schedule, parts, stages) -> None:
    check(two, name, schedule, parts, stages)


@pytest.mark.parametrize(("name", "schedule", "parts", "stages"), FOUR)
def test_four_ranks_train_as_one_process(four, name, schedule, parts, stages) -> None:
    check(four, name, schedule, parts, stages)


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_blocks_may_be_recomputed_in_backward(two, schedule) -> None:
    check(two, "recomputed", schedule, 2, 2)


def side_by_side() -> Any:
    """Two pipelines of two ranks each, in the columns of a mesh of four."""
    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    case = CASES["gpt2"]
    model, _ = make(case)
    column = dist.get_rank() % 2
    pipeline = Pipeline(model, groups[column], cut=case.cuts[2], micro_batches=4)
    loss = pipeline.forward_backward(case.loss, *case.batch(column))
    pipeline.close()
    return loss


def test_pipelines_run_side_by_side(four) -> None:
    case = CASES["gpt2"]
    model, _ = make(case)
    losses = four.run(side_by_side)
    for rank, loss in enumerate(losses):
        _, kwargs, target = case.batch(rank % 2)
        torch.testing.assert_close(loss, case.loss(model(**kwargs), target).detach())
    assert losses[0] == losses[2] != losses[1]


def plain_and_ours(schedule: str) -> tuple[Any, Any]:
    """Gradients of this rank's stage: of the example's schedule of send and recv, and of ours."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh()).double()
    x, y = (part.double() for part in torch.randn(2, 8, 6))
    x, y = x[:, :5], y.softmax(1)
    stage = model[2 * rank : 2 * rank + 2]
    losses, graphs = [], []
    for inputs, targets in zip(x.chunk(4), y.chunk(4), strict=True):
        with comm.graph() as graph:
            hidden = stage(inputs if rank == 0 else comm.recv(0))
            if rank == 0:
                comm.send(hidden, to=1)
            else:
                losses.append(F.cross_entropy(hidden, targets) / 4)
        graphs.append(graph)
    for number, graph in enumerate(graphs):
        comm.backward(losses[number] if losses else None, graph)
    plain = [p.grad.clone() for p in stage.parameters()]
    model.zero_grad()
    pipeline = Pipeline(model, cut=["2"], schedule=schedule, micro_batches=4)
    pipeline.forward_backward(F.cross_entropy, (x,), target=y)
    return plain, [p.grad for p in stage.parameters()]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
def test_gradients_are_those_of_send_and_recv(two, schedule) -> None:
    for plain, ours in two.run(plain_and_ours, schedule):
        torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-15)


def without_parameters(schedule: str, cut: str) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Tanh(), nn.Linear(3, 3), nn.Linear(3, 3), nn.Tanh())
    pipeline = Pipeline(model, cut=[cut], schedule=schedule, micro_batches=2)
    pipeline.forward_backward(F.mse_loss, (torch.ones(4, 3),), target=torch.ones(4, 3))
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize(("cut", "owner"), [("1", 1), ("3", 0)])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
def test_a_stage_may_have_no_parameters(two, schedule, cut, owner) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Tanh(), nn.Linear(3, 3), nn.Linear(3, 3), nn.Tanh())
    F.mse_loss(model(torch.ones(4, 3)), torch.ones(4, 3)).backward()
    actual = two.run(without_parameters, schedule, cut)
    torch.testing.assert_close(actual[owner], [p.grad for p in model.parameters()])
    assert actual[1 - owner] == [None] * 4


# Gradients.


def gradients_of(name: str, schedule: str, parts: int, stages: int) -> dict[str, Any]:
    """After two calls without zeroing, the second of them scaled by 3; who has which."""
    case = CASES[name]
    model, _ = make(case)
    pipeline = Pipeline(model, cut=case.cuts[stages], schedule=schedule, micro_batches=parts)
    for step, scale in ((0, 1.0), (1, 3.0)):
        pipeline.forward_backward(case.loss, *case.batch(step), scale=scale)
    gradients = {name: p.grad for name, p in model.named_parameters()}
    with torch._C.DisableTorchFunctionSubclass():  # those of other stages refuse to be looked at
        memory = {name: p.untyped_storage().nbytes() for name, p in model.named_parameters()}
    replicated = [ranks for _, ranks in pipeline.stage_parameters.replicated]
    pipeline.close()
    return {"gradients": gradients, "memory": memory, "replicated": replicated}


def expected_gradients(name: str) -> dict[str, torch.Tensor | None]:
    case = CASES[name]
    model, _ = make(case)
    for step, scale in ((0, 1.0), (1, 3.0)):
        args, kwargs, target = case.batch(step)
        (scale * case.loss(model(*args, **kwargs), target)).backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("name", "both"),
    [("gpt2", {"transformer.wte.weight"}), ("positions", {"position", "scale", "words.weight"})],
)
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_gradients_accumulate_and_those_of_replicated_parameters_are_summed(
    two, name, schedule, both
):
    actual = two.run(gradients_of, name, schedule, 4, 2)
    local_names = [{n for n, g in one["gradients"].items() if g is not None} for one in actual]
    twice = {"twice.weight", "twice.bias"} if name == "positions" else set()
    assert local_names[0] & local_names[1] == both | twice
    for key, gradient in expected_gradients(name).items():
        owned = [
            o["gradients"][key] for o, keys in zip(actual, local_names, strict=True) if key in keys
        ]
        assert bool(owned) == (gradient is not None), key  # frozen.weight has none
        for local in owned:
            torch.testing.assert_close(local, gradient, rtol=1e-10, atol=1e-13)
        if len(owned) == 2:
            assert torch.equal(*owned)
    assert actual[0]["replicated"] == actual[1]["replicated"] == [(0, 1)] * len(both | twice)


class SometimesScaled(nn.Sequential):
    """Parameters of the whole model, which both stages hold; the second one is never used."""

    scales = True

    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 3), nn.Linear(3, 1))
        self.scale, self.unused = (nn.Parameter(torch.full((2,), 2.0)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self[1](self[0](x))
        return y * self.scale[0] if self.scales else y


def unused_parameters(stages: bool) -> list[tuple[torch.Tensor | None, torch.Tensor | None]]:
    """Gradients of both after a pass that uses one, after one more that does not, and after that
    alone."""
    torch.manual_seed(0)
    model = SometimesScaled()
    x, y = torch.ones(4, 3), torch.zeros(4, 1)
    pipeline = Pipeline(model, cut=["1"], micro_batches=2) if stages else None
    found = []
    for scales in (True, False, None):
        if scales is None:
            model.zero_grad()
        model.scales = bool(scales)
        if pipeline is not None:
            pipeline.forward_backward(F.mse_loss, (x,), target=y)
        else:
            F.mse_loss(model(x), y).backward()
        grads = (model.scale.grad, model.unused.grad)
        found.append(tuple(None if g is None else g.clone() for g in grads))
    if pipeline is not None:
        pipeline.close()
    return found  # type: ignore[return-value]


def test_a_parameter_that_no_stage_has_used_has_no_gradient(two) -> None:
    expected = unused_parameters(stages=False)
    for actual in two.run(unused_parameters, True):
        for (scale, unused), (plain, _) in zip(actual, expected, strict=True):
            assert unused is None
            torch.testing.assert_close(scale, plain)
    assert [scale is None for scale, _ in expected] == [False, False, True]


def test_parameters_of_other_stages_keep_no_memory(two) -> None:
    first, second = (one["memory"] for one in two.run(gradients_of, "gpt2", "1f1b", 4, 2))
    assert first["transformer.h.1.mlp.c_fc.weight"] == 32 * 128 * 8
    assert second["transformer.h.1.mlp.c_fc.weight"] == 8
    assert first["transformer.h.2.mlp.c_fc.weight"] == 8
    assert first["transformer.ln_f.weight"] == 8
    assert first["transformer.wte.weight"] == second["transformer.wte.weight"] == 101 * 32 * 8
    assert second["transformer.wpe.weight"] == 8


def after_frozen(schedule: str) -> list[torch.Tensor | None]:
    """The first stage is frozen; then it is not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1)).double()
    model[0].requires_grad_(False)
    pipeline = Pipeline(model, cut=["1"], schedule=schedule, micro_batches=2)
    x, y = torch.ones(4, 3, dtype=torch.float64), torch.ones(4, 1, dtype=torch.float64)
    actual = []
    for _ in range(2):
        pipeline.forward_backward(F.mse_loss, (x,), target=y)
        actual.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        model.zero_grad()
        model[0].requires_grad_(True)
    pipeline.close()
    return actual


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
def test_a_stage_may_be_frozen_and_thawed(two, schedule) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1)).double()
    x, y = torch.ones(4, 3, dtype=torch.float64), torch.ones(4, 1, dtype=torch.float64)
    F.mse_loss(model(x), y).backward()
    whole = [p.grad for p in model.parameters()]
    first, second = two.run(after_frozen, schedule)
    assert first[0] == [None] * 6
    torch.testing.assert_close(first[1][:2] + second[1][2:], whole)
    torch.testing.assert_close(second[0][2:], whole[2:])
