"""What is open, how many updates a search takes, and which choice it keeps."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from slipstream.planner.forecast import Forecast
from slipstream.planner.iteration.model import predict
from slipstream.planner.iteration.plan import CommPlan
from slipstream.strategy import (
    ByBytesConfig,
    ByIndexConfig,
    DirectConfig,
    FlatConfig,
    HierarchicalConfig,
    OptimalConfig,
    ShardedConfig,
    SharedMemoryConfig,
    SingleConfig,
    Strategy,
    TransportConfig,
)
from slipstream.trace import Trace
from slipstream.transport.place import Place
from slipstream.tuner.predicted_choices import PLAIN, THIRD, predict_choices, promising
from slipstream.tuner.search_space import Choice, SearchSpace, fastest
from slipstream.tuner.turns import MOST, SETTLING, TURNS
from tests.planner.networks import linear_profile
from tests.planner.test_sharded import with_direct
from tests.planner.workloads import workload

CPU, GPU = torch.device("cpu"), torch.device("cuda")
APART = Place(CPU, ((0,), (1,), (2,)))
TOGETHER = Place(CPU, ((0, 1, 2),))
UNEVEN = Place(CPU, ((0, 1), (2,)))
AUTO, OPTIMAL = {"transport": "auto"}, {"split": "optimal"}
TENSOR = {"tensor": {"ranks": 2, "plan": {"0": "column"}}}
DIRECT, SHARED = (FlatConfig(), DirectConfig()), (FlatConfig(), SharedMemoryConfig())
BOTH = (True, False)
SPACES: dict[str, tuple[dict[str, Any], Place, tuple[TransportConfig, ...], tuple[bool, ...]]] = {
    "nothing": ({}, APART, (FlatConfig(),), (True,)),
    "a named transport": ({"transport": "direct"}, APART, (DirectConfig(),), (True,)),
    "the transport": (AUTO, APART, DIRECT, (True,)),
    "the transport on one host": (AUTO, TOGETHER, SHARED, BOTH),
    "the transport on hosts with several ranks": (
        AUTO,
        UNEVEN,
        (*DIRECT, HierarchicalConfig()),
        (True,),
    ),
    "the transport on GPUs": (AUTO, Place(GPU, ((0, 1),)), (FlatConfig(),), (True,)),
    "with 16 bits": ({**AUTO, "codec": "half"}, UNEVEN, (*DIRECT, HierarchicalConfig()), (True,)),
    "with a codec that does more than sum": ({**AUTO, "codec": "int8"}, UNEVEN, DIRECT, (True,)),
    "the transport of a shared model": (
        {**AUTO, "parallel": TENSOR},
        APART,
        (FlatConfig(),),
        (True,),
    ),
    "the split": (OPTIMAL, APART, (FlatConfig(),), (True,)),
    "the split after backward": ({**OPTIMAL, "overlap": False}, APART, (FlatConfig(),), (False,)),
    "both": (OPTIMAL | AUTO, APART, DIRECT, BOTH),
    "both after backward": ({**OPTIMAL, **AUTO, "overlap": False}, APART, DIRECT, (False,)),
}


def test_sharded_is_tried_between_hosts_beside_backward() -> None:
    def kinds(config: dict[str, object], place: Place, reason: str | None) -> list[str]:
        space = SearchSpace.of(Strategy.load({"gradients": config}), place, reason)
        return [transport.kind for transport in space.transports]

    assert kinds(AUTO, APART, None) == ["flat", "direct", "sharded", "sharded"]  # two parts
    assert kinds(OPTIMAL | AUTO, APART, None) == ["flat", "direct", "sharded"]  # predicted
    assert kinds(AUTO, APART, "a reason") == ["flat", "direct"]
    assert kinds({**AUTO, "overlap": False}, APART, None) == ["flat", "direct"]
    assert kinds(AUTO, TOGETHER, None) == ["flat", "shared_memory"]
    (row,) = SearchSpace.of(Strategy.load({"gradients": AUTO}), APART, "a reason").report_rows()
    assert (row.value, row.note) == ("not sharded", "a reason")


@pytest.mark.parametrize(("config", "place", "transports", "overlap"), SPACES.values(), ids=SPACES)
def test_what_is_open(config, place, transports, overlap) -> None:
    parallel = {key: config[key] for key in ("parallel",) if key in config}
    gradients = {key: value for key, value in config.items() if key != "parallel"}
    strategy = Strategy.load({"gradients": gradients, **parallel})
    space = SearchSpace.of(strategy, place, "a reason")
    assert space.transports == transports
    assert space.overlap == overlap
    assert space.is_open == (len(transports) > 1 or "split" in config)
    rows = [(row.setting, row.value) for row in space.report_rows() if row.note != "a reason"]
    given_up = not space.is_open and "transport: auto" in str(config).replace("'", "")
    assert rows == ([("auto", "flat")] if given_up else [])


def test_on_one_host_the_last_transport_is_tried_after_backward_too() -> None:
    split = ByBytesConfig()
    space = SearchSpace.of(Strategy.load({"gradients": AUTO}), TOGETHER, None)
    choices = space.unpredicted(split)
    assert choices == (
        Choice(FlatConfig(), split),
        Choice(SharedMemoryConfig(), split),
        Choice(SharedMemoryConfig(), split, overlap=False),
    )
    assert space.first_window == space.window(len(choices), 0) == 60 // 6 - SETTLING


@given(st.integers(24, 300), st.integers(2, MOST), st.booleans(), st.integers(1, 50))
def test_a_search_ends_within_its_updates(updates, choices, with_split, steps) -> None:
    transports = tuple(FlatConfig() for _ in range(choices))
    space = SearchSpace(transports, OptimalConfig(steps=steps) if with_split else None, updates)
    done, window = 0, space.first_window
    for number in range(1, TURNS * choices + 1):
        assert window >= 1
        done += SETTLING + window
        window = space.window(choices, number, done)
    assert done <= updates
    if not with_split:  # and uses them
        assert done > updates - TURNS * choices


def test_a_split_alone_takes_the_steps_it_asks_for() -> None:
    space = SearchSpace((FlatConfig(),), OptimalConfig(steps=7))
    assert [space.first_window, space.window(4, 1, 9), space.window(2, 3, 99)] == [7, 7, 7]


TIMES = {
    "the default is fastest": ([[[1.0], [1.0]], [[2.0], [2.0]]], 0),
    "another is faster": ([[[2.0], [2.0]], [[1.0], [1.0]]], 1),
    "the fastest of two": ([[[2.0], [2.0]], [[1.5], [1.5]], [[1.0], [1.2]]], 2),
    "faster in one turn alone": ([[[2.0], [1.0]], [[0.5], [1.1]]], 0),
    "equal": ([[[1.0], [1.0]], [[1.0], [1.0]]], 0),
    "the machine slows down": ([[[1.0], [3.0]], [[0.9], [2.9]]], 1),
    "one iteration hung": ([[[1.0] * 3, [1.0] * 3], [[0.9, 9.0, 0.9], [0.9] * 3]], 1),
}


@pytest.mark.parametrize(("seconds", "kept"), TIMES.values(), ids=TIMES)
def test_the_default_stays_unless_another_is_faster_in_every_turn(seconds, kept) -> None:
    assert fastest(seconds) == kept


def test_the_best_of_each_transport_is_measured() -> None:
    flat = [Choice(FlatConfig(), ByBytesConfig(megabytes=size)) for size in (8, 1, 2, 4, 16)]
    direct = [Choice(DirectConfig(), ByBytesConfig(megabytes=size)) for size in (8, 1)]
    predicted = [
        *zip(flat, (9.0, 1.0, 2.0, 3.0, 4.0), strict=True),
        (direct[0], 8.0),
        (direct[1], 7.0),
    ]
    assert promising(predicted) == (flat[0], flat[1], flat[2], direct[1])
    assert promising(predicted[:1]) == (flat[0],)


def test_a_plain_third_is_measured_beside_the_computed_parts() -> None:
    flat = [Choice(FlatConfig(), ByBytesConfig(megabytes=size)) for size in (8, 1)]
    cuts = ByIndexConfig.of_cuts((1, 2))
    whole, part = (Choice(ShardedConfig(replicated=r), cuts) for r in (0.0, 0.25))
    plain = Choice(ShardedConfig(replicated=THIRD), PLAIN)
    predicted = [(flat[0], 9.0), (flat[1], 8.0), (whole, 5.0), (part, 4.0), (plain, 6.0)]
    assert promising(predicted) == (flat[0], part, whole, plain)


def test_a_plain_third_is_predicted_with_sharded() -> None:
    network = with_direct(linear_profile())
    forecast = Forecast(Trace(()), Strategy(), workload(), network, network, network)
    predicted = dict(predict_choices(forecast, (FlatConfig(), ShardedConfig()), (True,)))
    plain = Choice(ShardedConfig(replicated=THIRD), PLAIN)
    assert predicted[plain] == forecast.seconds(Strategy().with_gradients(**plain._asdict()))


def test_a_plain_third_keeps_what_the_strategy_says_of_sharded() -> None:
    network, own = with_direct(linear_profile()), ShardedConfig(elementwise=True)
    base = Strategy().with_gradients(transport=own)
    forecast = Forecast(Trace(()), base, workload(), network, network, network)
    ways = [choice.transport for choice, _ in predict_choices(forecast, (own,), (True,))]
    assert all(isinstance(one, ShardedConfig) and one.elementwise for one in ways)


def test_what_is_computed_is_predicted_for_every_transport_and_without_overlap() -> None:
    work, network = workload(), with_direct(linear_profile())
    base, transports = Strategy(), (FlatConfig(), DirectConfig(), HierarchicalConfig())
    unpriced = network.model_copy(update={"hosts": 2, "ranks_per_host": 2})
    forecast = Forecast(Trace(()), base, work, unpriced, unpriced, unpriced)
    predicted = predict_choices(forecast, transports, (True, False))
    assert predicted[0][0] == Choice(FlatConfig(), ByBytesConfig())
    assert predicted[-1] == (Choice(HierarchicalConfig(), ByBytesConfig()), inf)
    seconds = dict(predicted)
    assert Choice(DirectConfig(), SingleConfig(), overlap=False) in seconds
    for choice, predicted_seconds in predicted[:-1]:
        strategy = base.with_gradients(**choice._asdict())
        assert predicted_seconds == predict(work, CommPlan.of(strategy, work.gradients), network)
    best = min(predicted, key=lambda pair: pair[1])[0]
    chosen = promising(predicted)
    assert best in chosen
    assert len(chosen) == MOST
    assert {choice.transport for choice in chosen} == set(transports)
