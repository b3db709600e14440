"""``slipstream plan --memory``: the largest batch of known models and of a user's model."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from slipstream.cli.plan import count
from slipstream.cli.plan.memory import OPTIMIZERS, by_technique, parse_bytes
from slipstream.errors import ModelError, StrategyError
from slipstream.memory import Estimate
from slipstream.planner.iteration.model import predict
from slipstream.planner.iteration.plan import CommPlan
from slipstream.strategy import Strategy
from slipstream.trace import Trace, read, write
from tests.cli.running import run
from tests.planner.test_ranking import UNEVEN

USERS_FILE = """
import atexit
import torch
from torch import nn
from beside import WIDTH

atexit.register(print, "bye")

class Looks(nn.Sequential):
    def forward(self, input):
        return super().forward(input if input.sum() >= 0 else -input)

def blocks():
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(8)]

def inputs(batch):
    return {"input": torch.zeros(batch, WIDTH)}

def build():
    print("hello")
    return nn.Sequential(*blocks()), inputs

def item():
    assert [x.item() for x in torch.linspace(0, 1, 3)] == [0, 0.5, 1]
    return build()

def looks():
    return Looks(*blocks()), inputs

def nothing():
    return None

def raises():
    return [][3]

def leaves():
    raise SystemExit(3)

def no_mapping():
    return nn.Sequential(*blocks()), lambda batch: torch.zeros(batch, WIDTH)

def no_inputs():
    return nn.Sequential(*blocks()), lambda batch: {}[batch]

def wrong_name():
    return nn.Sequential(*blocks()), lambda batch: {"x": torch.zeros(batch, WIDTH)}

def no_batch():
    return nn.Sequential(*blocks()), lambda batch: inputs(5)

number = 3
"""


_run = partial(run, "plan")


@pytest.fixture
def users_model(tmp_path):
    (tmp_path / "model.py").write_text(USERS_FILE)
    (tmp_path / "beside.py").write_text("WIDTH = 64")
    return f"{tmp_path / 'model.py'}:build"


@pytest.mark.process
def test_the_numbers_of_a_users_model_and_a_trace_tells_how_fast_larger_batches_are(
    users_model, files, forks
):
    options = ["--memory", "1MiB", "--model", users_model, "--optimizer", "momentum"]
    found = json.loads(_run(*options, *files, "--json"))
    weights = 8 * (64 * 64 + 64) * 4
    assert (found["parameters"], found["gradients"], found["optimizer"]) == (weights,) * 3
    row = 64 * 4
    each = {way["name"]: way["activations"]["each"] for way in found["techniques"]}
    assert each["keep all"] == 9 * row  # the input, and what each block returns
    products = each.pop("recompute all but products")
    assert products == (8 + 8 + 1) * row  # inputs, products and what the last block returns
    batches = {way["name"]: way["batch"] for way in found["techniques"]}
    assert batches["keep all"] == (2**20 - 3 * weights) // (10 * row)  # one more for a gradient
    assert all(batches[name] >= batches["keep all"] for name in each)

    ways = {way["name"]: way for way in found["techniques"]}
    work, network = UNEVEN
    for name, share in {"keep all": 0.0, "recompute all": 1.0}.items():
        way = ways[name]
        assert way["recomputed"] == share
        own = work.with_batch(way["batch"])
        plan = replace(CommPlan.of(Strategy(), own.gradients), recompute_share=share)
        expected = 4 * way["batch"] / predict(own, plan, network)
        assert way["samples_per_second"] == pytest.approx(expected, rel=0.05)
    assert ways["recompute all + offload"]["samples_per_second"] is None
    assert "samples/s" in [column.header for column in by_technique(found, "").columns]


@pytest.mark.process
def test_the_tables_of_a_known_model(forks):
    shown = _run("--memory", "32GiB", "--model", "bert-base", "--length", "128")
    for text in ("bert-base: the largest batch in 32GiB", "recompute all + offload"):
        assert text in shown
    assert "each of 12: bert.encoder.layer.0 .. 11" in shown
    assert "samples/s" not in shown  # without a trace


def test_a_trace_with_recomputation_tells_no_speed(files, tmp_path):
    trace = read(tmp_path / "trace.json")
    again = Strategy.load({"memory": {"recompute": "every"}}).document(full=True)
    write(Trace(trace.events, trace.meta | {"strategy": again}), tmp_path / "trace.json")
    with pytest.raises(StrategyError, match="activations were recomputed in it; record one with"):
        _run("--memory", "1MiB", "--model", "bert-base", *files)


@pytest.fixture
def estimated(users_model, monkeypatch):
    """Estimate, in this process, the model of a function in the user's file."""

    def estimate(function: str, dtype: str = "fp32") -> Estimate:
        job = {"model": users_model.replace("build", function), "length": None}
        return count.estimate_job(job | {"optimizer": "adam", "dtype": dtype})

    for name in ("path", "argv"):
        monkeypatch.setattr(sys, name, [*getattr(sys, name)])
    monkeypatch.setattr("atexit.register", lambda *_: None)
    yield estimate
    sys.modules.pop("beside", None)


