"""Mistakes in calls of the operators: an error on every rank, and the group works on."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import slipstream.comm as comm
from slipstream.comm.graphs import current
from slipstream.errors import CommError, ExchangeError, MismatchError
from tests.harness.ranks import Ranks

SIZE = 3


x23, x32, x4 = torch.zeros(2, 3), torch.zeros(3, 2), torch.zeros(4)


def in_unchecked(x: torch.Tensor) -> torch.Tensor:
    return comm.all_gather(x, comm.group(check=False))


def destroyed() -> comm.Group:
    made = comm.group()
    dist.destroy_process_group(made.process_group)
    return made


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
    "vmap": (
        [lambda: torch.func.vmap(comm.all_reduce_sum)(x23)] * 3,
        r"all_reduce_sum under torch\.func\.vmap, .* allowed: torch\.func\.grad and vjp",
    ),
    "forward mode": (
        [lambda: torch.func.jvp(comm.all_reduce_sum, (x4,), (x4,))] * 3,
        "all_reduce_sum under forward-mode differentiation",
    ),
    "forward mode, unchecked": (
        [lambda: torch.func.jvp(in_unchecked, (x4,), (x4,))] * 3,
        "all_gather under forward-mode differentiation",
    ),
    "destroyed": (
        [lambda: comm.broadcast(x4, destroyed())] * 3,
        "broadcast in group .*, whose process group was destroyed; make another",
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
def test_a_mistake_is_an_error_on_every_rank(three: Ranks, name) -> None:
    for text in three.run(mistake, name):
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
    current().take()  # else the next comm.backward() of this process would run it
    dist.barrier()
    return caught


def received_without_gradients() -> None:
    group = comm.group(timeout=timedelta(seconds=1))
    if dist.get_rank() == 0:
        with pytest.raises(ExchangeError):
            comm.send(torch.ones(2, requires_grad=True), 1, group)
    if dist.get_rank() == 1:
        with (
            torch.no_grad(),
            pytest.raises(
                MismatchError, match=r"recv from rank 0 .* requires a gradient, .* False here"
            ),
        ):
            comm.recv(0, group)
        assert not current()
    current().take()
    dist.barrier()


def test_a_gradient_is_not_received_without_a_graph(three: Ranks) -> None:
    three.run(received_without_gradients)


@pytest.mark.parametrize("what", LATE)
def test_a_rank_that_does_not_come_is_named(three: Ranks, what) -> None:
    (message, *_) = three.run(late, what)
    assert what in message


def test_backward_on_one_side_ends_with_advice(three: Ranks) -> None:
    (text, *_) = three.run(one_sided_backward)
    assert "backward of all_reduce_sum in group [0, 1, 2]" in text
    assert "comm.backward()" in text


def test_ranks_outside_a_group_and_invalid_groups_are_refused(three: Ranks) -> None:
    three.run(outside)
