"""Benchmarks: that they run, and that what they time is what they say; never times."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from examples import models
from slipstream.version import __version__

# torch.distributed.optim, where ZeroRedundancyOptimizer lives
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator:
    """Imports a file of ``benchmarks/``, which is a folder of scripts; they leave no module."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(BENCHMARKS)):
            del sys.modules[name]


# The emulated accelerator.


def pictures(model: nn.Module) -> torch.Tensor:
    return model(torch.randn(2, 3, 32, 32)).logits.sum()


def words(model: nn.Module) -> torch.Tensor:
    tokens = torch.arange(8).view(1, 8)
    return model(input_ids=tokens, labels=tokens).loss


CASES = {
    "resnet": (models.resnet_small, pictures),
    "bert": (lambda: models.bert("tiny", 64), words),
}


def layers_in_ready_order(model: nn.Module, loss: torch.Tensor) -> list[str]:
    order: list[str] = []
    for name, p in model.named_parameters():
        layer = name.rpartition(".")[0]
        p.register_post_accumulate_grad_hook(lambda _, layer=layer: order.append(layer))
    loss.backward()
    return list(dict.fromkeys(order))


@pytest.mark.parametrize("case", CASES)
def test_timed_model_has_parameters_order_and_shapes_of_the_real_one(benchmark, case: str) -> None:
    accelerator, baselines = benchmark("accelerator"), benchmark("baselines")
    make, loss_of = CASES[case]
    real, copy = make(), make()
    shares = accelerator.shares_of(copy, loss_of)
    units = baselines.fsdp_units(copy)
    timed, timed_loss = accelerator.timed_model(copy, shares, units, accelerator.Device(0.0), 0)
    assert [n for n, _ in timed.named_parameters()] == [n for n, _ in real.named_parameters()]
    called: list[str] = []
    for path, module in timed.named_modules():
        module.register_forward_pre_hook(lambda *_, path=path: called.append(path))
    expected = layers_in_ready_order(real, loss_of(real))
    assert layers_in_ready_order(timed, timed_loss(timed)) == expected
    assert all(p.grad.shape == p.shape and p.grad.isfinite().all() for p in timed.parameters())
    assert sum(shares.values()) == pytest.approx(1)
    assert {*units, *shares} <= set(called)  # so hooks that wait for parameters run


class Clock:
    """A clock that only sleeping moves; each sleep takes longer than asked for."""

    def __init__(self, late: float = 0.0) -> None:
        self.now, self.late = 0.0, late

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + (self.late if seconds else 0.0)


def on_device(accelerator: ModuleType, monkeypatch: pytest.MonkeyPatch, clock: Clock):
    fake = SimpleNamespace(perf_counter=clock.perf_counter, sleep=clock.sleep)
    monkeypatch.setattr(accelerator, "time", fake)
    return accelerator.Device(1.0)


def test_layers_take_their_time_though_sleeps_last_too_long(benchmark, monkeypatch) -> None:
    accelerator, clock = benchmark("accelerator"), Clock(late=1e-4)
    device = on_device(accelerator, monkeypatch, clock)
    for _ in range(1000):
        device.launch(1 / 1000)
        assert abs(clock.now - device._free_at) <= accelerator.AHEAD
    device.synchronize()
    assert clock.now == pytest.approx(1.0, abs=2e-4)


def test_what_the_host_does_meanwhile_is_hidden_and_a_wait_is_not(benchmark, monkeypatch) -> None:
    accelerator, clock = benchmark("accelerator"), Clock()
    device = on_device(accelerator, monkeypatch, clock)
    for layer in range(100):
        clock.now += 0.5 if layer == 50 else 2e-4  # parameters come late once
        device.launch(1 / 100)
    device.synchronize()
    assert clock.now == pytest.approx(1.5, abs=accelerator.AHEAD)


# The exchange.


