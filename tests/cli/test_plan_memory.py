"""``slipstream plan --memory``: the largest batch of known models and of one's own."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from slipstream.cli import main
from slipstream.errors import ModelError, StrategyError

OWN = """
import torch
from torch import nn

def build():
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)]
    return nn.Sequential(*blocks), lambda batch: {"input": torch.zeros(batch, 64)}

def nothing():
    return None

number = 3
"""


def _run(*arguments: str) -> str:
    result = CliRunner(env={"COLUMNS": "120"}).invoke(
        main.app, ["plan", *arguments], catch_exceptions=False
    )
    assert result.exit_code == 0
    return result.stdout


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return f"{tmp_path / 'own.py'}:build"


def test_numbers_of_ones_own_model(own):
    found = json.loads(
        _run("--memory", "1MiB", "--model", own, "--optimizer", "momentum", "--json")
    )
    weights = 8 * (64 * 64 + 64) * 4
    assert (found["parameters"], found["gradients"], found["optimizer"]) == (weights,) * 3
    row = 64 * 4
    each = {way["name"]: way["activations"]["each"] for way in found["ways"]}
    assert each["keep all"] == 9 * row  # the input, and what each block returns
    products = each.pop("recompute every block but products")
    assert products == (8 + 8 + 1) * row  # inputs, products and what the last block returns
    batches = {way["name"]: way["batch"] for way in found["ways"]}
    assert batches["keep all"] == (2**20 - 3 * weights) // (10 * row)  # one more for a gradient
    assert all(batches[name] >= batches["keep all"] for name in each)


def test_the_tables_of_a_known_model():
    shown = _run("--memory", "32GiB", "--model", "bert-base", "--length", "128")
    for text in ("bert-base: the largest batch in 32GiB", "recompute every block + offload"):
        assert text in shown
    assert "bert.encoder.layer.0 to bert.encoder.layer.11, each of 12" in shown


def test_half_the_bits_half_the_activations(own):
    def each(dtype):
        options = ["--memory", "1GiB", "--model", own, "--dtype", dtype, "--json"]
        return json.loads(_run(*options))["ways"][0]["activations"]["each"]

    assert each("fp32") == 2 * each("bf16")


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ([], StrategyError, "plan needs --trace and --cluster, .*; or --memory and --model"),
        (["--memory", "32"], StrategyError, "--memory '32': write a size such as 32GiB"),
        (["--memory", "1GiB"], StrategyError, "--memory needs --model"),
        (["--memory", "1GiB", "--model", "x", "--dtype", "int"], StrategyError, "--dtype int"),
        (["--memory", "1GiB", "--model", "x", "--optimizer", "y"], StrategyError, "--optimizer y"),
        (["--memory", "1GiB", "--model", "brt"], ModelError, "brt: no such model; allowed: bert-"),
        (["--memory", "1GiB", "--model", "no.py:f"], ModelError, "there is no file no.py"),
    ],
)
def test_mistakes(arguments, error, words):
    with pytest.raises(error, match=words):
        _run(*arguments)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("number", "has no function number"),
        ("nothing", r"nothing\(\) returned NoneType; it must return the model and a function"),
    ],
)
def test_what_is_no_model(own, function, words):
    with pytest.raises(ModelError, match=words):
        _run("--memory", "1GiB", "--model", own.replace("build", function))
