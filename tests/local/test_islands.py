"""Ranks of a host that average gradients at every update, and meet other hosts as one."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slipstream
from slipstream.errors import StrategyError
from slipstream.strategy import LocalConfig, Strategy
from tests.harness.counters import collectives
from tests.harness.ranks import Ranks
from tests.local.reference import Reference, flat
from tests.local.test_training import (
    ALL,
    SETTINGS,
    UPDATES,
    adamw,
    batch,
    build,
    loss_of,
    resumed,
    sgd,
    trained,
)
from tests.transport.emulated_hosts import on_hosts

HOSTS = {
    "two of two": (0, 0, 1, 1),
    "in turns": (0, 1, 0, 1),
    "three and one": (0, 0, 0, 1),
    "one host": (0, 0, 0, 0),
    "each its own": (0, 1, 2, 3),
}
HIERARCHICAL = {"transport": "hierarchical"}


def trained_on(where: Sequence[int], settings: dict[str, Any]) -> tuple[Tensor, Tensor]:
    with on_hosts(where):
        return trained(settings, "hierarchical")


def islands_of(where: Sequence[int]) -> list[list[int]]:
    return [[r for r, host in enumerate(where) if host == one] for one in sorted({*where})]


def reference(where: Sequence[int], settings: dict[str, Any]) -> Reference:
    """Each island is one rank, whose loss is the mean of its ranks'."""
    islands = islands_of(where)
    if len(islands) == 1:  # nothing travels between hosts
        settings = {**settings, "codec": None}
    config = Strategy.load({"local": settings}).local
    assert isinstance(config, LocalConfig)

    def loss(model: nn.Module, island: int, update: int) -> Tensor:
        return torch.stack([loss_of(model, r, update) for r in islands[island]]).mean()

    found = Reference(build, adamw, config, len(islands), [len(i) for i in islands])
    with torch.no_grad(), torch.enable_grad():
        found.train(loss, UPDATES)
    return found


@pytest.mark.parametrize("where", HOSTS.values(), ids=HOSTS)
@pytest.mark.parametrize("name", ["plain", "all of it", "int4", "powersgd", "state averaged"])
def test_hosts_train_as_ranks_of_the_reference(
    four: Ranks, name: str, where: tuple[int, ...]
) -> None:
    settings = SETTINGS[name]
    expected = reference(where, settings)
    own = [flat(model.parameters()) for model in expected.models]
    for number, outer in enumerate(expected.outer):
        expected.write(0, number, outer)
    shared, islands = expected.parameters(0), islands_of(where)
    found = four.run(trained_on, where, settings)
    for number, island in enumerate(islands):
        for rank in island:
            torch.testing.assert_close(found[rank][0], own[number], rtol=1e-8, atol=1e-10)
            torch.testing.assert_close(found[rank][1], shared, rtol=1e-8, atol=1e-10)
            assert torch.equal(found[rank][0], found[island[0]][0])  # exact within a host
            assert torch.equal(found[rank][1], found[0][1])


def resumed_on(where: Sequence[int], at: int) -> tuple[Tensor, Tensor]:
    with on_hosts(where):
        return resumed(ALL, at, "hierarchical")


@pytest.mark.parametrize("at", [2, 3, 5, 6, 7, 11])
def test_hosts_resume_bit_for_bit(four: Ranks, at: int) -> None:
    for whole, again in four.run(resumed_on, (0, 0, 1, 1), at):
        assert torch.equal(whole, again)


def between_hosts(where: Sequence[int]) -> list[tuple[str, int]]:
    """What the collectives of this rank carry."""
    model = build()
    local = {"steps": 4, "codec": None}
    between = {"transport": {"kind": "hierarchical", "between": "flat"}}
    with (
        on_hosts(where),
        slipstream.accelerate(
            model, sgd(model), None, {"local": local, "gradients": between}
        ) as session,
    ):
        session.backward(loss_of(model, session.rank, 0))  # ranks agree on the ready order here
        session.step()
        with collectives() as log:
            for update in range(1, 8):
                session.backward(loss_of(model, session.rank, update))
                session.step()
        return [(one.kind, one.num_bytes) for one in log]


