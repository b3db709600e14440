"""``slipstream demo`` as its users run it, in short, what its result says, and what it compares."""

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
import torch.distributed as dist
from rich.console import Console
from typer.testing import CliRunner

from slipstream.cli import main as cli
from slipstream.cli.demo import command, task
from slipstream.cli.demo.chart import bar_chart
from slipstream.cli.demo.codec_choice import CODECS, NONE, Candidate, predict, worth_trying
from slipstream.cli.demo.measured import (
    ALONE,
    DDP,
    EXACT,
    LOCAL,
    LOSSY,
    ROUNDING,
    Measured,
    headline,
)
from slipstream.cli.demo.progress import Bars
from slipstream.cli.demo.report import alternation, result
from slipstream.cli.demo.training import MEETINGS, in_turn
from slipstream.cli.demo.trainings import Ddp, DemoTraining, Local, Slipstream
from slipstream.errors import LaunchError
from slipstream.planner.iteration.plan import CommPlan
from slipstream.planner.iteration.simulate import simulate
from slipstream.planner.network.costs import CodecCost
from slipstream.strategy import DgcConfig, Strategy
from slipstream.testbed import unavailable
from slipstream.trace import chrome
from slipstream.trace.event import exchange_order
from tests.harness.ranks import Ranks
from tests.planner.networks import ethernet_profile
from tests.planner.test_ranking import workload
from tests.testbed.traces import interfaces

FAST = ["--nodes", "2", "--rate", "10gbit"]
SMALLER = 16, 32, 4
"""Width, pixels and batch of a training as deep as the demo's, in a tenth of its time."""
SMALL = f"""
import json, sys
# It needs slipstream's packages alone. A fork has imported others: as if they were not installed.
for name in [n for n in sys.modules if n.partition(".")[0] in ("transformers", "sklearn")]:
    sys.modules[name] = None
from slipstream.calibration import codec_cost
from slipstream.cli.demo import task, training
from slipstream.tuner import online_search
codec_cost.ROUNDS, codec_cost.WINDOW, codec_cost.SHORTEST = 1, 0.002, 0.002
training.CALIBRATION_SECONDS = online_search.CALIBRATION_SECONDS = 0.2
task.WIDTH, task.PIXELS, task.BATCH = {SMALLER}
training.main(**json.loads(sys.argv[1]))
"""
MEASURED = Measured(
    nodes=4,
    network="hosts at 1 Gbit/s",
    model="ResNet-18",
    gradients=62,
    parameters=11_181_642,
    batch=16,
    ddp_megabytes=25,
    transport="direct",
    reason="measured in turn",
    candidates=[Candidate(NONE, 1.0, 4, 1.1), Candidate("PowerSGD", 0.006, 1, 0.5)],
    tried={"PowerSGD": 0.55},
    codec="PowerSGD",
    seconds={
        ALONE: [0.3, 0.3],
        DDP: [1.2, 1.0, 0.8] * 3,
        EXACT: [1.2, 1.0, 0.8] * 3,
        LOSSY: [0.6, 0.5, 0.4] * 3,
        LOCAL: [0.48, 0.4, 0.32] * 3,
    },
    exchanges={DDP: 3, EXACT: 4, LOSSY: 1, LOCAL: 1},
    apart_after_one_step={EXACT: 7e-8, LOSSY: 3e-2, LOCAL: 2e-2},
    final_loss={DDP: 0.05, EXACT: 0.05, LOSSY: 0.06, LOCAL: 0.055},
    accuracy={DDP: 0.97, EXACT: 0.97, LOSSY: 0.965, LOCAL: 0.968},
    versions={},
)


def without_codec(measured: Measured) -> Measured:
    seconds = {name: times for name, times in measured.seconds.items() if name != LOSSY}
    exchanges = {name: measured.exchanges[name] for name in (DDP, EXACT, LOCAL)}
    return replace(measured, tried={}, codec=None, seconds=seconds, exchanges=exchanges)


