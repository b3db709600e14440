"""Ranks that meet rarely train as the plain reference does; nothing of them is lost on the way."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

import slipstream
from slipstream.errors import MismatchError, StrategyError, UsageError
from slipstream.local.carrier import FixedCarrier
from slipstream.local.model import LocalModel
from slipstream.local.training import LocalTraining
from slipstream.strategy import LocalConfig, Strategy
from tests.harness.counters import collectives
from tests.harness.ranks import Ranks
from tests.local.reference import Reference, flat

UPDATES = 17


def build() -> nn.Module:
    """An embedding that is larger than a fragment, tied weights, a matrix and a scale."""
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Embedding(23, 6), nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6), nn.Linear(6, 23)
    )
    model[4].weight = model[0].weight
    model.register_parameter("scale", nn.Parameter(torch.ones(())))
    return model.double()


def batch(rank: int, update: int) -> Tensor:
    seed = torch.Generator().manual_seed(100 * update + rank)
    return torch.randint(23, (4, 5), generator=seed)


def loss_of(model: nn.Module, rank: int, update: int) -> Tensor:
    words = batch(rank, update)
    logits = model(words[:, :-1]) * model.scale
    return nn.functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return AdamW(model.parameters(), lr=0.02, weight_decay=0.1, eps=1e-3)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return SGD(model.parameters(), lr=0.1, momentum=0.5)


def written_before_the_end(updates: int) -> bool:
    """Whether a session leaves what was loaded before its end, though a meeting is on its way."""
    model = build()
    best = {name: value + 1.0 for name, value in model.state_dict().items()}
    strategy = {"local": {"steps": 4, "fragments": 2, "delay": 2}}
    with slipstream.accelerate(model, sgd(model), None, strategy) as session:
        for update in range(updates):
            session.backward(loss_of(model, session.rank, update))
            session.step()
            with session.evaluating():
                loss_of(model, session.rank, update)
        model.load_state_dict(best)
    return all(torch.equal(value, best[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("updates", [5, 6, 7, 8])
def test_what_is_loaded_before_the_end_stays(two: Ranks, updates: int) -> None:
    assert two.run(written_before_the_end, updates) == [True, True]


SETTINGS: dict[str, dict[str, Any]] = {
    "every update": {"steps": 1},
    "plain": {"steps": 4},
    "after a warm-up": {"steps": 3, "warm_up": 5},
    "fragments": {"steps": 6, "fragments": 3},
    "delay": {"steps": 4, "delay": 3},
    "mix": {"steps": 4, "mix": 0.5},
    "all of it": {"steps": 6, "fragments": 3, "delay": 2, "mix": 0.25, "warm_up": 1},
    "no momentum": {"steps": 3, "momentum": 0.0, "lr": 1.0},
    "state averaged": {"steps": 4, "fragments": 2, "inner_state": "averaged", "delay": 1},
    "state reset": {"steps": 4, "fragments": 2, "inner_state": "reset"},
    "in the host's memory": {"steps": 4, "offload": True},
    "half": {"steps": 4, "codec": "half"},
    "int8": {"steps": 4, "delay": 1, "codec": "int8"},
    "int4": {"steps": 3, "fragments": 2, "delay": 1, "codec": {"kind": "int4", "block": 8}},
    "topk": {
        "steps": 3,
        "momentum": 0.0,
        "codec": {"kind": "topk", "chunk": 64, "keep": 8, "decay": 0.95},
    },
    "onebit": {"steps": 3, "codec": {"kind": "onebit", "block": 64, "start_step": 6}},
    "powersgd": {"steps": 3, "fragments": 2, "codec": {"kind": "powersgd", "start_step": 0}},
}


def trained(settings: Mapping[str, Any], transport: str = "flat") -> tuple[Tensor, Tensor]:
    """This rank's parameters, and the outer ones."""
    model = build()
    strategy = {"local": settings, "gradients": {"transport": transport}}
    session = slipstream.accelerate(model, adamw(model), None, strategy)
    for update in range(1, UPDATES + 1):
        session.backward(loss_of(model, session.rank, update))
        session.step()
    own = flat(model.parameters())
    with session.evaluating():
        outer = flat(model.parameters())
    assert torch.equal(flat(model.parameters()), own)
    session.close()
    return own, outer


