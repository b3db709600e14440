"""What each rank of the demo runs; rank 0 shows progress and leaves all files in the folder.

1. The exact training does its first updates under ``strategy: auto``, which tries transports and
   splits in turn and keeps the fastest; then a few iterations of it are traced.
2. DDP tries bucket sizes on copies.
3. The network and the codecs are measured, and the codec is chosen.
4. DDP, the lossy training and one without any exchange continue from the exact one. Every timed
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

from slipstream.calibration.calibrate import SIZES, calibrate
from slipstream.cli.demo import codec_choice, task
from slipstream.cli.demo.codec_choice import CODECS, Candidate
from slipstream.cli.demo.measured import ALONE, DDP, EXACT, LOSSY, Measured
from slipstream.cli.demo.progress import Bars
from slipstream.cli.demo.task import Batch
from slipstream.cli.demo.trainings import Ddp, Slipstream, Training, distance
from slipstream.cluster.connect import connect, from_environ
from slipstream.planner.candidates import with_gradients
from slipstream.planner.ranking import traced_strategy
from slipstream.planner.transport_cost import curves_of, transport_kind
from slipstream.strategy import PowerSgd, Strategy
from slipstream.strategy.yaml import format_yaml
from slipstream.trace import chrome
from slipstream.tuner.one_start import reason
from slipstream.tuner.search_space import SETTLING
from slipstream.version import __version__

SEARCH, SHORTEST_SEARCH, RECORDED = 32, 24, 5
DDP_MEGABYTES = (25, 8)
DDP_TRIALS, DDP_UNTIMED = 5, 2
"""Iterations with each size; DDP rebuilds its buckets in the first ones."""
CALIBRATION_SECONDS = 2.0
ALONE_EVERY = 3


class Planned(NamedTuple):
    """What was chosen, and why; the same on all ranks.

    ``lossy`` is the codec that pays, and its strategy; None: none does.
    """

    exact: Strategy
    reason: str
    candidates: list[Candidate]
    lossy: tuple[Candidate, Strategy] | None


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
        ddp = best_ddp(updates, batches, bars)
        planned = plan(Path(folder), bars)
        trainings: dict[str, Training] = {DDP: ddp, EXACT: exact}
        if planned.lossy is not None:
            trainings[LOSSY] = Slipstream(updates, planned.lossy[1])
        trainings[ALONE] = Training(updates)
        apart = in_turn(trainings, batches[first:], bars)
    measured = collect(trainings, planned, apart, network, held_out)
    if is_first:
        measured.write(Path(folder, "demo.json"))
        leave_strategies(Path(folder), planned, trainings, first)
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


def best_ddp(updates: int, batches: Sequence[Batch], bars: Bars) -> Ddp:
    """DDP with the bucket size that is fastest here: the sizes take turns on copies."""
    bar = bars.begin("DDP's bucket sizes", DDP_TRIALS * len(DDP_MEGABYTES))
    tried = [Ddp(updates, megabytes) for megabytes in DDP_MEGABYTES]
    for batch in batches[:DDP_TRIALS]:
        for training in tried:
            training.train_timed(batch)
            bars.trained(bar, training)
    best = min(tried, key=lambda training: median(training.seconds[DDP_UNTIMED:]))
    best.seconds.clear()
    return best


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
        candidates = codec_choice.predict(trace, network)
        lossy = codec_choice.best(candidates)
        planned = Planned(exact, reason(trace), [one for one, _ in candidates], lossy)
    bars.update(bar, completed=100, result="")
    result: Planned = agreed(planned)
    return result


def agreed(value: Any) -> Any:
    """What rank 0 says, on all ranks."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def in_turn(
    trainings: Mapping[str, Training], batches: Sequence[Batch], bars: Bars
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
    trainings: Mapping[str, Training],
    planned: Planned,
    apart: Mapping[str, float],
    network: str,
    held_out: Batch,
) -> Measured:
    """All that was measured, over all ranks; a collective."""
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
        codec=planned.lossy and planned.lossy[0].codec,
        seconds={name: training.seconds for name, training in trainings.items()},
        exchanges={n: one.exchanges for n, one in exchanging.items()},
        apart_after_one_step=dict(apart),
        final_loss={name: one.final_loss() for name, one in exchanging.items()},
        accuracy={n: task.accuracy(one.model, held_out) for n, one in exchanging.items()},
        versions={"slipstream": __version__, "torch": torch.__version__},
    )


def leave_strategies(
    folder: Path, planned: Planned, trainings: Mapping[str, Training], first: int
) -> None:
    """Write the strategies, and what their settings became.

    PowerSGD's file says that the ``first`` updates are dense, as they were here.
    """
    (folder / "exact.yaml").write_text(settings(planned.exact))
    lossy = folder / "lossy.yaml"
    lossy.unlink(missing_ok=True)
    if planned.lossy is not None:
        strategy = planned.lossy[1]
        codec = strategy.gradients.codec
        if isinstance(codec, PowerSgd):
            late = codec.model_copy(update={"start_step": first})
            strategy = with_gradients(strategy, codec=late)
        lossy.write_text(settings(strategy))
    reports = [t.session.report() for t in trainings.values() if isinstance(t, Slipstream)]
    (folder / "overview.txt").write_text("\n".join(reports) + "\n")


def settings(strategy: Strategy) -> str:
    """How a strategy exchanges gradients, as YAML, with what equals the defaults."""
    gradients = strategy.document(full=True)["gradients"]
    chosen = {name: gradients[name] for name in ("split", "transport", "codec") if gradients[name]}
    return format_yaml({"gradients": chosen})


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