def running(folder: str) -> list[str]:
    """Command lines of what still runs of a demo that writes into ``folder``."""
    lines = [" ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])]
    return [line for line in lines if folder in line]


@pytest.mark.timeout(600)  # several trainings of real ranks, one after the other
def test_it_trains_all_and_leaves_what_it_promises(
    tmp_path: Path, forks: str, monkeypatch, capfd
) -> None:
    name, before = f"demo-{uuid4().hex[:8]}", interfaces()
    folder = tmp_path / name
    (tmp_path / "small.py").write_text(SMALL)
    monkeypatch.setattr(command, "TRAINING", "small")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    argv = ["slipstream", "demo", *FAST, "--steps", "2", "--folder", name]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit) as ended:
        cli.main()

    said, told = capfd.readouterr()
    assert not ended.value.code, said + told
    *progress, shown = said.split("\nexact: ")
    assert len(progress) == 1, "the gain is not the first line of the result"
    assert max(map(len, said.splitlines())) <= 100
    assert " 31/31 " in progress[0]
    assert "kept" in told  # what auto chose, and why
    assert ("no emulated hosts" in said) == bool(unavailable())
    assert f"In the folder {name}:" in shown

    measured = Measured.read(folder / "demo.json")
    lossy = {LOSSY} if measured.codec else set()  # whether one pays depends on the machine
    assert set(measured.seconds) == {DDP, EXACT, LOCAL, ALONE} | lossy
    assert {len(measured.seconds[name]) for name in (DDP, EXACT, LOCAL)} == {2}
    assert len(measured.seconds[ALONE]) == 1
    assert set(os.listdir(folder)) - {"logs"} == {
        *("trace.json", "cluster.yaml", "exact.yaml", "overview.txt", "demo.json", "report.html"),
        *("local.yaml", *(["lossy.yaml"] if lossy else [])),
    }
    # Two summands have one order: both must do the same, bit for bit.
    assert measured.apart_after_one_step[EXACT] == 0
    assert measured.final_loss[EXACT] == measured.final_loss[DDP]
    assert measured.accuracy[EXACT] == measured.accuracy[DDP]
    overview = (folder / "overview.txt").read_text("utf-8")
    assert f"62 gradients -> {measured.exchanges[EXACT]} " in overview  # a longer cell is broken
    trace = chrome.read(folder / "trace.json")
    assert {event.rank for event in trace.events} == {0, 1}
    assert len({event.step for event in trace.events}) == 5
    kept = Strategy.load(folder / "exact.yaml").gradients
    assert kept.transport.kind == measured.transport
    last = max(event.step for event in trace.events)
    sent = [e for e in trace.events if (e.rank, e.step) == (0, last) and exchange_order(e.name)]
    # a segment of which a part is sharded and a part is not has two
    by_segment = {event.name: event.args["collectives"] for event in sent}
    assert len(trace.meta["segments"]) == len(by_segment)
    assert sum(by_segment.values()) == measured.exchanges[EXACT]
    assert [one.codec for one in measured.candidates] == [NONE, *CODECS]
    assert measured.codec in (measured.tried or {None: 0.0})
    assert interfaces() == before
    assert running(name) == []


def test_a_rate_without_links_is_refused(tmp_path: Path) -> None:
    words = ["demo", "--loopback", "--rate", "300mbit", "--folder", str(tmp_path / "demo")]
    failure = CliRunner().invoke(cli.app, words).exception
    assert isinstance(failure, LaunchError)
    assert "--rate has no effect with --loopback" in str(failure)
    assert not (tmp_path / "demo").exists()


def test_interrupting_leaves_nothing(tmp_path: Path, forks: str) -> None:
    """On loopback; on emulated hosts: test_testbed.py."""
    argv = [forks, "-m", "slipstream", "demo", "--nodes", "2", "--loopback", "--steps", "2"]
    argv += ["--folder", str(tmp_path)]
    environment = os.environ | {"FORCE_COLOR": "1"}  # as in a terminal: progress is shown
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(argv, env=environment, bufsize=0, **pipes) as run:
        assert run.stdout is not None
        said = b""
        while b"2/31" not in said:  # all ranks train
            part = run.stdout.read(4096)
            assert part, said
            said += part
        assert b"no emulated hosts: --loopback" in said
        run.send_signal(signal.SIGINT)
        run.stdout.read()
        assert run.wait(90) == 130
    assert running(str(tmp_path)) == []