def expected(settings: Mapping[str, Any], ranks: int) -> tuple[list[Tensor], Tensor]:
    config = Strategy.load({"local": settings}).local
    assert isinstance(config, LocalConfig)
    reference = Reference(build, adamw, config, ranks)
    with torch.no_grad(), torch.enable_grad():
        reference.train(loss_of, UPDATES)
    own = [reference.parameters(rank) for rank in range(ranks)]
    for number, outer in enumerate(reference.outer):
        reference.write(0, number, outer)
    return own, reference.parameters(0)


def compare(found: list[tuple[Tensor, Tensor]], settings: Mapping[str, Any]) -> None:
    own, outer = expected(settings, len(found))
    # 16-bit sums of two orders differ by a rounding
    close = {"rtol": 1e-2, "atol": 1e-3} if settings.get("codec") == "half" else {}
    close = close or {"rtol": 1e-9, "atol": 1e-11}
    for (mine, shared), reference in zip(found, own, strict=True):
        torch.testing.assert_close(mine, reference, **close)
        torch.testing.assert_close(shared, outer, **close)
        assert torch.equal(shared, found[0][1])  # to the bit, on all ranks


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_two_ranks_train_as_the_reference(two: Ranks, settings: dict[str, Any]) -> None:
    compare(two.run(trained, settings), settings)


@pytest.mark.parametrize("name", ["all of it", "int4", "powersgd"])
@pytest.mark.parametrize("transport", ["flat", "direct", "shared_memory"])
def test_three_ranks_do_by_every_transport(three: Ranks, name: str, transport: str) -> None:
    compare(three.run(trained, SETTINGS[name], transport), SETTINGS[name])


def test_alone_the_outer_optimizer_works_as_with_others() -> None:
    settings = SETTINGS["fragments"]
    compare([trained(settings)], settings)


def against_ddp(local: dict[str, Any] | None) -> Tensor:
    model = build()
    strategy = {"local": local, "gradients": {"accumulate": 2}}
    session = slipstream.accelerate(model, SGD(model.parameters(), lr=0.1), None, strategy)
    for update in range(12):
        session.backward(loss_of(model, session.rank, update))
        session.step()
    session.close()
    return flat(model.parameters())


def test_meeting_at_every_update_is_data_parallelism(two: Ranks) -> None:
    every = {"steps": 1, "lr": 1.0, "momentum": 0.0}
    for mine, other in zip(two.run(against_ddp, every), two.run(against_ddp, None), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)


# What travels.


def counted(settings: dict[str, Any]) -> list[tuple[str, int]]:
    model = build()
    with slipstream.accelerate(model, sgd(model), None, {"local": settings}) as session:
        with collectives() as log:
            for update in range(9):
                session.backward(loss_of(model, session.rank, update))
                session.step()
        return [(one.kind, one.num_bytes) for one in log]


def test_nothing_travels_between_meetings(two: Ranks) -> None:
    values = sum(p.numel() for p in build().parameters())
    for log in two.run(counted, {"steps": 4}):
        assert log == [("all_reduce", 16), ("all_reduce", 8 * values)] * 2
    for log in two.run(counted, {"steps": 4, "fragments": 2, "delay": 1}):
        changes = [num_bytes for _, num_bytes in log if num_bytes != 16]
        assert len(changes) == 4
        assert sum(changes[:2]) == 8 * values


# State.


def resumed(settings: dict[str, Any], at: int, transport: str = "flat") -> tuple[Tensor, Tensor]:
    """Parameters of a run, and of one that goes on from the state after ``at`` updates."""
    strategy = {"local": settings, "gradients": {"transport": transport}}
    ends = []
    states: list[Any] = []
    for state in (None, "saved"):
        model = build()
        optimizer = adamw(model)
        session = slipstream.accelerate(model, optimizer, None, strategy)
        if state is not None:
            session.restore(states)
        for update in range(at if state else 0, UPDATES):
            if state is None and update == at:
                mine = session.checkpoint(sharded=True)
                others: list[Any] = [None] * session.world_size
                torch.distributed.all_gather_object(others, mine)
                states += others
            session.backward(loss_of(model, session.rank, update))
            session.step()
        ends.append(flat(model.parameters()))
        session.close()
    return ends[0], ends[1]


ALL = {"steps": 4, "fragments": 2, "delay": 2, "mix": 0.25, "warm_up": 3, "codec": "int4"}


@pytest.mark.parametrize("at", range(1, UPDATES - 1))
def test_a_run_resumes_bit_for_bit_at_every_update(two: Ranks, at: int) -> None:
    for whole, resumed_run in two.run(resumed, ALL, at):
        assert torch.equal(whole, resumed_run)


