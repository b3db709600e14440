"""The state machine of the loss scale: against a table, against torch's, and its bounds."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from slipstream.precision.loss_scale import LARGEST, LossScaler, ScaleState, next_state
from slipstream.strategy import DynamicScaleConfig, StaticScaleConfig

PARAMETERS = {
    "torch": {},
    "apex": {"max": 2.0**24},
    "paddle, static": {"init": 32768, "incr_every_n": 1000, "decr_every_n": 2, "decr_ratio": 0.8},
    "paddle, dynamic": {"init": 32768, "incr_every_n": 1000},
    "short": {"init": 8, "incr_every_n": 2},
    "patient": {"init": 8, "incr_every_n": 3, "decr_every_n": 3, "decr_ratio": 0.25},
    "hasty": {"init": 8, "incr_every_n": 1, "incr_ratio": 4.0},
    "bounded": {"init": 8, "incr_every_n": 1, "min": 4, "max": 16},
}


def walks(parameters: dict[str, Any]) -> Iterator[list[bool]]:
    """Whether each update overflowed: rarely, often, never, always."""
    length = 3 * parameters.get("incr_every_n", 2000) + 50
    for seed, shard in enumerate((0.001, 0.3, 0.0, 1.0)):
        dice = random.Random(seed)
        yield [dice.random() < shard for _ in range(length)]


def by_runs(config: DynamicScaleConfig, overflows: Sequence[bool]) -> list[float]:
    """The scale before each update, found another way: from the lengths of runs of equal ones."""
    scales, scale, run = [], config.init, 0
    for number, overflowed in enumerate(overflows):
        scales.append(scale)
        run = run + 1 if number and overflows[number - 1] == overflowed else 1
        every = config.decr_every_n if overflowed else config.incr_every_n
        if run % every == 0:
            scale *= config.decr_ratio if overflowed else config.incr_ratio
            scale = sorted((config.min, scale, config.max))[1]
    return scales


@pytest.mark.parametrize("name", PARAMETERS)
def test_every_set_of_parameters_walks_as_the_table_says(name: str) -> None:
    config = DynamicScaleConfig(**PARAMETERS[name])
    for overflows in walks(PARAMETERS[name]):
        scaler, scales = LossScaler(config), []
        for overflowed in overflows:
            scales.append(scaler.scale)
            scaler.update(overflowed)
        assert scales == by_runs(config, overflows)


PADDLE = DynamicScaleConfig(init=32768.0, incr_every_n=1000, decr_every_n=2, decr_ratio=0.8)
STEPS = [  # of update_loss_scaling in Paddle's own words
    ((32768.0, 5, 0), True, (32768.0, 0, 1)),
    ((32768.0, 0, 1), True, (26214.4, 0, 0)),
    ((32768.0, 0, 1), False, (32768.0, 1, 0)),
    ((26214.4, 999, 0), False, (52428.8, 0, 0)),
    ((1.0, 0, 1), True, (1.0, 0, 0)),
    ((2.0**24, 999, 0), False, (2.0**24, 0, 0)),
]


@pytest.mark.parametrize(("before", "overflowed", "after"), STEPS)
def test_one_step(before: Any, overflowed: bool, after: Any) -> None:
    assert next_state(ScaleState(*before), PADDLE, overflowed) == pytest.approx(after)


def torch_walk(parameters: dict[str, Any], overflows: Sequence[bool]) -> list[float]:
    """What ``torch.amp.GradScaler`` does with gradients that overflow."""
    scaler = torch.amp.GradScaler(
        "cpu",
        init_scale=parameters["init"],
        growth_factor=parameters["incr_ratio"],
        backoff_factor=parameters["decr_ratio"],
        growth_interval=parameters["incr_every_n"],
    )
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer, scales = torch.optim.SGD([weight], lr=0.0), []
    for overflowed in overflows:
        scaler.scale(weight * (torch.inf if overflowed else 1.0)).backward()
        scales.append(scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return scales


@pytest.mark.parametrize(
    ("init", "incr_every_n", "incr_ratio", "decr_ratio"),
    [(65536.0, 20, 2.0, 0.5), (32768.0, 10, 2.0, 0.8), (1.0, 1, 3.0, 0.1)],
)
def test_it_is_torchs_grad_scaler_within_bounds_that_it_does_not_reach(
    init: float, incr_every_n: int, incr_ratio: float, decr_ratio: float
) -> None:
    own = {"incr_every_n": incr_every_n, "incr_ratio": incr_ratio, "decr_ratio": decr_ratio}
    for seed in range(3):
        dice = random.Random(seed)
        overflows = [dice.random() < 0.1 * seed for _ in range(60)]
        scaler, scales = LossScaler(DynamicScaleConfig(init=init, min=1e-30, max=3e38, **own)), []
        for overflowed in overflows:
            scales.append(scaler.scale)
            scaler.update(overflowed)
        assert scales == pytest.approx(torch_walk({"init": init, **own}, overflows), rel=1e-5)


def test_a_scale_that_would_be_infinite_stays() -> None:
    config = DynamicScaleConfig(init=2.0**127, incr_every_n=1, max=1e300)
    assert next_state(ScaleState(2.0**127), config, False) == ScaleState(2.0**127)
    assert torch.tensor(LARGEST).isfinite()
    assert torch.tensor(LARGEST * (1 + 1e-7)).isinf()


def test_a_static_scale_stays() -> None:
    scaler = LossScaler(StaticScaleConfig(scale=100.0))
    for overflowed in (True, False, True):
        scaler.update(overflowed)
    assert scaler.scale == 100.0


@pytest.mark.parametrize(
    ("config", "restored"),
    [
        (StaticScaleConfig(scale=8.0), ScaleState(8.0)),
        (DynamicScaleConfig(init=8.0, max=16.0), ScaleState(16.0, 3, 0)),
        (DynamicScaleConfig(init=512.0, min=256.0), ScaleState(256.0, 3, 0)),
        (DynamicScaleConfig(init=8.0), ScaleState(64.0, 3, 0)),
    ],
)
def test_a_restored_scale_keeps_to_the_limits_of_this_run(
    config: DynamicScaleConfig | StaticScaleConfig, restored: ScaleState
) -> None:
    scaler = LossScaler(config)
    scaler.restore(ScaleState(64.0, 3, 0))
    assert scaler.state == restored
