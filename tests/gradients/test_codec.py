"""Codecs in the engine: every model, what travels, overflow, resuming, moving, and refusals."""

from __future__ import annotations

import io
import warnings
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import slipstream
from slipstream.errors import ModelError, UsageError
from slipstream.gradients import buckets
from slipstream.strategy import ByIndex, PerGradient, Single
from tests.harness import reference
from tests.harness.composed import composed
from tests.harness.counters import collectives, count
from tests.harness.models import MODELS
from tests.harness.ranks import Ranks

CODECS: dict[str, dict[str, Any]] = {
    "bf16": {"kind": "half"},
    "fp16": {"kind": "half", "dtype": "fp16"},
    "int8": {"kind": "int8", "block": 8},
    "int8, stochastic": {"kind": "int8", "rounding": "stochastic", "error_feedback": True},
    "onebit": {"kind": "onebit", "block": 64, "start_step": 0},
    "dgc": {"kind": "dgc", "density": 0.3, "warmup_steps": 0},
    "powersgd": {"kind": "powersgd", "rank": 1, "start_step": 1, "min_compression_rate": 1},
    "by name": {
        "kind": "by_name",
        "rules": [{"match": "*bias"}, {"match": "body.0.*", "codec": "half"}, {"match": "*"}],
    },
    "mixed": {
        "kind": "by_name",
        "rules": [{"match": "*bias", "codec": "half"}, {"match": "*", "codec": "int8"}],
    },
}
KEPT = ["int8, stochastic", "onebit", "dgc", "powersgd"]
NEAR = {
    "bf16": 0.03,
    "fp16": 0.01,
    "int8": 0.05,
    "int8, stochastic": 0.05,
    "onebit": 0.9,
    "dgc": 0.9,
    "powersgd": 0.9,
    "by name": 0.03,
    "mixed": 0.05,
}
"""How far three steps may end from those without a codec, over the way that these have come."""


def train(name: str, codec: str) -> tuple[str, float]:
    """Digest of the model, and how far it is from one trained without a codec, relatively.

    On two ranks one gradient a segment; on four all in one, and two batches an update.
    """
    split, accumulate = ("per_gradient", 1) if dist.get_world_size() == 2 else ("single", 2)
    settings = {"split": split, "codec": CODECS[codec]}
    model = reference.accelerated(MODELS[name], "sgd", 3, accumulate, settings)
    dense, start = without_codec(name, 3, accumulate), without_codec(name, 0, accumulate)
    return reference.digest(model), apart(model, dense, start)


@cache
def without_codec(name: str, steps: int, accumulate: int) -> nn.Module:
    return reference.accelerated(MODELS[name], "sgd", steps, accumulate, {})


def apart(a: nn.Module, b: nn.Module, start: nn.Module) -> float:
    """The distance of two models over the way that the second has come: 1 if one never left."""

    def distance(one: nn.Module, other: nn.Module) -> float:
        pairs = zip(one.parameters(), other.parameters(), strict=True)
        return sum(float((x - y).detach().abs().square().sum()) for x, y in pairs) ** 0.5

    return distance(a, b) / max(distance(b, start), 1e-30)


def train_every_model(codec: str) -> dict[str, tuple[str, float]]:
    names = [name for name in MODELS if codec != "dgc" or not MODELS[name].sparse]
    return {name: train(name, codec) for name in names}


EVERYWHERE = [("two", codec) for codec in CODECS]
EVERYWHERE += [("four", codec) for codec in ("dgc", "powersgd", "mixed")]


@pytest.mark.parametrize(("world", "codec"), EVERYWHERE)
def test_every_model_trains_alike_on_all_ranks(request, world, codec) -> None:
    by_rank = request.getfixturevalue(world).run(train_every_model, codec)
    for name in by_rank[0]:
        digests, (off, *_) = zip(*(found[name] for found in by_rank), strict=True)
        assert len(set(digests)) == 1, f"{name}: ranks differ"
        assert off < NEAR[codec], f"{name}: {off:.3g} off"


class Wide(nn.Module):
    """Two matrices and a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 64, bias=False), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh()).square().mean()


def wide(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Wide()


def rows(step: int, poison: float = 1.0) -> torch.Tensor:
    seed = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(8, 32, generator=seed) * poison


def sgd(model: nn.Module, momentum: float = 0.9) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)


def session_of(model: nn.Module, codec: object, **settings: Any) -> Any:
    gradients = {"codec": codec, **settings}
    return slipstream.accelerate(model, sgd(model), None, {"gradients": gradients})


def step_of(session: Any, step: int, poison: float = 1.0, **scale: float) -> bool:
    session.backward(session.model(rows(step, poison)) * scale.get("loss_scale", 1.0), **scale)
    return session.step()


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


def left_over(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What all ranks together have not sent, by parameter."""
    total: dict[str, torch.Tensor] = {}
    for kept in state["codecs"]:
        for name, values in kept.items():
            for key in ("error", "velocity", "momentum"):
                if key in values:
                    place = f"{name} {'error' if key != 'momentum' else key}"
                    total[place] = total.get(place, 0) + values[key].double()
            if "served" in values:
                first, served = int(values["served_from"]), values["served"].double()
                total[f"{name} error"][first : first + len(served)] += served
    return total


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
    with (
        composed("Engine") as engines,
        session_of(model, codec, split="per_gradient") as session,
    ):
        for step in range(3):
            step_of(session, step)
        (engine,) = engines
        for split in (None, Single(), ByIndex(last=(1, 2)), PerGradient()):
            if split is not None:
                engine.install(engine.order, split)
            left.append(left_over(session.state_dict()))
        step_of(session, 3)
    return left