def whole_state(other: bool) -> tuple[bool, bool, bool]:
    model = build()
    optimizer = sgd(model)
    strategy = {"local": {"steps": 4, "fragments": 2, "delay": 1}}
    session = slipstream.accelerate(model, optimizer, None, strategy)
    for update in range(9):
        session.backward(loss_of(model, session.rank, update))
        session.step()
    saved = [session.checkpoint()]
    if other:  # each rank has an optimizer's state of its own, which one that averages refuses
        torch.distributed.broadcast_object_list(saved)
    state = saved[0]
    with session.evaluating():
        same = all(torch.equal(v, state["model"][k]) for k, v in model.state_dict().items())
    local = all(torch.equal(v, state["model"][k]) for k, v in model.state_dict().items())
    session.close()
    plain = build()
    plain.load_state_dict(state["model"])
    if other:  # ranks have trained with optimizers of their own, and average with one and the same
        saved = [state]
        torch.distributed.broadcast_object_list(saved)
        (state,) = saved
    again = build()
    session = slipstream.accelerate(again, sgd(again), None, strategy if not other else None)
    session.restore(state)
    begins = torch.equal(flat(again.parameters()), flat(plain.parameters()))
    for update in range(9, 14):
        session.backward(loss_of(again, session.rank, update))
        session.step()
    session.close()
    return same, local, begins


@pytest.mark.parametrize("other", [False, True], ids=["a run like it", "a run that averages"])
def test_a_checkpoint_has_the_outer_parameters_for_any_run(two: Ranks, other: bool) -> None:
    assert two.run(whole_state, other) == [(True, False, True)] * 2


# What others forget.


def unequal_loaders(sizes: tuple[int, int]) -> tuple[Tensor, list[int]]:
    model = build()
    rank = torch.distributed.get_rank()
    data = (batch(rank, update) for update in range(1, sizes[rank] + 1))
    seen = []
    strategy = {"local": {"steps": 3, "momentum": 0.0, "lr": 1.0}}
    with slipstream.accelerate(model, sgd(model), data, strategy) as session:
        for words in session.loader:
            logits = model(words[:, :-1]) * model.scale
            session.backward(
                nn.functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())
            )
            session.step()
            seen.append(session.rank)
        with session.evaluating():
            outer = flat(model.parameters())
    return outer, seen


def test_a_rank_counts_by_the_updates_that_it_made(two: Ranks) -> None:
    sizes = (9, 4)
    config = LocalConfig(steps=3, momentum=0.0, lr=1.0)
    reference = Reference(build, sgd, config, 2)
    reference.train(lambda m, r, u: loss_of(m, r, u) if u <= sizes[r] else None, 9)
    for number, outer in enumerate(reference.outer):
        reference.write(0, number, outer)
    for outer, seen in two.run(unequal_loaders, sizes):
        assert len(seen) == 9
        torch.testing.assert_close(outer, reference.parameters(0), rtol=1e-9, atol=1e-11)


def with_buffers() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
    session = slipstream.accelerate(model, sgd(model), None, {"local": {"steps": 2}})
    before = torch.zeros(6)
    for update in range(4):
        seed = torch.Generator().manual_seed(10 * update + session.rank)
        x = torch.randn(8, 4, generator=seed) + session.rank
        session.backward(model(x).square().mean())
        before = model[1].running_mean.clone()
        session.step()
    after = model[1].running_mean.clone()
    others = [torch.empty(6), torch.empty(6)]
    torch.distributed.all_gather(others, before)
    session.close()
    return after, torch.stack(others).mean(0), model[1].running_mean


def test_buffers_are_averaged_with_their_fragment(two: Ranks) -> None:
    (first, mean, closed), (second, _, _) = two.run(with_buffers)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, mean)
    assert torch.equal(closed, first)


ALLOWED = {"checks": {"nonfinite": "allow"}}


def with_nan() -> tuple[list[str], bool, Tensor]:
    model = build()
    with (
        warnings.catch_warnings(record=True) as caught,
        slipstream.accelerate(
            model, adamw(model), None, {"local": {"steps": 3}, **ALLOWED}
        ) as session,
    ):
        warnings.simplefilter("always")
        for update in range(1, 10):
            loss = loss_of(model, session.rank, update)
            session.backward(loss * (torch.nan if update == 2 and session.rank else 1.0))
            session.step()
    finite = all(bool(p.isfinite().all()) for p in model.parameters())
    return [str(w.message) for w in caught], finite, flat(model.parameters())