def result_of(script: str, options: str, folder: Path) -> dict[str, Any]:
    """What a benchmark writes."""
    results = folder / "results.json"
    command = [sys.executable, str(BENCHMARKS / script), *options.split(), "--json", str(results)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(results.read_text())
    return found


@pytest.mark.timeout(300)
def test_exchange_beside_an_accelerator_compares_all_rivals(benchmark, tmp_path: Path) -> None:
    options = "--model resnet-small --loopback --nodes 2 --rounds 2 --warmup 0"
    options += " --compute accelerator --compute-seconds 0.05 --ddp 2 --fsdp keep --zero 2"
    options += " --splits default --transports flat direct"
    entry = result_of("exchange.py", options, tmp_path)
    assert entry["compute"] == "accelerator"
    rows = {row["name"].removesuffix(" (DDP, best)"): row for row in entry["rows"]}
    assert list(rows) == [
        "no exchange", "DDP, default", "DDP, 2 MB", "FSDP2, keep", "ZeRO-1, 2 MB",
        "slipstream, default", "slipstream, default, direct",
    ]  # fmt: skip
    assert all(row["peak_bytes"] > 2**26 for row in rows.values())
    written = benchmark("tables").exchange(entry)
    assert "## Exchange beside an accelerator, resnet-small at loopback" in written
    assert all(f"| {row['name']} |" in written for row in entry["rows"])


@pytest.mark.timeout(300)
def test_auto_is_measured_against_every_choice(benchmark, tmp_path: Path) -> None:
    options = "--model resnet-small --ranks-on-one-host --nodes 2 --rounds 1 --finals 2"
    options += " --updates 24 --more 1 --splits single"
    entry = result_of("auto.py", options, tmp_path)
    assert entry["updates"] <= 24
    assert entry["kept"] in entry["seconds"]
    assert {"single", "single, shared_memory", "single, no overlap"} < set(entry["seconds"])
    assert entry["differences"]["auto"] == 0  # on two ranks no choice changes a bit
    assert len(entry["losses"]["auto"]) == len(entry["losses"]["default"]) == 25
    written = benchmark("tables").auto(entry)
    assert "## Auto, resnet-small at one host" in written
    assert all(f"| {name}" in written for name in entry["seconds"])


# What is published.


def test_every_result_can_be_taken_again(benchmark, capsys: pytest.CaptureFixture[str]) -> None:
    bench = benchmark("bench")
    commands = bench.chosen([])
    assert {file.stem for file in bench.RESULTS.glob("*.json")} <= commands.keys()
    assert all((BENCHMARKS / command.split()[0]).is_file() for command in commands.values())
    bench.show(bench.chosen(["soak", "one-host-*"]))
    assert "soak.py" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"bert\*: no such result; allowed: accelerator-resnet50"):
        bench.chosen(["bert*"])


def test_published_tables_are_those_of_the_results(benchmark) -> None:
    tables = benchmark("tables")
    every = tables.results()
    rendered = tables.rendered(every)
    assert (tables.RESULTS / "README.md").read_text() == rendered
    headings = re.findall("^## .*", rendered, re.MULTILINE)
    assert len(headings) == len(set(headings))  # links name them
    page = (ROOT / "docs/sharding.md").read_text()
    assert page == tables.with_gains(page, every)


def test_sentences_of_the_pages_hold_the_figures_of_the_results(benchmark) -> None:
    claims, every = benchmark("claims"), benchmark("tables").results()
    assert len(claims.claims(every)) == 8
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md")]
    assert claims.missing(pages, every) == []


def test_no_result_is_of_an_old_release(benchmark) -> None:
    def release(version: str) -> tuple[int, int]:
        major, minor, *_ = re.findall(r"\d+", version)
        return int(major), int(minor)

    major, minor = release(__version__)
    for entry in benchmark("tables").results():
        assert release(entry["versions"]["slipstream"]) in ((major, minor), (major, minor - 1))
