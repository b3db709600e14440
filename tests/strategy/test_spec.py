"""Strategies are values: they survive every way of writing them, and never change."""

from __future__ import annotations

import pickle
from functools import partial
from math import inf
from typing import Any, get_args

import pytest
from hypothesis import given, settings, strategies as st

from slipstream.errors import StrategyError
from slipstream.strategy import (
    AutocastConfig,
    BudgetBytesConfig,
    BudgetConfig,
    ByBytesConfig,
    ByIndexConfig,
    ByLayersConfig,
    ByPercentConfig,
    CheckpointsConfig,
    ComputeConfig,
    DynamicScaleConfig,
    EveryConfig,
    Exactness,
    FlatConfig,
    GradientsConfig,
    HalfWeightsConfig,
    MemoryConfig,
    OffloadConfig,
    OptimalConfig,
    PerGradientConfig,
    PerLayerConfig,
    Setting,
    SingleConfig,
    StaticScaleConfig,
    Strategy,
    TraceConfig,
    Variant,
    presets,
)

VARIANTS: list[type[Setting]] = [
    ByBytesConfig,
    ByPercentConfig,
    ByIndexConfig,
    ByLayersConfig,
    PerLayerConfig,
    PerGradientConfig,
    SingleConfig,
    OptimalConfig,
    FlatConfig,
]
PRECISIONS = [AutocastConfig, HalfWeightsConfig, DynamicScaleConfig, StaticScaleConfig]
RECOMPUTES = [EveryConfig, CheckpointsConfig, BudgetConfig, BudgetBytesConfig]
SETTINGS = [
    *VARIANTS,
    *PRECISIONS,
    *RECOMPUTES,
    ComputeConfig,
    GradientsConfig,
    MemoryConfig,
    OffloadConfig,
    TraceConfig,
    Strategy,
]


def _percents(weights: list[int]) -> tuple[float, ...]:
    return tuple(100 * weight / sum(weights) for weight in weights)


LARGEST = 2**63 - 1  # that a document may hold
text = partial(st.text, st.characters(exclude_categories=["Cc", "Cs"]))
sizes = st.floats(min_value=0, exclude_min=True, allow_infinity=False)
splits = st.one_of(
    st.builds(
        ByBytesConfig,
        megabytes=sizes,
        first_megabytes=st.none() | sizes,
        last_megabytes=st.none() | sizes,
    ),
    st.builds(
        ByPercentConfig,
        percents=st.lists(st.integers(1, 1000), min_size=1, max_size=9).map(_percents),
    ),
    st.builds(
        ByIndexConfig, last=st.sets(st.integers(0, LARGEST), min_size=1).map(sorted).map(tuple)
    ),
    st.builds(ByLayersConfig, layers=st.integers(1, LARGEST)),
    st.builds(OptimalConfig, steps=st.integers(1, 99)),
    st.sampled_from([PerLayerConfig(), PerGradientConfig(), SingleConfig()]),
)
scales = st.one_of(
    st.sampled_from([None, "auto", "dynamic"]),
    st.builds(StaticScaleConfig, scale=st.floats(0, 2**24, exclude_min=True)),
    st.builds(DynamicScaleConfig, init=st.floats(1, 2**24), decr_every_n=st.integers(1, LARGEST)),
)
half = {
    "dtype": st.sampled_from(["bf16", "fp16"]),
    "loss_scale": scales,
    "float_modules": st.lists(text(), max_size=3),
    "emulate": st.booleans(),
}
precisions = st.one_of(
    st.none(),
    st.builds(AutocastConfig, **half, float_ops=st.sampled_from([(), ("gelu",)])),
    st.builds(HalfWeightsConfig, **half, exchange=st.sampled_from(["half", "fp32"])),
)
paths = st.lists(text(min_size=1), min_size=1, max_size=3).map(tuple)
keep = st.sets(st.sampled_from(["matmul", "convolution", "attention"])).map(sorted).map(tuple)
recomputes = st.one_of(
    st.none(),
    st.builds(EveryConfig, every=st.integers(1, LARGEST), keep=keep),
    st.builds(CheckpointsConfig, checkpoints=paths, keep=keep),
    st.builds(BudgetConfig, budget=st.floats(min_value=0, max_value=1, exclude_min=True)),
    st.builds(BudgetBytesConfig, budget_bytes=st.integers(1, LARGEST)),
)
any_rank = {
    "keep_last": st.integers(0, 9),
    "prefetch": st.integers(0, 9),
    "min_bytes": st.integers(0, LARGEST),
    "modules": st.none() | paths,
}
offloads = st.one_of(
    st.none(),
    st.builds(OffloadConfig, **any_rank),
    st.builds(OffloadConfig, to=st.just("disk"), folder=st.none() | text(min_size=1), **any_rank),
)
wishes = st.builds(
    Strategy,
    precision=precisions,
    compute=st.builds(
        ComputeConfig,
        tf32=st.booleans(),
        fuse_bn_act=st.booleans(),
        fuse_add_act=st.booleans(),
        fuse_relu_depthwise=st.booleans(),
        fuse_optimizer=st.sampled_from([False, True, "elementwise"]),
    ),
    gradients=st.builds(
        GradientsConfig, split=splits, overlap=st.booleans(), accumulate=st.integers(1, 99)
    ),
    memory=st.builds(MemoryConfig, recompute=recomputes, offload=offloads),
    trace=st.builds(
        TraceConfig,
        steps=st.none() | st.integers(1, LARGEST),
        skip=st.integers(0, LARGEST),
        folder=text(min_size=1),
    ),
)


