"""Tracks operators whose backward has not run, so that ranks that ignore a result still join in.

Runs no collective itself.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from slipstream.errors import CommError, warn

_WARN_AT = 10_000


class Graph:
    """The operators of one forward on this rank whose backward has not run; for `comm.backward`.

    Each entry is a token: a tensor of no elements that leads to the operator in the autograd graph,
    and so keeps alive what autograd saved for its backward.
    """

    def __init__(self) -> None:
        self._tokens: dict[int, torch.Tensor] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._tokens)

    def add(self, token: torch.Tensor) -> int:
        """Register an operator by its token; returns its number."""
        number = next(self._numbers)
        self._tokens[number] = token
        if len(self._tokens) == _WARN_AT:
            warn(
                f"{_WARN_AT} operators of slipstream.comm wait for their backward and keep memory: "
                "call comm.backward() after each forward, or evaluate under torch.no_grad()",
            )
        return number

    def discard(self, number: int) -> None:
        """Forget an operator, since its backward has run."""
        self._tokens.pop(number, None)

    def take(self) -> list[torch.Tensor]:
        """Remove and return all tokens, in the order of the forward."""
        tokens, self._tokens = self._tokens, {}
        return list(tokens.values())


class _GraphStack(threading.local):
    def __init__(self) -> None:
        self.graphs = [Graph()]


_stack = _GraphStack()


def current() -> Graph:
    """The graph in which operators of this thread are registered now."""
    return _stack.graphs[-1]


@contextmanager
def graph() -> Iterator[Graph]:
    """Operators called inside belong to a graph of their own, e.g. of one micro-batch.

    ``comm.backward(loss, graph)`` then runs that graph alone. Operators left in it are freed with
    the last reference to the graph.

    Example:
        >>> import torch, slipstream.comm as comm
        >>> x = torch.ones(2, requires_grad=True)
        >>> with comm.graph() as micro_batch:
        ...     y = comm.all_reduce_sum(x)
        >>> comm.backward(y.sum(), micro_batch)
        >>> x.grad
        tensor([1., 1.])
    """
    opened = Graph()
    _stack.graphs.append(opened)
    try:
        yield opened
    finally:
        _stack.graphs.remove(opened)


def backward(
    loss: torch.Tensor | None = None, graph: Graph | None = None, *, create_graph: bool = False
) -> None:
    """Run backward from ``loss`` and from all operators whose result this rank did not use.

    Every rank calls it; a rank without a loss, e.g. one that only sends, passes None. It
    differentiates the sum of the ranks' losses. After a forward in which every rank uses all its
    results, ``loss.backward()`` does the same.

    Args:
        loss: of one element, or None.
        graph: None: that of the innermost ``with comm.graph()`` around the call, or the thread's.
        create_graph: record backward itself, for second derivatives.

    Raises:
        CommError: ``loss`` is not a scalar, or requires no gradient.
        ExchangeError: another rank does not take part; names the operator and its peers.

    Source: MegEngine's ``GradManager.backward()`` without a loss.
    """
    if loss is not None and (loss.numel() != 1 or not loss.requires_grad):
        raise CommError(
            f"backward() of shape {list(loss.shape)}, requires_grad={loss.requires_grad}; allowed: "
            "None, or a loss of one element that requires a gradient"
        )
    roots = (graph if graph is not None else current()).take()
    gradients: list[torch.Tensor | None] = [torch.zeros_like(token) for token in roots]
    if loss is not None:
        roots, gradients = [*roots, loss], [*gradients, None]
    if roots:
        torch.autograd.backward(roots, gradients, create_graph=create_graph)