def test_a_rank_that_diverges_takes_the_parameters_of_the_others(two: Ranks) -> None:
    (quiet, fine, first), (told, cured, second) = two.run(with_nan)
    assert fine
    assert cured
    assert not quiet
    assert any("rank 1: the change of scale" in text for text in told)
    assert torch.equal(first, second)


def with_nan_among_fragments(at: int, inner_state: str) -> tuple[bool, Tensor]:
    model = build()
    local = {"steps": 4, "fragments": 2, "delay": 1, "inner_state": inner_state}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with slipstream.accelerate(
            model, adamw(model), None, {"local": local, **ALLOWED}
        ) as session:
            for update in range(1, 14):
                loss = loss_of(model, session.rank, update)
                session.backward(loss * (torch.nan if update == at and session.rank else 1.0))
                session.step()
    return all(bool(p.isfinite().all()) for p in model.parameters()), flat(model.parameters())


@pytest.mark.parametrize("inner_state", ["kept", "averaged"])
@pytest.mark.parametrize("at", [3, 13], ids=["in a round", "in the last, partial round"])
def test_a_rank_that_diverges_is_cured_in_all_fragments(
    two: Ranks, at: int, inner_state: str
) -> None:
    (fine, first), (cured, second) = two.run(with_nan_among_fragments, at, inner_state)
    assert fine
    assert cured
    assert torch.equal(first, second)


def test_buffers_of_one_rank_alone_survive_its_nan() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
    strategy = {"local": {"steps": 2}, **ALLOWED}
    with slipstream.accelerate(model, sgd(model), None, strategy) as session:
        for factor in (1.0, torch.nan):
            session.backward(model(torch.randn(8, 4)).square().mean() * factor)
            if factor == 1.0:
                session.step()
        with pytest.warns(UserWarning, match="infinite or NaN") as caught:
            session.step()
        assert caught[0].filename == __file__
        assert bool((model[1].running_var > 0.5).all())


def same_outer_with_another_warm_up(saved: int, restored: int) -> bool:
    state = None
    for warm_up in (saved, restored):
        model = build()
        local = {"steps": 4, "warm_up": warm_up}
        with slipstream.accelerate(model, sgd(model), None, {"local": local}) as session:
            if state is not None:
                session.restore(state)
                with session.evaluating():
                    now = model.state_dict()
                return all(torch.equal(now[key], value) for key, value in state["model"].items())
            for update in range(3):
                session.backward(loss_of(model, 0, update))
                session.step()
            state = session.checkpoint()
    raise AssertionError


def test_a_warm_up_may_be_cut_short_and_not_begun_again() -> None:
    assert same_outer_with_another_warm_up(100, 0)
    with pytest.raises(UsageError, match="at most 3"):
        same_outer_with_another_warm_up(0, 100)


def overflowing() -> tuple[int, list[bool], Tensor]:
    model = build()
    updated = []
    with slipstream.accelerate(model, sgd(model), None, {"local": {"steps": 3}}) as session:
        for update in range(1, 7):
            loss = loss_of(model, session.rank, update)
            bad = update == 4 and session.rank == 1
            session.backward(loss * (torch.inf if bad else 8.0), loss_scale=8.0)
            updated.append(session.step())
        skipped = session.skipped
        session.restore(session.checkpoint())  # though ranks have made different numbers
    return skipped, updated, flat(model.parameters())


def test_an_overflow_skips_the_update_of_one_rank_alone(two: Ranks) -> None:
    (none, all_of_them, first), (one, some, second) = two.run(overflowing)
    assert (none, one) == (0, 1)
    assert all(all_of_them)
    assert some == [True] * 3 + [False] + [True] * 2
    assert torch.equal(first, second)


def bf16_parameters() -> tuple[Tensor, torch.dtype]:
    model = build().bfloat16()
    local = {"steps": 4, "lr": 1.0, "momentum": 0.0}
    session = slipstream.accelerate(model, SGD(model.parameters(), lr=1e-3), None, {"local": local})
    for update in range(8):
        session.backward(loss_of(model, session.rank, update))
        session.step()
    whole = session._loop.sharding.model
    assert isinstance(whole, LocalModel)
    assert whole.training is not None
    meeting = whole.training._rounds.meetings[0]
    outer = meeting.outer.clone()
    session.close()
    return outer, meeting.dtype


def test_changes_of_16_bits_are_subtracted_in_32(two: Ranks) -> None:
    for outer, dtype in two.run(bf16_parameters):
        assert dtype == torch.float32
        assert not torch.equal(outer, outer.bfloat16().float())  # finer than any rank has it