@pytest.mark.parametrize("function", ["item", "looks"])
def test_models_that_need_values_are_built_on_the_cpu(estimated, function):
    assert estimated(function).activations() == estimated("build").activations()


def test_16_bits_have_masters_and_gradients_of_32(estimated):
    plain, half = estimated("build"), estimated("build", "bf16")
    assert plain.activations().each == 2 * half.activations().each
    assert half.parameters == plain.parameters * 3 / 2
    assert (half.gradients, half.optimizer) == (plain.gradients, plain.optimizer)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("number", "has no function number"),
        ("nothing", r"it returned NoneType; it must return the model and a function"),
        ("raises", r"building it failed in line \d+ of .*model\.py: IndexError: list index"),
        ("leaves", r"building it failed in line \d+ of .*model\.py: SystemExit: 3"),
        ("no_mapping", "the inputs are a Tensor; they must be a mapping"),
        ("no_inputs", r"making inputs failed in line \d+ of .*model\.py: KeyError: 2"),
        ("wrong_name", "its forward failed: TypeError: .* unexpected keyword argument 'x'"),
        ("no_batch", "three samples saves no more than one of two"),
    ],
)
def test_what_is_wrong_in_a_file_is_said(estimated, function, words):
    with pytest.raises(ModelError, match=words):
        count.document(estimated(function), 2**30)


@pytest.mark.parametrize(
    ("name", "words"),
    [("brt", "brt: unknown; allowed: bert-"), ("no.py:f", r"the file no\.py does not exist")],
)
def test_an_unknown_model_or_file_is_an_error(name, words):
    with pytest.raises(ModelError, match=words):
        count.builder(name, None)


@pytest.mark.process
def test_a_process_that_dies_is_an_error_with_its_code(users_model, tmp_path):
    (tmp_path / "beside.py").write_text("import os; os._exit(7)")
    with pytest.raises(ModelError, match="process that builds it ended with code 7"):
        _run("--memory", "1GiB", "--model", users_model)


MEMORY = ["--memory", "1GiB", "--model", "x"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "plan needs --trace and --cluster, .*; or --memory and --model"),
        (["--memory", "32"], "--memory '32': write a size such as 32GiB"),
        (["--memory", "1GiB"], "--memory needs --model"),
        ([*MEMORY, "--dtype", "int"], "--dtype int"),
        ([*MEMORY, "--optimizer", "y"], "--optimizer y: allowed: adamw, adam, sgd"),
        ([*MEMORY, "-o", "y.yaml"], "--output has no effect with --memory"),
        ([*MEMORY, "--trace", "t.json"], "--trace and --cluster go together: give both"),
        ([*MEMORY, "--nodes", "2"], "--nodes has no effect with --memory"),
        ([*MEMORY, "--allow-lossy"], "--allow-lossy has no effect with --memory"),
        (["--trace", "t.json", "--dtype", "bf16"], "--dtype has no effect with --trace .* --memo"),
    ],
)
def test_mistakes(arguments: list[str], words: str) -> None:
    with pytest.raises(StrategyError, match=words):
        _run(*arguments)


def test_every_optimizer_that_is_allowed_can_be_made() -> None:
    assert (*count.OPTIMIZERS,) == OPTIMIZERS


def test_sizes() -> None:
    found: list[Any] = [parse_bytes(size) for size in ("1TiB", "2 tb", "1.5KiB")]
    assert found == [2**40, 2 * 10**12, 1536]
