"""Codecs in the engine: every model trains, what travels is counted, and ranks stay equal."""

from __future__ import annotations

import warnings
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import nn

from slipstream.errors import UsageError
from slipstream.gradients import buckets
from tests.gradients.codecs import (
    CODECS,
    KEPT,
    NEAR,
    apart,
    rows,
    session_of,
    step_of,
    wide,
)
from tests.harness import reference
from tests.harness.counters import collectives, count
from tests.harness.models import MODELS


def train(name: str, codec: str) -> tuple[str, float]:
    """Digest of the model, and how far it is from one trained without a codec, relatively.

    On two ranks one gradient a segment; on four all in one, and two batches an update.
    """
    split, accumulate = ("per_gradient", 1) if dist.get_world_size() == 2 else ("single", 2)
    settings = {"split": split, "codec": CODECS[codec]}
    model = reference.accelerated(MODELS[name], "sgd", 3, accumulate, settings)
    dense, start = without_codec(name, accumulate), reference.build(MODELS[name])
    return reference.digest(model), apart(model, dense, start)


@cache
def without_codec(name: str, accumulate: int) -> nn.Module:
    return reference.accelerated(MODELS[name], "sgd", 3, accumulate, {})


def train_half_of_the_models(codec: str) -> dict[str, tuple[str, float]]:
    """A codec takes the models that the one before leaves out, and four ranks those that two do:
    codecs that differ in a setting stand side by side, and share the models between them."""
    half = [*CODECS].index(codec) + (dist.get_world_size() == 4)
    names = [*MODELS][half % 2 :: 2]
    names = [name for name in names if codec != "dgc" or not MODELS[name].sparse]
    return {name: train(name, codec) for name in names}


EVERYWHERE = [("two", codec) for codec in CODECS]


EVERYWHERE += [("four", codec) for codec in ("dgc", "powersgd", "mixed")]


@pytest.mark.parametrize(("world", "codec"), EVERYWHERE)
def test_models_train_alike_on_all_ranks(request, world, codec) -> None:
    by_rank = request.getfixturevalue(world).run(train_half_of_the_models, codec)
    for name in by_rank[0]:
        digests, (off, *_) = zip(*(found[name] for found in by_rank), strict=True)
        assert len(set(digests)) == 1, f"{name}: ranks differ"
        assert off < NEAR[codec], f"{name}: {off:.3g} off"


PROGRESS = {
    "bf16": 0.99,
    "fp16": 0.99,
    "int8": 0.99,
    "int8, stochastic": 0.99,
    "int4": 0.99,
    "onebit": 0.99,
    "topk": 0.9,
    "dgc": 0.6,  # a value that is sent loses its momentum
    "powersgd": 0.99,
    "by name": 0.99,
    "mixed": 0.99,
}
"""The part of what dense gradients learn in as many steps that each codec learns at least."""
STEPS = {name: 200 if name in ("dgc", "powersgd") else 100 for name in CODECS}
"""Those that send the fewest values learn later."""


def learned(codec: object, steps: int) -> float:
    """How much of the error of a student of a linear map is gone after so many updates."""
    torch.manual_seed(0)
    teacher = torch.randn(32, 32) / 32**0.5
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))
    unseen = torch.randn(256, 32)

    def error(x: torch.Tensor) -> torch.Tensor:
        return (model(x) - x @ teacher).square().mean()

    with session_of(model, codec) as session:
        before = float(error(unseen).detach())
        for step in range(steps):
            session.backward(error(rows(step)))
            session.step()
        return 1 - float(error(unseen).detach()) / before


def test_codecs_learn_as_dense_gradients_do(two) -> None:
    dense = {steps: two.run(learned, None, steps)[0] for steps in {*STEPS.values()}}
    assert min(dense.values()) > 0.5
    found = {
        name: min(two.run(learned, codec, STEPS[name])) / dense[STEPS[name]]
        for name, codec in CODECS.items()
    }
    assert {name for name, part in found.items() if part < PROGRESS[name]} == set(), found


def requests(codec: object) -> list[tuple[str, int]]:
    """What one step after the first issues."""
    model = wide()
    with session_of(model, codec, split="single") as session:
        step_of(session, 0)
        step_of(session, 1)
        with collectives() as log:
            step_of(session, 2)
    return [(c.kind, c.num_bytes) for c in log]


VALUES = 32 * 64 * 2 + 32


WIRE = {
    "half": [("all_reduce", 2 * (VALUES + 3))],
    "powersgd": [("all_reduce", 4 * (2 * (64 + 32) + 32 + 4)), ("all_reduce", 4 * 2 * (32 + 64))],
    "dgc": [("all_reduce", 4 * (32 + 4)), ("all_gather_single", 2 * 8 * 2 * 20)],
}


