"""Time to a loss on made curves whose answers are known, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from math import log
from pathlib import Path

import numpy as np
import pytest

from slipstream.errors import StrategyError, TraceError
from slipstream.planner.progress.calibration import (
    LossCalibration,
    LossRun,
    losses_of,
    noise_of_gradients,
)
from slipstream.planner.progress.curve import BEND, DRAWS, LossCurve
from slipstream.planner.progress.delay import Delay, LargerBatch
from slipstream.planner.progress.time_to_loss import (
    LossForecast,
    Quantiles,
    Timed,
    TimeToLoss,
    verdict,
)
from slipstream.strategy import Strategy
from slipstream.trace import Event, Trace

LENGTH = 200
INT8 = {"gradients": {"codec": "int8"}}
LOCAL = {"local": {"steps": 16}}
DIRECT = {"gradients": {"transport": "direct"}}
TWICE = {"gradients": {"accumulate": 2}}


def loss_at(updates, floor=1.5, scale=4.0, exponent=0.4):
    return floor + scale * np.asarray(updates, dtype=float) ** -exponent


def batches(deviation: float, count: int = LENGTH, seed: int = 0):
    """How much harder each batch is than the mean."""
    return deviation * np.random.default_rng(seed).standard_normal(count)


def calibration(lossy=None, noise=None, deviation=0.05) -> LossCalibration:
    """Of data parallelism, and another run by its settings: updates of data parallelism that its
    own are worth."""
    own, hard = np.arange(1, LENGTH + 1), batches(deviation)
    runs = [LossRun(strategy={}, seconds=1.0, error=0.01, losses=tuple(loss_at(own) + hard))]
    for settings, worth in lossy or ():
        apart = batches(deviation / 20, seed=1)
        losses = loss_at(np.maximum(worth(own), 1.0)) + hard + apart
        runs.append(LossRun(strategy=settings, seconds=0.5, error=0.01, losses=tuple(losses)))
    return LossCalibration(runs=tuple(runs), noise=noise)


def test_intervals_hold_on_curves_that_bend_as_ours_do() -> None:
    random, held, tried = np.random.default_rng(7), 0, 60
    for number in range(tried):
        truth = {
            "floor": random.uniform(0.0, 2.0),
            "scale": random.uniform(2.0, 6.0),
            "exponent": random.uniform(0.15, 0.6),
        }
        noise = batches(random.uniform(0.01, 0.15), seed=100 + number)
        curve = LossCurve.fit(loss_at(np.arange(1, LENGTH + 1), **truth) + noise)
        times = random.uniform(2, 5)
        bent = LENGTH * times ** float(np.exp(BEND * random.standard_normal()))
        found = Quantiles.of(curve.updates_to(float(loss_at(LENGTH * times, **truth))))
        held += found.low <= bent <= found.high
    assert 0.7 <= held / tried <= 0.95


@pytest.mark.parametrize(
    ("worth", "expected"),
    [
        (lambda own: own, 1.0),
        (lambda own: own - 60.0, 860 / 800),
        (lambda own: own / 3.0, 3.0),
    ],
    ids=["as good", "paid once", "keeps losing"],
)
def test_what_a_method_loses_is_told_from_paired_runs(worth, expected: float) -> None:
    forecast = LossForecast(calibration([(LOCAL, worth)]))
    [one] = [Timed(Strategy.load(LOCAL), 1.0)]
    found = forecast.to_loss(float(loss_at(800)), [Timed(Strategy(), 1.0), one])
    of_local = next(row for row in found if row.strategy.local is not None)
    assert of_local.source == "measured"
    assert of_local.ratio.middle == pytest.approx(expected, rel=0.15)
    assert of_local.ratio.low <= expected * 1.02
    assert of_local.ratio.high >= expected * 0.98


def test_larger_batches_pair_with_as_many_batches() -> None:
    own, hard = np.arange(1, LENGTH + 1), batches(0.2)
    dense = loss_at(own) + hard
    curve = LossCurve.fit(dense)
    perfect = loss_at(2.0 * np.arange(1, LENGTH // 2 + 1)) + hard.reshape(-1, 2).mean(1)
    delay = Delay.fit(curve, dense, perfect, batches=2)
    assert np.median(delay.updates_for(np.full(4000, 1000.0))) == pytest.approx(500, rel=0.1)


def test_a_larger_batch_brings_more_as_gradients_grow_noisier() -> None:
    """Against the law itself: updates follow each other by what an update is worth then."""
    floor, batches, noise = 1.0, 4, 1.0
    curve = LossCurve.fit(loss_at(np.arange(1, LENGTH + 1), floor=floor))
    first = (1 + noise / batches) / (1 + noise)
    larger = LargerBatch.of(Delay.between(first, first), curve, batches)
    updates, done, end = first * LENGTH, float(LENGTH), 20 * LENGTH
    likeliest = curve.likeliest
    while done < end:
        fallen = likeliest.losses(LENGTH) / likeliest.losses(done)
        grown = noise * float(fallen[0]) ** (1 / 0.21)
        step = (1 + grown) / (1 + grown / batches)
        updates, done = updates + 1, done + step
    found = larger.updates_for(np.full(DRAWS, float(end)))
    low, _, high = np.quantile(found, [0.1, 0.5, 0.9])
    assert low < updates < high
    known = replace(larger, curve=likeliest, powers=np.full(DRAWS, 1 / 0.21))
    assert known.updates_for(np.full(DRAWS, float(end))) == pytest.approx(updates, rel=0.02)
    assert first * end * (1 + 1e-6) > found.max() > found.min() > end / batches
    # within the calibration it is as measured, and at the floor as far out as it gets
    assert np.allclose(larger.updates_for(np.full(DRAWS, 100.0)), first * 100)
    assert (larger.far_ratios <= found / end + 1e-6).all()
    assert (larger.far_ratios >= 1 / batches).all()
    assert np.isinf(larger.updates_for(np.full(DRAWS, np.inf))).all()
    assert np.allclose(larger.dense_for(found), end, rtol=1e-3)


def test_a_larger_batch_that_brings_nothing_or_all_stays_so() -> None:
    curve = LossCurve.fit(loss_at(np.arange(1, LENGTH + 1)))
    for ratio in (0.25, 1.0, 1.1):
        larger = LargerBatch.of(Delay.between(ratio, ratio), curve, 4)
        assert np.allclose(larger.updates_for(np.full(DRAWS, 5000.0)), 5000 * ratio)


def test_exact_strategies_share_the_curve_and_unknown_ones_are_left_out() -> None:
    forecast = LossForecast(calibration(noise=3.0))
    settings = {}, DIRECT, INT8, TWICE
    timed = [Timed(Strategy.load(of), 1.0, 0.0) for of in settings]
    found = {str(one.strategy): one for one in forecast.to_loss(1.8, timed)}
    base, direct, int8, twice = (found.get(str(Strategy.load(of))) for of in settings)
    assert base is not None
    assert direct is not None
    assert twice is not None
    assert int8 is None
    assert direct.updates == base.updates
    assert direct.source == "exact"
    # McCandlish et al.: (1 + 3 / 2) / (1 + 3), where noise alone decides; no gain at all at worst
    assert twice.source == "noise scale"
    assert 0.625 <= twice.ratio.low < twice.ratio.high <= 1.0
    assert LossForecast(calibration()).source(Strategy.load(TWICE)) is None


def test_the_noise_scale_comes_from_two_batch_sizes() -> None:
    # gradients of true squared norm 4 with a variance of 12 a rank, on 4 ranks
    norms = {"own_norm2": 4.0 + 12.0, "average_norm2": 4.0 + 12.0 / 4}
    trace = Trace(
        tuple(Event("iteration", r, s, 0.0, 1.0, norms) for r in range(4) for s in (0, 1))
    )
    noise, cosine = noise_of_gradients(trace) or (0.0, 0.0)
    assert noise == pytest.approx((12 / 4) / 4)
    assert cosine == pytest.approx(4 / 16)
    assert noise_of_gradients(Trace((Event("iteration", 0, 0, 0.0, 1.0, norms),))) is None


def test_losses_of_a_trace_need_one_in_each_update() -> None:
    events = [Event("iteration", 0, 0, 0.0, 1.0, {"loss": 2.0}), Event("iteration", 0, 1, 1.0, 2.0)]
    with pytest.raises(TraceError, match=r"update 1 of the trace has no loss.*backward\(loss\)"):
        losses_of(Trace(tuple(events)))


@pytest.mark.parametrize(
    ("seconds", "chosen"), [(0.5, True), (0.99, False), (1.5, False)], ids=["half", "equal", "slow"]
)
def test_what_is_not_surely_sooner_is_not_chosen(seconds: float, chosen: bool) -> None:
    forecast = LossForecast(calibration([(INT8, lambda own: own - 5.0)]))
    base, int8 = Strategy(), Strategy.load(INT8)
    found = forecast.to_loss(float(loss_at(800)), [Timed(base, 1.0), Timed(int8, seconds)])
    strategy, words = verdict(found, base)
    assert strategy == (int8 if chosen else base)
    assert words.startswith("stay with the baseline") is not chosen


@pytest.mark.parametrize("course", ["still", "rising", "far"])
def test_a_run_that_never_learns_is_not_chosen(course: str) -> None:
    """However fast it is: a lag as long as the run would explain it, too."""
    start = 1 + 4 * 31**-0.5
    lossy = {"still": [start] * 150, "rising": np.linspace(start, 3.0, 150), "far": [1e4] * 150}
    updates = np.arange(1, 151)
    runs = [
        LossRun(strategy=of, seconds=seconds, error=0.01, losses=tuple(losses))
        for of, seconds, losses in (
            ({}, 1.0, 1 + 4 * (updates + 30.0) ** -0.5),
            (INT8, 0.4, lossy[course]),
        )
    ]
    forecast = LossForecast(LossCalibration(runs=runs))
    found = forecast.to_loss(1.2, forecast.timed())
    assert verdict(found)[0] == Strategy()
    hopeless = next(one for one in found if one.strategy == Strategy.load(INT8))
    assert hopeless.updates.low > 3 * found[0].updates.middle


def test_a_sure_second_is_chosen_where_the_first_is_not_sure() -> None:
    forecast = LossForecast(calibration([(INT8, lambda own: own)], noise=20.0))
    four = Strategy().with_gradients(accumulate=4)
    timed = [Timed(Strategy(), 1.0), Timed(Strategy.load(INT8), 0.7, 0.01), Timed(four, 1.3)]
    found = forecast.to_loss(1.9, timed)
    assert found[0].strategy == four
    assert not found[0].is_clear
    assert verdict(found)[0] == Strategy.load(INT8)


def test_losses_below_0_are_refused() -> None:
    losses = tuple(-10 - 2 * np.log(np.arange(1, 151)))
    run = LossRun(strategy={}, seconds=1.0, error=0.0, losses=losses)
    with pytest.raises(TraceError, match=r"falls to -1.*a constant added"):
        LossForecast(LossCalibration(runs=(run,))).to_loss(-22.0, [Timed(Strategy(), 1.0)])


def test_norms_of_one_kind_alone_are_left_out() -> None:
    """A rank whose own gradient was NaN has that of the average, or none."""
    norms = {"own_norm2": 16.0, "average_norm2": 7.0}
    spans = [Event("iteration", r, s, 0.0, 1.0, norms) for r in range(4) for s in (0, 1)]
    odd = Event("iteration", 0, 2, 0.0, 1.0, {"own_norm2": 16.0})
    assert noise_of_gradients(Trace((*spans, odd))) == noise_of_gradients(Trace(tuple(spans)))


def test_a_calibration_knows_whose_it_is() -> None:
    own = calibration().model_copy(update={"ranks": 4, "model": "Net"})
    same = Trace((), {"world_size": 4, "model": "Net"})
    assert own.problem(same) is None
    assert calibration().problem(same) is None
    assert own.problem(Trace((), {"world_size": 8, "model": "Net"})) == (
        "ranks: 4 in the file of losses, 8 in the trace"
    )
    assert "model: Net" in str(own.problem(Trace((), {"world_size": 4, "model": "Other"})))


def test_the_loss_after_a_time_falls_with_the_time() -> None:
    forecast = LossForecast(calibration([(INT8, lambda own: own)]))
    timed = [Timed(Strategy(), 1.0), Timed(Strategy.load(INT8), 0.4)]
    soon, late = (forecast.after(seconds, timed) for seconds in (300.0, 900.0))
    before = {str(one.strategy): one.loss.middle for one in soon}
    assert all(one.loss.middle < before[str(one.strategy)] for one in late)
    assert late[0].strategy == Strategy.load(INT8)
    assert late[0].gap.high < 0 < late[0].better
    assert verdict(late)[0] == late[0].strategy


def test_who_asks_for_a_time_is_told_of_the_loss_then() -> None:
    forecast = LossForecast(calibration())
    strategy, words = verdict(forecast.after(300.0, [Timed(Strategy(), 1.0)]))
    assert strategy == Strategy()
    assert words.endswith("nothing else is predicted to have a lower loss then")


def test_losses_that_are_reached_or_never_are_refused() -> None:
    forecast = LossForecast(calibration())
    timed = [Timed(Strategy(), 1.0)]
    with pytest.raises(StrategyError, match=r"--to-loss 3: the calibration.*in its 200 updates"):
        forecast.to_loss(3.0, timed)
    with pytest.raises(StrategyError, match=r"--to-loss -5: .*level off at"):
        forecast.to_loss(-5.0, timed)
    rising = LossRun(strategy={}, seconds=1.0, error=0.0, losses=tuple(np.linspace(1, 2, 60)))
    with pytest.raises(TraceError, match="does not fall in 60 updates; run it for longer"):
        LossForecast(LossCalibration(runs=(rising,))).to_loss(0.5, timed)


def test_a_calibration_comes_back_from_its_file(tmp_path: Path) -> None:
    saved = calibration([(LOCAL, lambda own: own)], noise=2.0)
    saved.save(tmp_path / "losses.json")
    assert LossCalibration.load(tmp_path / "losses.json") == saved


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "No such file"),
        ("", "it is empty"),
        ("{", "not valid JSON"),
        ('{"runs": []}', "runs"),
        ('{"runs": [{"strategy": {"x": 1}, "seconds": 1, "error": 0, "losses": [1]}]}', "setting"),
        ('{"runs": [{"strategy": {}, "seconds": 1, "error": 0, "losses": [1]}]}', "at least 40"),
    ],
)
def test_a_wrong_file_says_which_command_writes_a_right_one(
    tmp_path: Path, text: str | None, words: str
) -> None:
    path = tmp_path / "losses.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(TraceError, match=rf"(?s){words}.*slipstream tune --allow-lossy --to-loss"):
        LossCalibration.load(path)


def test_times_are_updates_times_seconds() -> None:
    forecast = LossForecast(calibration())
    [one] = forecast.to_loss(1.8, [Timed(Strategy(), 2.5, 0.0)])
    assert isinstance(one, TimeToLoss)
    assert one.time == pytest.approx(tuple(2.5 * value for value in one.updates))
    assert log(one.time.high / one.time.low) > 0


def test_a_floor_that_a_run_has_reached_is_seen() -> None:
    own = np.arange(1, 121)
    losses = 0.06 + np.exp(-own / 12) + batches(0.005, 120)
    curve = LossCurve.fit(losses)
    assert np.quantile(curve.losses(400), 0.1) > 0.035
    run = LossRun(strategy={}, seconds=1.0, error=0.0, losses=tuple(losses))
    with pytest.raises(StrategyError, match=r"level off at 0\.0"):
        LossForecast(LossCalibration(runs=(run,))).to_loss(0.025, [Timed(Strategy(), 1.0)])
