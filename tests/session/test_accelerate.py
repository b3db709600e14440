"""``accelerate()``: every wrong use says what was seen and what to do, on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import slipstream
from slipstream.errors import MismatchError, ModelError, SlipstreamError, StrategyError, UsageError
from tests.harness.ranks import Ranks

Case = tuple[Callable[[], object], type[SlipstreamError], list[str]]


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def small(*, width: int = 3, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Four gradients of 12 + 3, 3 + 1 elements."""
    return nn.Sequential(nn.Linear(4, width), nn.Linear(width, 1)).to(dtype)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def accelerated(model: Any = None, optimizer: Any = None, strategy: Any = None) -> None:
    """Accelerate and close at once."""
    model = small() if model is None else model
    slipstream.accelerate(model, optimizer or sgd(model), strategy=strategy).close()


def config(**gradients: object) -> None:
    accelerated(strategy={"gradients": gradients})


def frozen() -> nn.Module:
    return small().requires_grad_(False)


def no_parameters() -> None:
    accelerated(nn.ReLU(), sgd(small()))


def lazy() -> None:
    accelerated(nn.Sequential(nn.LazyLinear(2)))


def half_on_meta() -> None:
    model = small()
    model[1].to("meta")  # type: ignore[operator,index]
    accelerated(model)


def eight_bits() -> None:
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(torch.zeros(2, 2).to(torch.float8_e4m3fn))
    accelerated(model)


def one_more_parameter() -> None:
    model = small()
    extra = nn.Parameter(torch.zeros(7, 5))
    accelerated(model, torch.optim.SGD([*model.parameters(), extra], lr=0.1))


def optimizer_of_an_older_model() -> None:
    accelerated(small(), sgd(small()))


def twice(
    outer: Callable[[nn.Module], nn.Module], inner: Callable[[nn.Module], nn.Module]
) -> Callable[[], None]:
    def accelerate_twice() -> None:
        model = small()
        with slipstream.accelerate(outer(model), sgd(outer(model))):
            second = inner(model)
            slipstream.accelerate(second, sgd(second))

    return accelerate_twice


def itself(model: nn.Module) -> nn.Module:
    return model


def part(model: nn.Module) -> nn.Module:
    return model[0]  # type: ignore[index,no-any-return]


STRATEGIES: dict[str, Case] = {
    "unknown key": (
        lambda: accelerated(strategy={"gradient": {"overlap": True}}),
        StrategyError,
        ["gradient", "did you mean", "gradients"],
    ),
    "wrong type": (lambda: config(overlap="yes"), StrategyError, ["gradients.overlap", "'yes'"]),
    "percents": (
        lambda: config(split={"kind": "by_percent", "percents": [50.0, 40.0]}),
        StrategyError,
        ["percents", "90", "100"],
    ),
    "an index beyond": (
        lambda: config(split={"kind": "by_index", "last": [1, 4]}),
        StrategyError,
        ["gradients.split.last", "ends with 4", "has 4 gradients", "must be 3"],
    ),
    "an index short of the end": (
        lambda: config(split={"kind": "by_index", "last": [0, 2]}),
        StrategyError,
        ["ends with 2", "must be 3"],
    ),
    "not ascending": (
        lambda: config(split={"kind": "by_index", "last": [2, 1, 3]}),
        StrategyError,
        ["last", "[2, 1, 3]", "ascend"],
    ),
    "accumulate": (lambda: config(accumulate=0), StrategyError, ["gradients.accumulate", "0", "1"]),
    "no such preset": (
        lambda: accelerated(strategy="hcll"),
        StrategyError,
        ["'hcll'", "did you mean", "hccl", "per_layer", ".yaml"],
    ),
    "no such file": (
        lambda: accelerated(strategy="no/such.yaml"),
        StrategyError,
        ["no/such.yaml"],
    ),
    "not a strategy": (lambda: accelerated(strategy=3), StrategyError, ["3", "a path", "mapping"]),
}

