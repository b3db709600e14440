"""A wrong strategy is refused with its place, what was seen, what is allowed, and what to write."""

from __future__ import annotations

import pytest

from slipstream.errors import StrategyError
from slipstream.strategy import (
    ByIndexConfig,
    ByPercentConfig,
    FlatConfig,
    GradientsConfig,
    HalfConfig,
    Setting,
    Strategy,
)
from tests.strategy.test_spec import SETTINGS


def _codec(codec: object) -> dict[str, object]:
    return {"gradients": {"codec": codec}}


def _rule(codec: object) -> dict[str, object]:
    return {"kind": "by_name", "rules": [{"match": "*", "codec": codec}]}


def _split(**settings: object) -> dict[str, object]:
    return {"gradients": {"split": settings}}


WRONG: list[tuple[object, list[str]]] = [
    # unknown settings name the nearest
    ({"gradient": {}}, ["gradient: no such setting; did you mean 'gradients'?", "trace"]),
    ({"gradients": {"overlapp": True}}, ["gradients.overlapp:", "did you mean 'overlap'?"]),
    ({"gradients": {"zzz": True}}, ["zzz: no such setting; allowed: split, overlap, transport"]),
    (_split(kind="by_bytes", megabyte=3), ["split.megabyte:", "did you mean 'megabytes'?"]),
    (_split(kind="single", single=3), ["gradients.split.single: no such setting; allowed: kind"]),
    (
        {1: 2},
        ["1: no such setting; allowed: gradients, local, parallel, precision, memory, compute, "],
    ),
    ({"trace": {1: 2}}, ["trace.1: no such setting; allowed: steps"]),
    # kinds
    (_split(kind="by_bites"), ["gradients.split.kind: got 'by_bites'; did you mean 'by_bytes'?"]),
    ({"gradients": {"split": "layer"}}, ["gradients.split.kind: got 'layer'", "per_layer, per_gr"]),
    ({"gradients": {"split": None}}, ["gradients.split: got None; allowed: the kinds by_bytes"]),
    (
        {"gradients": {"split": FlatConfig()}},
        ["gradients.split.kind: got 'flat'; allowed: the kinds"],
    ),
    (_split(megabytes=3), ["gradients.split.kind: missing in {'megabytes': 3}", "by_bytes"]),
    (
        {"gradients": {"transport": "flot"}},
        [
            "transport.kind: got 'flot'; did you mean 'flat'?",
            "allowed: the kinds flat, direct, sharded, hierarchical, shared_memory, auto;",
        ],
    ),
    ({"gradients": {"transport": {"kind": ["flat"]}}}, ["transport.kind: got ['flat']; allowed"]),
    ({"gradients": {"codec": {"kind": {"a": 1}}}}, ["gradients.codec.kind: got {'a': 1}; allowed"]),
    ({"data": {"prefetch": {"workers": []}}}, ["data.prefetch.workers: got []; allowed"]),
    ({"parallel": {"tensor": {"ranks": 2, "plan": [1]}}}, ["parallel.tensor.plan[0]"]),
    # no value is converted
    ({"gradients": {"overlap": "yes"}}, ["overlap: got 'yes'; allowed: true or false; e.g. over"]),
    ({"gradients": {"overlap": 1}}, ["overlap: got 1; allowed: true or false"]),
    ({"gradients": {"accumulate": True}}, ["accumulate: got True; allowed: a whole number >= 1"]),
    ({"gradients": {"accumulate": 2.0}}, ["accumulate: got 2.0; allowed: a whole number >= 1"]),
    (_split(kind="by_bytes", megabytes="25"), ["split.megabytes: got '25'; allowed: a number > 0"]),
    (_split(kind="by_bytes", megabytes=True), ["split.megabytes: got True"]),
    ({"trace": {"folder": 3}}, ["trace.folder: got 3; allowed: non-empty text"]),
    # ranges
    ({"gradients": {"accumulate": 0}}, ["gradients.accumulate: got 0", ">= 1; e.g. accumulate: 1"]),
    (_split(kind="by_bytes", megabytes=0), ["split.megabytes: got 0; allowed: a number > 0"]),
    (_split(kind="by_bytes", megabytes=float("nan")), ["split.megabytes: got nan"]),
    (_split(kind="by_bytes", first_megabytes=float("inf")), ["got inf", "a number > 0 or null"]),
    (_split(kind="by_layers", layers=0), ["layers: got 0; allowed: a whole number >= 1", "50"]),
    ({"trace": {"steps": 0}}, ["trace.steps: got 0; allowed: a whole number >= 1 or null"]),
    ({"trace": {"skip": -1}}, ["trace.skip: got -1; allowed: a whole number >= 0; e.g. skip: 2"]),
    ({"trace": {"folder": ""}}, ["trace.folder: got ''; allowed: non-empty text"]),
    # lists
    (_split(kind="by_percent", percents=[60, 20]), ["split.percents: [60, 20]: sums to 80", "add"]),
    (_split(kind="by_percent", percents=[60, 45]), ["sums to 105", "100; subtract 5"]),
    (_split(kind="by_percent", percents=[50, 50.02]), ["sums to 100.02", "subtract 0.02"]),
    (_split(kind="by_percent", percents=[]), ["percents: []: sums to 0"]),
    (_split(kind="by_percent", percents=[101, -1]), ["percents[1]: got -1", "list of numbers > 0"]),
    (_split(kind="by_percent", percents=50), ["percents: got 50; allowed: a list of numbers"]),
    (_split(kind="by_index"), ["split.last: missing", "e.g. last: [20, 100, 159]"]),
    (_split(kind="by_index", last=[]), ["last: got []; allowed: a non-empty list of whole numb"]),
    (_split(kind="by_index", last=[5, 3]), ["last: [5, 3]: not ascending", "last: [3, 5]"]),
    (_split(kind="by_index", last=[3, 3]), ["last: [3, 3]: not ascending", "last: [3]"]),
    (_split(kind="by_index", last=[-1, 3]), ["last[0]: got -1", "whole numbers >= 0"]),
    # codecs
    (
        _codec("foo"),
        ["codec.kind: got 'foo'; allowed: the kinds half, int8", "codec: {kind: half}"],
    ),
    (
        _codec("none"),
        [
            "codec.kind: got 'none'; did you mean null?",
            "powersgd, by_name, adaptive or null; e.g. codec:",
        ],
    ),
    (
        {"local": 16},
        ["local: got 16; allowed: a mapping with the settings auto", "offload or null"],
    ),
    (_codec({"kind": "dgc", "density": 7}), ["density: got 7; allowed: a number > 0 and <= 1"]),
    (_codec({"kind": "int8", "blok": 3}), ["codec.blok: no such setting; did you mean 'block'?"]),
    (_codec({"kind": "by_name", "rules": []}), ["rules: got []; allowed: a non-empty list of map"]),
    (_codec(_rule("nope")), ["has 1 problem", "codec.rules[0].codec.kind: got 'nope'"]),
    (_codec(_rule({"kind": "int8", "block": -1})), ["rules[0].codec.block: got -1", "<= 65536"]),
    (_codec({"kind": "adaptive", "codec": "dgc"}), ["takes over the momentum", "without adaptive"]),
    # memory
    (
        {"memory": {"recompute": {"budget": 0.5, "every": 1}}},
        ["memory.recompute: {'budget': 0.5, 'every': 1}: every and budget exclude each other"],
    ),
    ({"memory": {"recompute": {"budget_bytes": 2.5}}}, ["budget_bytes: got 2.5; allowed: a whole"]),
    # checks
    (
        {"checks": {"timeout": "0s"}},
        ["timeout: got 0.0; allowed: a number > 0 or text or null", "30s"],
    ),
    # groups
    ({"gradients": 3}, ["gradients: got 3; allowed: a mapping with the settings split, overlap"]),
    ({"trace": None}, ["trace: got None; allowed: a mapping with the settings steps, skip"]),
    # sources
    ("exatc", ["no preset is named 'exatc'; did you mean 'exact'?", "sequential", ".yaml"]),
    (3, ["cannot make a strategy from 3; allowed: a path"]),
]


