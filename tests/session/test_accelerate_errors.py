"""Errors of ``accelerate()``: each says what was seen and what to do, on every rank."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import slipstream
from slipstream.errors import MismatchError, ModelError, SlipstreamError, StrategyError, UsageError
from tests.harness.ranks import PerRank, Ranks
from tests.session.training import accelerate_and_close, sgd

Case = tuple[Callable[[], object], type[SlipstreamError], list[str]]


def of_masters() -> None:
    """Accelerate with the optimizer of fp32 copies that a script has made of its weights."""
    model = small(dtype=torch.bfloat16)
    copies = [p.detach().float().requires_grad_() for p in model.parameters()]
    accelerate_and_close(model, torch.optim.SGD(copies))


def small(*, width: int = 3, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Four gradients of 12 + 3, 3 + 1 elements."""
    return nn.Sequential(nn.Linear(4, width), nn.Linear(width, 1)).to(dtype)


def accelerate_with(**gradients: object) -> None:
    """Accelerate under a strategy with these settings of ``gradients``."""
    accelerate_and_close(small(), strategy={"gradients": gradients})


def with_loader(loader: DataLoader[int]) -> None:
    model = small()
    slipstream.accelerate(model, sgd(model), loader)


def frozen() -> nn.Module:
    return small().requires_grad_(False)


def no_parameters() -> None:
    accelerate_and_close(nn.ReLU(), sgd(small()))


def lazy() -> None:
    accelerate_and_close(nn.Sequential(nn.LazyLinear(2)))


def half_on_meta() -> None:
    model = small()
    model[1].to("meta")  # type: ignore[operator,index]
    accelerate_and_close(model)


def scripted() -> None:
    with warnings.catch_warnings(action="ignore"):  # it is deprecated
        model = torch.jit.script(small())
    accelerate_and_close(model)


def eight_bits() -> None:
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(torch.zeros(2, 2).to(torch.float8_e4m3fn))
    accelerate_and_close(model)


def one_more_parameter() -> None:
    model = small()
    extra = nn.Parameter(torch.zeros(7, 5))
    accelerate_and_close(model, torch.optim.SGD([*model.parameters(), extra], lr=0.1))


def optimizer_of_an_older_model() -> None:
    accelerate_and_close(small(), sgd(small()))


