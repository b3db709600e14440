"""What each rank of the demo runs: the same training with plain DDP and with slipstream, in turn.

Rank 0 shows progress, and leaves trace, overview and numbers in the folder; the results are drawn
by the command.

Every timed step gives the same batch to both trainings, in random order, between barriers; an
iteration takes as long as on its slowest rank. At every third step a third copy of the model,
without any exchange, takes its turn. The warm-up before is training too: there slipstream records
its trace, a block of iterations without barriers, as in any training; then the network is measured,
the split is planned, and a new session applies it.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LinearLR

from slipstream.calibration.calibrate import SIZES, calibrate
from slipstream.cli.demo import task
from slipstream.cli.demo.report import ALONE, DDP, SLIPSTREAM, Measured, Planned
from slipstream.cli.demo.task import Batch, ResNet18, cross_entropy
from slipstream.cluster.connect import connect, from_environ
from slipstream.planner.candidates import optimal_split
from slipstream.planner.comm_plan import Plan
from slipstream.planner.contention_fit import prepare
from slipstream.planner.cost import NetworkProfile
from slipstream.planner.simulate import predict
from slipstream.session.accelerate import accelerate
from slipstream.session.session import Session
from slipstream.strategy import Strategy
from slipstream.trace import Trace, chrome
from slipstream.tuner.trials import iterations
from slipstream.version import __version__

LEARNING_RATE, MOMENTUM = 0.02, 0.9
WARMUP, RECORDED = 10, 7  # of the warm-up the last seven are recorded
SETTLING = 3  # iterations after the change of plan that do not count
CALIBRATION_SECONDS, MOST_SECONDS = 0.16, 8.0  # a timed step, and in all
ALONE_EVERY = 3
LAST_LOSSES = 10

Train = Callable[[Batch], Tensor]
"""One iteration: from this rank's batch to its loss."""


def main(steps: int, folder: str, network: str, terminal: bool, columns: int) -> None:
    """Be one rank of the demo; the arguments are those of `command`."""
    torch.set_num_threads(1)
    calibration = min(CALIBRATION_SECONDS * steps, MOST_SECONDS)
    steps += WARMUP + SETTLING
    is_first = os.environ["RANK"] == "0"
    console = Console(force_terminal=terminal, width=columns, quiet=not is_first)
    with Bars(steps, console) as bars:  # before anything slow
        dist.init_process_group("gloo")
        train, held_out = task.digits()
        trainers = Trainers(Path(folder), steps, bars)
        given = task.batches(train, steps, dist.get_rank(), dist.get_world_size())
        trainers.run(given, calibration)
    measured = trainers.measured(network, held_out)
    if is_first:
        Path(folder, "overview.txt").write_text(trainers.session.report() + "\n")
        measured.write(Path(folder, "demo.json"))
    dist.barrier()
    trainers.session.close()
    dist.destroy_process_group()


class Bars(Progress):
    """A progress bar for each of the two trainings, with its loss and its median iteration."""

    def __init__(self, steps: int, console: Console) -> None:
        super().__init__(
            TextColumn("{task.description:10}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:>6}  median {task.fields[median]:>7}"),
            TimeRemainingColumn(),
            console=console,
            expand=True,
        )
        self._bars = {
            name: self.add_task(label, total=steps, loss="", median="warm-up")
            for name, label in {DDP: "plain DDP", SLIPSTREAM: SLIPSTREAM}.items()
        }

    def show(self, name: str, losses: Sequence[Tensor], seconds: Sequence[float]) -> None:
        """Show the iterations of ``name`` so far."""
        if name in self._bars:
            typical = f"{median(seconds):.3f} s" if seconds else "warm-up"
            loss = f"{losses[-1].item():.3f}"
            self.update(self._bars[name], completed=len(losses), loss=loss, median=typical)