# The result.


def shown(measured: Measured, width: int = 80) -> list[str]:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(result(measured, console.width))
    return [" ".join(line.split()) for line in capture.get().splitlines()]


def test_the_result_holds_what_was_measured() -> None:
    rows = shown(MEASURED)
    assert rows[0] == "exact: 1.00x as fast as DDP (1.00 .. 1.00), too close to say; with PowerSGD"
    assert "exposed exchange 0.700 s 0.700 s 0.200 s 0.100 s" in rows
    assert "gradients -> exchanges 62 -> 3 62 -> 4 62 -> 1 62 -> 1" in rows
    assert "from DDP after one step 7e-08 3e-02 2e-02" in rows
    assert "final loss 0.0500 0.0500 0.0600 0.0550" in rows
    assert "held-out accuracy 97.0% 97.0% 96.5% 96.8%" in rows
    assert "none: exact, direct 100.0% 4 1.100 s 1.000 s +10.0%" in rows
    assert "PowerSGD 0.6% 1 0.500 s 0.550 s 0.500 s +0.0%" in rows


def test_where_no_codec_pays_the_result_says_so() -> None:
    rows = shown(without_codec(MEASURED), width=100)
    assert any("too close to say; no codec is predicted to pay here" in row for row in rows)
    assert "No codec runs: none is predicted to save 5%." in rows
    assert not any("PowerSGD, lossy" in row for row in rows)


@pytest.mark.parametrize(
    ("times", "said"),
    [
        ([0.5] * 9, "exact: 2.00x as fast as DDP (2.00 .. 2.00); "),
        ([2.0] * 9, "exact: 0.50x as fast as DDP (0.50 .. 0.50), slower; "),
        ([0.8, 1.0, 1.25] * 3, "exact: 1.00x as fast as DDP (0.80 .. 1.25), too close to say; "),
        ([0.5] * 5, "exact: 2.00x as fast as DDP (too few iterations to say); "),
    ],
)
def test_the_headline_is_honest(times: list[float], said: str) -> None:
    ones = [1.0] * len(times)
    seconds = {ALONE: [0.5], DDP: ones, EXACT: times, LOSSY: ones, LOCAL: ones}
    assert headline(replace(MEASURED, seconds=seconds)).startswith(said)


def test_a_training_that_is_not_exact_is_called_so() -> None:
    apart = MEASURED.apart_after_one_step | {EXACT: 2 * ROUNDING}
    wrong = replace(MEASURED, apart_after_one_step=apart)
    assert any("NOT exact: 2.0e-05 from DDP after one step" in row for row in shown(wrong))
    assert not wrong.is_exact
    assert MEASURED.is_exact


@pytest.mark.parametrize("width", [60, 80, 100])
def test_bars_are_as_long_as_the_times_and_lossy_ones_differ_without_colours(width: int) -> None:
    chart = str(bar_chart(alternation(MEASURED).trainings, width)).splitlines()
    assert all(len(row) <= width for row in chart)
    ddp, exact, lossy, local, alone = chart
    assert (ddp.count("█"), exact.count("█")) == (exact.count("█"), ddp.count("█"))
    assert abs(lossy.count("▒") - ddp.count("█") / 2) <= 1
    assert ddp.index("┼") == exact.index("┼") > lossy.index("┼") > alone.index("┼")
    assert "(lossy)" in lossy
    assert "(lossy)" in local
    assert lossy.index("┼") > local.index("┼") > alone.index("┼")