def test_the_first_rank_of_a_host_alone_meets_other_hosts(four: Ranks) -> None:
    values = sum(p.numel() for p in build().parameters())
    follower = [("broadcast", 8 * values), ("broadcast", 16)]
    leader = [("all_reduce", 16), ("all_reduce", 8 * values), *follower]
    found = four.run(between_hosts, (0, 0, 1, 1))
    for log, expected in zip(found, [leader, follower] * 2, strict=True):
        assert [one for one in log if one[1] in (16, 8 * values)] == expected * 2


def uneven(where: Sequence[int], sizes: Sequence[int]) -> tuple[Tensor, int]:
    model = build()
    rank = torch.distributed.get_rank()
    data = (batch(rank, update) for update in range(1, sizes[rank] + 1))
    strategy = {
        "local": {"steps": 3, "momentum": 0.0, "lr": 1.0}, "gradients": HIERARCHICAL
    }  # fmt: skip
    seen = 0
    with on_hosts(where), slipstream.accelerate(model, sgd(model), data, strategy) as session:
        for words in session.loader:
            logits = model(words[:, :-1]) * model.scale
            session.backward(
                nn.functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())
            )
            session.step()
            seen += 1
        with session.evaluating():
            return flat(model.parameters()), seen


def test_a_host_averages_over_those_of_its_ranks_that_have_a_batch(four: Ranks) -> None:
    where, sizes = (0, 0, 1, 1), (9, 5, 4, 2)
    islands = islands_of(where)

    def loss(model: nn.Module, island: int, update: int) -> Tensor | None:
        here = [loss_of(model, r, update) for r in islands[island] if update <= sizes[r]]
        return torch.stack(here).mean() if here else None

    config = LocalConfig(steps=3, momentum=0.0, lr=1.0)
    expected = Reference(build, sgd, config, 2, [2, 2])
    expected.train(loss, 9)
    for number, outer in enumerate(expected.outer):
        expected.write(0, number, outer)
    for outer, seen in four.run(uneven, where, sizes):
        assert seen == 9
        torch.testing.assert_close(outer, expected.parameters(0), rtol=1e-9, atol=1e-11)


def test_auto_is_refused_among_hosts() -> None:
    model = build()
    with pytest.raises(StrategyError, match="hierarchical and auto"):
        slipstream.accelerate(model, sgd(model), None, {"local": "auto", "gradients": HIERARCHICAL})


def restored_elsewhere(saved: Sequence[int], restored: Sequence[int]) -> Tensor:
    strategy = {"local": {"steps": 4, "delay": 1, "mix": 0.5}, "gradients": HIERARCHICAL}
    states: list[Any] = [None] * 4
    model = build()
    with on_hosts(saved), slipstream.accelerate(model, adamw(model), None, strategy) as session:
        for update in range(6):
            session.backward(loss_of(model, session.rank, update))
            session.step()
        torch.distributed.all_gather_object(states, session.checkpoint(sharded=True))
    model = build()
    with warnings.catch_warnings(), on_hosts(restored):
        warnings.simplefilter("ignore")
        session = slipstream.accelerate(model, adamw(model), None, strategy)
        session.restore(states)
        for update in range(6, 9):
            session.backward(loss_of(model, session.rank, update))
            session.step()
        found = flat(model.parameters())
        session.close()
    return found


def test_ranks_of_a_host_are_equal_whatever_hosts_saved_the_state(four: Ranks) -> None:
    found = four.run(restored_elsewhere, (0, 0, 1, 1), (0, 1, 0, 1))
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])


def trained_with_a_layer_that_freezes(codec: str) -> list[Tensor]:
    """Parameters in the end, of a run in which momentum goes on where no rank trains."""
    model = build()
    local = {"steps": 2, "codec": codec}
    strategy = {"local": local, "gradients": HIERARCHICAL}
    with (
        on_hosts((0, 0, 1, 1)),
        slipstream.accelerate(model, sgd(model), None, strategy) as session,
    ):
        for update in range(12):
            if update == 4:
                next(iter(model.children())).requires_grad_(False)
            session.backward(loss_of(model, session.rank, update))
            session.step()
        return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("codec", ["int8", "half", "int4"])
def test_ranks_of_a_host_stay_alike_where_a_mean_is_zero(four: Ranks, codec: str) -> None:
    found = four.run(trained_with_a_layer_that_freezes, codec)
    for first, second in (found[:2], found[2:]):
        assert all(map(torch.equal, first, second))