class Trainers:
    """Three copies of one model, each trained in its own way, with their losses and times."""

    def __init__(self, folder: Path, steps: int, bars: Bars) -> None:
        self._folder, self._bars = folder, bars
        plain, accelerated, alone = ResNet18(), ResNet18(), ResNet18()
        self.models = {DDP: plain, SLIPSTREAM: accelerated, ALONE: alone}
        self.ddp = DistributedDataParallel(plain)
        trace = {"skip": WARMUP - RECORDED, "steps": RECORDED, "folder": str(folder)}
        optimizer = sgd(accelerated)
        self.session = accelerate(accelerated, optimizer, strategy={"trace": trace})
        self.schedule = decay(optimizer, steps)
        self.train: dict[str, Train] = {
            DDP: torch_loop(self.ddp, sgd(plain), steps),
            SLIPSTREAM: session_loop(self.session, self.schedule),
            ALONE: torch_loop(alone, sgd(alone), steps),
        }
        self.losses: dict[str, list[Tensor]] = {name: [] for name in self.train}
        self.seconds: dict[str, list[float]] = {name: [] for name in self.train}

    def run(self, batches: Sequence[Batch], calibration: float) -> None:
        """Train all copies on all batches, and time the iterations after warm-up and settling.

        The network is measured for about ``calibration`` seconds.
        """
        first, *others = batches[:WARMUP]
        self._each_in_a_block([first])
        self.apart = distance(self.models[SLIPSTREAM], self.models[DDP])
        self._each_in_a_block(others)
        self.plan = self.apply_plan(calibration)
        self._each_in_a_block(batches[WARMUP : WARMUP + SETTLING])
        order = random.Random(task.SEED)  # the same on all ranks
        for step, batch in enumerate(batches[WARMUP + SETTLING :]):
            for name in order.sample(list(self.train), len(self.train)):
                if name != ALONE or step % ALONE_EVERY == 0:
                    self._timed(name, batch)

    def _each_in_a_block(self, batches: Sequence[Batch]) -> None:
        for name, iterate in self.train.items():
            for batch in batches:
                self.losses[name].append(iterate(batch))
                self._bars.show(name, self.losses[name], [])

    def _timed(self, name: str, batch: Batch) -> None:
        """An iteration that all ranks start together; it takes as long as on the slowest."""
        dist.barrier()
        start = time.perf_counter()
        loss = self.train[name](batch)
        spent = torch.tensor([time.perf_counter() - start])
        dist.all_reduce(spent, op=dist.ReduceOp.MAX)
        self.losses[name].append(loss)
        self.seconds[name].append(spent.item())
        self._bars.show(name, self.losses[name], self.seconds[name])

    def apply_plan(self, calibration: float) -> Planned:
        """Measure the network, plan on rank 0 from the trace, go on with a session of that plan."""
        ranks = connect(from_environ(), torch.device("cpu"))
        network = calibrate(ranks, sizes=SIZES[::2], seconds=calibration, rounds=5)
        plans: list[Any] = [None]
        if ranks.rank == 0:
            plans = [make_plan(chrome.read(self._folder / "trace.json"), network)]
        dist.broadcast_object_list(plans)
        plan: Planned = plans[0]
        strategy = Strategy.load({"gradients": {"split": {"kind": "by_index", "last": plan.last}}})
        if ranks.rank == 0:
            network.save(self._folder / "cluster.yaml")
            (self._folder / "strategy.yaml").write_text(strategy.to_yaml())
        self.session.close()
        self.session = accelerate(self.session.model, self.session.optimizer, strategy=strategy)
        self.train[SLIPSTREAM] = session_loop(self.session, self.schedule)
        return plan

    def measured(self, network: str, held_out: Batch) -> Measured:
        """All that was measured, over all ranks."""
        both = (DDP, SLIPSTREAM)
        parameters = list(self.models[DDP].parameters())
        collectives = sum(segment.num_collectives for segment in self.session.segments)
        return Measured(
            nodes=dist.get_world_size(),
            network=network,
            model="ResNet-18",
            gradients=len(parameters),
            parameters=sum(p.numel() for p in parameters),
            batch=task.BATCH,
            seconds=self.seconds,
            all_reduces={DDP: num_buckets(self.ddp), SLIPSTREAM: collectives},
            plan=self.plan,
            apart_after_one_step=self.apart,
            final_loss={name: mean_of_ranks(self.losses[name][-LAST_LOSSES:]) for name in both},
            accuracy={name: task.accuracy(self.models[name], held_out) for name in both},
            versions={"slipstream": __version__, "torch": torch.__version__},
        )


def make_plan(trace: Trace, network: NetworkProfile) -> Planned:
    """What the planner makes of the default's trace on this network."""
    workload, fitted = prepare(trace, network)
    default = Strategy()
    split = optimal_split(workload, fitted, [default])
    best = Strategy.load({"gradients": {"split": split.document(full=True)}})
    plans = [Plan.of(strategy, workload.gradients) for strategy in (default, best)]
    before, after = (predict(workload, plan, fitted) for plan in plans)
    segments = len(trace.meta["segments"])
    return Planned(list(split.last), segments, before, median(iterations(trace)), after)


def sgd(model: nn.Module) -> torch.optim.SGD:
    """The optimizer of all three."""
    return torch.optim.SGD(model.parameters(), LEARNING_RATE, MOMENTUM)


def decay(optimizer: torch.optim.SGD, steps: int) -> LinearLR:
    """The learning rate falls to 0 over the training, so that the final losses are steady."""
    return LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=steps)


def torch_loop(model: nn.Module, optimizer: torch.optim.SGD, steps: int) -> Train:
    """An iteration as everyone writes it."""
    schedule = decay(optimizer, steps)

    def iterate(batch: Batch) -> Tensor:
        loss = cross_entropy(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        return loss.detach()

    return iterate


def session_loop(session: Session[ResNet18, torch.optim.SGD], schedule: LinearLR) -> Train:
    """The same iteration with slipstream."""

    def iterate(batch: Batch) -> Tensor:
        loss = cross_entropy(session.model, batch)
        session.backward(loss)
        session.step()
        schedule.step()
        return loss.detach()

    return iterate


@torch.no_grad()
def distance(model: nn.Module, other: nn.Module) -> float:
    """The largest relative difference of a parameter: ``|p - q| / |q|`` with 2-norms."""
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max(float((p - q).norm() / q.norm()) for p, q in pairs)


def num_buckets(model: DistributedDataParallel) -> int:
    """All-reduces of one backward of DDP, once it has rebuilt its buckets."""
    return len(str(model._get_ddp_logging_data()["rebuilt_bucket_sizes"]).split(","))


def mean_of_ranks(losses: Sequence[Tensor]) -> float:
    """Mean of these losses over all ranks."""
    mean = torch.stack(list(losses)).mean() / dist.get_world_size()
    dist.all_reduce(mean)
    return mean.item()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