MODELS: dict[str, Case] = {
    "all frozen": (
        lambda: accelerated(frozen(), sgd(frozen().requires_grad_())),
        ModelError,
        ["the optimizer's group 0"],
    ),
    "all frozen, split": (
        lambda: accelerated(model := frozen(), sgd(model), {"gradients": {"split": "per_layer"}}),
        ModelError,
        ["no parameter that requires a gradient", "requires_grad=True"],
    ),
    "no parameters": (no_parameters, ModelError, ["not in the model"]),
    "meta device": (
        lambda: accelerated(small().to("meta")),
        ModelError,
        ["parameter 0.weight", "meta device", "to_empty"],
    ),
    "two devices": (half_on_meta, ModelError, ["parameter 1.weight", "meta"]),
    "lazy": (lazy, ModelError, ["parameter 0.weight", "lazy", "one forward"]),
    "a dtype that nobody adds": (
        eight_bits,
        ModelError,
        ["parameter weight", "float8_e4m3fn", "allowed: float32"],
    ),
    "not a module": (lambda: accelerated([1], sgd(small())), ModelError, ["Module", "list"]),
    "model and optimizer swapped": (
        lambda: accelerated(sgd(model := small()), model),
        ModelError,
        ["torch.nn.Module", "SGD"],
    ),
    "the model as optimizer": (
        lambda: accelerated(model := small(), model),
        ModelError,
        ["second argument", "Sequential", "param_groups"],
    ),
    "a foreign parameter": (
        one_more_parameter,
        ModelError,
        ["group 0", "(7, 5)", "number 4", "not in the model", "model.parameters()"],
    ),
    "an optimizer of another model": (
        optimizer_of_an_older_model,
        ModelError,
        ["group 0", "(3, 4)", "number 0"],
    ),
    "twice": (twice(itself, itself), UsageError, ["accelerated already", "close()"]),
    "a part of an accelerated model": (twice(itself, part), UsageError, ["accelerated already"]),
    "a model that holds one": (twice(part, itself), UsageError, ["accelerated already"]),
}

ALIKE = STRATEGIES | MODELS


def told(name: str) -> tuple[str, str, bool]:
    """The error of a case; whether the next good use works in spite of it."""
    try:
        ALIKE[name][0]()
    except SlipstreamError as error:
        outcome = type(error).__name__, str(error)
    else:
        outcome = "no error", ""
    accelerated()
    return (*outcome, dist.is_initialized())


def complain_alike(outcome: tuple[str, str, bool], name: str, joined: bool) -> None:
    _, kind, words = ALIKE[name]
    seen, text, initialized = outcome
    assert seen == kind.__name__, text
    assert [w for w in words if w not in text] == [], text
    assert initialized == joined


@pytest.mark.parametrize("name", ALIKE)
def test_a_mistake_is_explained_on_one_process(name: str) -> None:
    complain_alike(told(name), name, joined=False)


@pytest.mark.parametrize("name", ALIKE)
def test_a_mistake_is_explained_on_every_rank(two: Ranks, name: str) -> None:
    for outcome in two.run(told, name, timeout=40):
        complain_alike(outcome, name, joined=True)


def wrapped(inside: bool) -> None:
    model: nn.Module = DistributedDataParallel(small())
    if inside:
        model = nn.Sequential(nn.ReLU(), model)
    accelerated(model)


@pytest.mark.parametrize(("inside", "path"), [(False, "module (the model)"), (True, "module 1")])
def test_a_model_in_ddp_is_refused(two: Ranks, inside: bool, path: str) -> None:
    for error in two.fail(wrapped, inside).values():
        assert type(error) is ModelError
        assert f"{path} is wrapped in DistributedDataParallel" in str(error)
        assert "ddp.module" in str(error)


# What only rank 1 does, and all ranks hear of.


def first() -> bool:
    return dist.get_rank() == 0


def with_buffer(size: int) -> nn.Module:
    model = small()
    model.register_buffer("mean", torch.zeros(size))
    return model


def frozen_bias(on: bool) -> nn.Module:
    model = small()
    model[1].bias.requires_grad_(not on)  # type: ignore[index,union-attr]
    return model


def named(name: str) -> nn.Module:
    return nn.ModuleDict({name: nn.Linear(2, 1)})


def own_optimizer(right: bool) -> None:
    model = small()
    accelerated(model, sgd(model if right else small()))


def own_loader(given: bool) -> None:
    model = small()
    slipstream.accelerate(model, sgd(model), [torch.ones(1, 4)] if given else None).close()


ONLY_ONE: dict[str, tuple[Callable[[], object], list[str]]] = {
    "shape": (
        lambda: accelerated(small(width=3 if first() else 5)),
        ["parameter 0.weight", "(5, 4) on rank 1", "(3, 4) on rank 0"],
    ),
    "dtype": (
        lambda: accelerated(small(dtype=torch.float32 if first() else torch.float64)),
        ["parameter 0.weight", "float64 (3, 4) on rank 1", "float32 (3, 4) on rank 0"],
    ),
    "name": (
        lambda: accelerated(named("a" if first() else "b")),
        ["parameter a.weight: absent on rank 1"],
    ),
    "one more": (
        lambda: accelerated(small() if first() else nn.Sequential(*small(), nn.Linear(1, 1))),
        ["parameter 2.weight", "absent on rank 0"],
    ),
    "frozen": (
        lambda: accelerated(frozen_bias(not first())),
        ["parameter 1.bias", "frozen on rank 1"],
    ),
    "buffer": (
        lambda: accelerated(with_buffer(1 if first() else 2)),
        ["buffer mean", "(2,) on rank 1"],
    ),
    "strategy": (
        lambda: config(overlap=first()),
        ['the strategy: {"gradients": {"overlap": false}} on rank 1, {} on rank 0'],
    ),
    "loader": (lambda: own_loader(first()), ["the loader", "none on rank 1", "given on rank 0"]),
    "strategy file": (
        lambda: accelerated(strategy=None if first() else "gone.yaml"),
        ["rank 1 cannot go on: StrategyError", "gone.yaml"],
    ),
    "strategy file on the first": (
        lambda: accelerated(strategy="gone.yaml" if first() else None),
        ["rank 0 cannot go on: StrategyError", "gone.yaml"],
    ),
    "optimizer": (
        lambda: own_optimizer(first()),
        ["rank 1 cannot go on: ModelError", "not in the model"],
    ),
    "lazy": (
        lambda: accelerated(small() if first() else nn.LazyLinear(2)),
        ["rank 1 cannot go on: ModelError", "lazy"],
    ),
}


