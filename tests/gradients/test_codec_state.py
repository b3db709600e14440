"""What codecs keep: checkpoints, other numbers of ranks, other splits, unused parameters."""

from __future__ import annotations

import io
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import slipstream
from slipstream.strategy import ByIndexConfig, PerGradientConfig, SingleConfig
from tests.gradients.codecs import (
    CODECS,
    KEPT,
    engine_of,
    left_over,
    rows,
    session_of,
    step_of,
    wide,
)
from tests.harness import reference
from tests.harness.ranks import Ranks


def resume(codec: object) -> tuple[str, str, str]:
    """Five steps at once; three, a checkpoint, two in a new session; the split changed halfway."""
    whole, cut, moved = wide(), wide(), wide()
    with session_of(whole, codec) as session:
        for step in range(5):
            step_of(session, step)
    with session_of(cut, codec) as session:
        for step in range(3):
            step_of(session, step)
        kept = io.BytesIO()
        torch.save((cut.state_dict(), session.optimizer.state_dict(), session.state_dict()), kept)
    kept.seek(0)
    weights, momentum, state = torch.load(kept, weights_only=True)
    again = wide(seed=7)
    again.load_state_dict(weights)
    with session_of(again, codec) as session:
        session.optimizer.load_state_dict(momentum)
        session.load_state_dict(state)
        for step in range(3, 5):
            step_of(session, step)
    with session_of(moved, codec, split="per_gradient") as session:
        for step in range(3):
            step_of(session, step)
        state = session.state_dict()
    with session_of(moved, codec, split="single") as session:
        session.load_state_dict(state)
        for step in range(3, 5):
            step_of(session, step)
    return reference.digest(whole), reference.digest(again), reference.digest(moved)


@pytest.mark.parametrize("codec", KEPT)
def test_a_checkpoint_goes_on_bit_for_bit(two, codec) -> None:
    results = two.run(resume, CODECS[codec])
    for whole, again, _ in results:
        assert whole == again
    assert len({moved for *_, moved in results}) == 1  # another split: alike on all ranks


def save(codec: object) -> dict[str, Any]:
    model = wide()
    with session_of(model, codec) as session:
        for step in range(3):
            step_of(session, step)
        return session.state_dict()


def load(codec: object, state: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    model = wide()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with session_of(model, codec) as session:
            session.load_state_dict(state)
            kept = session.state_dict()
            step_of(session, 3)
    return kept, [str(one.message) for one in said]


@pytest.mark.parametrize("codec", KEPT)
def test_on_other_numbers_of_ranks_nothing_unsent_is_lost(two, four, codec) -> None:
    state = two.run(save, CODECS[codec])[0]
    before = left_over(state)
    assert before
    for kept, _ in four.run(load, CODECS[codec], state):
        assert len(kept["codecs"]) == 4
        after = left_over(kept)
        for name, values in before.items():
            torch.testing.assert_close(after[name], values, atol=1e-6, rtol=1e-6)
    with Ranks(3) as three:
        results = three.run(load, CODECS[codec], kept)
    for now, _ in results:
        for name, values in left_over(now).items():
            torch.testing.assert_close(values, before[name], atol=1e-6, rtol=1e-6)
    assert any("4 ranks, this run has 3" in text for text in results[0][1])
    assert not results[1][1]


def regroup(codec: object) -> list[dict[str, torch.Tensor]]:
    """What all ranks have not sent, under one split after the other."""
    model, left = wide(), []
    with engine_of(model, codec, PerGradientConfig()) as engine:

        def update(step: int) -> None:
            engine.begin(exchange=True, scale=1 / dist.get_world_size())
            model(rows(step)).backward()
            engine.end()
            for parameter in model.parameters():
                parameter.data.sub_(parameter.grad, alpha=0.05)
                parameter.grad = None
            engine.updated(step + 1)

        for step in range(3):
            update(step)
        for split in (None, SingleConfig(), ByIndexConfig(last=(1, 2)), PerGradientConfig()):
            if split is not None:
                assert engine.order is not None
                engine.install(engine.order, split)
            states: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(states, engine.codec_state())
            left.append(left_over({"codecs": states}))
        update(3)
    return left


@pytest.mark.parametrize("codec", KEPT)
def test_nothing_unsent_is_lost_when_the_split_changes(two, codec) -> None:
    first, *others = two.run(regroup, CODECS[codec])[0]
    assert first
    for other in others:
        assert other.keys() == first.keys()
        for name, values in first.items():
            torch.testing.assert_close(other[name], values, atol=1e-6, rtol=1e-6)


class Branches(nn.Module):
    """Two matrices in one block of any codec, of which some steps use one alone."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.rarely = nn.Linear(32, 8), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor, *, both: bool) -> torch.Tensor:
        out = self.always(x).square().mean()
        return out + self.rarely(x).square().mean() if both else out


def leave_out(codec: object) -> None:
    """What no rank uses is not updated, and what is kept of it stays; later it goes on."""
    torch.manual_seed(0)
    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
    strategy = {"gradients": {"codec": codec, "split": "single"}}
    with slipstream.accelerate(model, optimizer, None, strategy) as session:
        for step in range(4):
            kept = session.state_dict()["codecs"]
            before = [p.detach().clone() for p in model.rarely.parameters()]
            session.backward(model(rows(step), both=step != 2))
            assert (model.rarely.weight.grad is None) == (step == 2)
            session.step()
            same = [
                torch.equal(*pair) for pair in zip(before, model.rarely.parameters(), strict=True)
            ]
            assert same == [step == 2] * 2
            now = session.state_dict()["codecs"]
            if step == 2:
                mine, own = kept[session.rank], now[session.rank]
                for name in (name for name in mine if name.startswith("rarely")):
                    pairs = [(mine[name][key], own[name][key]) for key in mine[name]]
                    assert all(torch.equal(*pair) for pair in pairs), name


@pytest.mark.parametrize("codec", KEPT)
def test_what_no_rank_uses_stays_as_it_is(two, codec) -> None:
    two.run(leave_out, CODECS[codec])


def load_back(codec: object) -> bool:
    """A state from before the first update forgets all that came since."""
    model = wide()
    with session_of(model, codec) as session:
        step_of(session, 0)
        first = session.state_dict()
        for step in range(3):
            step_of(session, step)
        session.load_state_dict(first)
        again = session.state_dict()
    pairs = zip(first["codecs"], again["codecs"], strict=True)
    for before, after in pairs:
        assert before.keys() == after.keys()
        for name, state in before.items():
            assert all(torch.equal(state[key], after[name][key]) for key in state), name
    return first["steps"] == again["steps"] == 1


@pytest.mark.parametrize("codec", KEPT)
def test_a_state_replaces_what_was_kept(two, codec) -> None:
    assert two.run(load_back, CODECS[codec]) == [True] * 2


def load_without(codec: object) -> dict[str, torch.Tensor]:
    """What a session owes after it has loaded the state of one without a codec."""
    model = wide()
    with session_of(model, codec) as session:
        for step in range(3):
            step_of(session, step)
        session.load_state_dict({**session.state_dict(), "codecs": []})
        return left_over(session.state_dict())


@pytest.mark.parametrize("codec", KEPT)
def test_a_state_without_codecs_leaves_nothing_to_send(two, codec) -> None:
    for left in two.run(load_without, CODECS[codec]):
        assert left
        assert not any(values.any() for values in left.values())
