"""Backward of the operators: ties, unused results, micro-batches, slopes, torch's transforms."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import slipstream.comm as comm
from slipstream.comm.graphs import current
from slipstream.errors import CommError
from tests.harness.operators import (
    AXES,
    REFERENCES,
    SHAPE,
    close,
    inputs,
    loss_of,
)
from tests.harness.ranks import Ranks

SIZE = 3


def ties() -> None:
    rank = dist.get_rank()
    x = torch.tensor([1.0, float(rank == 1), -float(rank)], requires_grad=True)
    y = comm.all_reduce_max(x)
    comm.backward((y * torch.tensor([1.0, 10.0, 100.0])).sum())
    assert x.grad.tolist() == [3.0, 30.0 * (rank == 1), 300.0 * (rank == 0)]


def point_to_point(check: bool) -> None:
    """Rank 2 of the world is rank 0 of the group; a chain there and back, differentiated twice."""
    group = comm.group([2, 0, 1], check=check)
    x = torch.tensor([2.0, 3.0], dtype=torch.float64, requires_grad=True)
    like = torch.empty(2, dtype=torch.float64, requires_grad=True)
    if group.rank == 0:
        comm.send(x, 1, group)
        y = comm.recv(2, group, like=like)
        comm.backward((x * y).sum(), create_graph=True)  # y = x^4: gradient 5 x^4
        first, x.grad = x.grad, None
        assert torch.allclose(first, 5 * x.detach() ** 4)
        comm.backward(first.sum())
        assert torch.allclose(x.grad, 20 * x.detach() ** 3)
    else:
        y = comm.recv(group.rank - 1, group, like=like)
        comm.send(y * y, (group.rank + 1) % SIZE, group)
        comm.backward(create_graph=True)
        comm.backward()


def swap() -> None:
    """Shapes and dtypes are the sender's; a tensor that is not differentiated comes so."""
    rank = dist.get_rank()
    if rank == 0:
        comm.send(torch.arange(6, dtype=torch.int16).reshape(2, 3).t(), to=1)
        comm.send(torch.empty(0, 4), to=1)
    elif rank == 1:
        x, y = comm.recv(0), comm.recv(0)
        assert torch.equal(x, torch.arange(6, dtype=torch.int16).reshape(2, 3).t())
        assert y.shape == (0, 4)
        assert not x.requires_grad


def unused(name: str, axes: tuple[int, ...]) -> None:
    """Only some ranks use the result; gradients come where any does."""
    for users in ([], [0], [2], [1, 2]):
        used_by(users, name, axes)


def used_by(users: list[int], name: str, axes: tuple[int, ...]) -> None:
    rank = dist.get_rank()
    xs = inputs(SIZE, SHAPE, torch.float64)
    leaves = [x.clone().requires_grad_() for x in xs]
    ys = REFERENCES[name](leaves, *(*axes, 0, 0)[:2])
    losses = [loss_of(y, r) for r, y in enumerate(ys) if r in users and y is not None]
    x = xs[rank].clone().requires_grad_()
    y = getattr(comm, name)(x, None, *axes)
    comm.backward(loss_of(y, rank) if rank in users else None)
    if not losses:
        assert x.grad is None
        return
    loss = torch.stack(losses).sum()
    firsts = torch.autograd.grad(loss, leaves, materialize_grads=True)
    close(x.grad, firsts[rank], torch.float64)


def asymmetric(name: str, axes: tuple[int, ...]) -> None:
    """Only rank 1's tensor requires a gradient; all others take part all the same."""
    rank = dist.get_rank()
    xs = inputs(SIZE, SHAPE, torch.float64)
    leaves = [x.clone().requires_grad_(r == 1) for r, x in enumerate(xs)]
    ys = REFERENCES[name](leaves, *(*axes, 0, 0)[:2])
    losses = [v for r, y in enumerate(ys) if (v := loss_of(y, r)) is not None and v.requires_grad]
    x = xs[rank].clone().requires_grad_(rank == 1)
    local = loss_of(getattr(comm, name)(x, None, *axes), rank)
    comm.backward(local if local is not None and local.requires_grad else None)
    if rank == 1 and losses:
        (first,) = torch.autograd.grad(torch.stack(losses).sum(), [leaves[1]])
        close(x.grad, first, torch.float64)
    else:
        assert x.grad is None


