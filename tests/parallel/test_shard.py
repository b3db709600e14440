"""Cutting and joining, and the mesh of ranks: pure functions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from slipstream.errors import StrategyError
from slipstream.parallel.dims import Mesh
from slipstream.parallel.tensor.shard import Shard
from slipstream.pytree import checksum


@given(st.data())
def test_join_undoes_piece(data: st.DataObject) -> None:
    ranks, parts = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    shape = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
    axis = data.draw(st.integers(0, len(shape) - 1))
    shape[axis] = parts * data.draw(st.integers(0, 9))
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    shard = Shard.even(axis, shape[axis], ranks, parts)
    pieces = [shard.piece(whole, rank) for rank in range(ranks)]
    assert torch.equal(shard.join(pieces), whole)
    assert max(shard.sizes) - min(shard.sizes) <= 1
    assert shard.length == shape[axis]
    assert [p.shape[axis] for p in pieces] == [parts * size for size in shard.sizes]


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_every_rank_is_in_one_group_of_each_axis(data: int, pipeline: int, tensor: int) -> None:
    world = data * pipeline * tensor
    mesh = Mesh.of(world, pipeline=pipeline, tensor=tensor)
    for axis in mesh.sizes:
        groups = mesh.groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(world))
        for group in groups:
            places = [mesh.coordinates(rank) for rank in group]
            assert [place[axis] for place in places] == list(range(mesh.sizes[axis]))
            assert len({tuple(p[a] for a in p if a != axis) for p in places}) == 1


def test_ranks_that_make_no_box_are_refused() -> None:
    with pytest.raises(StrategyError, match="take 4 ranks, but 6 were started"):
        Mesh.of(6, pipeline=2, tensor=2)


def test_a_batch_of_one_value_is_compared_whatever_its_stride() -> None:
    assert checksum(torch.tensor(2.0).expand(1)) == checksum(torch.tensor([2.0]))
