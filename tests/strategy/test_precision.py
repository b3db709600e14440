"""Precision as a wish: what it means by default, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from slipstream.errors import StrategyError
from slipstream.strategy import DynamicScaleConfig, StaticScaleConfig, Strategy

REFUSED = {
    "another type": ({"dtype": "fp32"}, ["precision.dtype", "'fp32'", "bf16 or fp16"]),
    "a slip": ({"flot_ops": []}, ["no such setting", "'float_ops'"]),
    "both lists": (
        {"float_ops": ["gelu"], "half_ops": ["gelu"]},
        ["'gelu' is in float_ops and in half_ops"],
    ),
    "init below min": (
        {"loss_scale": {"kind": "dynamic", "init": 0.5}},
        ["init 0.5 is outside min 1", "min <= init <= max"],
    ),
    "falls upwards": (
        {"loss_scale": {"kind": "dynamic", "decr_ratio": 2.0}},
        ["decr_ratio", "> 0 and < 1"],
    ),
    "grows downwards": (
        {"loss_scale": {"kind": "dynamic", "incr_ratio": 1.0}},
        ["incr_ratio", "> 1"],
    ),
    "static of nothing": ({"loss_scale": {"kind": "static"}}, ["scale: missing", "e.g. scale"]),
    "static that overflows": (
        {"loss_scale": {"kind": "static", "scale": 1e300}},
        ["scale: got 1e+300", "> 0 and <= 16777216"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_makes_no_sense_is_refused(name: str) -> None:
    settings, words = REFUSED[name]
    with pytest.raises(StrategyError) as caught:
        Strategy.load({"precision": {"kind": "autocast", **settings}})
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize("name", ["O1", "bf16", "autcast"])
@pytest.mark.parametrize("wrap", [lambda name: name, lambda name: {"kind": name}])
def test_names_of_other_projects_are_told_ours(name: str, wrap: Callable[[str], object]) -> None:
    with pytest.raises(StrategyError) as caught:
        Strategy.load({"precision": wrap(name)})
    assert f"'{name}'" in str(caught.value)
    assert "allowed: autocast (O1) or half_weights (O2), with dtype bf16" in str(caught.value)
    assert ("did you mean 'autocast'" in str(caught.value)) == (name == "autcast")


@pytest.mark.parametrize("kind", ["autocast", "half_weights"])
def test_fp16_has_a_dynamic_scale_unless_it_is_told_otherwise(kind: str) -> None:
    def scale(**settings: object) -> object:
        config = Strategy.load({"precision": {"kind": kind, **settings}}).precision
        assert config is not None
        return config.scale

    assert scale() is None
    assert scale(dtype="fp16") == DynamicScaleConfig()
    assert scale(dtype="fp16", loss_scale=None) is None
    assert scale(loss_scale="dynamic") == DynamicScaleConfig()
    assert scale(loss_scale={"kind": "static", "scale": 8}) == StaticScaleConfig(scale=8.0)


@pytest.mark.parametrize("config", [{"precision": "autocast"}, {"compute": {"tf32": True}}])
def test_it_is_lossy(config: dict[str, object]) -> None:
    assert Strategy.load(config).exactness == "lossy"
