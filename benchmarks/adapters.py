"""The scripts of examples/frameworks on emulated hosts: as they were, and with an adapter.

    python -m benchmarks.adapters --rate 100mbit --json benchmarks/results/adapters-100mbit.json

Each script runs whole, one rank a host, all of them in an order shuffled each round.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
from collections import defaultdict
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import yaml
from rich.console import Console
from rich.progress import track

from benchmarks.record import finish
from slipstream.cli.ranks import run_on_hosts
from slipstream.testbed import Testbed, format_rate, parse_rate

SCRIPTS = Path(__file__).parents[1] / "examples/frameworks"
FRAMEWORKS = ("ddp", "fsdp2", "accelerate", "trainer", "lightning", "fabric")
INT8: dict[str, Any] = {"gradients": {"codec": {"kind": "int8", "error_feedback": True}}}
STRATEGIES: dict[str, Any] = {
    "defaults": {},
    "int8": INT8,
    "very_slow_network": "very_slow_network",
}
"""Given by the environment, so that the script stays as it is."""


def variants(framework: str) -> list[tuple[str, str]]:
    """The scripts of a framework, and the strategy of each."""
    if framework == "ddp":  # its hook has the codec, and no strategy
        return [("before", ""), ("after", "int8")]
    if framework == "fsdp2":  # no rank has a model with which it could train on its own
        return [("before", ""), ("after", "defaults"), ("after", "int8")]
    return [("before", ""), *(("after", name) for name in STRATEGIES)]


def measured(bed: Testbed, script: Path, strategy: str | None, updates: int) -> tuple[float, float]:
    """The loss, and the seconds of an update."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["UPDATES"] = str(updates)
        logs = Path(folder, "logs")
        code = run_on_hosts(bed, [str(script)], 1, logs, strategy)
        text = "".join(file.read_text() for file in logs.rglob("*") if file.is_file())
    found = re.search(r"loss (\S+), (\S+) s an update", text)
    if code or found is None:
        raise SystemExit(f"{script.name} ended with {code}:\n{text[-2000:]}")
    return float(found[1]), float(found[2])


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--frameworks", nargs="+", default=FRAMEWORKS, choices=FRAMEWORKS)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--updates", type=int, default=32)
    parser.add_argument("--json", help="write the result there, too")
    options = parser.parse_args()
    console, shuffle = Console(stderr=True), Random(0)
    seconds: dict[tuple[str, ...], list[float]] = defaultdict(list)
    losses: dict[tuple[str, ...], float] = {}
    every = [(framework, *v) for framework in options.frameworks for v in variants(framework)]
    with tempfile.TemporaryDirectory() as folder, Testbed(options.nodes, options.rate) as bed:
        files: dict[str, str | None] = {"": None}
        for name, strategy in STRATEGIES.items():
            files[name] = strategy if isinstance(strategy, str) else f"{folder}/{name}.yaml"
            if not isinstance(strategy, str):
                Path(f"{folder}/{name}.yaml").write_text(yaml.safe_dump(strategy))
        runs = shuffle.sample(every * options.rounds, len(every) * options.rounds)
        for key in track(runs, format_rate(parse_rate(options.rate)), console=console):
            framework, script, strategy = key
            path = SCRIPTS / f"{framework}_{script}.py"
            given = None if framework == "ddp" else files[strategy]
            losses[key], spent = measured(bed, path, given, options.updates)
            seconds[key].append(spent)
    rows = [
        {
            **dict(zip(("framework", "script", "strategy"), key, strict=True)),
            "seconds": sorted(seconds[key]),
            "times_as_fast": median(seconds[key[0], "before", ""]) / median(seconds[key]),
            "loss": losses[key],
        }
        for key in every
    ]
    shape = {name: getattr(options, name) for name in ("rate", "nodes", "rounds", "updates")}
    finish(options.json, "adapters", {**shape, "rows": rows})


if __name__ == "__main__":
    main()
