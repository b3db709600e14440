"""What each rank of the demo does: the same training with plain DDP and with slipstream, in turn.

Never draws results: rank 0 shows progress, and leaves trace, overview and numbers in the folder.

Every timed step gives the same batch to both, in random order, between barriers; an iteration
takes as long as on its slowest rank. At every third step a third copy, without any exchange, takes
its turn. The warm-up before is training too: there slipstream records its trace, a block of
iterations without barriers, as in any training; then the network is measured, the split is planned,
and a new session applies it.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, TensorDataset
from transformers import ResNetConfig, ResNetForImageClassification

from slipstream.calibration.calibrate import SIZES, calibrate
from slipstream.cli.demo.command import Job
from slipstream.cli.demo.report import ALONE, DDP, SLIPSTREAM, Measured, Planned
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

SEED = 0
PIXELS, BATCH = 64, 16  # an exchange and its compute then take about as long at 1 Gbit/s
LEARNING_RATE, MOMENTUM = 0.02, 0.9
WARMUP, RECORDED = 10, 7  # of the warm-up the last seven are recorded
SETTLING = 3  # iterations after the change of plan that do not count
CALIBRATION_SECONDS = 8.0
ALONE_EVERY = 3
LAST_LOSSES = 10

Batch = tuple[Tensor, Tensor]
Train = Callable[[Batch], Tensor]  # one iteration: the loss of this rank's batch


def main(argument: str) -> None:
    """Be one rank of the demo."""
    job = Job(**json.loads(argument))
    sys.path.insert(0, job.examples)
    import data  # of the examples: found only now

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    train, held_out = data.digits(PIXELS)
    steps = WARMUP + SETTLING + job.steps
    batches: list[Batch] = list(data.batches(train, BATCH, steps, SEED, rank, world))
    trainers = Trainers(job.folder, steps)
    measured = trainers.measure(batches, held_out, job, _console(job, rank))
    if rank == 0:
        Path(job.folder, "overview.txt").write_text(trainers.session.report() + "\n")
        measured.write(Path(job.folder, "demo.json"))
    dist.barrier()
    trainers.session.close()
    dist.destroy_process_group()


class Trainers:
    """Three copies of one model, and for each a function that trains it on a batch."""

    def __init__(self, folder: str, steps: int) -> None:
        plain, ours, alone = resnet18(), resnet18(), resnet18()
        self.models = {DDP: plain, SLIPSTREAM: ours, ALONE: alone}
        self.ddp = DistributedDataParallel(plain)
        trace = {"skip": WARMUP - RECORDED, "steps": RECORDED, "folder": folder}
        self.session = accelerate(ours, sgd(ours), strategy={"trace": trace})
        self.schedule = decay(self.session.optimizer, steps)
        self.train = {
            DDP: torch_loop(self.ddp, sgd(plain), steps),
            SLIPSTREAM: session_loop(self.session, self.schedule),
            ALONE: torch_loop(alone, sgd(alone), steps),
        }

    def measure(
        self, batches: Sequence[Batch], held_out: TensorDataset, job: Job, console: Console
    ) -> Measured:
        """Train on all batches; time those after the warm-up."""
        losses: dict[str, list[Tensor]] = {name: [] for name in self.train}
        seconds: dict[str, list[float]] = {name: [] for name in self.train}
        order = random.Random(SEED)
        with Bars(len(batches), console) as bars:
            first, *others = batches[:WARMUP]
            for name in self.train:
                losses[name].append(self.train[name](first))
            apart = distance(self.models[SLIPSTREAM], self.models[DDP])
            for name in self.train:
                for batch in others:
                    losses[name].append(self.train[name](batch))
                    bars.update(name, len(losses[name]), losses[name][-1])
            plan = self.apply_plan(Path(job.folder))
            for name in self.train:
                for batch in batches[WARMUP : WARMUP + SETTLING]:
                    losses[name].append(self.train[name](batch))
                    bars.update(name, len(losses[name]), losses[name][-1])
            for step, batch in enumerate(batches[WARMUP + SETTLING :]):
                for name in order.sample(list(self.train), len(self.train)):
                    if name != ALONE or step % ALONE_EVERY == 0:
                        loss, spent = timed(self.train[name], batch)
                        losses[name].append(loss)
                        seconds[name].append(spent)
                        bars.update(name, len(losses[name]), loss, median(seconds[name]))
        both = (DDP, SLIPSTREAM)
        return Measured(
            nodes=dist.get_world_size(),
            network=job.network,
            model="ResNet-18",
            gradients=len(list(self.models[DDP].parameters())),
            parameters=sum(p.numel() for p in self.models[DDP].parameters()),
            batch=BATCH,
            seconds=seconds,
            all_reduces={DDP: num_buckets(self.ddp), SLIPSTREAM: num_collectives(self.session)},
            plan=plan,
            apart_after_one_step=apart,
            final_loss={name: mean_of_ranks(losses[name][-LAST_LOSSES:]) for name in both},
            accuracy={name: accuracy(self.models[name], held_out) for name in both},
            versions={"slipstream": __version__, "torch": torch.__version__},
        )

    def apply_plan(self, folder: Path) -> Planned:
        """Measure the network, plan on rank 0 from the trace, go on with a session of that plan."""
        cluster = calibrate(
            connect(from_environ(), torch.device("cpu")),
            sizes=SIZES[::2],
            seconds=CALIBRATION_SECONDS,
            rounds=5,
        )
        found: list[Planned | None] = [None]
        if dist.get_rank() == 0:
            found = [make_plan(chrome.read(folder / "trace.json"), cluster)]
            cluster.save(folder / "cluster.yaml")
        dist.broadcast_object_list(found)
        assert found[0] is not None
        strategy = Strategy.load(
            {"gradients": {"split": {"kind": "by_index", "last": found[0].last}}}
        )
        (folder / "strategy.yaml").write_text(strategy.to_yaml())
        self.session.close()
        self.session = accelerate(self.session.model, self.session.optimizer, strategy=strategy)
        self.train[SLIPSTREAM] = session_loop(self.session, self.schedule)
        return found[0]


def make_plan(trace: Trace, cluster: NetworkProfile) -> Planned:
    """What the planner makes of the default's trace on this network."""
    workload, fitted = prepare(trace, cluster)
    default = Strategy()
    split = optimal_split(workload, fitted, [default])
    best = Strategy.load({"gradients": {"split": split.document(full=True)}})
    before, after = (
        predict(workload, Plan.of(strategy, workload.gradients), fitted)
        for strategy in (default, best)
    )
    segments = len(trace.meta["segments"])
    return Planned(list(split.last), segments, before, median(iterations(trace)), after)