@pytest.mark.parametrize(("source", "words"), WRONG, ids=lambda value: str(value)[:60])
def test_wrong_strategies_are_refused_in_these_words(source, words):
    with pytest.raises(StrategyError) as caught:
        Strategy.load(source)
    for word in words:
        assert word in str(caught.value)


def test_every_problem_has_its_line():
    with pytest.raises(StrategyError) as caught:
        Strategy.load({"gradients": {"overlap": 3, "accumulate": 0}, "trace": {"skip": "x"}})
    head, *lines = str(caught.value).split("\n")
    assert head == "Strategy has 3 problems:"
    assert [line.partition(":")[0].strip() for line in lines] == [
        "gradients.overlap",
        "gradients.accumulate",
        "trace.skip",
    ]


def test_values_built_in_python_are_refused_alike():
    with pytest.raises(
        StrategyError, match=r"^ByPercentConfig has 1 problem:\n  percents: \(60, 20\): "
    ):
        ByPercentConfig(percents=(60, 20))
    with pytest.raises(StrategyError, match="ByIndexConfig has 1 problem:\n  last: missing"):
        ByIndexConfig()  # type: ignore[call-arg]
    with pytest.raises(StrategyError, match="no such setting; did you mean 'accumulate'"):
        GradientsConfig(accumulat=2)  # type: ignore[call-arg]


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_setting_says_what_it_allows(setting: type[Setting]):
    """No field has a type that messages have no words for."""
    for field in setting.model_fields:
        with pytest.raises(StrategyError, match=rf"(?m)^  {field}\S*: got <object.*; allowed: \S+"):
            setting(**{field: object()})


def test_long_values_are_cut():
    with pytest.raises(StrategyError) as caught:
        Strategy.load({"gradients": {"accumulate": "x" * 10_000}})
    assert len(str(caught.value)) < 300


def test_settings_that_do_not_go_together_are_refused_when_the_strategy_is_built():
    with pytest.raises(StrategyError, match=r"\(top level\): local with gradients\.codec: grad"):
        Strategy.load({"local": {}, "gradients": {"codec": "half"}})
    with pytest.raises(StrategyError, match=r"checks\.replay with compute\.compile"):
        Strategy.load({"checks": {"every": 9, "replay": True}, "compute": {"compile": True}})
    by_name = {"kind": "by_name", "rules": [{"match": "*", "codec": "dgc"}]}
    for codec in ("dgc", by_name):
        with pytest.raises(StrategyError, match=r"transport sharded with the codec dgc.*; use"):
            Strategy.load({"gradients": {"transport": "sharded", "codec": codec}})
    alone = Strategy.load({"local": {}})
    with pytest.raises(StrategyError, match=r"local with gradients\.codec"):
        alone.with_gradients(codec=HalfConfig())
