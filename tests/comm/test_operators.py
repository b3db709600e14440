"""The operators between ranks against plain math on what all ranks hold, at every order."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import slipstream.comm as comm
from slipstream.errors import CommError, ExchangeError, MismatchError
from tests.harness.operators import (
    AXES,
    REFERENCES,
    SHAPE,
    close,
    expected,
    inputs,
    loss_of,
    measured,
    total,
)
from tests.harness.ranks import Ranks

SIZE = 3
GROUPS = {
    "world": None,
    "subgroup": [0, 2],
    "permuted": [2, 0, 1],
    "reversed": [2, 0],
    "single": [1],
}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module")
def team() -> Iterator[Ranks]:
    with Ranks(SIZE, timeout=20.0) as ranks:
        yield ranks


def compare(
    name: str,
    ranks: list[int] | None,
    cases: list[tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]],
    seed: int = 0,
    check: bool = True,
) -> None:
    """Every case of ``(dtype, shape, axes)`` on this rank, if it is in the group."""
    group = comm.group(ranks, check=check)
    if group.rank < 0:
        return
    for dtype, shape, axes in cases:
        xs = inputs(group.size, shape, torch.float64, seed)
        ys, firsts, seconds = expected(name, xs, axes)
        odd = xs[group.rank].to(dtype).transpose(0, -1).contiguous().transpose(0, -1)
        y, first, second = measured(name, group, odd, axes)
        close(y, ys[group.rank], dtype)
        close(first, firsts[group.rank], dtype)
        close(second, seconds[group.rank], dtype)


@pytest.mark.parametrize("check", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("ranks", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("name", REFERENCES)
def test_results_and_gradients_of_both_orders(team: Ranks, name, ranks, check) -> None:
    team.run(compare, name, ranks, list(product(DTYPES, [SHAPE], AXES[name])), 0, check)


# Sizes that differ, scalars, other dtypes.


def uneven() -> None:
    group = comm.group([2, 0, 1])
    sizes, me = (3, 0, 2), group.rank
    x = torch.arange(2.0 * sizes[me]).reshape(2, sizes[me]).add(10 * me).requires_grad_()
    whole = torch.cat(
        [torch.arange(2.0 * s).reshape(2, s) + 10 * r for r, s in enumerate(sizes)], 1
    )
    for group_now, known in ((group, None), (comm.group([2, 0, 1], check=False), sizes)):
        y = comm.all_gather(x, group_now, axis=1, sizes=known)
        assert torch.equal(y, whole)
        y.mul(me + 1).sum().backward()
        assert torch.equal(x.grad, torch.full_like(x, 6.0))
        x.grad = None
        z = comm.gather(x, group_now, axis=1, sizes=known)
        comm.backward(None if z is None else (z * whole).sum())
        assert torch.equal(x.grad, x)
        x.grad = None
        part = comm.scatter(whole.clone() if me == 0 else whole * 0, group_now, 1, sizes=sizes)
        assert torch.equal(part, x)
        part = comm.reduce_scatter_sum(whole, group_now, -1, sizes=sizes)
        assert torch.equal(part, 3 * x)


def uneven_all_to_all() -> None:
    """Rank i has (i + j) % 3 rows for rank j; the rows say where they come from and go to."""
    rank = dist.get_rank()
    sizes = [(rank + to) % SIZE for to in range(SIZE)]
    rows = [torch.full((n, 2), 10.0 * rank + to) for to, n in enumerate(sizes)]
    x = torch.cat(rows).requires_grad_()
    for check in (True, False):
        y = comm.all_to_all(x, comm.group(check=check), sizes=sizes)
        came = [torch.full(((r + rank) % SIZE, 2), 10.0 * r + rank) for r in range(SIZE)]
        assert torch.equal(y, torch.cat(came))
        (y * y).sum().backward()
        assert torch.equal(x.grad, 2 * x)
        x.grad = None
    # cut into uneven pieces, joined along another axis, where the ranks' lengths differ
    x = torch.arange(5.0 * (rank + 1)).reshape(5, rank + 1) + 100 * rank
    y = comm.all_to_all(x, None, 0, 1, sizes=[2, 0, 3])
    wholes = [torch.arange(5.0 * (r + 1)).reshape(5, r + 1) + 100 * r for r in range(SIZE)]
    assert torch.equal(y, torch.cat(wholes, 1).split([2, 0, 3])[rank])
    z = comm.all_to_all(y.contiguous(), None, 1, 0, sizes=[1, 2, 3])
    assert torch.equal(z, x)


def scalars() -> None:
    rank = dist.get_rank()
    x = torch.tensor(float(rank + 1), requires_grad=True)
    y = comm.all_gather(x)
    assert torch.equal(y, torch.tensor([1.0, 2.0, 3.0]))
    comm.backward((y * torch.tensor([1.0, 10.0, 100.0])).sum())
    assert x.grad.shape == ()
    assert x.grad == 3 * 10**rank
    assert comm.all_reduce_sum(x).shape == comm.broadcast(x).shape == ()
    assert comm.all_reduce_max(x) == 3
    assert comm.all_reduce_min(x) == 1


OTHERS = [torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn]


def other_dtypes(dtype: torch.dtype) -> None:
    rank = dist.get_rank()
    xs = [torch.tensor([[0, 1, 2], [r, 1, 0]]).to(dtype) for r in range(SIZE)]
    wide = [x.to(torch.complex64 if dtype.is_complex else torch.float32) for x in xs]
    checks: list[tuple[torch.Tensor | None, torch.Tensor]] = [
        (comm.broadcast(xs[rank]), xs[0]),
        (comm.all_gather(xs[rank], axis=1), torch.cat(xs, 1)),
        (comm.gather(xs[rank]), torch.cat(xs)),
        (comm.scatter(xs[rank], axis=1), xs[0][:, rank : rank + 1]),
        (comm.all_to_all(xs[rank], None, 1, 0), torch.cat([x[:, rank : rank + 1] for x in xs])),
    ]
    for found, wanted in checks:
        assert found is None or found.dtype == dtype
        assert found is None or torch.equal(found.to(wide[0].dtype), wanted.to(wide[0].dtype))
    if dtype in (torch.bool, torch.float8_e4m3fn):
        with pytest.raises(CommError, match=r"allowed: a wider dtype"):
            comm.all_reduce_sum(xs[rank])
        return
    assert torch.equal(comm.all_reduce_sum(xs[rank]), total(xs).to(dtype))
    piece = comm.reduce_scatter_sum(xs[rank], axis=1)
    assert piece.dtype == dtype
    assert torch.equal(piece, total(xs).to(dtype)[:, rank : rank + 1])
    if not dtype.is_complex:
        assert torch.equal(comm.all_reduce_max(xs[rank]), torch.stack(xs).amax(0))
        with pytest.raises(CommError, match="floating-point and complex"):
            comm.all_reduce_mean(xs[rank])


def negative_views() -> None:
    """What torch has not negated yet: a contiguous view of numbers that mean others."""
    x = torch.tensor([1 + 2j]).conj().imag
    assert x.is_neg()
    assert x.is_contiguous()
    assert comm.all_gather(x).tolist() == [-2.0] * SIZE
    assert comm.all_reduce_sum(x).tolist() == [-2.0 * SIZE]
    assert comm.all_to_all(x.repeat(SIZE)).tolist() == [-2.0] * SIZE
    if dist.get_rank() == 0:
        comm.send(x, to=1)
    elif dist.get_rank() == 1:
        assert comm.recv(0).tolist() == [-2.0]


def complex_gradients() -> None:
    rank = dist.get_rank()
    x = torch.tensor([1 + 2j, 3 - 1j], requires_grad=True)
    y = comm.all_reduce_sum(x * (rank + 1))
    comm.backward((y.abs() ** 2).sum())
    assert torch.allclose(x.grad, SIZE * 2 * y.detach() * (rank + 1))


def test_sizes_may_differ(team: Ranks) -> None:
    team.run(uneven)
    team.run(uneven_all_to_all)


def test_scalars(team: Ranks) -> None:
    team.run(scalars)


@pytest.mark.parametrize("dtype", OTHERS, ids=str)
def test_what_is_not_differentiated_moves_too(team: Ranks, dtype) -> None:
    team.run(other_dtypes, dtype)


def test_views_that_are_to_be_negated(team: Ranks) -> None:
    team.run(negative_views)


def test_gradients_of_complex_numbers(team: Ranks) -> None:
    team.run(complex_gradients)


# Ties, point to point, ranks that do not use what they got.


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
    own = loss_of(getattr(comm, name)(x, None, *axes), rank)
    comm.backward(own if own is not None and own.requires_grad else None)
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


def test_ties_pass_the_whole_gradient_on(team: Ranks) -> None:
    team.run(ties)


@pytest.mark.parametrize("check", [True, False])
def test_a_chain_of_ranks_is_differentiated_twice(team: Ranks, check) -> None:
    team.run(point_to_point, check)


def test_a_receiver_learns_shape_and_dtype(team: Ranks) -> None:
    team.run(swap)


@pytest.mark.parametrize("name", REFERENCES)
def test_a_rank_that_uses_nothing_holds_nobody_up(team: Ranks, name) -> None:
    team.run(unused, name, AXES[name][-1])


@pytest.mark.parametrize("name", REFERENCES)
def test_a_gradient_wanted_on_one_rank(team: Ranks, name) -> None:
    team.run(asymmetric, name, AXES[name][0])


def test_each_micro_batch_has_its_backward(team: Ranks) -> None:
    team.run(micro_batches)


# Properties.


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
    found = torch.zeros(shape, dtype=torch.float64) if x.grad is None else x.grad
    for owner, index in product(range(SIZE), range(math.prod(shape))):
        sides = []
        for sign in (1, -1):
            moved = xs[rank].clone()
            if owner == rank:
                moved.view(-1)[index] += sign * step
            loss = loss_of(getattr(comm, name)(moved, None, *axes), rank)
            own = torch.zeros((), dtype=torch.float64) if loss is None else loss
            sides.append(float(comm.all_reduce_sum(own)))
        if owner == rank:
            slope = (sides[0] - sides[1]) / (2 * step)
            assert math.isclose(float(found.view(-1)[index]), slope, rel_tol=1e-5, abs_tol=1e-6)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("name", REFERENCES)
def test_gradients_are_slopes(team: Ranks, name) -> None:
    team.run(numeric, name, (3, 3), AXES[name][-1] if name != "all_to_all" else (0, 1))


def adjoint(name: str, axes: tuple[int, ...]) -> None:
    """``<A x, y> = <x, A* y>``, where A* is what backward does."""
    rank = dist.get_rank()
    x = torch.rand(SHAPE, dtype=torch.float64, generator=seeded(rank)).requires_grad_()
    out = getattr(comm, name)(x, None, *axes)
    sides = torch.zeros(2, dtype=torch.float64)
    own = None
    if out is not None:
        y = torch.rand(out.shape, dtype=torch.float64, generator=seeded(10 + rank))
        own = (out * y).sum()
        sides[0] = own.detach()
    comm.backward(own)
    if x.grad is not None:
        sides[1] = (x.detach() * x.grad).sum()
    left, right = comm.all_reduce_sum(sides).tolist()
    assert math.isclose(left, right, rel_tol=1e-12)


LINEAR = [name for name in REFERENCES if not name.endswith(("max", "min"))]


@pytest.mark.parametrize("name", LINEAR)
def test_backward_is_the_adjoint(team: Ranks, name) -> None:
    for axes in AXES[name]:
        team.run(adjoint, name, axes)


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(list(REFERENCES)),
    ranks=st.permutations(range(SIZE)),
    multiples=st.lists(st.integers(0, 3), min_size=1, max_size=4),
    axes=st.tuples(st.integers(-4, 3), st.integers(-4, 3)),
    seed=st.integers(0, 99),
)
def test_random_shapes(team: Ranks, name, ranks, multiples, axes, seed) -> None:
    dims = len(multiples)
    folded = tuple(axis % dims for axis in axes)[: len(AXES[name][0])]
    shape = tuple(SIZE * m for m in multiples)
    team.run(compare, name, ranks, [(torch.float64, shape, folded)], seed)


# Under torch's own transforms.


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


def transformed() -> None:
    rank = dist.get_rank()

    def loss(x: torch.Tensor) -> torch.Tensor:
        return (rank + 1) * comm.all_reduce_sum(x**2).sum()

    x = torch.tensor([1.0, 2.0]) + rank
    first = torch.func.grad(loss)(x)
    assert torch.allclose(first, 6 * 2 * x)
    value, vjp = torch.func.vjp(lambda t: comm.all_gather(t), x)
    assert torch.allclose(vjp(torch.ones_like(value))[0], torch.full_like(x, SIZE))


def test_compiled_functions_break_at_the_operator(team: Ranks) -> None:
    team.run(compiled)


def test_functional_gradients(team: Ranks) -> None:
    team.run(transformed)


# Mistakes: an error on every rank, and the group works on.

x23, x32, x4 = torch.zeros(2, 3), torch.zeros(3, 2), torch.zeros(4)
MISTAKES: dict[str, tuple[list[Callable[[], Any]], str]] = {
    "shapes": (
        [lambda: comm.all_reduce_sum(x23)] * 2 + [lambda: comm.all_reduce_sum(x32)],
        r"rank 2 calls all_reduce_sum with float32 \[3, 2\], rank 0 float32 \[2, 3\]",
    ),
    "dtypes": (
        [lambda: comm.all_gather(x23.half() if dist.get_rank() == 1 else x23)] * 3,
        r"rank 1 calls all_gather with float16 \[any, 3\], rank 0 float32 \[any, 3\]",
    ),
    "operators": (
        [lambda: (comm.all_reduce_max if dist.get_rank() == 1 else comm.all_reduce_sum)(x23)] * 3,
        "rank 1 calls all_reduce_max, rank 0 all_reduce_sum",
    ),
    "axes": (
        [lambda: comm.all_gather(x23, axis=0)] * 2 + [lambda: comm.all_gather(x23, axis=1)],
        r"rank 2 calls all_gather with options \(1,\), rank 0 \(0,\)",
    ),
    "no tensor": (
        [lambda: comm.all_reduce_sum(x23)] * 2 + [lambda: comm.all_reduce_sum("x")],
        "rank 2 calls all_reduce_sum .* no supported tensor|all_reduce_sum of str",
    ),
    "no tensor at the root": ([lambda: comm.broadcast(None)] * 3, "rank 0, the root, passes no"),
    "not divisible": (
        [lambda: comm.reduce_scatter_sum(x4)] * 3,
        r"4 along axis 0 cannot be split into 3 equal pieces; allowed: a multiple of 3, or sizes",
    ),
    "sizes": (
        [lambda: comm.scatter(x4, sizes=[1, 1, 1])] * 3,
        r"sizes \[1, 1, 1\]; allowed: one for each of the 3 ranks .* together 4",
    ),
    "other sizes": (
        [lambda: comm.scatter(x4, sizes=[1, 1, 2])] * 2
        + [lambda: comm.scatter(x4, sizes=[2, 1, 1])],
        "rank 2 calls scatter with options",
    ),
    "no such axis": ([lambda: comm.gather(x23, axis=2)] * 3, r"axis 2 of .* allowed: -2 .. 1"),
    "no such rank": (
        [lambda: comm.send(x4, to=3)] * 3,
        r"send with rank 3 .* another one of 0 .. 2",
    ),
    "no_grad on one rank": (
        [lambda: comm.all_reduce_sum(x4.clone().requires_grad_())] * 2
        + [torch.no_grad()(lambda: comm.all_reduce_sum(x4))],
        "is_grad_enabled.*False, rank 0 True",
    ),
    "sizes that cannot be joined": (
        [lambda: comm.all_to_all(x23.t(), None, 0, 1, sizes=[1, 1, 1])] * 2
        + [lambda: comm.all_to_all(x23.t(), None, 0, 1, sizes=[0, 2, 1])],
        r"pieces of \(1, 1, 1\) and \(0, 2, 1\) along axis 0",
    ),
}


def mistake(name: str) -> str:
    calls, _ = MISTAKES[name]
    with pytest.raises((CommError, MismatchError)) as caught:
        calls[dist.get_rank()]()
    assert comm.all_reduce_sum(torch.ones(())) == SIZE
    return str(caught.value)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_an_error_on_every_rank(team: Ranks, name) -> None:
    for text in team.run(mistake, name):
        assert re.search(MISTAKES[name][1], text, re.DOTALL), text


def outside() -> None:
    group = comm.group([2, 0])
    if group.rank < 0:
        with pytest.raises(
            CommError, match=r"group \[2, 0\] on rank 1, which is not in that group"
        ):
            comm.all_reduce_sum(torch.ones(1), group)
    for ranks in ([0, 3], [1, 1], []):
        with pytest.raises(CommError, match=r"allowed: one or more of the 3 ranks 0 .. 2"):
            comm.group(ranks)
    dist.barrier()  # a rank that is done must not leave while another still connects


LATE: dict[str, Callable[[comm.Group], object]] = {
    "recv from rank 1": lambda group: comm.recv(1, group),
    "send to rank 2": lambda group: comm.send(torch.ones(2), 2, group),
    "all_gather in group [0, 1, 2]": lambda group: comm.all_gather(torch.ones(2), group),
}


def late(what: str) -> str:
    """Rank 0 waits for a rank that does not come."""
    group = comm.group(timeout=timedelta(seconds=1))
    caught = ""
    if dist.get_rank() == 0:
        with pytest.raises(ExchangeError) as error:
            LATE[what](group)
        caught = str(error.value)
    dist.barrier()
    return caught


def one_sided_backward() -> str:
    group = comm.group(timeout=timedelta(seconds=1))
    x = torch.ones(2, requires_grad=True)
    y = comm.all_reduce_sum(x, group)
    caught = ""
    if dist.get_rank() == 0:
        with pytest.raises(ExchangeError) as error:
            comm.backward(y.sum())
        caught = str(error.value)
    dist.barrier()
    return caught


@pytest.mark.parametrize("what", LATE)
def test_a_rank_that_does_not_come_is_named(team: Ranks, what) -> None:
    (said, *_) = team.run(late, what)
    assert what in said


def test_backward_on_one_side_ends_with_advice(team: Ranks) -> None:
    (text, *_) = team.run(one_sided_backward)
    assert "backward of all_reduce_sum in group [0, 1, 2]" in text
    assert "comm.backward()" in text


def test_who_is_outside_and_what_is_no_group(team: Ranks) -> None:
    team.run(outside)


def test_alone_every_operator_is_the_identity() -> None:
    x = torch.arange(6.0).reshape(2, 3).requires_grad_()
    for name in REFERENCES:
        y = getattr(comm, name)(x)
        assert torch.equal(y, x)
        (gradient,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(gradient, torch.ones_like(x))
    comm.backward()
