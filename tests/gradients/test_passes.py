"""One update from several backward passes, unused parameters, and graphs that change."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import slipstream
from slipstream.errors import ExchangeError, HangError, UsageError
from tests.harness.models import MODELS, Shared, rows
from tests.harness.ranks import RankFailure
from tests.harness.reference import accelerate, build

Loss = Callable[[int], Tensor]
Backward = Callable[..., None]
NoSync = Callable[[], AbstractContextManager[None]]


def two_losses(loss: Loss, backward: Backward, no_sync: NoSync) -> None:
    backward(loss(0))
    backward(loss(1))


def two_losses_forwards_first(loss: Loss, backward: Backward, no_sync: NoSync) -> None:
    first, second = loss(0), loss(1)
    backward(first)
    backward(second)


def retained_graph(loss: Loss, backward: Backward, no_sync: NoSync) -> None:
    first = loss(0)
    backward(first, retain_graph=True)
    backward(first)


def local_then_averaged(loss: Loss, backward: Backward, no_sync: NoSync) -> None:
    with no_sync():
        backward(loss(0))
        backward(loss(1))
    backward(loss(2))


# What DDP is to do: it cannot go back twice for one forward.
PASSES: dict[str, tuple[Any, Callable[[Loss, Backward, NoSync], None]]] = {
    "two losses": (two_losses, two_losses),
    "two losses, forwards first": (two_losses_forwards_first, two_losses),
    "retained graph": (
        retained_graph,
        lambda loss, backward, no_sync: two_losses(lambda _: loss(0), backward, no_sync),
    ),
    "no_sync": (local_then_averaged, local_then_averaged),
}


def gradients_after(name: str, passes: str, overlap: bool) -> list[str]:
    """Gradients that differ from DDP's, in the first update and in the next."""
    case, rank = MODELS[name], dist.get_rank()
    ours, theirs = build(case), build(case)
    assert case.ddp is not None
    ddp = DistributedDataParallel(theirs, **case.ddp)
    run, run_ddp = PASSES[passes]
    wrong = []
    with accelerate(ours, split="per_layer", overlap=overlap) as session:
        for update in range(2):

            def loss(model: nn.Module, number: int, update: int = update) -> Tensor:
                return model(*case.batch(rank, 3 * update + number))

            run(lambda n: loss(ours, n), session.backward, session.no_sync)
            run_ddp(lambda n: loss(ddp, n), Tensor.backward, ddp.no_sync)
            for (path, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
                if (p.grad is None) != (q.grad is None) or (
                    p.grad is not None and not torch.equal(_dense(p.grad), _dense(q.grad))
                ):
                    wrong.append(f"update {update}: {path}: {p.grad} is not {q.grad}")
            assert session.step()
            ddp.zero_grad()
            theirs.load_state_dict(ours.state_dict())
    return wrong


def _dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


@pytest.mark.parametrize("passes", PASSES)
@pytest.mark.parametrize(
    "name", ["mlp", "tied", "complex", "sparse", "several_dtypes", "unused", "unused_by_rank"]
)
def test_several_passes_add_up_as_in_ddp(two, name, passes):
    for overlap in (True, False):
        assert two.run(gradients_after, name, passes, overlap) == [[], []]


def step_inside_no_sync() -> None:
    case, rank = MODELS["mlp"], dist.get_rank()
    model = build(case)
    with accelerate(model) as session:
        with session.no_sync():
            session.backward(model(*case.batch(rank, 0)))
            assert not session.step()
            with pytest.raises(UsageError, match="state_dict"):
                session.state_dict()  # the gradients so far would be lost
        with pytest.raises(UsageError, match="state_dict"):
            session.state_dict()
        session.backward(model(*case.batch(rank, 1)))
        assert session.step()
        session.state_dict()


def test_step_inside_no_sync_keeps_the_gradients(two):
    two.run(step_inside_no_sync)


def train_unused(name: str, overlap: bool) -> list[tuple[list[str], list[str]]]:
    """By step: parameters without a gradient, and those that the optimizer did not move."""
    case, rank = MODELS[name], dist.get_rank()
    model = build(case)
    found = []
    with accelerate(model, "adamw", overlap=overlap) as session:
        for step in range(3):
            before = {n: p.detach().clone() for n, p in model.named_parameters()}
            session.backward(model(*case.batch(rank, step)))
            none = [n for n, p in model.named_parameters() if p.grad is None]
            session.step()
            same = [n for n, p in model.named_parameters() if torch.equal(p, before[n])]
            found.append((none, same))
    return found


@pytest.mark.parametrize(
    ("name", "unused"), [("unused", ["never.weight", "never.bias"]), ("unused_by_rank", [])]
)
@pytest.mark.parametrize("overlap", [True, False])
def test_only_what_no_rank_used_stays(two, name, unused, overlap):
    for by_step in two.run(train_unused, name, overlap):
        assert by_step == [(unused, unused)] * 3


def share_more_often(overlap: bool, ranks: tuple[int, ...]) -> float:
    """Reentrant checkpoints of one layer: twice in the first step, four times in the next."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model, alone = Shared(reentrant=True), Shared(reentrant=True)
    alone.load_state_dict(model.state_dict())
    session = accelerate(model, overlap=overlap, split="per_gradient")
    try:
        for step in range(2):
            model.times = 4 if step and rank in ranks else 2
            session.backward(model(*rows(rank, step)))
            if step and rank in ranks:
                losses = []
                for other in range(world):
                    alone.times = 4 if other in ranks else 2
                    losses.append(alone(*rows(other, step)))
                torch.stack(losses).mean().backward()
                return max(
                    float((p.grad - q.grad).abs().max())
                    for p, q in zip(model.parameters(), alone.parameters(), strict=True)
                )
            session.step()
            alone.load_state_dict(model.state_dict())
    except ExchangeError:
        with pytest.raises(UsageError, match=r"earlier backward failed"):
            session.backward(model(*rows(rank, 9)))
        raise
    session.close()
    return 0.0


def change_and_die() -> None:
    """The graph of rank 1 alone changes; its script ends with that error."""
    try:
        share_more_often(True, (1,))
    except ExchangeError as error:
        if dist.get_rank() == 0 or "parameter shared." not in str(error):
            raise
        os._exit(1)


def test_a_gradient_that_comes_again(two):
    """After its segment was sent it is an error on every rank; without overlap it just adds up."""
    for error in two.fail(share_more_often, True, (0, 1)).values():
        assert isinstance(error, ExchangeError)
        assert "parameter shared." in str(error)
        assert "gradients.overlap: false" in str(error)
    for changing in ((0, 1), (1,)):
        assert max(two.run(share_more_often, False, changing)) < 1e-5


def gradient_from_elsewhere(graph: bool) -> None:
    case, rank = MODELS["mlp"], dist.get_rank()
    model, alone = build(case), build(case)
    batches = [[case.batch(r, step) for r in range(2)] for step in range(2)]
    with accelerate(model) as session:
        with pytest.raises(UsageError, match=r"parameter body\.\d\.\w+ got a gradient outside"):
            model(*batches[0][rank]).backward()
        for parameter in model.parameters():
            parameter.grad = None
        with session.no_sync():
            model(*batches[0][rank]).backward(create_graph=graph)
        session.backward(model(*batches[1][rank]))
        for batch in [*batches[0], *batches[1]]:
            (alone(*batch) / 2).backward()
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.parametrize("graph", [False, True])
def test_a_gradient_outside_session_backward(two, graph):
    two.run(gradient_from_elsewhere, graph)


def gradients_wider_than_parameters() -> None:
    model, alone = (nn.Linear(8, 3, dtype=torch.bfloat16) for _ in range(2))
    for parameter in [*model.parameters(), *alone.parameters()]:
        parameter.grad_dtype = torch.float32
    batches = [torch.full((2, 8), 0.37 + rank, dtype=torch.bfloat16) for rank in range(2)]
    with accelerate(model) as session:
        alone.load_state_dict(model.state_dict())
        session.backward(1.01 * model(batches[dist.get_rank()]).float().square().mean())
        for batch in batches:
            (1.01 * alone(batch).float().square().mean()).backward()
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            assert p.grad is not None
            assert q.grad is not None
            torch.testing.assert_close(p.grad, q.grad / 2, rtol=1e-6, atol=0)
        session.optimizer.zero_grad()


def test_gradients_wider_than_their_parameters_stay_exact(two):
    two.run(gradients_wider_than_parameters)


def thaw() -> None:
    case = MODELS["frozen"]
    model = build(case)
    with accelerate(model) as session:
        model.body[2].requires_grad_(True)
        session.backward(model(*case.batch(dist.get_rank(), 0)))


def lose_a_rank() -> None:
    case, rank = MODELS["mlp"], dist.get_rank()
    model = build(case)
    with accelerate(model) as session:
        if rank == 1:
            raise KeyError("a bad sample")
        session.backward(model(*case.batch(rank, 0)))


def test_thawed_parameters_are_named(two):
    for error in two.fail(thaw).values():
        assert isinstance(error, UsageError)
        assert "body.2.weight, body.2.bias" in str(error)


def test_a_rank_lost_in_the_first_step_is_an_exchange_error_on_the_others(two):
    """In a later one: test_lifetime.py."""
    errors = two.fail(lose_a_rank)
    assert isinstance(errors[1], KeyError)
    assert isinstance(errors[0], HangError)
    assert "rank 0, step 0" in str(errors[0])
    assert "has ended with KeyError: 'a bad sample'" in str(errors[0])


def test_a_graph_that_changes_on_one_rank(two):
    with pytest.raises(RankFailure) as failure:
        two.run(change_and_die)
    assert isinstance(failure.value.errors[0], ExchangeError)
    assert failure.value.errors[1] == "the process died"


class LateTable(nn.Module):
    """Tables of which one is used later, as those of domains that come in turn."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables = nn.ModuleList(nn.EmbeddingBag(7, 2, sparse=True) for _ in range(2))

    def forward(self, numbers: Tensor, *used: int) -> Tensor:
        return torch.stack([self.tables[n](numbers).square().mean() for n in used]).sum()


def late_table(windows: list[list[tuple[int, ...]]]) -> list[bool]:
    """By update, whether the late table has a sparse gradient; SparseAdam takes no other."""
    model = LateTable()
    optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=0.1)
    strategy = {"gradients": {"accumulate": len(windows[0])}}
    numbers = torch.tensor([[1, 2], [3, dist.get_rank()]])
    found = []
    with slipstream.accelerate(model, optimizer, None, strategy) as session:
        for window in windows:
            for used in window:
                session.backward(model(numbers, *used))
                gradient = model.tables[1].weight.grad
                updated = session.step()
            assert updated
            found.append(gradient is not None and gradient.is_sparse)
    return found


@pytest.mark.parametrize(
    ("windows", "sparse"), [([[(0,)], [(0, 1)]], [False, True]), ([[(0, 1), (0,)]] * 2, [True] * 2)]
)
def test_a_table_that_the_first_pass_has_not_used_stays_sparse(two, windows, sparse):
    assert two.run(late_table, windows) == [sparse] * 2
