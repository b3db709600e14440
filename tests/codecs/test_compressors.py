"""One battery over all codecs: what ranks exchange, what they keep, and what they may forget."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from slipstream.strategy import Int8Config, OneBitConfig, PowerSgdConfig
from tests.codecs import hosts
from tests.codecs.compressors import CONFIGS, FED_BACK, SHAPES, Team

RANKS = (1, 2, 3, 4, 5)


def over_ranks(name: str, ranks: int) -> Any:
    """What makes a team of ranks that know no hosts."""
    return pytest.param(partial(Team, CONFIGS[name], ranks), id=f"{name}, {ranks} ranks")


def over_hosts(name: str, nodes: str) -> Any:
    """What makes a team of hosts."""
    make = partial(hosts.HostsTeam, hosts.CODECS[name], hosts.NODES[nodes])
    return pytest.param(make, id=f"{name} between hosts, {nodes}")


every_codec = pytest.mark.parametrize("name", CONFIGS)


@every_codec
@pytest.mark.parametrize("ranks", RANKS)
def test_all_ranks_end_with_the_same_bits_and_the_same_flags(name, ranks) -> None:
    team = Team(CONFIGS[name], ranks)
    for step in range(4):
        results = team.exchange(team.gradients(step), step)
        assert all(torch.equal(results[0], other) for other in results)
        raised = [1] * min(ranks, 2) + [0] * (2 - min(ranks, 2))
        assert [flags.tolist() for flags in team.flags] == [raised] * ranks


@pytest.mark.parametrize(
    "make",
    [
        *(over_ranks(name, ranks) for name in FED_BACK for ranks in RANKS),
        *(over_hosts(name, nodes) for name in hosts.FED_BACK for nodes in hosts.NODES),
    ],
)
def test_what_was_sent_and_what_is_left_is_what_came_in(make) -> None:
    team = make()
    came, sent = torch.zeros(team.size, dtype=torch.float64), 0.0
    for step in range(6):
        gradients = team.gradients(step)
        came += sum(gradients)
        sent = sent + team.exchange(gradients, step)[0].double()
        torch.testing.assert_close(sent + team.kept(), came, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", FED_BACK)
def test_nothing_is_held_back_for_ever(name) -> None:
    team = Team(CONFIGS[name], 3)
    gradients, total = team.gradients(0), 0.0
    for step in range(150):
        total = total + team.exchange(gradients, step)[0].double()
    mean = sum(gradients).double()
    error = (total / 150 - mean).norm() / mean.norm()
    assert error < 0.25  # of one exchange alone it is 0.6 (onebit) to 0.9 (dgc)


@every_codec
def test_a_step_that_does_not_count_leaves_no_trace(name) -> None:
    team, other = Team(CONFIGS[name], 3), Team(CONFIGS[name], 3)
    for step in range(3):
        gradients = team.gradients(step)
        team.exchange([torch.full_like(g, 7.0) for g in gradients], step, counts=False)
        results = team.exchange(gradients, step)
        assert torch.equal(results[0], other.exchange(gradients, step)[0])
    for mine, theirs in zip(team.compressors, other.compressors, strict=True):
        for state, same in zip(mine.state(), theirs.state(), strict=True):
            assert state.keys() == same.keys()
            assert all(torch.equal(state[key], same[key]) for key in state)


@every_codec
@pytest.mark.parametrize(
    ("poison", "at"),
    [
        (float("inf"), 0),
        (-float("inf"), 17 * 23 + 2),
        (float("nan"), 17 * 23 + 5 + 60),
        (float("inf"), 17 * 23 + 5 + 60),
        (float("nan"), -1),
    ],
)
def test_what_is_not_finite_on_one_rank_is_known_to_all(name, poison, at) -> None:
    """Where it stands must not matter: in a matrix, a vector, a part that is not sent."""
    team, other = Team(CONFIGS[name], 3, num_flags=4), Team(CONFIGS[name], 3, num_flags=4)
    for step in range(3):
        gradients = team.gradients(step)
        for poisoned in ([step], [0, 1, 2]):
            bad = [g.clone() for g in gradients]
            for rank in poisoned:
                bad[rank][at] = poison
            team.exchange(bad, step, counts=False)
            assert [flags.tolist() for flags in team.flags] == [[1, 1, 1, 1]] * 3
        results = team.exchange(gradients, step)
        assert [flags.tolist() for flags in team.flags] == [[1, 1, 1, 0]] * 3
        assert torch.equal(results[0], other.exchange(gradients, step)[0])


@every_codec
@pytest.mark.parametrize("shapes", [SHAPES, [(40, 40)]])
def test_a_sum_that_overflows_is_known_to_all(name, shapes) -> None:
    team = Team(CONFIGS[name], 3, shapes, num_flags=4)
    team.exchange([torch.full((team.size,), 3e38) for _ in range(3)], counts=False)
    assert [flags.tolist() for flags in team.flags] == [[1, 1, 1, 1]] * 3


@every_codec
@pytest.mark.parametrize("at", [3, 70_000, 139_999])
def test_every_part_of_a_large_gradient_is_looked_at(name, at) -> None:
    team = Team(CONFIGS[name], 2, [(140, 1000)], num_flags=3)
    gradients = team.gradients(0)
    gradients[1][at] = float("nan")
    team.exchange(gradients, counts=False)
    assert [flags.tolist() for flags in team.flags] == [[1, 1, 1]] * 2
    first, second = team.exchange(team.gradients(1), 1)
    assert torch.equal(first, second)
    assert first.isfinite().all()


def test_infinity_is_found_where_powersgd_looks_along_zeros() -> None:
    team = Team(PowerSgdConfig(rank=1, start_step=0), 2, [(40, 40)], num_flags=3)
    dead = torch.randn(40, 40, generator=torch.Generator().manual_seed(0))
    dead[:, 7] = 0  # so is Q there, from the second step on
    for step in range(2):
        team.exchange([dead.flatten()] * 2, step)
    dead[3, 7] = float("inf")
    team.exchange([dead.flatten()] * 2, 2, counts=False)
    assert [flags.tolist() for flags in team.flags] == [[1, 1, 1]] * 2


@pytest.mark.parametrize(
    "make",
    [
        *(over_ranks(name, 3) for name in CONFIGS),
        *(over_hosts(name, nodes) for name in hosts.CODECS for nodes in hosts.NODES),
    ],
)
def test_a_state_goes_on_bit_for_bit(make) -> None:
    team, resumed = make(), make()
    for step in range(3):
        team.exchange(team.gradients(step), step)
    for old, new in zip(team.compressors, resumed.compressors, strict=True):
        new.load(old.state())
        for before, after in zip(old.state(), new.state(), strict=True):
            assert before.keys() == after.keys()
            assert all(torch.equal(before[key], after[key]) for key in before)
    for step in range(3, 6):
        gradients = team.gradients(step)
        assert torch.equal(team.exchange(gradients, step)[0], resumed.exchange(gradients, step)[0])


@pytest.mark.parametrize("name", FED_BACK)
def test_nothing_is_lost_when_gradients_move_to_other_buckets(name) -> None:
    team = Team(CONFIGS[name], 3)
    for step in range(3):
        team.exchange(team.gradients(step), step)
    left = team.kept()
    halves = [Team(CONFIGS[name], 3, SHAPES[:3]), Team(CONFIGS[name], 3, SHAPES[3:])]
    for rank, compressor in enumerate(team.compressors):
        states = compressor.state()
        halves[0].compressors[rank].load(states[:3])
        halves[1].compressors[rank].load(states[3:])
    near = {"atol": 1e-5, "rtol": 1e-5}
    torch.testing.assert_close(torch.cat([half.kept() for half in halves]), left, **near)
    again = Team(CONFIGS[name], 3)
    for rank, compressor in enumerate(again.compressors):
        compressor.load(halves[0].compressors[rank].state() + halves[1].compressors[rank].state())
    torch.testing.assert_close(again.kept(), left, **near)


SPECIAL = {
    "zero": 0.0,
    "constant": 0.125,
    "huge": 1e30,
    "tiny": 1e-37,
    "denormal": 1e-41,
    "negative": -3.0,
}


@every_codec
@pytest.mark.parametrize("value", SPECIAL.values(), ids=SPECIAL)
def test_special_values_come_through(name, value) -> None:
    team = Team(CONFIGS[name], 2)
    shares = [torch.full((team.size,), value / 2)] * 2
    total = torch.zeros((), dtype=torch.float64)
    for step in range(2):
        (result, _), team_total = team.exchange(shares, step), total
        assert result.isfinite().all()
        assert result.abs().max() <= 2.1 * abs(value) + 1e-37
        total = team_total + result.double()
    if abs(value) < 1e-40:  # what fp32 can hardly hold may be lost
        assert value or not total.any()
    else:
        assert (total * value).sum() > 0.02 * total.numel() * value * value


@every_codec
@pytest.mark.parametrize("shapes", [[(0,)], [(1,)], [(1, 1)], [(7, 0), (3,)], [(1023,), (1025,)]])
def test_odd_and_empty_sizes(name, shapes) -> None:
    for ranks in (1, 2, 5):
        team = Team(CONFIGS[name], ranks, shapes)
        for step in range(3):
            results = team.exchange(team.gradients(step), step)
            assert all(torch.equal(results[0], other) for other in results)
            assert results[0].isfinite().all()


@every_codec
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128]
)
def test_every_dtype_has_an_exchange(name, dtype) -> None:
    team = Team(CONFIGS[name], 2, dtype=dtype)
    wide = dtype in (torch.float64, torch.complex128)
    assert team.compressors[0].works_in == (torch.float64 if wide else torch.float32)
    for step in range(3):
        results = team.exchange(team.gradients(step), step)
        assert results[0].dtype == team.compressors[0].works_in
        assert torch.equal(results[0], results[1])
        assert results[0].any()


# What p ranks send of 40 x 40 values, in bytes; flags and alignment left out.


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(
    ("config", "payload"),
    [
        (Int8Config(block=64), lambda p: 1600 + 1600 // 64 * 4),
        (OneBitConfig(block=64, start_step=0), lambda p: 1600 // 8 + 1600 // 64 * 4),
        (OneBitConfig(block=64, start_step=9), lambda p: -(-1600 // (64 * p)) * 64 * p * 4),
        (PowerSgdConfig(rank=2, start_step=0), lambda p: 2 * (40 + 40) * 4),
        (PowerSgdConfig(rank=2, start_step=9), lambda p: 1600 * 4),
    ],
)
def test_bytes_are_those_of_the_payload(config, payload, ranks) -> None:
    team = Team(config, ranks, [(40, 40)], num_flags=0)
    team.exchange(team.gradients(0))
    exact = 2 * (ranks - 1) / ranks * payload(ranks)
    padding = 2 * (ranks - 1) * (64 + 4 + 8)  # each piece: whole blocks, and 8 bytes to align
    assert (
        exact
        <= team.sent
        <= exact + (padding if isinstance(config, Int8Config | OneBitConfig) else 0)
    )
