"""Every table of the command line fits a terminal of 80 columns, and cuts no heading or number."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType

from slipstream.cli import launch, scale, testbed
from slipstream.cli.demo import report as demo
from slipstream.cli.doctor.report import report
from slipstream.cli.plan import memory, tables
from slipstream.cli.tune import display
from slipstream.cluster.launcher import LaunchSpec
from slipstream.planner.network.costs import CodecCost, HalfSpeed
from slipstream.planner.search.candidates import every
from slipstream.planner.search.ranking import ScaleOutPoint, rank, recommended
from slipstream.strategy import Strategy, overview
from slipstream.testbed import LinkCheck, Node, Testbed
from slipstream.tuner.trial_log import Trial, Tuned
from tests.cli.test_demo import MEASURED
from tests.planner.networks import ring_profile
from tests.planner.test_ranking import UNEVEN


def plan_ranking() -> RenderableType:
    workload, network = UNEVEN
    base = Strategy()
    strategies = every(workload, network, base)
    ranked = rank(strategies, workload, network, base)
    return tables.ranking(ranked, recommended(ranked, base), base, network)


def plan_curve(over: str) -> RenderableType:
    workload, network = UNEVEN
    [prediction] = rank([Strategy()], workload, network, Strategy())
    point = ScaleOutPoint(nodes=4096, ranks=32768, rate=1e11, prediction=prediction)
    return tables.curve("by_index 6/12/17/22/29, accumulate 4: other clusters", [point], over)


def plan_memory() -> Mapping[str, Any]:
    size = {"fixed": 999 * 2**20, "each": 999 * 2**20}
    names = ("keep all", "recompute all but products", "recompute all + offload")
    return {
        **dict.fromkeys(("parameters", "gradients", "optimizer"), 999 * 2**30),
        "passing": size,
        "blocks": [{"path": f"model.decoder.layers.{n}", **size} for n in range(48)],
        "techniques": [{"name": name, "activations": size, "batch": 12345} for name in names],
    }


def doctor_network() -> RenderableType:
    cost = CodecCost(encode=1e-9, decode=1e-9, startup=1e-3, ratio=0.25)
    measured = {"codecs": {"powersgd": cost}, "half_speed": HalfSpeed(dense=2, convolutional=1.5)}
    return report(ring_profile(64, 8).model_copy(update=measured))


def tune() -> RenderableType:
    names = ("by_bytes 8 (first 1, last 1)", "by_index 6/12/17/22/29/35/... (12), accumulate 4")
    trials = [
        Trial(
            name, {}, 1.1, 1.2345, 0.0123, "predicted 12.3% faster, reordered, batch x4", "measured"
        )
        for name in names
    ]
    path = "/home/somebody/trainings/slipstream-logs/tune-2026-01-01_00-00-00-1234567/05/output.log"
    reason = f"exit code 1: slipstream.errors.ModelError: Net has no such chain (see {path})"
    trials.append(Trial("compile", {}, None, None, None, reason, "failed"))
    return display.table(Tuned(Strategy(), True, "", (), tuple(trials)))


def scaling() -> RenderableType:
    points = [
        scale.ScalePoint(n, 1.23456, 12345.6, 123.45, 0.9876, 0.8765, 0.1234) for n in (1, 128)
    ]
    return scale._table(points, "samples")


def links_drawn(monkeypatch: pytest.MonkeyPatch) -> str:
    links = [LinkCheck(Node(n, f"node{n}", f"198.18.0.{n + 1}"), 1e9, 9e8, 1e-3) for n in (1, 63)]
    monkeypatch.setattr(Testbed, "check", lambda _: links)
    console = Console(width=80)
    monkeypatch.setattr(testbed, "console", console)
    with console.capture() as shown:
        testbed._check(Testbed(2))
    return shown.get()


def launched() -> RenderableType:
    spec = LaunchSpec(
        script="train.module",
        module=True,
        log_dir=Path("slipstream-logs", "2026-01-01_00-00-00-1234567"),
        nnodes=128,
        rdzv_endpoint="a-node-with-a-long-name.example.org:29500",
        variables={"OMP_NUM_THREADS": "1"},
    )
    return launch._environment(spec)


TABLES: dict[str, tuple[Callable[[], RenderableType], str]] = {
    "plan": (plan_ranking, "iteration 80% ratio efficiency segments MB strategy"),
    "plan, nodes": (lambda: plan_curve("nodes"), "nodes ranks efficiency iteration samples/s"),
    "plan, rate": (lambda: plan_curve("rates"), "rate ranks efficiency iteration samples/s"),
    "plan --memory": (
        lambda: memory.by_technique(plan_memory(), "title"),
        "batch against a sample activations total technique",
    ),
    "plan --memory, parts": (
        lambda: memory.by_part(plan_memory(), "adamw"),
        "fixed a sample part",
    ),
    "doctor network": (doctor_network, "collective bytes ms Gbit/s bus Gbit/s fit error"),
    "doctor network, codecs": (
        doctor_network,
        "codec all-reduces save ms encode ms decode ms sent MB",
    ),
    "tune": (tune, "measured spread predicted strategy why"),
    "scale": (scaling, "ranks speed-up efficiency samples/s iteration ms compute exposed"),
    "demo": (lambda: demo.table(MEASURED), "DDP exact PowerSGD, lossy local, lossy"),
    "demo, codecs": (
        lambda: demo.predictions(MEASURED),
        "codec bytes sent exchanges predicted tried in turn error",
    ),
    "launch": (launched, "distributed environment"),
    "strategy show": (lambda: overview(Strategy()), "setting value exactness note"),
}


def drawn(table: RenderableType) -> str:
    console = Console(width=80)
    with console.capture() as shown:
        console.print(table)
    return shown.get()


def headings(text: str) -> list[str]:
    """The lines of a drawing without frames and without repeated spaces."""
    bare = "".join(" " if character in "┃│╭╮─" else character for character in text)
    return [" ".join(line.split()) for line in bare.splitlines()]


@pytest.mark.parametrize("name", TABLES)
def test_no_heading_and_no_cell_is_cut_at_80_columns(name: str) -> None:
    draw, heading = TABLES[name]
    text = drawn(draw())
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert heading in headings(text)


def test_the_links_of_a_testbed_fit_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    text = links_drawn(monkeypatch)
    assert "host from node0 to node0 round trip address" in headings(text)
    assert "node63 1 Gbit/s 900 Mbit/s 1.00 ms 198.18.0.64" in headings(text)


def test_a_strategy_takes_at_most_two_lines_of_the_plan_and_one_for_its_exactness() -> None:
    lines = drawn(plan_ranking()).splitlines()
    rows = [line for line in lines if " MB" not in line and line[:9].strip()[:1].isdigit()]
    indices = [lines.index(row) for row in rows]
    assert len(rows) >= 10
    assert all(after - before <= 3 for before, after in pairwise(indices))


def test_numbers_stand_before_names() -> None:
    for name, number in {"plan": "iteration", "tune": "measured"}.items():
        assert TABLES[name][1].startswith(number)
        assert "strategy" in TABLES[name][1]