def accepts(schema: dict[str, Any], value: Any, defs: dict[str, Any]) -> bool:
    """The part of JSON schema (draft 2020-12) that pydantic uses for these settings."""
    known = {"$ref", "$schema", "$defs", "anyOf", "const", "enum", "type", "title", "description"}
    known |= {"default", "examples", "properties", "required", "additionalProperties", "items"}
    known |= {"minimum", "exclusiveMinimum", "minLength", "minItems"}
    known |= {"exclusiveMaximum", "maximum", "discriminator"}
    assert schema.keys() <= known, "teach this validator the rest"
    types = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}
    types |= {"integer": int, "number": (int, float)}
    if "$ref" in schema:
        return accepts(defs[schema["$ref"].rpartition("/")[2]], value, defs)
    if "anyOf" in schema:
        return any(accepts(option, value, defs) for option in schema["anyOf"])
    if "type" not in schema:
        return value in schema["enum"]
    if not isinstance(value, types[schema["type"]]):
        return False
    if isinstance(value, bool) and schema["type"] != "boolean":
        return False
    if isinstance(value, dict):
        fields = schema["properties"]
        return set(schema.get("required", ())) <= value.keys() <= fields.keys() and all(
            accepts(fields[key], value[key], defs) for key in value
        )
    if isinstance(value, list):
        return len(value) >= schema.get("minItems", 0) and all(
            accepts(schema["items"], item, defs) for item in value
        )
    if isinstance(value, str):
        return value in schema.get("enum", [schema.get("const", value)]) and (
            len(value) >= schema.get("minLength", 0)
        )
    return value is None or (
        value >= schema.get("minimum", value)
        and value <= schema.get("maximum", value)
        and value > schema.get("exclusiveMinimum", -inf)
        and value < schema.get("exclusiveMaximum", inf)
    )


SCHEMA = Strategy.json_schema()


@settings(deadline=None)
@given(wishes, st.booleans())
def test_round_trips(config, full):
    assert Strategy.from_yaml(config.to_yaml(full=full)) == config
    assert Strategy.from_json(config.to_json(full=full)) == config
    assert Strategy.load(config.document(full=full)) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert accepts(SCHEMA, config.document(full=full), SCHEMA["$defs"])


def test_bytes_may_be_written_with_an_exponent():
    offload = "offload: {to: disk, min_bytes: 1e6}"
    memory = Strategy.from_yaml(f"memory: {{recompute: {{budget_bytes: 2e9}}, {offload}}}").memory
    assert (memory.recompute.budget_bytes, memory.offload.min_bytes) == (2 * 10**9, 10**6)


@pytest.mark.parametrize(
    "document",
    [
        {"gradients": {"split": {"megabytes": 25}}},
        {"gradients": {"split": "by_index"}},
        {"gradients": {"split": {"kind": "by_layers"}}},
        {"gradients": {"overlap": "yes"}},
        {"gradients": {"accumulate": 0}},
        {"precision": {"dtype": "bf16"}},
        {"precision": {"kind": "autocast", "loss_scale": {"kind": "static"}}},
        {"precision": {"kind": "autocast", "exchange": "half"}},
        {"memory": {"recompute": "half"}},
        {"memory": {"recompute": {"every": 0}}},
        {"memory": {"recompute": {"every": 1, "keep": ["matmuls"]}}},
        {"memory": {"recompute": {"checkpoints": []}}},
        {"memory": {"recompute": {"budget": 1.5}}},
        {"memory": {"recompute": {"kind": "budget", "budget": 0.5, "keep": ["matmul"]}}},
        {"memory": {"offload": {"to": "tape"}}},
        {"memory": {"offload": {"modules": []}}},
        {"trace": {"step": 3}},
    ],
)
def test_schema_refuses_what_strategy_refuses(document):
    assert not accepts(SCHEMA, document, SCHEMA["$defs"])
    with pytest.raises(StrategyError):
        Strategy.load(document)


