"""The part ``speed`` of local.py: seconds of an update on emulated hosts, and bytes on links."""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track

import slipstream
from benchmarks.accelerator import Device
from benchmarks.baselines import wrapped_in_ddp
from benchmarks.cases import Case, share_cores, wire_seconds
from benchmarks.iteration import LEARNING_RATE, Iterate, plain, quartiles
from benchmarks.local_settings import TORCHFT, settings_of
from benchmarks.record import finish
from benchmarks.torchft_diloco import DiLoCo
from benchmarks.turns import slowest
from slipstream.calibration.calibrate import SIZES, calibrate
from slipstream.cluster.connect import connect, from_environ
from slipstream.planner.forecast import Forecast
from slipstream.strategy import Int4Config, Int8Config, Strategy
from slipstream.strategy.local import CHOSEN
from slipstream.trace import chrome

SPEED: dict[str, dict[str, Any]] = {
    "sharded, a third replicated": {"transport": {"kind": "sharded", "replicated": 1 / 3}},
    "int8": {"codec": "int8"},
    "PowerSGD": {"codec": {"kind": "powersgd", "start_step": 0}},
}
EXCHANGING = 3
"""Updates of a turn of those that exchange at every update: the first ones learn the order in which
gradients become ready."""
ROUND = 16
"""Updates of a turn: a round of every local variant, and as many without exchange, since the first
ones after another variant's turn are slower."""
CHOOSING = 12 * ROUND
"""Updates after which ``auto`` has chosen: eight, and rounds in which it tries longer delays."""
FAST = (
    "16 steps",
    "16 steps, int8",
    "16 steps, int4",
    "8 steps, int4",
    "16 steps, 4 fragments, int4",
    "16 steps, 2 fragments, delay 2, int4",
    "8 steps, 4 fragments, delay 1, int4",
    "16 steps, 4 fragments, delay 1, int4",
    "16 steps, 4 fragments, delay 2, int4",
    "16 steps, 4 fragments, delay 4",
    "16 steps, 4 fragments, delay 4, int8",
    "16 steps, 4 fragments, delay 4, int4",
)
AUTO = "local: auto"


