"""A pipeline of real ranks against one process: the same losses, gradients and weights."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.nn import functional as F

from slipstream import comm
from slipstream.errors import (
    ExchangeError,
    MismatchError,
    ModelError,
    StrategyError,
    UsageError,
)
from slipstream.parallel import Pipeline, ideal_bubble, measured_bubble
from slipstream.trace import chrome
from slipstream.trace.event import STAGE_BACKWARD, STAGE_FORWARD, STAGE_WEIGHT
from slipstream.trace.recorder import Recorder
from slipstream.trace.summary import document
from tests.harness.ranks import PerRank, Ranks
from tests.parallel.staged import CASES, SAMPLES, Case

STEPS = 20
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


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2, timeout=60.0) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with Ranks(4, timeout=100.0) as ranks:
        yield ranks


def make(case: Case) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = case.build()
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def one_process(name: str, parts: int) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """The whole batch at once, but where its statistics matter."""
    case = CASES[name]
    model, optimizer = make(case)
    losses = []
    parts = parts if case.batch_statistics else 1
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
    assert list(model.state_dict()) == names
    pipeline.close()
    return losses, full, model.state_dict()


def check(team: Ranks, name: str, schedule: str, parts: int, stages: int) -> None:
    losses, state = one_process(name, parts)
    for own, full, closed in team.run(pipelined, name, schedule, parts, stages):
        torch.testing.assert_close(own, losses, rtol=1e-10, atol=1e-12)
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
def test_blocks_may_be_computed_again_in_backward(two, schedule) -> None:
    check(two, "recomputed", schedule, 2, 2)


def side_by_side() -> Any:
    """Two pipelines of two ranks each, in the columns of a mesh of four."""
    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    case = CASES["gpt2"]
    model, _ = make(case)
    own = dist.get_rank() % 2
    pipeline = Pipeline(model, groups[own], cut=case.cuts[2], micro_batches=4)
    loss = pipeline.forward_backward(case.loss, *case.batch(own))
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
    found = two.run(without_parameters, schedule, cut)
    torch.testing.assert_close(found[owner], [p.grad for p in model.parameters()])
    assert found[1 - owner] == [None] * 4


# Gradients.


def gradients_of(name: str, schedule: str, parts: int, stages: int) -> dict[str, Any]:
    """After two calls without zeroing, the second of them scaled by 3; who has which."""
    case = CASES[name]
    model, _ = make(case)
    pipeline = Pipeline(model, cut=case.cuts[stages], schedule=schedule, micro_batches=parts)
    for step, scale in ((0, 1.0), (1, 3.0)):
        pipeline.forward_backward(case.loss, *case.batch(step), scale=scale)
    found = {name: p.grad for name, p in model.named_parameters()}
    memory = {name: p.untyped_storage().nbytes() for name, p in model.named_parameters()}
    shared = [ranks for _, ranks in pipeline.holdings.shared]
    pipeline.close()
    return {"gradients": found, "memory": memory, "shared": shared}


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
def test_gradients_add_up_and_those_of_shared_parameters_are_sums(two, name, schedule, both):
    found = two.run(gradients_of, name, schedule, 4, 2)
    held = [{n for n, g in one["gradients"].items() if g is not None} for one in found]
    twice = {"twice.weight", "twice.bias"} if name == "positions" else set()
    assert held[0] & held[1] == both | twice
    for key, gradient in expected_gradients(name).items():
        owned = [o["gradients"][key] for o, keys in zip(found, held, strict=True) if key in keys]
        assert bool(owned) == (gradient is not None), key  # frozen.weight has none
        for own in owned:
            torch.testing.assert_close(own, gradient, rtol=1e-10, atol=1e-13)
        if len(owned) == 2:
            assert torch.equal(*owned)
    assert found[0]["shared"] == found[1]["shared"] == [(0, 1)] * len(both | twice)


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
    found = []
    for _ in range(2):
        pipeline.forward_backward(F.mse_loss, (x,), target=y)
        found.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        model.zero_grad()
        model[0].requires_grad_(True)
    pipeline.close()
    return found


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


# What travels, what computes.


def counted(stages: int, schedule: str) -> tuple[dict[str, int], dict[str, int]]:
    """Calls of every module, and bytes sent forward and back, of one batch."""
    case = CASES["gpt2"]
    model, _ = make(case)
    calls: dict[str, int] = {}
    for name, module in model.named_modules():
        module.register_forward_hook(
            lambda *_, name=name: calls.__setitem__(name, calls.get(name, 0) + 1)
        )
    pipeline = Pipeline(model, cut=case.cuts[stages], schedule=schedule, micro_batches=4)
    pipeline.forward_backward(case.loss, *case.batch(0))
    calls.clear()
    sent = {"forward": 0, "back": 0}
    own = {"forward": PipelineStage.get_fwd_send_ops, "back": PipelineStage.get_bwd_send_ops}

    def counting(way: str) -> Any:
        def ops(self: PipelineStage, chunk: int) -> list[Any]:
            found = own[way](self, chunk)
            sent[way] += sum(op.tensor.nbytes for op in found)
            return found

        return ops

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PipelineStage, "get_fwd_send_ops", counting("forward"))
        patch.setattr(PipelineStage, "get_bwd_send_ops", counting("back"))
        pipeline.forward_backward(case.loss, *case.batch(1))
    pipeline.close()
    return calls, sent


@pytest.mark.parametrize(("schedule", "stages"), [("1f1b", 2), ("interleaved_1f1b", 4)])
def test_one_tensor_travels_and_stand_ins_do_not_compute(two, schedule, stages) -> None:
    found = two.run(counted, stages, schedule)
    hidden = SAMPLES * 10 * 32 * 8
    bytes_sent = [sent for _, sent in found]
    assert sum(s["forward"] for s in bytes_sent) == (stages - 1) * hidden
    assert sum(s["back"] for s in bytes_sent) == (stages - 1) * hidden
    first, second = (calls for calls, _ in found)
    for block in range(4):
        stage = block * stages // 4
        ran = [calls.get(f"transformer.h.{block}.mlp.c_fc", 0) for calls in (first, second)]
        assert ran == [4, 0] if stage % 2 == 0 else [0, 4]
    assert first["transformer.wte"] == 4
    assert "transformer.wte" not in second
    assert second["lm_head"] == 4
    assert "lm_head" not in first


def shapes_and_evaluation() -> list[Any]:
    case = CASES["gpt2"]
    model, _ = make(case)
    pipeline = Pipeline(model, cut=case.cuts[2], micro_batches=2)
    args, kwargs, target = case.batch(0)
    found: list[Any] = []
    for samples, words in ((8, 10), (4, 7), (8, 10)):
        inputs = {"input_ids": kwargs["input_ids"][:samples, :words]}
        labels = target[:samples, :words]
        found.append(pipeline.forward_backward(case.loss, args, inputs, labels))
        found.append(pipeline.evaluate(args, inputs).logits)
    model.eval()
    before = torch.get_rng_state()
    found.append(pipeline.evaluate(args, kwargs).logits)
    assert torch.equal(before, torch.get_rng_state())
    pipeline.close()
    pipeline.close()
    with pytest.raises(UsageError, match=r"forward_backward\(\) of a pipeline that is closed"):
        pipeline.forward_backward(case.loss, args, kwargs, target)
    return found


def test_shapes_may_change_and_evaluation_gives_outputs_everywhere(two) -> None:
    case = CASES["gpt2"]
    model, _ = make(case)
    _, kwargs, target = case.batch(0)
    expected = []
    for samples, words in ((8, 10), (4, 7), (8, 10)):
        output = model(kwargs["input_ids"][:samples, :words])
        expected += [case.loss(output, target[:samples, :words]).detach(), output.logits.detach()]
    expected.append(expected[-1])
    for found in two.run(shapes_and_evaluation):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def statistics() -> tuple[torch.Tensor, torch.Tensor]:
    """Buffers before and after an evaluation in training mode, and a state that is loaded."""
    case = CASES["resnet"]
    model, _ = make(case)
    pipeline = Pipeline(model, cut=case.cuts[2], micro_batches=2)
    args, _, _ = case.batch(0)
    before = model.layer4[1].bn2.running_mean.clone()
    pipeline.evaluate(args)
    assert torch.equal(before, model.layer4[1].bn2.running_mean)
    state = {key: torch.ones_like(value) for key, value in pipeline.full_state_dict().items()}
    pipeline.load_full_state_dict(state)
    again = pipeline.full_state_dict()
    assert all(torch.equal(again[key], state[key]) for key in state)
    for odd, message in (
        ({"fc.bias": torch.ones(3)}, "missing or unexpected names"),
        ({**state, "fc.bias": torch.ones(3)}, r"fc.bias of shape \[3\]; allowed: .* \[10\]"),
    ):
        with pytest.raises(ModelError, match=message):
            pipeline.load_full_state_dict(odd)
    pipeline.close()
    return model.state_dict()


def test_a_state_is_loaded_and_evaluation_leaves_statistics_alone(two) -> None:
    for state in two.run(statistics):
        assert all(bool((value == 1).all()) for value in state.values())


# Errors.


def refused(settings: dict[str, Any], call: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1), nn.Tanh())
    pipeline = Pipeline(model, **{"cut": ["1"], "micro_batches": 2, **settings})
    given = {"loss_fn": F.mse_loss, "args": (torch.ones(4, 3),), "target": torch.ones(4, 1)}
    pipeline.forward_backward(**given | call)


class Weird(nn.Module):
    """A loss that is none, by a name that is its value."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, output: Any, target: Any) -> Any:
        if self.kind == "raises":
            raise ValueError("no such label")
        return {"vector": output, "number": 3.0, "constant": torch.ones(())}[self.kind]


