"""Results and gradients of the operators against plain math on what all ranks hold."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st

import slipstream.comm as comm
from slipstream.errors import CommError
from tests.harness.operators import (
    AXES,
    REFERENCES,
    SHAPE,
    close,
    expected,
    inputs,
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
        strided = xs[group.rank].to(dtype).transpose(0, -1).contiguous().transpose(0, -1)
        y, first, second = measured(name, group, strided, axes)
        close(y, ys[group.rank], dtype)
        close(first, firsts[group.rank], dtype)
        close(second, seconds[group.rank], dtype)


@pytest.mark.parametrize("check", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("ranks", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("name", REFERENCES)
def test_results_and_gradients_of_both_orders(three: Ranks, name, ranks, check) -> None:
    three.run(compare, name, ranks, list(product(DTYPES, [SHAPE], AXES[name])), 0, check)


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
    for actual, reference in checks:
        assert actual is None or actual.dtype == dtype
        assert actual is None or torch.equal(actual.to(wide[0].dtype), reference.to(wide[0].dtype))
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


def test_sizes_may_differ(three: Ranks) -> None:
    three.run(uneven)
    three.run(uneven_all_to_all)


def test_scalars(three: Ranks) -> None:
    three.run(scalars)


@pytest.mark.parametrize("dtype", OTHERS, ids=str)
def test_other_dtypes(three: Ranks, dtype) -> None:
    three.run(other_dtypes, dtype)


def test_views_with_a_pending_negation(three: Ranks) -> None:
    three.run(negative_views)


def test_gradients_of_complex_numbers(three: Ranks) -> None:
    three.run(complex_gradients)


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(list(REFERENCES)),
    ranks=st.permutations(range(SIZE)),
    multiples=st.lists(st.integers(0, 3), min_size=1, max_size=4),
    axes=st.tuples(st.integers(-4, 3), st.integers(-4, 3)),
    seed=st.integers(0, 99),
)
def test_random_shapes(three: Ranks, name, ranks, multiples, axes, seed) -> None:
    dims = len(multiples)
    folded = tuple(axis % dims for axis in axes)[: len(AXES[name][0])]
    shape = tuple(SIZE * m for m in multiples)
    three.run(compare, name, ranks, [(torch.float64, shape, folded)], seed)


def test_alone_every_operator_is_the_identity() -> None:
    x = torch.arange(6.0).reshape(2, 3).requires_grad_()
    for name in REFERENCES:
        y = getattr(comm, name)(x)
        assert torch.equal(y, x)
        (gradient,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(gradient, torch.ones_like(x))
    comm.backward()