def predicted(case: Case) -> dict[str, float] | None:
    """Predict an update of every local variant from a trace and the network; None on other
    ranks."""
    network = calibrate(
        connect(from_environ(), torch.device("cpu")),
        sizes=SIZES[::2],
        seconds=6.0,
        rounds=3,
        codecs=[Int8Config(), Int4Config()],
        merging=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        model, loss_of = case.make()
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        strategy = {"trace": {"steps": 6, "folder": folder}}
        with slipstream.accelerate(model, optimizer, None, strategy) as session:
            for _ in range(8):
                session.backward(loss_of(session.model))
                session.step()
        if dist.get_rank() != 0:
            return None
        forecast = Forecast.of(chrome.read(Path(folder) / "trace.json"), network)
    return {
        f"local, {name}": forecast.seconds(Strategy.load({"local": settings_of(name)}))
        for name in FAST
    }


def sent_bytes() -> int:
    """Bytes that the interfaces of this host have sent, but for the loopback."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    rows = [line.split(":") for line in lines]
    return sum(int(counts.split()[8]) for name, counts in rows if name.strip() != "lo")


def speed(args: argparse.Namespace) -> None:
    """What one rank does; rank 0 writes."""
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = Device(args.compute_seconds) if args.compute == "accelerator" else None
    if device is None:
        share_cores(rank, world)
    case = Case(args.model, device)
    dist.init_process_group("gloo")
    if device is not None:
        device.fit(plain(*case.make()), args.compute_seconds)

    @contextmanager
    def alone() -> Iterator[Iterate]:
        yield plain(*case.make())

    @contextmanager
    def ddp(megabytes: float) -> Iterator[Iterate]:
        model, loss_of = case.make()
        yield plain(wrapped_in_ddp(model, megabytes), loss_of)

    @contextmanager
    def ours(strategy: Mapping[str, Any]) -> Iterator[Iterate]:
        model, loss_of = case.make()
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        with slipstream.accelerate(model, optimizer, None, dict(strategy)) as session:

            def iterate() -> None:
                session.backward(loss_of(session.model))
                session.step()

            yield iterate
            if (meetings := session.state_dict()["local"]) is not None:
                chosen.update(meetings["config"])

    @contextmanager
    def auto() -> Iterator[Iterate]:
        # It chooses once: it measures the network, and the first rounds, for several turns' time.
        with ours(chosen_by_auto or {"local": "auto"}) as iterate:
            if not chosen_by_auto:
                for _ in range(CHOOSING):
                    iterate()
            yield iterate
        if not chosen_by_auto:
            settings = {name: chosen[name] for name in CHOSEN}
            chosen_by_auto.update({"gradients": {}} if chosen["auto"] else {"local": settings})

    @contextmanager
    def torchft(delay: int) -> Iterator[Iterate]:
        model, loss_of = case.make()
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        rival = DiLoCo(model, optimizer, ROUND, delay)

        def iterate() -> None:
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()

        yield iterate
        rival.close()

    chosen: dict[str, Any] = {}
    chosen_by_auto: dict[str, Any] = {}
    made: dict[str, tuple[Callable[[], AbstractContextManager[Iterate]], int]] = {
        "no exchange": (alone, ROUND),
        **{f"DDP, {mb:g} MB": (partial(ddp, mb), EXCHANGING) for mb in args.ddp},
        **{name: (partial(ours, {"gradients": g}), EXCHANGING) for name, g in SPEED.items()},
        **{f"local, {n}": (partial(ours, {"local": settings_of(n)}), ROUND) for n in FAST},
        **{name: (partial(torchft, delay), ROUND) for name, delay in TORCHFT.items()},
        AUTO: (auto, ROUND),
    }
    names = ["no exchange", *args.variants] if args.variants else [*made]
    variants = {name: made[name] for name in names}
    forecast = predicted(case)
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    sent: dict[str, list[float]] = {name: [] for name in variants}
    quiet = Console(stderr=True, quiet=rank != 0)
    for number in track(range(args.rounds + 1), "rounds", console=quiet):
        for name in Random(number).sample([*variants], len(variants)):  # alike on all ranks
            make, updates = variants[name]
            # Made for its turn: each process group of gloo wakes its thread 100 times a second, and
            # those of all variants together made an update 0.02 s longer.
            with make() as iterate:
                for _ in range(updates):  # not timed
                    iterate()
                dist.barrier()
                before, begun = sent_bytes(), time.perf_counter()
                for _ in range(updates):
                    iterate()
                spent = (time.perf_counter() - begun) / updates
                bytes_sent = (sent_bytes() - before) / updates
            if number:
                seconds[name].append(slowest(spent))
                sent[name].append(bytes_sent)
    if rank == 0:
        ddp_alone = [name for name in variants if name.startswith("DDP")]
        best = min(ddp_alone, key=lambda name: median(seconds[name]))
        rows = []
        for name, values in seconds.items():
            low, middle, high = quartiles(values)
            ratios = [a / b for a, b in zip(seconds[best], values, strict=True)]
            rows.append(
                {
                    "name": name + " (best)" * (name == best),
                    "median": middle,
                    "low": low,
                    "high": high,
                    "gain": median(ratios),
                    "of_compute": median(seconds["no exchange"]) / middle,
                    "sent": median(sent[name]),
                    "predicted": (forecast or {}).get(name),
                }
            )
        entry: dict[str, Any] = {
            "kind": "speed",
            "model": args.model,
            "megabytes": case.num_bytes / 2**20,
            "nodes": world,
            "rate": args.rate,
            "round_trip_ms": args.round_trip_ms,
            "loss_percent": args.loss_percent,
            "keep_window": args.keep_window,
            "compute": args.compute,
            "wire_s": wire_seconds(args, case.num_bytes, world),
            "rounds": args.rounds,
            "rows": rows,
            "seconds": seconds,
            "auto": chosen_by_auto.get("local", {}),
        }
        finish(args.json, "local", entry)
    dist.barrier()
    dist.destroy_process_group()