def told_by_rank(name: str) -> tuple[str, str]:
    try:
        ONLY_ONE[name][0]()
    except SlipstreamError as error:
        outcome = type(error).__name__, str(error)
    else:
        outcome = "no error", ""
    accelerated()  # the ranks are still in step
    return outcome


@pytest.mark.parametrize("name", ONLY_ONE)
def test_what_one_rank_does_otherwise_every_rank_hears(two: Ranks, name: str) -> None:
    words = ONLY_ONE[name][1]
    outcomes = two.run(told_by_rank, name, timeout=40)
    failed = {"rank 0 cannot": 0, "rank 1 cannot": 1}.get(words[0][:13])
    for rank, (kind, text) in enumerate(outcomes):
        if rank == failed:  # its own error, which the others quote
            assert kind in words[0]
            assert text in outcomes[1 - rank][1]
            continue
        assert kind == MismatchError.__name__, text
        assert [w for w in words if w not in text] == [], text
        assert "differs" in text if failed is None else "differs" not in text


# Where the strategy comes from.

SETTINGS = "gradients: {accumulate: 3}"
SOURCES: dict[str, tuple[Any, str | None, int]] = {  # argument, variable -> accumulate
    "nothing": (None, None, 1),
    "the variable": (None, "{file}", 3),
    "an empty variable": (None, "", 1),
    "a preset in the variable": (None, "sequential", 1),
    "an argument before the variable": ({"gradients": {"accumulate": 2}}, "{file}", 2),
    "an empty argument, too": ({}, "{file}", 1),
    "a value": (slipstream.Strategy(), "{file}", 1),
}


@pytest.mark.parametrize(("argument", "variable", "accumulate"), SOURCES.values(), ids=SOURCES)
def test_the_strategy_is_the_argument_or_what_the_variable_names(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    argument: Any,
    variable: str | None,
    accumulate: int,
) -> None:
    file = tmp_path / "strategy.yaml"
    file.write_text(SETTINGS)
    monkeypatch.delenv("SLIPSTREAM_STRATEGY", raising=False)
    if variable is not None:
        monkeypatch.setenv("SLIPSTREAM_STRATEGY", variable.format(file=file))
    model = small()
    with slipstream.accelerate(model, sgd(model), strategy=argument) as session:
        assert session.strategy.gradients.accumulate == accumulate
        assert session.strategy.gradients.overlap == (variable != "sequential")


# What accelerate() leaves as it was, and what it makes equal.


def test_close_leaves_the_model_as_it_was() -> None:
    model = small()
    before = [m.__dict__.keys() | m.__class__.__mro__ for m in model.modules()]
    names = list(model.state_dict())
    with slipstream.accelerate(model, sgd(model), strategy={"trace": {"steps": 1}}) as session:
        assert session.model is model
        assert list(model.state_dict()) == names
    assert [m.__dict__.keys() | m.__class__.__mro__ for m in model.modules()] == before
    assert not model._forward_pre_hooks
    accelerated(model)  # accelerated, closed, and accelerated again


def start_values() -> tuple[list[float], list[float], bool]:
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    model[1].running_mean.fill_(dist.get_rank() + 1.0)  # type: ignore[union-attr]
    index = nn.Parameter(torch.tensor([dist.get_rank() + 5]), requires_grad=False)
    model.register_parameter("index", index)
    first_values = [float(v) for p in model.state_dict().values() for v in p.flatten()]
    accelerated(model)
    values = [float(v) for p in model.state_dict().values() for v in p.flatten()]
    hooks = any(p._post_accumulate_grad_hooks for p in model.parameters())
    return first_values, values, hooks


def test_all_ranks_start_from_the_values_of_the_first(two: Ranks) -> None:
    (first_before, first_after, _), (second_before, second_after, hooks) = two.run(start_values)
    assert first_before != second_before
    assert first_after == second_after == first_before
    assert not hooks
