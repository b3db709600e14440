"""What backward must not miss: operators of a forward whose result this rank does not use.

Never runs a collective by itself.
"""

from __future__ import annotations

import itertools
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from slipstream.errors import CommError

_MANY = 10_000


class Graph:
    """The operators of one forward on this rank; `comm.backward` runs those that wait.

    An operator waits until its backward has run. What it holds on to is a tensor of no elements,
    and through it what autograd has saved for the backward.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, torch.Tensor] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, token: torch.Tensor) -> int:
        """An operator waits for its backward, and ``token`` leads to it: its number."""
        number = next(self._numbers)
        self._waiting[number] = token
        if len(self._waiting) == _MANY:
            warnings.warn(
                f"{_MANY} operators of slipstream.comm wait for their backward and keep memory: "
                "call comm.backward() after each forward, or evaluate under torch.no_grad()",
                stacklevel=2,
            )
        return number

    def discard(self, number: int) -> None:
        """The backward of an operator has run."""
        self._waiting.pop(number, None)

    def take(self) -> list[torch.Tensor]:
        """The tokens of the operators that wait, which then wait no longer."""
        tokens = list(self._waiting.values())
        self._waiting.clear()
        return tokens


class _Graphs(threading.local):
    def __init__(self) -> None:
        self.open = [Graph()]


_graphs = _Graphs()


def current() -> Graph:
    """The graph that operators of this thread belong to now."""
    return _graphs.open[-1]


@contextmanager
def graph() -> Iterator[Graph]:
    """Operators called inside belong to a graph of their own, e.g. of one micro-batch.

    ``comm.backward(loss, graph)`` then runs that graph alone. What still waits when nobody refers
    to the graph any more is freed.

    Example:
        >>> import torch, slipstream.comm as comm
        >>> x = torch.ones(2, requires_grad=True)
        >>> with comm.graph() as micro_batch:
        ...     y = comm.all_reduce_sum(x)
        >>> comm.backward(y.sum(), micro_batch)
        >>> x.grad
        tensor([1., 1.])
    """
    made = Graph()
    _graphs.open.append(made)
    try:
        yield made
    finally:
        _graphs.open.remove(made)


def backward(
    loss: torch.Tensor | None = None, graph: Graph | None = None, *, create_graph: bool = False
) -> None:
    """Backward of ``loss``, and of all operators whose result this rank did not use.

    Every rank calls it, with None where it holds no loss: a rank that only sent takes part that
    way. What is differentiated is the sum of the ranks' losses. After a forward in which every rank
    uses all that it gets, ``loss.backward()`` does the same.

    Args:
        loss: of one element, or None.
        graph: None: that of the innermost ``with comm.graph()`` around the call, or the thread's.
        create_graph: record backward itself, for second derivatives.

    Raises:
        CommError: ``loss`` is not a scalar, or requires no gradient.
        ExchangeError: another rank does not come; names the operator and its peers.

    Source: MegEngine's ``GradManager.backward()`` without a loss.
    """
    if loss is not None and (loss.numel() != 1 or not loss.requires_grad):
        raise CommError(
            f"backward() of shape {list(loss.shape)}, requires_grad={loss.requires_grad}; allowed: "
            "None, or a loss of one element that requires a gradient"
        )
    roots = (graph if graph is not None else current()).take()
    seeds: list[torch.Tensor | None] = [torch.zeros_like(token) for token in roots]
    if loss is not None:
        roots.append(loss)
        seeds.append(None)
    if roots:
        torch.autograd.backward(roots, seeds, create_graph=create_graph)
