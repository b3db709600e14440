"""Optimizers of other libraries, whose steps and states are not quite those of torch's own."""

from __future__ import annotations

from contextlib import suppress
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import SGD
from torch.optim.lr_scheduler import MultiStepLR

import slipstream
from slipstream.errors import NonFiniteError, SlipstreamError, UsageError
from tests.harness.ranks import Ranks
from tests.session.test_habits import batches, loss_of, model_of

SHARDED = {"gradients": {"transport": {"kind": "sharded", "elementwise": True}}}


class Clipped(torch.optim.Optimizer):
    """As SophiaG: its step takes the size of the batch."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None, bs: int = 5120) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_((p.grad * bs).clamp_(-1, 1), alpha=group["lr"])


def with_an_argument(strategy: dict[str, Any] | None) -> torch.Tensor:
    model = model_of()
    optimizer = Clipped(model.parameters())
    session = None
    if strategy is not None:
        session = slipstream.accelerate(model, optimizer, strategy=strategy)
    for batch in batches():
        if session is not None:
            session.backward(loss_of(model, batch[dist.get_rank()]))
        else:
            torch.stack([loss_of(model, x) for x in batch]).mean().backward()
        optimizer.step(bs=2)
        optimizer.zero_grad()
    if session is not None:
        session.close()
    return torch.cat([p.detach().view(-1) for p in model.parameters()])


@pytest.mark.parametrize("strategy", [{}, SHARDED, {"compute": {"fuse_optimizer": "elementwise"}}])
def test_a_step_takes_arguments_of_its_own(two: Ranks, strategy: dict[str, Any]) -> None:
    expected = with_an_argument(None)
    for found in two.run(with_an_argument, strategy):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


class Counted(torch.optim.Optimizer):
    """As MADGRAD: its state has a number of steps that is of no parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.state["k"] = torch.tensor([0])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.state["k"] += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                    p.sub_(mean.lerp_(p.grad, 0.1), alpha=group["lr"] / float(self.state["k"]))


def counted(strategy: dict[str, Any], folder: str) -> None:
    traced = {"trace": {"steps": 1, "skip": 0, "folder": folder}}
    ends: list[torch.Tensor] = []
    saved: Any = None
    for resumed in (False, True):
        model = model_of()
        optimizer = Counted(model.parameters())
        with slipstream.accelerate(model, optimizer, strategy=strategy | traced) as session:
            for number, batch in enumerate(batches()):
                if number < 2 and resumed:
                    continue
                if number == 2 and resumed:
                    session.restore(saved)
                elif number == 2:
                    parts: list[Any] = [None] * session.world_size
                    dist.all_gather_object(parts, session.checkpoint(sharded=True))
                    session.restore(parts)
                    saved = deepcopy(session.checkpoint())
                session.backward(loss_of(model, batch[session.rank]))
                session.step()
        assert optimizer.state["k"] == 4
        ends.append(torch.cat([p.detach().view(-1) for p in model.parameters()]))
    assert torch.equal(*ends)


@pytest.mark.parametrize("strategy", [{}, SHARDED])
def test_a_state_of_no_parameter_is_saved_and_restored(
    two: Ranks, strategy: dict[str, Any], tmp_path: Path
) -> None:
    two.run(counted, strategy, str(tmp_path))


def test_numbers_of_numpy_are_numbers_in_a_checkpoint(tmp_path: Path) -> None:
    """As of a schedule that is an array, or of its milestones."""
    rates = 0.1 * np.cos(np.arange(3))
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = MultiStepLR(optimizer, [*np.array([1, 2])])
    saved = slipstream.Checkpoints(tmp_path / "run", also={"schedule": schedule})
    with slipstream.accelerate(model, optimizer) as session:
        for group in optimizer.param_groups:
            group["lr"] = rates[1]
        saved.save(session, wait=True)
        torch.save(session.checkpoint(), tmp_path / "a.pt")
        slipstream.write_checkpoint({"lr": rates[1]}, tmp_path / "b.pt")
        session.restore(slipstream.read_checkpoint(tmp_path / "a.pt"))
        assert slipstream.read_checkpoint(tmp_path / "b.pt") == {"lr": rates[1]}
    assert optimizer.param_groups[0]["lr"] == rates[1]


def two_of(model: nn.Module) -> list[SGD]:
    layers = model.get_submodule("0"), model.get_submodule("2")
    return [SGD(layer.parameters(), lr=0.1, momentum=0.9) for layer in layers]


def infinite(model: nn.Module, layer: int) -> torch.Tensor:
    """An infinite loss of the layer of one optimizer alone."""
    own = two_of(model)[layer].param_groups[0]["params"]
    return torch.stack([p.sum() for p in own]).sum() * torch.inf


def scaled(overflows: int, order: tuple[int, int]) -> list[torch.Tensor]:
    """One scaler and two optimizers, of which the session has the first."""
    model, scaler = model_of(), torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizers = two_of(model)
    session = slipstream.accelerate(model, optimizers[0]) if dist.is_initialized() else None
    for number, batch in enumerate(batches()):
        extra = infinite(model, overflows) if number == 1 else 0.0
        if session is None:
            joined = torch.stack([loss_of(model, x) for x in batch]).mean()
            scaler.scale(joined + extra).backward()
        else:
            session.backward(scaler.scale(loss_of(model, batch[session.rank]) + extra))
        for which in order:
            scaler.step(optimizers[which])
        scaler.update()
        model.zero_grad()
    if session is not None:
        session.close()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("overflows", [0, 1])
