"""The program of each rank of the demo; rank 0 shows progress and leaves all files in the folder.

1. The exact training does its first updates under ``strategy: auto``, which tries transports and
   splits in turn and keeps the fastest; then a few iterations of it are traced.
2. DDP tries bucket sizes on copies.
3. Network and codecs are measured, an iteration with each codec is predicted, and those that are
   predicted to be close are tried on copies.
4. DDP, the lossy trainings and one without any exchange continue from the exact one. Every timed
   step gives the same batch to all of them, in random order, between barriers.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import TaskID

from slipstream.calibration.calibrate import SIZES, calibrate
from slipstream.cli.demo import task
from slipstream.cli.demo.codec_choice import CODECS, Candidate, predict, worth_trying
from slipstream.cli.demo.measured import ALONE, DDP, EXACT, LOCAL, LOSSY, Measured
from slipstream.cli.demo.progress import Bars
from slipstream.cli.demo.task import DemoBatch
from slipstream.cli.demo.trainings import Ddp, DemoTraining, Local, Slipstream, distance
from slipstream.cluster.connect import connect, from_environ
from slipstream.files.write import write_whole
from slipstream.planner.iteration.traced import traced_strategy
from slipstream.planner.iteration.transport_cost import curves_of, transport_kind
from slipstream.strategy import PowerSgdConfig, Strategy
from slipstream.strategy.yaml import format_yaml
from slipstream.trace import chrome
from slipstream.tuner.exact_search import reason
from slipstream.tuner.turns import SETTLING
from slipstream.version import __version__

SEARCH, SHORTEST_SEARCH, RECORDED = 32, 24, 5
DDP_MEGABYTES = (25, 8)
TRIALS, UNTIMED = 4, 2
"""Iterations of each bucket size and each codec; DDP rebuilds its buckets in the first ones."""
CALIBRATION_SECONDS = 1.0
ALONE_EVERY = 3
MEETINGS = Strategy.load({"local": {"steps": 10, "fragments": 10, "codec": "int8"}})
"""A tenth of the model meets at every update, so that iterations are alike; none is hidden behind
another's turn."""


class Planned(NamedTuple):
    """The exact training's outcome with its reason, the predictions of codecs, and those to try."""

    exact: Strategy
    reason: str
    candidates: list[Candidate]
    worth_trying: dict[str, Strategy]


def main(steps: int, folder: str, network: str, terminal: bool, columns: int) -> None:
    """Be one rank of the demo; the arguments are those of `command`."""
    torch.set_num_threads(1)
    is_first = os.environ["RANK"] == "0"
    console = Console(force_terminal=terminal, width=columns, quiet=not is_first)
    search = min(max(2 * steps, SHORTEST_SEARCH), SEARCH)
    first = search + SETTLING + RECORDED
    updates = first + SETTLING + steps
    with Bars(console) as bars:
        searching = bars.begin("slipstream's choices", first)  # before anything slow
        dist.init_process_group("gloo")
        train, held_out = task.digits()
        batches = task.batches(train, updates, dist.get_rank(), dist.get_world_size())
        exact = Slipstream(updates, searching_strategy(search, folder))
        for batch in batches[:first]:
            exact.train(batch)
            bars.trained(searching, exact)
        trainings: dict[str, DemoTraining] = {DDP: best_ddp(updates, batches, bars), EXACT: exact}
        planned = plan(Path(folder), bars)
        tried = try_codecs(planned, updates, batches, bars)
        if tried:
            strategy = planned.worth_trying[fastest(tried)]
            trainings[LOSSY] = Slipstream(updates, strategy)
        trainings[LOCAL] = Local(updates, MEETINGS)
        trainings[ALONE] = DemoTraining(updates)
        apart = in_turn(trainings, batches[first:], bars)
    measured = collect(trainings, planned, tried, apart, network, held_out)
    if is_first:
        measured.write(Path(folder, "demo.json"))
        leave_strategies(Path(folder), planned.exact, trainings, first)
    dist.barrier()
    for training in trainings.values():
        training.close()
    dist.destroy_process_group()


def searching_strategy(updates: int, folder: str) -> Strategy:
    """The preset ``auto`` with a short search, and a trace of what it chose."""
    transport = {"kind": "auto", "updates": updates}
    trace = {"skip": 0, "steps": RECORDED, "folder": folder}
    return Strategy.load(
        {"gradients": {"split": "optimal", "transport": transport}, "trace": trace}
    )


def best_ddp(updates: int, batches: Sequence[DemoBatch], bars: Bars) -> Ddp:
    """DDP with the bucket size that is fastest here."""
    tried = {f"{size} MB": Ddp(updates, size) for size in DDP_MEGABYTES}
    medians = try_out(tried, batches, bars.begin("DDP's buckets", TRIALS * len(tried)), bars)
    best = tried[fastest(medians)]
    best.seconds.clear()
    return best


def try_codecs(
    planned: Planned, updates: int, batches: Sequence[DemoBatch], bars: Bars
) -> dict[str, float]:
    """Seconds of an iteration with each codec worth trying."""
    if not planned.worth_trying:
        return {}
    tried = {name: Slipstream(updates, one) for name, one in planned.worth_trying.items()}
    medians = try_out(tried, batches, bars.begin("codecs", TRIALS * len(tried)), bars)
    for training in tried.values():
        training.close()
    return medians