def micro_batches() -> None:
    """Two forwards, then the backward of the first, then that of the second."""
    rank = dist.get_rank()
    if rank == 2:
        return
    graphs, received = [], []
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    for number in (1, 2):
        with comm.graph() as graph:
            if rank == 0:
                comm.send(number * x, to=1)
            else:
                received.append(comm.recv(0))
        graphs.append(graph)
    for number, graph in enumerate(graphs, 1):
        assert len(graph) == 1
        comm.backward(received[number - 1].sum() if rank else None, graph)
        assert len(graph) == 0
        if rank == 0:
            assert x.grad.tolist() == [[1.0, 1.0], [3.0, 3.0]][number - 1]


def test_ties_pass_the_whole_gradient_on(three: Ranks) -> None:
    three.run(ties)


@pytest.mark.parametrize("check", [True, False])
def test_a_chain_of_ranks_is_differentiated_twice(three: Ranks, check) -> None:
    three.run(point_to_point, check)


def test_a_receiver_learns_shape_and_dtype(three: Ranks) -> None:
    three.run(swap)


@pytest.mark.parametrize("name", REFERENCES)
def test_a_rank_that_ignores_its_result_blocks_nobody(three: Ranks, name) -> None:
    three.run(unused, name, AXES[name][-1])


@pytest.mark.parametrize("name", REFERENCES)
def test_a_gradient_wanted_on_one_rank(three: Ranks, name) -> None:
    three.run(asymmetric, name, AXES[name][0])


def test_each_micro_batch_has_its_backward(three: Ranks) -> None:
    three.run(micro_batches)


def numeric(name: str, shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    """The gradient of the sum of losses by central differences, one element at a time."""
    rank, step = dist.get_rank(), 1e-6
    xs = [torch.rand(shape, dtype=torch.float64, generator=seeded(r)) for r in range(SIZE)]

    def forward(x: torch.Tensor) -> float:
        with torch.no_grad():
            loss = loss_of(getattr(comm, name)(x, None, *axes), rank)
            return float(comm.all_reduce_sum(torch.zeros(()) if loss is None else loss.float()))

    x = xs[rank].clone().requires_grad_()
    comm.backward(loss_of(getattr(comm, name)(x, None, *axes), rank))
    actual = torch.zeros(shape, dtype=torch.float64) if x.grad is None else x.grad
    for owner, index in product(range(SIZE), range(math.prod(shape))):
        sides = []
        for sign in (1, -1):
            moved = xs[rank].clone()
            if owner == rank:
                moved.view(-1)[index] += sign * step
            loss = loss_of(getattr(comm, name)(moved, None, *axes), rank)
            local = torch.zeros((), dtype=torch.float64) if loss is None else loss
            sides.append(float(comm.all_reduce_sum(local)))
        if owner == rank:
            slope = (sides[0] - sides[1]) / (2 * step)
            assert math.isclose(float(actual.view(-1)[index]), slope, rel_tol=1e-5, abs_tol=1e-6)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("name", REFERENCES)
def test_gradients_are_slopes(three: Ranks, name) -> None:
    three.run(numeric, name, (3, 3), AXES[name][-1] if name != "all_to_all" else (0, 1))


def adjoint(name: str, axes: tuple[int, ...]) -> None:
    """``<A x, y> = <x, A* y>``, where A* is what backward does."""
    rank = dist.get_rank()
    x = torch.rand(SHAPE, dtype=torch.float64, generator=seeded(rank)).requires_grad_()
    out = getattr(comm, name)(x, None, *axes)
    sides = torch.zeros(2, dtype=torch.float64)
    local = None
    if out is not None:
        y = torch.rand(out.shape, dtype=torch.float64, generator=seeded(10 + rank))
        local = (out * y).sum()
        sides[0] = local.detach()
    comm.backward(local)
    if x.grad is not None:
        sides[1] = (x.detach() * x.grad).sum()
    left, right = comm.all_reduce_sum(sides).tolist()
    assert math.isclose(left, right, rel_tol=1e-12)


LINEAR = [name for name in REFERENCES if not name.endswith(("max", "min"))]


@pytest.mark.parametrize("name", LINEAR)
def test_backward_is_the_adjoint(three: Ranks, name) -> None:
    for axes in AXES[name]:
        three.run(adjoint, name, axes)


def compiled() -> None:
    rank = dist.get_rank()

    def f(x: torch.Tensor) -> torch.Tensor:
        return comm.all_reduce_sum(x * x).sin()

    x = torch.tensor([float(rank + 1)], requires_grad=True)
    y = torch.compile(f, backend="eager")(x)
    assert torch.allclose(y, torch.tensor([14.0]).sin())
    comm.backward(y.sum())
    assert torch.allclose(x.grad, SIZE * torch.tensor([14.0]).cos() * 2 * (rank + 1))
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"(?i)disable"):
        torch.compile(f, backend="eager", fullgraph=True)(x)