def accelerate_twice_with(
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


def tied_to(model: nn.Module) -> nn.Module:
    """A network of its own with the weights of the other's first layer, as an actor's in SAC-AE."""
    other = copy.deepcopy(model[0])  # type: ignore[index]
    other.weight = model[0].weight  # type: ignore[index]
    return other  # type: ignore[no-any-return]


STRATEGIES: dict[str, Case] = {
    "unknown key": (
        lambda: accelerate_and_close(small(), strategy={"gradient": {"overlap": True}}),
        StrategyError,
        ["gradient", "did you mean", "gradients"],
    ),
    "wrong type": (
        lambda: accelerate_with(overlap="yes"),
        StrategyError,
        ["gradients.overlap", "'yes'"],
    ),
    "percents": (
        lambda: accelerate_with(split={"kind": "by_percent", "percents": [50.0, 40.0]}),
        StrategyError,
        ["percents", "90", "100"],
    ),
    "an index beyond": (
        lambda: accelerate_with(split={"kind": "by_index", "last": [1, 4]}),
        StrategyError,
        ["gradients.split.last", "ends with 4", "has 4 gradients", "must be 3"],
    ),
    "an index short of the end": (
        lambda: accelerate_with(split={"kind": "by_index", "last": [0, 2]}),
        StrategyError,
        ["ends with 2", "must be 3"],
    ),
    "not ascending": (
        lambda: accelerate_with(split={"kind": "by_index", "last": [2, 1, 3]}),
        StrategyError,
        ["last", "[2, 1, 3]", "ascend"],
    ),
    "accumulate": (
        lambda: accelerate_with(accumulate=0),
        StrategyError,
        ["gradients.accumulate", "0", "1"],
    ),
    "no such preset": (
        lambda: accelerate_and_close(small(), strategy="exatc"),
        StrategyError,
        ["'exatc'", "did you mean", "exact", "low_memory", ".yaml"],
    ),
    "no such file": (
        lambda: accelerate_and_close(small(), strategy="no/such.yaml"),
        StrategyError,
        ["no/such.yaml"],
    ),
    "not a strategy": (
        lambda: accelerate_and_close(small(), strategy=3),
        StrategyError,
        ["3", "a path", "mapping"],
    ),
}

MODELS: dict[str, Case] = {
    "all frozen": (
        lambda: accelerate_and_close(frozen(), sgd(frozen().requires_grad_())),
        ModelError,
        ["the optimizer's group 0"],
    ),
    "all frozen, split": (
        lambda: accelerate_and_close(
            model := frozen(), sgd(model), {"gradients": {"split": "per_layer"}}
        ),
        ModelError,
        ["no parameter that requires a gradient", "requires_grad=True"],
    ),
    "no parameters": (no_parameters, ModelError, ["not in the model"]),
    "fp32 copies": (of_masters, ModelError, ["not in the model", "precision: half_weights"]),
    "meta device": (
        lambda: accelerate_and_close(small().to("meta")),
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
    "scripted": (scripted, ModelError, ["ScriptModule", "pass the plain module"]),
    "not a module": (
        lambda: accelerate_and_close([1], sgd(small())),
        ModelError,
        ["Module", "list"],
    ),
    "model and optimizer swapped": (
        lambda: accelerate_and_close(sgd(model := small()), model),
        ModelError,
        ["torch.nn.Module", "SGD"],
    ),
    "the model as optimizer": (
        lambda: accelerate_and_close(model := small(), model),
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
    "no sample": (
        lambda: with_loader(DataLoader([], batch_size=4)),
        ModelError,
        ["no batch on this rank", "0 samples", "4 at a time;"],
    ),
    "no full batch": (
        lambda: with_loader(DataLoader([1, 2], batch_size=4, drop_last=True)),
        ModelError,
        ["2 samples", "4 at a time, drops the last batch unless it is full;", "at least one"],
    ),
    "twice": (
        accelerate_twice_with(itself, itself),
        UsageError,
        ["accelerated already", "close()"],
    ),
    "a part of an accelerated model": (
        accelerate_twice_with(itself, part),
        UsageError,
        ["accelerated already"],
    ),
    "a model that holds one": (
        accelerate_twice_with(part, itself),
        UsageError,
        ["module 0 is in a model that is accelerated already", "one session"],
    ),
    "a model that shares weights with one": (
        accelerate_twice_with(itself, tied_to),
        UsageError,
        ["parameter weight is in a model that is accelerated already", "one session"],
    ),
}

MISTAKES = STRATEGIES | MODELS


def outcome_of(name: str) -> tuple[str, str, bool]:
    """The error of a case; whether the next good use works in spite of it."""
    mistake, *_ = MISTAKES.get(name) or ONLY_ONE[name]
    try:
        mistake()
    except SlipstreamError as error:
        outcome = type(error).__name__, str(error)
    else:
        outcome = "no error", ""
    accelerate_and_close(small())
    return (*outcome, dist.is_initialized())


def check_outcome(outcome: tuple[str, str, bool], name: str, joined: bool) -> None:
    _, kind, words = MISTAKES[name]
    seen, text, initialized = outcome
    assert seen == kind.__name__, text
    assert [w for w in words if w not in text] == [], text
    assert initialized == joined


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_explained_on_one_process(name: str) -> None:
    check_outcome(outcome_of(name), name, joined=False)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_explained_on_every_rank(two: Ranks, name: str) -> None:
    for outcome in two.run(outcome_of, name):
        check_outcome(outcome, name, joined=True)


def left_alone() -> nn.Module:
    """A model whose head DDP would leave alone, as each rank has its own."""
    model = small()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["1.weight"])
    return model


def own_statistics(ignored: str) -> nn.Module:
    """A model of which DDP would leave a buffer alone."""
    model = nn.Sequential(small(), nn.BatchNorm1d(1))
    model.register_buffer("mask", torch.ones(2, dtype=torch.bool))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [ignored])
    return model


OTHERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "DDP": (lambda: DistributedDataParallel(small()), r"module \(the model\) is .*ddp\.module"),
    "DDP inside": (
        lambda: nn.Sequential(nn.ReLU(), DistributedDataParallel(small())),
        "module 1 is wrapped in DistributedDataParallel",
    ),
    "fully_shard": (
        lambda: fully_shard(small()),
        r"parameter 0\.weight is split over ranks already.*accelerate_fsdp\(\)",
    ),
    "FSDP": (
        lambda: FullyShardedDataParallel(small(), device_id=torch.device("cpu")),
        r"module \(the model\) is wrapped in FullyShardedDataParallel",
    ),
    "DDP, but for the head": (left_alone, r"told to leave 1\.weight alone.*optimizer of its own"),
}
"""Models that others have parallelised."""


