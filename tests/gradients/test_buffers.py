"""Buffers of the first rank are written back after an update, unless a forward came between."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from slipstream.gradients.buffers import Buffers


def test_what_a_forward_between_backward_and_update_changes_stays() -> None:
    """Batch normalisation does not count its changes."""
    norm = nn.BatchNorm1d(3)
    norm(torch.arange(12.0).view(4, 3))
    buffers = Buffers(norm.named_buffers)
    buffers.stage()
    buffers.arrived()
    norm(torch.ones(4, 3))
    changed = {name: value.clone() for name, value in norm.named_buffers()}
    buffers.restore()
    assert all(torch.equal(value, changed[name]) for name, value in norm.named_buffers())


def test_those_of_the_first_rank_are_written_where_nothing_came_between() -> None:
    model = nn.Module()
    model.register_buffer("first", torch.zeros(2))
    model.register_buffer("second", torch.full((3,), float("nan")))
    buffers = Buffers(model.named_buffers)
    of_first_rank = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    buffers.stage().tensor.copy_(of_first_rank.view(torch.uint8))
    buffers.arrived()
    model.first = model.get_buffer("first").add_(7.0)
    buffers.restore()
    assert model.first.tolist() == [7.0, 7.0]
    assert model.second.tolist() == [3.0, 4.0, 5.0]


def test_a_graph_that_waits_for_its_backward_meanwhile_goes_on() -> None:
    """As that of a generator while the discriminator of the same session is updated. What counts
    its own changes, a graph may look at: to write it is counted, too."""
    norm = nn.BatchNorm1d(3)
    norm.register_buffer("codes", torch.ones(3))
    buffers = Buffers(norm.named_buffers)
    for number in range(2):
        hidden = norm(torch.randn(4, 3))
        codes = torch.ones(3, requires_grad=True) * norm.get_buffer("codes").add_(1.0)
        request = buffers.stage()
        request.tensor.copy_(torch.full_like(request.tensor, number))
        buffers.arrived()
        buffers.restore()
        hidden.sum().backward()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            codes.sum().backward()