def test_numbers_survive_their_file_with_the_gains_beside_them(tmp_path: Path) -> None:
    MEASURED.write(path := tmp_path / "demo.json")
    assert Measured.read(path) == MEASURED
    gains = json.loads(path.read_text())["gains"]
    assert gains[LOSSY] == {"times": 2.0, "low": 2.0, "high": 2.0}
    without_codec(MEASURED).write(path)
    assert Measured.read(path) == without_codec(MEASURED)


# The codec.


def test_codecs_run_from_the_first_update_on() -> None:
    assert [
        c for c in CODECS.values() if getattr(c, "start_step", 0) or isinstance(c, DgcConfig)
    ] == []


@pytest.mark.parametrize(
    ("gigabits", "coding", "chosen"),
    [(0.1, 1e-12, ["PowerSGD"]), (0.1, 1e-6, []), (1000.0, 1e-12, [])],
    ids=["a slow network", "slow codecs", "a fast network"],
)
def test_codecs_are_tried_where_they_pay(gigabits: float, coding: float, chosen: list[str]) -> None:
    ratios = zip(CODECS.values(), (0.5, 0.25, 0.01), strict=True)
    costs = {c.kind: CodecCost(ratio=r, encode=coding, decode=coding) for c, r in ratios}
    network = ethernet_profile(gigabits=gigabits).model_copy(update={"codecs": costs})
    trace = simulate(workload(), CommPlan.of(Strategy(), workload().gradients), network, steps=3)
    candidates = predict(trace, network)
    assert [(one.codec, one.sent) for one, _ in candidates] == [
        *((NONE, 1.0), ("bf16", 0.5), ("int8", 0.25), ("PowerSGD", 0.01))
    ]
    tried = worth_trying(candidates)
    assert [one.codec for one, _ in tried] == chosen
    assert [strategy.gradients.codec for _, strategy in tried] == [CODECS[name] for name in chosen]


# The trainings.


def train_in_turn(transport: str) -> dict[str, object]:
    """Two updates of the exact training alone, then three of all."""
    torch.set_num_threads(1)
    task.WIDTH, task.PIXELS, task.BATCH = SMALLER
    train, _ = task.digits()
    batches = task.batches(train, 5, dist.get_rank(), dist.get_world_size())
    coded = Strategy.load({"gradients": {"codec": "half", "transport": transport}})
    exact = Slipstream(5, Strategy.load({"gradients": {"transport": transport}}))
    for batch in batches[:2]:
        exact.train(batch)
    trainings = {
        DDP: Ddp(5, 8),
        EXACT: exact,
        LOSSY: Slipstream(5, coded),
        LOCAL: Local(5, MEETINGS),
        ALONE: DemoTraining(5),
    }
    apart = in_turn(trainings, batches[2:], Bars(Console(quiet=True)))
    exchanging = [one for name, one in trainings.items() if name != ALONE]
    rates = {one.optimizer.param_groups[0]["lr"] for one in exchanging}
    for one in trainings.values():
        one.close()
    return {
        "apart": apart,
        "rates": rates,
        "losses": {name: torch.stack(one.losses).tolist() for name, one in trainings.items()},
        "timed": {name: len(one.seconds) for name, one in trainings.items()},
    }


@pytest.mark.parametrize("transport", ["flat", "sharded"])  # what auto may have chosen
def test_all_continue_from_the_exact_training_and_only_the_lossy_one_departs(
    two: Ranks, transport: str
) -> None:
    for got in two.run(train_in_turn, transport):
        assert got["apart"][EXACT] == 0
        assert got["apart"][LOSSY] > 10 * ROUNDING  # the check would see what a codec does
        losses = got["losses"]
        assert losses[EXACT] == losses[DDP]
        assert losses[LOSSY][:3] == losses[DDP][:3]  # two before the copies part, one after
        assert losses[LOSSY][3:] != losses[DDP][3:]
        assert len(got["rates"]) == 1
        assert losses[LOCAL][:3] == losses[DDP][:3]
        assert got["apart"][LOCAL] > 10 * ROUNDING
        assert got["timed"] == {DDP: 1, EXACT: 1, LOSSY: 1, LOCAL: 1, ALONE: 1}


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