@pytest.mark.parametrize("name", ["half", "powersgd", "dgc"])
def test_what_travels_is_counted(two, name) -> None:
    codec = {
        "half": "half",
        "powersgd": {"kind": "powersgd", "rank": 2, "start_step": 0},
        "dgc": {"kind": "dgc", "density": 0.01, "warmup_steps": 0},
    }[name]
    assert two.run(requests, codec) == [WIRE[name]] * 2


def test_two_phases_are_half_a_quarter_to_the_peer_and_half_a_quarter_from_it(two) -> None:
    for log in two.run(requests, {"kind": "int8", "block": 256}):
        (sent, row), (gathered, both_rows) = log
        assert (sent, gathered) == ("isend", "all_gather_single")
        assert VALUES < both_rows == 2 * row < VALUES * 1.1 + 512


class Assorted(nn.Module):
    """A kernel in channels last, complex numbers, and a parameter that half of the ranks use."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.phase = nn.Parameter(torch.randn(8, dtype=torch.complex64))
        self.odd = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.kernel(x.view(-1, 3, 4, 4)).mean((2, 3))
        found = (out * self.phase).abs().square().mean()
        return found + self.odd(out).square().mean() if dist.get_rank() % 2 else found


def one_by_one(codec: str, small: int) -> tuple[str, list[tuple[int, ...]]]:
    """Training where gradients count as small below a number of bytes; where they come to lie."""
    torch.manual_seed(0)
    model, places = Assorted(), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "SMALL_GRADIENT", small)
        with session_of(model, codec) as session:
            for step in range(4):
                session.backward(model(rows(step)[:, :24].repeat(1, 2)))
                places.append(tuple(p.grad.data_ptr() for p in model.parameters()))
                assert model.kernel.weight.grad.stride() == model.kernel.weight.stride()
                session.step()
    return reference.digest(model), places


@pytest.mark.parametrize("codec", ["half", "int8"])
def test_gradients_one_by_one_are_those_copied_together(two, codec) -> None:
    together, apart = two.run(one_by_one, codec, 2**16), two.run(one_by_one, codec, 0)
    assert len({digest for digest, _ in together + apart}) == 1
    for _, places in together + apart:
        assert len(set(places)) == 1  # no step allocates its own


def idle_rule() -> list[str]:
    rules = [{"match": "*.bias", "codec": "half"}, {"match": "encoder.*"}]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with session_of(wide(), {"kind": "by_name", "rules": rules}) as session:
            step_of(session, 0)
    return [str(one.message) for one in said if "rules" in str(one.message)]


def test_a_rule_that_matches_nothing_is_told_once(two) -> None:
    said, nothing = two.run(idle_rule)
    assert not nothing
    (message,) = said
    assert "gradients.codec.rules.1.match 'encoder.*' matches no trainable parameter" in message
    assert "first.weight" in message


def backward_twice() -> None:
    model, onebit = wide(), {"kind": "onebit", "start_step": 0}
    with session_of(model, onebit) as session:
        step_of(session, 0)
        session.backward(model(rows(1)))
        with pytest.raises(UsageError, match="backward\\(\\) was called twice"):
            session.backward(model(rows(2)))
    model = wide()
    with session_of(model, onebit) as session:
        step_of(session, 0)
        with session.no_sync():
            session.backward(model(rows(1)))
        with collectives() as log:
            step_of(session, 2)
        assert count(log, "isend") == len(session.segments)


def test_gradients_are_coded_once_an_update(two) -> None:
    two.run(backward_twice)


def soak(steps: int) -> tuple[list[str], int]:
    """Codecs in turn over one model, overflows thrown in."""
    model, digests, skipped = wide(), [], 0
    for turn, codec in enumerate(CODECS):
        with session_of(model, CODECS[codec]) as session:
            for step in range(steps):
                poison = float("inf") if step % 7 == 3 and dist.get_rank() == turn % 4 else 1.0
                scale = {"loss_scale": 1024.0} if turn % 2 else {}
                step_of(session, step, poison if codec in KEPT or scale else 1.0, **scale)
            skipped += session.skipped
        digests.append(reference.digest(model))
        assert all(p.isfinite().all() for p in model.parameters())
    return digests, skipped


def test_ranks_stay_equal_through_codecs_and_overflows(four) -> None:
    results = four.run(soak, 15)
    assert all(result == results[0] for result in results)
    assert results[0][1] > 10