@pytest.mark.parametrize(
    ("settings", "call", "error", "message"),
    [
        ({"cut": ["7"]}, {}, ModelError, r"cut at '7', but Sequential has no module .* allowed"),
        ({"cut": ["1", "2"]}, {}, StrategyError, "2 cuts make 3 stages, on 2 ranks; allowed: 1 cu"),
        ({"cut": ["1", "2", "3"]}, {}, StrategyError, "1f1b runs one stage a rank, not 2"),
        ({"schedule": "zb"}, {}, StrategyError, "schedule 'zb'; allowed: gpipe, 1f1b, interl"),
        ({"micro_batches": 1}, {}, StrategyError, "1 micro-batches on 2 stages; .* 2 or more"),
        ({"micro_batches": 0, "schedule": "gpipe"}, {}, StrategyError, "allowed: 1 or more"),
        (
            {"micro_batches": 5, "schedule": "zero_bubble"},
            {},
            StrategyError,
            "5 micro-batches on 2 ranks; allowed by zero_bubble: a multiple of the ranks, e.g. 4",
        ),
        ({}, {"args": (torch.ones(5, 3),)}, StrategyError, "batch of 5 samples in 2 micro-batches"),
        ({}, {"args": (), "target": None}, StrategyError, "a batch without a tensor"),
        ({}, {"args": torch.ones(4, 3)}, StrategyError, r"args is a Tensor; allowed: .* \(x,\)"),
        ({}, {"loss_fn": Weird("vector")}, ModelError, r"stage 1 on rank 1: .* shape \[2, 1\]"),
        ({}, {"loss_fn": Weird("number")}, ModelError, "loss_fn returned a float; allowed: a fl"),
        ({}, {"loss_fn": Weird("constant")}, ModelError, "the loss requires no gradient"),
        ({}, {"loss_fn": Weird("raises")}, ModelError, "stage 1 on rank 1: ValueError: no such la"),
        ({}, {"args": (torch.ones(4, 5),)}, ModelError, "stage 0 on rank 0: RuntimeError: mat1"),
    ],
)
def test_mistakes_are_errors_on_every_rank(two, settings, call, error, message) -> None:
    for rank, found in two.fail(refused, settings, call).items():
        if isinstance(found, MismatchError):  # the others name the rank that has the error
            assert rank
            assert "cannot go on" in str(found)
            continue
        with pytest.raises(error, match=message):
            raise found