def in_the_graph() -> None:
    """The same values and gradients as outside of a graph, with nothing left out of it."""
    unchecked = comm.group(check=False)
    operators: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "sum": lambda x: comm.all_reduce_sum(x, unchecked),
        "mean": lambda x: comm.all_reduce_mean(x, group=unchecked),
        "gather": lambda x: comm.all_gather(x, unchecked, axis=-1),
        "scatter": lambda x: comm.reduce_scatter_sum(x, unchecked, 1),
        "swap": lambda x: comm.all_to_all(x, unchecked, 1, 0),
        "swap rows": lambda x: comm.all_to_all(x, unchecked),
    }
    for name, operator in operators.items():
        torch.compiler.reset()
        x = torch.rand(SIZE, 2 * SIZE, 2, generator=seeded(dist.get_rank())).requires_grad_()

        def f(x: torch.Tensor, operator: Any = operator) -> torch.Tensor:
            return operator(x * x).sin()

        results = []
        for run in (f, torch.compile(f, backend="aot_eager", fullgraph=True)):
            y = run(x)
            y.backward(torch.linspace(0, 1, y.numel()).view_as(y))
            results.append((y, x.grad))
            x.grad = None
        assert torch.equal(results[0][0], results[1][0]), name
        assert torch.equal(results[0][1], results[1][1]), name


def without_a_reduction() -> None:
    """Refused as outside of a graph."""
    unchecked = comm.group(check=False)
    operators: list[tuple[Callable[[torch.Tensor], torch.Tensor], torch.dtype]] = [
        (lambda x: comm.all_reduce_sum(x, unchecked), torch.bool),
        (lambda x: comm.all_reduce_sum(x, unchecked), torch.float8_e4m3fn),
        (lambda x: comm.all_reduce_mean(x, group=unchecked), torch.int64),
        (lambda x: comm.reduce_scatter_sum(x, unchecked), torch.bool),
    ]
    for operator, dtype in operators:
        torch.compiler.reset()
        x = torch.ones(SIZE).to(dtype)
        for run in (operator, torch.compile(operator, backend="eager")):
            with pytest.raises(CommError, match=f"of {dtype}; allowed: "):
                run(x)


def transformed() -> None:
    rank = dist.get_rank()

    def loss(x: torch.Tensor) -> torch.Tensor:
        return (rank + 1) * comm.all_reduce_sum(x**2).sum()

    x = torch.tensor([1.0, 2.0]) + rank
    first = torch.func.grad(loss)(x)
    assert torch.allclose(first, 6 * 2 * x)
    value, vjp = torch.func.vjp(lambda t: comm.all_gather(t), x)
    assert torch.allclose(vjp(torch.ones_like(value))[0], torch.full_like(x, SIZE))


def test_compiled_functions_break_at_the_operator(three: Ranks) -> None:
    three.run(compiled)


def test_operators_without_check_stay_in_the_graph(three: Ranks) -> None:
    three.run(in_the_graph)


def test_a_dtype_without_the_reduction_is_refused_when_compiled(three: Ranks) -> None:
    three.run(without_a_reduction)


def test_functional_gradients(three: Ranks) -> None:
    three.run(transformed)


def computed_again(reentrant: bool, by_comm: bool) -> None:
    weight = torch.ones(3, requires_grad=True)

    def block(x: torch.Tensor) -> torch.Tensor:
        return comm.all_reduce_sum((x * weight).sin()).cos()

    gradients = []
    for again in (False, True):
        x, weight.grad = torch.ones(3, requires_grad=True), None
        y = checkpoint(block, x, use_reentrant=reentrant) if again else block(x)
        if by_comm:
            comm.backward(y.sum())
        else:
            y.sum().backward()
        gradients.append(weight.grad)
        assert not current()  # what waits there keeps its graph
    assert torch.equal(*gradients)


def test_operators_that_a_checkpoint_computes_again_leave_nothing(three: Ranks) -> None:
    for case in product((False, True), repeat=2):
        three.run(computed_again, *case)
