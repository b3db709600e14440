"""Codecs and gradients that overflow, are scaled, clipped, or left out by all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import slipstream
from slipstream.errors import UsageError
from tests.gradients.codecs import (
    CODECS,
    KEPT,
    rows,
    session_of,
    step_of,
    wide,
)
from tests.harness import reference
from tests.harness.counters import collectives


def train_poisoned(codec: object, settings: dict[str, float]) -> tuple[Any, ...]:
    """With and without a step in which rank 1 overflows; what step() said, and collectives."""
    model, twin = wide(), wide()
    said, counts = [], []
    with session_of(model, codec, split="per_layer") as session:
        for step in range(3):
            step_of(session, step, **settings)
        before = [p.detach().clone() for p in model.parameters()]
        for poison in (float("inf") if dist.get_rank() else 1.0, 1.0):
            with collectives() as log:
                said.append(step_of(session, 3, poison, **settings))
            counts.append(len(log))
            if not said[-1]:
                pairs = zip(before, model.parameters(), strict=True)
                assert all(torch.equal(a, b) for a, b in pairs)
        step_of(session, 4, **settings)
        skipped = session.skipped
    with session_of(twin, codec, split="per_layer") as session:
        for step in range(5):
            step_of(session, step, **settings)
    return said, counts, skipped, reference.digest(model), reference.digest(twin)


@pytest.mark.parametrize("scale", [1.0, 2.0**16])
@pytest.mark.parametrize("codec", KEPT)
def test_an_overflow_on_one_rank_never_happened(two, codec, scale) -> None:
    settings = {"loss_scale": scale} if scale != 1.0 else {}
    results = two.run(train_poisoned, CODECS[codec], settings)
    for said, counts, skipped, digest, twin in results:
        assert said == [False, True]
        assert counts[0] == counts[1]
        assert skipped == 1
        assert digest == twin


def train_scaled(scales: list[float]) -> list[str]:
    digests = []
    for scale in scales:
        model = wide()
        with session_of(model, None, accumulate=2) as session:
            for step in range(4):
                step_of(session, step, loss_scale=scale)
        digests.append(reference.digest(model))
    return digests


def test_a_loss_scale_that_is_a_power_of_two_changes_nothing(two) -> None:
    for digests in two.run(train_scaled, [1.0, 1024.0]):
        assert digests[0] == digests[1]


def clip(codec: object) -> None:
    """Clipping is of the averages, after the exchange: what codecs keep does not hear of it."""
    states, norms = [], []
    for limit in (1e-3, 1e9):
        model = wide()
        with session_of(model, codec) as session:
            session.backward(model(rows(0)))
            torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
            grads = [p.grad.norm() for p in model.parameters()]
            norms.append(float(torch.stack(grads).norm()))
            session.step()
            states.append(session.state_dict()["codecs"])
    assert norms[0] == pytest.approx(1e-3, rel=1e-3)
    assert norms[1] > 1e-2
    for clipped, whole in zip(*states, strict=True):
        assert clipped.keys() == whole.keys()
        for name, kept in whole.items():
            assert all(torch.equal(clipped[name][key], kept[key]) for key in kept)


@pytest.mark.parametrize("codec", [name for name in CODECS if name != "dgc"])
def test_gradients_are_clipped_after_the_exchange(two, codec) -> None:
    two.run(clip, CODECS[codec])


def clip_momentum(how: str) -> str:
    model = wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    strategy = {"gradients": {"codec": CODECS["dgc"]}}
    with slipstream.accelerate(model, optimizer, strategy=strategy) as session:
        for number in range(2):
            session.backward(sum(p.square().sum() for p in model.parameters()))
            if not number:
                session.step()
        if how == "by torch":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        if how == "through data":  # which torch does not count
            for parameter in model.parameters():
                parameter.grad.data.clamp_(-1e-3, 1e-3)
        with pytest.raises(UsageError) as refusal:
            session.clip_grad_norm_(1e-3) if how == "by the session" else session.step()
        optimizer.zero_grad()
    return str(refusal.value)


@pytest.mark.parametrize("how", ["by torch", "by the session", "through data"])
def test_what_contains_momentum_is_not_clipped(two, how) -> None:
    for text in two.run(clip_momentum, how):
        assert "the momentum of earlier updates" in text
        assert "codec's clip" in text


def too_large_for_fp16() -> list[bool]:
    model = wide()
    said = []
    with session_of(model, CODECS["fp16"]) as session:
        for step, factor in enumerate((1.0, 1e9, 1.0)):
            session.backward(session.model(rows(step)) * factor)
            said.append(session.step())
    return said


def test_a_sum_beyond_fp16_is_not_applied(two) -> None:
    assert two.run(too_large_for_fp16) == [[True, False, True]] * 2


def scale_changes() -> None:
    model = wide()
    with session_of(model, None, accumulate=2) as session:
        session.backward(model(rows(0)) * 8, loss_scale=8.0)
        session.step()
        with pytest.raises(UsageError, match=r"loss_scale went from 8\.0 to 4\.0"):
            session.backward(model(rows(1)) * 4, loss_scale=4.0)
        with pytest.raises(UsageError, match="allowed: a finite number above 0"):
            session.backward(model(rows(1)), loss_scale=0.0)


def test_a_loss_scale_stays_inside_a_window(two) -> None:
    two.run(scale_changes)