def resnet18() -> nn.Module:
    """ResNet-18: 62 gradients, 11.2 M parameters; every call gives the same ones.

    Reference: He et al., Deep Residual Learning for Image Recognition, https://arxiv.org/abs/1512.03385
    """
    config = ResNetConfig(depths=[2, 2, 2, 2], hidden_sizes=[64, 128, 256, 512], layer_type="basic")
    config.num_labels = 10
    torch.manual_seed(SEED)
    return ResNetForImageClassification(config)


def sgd(model: nn.Module) -> torch.optim.SGD:
    """The optimizer of all three."""
    return torch.optim.SGD(model.parameters(), LEARNING_RATE, MOMENTUM)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of a batch."""
    images, labels = batch
    return functional.cross_entropy(model(images).logits, labels)


def decay(optimizer: torch.optim.SGD, steps: int) -> LinearLR:
    """The learning rate falls to nothing over the training, so that both come to rest."""
    return LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=steps)


def torch_loop(model: nn.Module, optimizer: torch.optim.SGD, steps: int) -> Train:
    """An iteration as everyone writes it."""
    schedule = decay(optimizer, steps)

    def iterate(batch: Batch) -> Tensor:
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        return loss.detach()

    return iterate


def session_loop(session: Session[nn.Module, torch.optim.SGD], schedule: LinearLR) -> Train:
    """The same iteration with slipstream."""

    def iterate(batch: Batch) -> Tensor:
        loss = loss_of(session.model, batch)
        session.backward(loss)
        session.step()
        schedule.step()
        return loss.detach()

    return iterate


def timed(train: Train, batch: Batch) -> tuple[Tensor, float]:
    """An iteration that all ranks start together: its loss here, and the seconds of the slowest."""
    dist.barrier()
    start = time.perf_counter()
    loss = train(batch)
    spent = torch.tensor([time.perf_counter() - start])
    dist.all_reduce(spent, op=dist.ReduceOp.MAX)
    return loss, spent.item()


@torch.no_grad()
def distance(model: nn.Module, other: nn.Module) -> float:
    """The largest relative difference of a parameter: ``|p - q| / |q|`` with 2-norms."""
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max(float((p - q).norm() / q.norm()) for p, q in pairs)


def num_buckets(model: DistributedDataParallel) -> int:
    """All-reduces of one backward of DDP, once it has rebuilt its buckets."""
    return len(str(model._get_ddp_logging_data()["rebuilt_bucket_sizes"]).split(","))


def num_collectives(session: Session[nn.Module, torch.optim.SGD]) -> int:
    """All-reduces of one backward of slipstream."""
    return sum(segment.num_collectives for segment in session.segments)


def mean_of_ranks(losses: Sequence[Tensor]) -> float:
    """Mean of these losses over all ranks."""
    mean = torch.stack(list(losses)).mean() / dist.get_world_size()
    dist.all_reduce(mean)
    return mean.item()


@torch.no_grad()
def accuracy(model: nn.Module, dataset: TensorDataset) -> float:
    """Share of the images that are recognised; each rank looks at its part of them."""
    model.eval()
    part = range(dist.get_rank(), len(dataset), dist.get_world_size())
    right = torch.zeros(1)
    for images, labels in DataLoader(torch.utils.data.Subset(dataset, part), batch_size=64):
        right += (model(images).logits.argmax(dim=1) == labels).sum()
    dist.all_reduce(right)
    return right.item() / len(dataset)


class Bars:
    """A progress bar for each of the two, with the latest loss and the median iteration."""

    def __init__(self, steps: int, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description:10}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:>6}  median {task.fields[median]:>7}"),
            TimeRemainingColumn(),
            console=console,
            expand=True,
        )
        self._tasks = {
            name: self._progress.add_task(label, total=steps, loss="", median="warm-up")
            for name, label in {DDP: "plain DDP", SLIPSTREAM: SLIPSTREAM}.items()
        }

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def update(self, name: str, done: int, loss: Tensor, seconds: float | None = None) -> None:
        """``done`` iterations of ``name`` are done."""
        if name in self._tasks:
            task = self._tasks[name]
            self._progress.update(task, completed=done, loss=f"{loss.item():.3f}")
            if seconds is not None:
                self._progress.update(task, median=f"{seconds:.3f} s")


def _console(job: Job, rank: int) -> Console:
    return Console(force_terminal=job.terminal, width=job.columns, quiet=rank != 0)


if __name__ == "__main__":
    main(sys.argv[1])