def unused_and_frozen() -> tuple[bool, str, bool]:
    model = build()
    model[1].bias.requires_grad_(False)
    frozen = model[1].bias.detach().clone()
    message = ""
    session = slipstream.accelerate(model, adamw(model), None, {"local": {"steps": 2}})
    for update in range(6):
        words = batch(session.rank, update)
        # only the embedding, on one rank
        part = model[0](words).square().mean()
        session.backward(part if session.rank else loss_of(model, 0, update))
        session.step()
    same = torch.equal(model[1].bias, frozen)
    with session.evaluating():
        outer = flat(model.parameters())
    others = [torch.empty_like(outer), torch.empty_like(outer)]
    torch.distributed.all_gather(others, outer)
    model[1].bias.requires_grad_(True)
    try:
        session.backward(loss_of(model, session.rank, 7))
    except UsageError as error:
        message = str(error)
    session.close()
    return same, message, torch.equal(*others)


def test_parameters_unused_on_one_rank_meet_and_frozen_ones_stay(two: Ranks) -> None:
    for same, message, equal in two.run(unused_and_frozen):
        assert same
        assert equal
        assert "1.bias" in message
        assert "thaw" in message


def frozen_on_the_way(local: dict[str, Any]) -> tuple[bool, bool]:
    """Whether a layer that is frozen stays, and whether another one trains."""
    model = build()
    session = slipstream.accelerate(model, adamw(model), None, {"local": {"steps": 2, **local}})
    for update in range(12):
        model[1].requires_grad_(update < 4)
        if update == 7:  # what was on its way has arrived
            before = flat(model[1].parameters()), flat(model[3].parameters())
        session.backward(loss_of(model, session.rank, update))
        session.step()
    after = flat(model[1].parameters()), flat(model[3].parameters())
    session.close()
    same = [torch.allclose(a, b, rtol=0, atol=1e-9) for a, b in zip(before, after, strict=True)]
    return same[0], same[1]


@pytest.mark.parametrize("local", [{}, {"delay": 1}, {"offload": True}], ids=str)
def test_outer_momentum_does_not_move_what_is_frozen(two: Ranks, local: dict[str, Any]) -> None:
    assert two.run(frozen_on_the_way, local) == [(True, False)] * 2


def frozen_apart() -> list[float]:
    """Each rank freezes a layer of its own: the outer parameters, which all ranks share."""
    model = build()
    session = slipstream.accelerate(model, adamw(model), None, {"local": {"steps": 2}})
    for update in range(10):
        model[1 if session.rank else 3].requires_grad_(update < 4)
        session.backward(loss_of(model, session.rank, update))
        session.step()
    with session.evaluating():
        outer: list[float] = flat(model.parameters()).tolist()
    session.close()
    return outer


def test_outer_parameters_are_the_same_where_ranks_freeze_other_layers(two: Ranks) -> None:
    first, second = two.run(frozen_apart)
    assert first == second


def test_a_frozen_module_may_be_out_while_the_model_evaluates() -> None:
    model = build()
    model[1].requires_grad_(False)
    with slipstream.accelerate(model, sgd(model), None, {"local": {"steps": 4}}) as session:
        session.backward(loss_of(model, 0, 1))
        session.step()
        frozen, model[1] = model[1], nn.Identity()
        before = flat(model.parameters())
        with session.evaluating():
            assert not torch.equal(flat(model.parameters()), before)
        assert torch.equal(flat(model.parameters()), before)
        model[1] = frozen


@pytest.mark.parametrize("inside", [True, False])
def test_weights_merged_in_evaluating_are_unmerged_there(inside: bool) -> None:
    """As layers with LoRA do in eval() and train()."""
    model = build()
    weight: Any = model[1].weight
    weight.requires_grad_(False)
    with slipstream.accelerate(model, sgd(model), None, {"local": {"steps": 4}}) as session:
        session.backward(loss_of(model, 0, 1))
        session.step()
        before, added = weight.clone(), 0.1 * torch.randn_like(weight)
        refused = nullcontext() if inside else pytest.raises(UsageError, match="inside the with")
        with refused, session.evaluating():
            weight.data += added
            if inside:
                weight.data -= added
        assert torch.equal(weight, before)