@pytest.mark.parametrize("codec", KEPT)
def test_nothing_unsent_is_lost_when_the_split_changes(two, codec) -> None:
    first, *others = two.run(regroup, CODECS[codec])[0]
    assert first
    for other in others:
        assert other.keys() == first.keys()
        for name, values in first.items():
            torch.testing.assert_close(other[name], values, atol=1e-6, rtol=1e-6)


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


@pytest.mark.parametrize("codec", CODECS)
def test_gradients_are_clipped_after_the_exchange(two, codec) -> None:
    two.run(clip, CODECS[codec])


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


# Mistakes.


class Picture(nn.Module):
    """A convolution in another memory format, a frozen layer, and one that nobody optimizes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.extra = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.conv(x.view(-1, 3, 4, 4)[:, :, :3, :3]).flatten(1)
        return self.extra(self.frozen(hidden.tanh())).square().mean()


def dgc_of_a_picture() -> float:
    """DGC at density 1, with decay, against SGD itself."""
    models = []
    for codec in (None, {"kind": "dgc", "density": 1.0, "warmup_steps": 0}):
        torch.manual_seed(0)
        model = Picture()
        optimized = [*model.conv.parameters(), *model.frozen.parameters()]
        optimizer = torch.optim.SGD(optimized, lr=0.1, momentum=0.9, weight_decay=0.1)
        with slipstream.accelerate(model, optimizer, None, {"gradients": {"codec": codec}}) as s:
            for step in range(4):
                seed = torch.Generator().manual_seed(10 * step + dist.get_rank())
                s.backward(model(torch.randn(2, 48, generator=seed)))
                s.step()
        models.append(model)
    return reference.distance(*models)


def test_decay_finds_its_weights_whatever_their_memory_format(two) -> None:
    for far in two.run(dgc_of_a_picture):
        assert far <= 1


def refused(codec: object, optimizer: str) -> str:
    model = wide()
    half = [model.first.weight], [model.second.weight, model.second.bias]
    optimizers = {
        "adam": lambda: torch.optim.AdamW(model.parameters()),
        "dampening": lambda: torch.optim.SGD(
            model.parameters(), lr=0.1, momentum=0.9, dampening=0.1
        ),
        "mixed group": lambda: sgd(model),
        "groups": lambda: torch.optim.SGD([{"params": p} for p in half], lr=0.1, momentum=0.9),
    }
    try:
        slipstream.accelerate(
            model, optimizers[optimizer](), None, {"gradients": {"codec": codec}}
        ).close()
    except ModelError as error:
        return str(error)
    return ""


FIRST_ONLY = {"kind": "by_name", "rules": [{"match": "first.*", "codec": "dgc"}]}


@pytest.mark.parametrize(
    ("optimizer", "codec", "said"),
    [
        ("adam", "dgc", "dgc with AdamW"),
        ("dampening", "dgc", "dampening 0.1"),
        ("mixed group", FIRST_ONLY, "group 0 holds parameters with and without"),
        ("groups", FIRST_ONLY, ""),
        ("adam", "powersgd", ""),
    ],
)
def test_dgc_takes_momentum_over_or_refuses(two, optimizer, codec, said) -> None:
    for text in two.run(refused, codec, optimizer):
        assert said in text
        assert bool(said) == bool(text)


def sparse_dgc() -> str:
    case = MODELS["sparse"]
    with pytest.raises(ModelError) as caught:
        reference.accelerated(case, "sgd", 1, 1, {"codec": "dgc"})
    return str(caught.value)


def test_dgc_refuses_gradients_that_it_cannot_code(two) -> None:
    for text in two.run(sparse_dgc):
        assert "has sparse gradients" in text
        assert "group of its own" in text


def lend() -> None:
    model = wide()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True
    )
    (group,) = optimizer.param_groups
    session = slipstream.accelerate(model, optimizer, None, {"gradients": {"codec": "dgc"}})
    assert (group["momentum"], group["weight_decay"], group["nesterov"]) == (0.0, 0.0, False)
    step_of(session, 0)
    group["momentum"] = 0.5
    with pytest.raises(UsageError, match=r"momentum became 0\.5.*OneCycleLR"):
        step_of(session, 1)
    session.close()
    assert (group["momentum"], group["weight_decay"], group["nesterov"]) == (0.9, 0.01, True)


def test_momentum_is_lent_and_given_back(two) -> None:
    two.run(lend)


def dense_dgc() -> float:
    """DGC at density 1 against SGD with momentum, from a run that has momentum already."""
    models = wide(), wide()
    for model, codec in zip(
        models, (None, {"kind": "dgc", "density": 1.0, "warmup_steps": 0}), strict=True
    ):
        optimizer = torch.optim.SGD(
            model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True
        )
        with slipstream.accelerate(model, optimizer) as session:
            for step in range(2):
                step_of(session, step)
        strategy = {"gradients": {"codec": codec}}
        with slipstream.accelerate(model, optimizer, None, strategy) as session:
            for step in range(2, 6):
                step_of(session, step)
    return reference.distance(*models)


def test_dgc_at_density_one_is_the_optimizers_own_momentum(two) -> None:
    for far in two.run(dense_dgc):
        assert far <= 1


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
    results = four.run(soak, 25)
    assert all(result == results[0] for result in results)
    assert results[0][1] > 10
