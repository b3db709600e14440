"""Forwards and backwards in any order give the plain gradients and leave the store empty."""

from __future__ import annotations

import gc

import pytest
import torch

from slipstream.memory import offload
from tests.memory.offload.squares import ALL, LoggedStore, squares, start


def equal_after(backward, blocks=4):
    """Whether gradients are the plain ones after what ``backward(model, x)`` does."""
    grads = []
    for config in (None, ALL):
        model, x = squares(blocks), start()
        if config is None:
            backward(model, x)
        else:
            with offload(model, config):
                backward(model, x)
        grads.append(x.grad)
    return torch.equal(*grads)


def twice(model, x):
    loss = model(x).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def two_forwards(model, x):
    losses = [model(x).sum(), model(2 * x).sum(), model(3 * x).sum()]
    losses[1].backward()
    (losses[0] + losses[2]).backward()


def one_never(model, x):
    model(x)
    model(x).sum().backward()


def failed_forward(model, x):
    def fail(*_):
        raise KeyError("oops")

    handle = model[2].inner.register_forward_hook(fail)
    with pytest.raises(KeyError):
        model(x)
    handle.remove()
    model(x).sum().backward()


def failed_backward(model, x):
    def fail(grad):
        raise KeyError("oops")

    hidden = model[:2](x)
    handle = hidden.register_hook(fail)
    with pytest.raises(KeyError):
        model[2:](hidden).sum().backward()
    handle.remove()
    del hidden
    x.grad = None
    model(x).sum().backward()


def without_grad(model, x):
    with torch.no_grad():
        model(x)
    model(x).sum().backward()


def half_of_it(model, x):
    hidden = model[:3](x)
    loss = model[3:](hidden).sum()
    torch.autograd.grad(loss, hidden, retain_graph=True)
    loss.backward()


def second_derivative(model, x):
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    grad.square().sum().backward()


def frozen_start(model, x):
    hidden = model[:2](x.detach())
    (model[2:](hidden + x)).sum().backward()


PASSES = [
    twice,
    two_forwards,
    one_never,
    failed_forward,
    failed_backward,
    without_grad,
    half_of_it,
    second_derivative,
    frozen_start,
]


@pytest.mark.parametrize("backward", PASSES)
def test_any_order_of_passes(backward):
    assert equal_after(backward)


@pytest.mark.parametrize("backward", PASSES)
def test_the_store_is_empty_afterwards(backward):
    store = LoggedStore()
    model, x = squares(4), start()
    with offload(model, ALL, store=store):
        backward(model, x)
        gc.collect()
        store.put(torch.zeros(1, dtype=torch.uint8), "last")  # what was dropped is cleared away
        assert store._slots._num_taken - len(store._dropped) == 1