def settings_differ(cut: list[str]) -> None:
    Pipeline(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)), cut=cut)


def test_ranks_must_give_the_same_settings(two) -> None:
    for error in two.fail(settings_differ, PerRank(["1"], ["2"])).values():
        assert isinstance(error, MismatchError)
        assert "rank 1 differs from rank 0 in cut: ['2'] on rank 1, ['1'] on rank 0" in str(error)


def test_ranks_must_give_the_same_shapes(two) -> None:
    calls = PerRank(*({"args": (torch.ones(n, 3),), "target": torch.ones(n, 1)} for n in (4, 6)))
    for error in two.fail(refused, {}, calls).values():
        assert "rank 1 differs from rank 0 in the first micro-batch: float32[3, 3]" in str(error)


class Fails(nn.Module):
    """Raises when it gets a number above 100."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if float(x.detach().max()) > 100:
            raise ValueError("too large")
        return x * 1


def fails_later(schedule: str, where: int) -> None:
    group = dist.new_group(timeout=timedelta(seconds=3))
    layers = [nn.Linear(3, 3), nn.Linear(3, 3)]
    layers.insert(2 * where, Fails())
    model = nn.Sequential(*layers)
    pipeline = Pipeline(model, group, cut=[str(2 - where)], schedule=schedule, micro_batches=2)
    x, y = torch.ones(4, 3), torch.ones(4, 3)
    pipeline.forward_backward(F.mse_loss, (x,), target=y)
    try:
        pipeline.forward_backward(F.mse_loss, (x * 1e6,), target=y)
    finally:
        with pytest.raises(UsageError, match="broken by an error; make a new one"):
            pipeline.forward_backward(F.mse_loss, (x,), target=y)


@pytest.mark.parametrize(("schedule", "where"), [("1f1b", 0), ("zero_bubble", 0), ("gpipe", 0)])
def test_an_error_in_a_stage_holds_up_nobody(two, schedule, where) -> None:
    errors = two.fail(fails_later, schedule, where, timeout=30.0)
    assert all(isinstance(error, ExchangeError) for error in errors.values())
    assert (
        str(errors[0]) == "rank 0: stage 0 in the forward of micro-batch 0: ValueError: too large"
    )
    assert "rank 1, which runs stages [1], cannot go on" in str(errors[1])


# The trace.


def traced(schedule: str, stages: int) -> Any:
    case = CASES["gpt2"]
    model, _ = make(case)
    recorder = Recorder(dist.get_rank(), first_step=1, num_steps=2)
    pipeline = Pipeline(
        model, cut=case.cuts[stages], schedule=schedule, micro_batches=4, recorder=recorder
    )
    for step in range(3):
        recorder.begin_step(step)
        pipeline.forward_backward(case.loss, *case.batch(step))
        recorder.end_step()
    pipeline.close()
    return recorder.gather()


@pytest.mark.parametrize(("schedule", "stages"), [("1f1b", 2), ("zero_bubble", 4)])
def test_every_forward_and_backward_is_recorded(two, schedule, stages, tmp_path) -> None:
    trace = two.run(traced, schedule, stages)[0]
    names = [STAGE_FORWARD, STAGE_BACKWARD]
    for step in (1, 2):
        spans = [e for e in trace.events if e.step == step and e.name in names]
        found = {(e.name, e.args["stage"], e.args["micro_batch"], e.rank) for e in spans}
        assert len(spans) == len(found) == 2 * 4 * stages
        assert {(stage, rank) for _, stage, _, rank in found} == {
            (stage, stage % 2) for stage in range(stages)
        }
    weights = [e for e in trace.events if e.name == STAGE_WEIGHT]
    assert len(weights) == (2 * 4 * stages if schedule == "zero_bubble" else 0)
    bubbles = measured_bubble(trace.events)
    assert list(bubbles) == [0, 1]
    assert all(0 < share < 1 for share in bubbles.values())
    chrome.write(trace, tmp_path / "trace.json")
    assert len(chrome.read(tmp_path / "trace.json").events) == len(trace.events)
    assert document(trace)


def test_formulas_of_the_bubble() -> None:
    assert ideal_bubble("gpipe", 4, 8) == ideal_bubble("1f1b", 4, 8) == 3 / 11
    assert ideal_bubble("interleaved_1f1b", 4, 8, 2) == pytest.approx(3 / 19)
    assert ideal_bubble("zero_bubble", 4, 8) == pytest.approx(3 / 27)
    assert ideal_bubble("zero_bubble", 4, 8, forward=1, inputs=1, weights=2) == 0
    assert ideal_bubble("1f1b", 1, 8) == 0
    with pytest.raises(StrategyError, match="allowed: 1 or more of each"):
        ideal_bubble("1f1b", 0, 8)