class Swapping(SGD):
    """Has other parameters in ``eval()`` than in ``train()``, as schedule-free optimizers do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.param_groups[0]["train_mode"] = True

    def eval(self) -> None:
        self._to(mode=False, factor=0.5)

    def train(self) -> None:
        self._to(mode=True, factor=2.0)

    @torch.no_grad()
    def _to(self, *, mode: bool, factor: float) -> None:
        if self.param_groups[0]["train_mode"] != mode:
            self.param_groups[0]["train_mode"] = mode
            for parameter in self.param_groups[0]["params"]:
                parameter.mul_(factor)


@pytest.mark.parametrize("inside", [True, False])
def test_an_optimizer_changes_its_mode_before_evaluating(inside: bool) -> None:
    model = build()
    optimizer = Swapping(model.parameters())
    with slipstream.accelerate(model, optimizer, None, {"local": {"steps": 4}}) as session:
        session.backward(loss_of(model, 0, 1))
        session.step()
        before = flat(model.parameters())
        if not inside:
            optimizer.eval()
        refused = pytest.raises(
            UsageError,
            match=r"Swapping\.eval\(\) .* before the with block.* on_validation_model_eval\(\)",
        )
        with refused if inside else nullcontext(), session.evaluating():
            optimizer.eval()
        if not inside:
            optimizer.train()
        assert torch.equal(flat(model.parameters()), before)
        optimizer.param_groups[0]["train_mode"] = True


class Adapted(nn.Linear):
    """Merges its adapter into the frozen weight in ``eval()``, as loralib's layers do."""

    def __init__(self) -> None:
        super().__init__(4, 4, bias=False)
        self.weight.requires_grad_(False)
        self.adapter = nn.Parameter(torch.zeros(4, 4))

    def train(self, mode: bool = True) -> Adapted:
        if mode != self.training:
            self.weight.data += self.adapter.detach() * (-1 if mode else 1)
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + x @ self.adapter.t() if self.training else y


@pytest.mark.parametrize("before", [True, False], ids=["eval() before", "eval() inside"])
def test_adapters_that_are_merged_while_evaluating_come_out_as_they_went_in(before: bool) -> None:
    model, x = Adapted(), torch.ones(2, 4)
    base = model.weight.clone()
    optimizer = SGD([model.adapter], lr=0.1)
    session = slipstream.accelerate(model, optimizer, None, {"local": {"steps": 100}})
    session.backward(session.model(x).sum())
    session.step()
    own = model(x)
    if before:
        model.eval()
    with session.evaluating():
        model.eval()
        torch.testing.assert_close(model(x), x @ base.t())
    torch.testing.assert_close(model(x), own)
    model.train()
    torch.testing.assert_close(model.weight, base)
    session.close()


def inside_evaluating() -> str:
    model = build()
    session = slipstream.accelerate(model, sgd(model), None, {"local": {}})
    with session.evaluating(), pytest.raises(UsageError, match="evaluating") as caught:
        session.backward(loss_of(model, 0, 1))
    session.close()
    return str(caught.value)


def test_no_training_on_the_outer_parameters() -> None:
    assert "with block" in inside_evaluating()


def test_a_graph_of_before_a_meeting_is_told_apart() -> None:
    """A generator's, while its discriminator is updated in the same session: torch told of a
    tensor, a version and anomalies."""
    generator, critic = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6)), nn.Linear(6, 1)
    both, local = nn.ModuleList([generator, critic]), {"local": {"steps": 1}}
    session = slipstream.accelerate(both, SGD(critic.parameters(), lr=0.1), None, local)
    for _ in range(2):
        made = generator(torch.ones(4, 6))
        session.backward(critic(made.detach()).square().mean())
        session.step()
    with pytest.raises(UsageError, match=r"by a meeting of ranks .*after that update; or give mo"):
        session.backward(critic(made).mean())
    session.__exit__(UsageError, UsageError(), None)


def test_a_head_that_is_out_while_the_model_evaluates_keeps_its_parameters() -> None:
    model = build()
    with slipstream.accelerate(model, sgd(model), None, {"local": {"steps": 4}}) as session:
        session.backward(loss_of(model, 0, 1))
        session.step()
        head, before = model[3], flat(model.parameters())
        model[3] = nn.Identity()
        with session.evaluating():
            pass
        model[3] = head
        assert torch.equal(flat(model.parameters()), before)


def loaded_by_hand() -> tuple[Tensor, Tensor]:
    other = build()
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.5)
    model = build()
    local = {"steps": 4, "inner_state": "reset"}
    session = slipstream.accelerate(model, SGD(model.parameters(), lr=0.0), None, {"local": local})
    model.load_state_dict(other.state_dict())  # as a script that resumes
    for update in range(4):
        session.backward(loss_of(model, session.rank, update))
        session.step()
    session.close()
    return flat(model.parameters()), flat(other.parameters())


