"""What a pipeline moves, computes, keeps and records."""

from __future__ import annotations

import copy
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from slipstream.analysis.summary import document
from slipstream.errors import (
    ModelError,
    StrategyError,
    UsageError,
)
from slipstream.parallel import Pipeline, ideal_bubble, measured_bubble
from slipstream.trace import chrome
from slipstream.trace.event import STAGE_BACKWARD, STAGE_FORWARD, STAGE_WEIGHT
from slipstream.trace.recorder import Recorder
from tests.parallel.staged import CASES, SAMPLES, make

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
    send_ops = {"forward": PipelineStage.get_fwd_send_ops, "back": PipelineStage.get_bwd_send_ops}

    def counting(way: str) -> Any:
        def ops(self: PipelineStage, chunk: int) -> list[Any]:
            chunk_ops = send_ops[way](self, chunk)
            sent[way] += sum(op.tensor.nbytes for op in chunk_ops)
            return chunk_ops

        return ops

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PipelineStage, "get_fwd_send_ops", counting("forward"))
        patch.setattr(PipelineStage, "get_bwd_send_ops", counting("back"))
        pipeline.forward_backward(case.loss, *case.batch(1))
    pipeline.close()
    return calls, sent


@pytest.mark.parametrize(("schedule", "stages"), [("1f1b", 2), ("interleaved_1f1b", 4)])
def test_one_tensor_is_sent_and_placeholders_do_not_compute(two, schedule, stages) -> None:
    actual = two.run(counted, stages, schedule)
    hidden = SAMPLES * 10 * 32 * 8
    bytes_sent = [sent for _, sent in actual]
    assert sum(s["forward"] for s in bytes_sent) == (stages - 1) * hidden
    assert sum(s["back"] for s in bytes_sent) == (stages - 1) * hidden
    first, second = (calls for calls, _ in actual)
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
    actual: list[Any] = []
    for samples, words in ((8, 10), (4, 7), (8, 10)):
        inputs = {"input_ids": kwargs["input_ids"][:samples, :words]}
        labels = target[:samples, :words]
        actual.append(pipeline.forward_backward(case.loss, args, inputs, labels))
        actual.append(pipeline.evaluate(args, inputs).logits)
    model.eval()
    before = torch.get_rng_state()
    actual.append(pipeline.evaluate(args, kwargs).logits)
    assert torch.equal(before, torch.get_rng_state())
    pipeline.close()
    pipeline.close()
    with pytest.raises(UsageError, match=r"forward_backward\(\) of a pipeline that is closed"):
        pipeline.forward_backward(case.loss, args, kwargs, target)
    return actual


def test_shapes_may_change_and_evaluation_gives_outputs_everywhere(two) -> None:
    case = CASES["gpt2"]
    model, _ = make(case)
    _, kwargs, target = case.batch(0)
    expected = []
    for samples, words in ((8, 10), (4, 7), (8, 10)):
        output = model(kwargs["input_ids"][:samples, :words])
        expected += [case.loss(output, target[:samples, :words]).detach(), output.logits.detach()]
    expected.append(expected[-1])
    for actual in two.run(shapes_and_evaluation):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


def under_autocast_later() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
    model = copy.deepcopy(plain)
    pipeline = Pipeline(model, cut=["2"], micro_batches=2)
    x, y = torch.randn(8, 6), torch.randn(8, 1)
    for enabled in (False, True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = pipeline.forward_backward(F.mse_loss, (x,), target=y)
            expected = F.mse_loss(plain(x), y)
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-2, atol=1e-2)
        expected.backward()
    pipeline.close()
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        if mine.grad is not None:  # of this rank's stage
            torch.testing.assert_close(mine.grad, its.grad, rtol=1e-2, atol=1e-2)


def test_autocast_may_begin_and_end_between_batches(two) -> None:
    two.run(under_autocast_later)


class Noisy(nn.Sequential):
    """Draws on every stage, as a model that learns to remove noise."""

    noise: tuple[torch.Tensor, ...] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.noise += (torch.rand_like(x),)
        y: torch.Tensor = super().forward(x + self.noise[-1])
        return y - self.noise[-1]


def numbers_beside_dropout() -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Noisy(nn.Linear(6, 6), nn.Linear(6, 6), nn.Dropout())  # on the second stage alone
    pipeline = Pipeline(model, cut=["1"], micro_batches=4)
    seen: list[torch.Tensor] = []
    for _ in range(3):
        x, y = torch.randn(8, 6), torch.randn(8, 6)
        pipeline.forward_backward(F.mse_loss, (x,), target=y)
        seen += [torch.randperm(99), *model.noise[-4:]]  # the order of a loader that shuffles
    pipeline.close()
    return seen


def test_ranks_draw_the_same_numbers_whatever_their_stages_drop(two) -> None:
    first, second = two.run(numbers_beside_dropout)
    assert all(map(torch.equal, first, second))
    assert not any(torch.equal(a, b) for a, b in combinations(first, 2))


class Dropping(nn.Sequential):
    """Computes its blocks again in backward, or does not."""

    again = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return x


def dropped(again: bool) -> tuple[list[torch.Tensor | None], list[torch.Tensor]]:
    """Gradients, and what is dropped, by micro-batch."""
    torch.manual_seed(0)
    model = Dropping(*(nn.Sequential(nn.Linear(9, 9), nn.Dropout()) for _ in range(2)))
    model.again = again
    kept: list[torch.Tensor] = []
    pipeline = Pipeline(model, cut=["1"], schedule="gpipe", micro_batches=2)
    x = torch.randn(8, 9)
    for _ in range(2):
        pipeline.forward_backward(F.mse_loss, (x,), target=x)
        if not kept and not again:
            for block in model:
                block[1].register_forward_hook(lambda _, given, out: kept.append(out != 0))
    gradients = [p.grad for p in model.parameters()]
    pipeline.close()
    return gradients, kept


def test_stages_and_micro_batches_drop_other_values(two) -> None:
    kept = [one for _, kept in two.run(dropped, False) for one in kept]
    assert len(kept) == 4
    assert not any(torch.equal(a, b) for a, b in combinations(kept, 2))


def test_what_is_dropped_is_dropped_again_in_backward(two) -> None:
    for (plain, _), (again, _) in zip(two.run(dropped, False), two.run(dropped, True), strict=True):
        torch.testing.assert_close(again, plain, rtol=0, atol=0)


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
    for invalid, message in (
        ({"fc.bias": torch.ones(3)}, "missing or unexpected names"),
        ({**state, "fc.bias": torch.ones(3)}, r"fc.bias of shape \[3\]; allowed: .* \[10\]"),
    ):
        with pytest.raises(ModelError, match=message):
            pipeline.load_full_state_dict(invalid)
    pipeline.close()
    return model.state_dict()


def test_a_state_is_loaded_and_evaluation_leaves_statistics_alone(two) -> None:
    for state in two.run(statistics):
        assert all(bool((value == 1).all()) for value in state.values())


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
        actual = {(e.name, e.args["stage"], e.args["micro_batch"], e.rank) for e in spans}
        assert len(spans) == len(actual) == 2 * 4 * stages
        assert {(stage, rank) for _, stage, _, rank in actual} == {
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
