"""The mechanism: how many collectives, of how many bytes, in which order, and when."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.harness.counters import collectives, count
from tests.harness.models import MODELS, Branches, by_order
from tests.harness.reference import accelerate, build, digest

STARTED = {
    "by_bytes": {"kind": "by_bytes", "megabytes": 100 / 2**20, "first_megabytes": None},
    "per_layer": "per_layer",
    "per_gradient": "per_gradient",
    "single": "single",
}


def what_travels(name: str, split: object) -> None:
    """Counts against segments and parameters: first synchronisation, windows of two, no_sync."""
    case, rank = MODELS[name], dist.get_rank()
    model = build(case, seed=rank)
    if rank == 0:
        first = digest(model)
    with collectives() as log:
        session = accelerate(model, split=split, accumulate=2)
    assert count(log, "broadcast") == 1
    together = [digest(model)] * dist.get_world_size()
    dist.all_gather_object(together, digest(model))
    assert len(set(together)) == 1
    assert rank != 0 or together[0] == first

    def backward(micro: int) -> list[Any]:
        with collectives() as log:
            session.backward(model(*case.batch(rank, micro)))
            session.step()
        return log

    assert backward(0) == []
    backward(1)  # the ready order is agreed
    assert backward(2) == []
    backward(3)  # parameters are compared
    trained = [p for p in model.parameters() if p.requires_grad]
    segments = session.segments
    assert sum(s.num_bytes for s in segments) == sum(p.nbytes for p in trained)
    for micro in (4, 6):
        assert backward(micro) == []
        log = backward(micro + 1)
        assert all(collective.work is not None for collective in log)
        reduced = [c.num_bytes for c in log if c.kind == "all_reduce"]
        assert len(reduced) == sum(s.num_collectives for s in segments)
        assert sum(reduced) == sum(p.nbytes + p.element_size() for p in trained)
        assert len(log) == len(reduced) + any(True for _ in model.buffers())
    with session.no_sync():
        assert backward(8) == []
    session.close()


@pytest.mark.parametrize("split", STARTED)
def test_collectives_and_bytes_of_a_step(two, split):
    for name in ("mlp", "one_parameter", "conv_bn", "several_dtypes", "zero_size", "tied"):
        two.run(what_travels, name, STARTED[split])


def reduce_resnet50() -> tuple[int, int]:
    """Gradients, and all-reduces of a step."""
    from examples import models

    model = models.resnet50()
    with accelerate(model, split={"kind": "by_bytes", "megabytes": 16}) as session:
        for _ in range(3):  # behind the second exchange ranks compare parameters
            with collectives() as log:
                session.backward(model(torch.randn(2, 3, 32, 32)).logits.square().mean())
            session.step()
        return sum(len(s.gradients) for s in session.segments), count(log, "all_reduce")


def test_161_gradients_of_resnet50_take_7_all_reduces(two):
    for gradients, all_reduces in two.run(reduce_resnet50):
        assert gradients == 161
        assert 2 <= all_reduces <= 7


class Gate(torch.autograd.Function):
    """The identity, whose backward calls a function first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pass_by: Callable[[], None]) -> Tensor:
        ctx.pass_by = pass_by
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.pass_by()
        return gradient, None


def halt_backward(overlap: bool) -> dict[str, Any]:
    """Halt backward between two layers and see what has been exchanged of the later one by then."""
    first, last = nn.Linear(5, 7), nn.Linear(7, 3)
    seen: dict[str, Any] = {}
    with accelerate(nn.Sequential(first, last), split="per_layer", overlap=overlap) as session:
        for _ in range(2):
            session.backward(last(first(torch.ones(2, 5))).mean())
            session.step()
        with collectives() as log:

            def halt() -> None:
                seen["started when halted"] = len(log)
                give_up = time.monotonic() + 60
                while overlap and not log[0].work.is_completed() and time.monotonic() < give_up:
                    time.sleep(0.001)
                seen["landed when halted"] = [c.work.is_completed() for c in log]

            def at_the_end() -> None:  # behind all gradients of parameters
                seen["started at the end"] = len(log)

            inputs = Gate.apply(torch.ones(2, 5, requires_grad=True), at_the_end)
            session.backward(last(Gate.apply(first(inputs), halt)).mean())
        seen["bytes"] = [c.num_bytes for c in log]
    return seen


@pytest.mark.parametrize(
    ("overlap", "started", "landed", "at_the_end"), [(True, 1, [True], 2), (False, 0, [], 0)]
)
def test_exchange_while_backward_is_halted(two, overlap, started, landed, at_the_end):
    for seen in two.run(halt_backward, overlap):
        assert seen["started when halted"] == started
        assert seen["landed when halted"] == landed
        assert seen["started at the end"] == at_the_end
        assert seen["bytes"] == [4 * (7 * 3 + 3 + 2), 4 * (5 * 7 + 7 + 2)]


def ready_and_sent(step: int) -> tuple[list[str], list[int], list[int]]:
    """Order of the gradients in one step, bytes of its exchanges, bytes of the segments."""
    model = build(MODELS["changing_order"])
    assert isinstance(model, Branches)
    ready: list[str] = []
    with accelerate(model, split="per_gradient") as session:
        for current in range(step + 1):
            if current == step:
                for name, parameter in model.named_parameters():
                    note = lambda _, name=name: ready.append(name)  # noqa: E731
                    parameter.register_post_accumulate_grad_hook(note)
            with collectives() as log:
                session.backward(model(*by_order(dist.get_rank(), current)))
            session.step()
        one_flag = 4
        return ready, [c.num_bytes for c in log], [s.num_bytes + one_flag for s in session.segments]


def test_segments_leave_in_one_order_on_all_ranks(two):
    for step in (2, 3):
        (ready_0, *sent_0), (ready_1, *sent_1) = two.run(ready_and_sent, step)
        assert sorted(ready_0) == sorted(ready_1)
        assert ready_0 != ready_1  # else the test shows nothing
        assert sent_0 == sent_1
        assert sent_0[0] == sent_0[1]
        assert len(set(sent_0[1])) == len(ready_0)  # sizes tell the gradients apart