def test_a_model_loaded_after_accelerate_is_what_rounds_begin_with() -> None:
    found, loaded = loaded_by_hand()
    assert torch.equal(found, loaded)


@pytest.mark.parametrize("verb", ["step", "checkpoint", "restore", "close"])
def test_the_outer_parameters_do_not_pass_for_those_of_a_rank(verb: str) -> None:
    model = build()
    session = slipstream.accelerate(model, sgd(model), None, {"local": {"steps": 4}})
    session.backward(loss_of(model, 0, 1))
    session.step()
    state = session.checkpoint()
    if verb == "step":
        session.backward(loss_of(model, 0, 2))
    call: dict[str, Any] = {
        "step": session.step,
        "checkpoint": lambda: session.checkpoint(sharded=True),
        "restore": lambda: session.restore(state),
        "close": session.close,
    }
    before = flat(model.parameters())
    with session.evaluating(), pytest.raises(UsageError, match="evaluating"):
        call[verb]()
    assert torch.equal(flat(model.parameters()), before)
    if verb == "step":
        session.step()
    session.close()


def test_time_at_a_meeting_is_no_time_of_this_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The heartbeat names ranks that are slow by themselves."""
    model, clock = build(), [0.0]

    def meet(*_: object) -> None:
        clock[0] += 5

    with slipstream.accelerate(model, sgd(model), None, {"local": {"steps": 1}}) as session:
        fake = SimpleNamespace(perf_counter=lambda: clock[0])
        for module in ("loop", "due_meetings"):
            monkeypatch.setattr(f"slipstream.session.{module}.time", fake)
        monkeypatch.setattr(LocalTraining, "updated", meet)
        session.backward(loss_of(model, 0, 1))
        session.step()
        assert session._loop.progress.waited == 5


def partial_round(updates: int) -> Tensor:
    model = build()
    local = {"steps": 8, "fragments": 2, "delay": 1}
    with slipstream.accelerate(model, sgd(model), None, {"local": local}) as session:
        for update in range(updates):
            session.backward(loss_of(model, session.rank, update))
            session.step()
    return flat(model.parameters())


@pytest.mark.parametrize("updates", [1, 5, 8, 9])
def test_all_ranks_end_with_the_same_parameters(two: Ranks, updates: int) -> None:
    first, second = two.run(partial_round, updates)
    assert torch.equal(first, second)


# What is refused.


def test_the_part_of_one_rank_is_no_state_for_all() -> None:
    model = build()
    with slipstream.accelerate(model, sgd(model), None, {"local": {}}) as session:
        part = session.checkpoint(sharded=True)
        with pytest.raises(UsageError, match="is the part of rank 0 of 1"):
            session.restore(part)


@pytest.mark.parametrize(
    "settings", [{"stretch": 4}, {"rendezvous": "localhost:1"}], ids=["stretch", "rendezvous"]
)
def test_a_loader_that_keeps_ranks_in_step_is_refused(settings: dict[str, Any]) -> None:
    model = build()
    with pytest.raises(StrategyError, match="with a loader"):
        slipstream.accelerate(model, sgd(model), [batch(0, 1)], {"local": settings})


REFUSED = {
    "gradients.transport sharded": {"gradients": {"transport": "sharded"}},
    "gradients.transport auto": {"gradients": {"transport": "auto"}},
    "gradients.split optimal": {"gradients": {"split": "optimal"}},
    "gradients.codec": {"gradients": {"codec": "half"}},
    "precision half_weights": {"precision": "half_weights"},
    "data.balance": {"data": {"balance": {}}},
    "rendezvous and checks.every 5": {
        "local": {"rendezvous": "localhost:1"},
        "checks": {"every": 5},
    },
}


@pytest.mark.parametrize(("words", "settings"), REFUSED.items(), ids=REFUSED)
def test_what_cannot_be_is_refused(words: str, settings: dict[str, Any]) -> None:
    model = build().float()
    with pytest.raises(StrategyError, match=f"local with {words}"):
        slipstream.accelerate(model, sgd(model), None, {"local": {}, **settings})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"steps": 4, "fragments": 5}, "fragments 5 are more than steps 4"),
        ({"steps": 8, "fragments": 4, "delay": 3}, "delay 3 is longer than the 2 updates"),
        ({"codec": "dgc"}, "momentum"),
        ({"mix": 1.0}, "mix"),
    ],
)
def test_settings_that_fit_no_round_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(StrategyError, match=words):
        Strategy.load({"local": settings})


def test_settings_are_all_different() -> None:
    assert all(a != b for a, b in itertools.combinations(SETTINGS.values(), 2))


# Ranks of different speed.


def at_different_speeds(stretch: int, delay: int, pauses: tuple[float, float]) -> dict[str, Any]:
    """Train until 24 updates of both together have met; a pause before each update."""
    model = build()
    rank = torch.distributed.get_rank()
    local = {"steps": 4, "fragments": 1, "delay": delay, "stretch": stretch}
    updates, states = 0, []
    with slipstream.accelerate(model, sgd(model), None, {"local": local}) as session:
        while session.all_updates < 24:
            updates += 1
            time.sleep(pauses[rank])
            session.backward(loss_of(model, rank, updates))
            session.step()
            if updates == 5:
                states.append(session.checkpoint(sharded=True))
        met = session.all_updates
    found = flat(model.parameters())
    again = build()
    gathered: list[Any] = [None, None]
    torch.distributed.all_gather_object(gathered, states[0])
    with slipstream.accelerate(again, sgd(again), None, {"local": local}) as session:
        session.restore(gathered)
        for update in range(8):
            session.backward(loss_of(again, rank, update))
            session.step()
    return {"updates": updates, "met": met, "found": found, "again": flat(again.parameters())}


@pytest.mark.parametrize("delay", [0, 1])
def test_a_faster_rank_makes_more_updates(two: Ranks, delay: int) -> None:
    fast, slow = two.run(at_different_speeds, 100, delay, (0.0, 0.2))
    assert fast["updates"] > slow["updates"]
    assert fast["met"] == slow["met"] >= 24
    assert torch.equal(fast["found"], slow["found"])
    assert torch.equal(fast["again"], slow["again"])


def test_a_faster_rank_waits_where_it_has_made_enough(two: Ranks) -> None:
    fast, slow = two.run(at_different_speeds, 1, 0, (0.0, 0.02))
    assert fast["updates"] - slow["updates"] <= fast["updates"] // 4 + 1


def saved_while_one_waits() -> Tensor:
    model = build()
    rank = torch.distributed.get_rank()
    local = {"steps": 4, "stretch": 100}
    with slipstream.accelerate(model, sgd(model), None, {"local": local}) as session:
        for update in range(8 - 2 * rank):
            if update == 4 - 2 * rank:  # the first rank is ready to meet, the other one is not
                state = session.checkpoint()
                with pytest.raises(MismatchError, match="all_updates has just changed"):
                    session.restore(state)
                with pytest.raises(MismatchError, match="all_updates has just changed"):
                    session.restore({"model": state["model"]})
            session.backward(loss_of(model, rank, update))
            session.step()
    return flat(model.parameters())


def test_a_rank_that_waits_is_saved_at_any_moment_and_not_restored(two: Ranks) -> None:
    first, second = two.run(saved_while_one_waits)
    assert torch.equal(first, second)


def restored_where_ranks_wait_for_the_first_meeting() -> Tensor:
    rank = torch.distributed.get_rank()
    parts: list[Any] = []
    for _ in range(2):
        model = build()
        local = {"steps": 1, "stretch": 100}
        with slipstream.accelerate(model, sgd(model), None, {"local": local}) as session:
            if parts:
                session.restore(parts)
            session.backward(loss_of(model, rank, len(parts)))
            with session.evaluating():
                outer = flat(model.parameters())
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(FixedCarrier, "arrived", False)
                session.step()
            parts = parts or [None, None]
            torch.distributed.all_gather_object(parts, session.checkpoint(sharded=True))
    return outer


def test_ranks_restored_before_the_first_meeting_have_the_same_outer_parameters(two: Ranks) -> None:
    first, second = two.run(restored_where_ranks_wait_for_the_first_meeting)
    assert torch.equal(first, second)


def leaves_early() -> tuple[Tensor, int]:
    model = build()
    rank = torch.distributed.get_rank()
    local = {"steps": 4, "stretch": 3}
    with slipstream.accelerate(model, sgd(model), None, {"local": local}) as session:
        for update in range(9 + 8 * rank):  # the same loop on all ranks is the user's part
            session.backward(loss_of(model, rank, update))
            session.step()
        met = session.all_updates
    return flat(model.parameters()), met


def test_a_rank_that_ends_early_keeps_nobody_waiting(two: Ranks) -> None:
    (first, met), (second, other) = two.run(leaves_early)
    assert torch.equal(first, second)
    assert met < other  # who goes on counts its own updates, so that its loop ends
