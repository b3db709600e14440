"""Hooks of a script on gradients that have accumulated: they see those of this rank, and may change
them, whenever they were registered and however gradients travel."""

from __future__ import annotations

import warnings
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import slipstream
from slipstream.errors import SlipstreamError, UsageError
from tests.harness.ranks import Ranks

WIDTHS = {"copied together": 8, "copied one by one": 180}
TRANSPORTS = ["flat", "direct", "sharded"]


def build(width: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, width), nn.Linear(width, width), nn.Linear(width, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    seed = torch.Generator().manual_seed(10 * step + rank)
    return model(torch.randn(4, 6, generator=seed)).square().mean()


def triple(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(3)


def replace(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad = 3 * parameter.grad


def take(parameter: torch.Tensor) -> None:
    parameter.grad = None


def trained(width: int, transport: str, hook: Any, first: int) -> list[torch.Tensor]:
    """Three updates with a hook from update ``first`` on, -1: from before ``accelerate()``."""
    model, optimizer = build(width)

    def hooked(step: int) -> None:
        for parameter in model.parameters() if step == first else ():
            parameter.register_post_accumulate_grad_hook(hook)

    hooked(-1)
    strategy = {"gradients": {"transport": transport}}
    with slipstream.accelerate(model, optimizer, None, strategy) as session:
        for step in range(3):
            hooked(step)
            session.backward(loss_of(model, dist.get_rank(), step))
            session.step()
    return [p.detach() for p in model.parameters()]


def expected(width: int, first: int) -> list[torch.Tensor]:
    model, optimizer = build(width)
    for step in range(3):
        loss = (loss_of(model, 0, step) + loss_of(model, 1, step)) / 2
        (loss * 3 if step >= first else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def compare(width: int, transport: str, first: int) -> None:
    for hook in (triple, replace):
        for mine, plain in zip(
            trained(width, transport, hook, first), expected(width, first), strict=True
        ):
            torch.testing.assert_close(mine, plain, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("first", [-1, 0, 1])
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("size", WIDTHS)
def test_hooks_change_the_gradient_of_a_rank(
    two: Ranks, size: str, transport: str, first: int
) -> None:
    two.run(compare, WIDTHS[size], transport, first)


def taken(width: int, transport: str, first: int) -> str:
    with warnings.catch_warnings(action="ignore"), pytest.raises(UsageError) as caught:
        trained(width, transport, take, first)
    return str(caught.value)


@pytest.mark.parametrize("first", [-1, 1])
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("size", WIDTHS)
def test_a_hook_that_takes_the_gradient_is_refused(
    two: Ranks, size: str, transport: str, first: int
) -> None:
    for text in two.run(taken, WIDTHS[size], transport, first):
        assert "has no gradient at the end of its backward: a hook" in text


def changed_by_a_module(width: int, overlap: bool) -> tuple[str, list[torch.Tensor]]:
    """A hook of a layer triples its gradients, once they have accumulated."""
    model, optimizer = build(width)

    def triple_all(layer: nn.Module, *_: Any) -> None:
        for parameter in layer.parameters():
            now = parameter.grad
            parameter.grad = torch.ones_like(parameter) if now is None else 3 * now

    for layer in (model[1], model[2]):  # type: ignore[index]
        layer.register_full_backward_hook(triple_all)
    strategy = {"gradients": {"overlap": overlap, "split": "per_gradient"}}
    session = slipstream.accelerate(model, optimizer, None, strategy)
    said = ""
    try:
        for step in range(3):
            session.backward(loss_of(model, dist.get_rank(), step))
            session.step()
    except UsageError as error:
        said = str(error)
    with suppress(SlipstreamError):
        session.close()
    return said, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_what_a_hook_of_a_layer_sets_too_late_is_refused(two: Ranks, width: int) -> None:
    for said, _ in two.run(changed_by_a_module, width, True):
        assert "was set in backward after its own hooks had run" in said
        assert "overlap: false" in said


def test_without_overlap_hooks_of_layers_change_gradients(two: Ranks) -> None:
    (said, first), (also, second) = two.run(changed_by_a_module, 8, False)
    assert said == also == ""
    assert all(map(torch.equal, first, second))
