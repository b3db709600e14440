"""``slipstream demo`` as its users run it, in short, and what its table and its verdict say."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import psutil
import pytest
import torch
from rich.console import Console

from slipstream.cli.demo import task
from slipstream.cli.demo.report import (
    ALONE,
    DDP,
    SLIPSTREAM,
    Measured,
    Planned,
    compare,
    plan_table,
    table,
    verdict,
)
from slipstream.strategy import ByIndex, Strategy
from slipstream.testbed import unavailable
from slipstream.trace import chrome
from tests.testbed.traces import interfaces

SLIPSTREAM_DEMO = [sys.executable, "-m", "slipstream", "demo"]
FAST = ["--nodes", "2", "--rate", "10gbit"]
ROWS = (
    "iteration, median",
    "exposed exchange",
    "gradients -> all-reduces",
    "parameters after one step",
    "final loss",
    "held-out accuracy",
)
MEASURED = Measured(
    nodes=4,
    network="hosts at 1 Gbit/s",
    model="ResNet-18",
    gradients=62,
    parameters=11_181_642,
    batch=16,
    seconds={ALONE: [0.3], DDP: [0.8, 0.9, 0.7, 0.8], SLIPSTREAM: [0.6, 0.8, 0.7, 0.6]},
    all_reduces={DDP: 3, SLIPSTREAM: 4},
    plan=Planned([3, 61], 5, 0.7, 0.8, 0.63),
    apart_after_one_step=7e-8,
    final_loss={DDP: 0.05, SLIPSTREAM: 0.06},
    accuracy={DDP: 0.97, SLIPSTREAM: 0.965},
    versions={},
)


def running(folder: str) -> list[str]:
    """Command lines of what still runs of a demo that writes into ``folder``."""
    lines = [" ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])]
    return [line for line in lines if folder in line]


@pytest.mark.parametrize("options", [[], ["--loopback"]], ids=["as the machine may", "loopback"])
def test_it_trains_both_and_leaves_what_it_promises(tmp_path: Path, options: list[str]) -> None:
    name, before = f"demo-{uuid4().hex[:8]}", interfaces()
    folder = tmp_path / name
    argv = [*SLIPSTREAM_DEMO, *FAST, "--steps", "2", *options, "--folder", name]
    environment = os.environ | {"COLUMNS": "200"}
    ran = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path, env=environment)

    assert ran.returncode == 0, ran.stdout + ran.stderr
    said = ran.stdout
    assert max(map(len, said.splitlines())) <= 100
    assert [
        row
        for row in (*ROWS, "15/15", "an iteration", "diagnosis", "Predicted next to measured")
        if row not in said
    ] == []
    reason = "--loopback" if options else unavailable()
    assert ("no emulated hosts" in said) == bool(reason)
    assert f"In the folder {name}:" in said
    assert set(os.listdir(folder)) - {"logs"} == {
        "trace.json",
        "cluster.yaml",
        "strategy.yaml",
        "overview.txt",
        "demo.json",
    }

    measured = Measured.read(folder / "demo.json")
    assert measured.all_reduces[SLIPSTREAM] < measured.gradients == 62
    assert {name: len(times) for name, times in measured.seconds.items()} == {
        DDP: 2,
        SLIPSTREAM: 2,
        ALONE: 1,
    }
    # Two summands have one order: both must do the same, bit for bit.
    assert measured.apart_after_one_step == 0
    assert compare(measured).loss_difference == 0
    assert f"62 gradients -> {measured.all_reduces[SLIPSTREAM]} all-reduces" in (
        folder / "overview.txt"
    ).read_text("utf-8")
    trace = chrome.read(folder / "trace.json")
    assert {event.rank for event in trace.events} == {0, 1}
    assert {event.step for event in trace.events} == set(range(3, 10))
    split = Strategy.load(folder / "strategy.yaml").gradients.split
    assert split == ByIndex(last=tuple(measured.plan.last))
    assert len(measured.plan.last) == measured.all_reduces[SLIPSTREAM]
    assert interfaces() == before
    assert running(name) == []


def test_interrupting_leaves_nothing(tmp_path: Path) -> None:
    argv = [*SLIPSTREAM_DEMO, *FAST, "--steps", "500", "--folder", str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as run:
        assert run.stdout is not None
        assert any(b"trace written" in line for line in run.stdout)  # all ranks train
        run.send_signal(signal.SIGINT)
        run.stdout.read()
        assert run.wait(30) == 130
    assert running(str(tmp_path)) == []


def test_the_table_holds_what_was_measured() -> None:
    console = Console(width=100)
    with console.capture() as shown:
        console.print(table(MEASURED))
    rows = [" ".join(line.split()) for line in shown.get().splitlines()]
    assert "iteration, median 0.800 s 0.650 s 18.1% faster" in rows
    assert "exposed exchange 0.500 s 0.350 s -150 ms" in rows
    assert "gradients -> all-reduces 62 -> 3 62 -> 4 +1" in rows
    assert "parameters after one step 7.0e-08 apart" in rows
    assert "final loss 0.0500 0.0600 +0.0100" in rows
    assert "held-out accuracy 97.0% 96.5% -0.5 points" in rows


def test_predictions_stand_next_to_measurements() -> None:
    console = Console(width=80)
    with console.capture() as shown:
        console.print(plan_table(MEASURED))
    rows = [" ".join(line.split()) for line in shown.get().splitlines()]
    assert rows[-2:] == ["default 5 0.700 s 0.800 s -12.5%", "planned 2 0.630 s 0.650 s -3.1%"]


@pytest.mark.parametrize(
    ("times", "said"),
    [
        ([0.6] * 9, "slipstream was faster in this run: it took 0.600 of DDP's time"),
        ([1.2] * 9, "slipstream was NOT faster in this run: it took 1.200 of DDP's time"),
        ([0.9, 1.0, 1.1] * 3, "Too close to say"),
        ([0.6] * 5, "Too few iterations to say"),
    ],
)
def test_the_verdict_is_honest(times: list[float], said: str) -> None:
    seconds = {ALONE: [0.5], DDP: [1.0] * len(times), SLIPSTREAM: times}
    assert verdict(replace(MEASURED, seconds=seconds)).startswith(said)


def test_numbers_survive_their_file_with_the_results_beside_them(tmp_path: Path) -> None:
    MEASURED.write(path := tmp_path / "demo.json")
    assert Measured.read(path) == MEASURED
    assert json.loads(path.read_text())["results"]["alone"] == 0.3


# The task.


def test_the_digits_are_all_there_and_no_held_out_one_is_trained_on() -> None:
    train, held_out = task.digits()
    assert [len(part) for part in (*train, *held_out)] == [1438, 1438, 359, 359]
    images, labels = (torch.cat(pair) for pair in zip(train, held_out, strict=True))
    assert images.shape == (1797, 3, task.PIXELS, task.PIXELS)
    assert len(images[:, 0].flatten(1).unique(dim=0)) == 1797
    assert labels.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_every_copy_of_the_model_starts_with_the_same_weights() -> None:
    one, other = task.ResNet18(), task.ResNet18()
    assert [p.shape for p in one.parameters()] == [p.shape for p in other.parameters()]
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))
    assert len(list(one.parameters())) == MEASURED.gradients
    assert sum(p.numel() for p in one.parameters()) == MEASURED.parameters


def test_batches_deal_each_pass_to_the_ranks() -> None:
    dataset = torch.arange(128.0).view(128, 1, 1, 1), torch.arange(128)
    parts = [task.batches(dataset, 6, rank, 2) for rank in range(2)]
    labels = [torch.stack([labels for _, labels in part]) for part in parts]
    assert all(part.shape == (6, task.BATCH) for part in labels)
    first_pass = torch.cat([part[:4].flatten() for part in labels])
    assert sorted(first_pass.tolist()) == list(range(128))
    assert all(torch.equal(images.flatten().long(), labels) for images, labels in parts[1])


def test_it_needs_no_package_but_those_of_slipstream() -> None:
    code = (
        "import sys, slipstream.cli.demo.training; "
        "print({'transformers', 'sklearn'} & {*sys.modules})"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"