def parallelised(name: str) -> None:
    model, words = OTHERS[name]
    with pytest.raises(ModelError, match=words):
        accelerate_and_close(model())


@pytest.mark.parametrize("name", OTHERS)
def test_a_model_that_another_has_parallelised_is_refused(two: Ranks, name: str) -> None:
    two.run(parallelised, name)


def said_of_own_statistics(ignored: str) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accelerate_and_close(own_statistics(ignored))
    return [str(one.message) for one in caught]


def test_buffers_that_ddp_leaves_alone_are_a_warning_unless_they_are_masks(two: Ranks) -> None:
    """Most often they are constants of a frozen part, left alone to send less."""
    (said,), others = two.run(said_of_own_statistics, "1.running_mean")
    assert "leave buffer 1.running_mean alone" in said
    assert "plain attribute" in said
    assert not others
    assert two.run(said_of_own_statistics, "mask") == [[], []]
    assert said_of_own_statistics("1.running_mean") == []


# What one rank alone does wrong, or differently.


def is_first() -> bool:
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
    accelerate_and_close(model, sgd(model if right else small()))


def resumed(loads: bool, momentum: float = 0.9, lr: float = 0.1) -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9)
    if loads:
        model(torch.full((1, 4), momentum)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    accelerate_and_close(model, optimizer)


def dealt() -> None:
    """An optimizer that keeps the state of other parameters on each rank, as Muon's do."""
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    mine = [*model.parameters()][dist.get_rank() :: 2]
    optimizer.state.update({p: {"momentum_buffer": torch.ones_like(p)} for p in mine})
    accelerate_and_close(model, optimizer)


def sliced() -> None:
    """An optimizer of which each rank keeps rows of each momentum, as that of nanochat."""
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    weight = next(model.parameters())
    optimizer.state[weight] = {"momentum_buffer": torch.full_like(weight[:1], dist.get_rank())}
    accelerate_and_close(model, optimizer)


def own_loader(given: bool) -> None:
    model = small()
    slipstream.accelerate(model, sgd(model), [torch.ones(1, 4)] if given else None).close()


ONLY_ONE: dict[str, tuple[Callable[[], object], list[str]]] = {
    "shape": (
        lambda: accelerate_and_close(small(width=3 if is_first() else 5)),
        ["parameter 0.weight", "(5, 4) on rank 1", "(3, 4) on rank 0"],
    ),
    "dtype": (
        lambda: accelerate_and_close(small(dtype=torch.float32 if is_first() else torch.float64)),
        ["parameter 0.weight", "float64 (3, 4) on rank 1", "float32 (3, 4) on rank 0"],
    ),
    "name": (
        lambda: accelerate_and_close(named("a" if is_first() else "b")),
        ["parameter a.weight: absent on rank 1"],
    ),
    "one more": (
        lambda: accelerate_and_close(
            small() if is_first() else nn.Sequential(*small(), nn.Linear(1, 1))
        ),
        ["parameter 2.weight", "absent on rank 0"],
    ),
    "frozen": (
        lambda: accelerate_and_close(frozen_bias(not is_first())),
        ["parameter 1.bias", "frozen on rank 1"],
    ),
    "buffer": (
        lambda: accelerate_and_close(with_buffer(1 if is_first() else 2)),
        ["buffer mean", "(2,) on rank 1"],
    ),
    "strategy": (
        lambda: accelerate_with(overlap=is_first()),
        ['the strategy: {"gradients": {"overlap": false}} on rank 1, {} on rank 0'],
    ),
    "loader": (lambda: own_loader(is_first()), ["the loader", "none on rank 1", "given on rank 0"]),
    "strategy file": (
        lambda: accelerate_and_close(small(), strategy=None if is_first() else "gone.yaml"),
        ["rank 1 cannot go on: StrategyError", "gone.yaml"],
    ),
    "strategy file on the first": (
        lambda: accelerate_and_close(small(), strategy="gone.yaml" if is_first() else None),
        ["rank 0 cannot go on: StrategyError", "gone.yaml"],
    ),
    "optimizer": (
        lambda: own_optimizer(is_first()),
        ["rank 1 cannot go on: ModelError", "not in the model"],
    ),
    "a checkpoint of rank 0 alone": (
        lambda: resumed(is_first()),
        ["the optimizer's state", "not there: load it on every rank on rank 1"],
    ),
    "another checkpoint": (
        lambda: resumed(True, 0.9 if is_first() else 0.8),
        ["in the optimizer's state", "on rank 1"],
    ),
    "a learning rate": (
        lambda: resumed(False, lr=0.1 if is_first() else 0.2),
        ["lr of the optimizer's group 0", "0.2 on rank 1", "0.1 on rank 0"],
    ),
    "a lazy parameter": (
        lambda: accelerate_and_close(small() if is_first() else nn.LazyLinear(2)),
        ["rank 1 cannot go on: ModelError", "lazy"],
    ),
}


@pytest.mark.parametrize("name", ONLY_ONE)
def test_what_one_rank_does_differently_is_an_error_on_all(two: Ranks, name: str) -> None:
    words = ONLY_ONE[name][1]
    outcomes = two.run(outcome_of, name)
    failed = {"rank 0 cannot": 0, "rank 1 cannot": 1}.get(words[0][:13])
    for rank, (kind, text, _) in enumerate(outcomes):
        if rank == failed:  # its own error, which the others quote
            assert kind in words[0]
            assert text in outcomes[1 - rank][1]
            continue
        assert kind == MismatchError.__name__, text
        assert [w for w in words if w not in text] == [], text
        assert "differs" in text if failed is None else "differs" not in text


def test_optimizers_that_ranks_may_have_are_taken(two: Ranks) -> None:
    two.run(dealt)
    two.run(sliced)
    two.run(resumed, True)


def traced_elsewhere(folder: str) -> list[str]:
    """The files that a rank has written into a folder of its own."""
    own = Path(folder) / f"of rank {dist.get_rank()}"
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy = {"trace": {"steps": 1, "skip": 0, "folder": str(own)}}
    with slipstream.accelerate(model, optimizer, strategy=strategy) as session:
        session.backward(session.model(torch.ones(2, 4)).sum())
        session.step()
    return [path.name for path in own.glob("*")]


def test_the_folder_of_a_trace_may_differ_for_the_first_rank_alone_writes(
    two: Ranks, tmp_path: Path
) -> None:
    assert two.run(traced_elsewhere, str(tmp_path)) == [["trace.json"], []]


def in_common(model: nn.Module, *, copies: bool) -> None:
    """Accelerate a model of which the ranks have got the memory, or a copy of it."""
    accelerate_and_close(copy.deepcopy(model) if copies else model.share_memory())


def test_a_model_in_memory_that_ranks_have_in_common_is_refused(two: Ranks) -> None:
    model = small()
    errors = two.fail(partial(in_common, copies=False), model)
    for error in errors.values():
        assert isinstance(error, ModelError)
        assert "parameter 0.weight lies in memory that ranks 0, 1 have in common" in str(error)
    two.run(partial(in_common, copies=True), model)
    two.run(partial(in_common, copies=False), PerRank(small(), small()))  # each its own
    two.run(with_a_head, model.requires_grad_(False))


def with_a_head(base: nn.Module) -> None:
    """Accelerate a frozen model that ranks have in common, with layers of each rank behind it."""
    accelerate_and_close(nn.Sequential(base.share_memory(), nn.Linear(2, 2)))


def test_frozen_weights_may_be_in_two_models(two: Ranks) -> None:
    two.run(frozen_in_two)


def frozen_in_two() -> None:
    model = small()
    other = nn.Sequential(tied_to(model.requires_grad_(False)), nn.Linear(2, 2))
    whole = nn.Sequential(model, nn.Linear(2, 2))
    with slipstream.accelerate(whole, sgd(whole)):
        accelerate_and_close(other)


# What works, but is most often a mistake.


def drift_of(strategy: object) -> list[str]:
    """What is said of a table that forward changes by the batch of its rank."""
    model = nn.Sequential(nn.Embedding(5, 4, max_norm=1.0), nn.Linear(4, 1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accelerate_and_close(model, strategy=strategy)
    return [str(one.message) for one in caught]


def test_a_table_that_ranks_change_apart_is_a_warning(two: Ranks) -> None:
    (said,), others = two.run(drift_of, None)
    assert "module 0 has max_norm" in said
    assert "ranks drift apart" in said
    assert not others
    assert two.run(drift_of, {"local": {}}) == [[], []]  # where they do in any case
    assert drift_of(None) == []


class ByFirstBatch(nn.Module):
    """Sets its parameter by the first batch, as the ActNorm of a flow does."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(2))
        self.register_buffer("is_set", torch.tensor(False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_set:
            self.bias.data.copy_(-x.mean(0))
            self.is_set.fill_(True)
        return x + self.bias


def with_a_broken_comparison(error: type[BaseException]) -> tuple[bool, str]:
    """Whether a session goes on whose comparison of ranks was broken off, and what it says."""
    model = small()
    session = slipstream.accelerate(model, sgd(model))
    session.backward(model(torch.ones(2, 4)).sum())
    session.step()
    with patch("slipstream.session.drift.maximum_later", side_effect=error), pytest.raises(error):
        session.backward(model(torch.ones(2, 4)).sum())
    with pytest.raises(UsageError) as said:
        session.step()
    failed = session._loop.failed
    session.close()
    return failed, str(said.value)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_no_rank_goes_on_where_the_comparison_was_broken_off(
    two: Ranks, error: type[BaseException]
) -> None:
    """They would meet in other collectives: in those of close(), first of all."""
    for failed, said in two.run(with_a_broken_comparison, error):
        assert failed
        assert "after a backward() that has failed" in said


def trained_apart(habit: str, strategy: object) -> tuple[list[str], list[float]]:
    """What is said of values that ranks have apart after the first update, and the last ones."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    model = nn.Sequential(nn.Linear(3, 2), ByFirstBatch())
    temperature = nn.Parameter(torch.zeros(()))
    if habit == "forward before":
        model(torch.ones(1, 3))
    optimizer, own = sgd(model), torch.optim.SGD([temperature], lr=1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with slipstream.accelerate(model, optimizer, strategy=strategy) as session:
            model[1].is_set.fill_(habit != "first batch")
            if habit == "loaded" and rank == 0:
                model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})
            for _ in range(4):
                if habit == "put back":  # as the weights of an adversarial pass are
                    with torch.no_grad():
                        model[0].weight.add_(rank)
                x = torch.full((2, 3), 1.0 + rank)
                loss = (model(x) * temperature.exp()).square().mean()
                session.backward(loss)
                if habit == "put back":
                    with torch.no_grad():
                        model[0].weight.sub_(rank)
                session.step()
                if habit == "temperature":
                    own.step()
                temperature.grad = None
    assert all(one.filename == __file__ for one in caught)
    return [str(one.message) for one in caught], [
        p.detach().sum().item() for p in model.parameters()
    ]


@pytest.mark.parametrize(
    ("habit", "said"),
    [
        ("first batch", "ranks have different values of 1.bias, and train apart"),
        ("loaded", "ranks have different values of 0.weight and 2 more, and train apart"),
        ("temperature", "ranks have different values of what SGD steps"),
        ("forward before", None),
        ("put back", None),
    ],
)
@pytest.mark.parametrize(
    "strategy", [None, {"gradients": {"transport": "sharded"}}, {"local": {"steps": 2}}], ids=str
)
def test_values_that_ranks_have_apart_after_the_first_update_are_a_warning(
    two: Ranks, habit: str, said: str | None, strategy: object
) -> None:
    (first, one), (others, other) = two.run(trained_apart, habit, strategy)
    assert not others
    outside = habit == "temperature"  # is in no model
    if outside and strategy == {"local": {"steps": 2}}:  # where values differ at most times
        said = "SGD steps parameters that are in no model of a session: under local no meeting"
    if said is not None and (strategy is None or outside):
        assert len(first) == 1
        assert said in first[0]
    else:
        assert first == []
        assert one == pytest.approx(other)


def test_one_process_has_nothing_to_compare() -> None:
    assert trained_apart("first batch", None)[0] == []


def exchanges_elsewhere(strategy: object) -> float:
    """One rank exchanges in backward(), the other in step(), or in flush(): as often together."""
    rank = dist.get_rank()
    model = small()
    with slipstream.accelerate(model, sgd(model), strategy=strategy) as session:
        for _ in range(4 - (rank if strategy else 0)):
            with session.no_sync() if rank and not strategy else nullcontext():
                session.backward(model(torch.full((2, 4), 1.0 + rank)).square().mean())
            session.step()
        if rank:
            session.flush()
    return float(sum(p.detach().sum() for p in model.parameters()))


@pytest.mark.parametrize("strategy", [None, {"gradients": {"accumulate": 2}}], ids=str)
def test_ranks_may_exchange_in_other_verbs(two: Ranks, strategy: object) -> None:
    """One of them compared parameters, and the other did not."""
    one, other = two.run(exchanges_elsewhere, strategy, timeout=60)
    assert one == pytest.approx(other)


class RoundsUp(torch.optim.SGD):
    """As a processor of another kind may, on all ranks but the first."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step(closure)
        for p in self.param_groups[0]["params"] if dist.get_rank() else ():
            p.data.copy_(torch.nextafter(p.data, torch.full_like(p, 9.0)))


def beside(habit: str) -> list[str]:
    """What is said beside optimizers of others, and of processors of several kinds."""
    rank = dist.get_rank()
    rounds = habit == "rounds"
    model, other = small(dtype=torch.bfloat16 if rounds else torch.float32), small()
    own = RoundsUp(model.parameters(), lr=0.1) if rounds else sgd(model)
    kept: list[weakref.ref[nn.Module]] = []
    optimizer: torch.optim.Optimizer | None = None
    if habit == "FSDP2":
        fully_shard(other)
        optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    elif habit == "ZeRO":
        other = DistributedDataParallel(other)
        optimizer = ZeroRedundancyOptimizer(other.parameters(), torch.optim.SGD, lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with slipstream.accelerate(model, own) as session:
            if habit == "forward_backward" and rank == 0:
                model[1].weight.data.add_(1)  # type: ignore[index,union-attr]
            for _ in range(3):
                x = torch.full((2, 4), 1.0 + rank, dtype=next(model.parameters()).dtype)
                session.forward_backward(lambda y, _: y.float().square().mean(), (x,))
                session.step()
                if habit == "inner loop":
                    of_task = nn.Linear(4, 1)
                    inner = torch.optim.SGD(of_task.parameters(), lr=0.1)
                    of_task(x).sum().backward()
                    inner.step()
                    kept.append(weakref.ref(of_task.weight))
                    del of_task, inner
                    gc.collect()
                    assert all(one() is None for one in kept)
                if optimizer is not None:
                    other(x).sum().backward()
                    optimizer.step()
    assert all(one.filename == __file__ for one in caught)
    return [str(one.message) for one in caught if "different values" in str(one.message)]


@pytest.mark.parametrize(
    ("habit", "said"),
    [
        ("forward_backward", 1),
        ("rounds", 0),
        ("inner loop", 0),
        ("FSDP2", 0),
        ("ZeRO", 0),
    ],
)
def test_optimizers_of_others_are_left_alone(two: Ranks, habit: str, said: int) -> None:
    first, others = two.run(beside, habit)
    assert len(first) == said, first
    assert not others


def test_the_remedy_for_a_temperature_works_as_it_is_written(two: Ranks) -> None:
    assert two.run(remedied) == [[], []]


def remedied() -> list[str]:
    model = small()
    model.temperature = nn.Parameter(torch.zeros(()))  # type: ignore[assignment]
    *others, temperature = sorted(model.parameters(), key=lambda p: -p.dim())
    own = torch.optim.SGD([temperature], lr=1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with slipstream.accelerate(model, torch.optim.SGD(others, lr=0.1)) as session:
            for _ in range(3):
                y = model(torch.full((2, 4), 1.0 + session.rank))
                session.backward((y * temperature.exp()).square().mean())
                own.step()
                session.step()
    return [str(one.message) for one in caught]
