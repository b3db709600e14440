"""Codecs between hosts: what hosts exchange is what as many ranks would, of the hosts' sums."""

from __future__ import annotations

import pytest
import torch

from slipstream.codecs import powersgd
from tests.codecs.compressors import SHAPES, Team, sum_kept
from tests.codecs.hosts import CODECS, FED_BACK, NODES, HostsTeam

every_codec = pytest.mark.parametrize("name", CODECS)
on_all_nodes = pytest.mark.parametrize("nodes", NODES.values(), ids=NODES)


@every_codec
@on_all_nodes
def test_it_is_the_codec_over_the_sums_of_the_hosts(name, nodes, monkeypatch) -> None:
    plain = powersgd.direction
    monkeypatch.setattr(powersgd, "direction", lambda m, width, seed: plain(m, width, 0))
    team, reference = HostsTeam(CODECS[name], nodes), Team(CODECS[name], len(nodes))
    for step in range(3):
        gradients = team.gradients(step)
        results = team.exchange(gradients, step)
        expected = reference.exchange(team.sums(gradients), step)
        if "stochastic" in name:  # another random stream for each share
            expected = results
        assert all(torch.equal(expected[0], result) for result in results)
        raised = [int(slot < team.ranks) for slot in range(len(SHAPES))]
        assert [flags.tolist() for flags in team.flags] == [[*raised, 0]] * team.ranks


@every_codec
@pytest.mark.parametrize("at", [0, 17 * 23 + 2, 17 * 23 + 5 + 60, -1])
def test_what_is_not_finite_is_known_to_all_and_leaves_no_trace(name, at) -> None:
    nodes = NODES["3 + 2 + 1, permuted"]
    team, other = HostsTeam(CODECS[name], nodes), HostsTeam(CODECS[name], nodes)
    for step in range(3):
        gradients = team.gradients(step)
        bad = [gradient.clone() for gradient in gradients]
        bad[step][at] = float("inf")
        team.exchange(bad, step, counts=False)
        assert [int(flags[-1]) for flags in team.flags] == [1] * team.ranks
        results = team.exchange(gradients, step)
        assert [int(flags[-1]) for flags in team.flags] == [0] * team.ranks
        assert torch.equal(results[0], other.exchange(gradients, step)[0])


@pytest.mark.parametrize("name", FED_BACK)
def test_nothing_is_lost_when_values_move_to_other_shares(name) -> None:
    """To other hosts, to smaller buckets, and to ranks that know no hosts."""
    near = {"atol": 1e-5, "rtol": 1e-5}
    team = HostsTeam(CODECS[name], NODES["3 + 2 + 1, permuted"])
    for step in range(3):
        team.exchange(team.gradients(step), step)
    left, states = team.kept(), [compressor.state() for compressor in team.compressors]
    others = HostsTeam(CODECS[name], NODES["3 x 2"])
    halves = [HostsTeam(CODECS[name], team.nodes, shapes) for shapes in (SHAPES[:3], SHAPES[3:])]
    plain = Team(CODECS[name], 6)
    for rank, state in enumerate(states):
        others.compressors[rank].load(state)
        plain.compressors[rank].load(state)
        halves[0].compressors[rank].load(state[:3])
        halves[1].compressors[rank].load(state[3:])
    torch.testing.assert_close(others.kept(), left, **near)
    torch.testing.assert_close(torch.cat([half.kept() for half in halves]), left, **near)
    torch.testing.assert_close(plain.kept(), left, **near)
    for after in (others, *halves):  # in the shares of their ranks from the next exchange on
        unsent, gradients = after.kept(), after.gradients(3)
        sent = after.exchange(gradients, 3)[0].double()
        torch.testing.assert_close(sent + after.kept(), unsent + sum(gradients), **near)
    plain.exchange([plain.gradients(9)[0]] * 6)
    back = HostsTeam(CODECS[name], team.nodes)
    for rank, compressor in enumerate(back.compressors):
        compressor.load(plain.compressors[rank].state())
    torch.testing.assert_close(back.kept(), plain.kept(), **near)


def test_momentum_moves_to_the_rank_that_applies_it() -> None:
    team = HostsTeam(CODECS["dgc"], NODES["2 x 3, permuted"])
    buffers = [{"momentum": torch.full((torch.Size(s).numel(),), 0.5)} for s in SHAPES]
    for compressor in team.compressors:
        compressor.load(buffers)
    before = sum_kept(team.compressors, SHAPES, ["momentum"])
    assert before.eq(3.0).all()
    zeros = [torch.zeros(team.size)] * 6
    team.exchange(zeros, counts=False)
    assert torch.equal(sum_kept(team.compressors, SHAPES, ["momentum"]), before)


@every_codec
@pytest.mark.parametrize("shapes", [[(0,)], [(1,)], [(1, 1)], [(7, 0), (3,)], [(1023,), (1025,)]])
def test_odd_and_empty_sizes(name, shapes) -> None:
    team = HostsTeam(CODECS[name], NODES["3 + 2 + 1, permuted"], shapes)
    for step in range(2):
        results = team.exchange(team.gradients(step), step)
        assert all(torch.equal(results[0], other) for other in results)
        assert results[0].isfinite().all()
        assert not any(flags[-1] for flags in team.flags)


@pytest.mark.parametrize("name", FED_BACK)
def test_what_no_rank_has_stays_as_it_is(name) -> None:
    team = HostsTeam(CODECS[name], NODES["1 + 3"])
    team.exchange(team.gradients(0), 0)
    before = team.kept()
    team.exchange(team.gradients(1), 1, forget=[0, 3])
    after, first = team.kept(), 17 * 23
    assert torch.equal(after[:first], before[:first])
    assert not torch.equal(after, before)
