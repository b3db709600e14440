"""``codec: adaptive``: what pays is coded, the rest travels as it is, and the report says so."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from slipstream.calibration.adaptive_codec import (
    CALIBRATION_SECONDS,
    SIZES,
    CodecDecision,
    measure,
)
from slipstream.calibration.calibrate import calibrate
from slipstream.calibration.codec_cost import codec_cost
from slipstream.cluster.connect import connect, from_environ
from slipstream.planner.network.costs import CodecCost
from slipstream.planner.network.curve import Curve, Piece
from slipstream.session import exchanging
from slipstream.strategy import AdaptiveConfig, HalfConfig, Int8Config
from tests.gradients.test_codec import session_of, step_of, wide
from tests.harness import reference
from tests.harness.counters import collectives

LATENCY, PER_BYTE = 1e-4, 1e-6
NETWORK = Curve(  # beyond its points it is the line
    points=((1, LATENCY + PER_BYTE), (2, LATENCY + 2 * PER_BYTE)),
    pieces=(Piece(start_bytes=0, startup=LATENCY, per_byte=PER_BYTE),),
    error_by_decade={},
    trusted=True,
)
QUARTER = CodecCost(ratio=0.25, encode=1e-9, decode=1e-9, startup=1e-5)


@pytest.mark.parametrize("num_bytes", [1024, 8192, 10**6])
def test_saved_is_wire_before_less_wire_after_less_coding(num_bytes) -> None:
    before = LATENCY + PER_BYTE * num_bytes
    after = 2 * (LATENCY + PER_BYTE * num_bytes * 0.25 / 2)
    coding = 2e-9 * num_bytes + 2e-5
    decision = CodecDecision(NETWORK, QUARTER, rounds=2)
    assert decision.saved(num_bytes) == pytest.approx(before - after - coding, rel=1e-6)
    assert decision.pays(num_bytes) is (before > after + coding)


def test_what_waits_longer_than_it_saves_does_not_pay() -> None:
    decision = CodecDecision(NETWORK, QUARTER, rounds=2)
    assert not decision.pays(0)
    assert not decision.pays(128)  # a second exchange waits as long as 100 bytes travel
    assert decision.pays(1024)
    slow = QUARTER.model_copy(update={"encode": PER_BYTE})
    assert not any(CodecDecision(NETWORK, slow, rounds=2).pays(10**n) for n in range(9))


def decision_of(cost: CodecCost, *_: object) -> CodecDecision:
    return CodecDecision(NETWORK, cost, rounds=2)


def train(cost: CodecCost, codec: object) -> tuple[list[list[str]], str, str]:
    """What each step issues, the report, and a digest of the parameters."""
    model, logs = wide(), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchanging, "measure", partial(decision_of, cost))
        with session_of(model, codec, split="per_gradient") as session:
            for step in range(4):
                with collectives() as log:
                    step_of(session, step)
                logs.append([c.kind for c in log if c.kind != "broadcast"])
            report = session.report()
    return logs, report, reference.digest(model)


ADAPTIVE = {"kind": "adaptive", "codec": "int8"}


def test_only_segments_that_pay_are_coded(two) -> None:
    (logs, report, digest), other = two.run(train, QUARTER, ADAPTIVE)
    assert digest == other[2]
    kinds = sorted(logs[-1])  # a vector of 32 values and two matrices of 2048
    assert kinds == ["all_gather_single"] * 2 + ["all_reduce"] + ["isend"] * 2
    assert "2 of 3 segments" in report
    assert "saves 0.0" in report


def test_where_nothing_pays_it_is_dense_training_bit_for_bit(two) -> None:
    slow = QUARTER.model_copy(update={"encode": PER_BYTE})
    plain = two.run(train, slow, None)
    for (logs, report, digest), (_, _, dense) in zip(
        two.run(train, slow, ADAPTIVE), plain, strict=True
    ):
        assert logs[-1] == ["all_reduce"] * 3
        assert "0 of 3 segments" in report
        assert "coding costs more than it" in report
        assert digest == dense


def measured(codec: str) -> str:
    model = wide()
    with session_of(model, {"kind": "adaptive", "codec": codec}) as session:
        for step in range(3):
            step_of(session, step)
        assert all(p.isfinite().all() for p in model.parameters())
        return str(session.report())


@pytest.mark.parametrize("codec", ["half", "onebit"])
def test_network_and_codec_are_measured_on_the_live_ranks(two, codec) -> None:
    reports = two.run(measured, codec)
    assert all("of 1 segments" in report for report in reports)


def test_a_codec_codes_fp32_under_any_default_dtype() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        cost = codec_cost(Int8Config(), 2, torch.device("cpu"), window=1e-4)
    finally:
        torch.set_default_dtype(torch.float32)
    assert cost.ratio == pytest.approx(0.25, rel=0.1)


def what_is_measured() -> tuple[CodecDecision, set[str], int, int]:
    """The decision, the kinds of collectives, and how many: of it and of a whole calibration."""
    ranks = connect(from_environ(), "cpu")
    config = AdaptiveConfig(codec=Int8Config())
    with collectives() as log:
        decision = measure(config, ranks)
    with collectives() as whole:
        calibrate(ranks, sizes=SIZES, seconds=CALIBRATION_SECONDS, rounds=3, codecs=[config.codec])
    return decision, {collective.kind for collective in log}, len(log), len(whole)


def test_nothing_but_the_all_reduce_and_the_codec_is_measured(two) -> None:
    (decision, kinds, few, whole), (other, *_) = two.run(what_is_measured)
    assert decision == other
    assert kinds == {"all_reduce", "barrier"}  # the barrier before the codec
    assert few < whole
    assert {num_bytes for num_bytes, _ in decision.all_reduce.points} <= set(SIZES)


@pytest.mark.parametrize("codec", [Int8Config(), HalfConfig()], ids=lambda one: one.kind)
def test_a_window_that_is_over_at_once_still_measures(codec: Any) -> None:
    """On a busy host a process may not run for as long."""
    cost = codec_cost(codec, 2, torch.device("cpu"), window=0.0)
    assert cost.decode > 0