def test_a_scaler_skips_the_step_of_one_optimizer_alone(
    two: Ranks, overflows: int, order: tuple[int, int]
) -> None:
    expected = scaled(overflows, order)
    for found in two.run(scaled, overflows, order):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def infinite_for_the_second(*, first: bool) -> str:
    model = model_of()
    mine, other = two_of(model)
    before = [p.detach().clone() for p in other.param_groups[0]["params"]]
    with slipstream.accelerate(model, mine) as session:
        session.backward(loss_of(model, batches()[0, session.rank]) + infinite(model, 1))
        if not first:
            mine.step()
        with pytest.raises(NonFiniteError) as caught:
            other.step()
        model.zero_grad()
    assert all(map(torch.equal, before, other.param_groups[0]["params"]))
    return str(caught.value)


@pytest.mark.parametrize("first", [True, False])
def test_an_optimizer_without_a_scaler_makes_no_infinite_step(two: Ranks, first: bool) -> None:
    for text in two.run(partial(infinite_for_the_second, first=first)):
        assert "the gradient of 2.weight is infinite or NaN" in text


def head_alone(codec: str) -> tuple[float, list[torch.Tensor]]:
    """A scaler, one overflow, and an optimizer that holds the head; the rest is not frozen."""
    model, scaler = model_of(), torch.amp.GradScaler("cpu", init_scale=8.0)
    head = two_of(model)[1]
    moved = []
    with slipstream.accelerate(
        model, head, strategy={"gradients": {"codec": codec, "split": "single"}}
    ) as session:
        for number, batch in enumerate(batches()[:4]):
            loss = loss_of(model, batch[session.rank])
            extra = infinite(model, 0) if number == 1 else 0.0
            session.backward(scaler.scale(loss + extra))
            scaler.step(head)
            scaler.update()
            head.zero_grad()
            moved.append(head.param_groups[0]["params"][0].detach().clone())
    return scaler.get_scale(), moved


def test_an_overflow_of_what_the_optimizer_does_not_hold_ends_no_training(two: Ranks) -> None:
    for scale, moved in two.run(head_alone, "int8"):
        assert scale == 4.0
        assert all(one.isfinite().all() for one in moved)
        assert torch.equal(moved[0], moved[1])
        assert not torch.equal(moved[1], moved[2])


TOPK = {"gradients": {"codec": "topk"}}


def combined(strategy: dict[str, Any], replaces: bool) -> str:
    """The averages of two losses, read one after the other, and combined."""
    model = model_of()
    optimizer = two_of(model)[0]
    session = slipstream.accelerate(model, optimizer, strategy=strategy)
    read = []
    for number, batch in enumerate(batches()[:2]):
        optimizer.zero_grad()
        session.backward(loss_of(model, batch[session.rank]), retain_graph=not number)
        read.append([p.grad.clone() for p in optimizer.param_groups[0]["params"]])
    if replaces:
        pairs = zip(*read, strict=True)
        for p, grads in zip(optimizer.param_groups[0]["params"], pairs, strict=True):
            p.grad = torch.stack(grads).mean(0)
    said = ""
    try:
        session.step()
    except UsageError as error:
        said = str(error)
    with suppress(SlipstreamError):
        session.close()
    return said


@pytest.mark.parametrize(
    ("strategy", "replaces", "refused"),
    [(TOPK, True, True), (TOPK, False, False), ({"gradients": {"codec": "half"}}, True, False)],
    ids=["owed", "the last pass alone", "nothing owed"],
)
def test_combined_averages_are_refused_under_a_codec_that_owes(
    two: Ranks, strategy: dict[str, Any], replaces: bool, refused: bool
) -> None:
    for said in two.run(combined, strategy, replaces):
        assert ("averages of an earlier one were zeroed" in said) == refused


def thrown_away(steps: bool) -> list[torch.Tensor]:
    """A batch whose gradients the script zeroes, before a step or without one."""
    model = model_of()
    optimizer = SGD(model.parameters(), lr=0.1)
    with slipstream.accelerate(model, optimizer, strategy=TOPK) as session:
        for number, batch in enumerate(batches()):
            loss = loss_of(model, batch[session.rank])
            if number == 1:
                session.backward(100 * loss)
                optimizer.zero_grad()
                if steps:
                    session.step()
                continue
            session.backward(loss)
            session.step()
    return [p.detach() for p in model.parameters()]


def test_a_codec_forgets_a_batch_that_was_thrown_away(two: Ranks) -> None:
    for one, other in zip(two.run(thrown_away, True), two.run(thrown_away, False), strict=True):
        assert all(map(torch.equal, one, other))


def saved_in_parts(folder: str) -> None:
    model = nn.Linear(2, 1)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1, momentum=0.9)
    with slipstream.accelerate(model, optimizer) as session:
        session.backward(session.model(torch.ones(1, 2)).sum())
        session.step()
        for save in (session.checkpoint, lambda: slipstream.Checkpoints(folder).save(session)):
            with pytest.raises(UsageError, match=r"transport: sharded.*consolidate_state_dict"):
                save()
        assert session.checkpoint("model", "session")["session"]["steps"] == 1


def test_an_optimizer_that_torch_deals_out_says_how_it_is_saved(two: Ranks, tmp_path: Path) -> None:
    two.run(saved_in_parts, str(tmp_path))