def try_out(
    tried: Mapping[str, DemoTraining], batches: Sequence[DemoBatch], bar: TaskID, bars: Bars
) -> dict[str, float]:
    """Median seconds of a few iterations of each, in turn."""
    for batch in batches[:TRIALS]:
        for training in tried.values():
            training.train_timed(batch)
            bars.trained(bar, training)
    return {name: median(training.seconds[UNTIMED:]) for name, training in tried.items()}


def plan(folder: Path, bars: Bars) -> Planned:
    """Measure the network and the codecs; rank 0 chooses the codec from the trace."""
    bar = bars.begin("network and codecs", 100)
    ranks = connect(from_environ(), torch.device("cpu"))
    trace = chrome.read(folder / "trace.json") if ranks.rank == 0 else None
    exact: Strategy = agreed(None if trace is None else traced_strategy(trace))
    network = calibrate(
        ranks,
        sizes=SIZES[::2],
        seconds=CALIBRATION_SECONDS,
        rounds=3,
        curves=curves_of([transport_kind(exact.gradients.transport)]),
        codecs=[*CODECS.values()],
        progress=lambda share, what: bars.update(bar, completed=round(99 * share), result=what),
    )
    planned = None
    if trace is not None:
        network.save(folder / "cluster.yaml")
        candidates = predict(trace, network)
        worth = {one.codec: strategy for one, strategy in worth_trying(candidates)}
        planned = Planned(exact, reason(trace), [one for one, _ in candidates], worth)
    bars.update(bar, completed=100, result="")
    result: Planned = agreed(planned)
    return result


def agreed(value: Any) -> Any:
    """Give rank 0's answer to all ranks."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def fastest(seconds: Mapping[str, float]) -> str:
    """The name of the smallest."""
    return min(seconds, key=seconds.__getitem__)


def in_turn(
    trainings: Mapping[str, DemoTraining], batches: Sequence[DemoBatch], bars: Bars
) -> dict[str, float]:
    """Train all on all batches, and time them; the first SETTLING ones are not timed.

    Returns:
        How far each is from DDP after the first step, of those that exchange.
    """
    exact = trainings[EXACT]
    shown = {name: bars.begin(name, len(batches)) for name in trainings if name != ALONE}
    for training in trainings.values():
        if training is not exact:
            training.continue_from(exact)
    apart: dict[str, float] = {}
    order = random.Random(task.SEED)  # the same on all ranks
    for step, batch in enumerate(batches):
        for name in order.sample(list(trainings), len(trainings)):
            training = trainings[name]
            if step < SETTLING:
                training.train(batch)
            elif name != ALONE or (step - SETTLING) % ALONE_EVERY == 0:
                training.train_timed(batch)
            if name in shown:
                bars.trained(shown[name], training)
        apart = apart or {n: distance(trainings[n], trainings[DDP]) for n in shown if n != DDP}
    return apart


def collect(
    trainings: Mapping[str, DemoTraining],
    planned: Planned,
    tried: Mapping[str, float],
    apart: Mapping[str, float],
    network: str,
    held_out: DemoBatch,
) -> Measured:
    """Collect all that was measured, over all ranks; a collective."""
    ddp = trainings[DDP]
    assert isinstance(ddp, Ddp)
    exchanging = {name: one for name, one in trainings.items() if name != ALONE}
    for training in exchanging.values():
        training.share_buffers()
    parameters = list(ddp.model.parameters())
    return Measured(
        nodes=dist.get_world_size(),
        network=network,
        model="ResNet-18",
        gradients=len(parameters),
        parameters=sum(p.numel() for p in parameters),
        batch=task.BATCH,
        ddp_megabytes=ddp.megabytes,
        transport=planned.exact.gradients.transport.kind,
        reason=planned.reason,
        candidates=planned.candidates,
        tried=dict(tried),
        codec=fastest(tried) if tried else None,
        seconds={name: training.seconds for name, training in trainings.items()},
        exchanges={n: one.exchanges for n, one in exchanging.items()},
        apart_after_one_step=dict(apart),
        final_loss={name: one.final_loss() for name, one in exchanging.items()},
        accuracy={n: one.accuracy(held_out) for n, one in exchanging.items()},
        versions={"slipstream": __version__, "torch": torch.__version__},
    )


def leave_strategies(
    folder: Path, exact: Strategy, trainings: Mapping[str, DemoTraining], first: int
) -> None:
    """Write the strategies, and what their settings became.

    In PowerSGD's file the ``first`` updates are dense, as they were here.
    """
    of_slipstream = {n: one for n, one in trainings.items() if isinstance(one, Slipstream)}
    write_whole(folder / "exact.yaml", settings(exact))
    (folder / "lossy.yaml").unlink(missing_ok=True)
    if LOSSY in of_slipstream:
        strategy = of_slipstream[LOSSY].session.strategy
        codec = strategy.gradients.codec
        if isinstance(codec, PowerSgdConfig):
            late = codec.model_copy(update={"start_step": first})
            strategy = strategy.with_gradients(codec=late)
        write_whole(folder / "lossy.yaml", settings(strategy))
    write_whole(folder / "local.yaml", format_yaml(MEETINGS.document()))
    reports = [one.session.report() for one in of_slipstream.values()]
    write_whole(folder / "overview.txt", "\n".join(reports) + "\n")


def settings(strategy: Strategy) -> str:
    """Write how a strategy exchanges gradients as YAML, defaults included."""
    gradients = strategy.document(full=True)["gradients"]
    chosen = {name: gradients[name] for name in ("split", "transport", "codec") if gradients[name]}
    return format_yaml({"gradients": chosen})


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