def test_every_shorthand_of_the_schema_loads():
    options = SCHEMA["$defs"]["GradientsConfig"]["properties"]["split"]["anyOf"]
    (kinds,) = [option["enum"] for option in options if "enum" in option]
    assert {GradientsConfig(split=kind).split.kind for kind in kinds} == set(kinds)
    for split in set(VARIANTS) - {FlatConfig}:
        kind = split.model_fields["kind"].default
        required = any(field.is_required() for field in split.model_fields.values())
        assert (kind in kinds) != required


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (Strategy(), "{}\n"),
        (Strategy(gradients=GradientsConfig(split=SingleConfig())), "gradients: {split: single}\n"),
        (
            Strategy(gradients=GradientsConfig(split=ByBytesConfig(megabytes=16), accumulate=2)),
            "gradients:\n  split: {kind: by_bytes, megabytes: 16}\n  accumulate: 2\n",
        ),
        (
            Strategy(gradients=GradientsConfig(split=ByPercentConfig(percents=(62.5, 37.5)))),
            "gradients:\n  split:\n    kind: by_percent\n    percents: [62.5, 37.5]\n",
        ),
        (
            Strategy(
                memory=MemoryConfig(
                    recompute=EveryConfig(every=2, keep=("matmul",)),
                    offload=OffloadConfig(to="disk"),
                )
            ),
            "memory:\n"
            "  recompute:\n    kind: every\n    every: 2\n    keep: [matmul]\n"
            "  offload: {to: disk}\n",
        ),
    ],
)
def test_yaml_is_minimal(config, text):
    assert config.to_yaml() == text


def test_full_yaml_shows_every_setting_in_order():
    assert Strategy().to_yaml(full=True) == (
        "gradients:\n"
        "  split: {kind: by_bytes, megabytes: 4, first_megabytes: 1, last_megabytes: 1}\n"
        "  overlap: true\n"
        "  transport: {kind: flat}\n"
        "  codec: null\n"
        "  accumulate: 1\n"
        "local: null\n"
        "parallel: {tensor: null, pipeline: null}\n"
        "precision: null\n"
        "memory: {recompute: null, offload: null}\n"
        "compute: {fuse_optimizer: false, fuse_bn_act: false, fuse_add_act: false, "
        "fuse_relu_depthwise: false,\n"
        "  compile: false, cuda_graph: false, channels_last: false, tf32: false}\n"
        "data: {balance: null, cache: null, prefetch: null}\n"
        "checks: {timeout: 60, folder: slipstream-autopsy, nonfinite: raise, every: null, "
        "replay: false}\n"
        "trace: {steps: null, skip: 2, folder: slipstream-trace, norms: false}\n"
    )


def test_equal_by_value_and_hashable():
    one, other = Strategy.load("ddp"), Strategy.load("ddp")
    assert one == other
    assert len({one, other, Strategy()}) == 2
    assert ByBytesConfig(megabytes=25) == ByBytesConfig(megabytes=25.0)
    assert GradientsConfig(split=PerLayerConfig()) != GradientsConfig(split=PerGradientConfig())


def test_frozen():
    config = Strategy()
    with pytest.raises(
        StrategyError, match=r"GradientsConfig\.overlap cannot be set to False.*frozen"
    ):
        config.gradients.overlap = False
    with pytest.raises(StrategyError, match=r"Strategy\.trace cannot be deleted.*frozen"):
        del config.trace
    assert config == Strategy()


def test_copies_are_checked():
    changed = GradientsConfig().model_copy(update={"accumulate": 4})
    assert changed == GradientsConfig(accumulate=4)
    with pytest.raises(StrategyError, match="accumulate: got 0"):
        changed.model_copy(update={"accumulate": 0})


def test_exactness_is_the_weakest(monkeypatch):
    assert Strategy().exactness == "reordered"
    for exactness in get_args(Exactness):
        monkeypatch.setattr(ByBytesConfig, "exactness", "bitwise")
        monkeypatch.setattr(FlatConfig, "exactness", exactness)
        assert Strategy().exactness == exactness


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_setting_is_described(setting: type[Setting]):
    assert setting.__doc__
    fields = {name: info for name, info in setting.model_fields.items() if name != "kind"}
    assert all(info.description for info in fields.values())
    assert not issubclass(setting, Variant) or setting.exactness in get_args(Exactness)


@pytest.mark.parametrize("name", presets())
def test_presets_load(name):
    preset = presets()[name]
    assert preset.reason
    assert Strategy.load(name) == Strategy.load(preset.settings)
    assert (Strategy.load(name) == Strategy()) == (name == "default")


def test_load_from_every_source(tmp_path):
    config = Strategy(trace=TraceConfig(steps=3))
    for name, text in [("s.yaml", config.to_yaml()), ("s.YML", config.to_yaml(full=True))]:
        (tmp_path / name).write_text(text, encoding="utf-8")
        assert Strategy.load(tmp_path / name) == config
    (tmp_path / "s.json").write_text("\ufeff" + config.to_json(), encoding="utf-8")
    assert Strategy.load(str(tmp_path / "s.json")) == config
    assert Strategy.load(config) is config
    assert Strategy.load(None) == Strategy()


def test_norms_are_refused_where_ranks_have_no_whole_averages() -> None:
    for refused in (
        {"gradients": {"codec": "int8"}},
        {"gradients": {"transport": "sharded"}},
        {"precision": "autocast"},
    ):
        with pytest.raises(StrategyError, match=r"trace\.norms with .*plain data parallelism"):
            Strategy.load({**refused, "trace": {"steps": 5, "norms": True}})
    with pytest.raises(StrategyError, match=r"trace\.norms with trace\.steps null"):
        Strategy.load({"trace": {"norms": True}})
    for recorded in ({}, {"local": {"steps": 4}}):
        assert Strategy.load({**recorded, "trace": {"steps": 5, "norms": True}}).trace.norms
