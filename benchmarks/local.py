"""Meeting rarely: what it does to a training, and how fast it makes one on a slow network.

    python -m benchmarks.local loss --task causal --json results/local-causal.json
    python -m benchmarks.local speed --rate 100mbit --json results/local-100mbit.json

``loss`` trains a model from the same seeds in every way, on as many tokens: data parallelism, the
outer optimizer on top of it alone (since an outer step by itself can help), torch's post-local SGD,
and ``local`` with several numbers of steps, codecs and fragments. What counts is the loss on data
that was held out, of the parameters that evaluate best.

``speed`` runs them on emulated hosts beside an accelerator (accelerator.py). A turn is a whole
round of updates, after one that is not timed, as an exchange reaches into the updates behind it;
what is still on its way at the end of a turn arrives before the next variant begins. Bytes are
those that the network interfaces have counted.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from random import Random
from statistics import fmean, median, stdev
from typing import Any

import torch
import torch.distributed as dist
import yaml
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel

import slipstream
from benchmarks.accelerator import Device
from benchmarks.baselines import wrapped_in_ddp
from benchmarks.cases import MODELS, Case, as_ranks, share_cores, wire_seconds
from benchmarks.convergence import Task, digits_task, text_task
from benchmarks.iteration import LEARNING_RATE, on_loopback, plain, quartiles
from benchmarks.record import arguments, finish
from benchmarks.torchft_diloco import DiLoCo
from benchmarks.turns import joined_ranks, slowest
from examples import data
from slipstream.calibration.calibrate import SIZES, calibrate
from slipstream.cluster.connect import connect, from_environ
from slipstream.planner.forecast import Forecast
from slipstream.strategy import Int4Config, Int8Config, Strategy
from slipstream.testbed import Distance
from slipstream.trace import chrome

WARM_UP = 1 / 8
"""Of the updates; the same for all that meet rarely."""
STEPS = (8, 16, 32, 64, 128)
CODECS: dict[str, Any] = {
    "int8": "int8",
    "int4": "int4",
    "onebit": {"kind": "onebit", "start_step": 0},
    "topk": {"kind": "topk", "decay": 0.95},
}
LOCAL = (
    *(f"{steps} steps" for steps in STEPS),
    *(f"{steps} steps, {codec}" for steps in STEPS for codec in ("int8", "int4")),
    "16 steps, onebit",
    "16 steps, topk, momentum 0.0",
    "16 steps, 4 fragments, int4",
    *(f"16 steps, 4 fragments, delay {delay}, int4" for delay in (1, 2, 4)),
    "8 steps, 4 fragments, delay 1, int4",
    "8 steps, 4 fragments, delay 2, int4",
    "16 steps, 4 fragments, delay 4, mix 0.5, int4",
    "16 steps, inner_state averaged",
    "16 steps, lr 1.0, momentum 0.0",
)
"""Names of settings; `settings_of` reads any others, too."""
TORCHFT = {"torchft DiLoCo, 16 steps": 0, "torchft DiLoCo, 16 steps, delay 4": 4}
"""Updates that hide an exchange, by name."""
OTHERS = (
    *("data parallel", "data parallel and outer steps", "torch, post-local SGD, 16 steps"),
    *TORCHFT,
)
POINTS = 8
"""On a curve of losses."""


def small_gpt2(vocabulary: int, length: int, width: int, *, tied: bool = True) -> nn.Module:
    """Two layers, without dropout; ``tied``: words are read by the weights that embed them."""
    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=length,
        n_embd=width,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    return model


def causal_task(batch: int = 4) -> Task:
    """The next word of Python's standard library: a small GPT-2; the score is the loss."""
    vocabulary, length, width = 2048, 64, 128
    tokens = data.stdlib_tokens(vocabulary)
    rows = tokens[: len(tokens) // length * length].view(-1, length)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    held_out, train = rows[order[:256]], rows[order[256:]]

    def build() -> nn.Module:
        return small_gpt2(vocabulary, length, width)

    def sample(seed: int, step: int, rank: int) -> Any:
        random = torch.Generator().manual_seed((seed * 10**6 + step) * 64 + rank)
        return train[torch.randint(len(train), (batch,), generator=random)]

    def loss(model: nn.Module, words: Any) -> torch.Tensor:
        found: torch.Tensor = model(input_ids=words, labels=words).loss
        return found

    def held_out_loss(model: nn.Module) -> float:
        return float(loss(model, held_out))

    def optimizer(model: nn.Module, _: bool) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3)

    return Task(build, sample, loss, held_out_loss, optimizer)


class Residual(nn.Module):
    """Two convolutions with batch norm, and what they are added to."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(x + self.body(x))


def resnet_task(batch: int = 16) -> Task:
    """Handwritten digits: a small ResNet with batch norm; the score is the loss, with smoothed
    labels, whose least value is far from 0."""
    digits = digits_task(batch)
    pixels, targets = data.digits(8)[1][:]

    def build() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
            Residual(32), nn.MaxPool2d(2), Residual(32),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
        )  # fmt: skip

    def loss(model: nn.Module, rows: Any) -> torch.Tensor:
        return functional.cross_entropy(model(rows[0]), rows[1], label_smoothing=0.1)

    def held_out_loss(model: nn.Module) -> float:
        return float(loss(model, (pixels, targets)))

    return Task(build, digits.batch, loss, held_out_loss, digits.optimizer)


def settings_of(name: str) -> dict[str, Any]:
    """Read a name of settings: ``16 steps, 4 fragments, delay 2, int4``."""
    found: dict[str, Any] = {}
    for part in name.split(", "):
        first, _, second = part.partition(" ")
        if part in CODECS:
            found["codec"] = CODECS[part]
        elif first.isdigit():
            found[second] = int(first)
        else:
            found[first] = yaml.safe_load(second)
    return found


TASKS: dict[str, Callable[[], Task]] = {
    "causal": causal_task,
    "masked": text_task,
    "digits": digits_task,
    "resnet": resnet_task,
}


@dataclass(frozen=True)
class Run:
    """One training: scores on held-out data on the way, and seconds of the training."""

    name: str
    seed: int
    scores: list[float]
    seconds: float


class Training:
    """One way to train; ``step`` trains on one batch, ``evaluating`` has the best parameters."""

    def __init__(self, task: Task, name: str, steps: int) -> None:
        self.task, self.model = task, task.model()
        self.optimizer = task.optimizer(self.model, False)
        self.warm_up = round(steps * WARM_UP)
        self._session: Any = None
        self._outer: torch.optim.Optimizer | None = None
        self._averaged: Any = None
        self._torchft: DiLoCo | None = None
        self._torchft_delay = TORCHFT.get(name)
        if name not in OTHERS:
            local = {"warm_up": self.warm_up, **settings_of(name)}
            self._session = slipstream.accelerate(
                self.model, self.optimizer, None, {"local": local}
            )
        elif name == OTHERS[2] or name in TORCHFT:
            self._ddp = wrapped_in_ddp(self.model, None)
            self._averaged = self.optimizer
            if name == OTHERS[2]:
                averager = PeriodicModelAverager(period=16, warmup_steps=self.warm_up)
                self._averaged = PostLocalSGDOptimizer(self.optimizer, averager)
        else:
            self._session = slipstream.accelerate(self.model, self.optimizer)
        if name == OTHERS[1]:
            self._start = [p.detach().clone() for p in self.model.parameters()]
            self._outer = torch.optim.SGD(self._start, 0.7, momentum=0.9, nesterov=True)
        self._updates = 0

    def step(self, batch: Any) -> None:
        self.model.train()
        self._updates += 1
        if self._averaged is not None:
            local = self._updates > self.warm_up
            with self._ddp.no_sync() if local else nullcontext():
                self.task.loss(self._ddp, batch).backward()
            self._averaged.step()
            self._averaged.zero_grad()
            if self._torchft_delay is not None and self._updates == self.warm_up:
                self._torchft = DiLoCo(self.model, self.optimizer, 16, self._torchft_delay)
            return
        self._session.backward(self.task.loss(self.model, batch))
        self._session.step()
        if self._outer is not None and self._updates % 16 == 0:
            with torch.no_grad():
                parameters: list[torch.Tensor] = [*self.model.parameters()]
                for outer, p in zip(self._start, parameters, strict=True):
                    outer.grad = outer - p
                self._outer.step()
                torch._foreach_copy_(parameters, self._start)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        with nullcontext() if self._session is None else self._session.evaluating():
            yield

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
        if self._torchft is not None:
            self._torchft.close()


def train(task: Task, name: str, seed: int, steps: int) -> Run:
    """One training on all ranks."""
    rank = dist.get_rank()
    torch.manual_seed(seed)
    training = Training(task, name, steps)
    warmup = steps // 20
    schedule = torch.optim.lr_scheduler.LambdaLR(
        training.optimizer,
        lambda s: min(s / warmup, 1.0) * 0.5 * (1 + math.cos(math.pi * min(s / steps, 1.0))),
    )
    scores: list[float] = []
    seconds = 0.0
    for step in range(steps):
        begun = time.perf_counter()
        training.step(task.batch(seed, step, rank))
        schedule.step()
        seconds += time.perf_counter() - begun
        if (step + 1) % (steps // POINTS) == 0:
            training.model.eval()
            with training.evaluating(), torch.no_grad():
                score = torch.tensor(task.score(training.model)) if rank == 0 else torch.zeros(())
            dist.broadcast(score, 0)
            scores.append(float(score))
    training.close()
    return Run(name, seed, scores, seconds)


@joined_ranks()
def losses(args: argparse.Namespace) -> None:
    """What one rank does; rank 0 writes."""
    task, runs = TASKS[args.task](), []
    names = args.variants or [*OTHERS, *LOCAL]
    plans = [(name, seed) for seed in range(args.seeds) for name in names]
    console = Console(stderr=True, quiet=dist.get_rank() != 0)
    for name, seed in track(plans, args.task, console=console):
        runs.append(train(task, name, seed, args.steps))
        console.print(f"{name}, seed {seed}: {runs[-1].scores[-1]:.4f}")
    if dist.get_rank() == 0:
        dense = fmean(run.scores[-1] for run in runs if run.name == names[0])
        rows = []
        for name in names:
            ends = [run.scores[-1] for run in runs if run.name == name]
            gap = fmean(ends) - dense if args.task == "digits" else fmean(ends) / dense - 1
            spread = stdev(ends) if len(ends) > 1 else 0.0
            rows.append({"name": name, "score": fmean(ends), "deviation": spread, "gap": gap})
        settings = {"task": args.task, "steps": args.steps, "ranks": dist.get_world_size()}
        entry = {"kind": "loss", **settings, "seeds": args.seeds, "rows": rows}
        finish(args.json, "local", {**entry, "runs": [asdict(run) for run in runs]})
        if args.json:
            curves(args, names, runs).savefig(Path(args.json).with_suffix(".png"))


def curves(args: argparse.Namespace, names: Sequence[str], runs: Sequence[Run]) -> Figure:
    """Held-out scores on the way, a line a name: means over seeds."""
    figure = Figure(figsize=(9, 5), dpi=110, layout="constrained")
    axes = figure.subplots()
    for number, name in enumerate(names):
        own = [run.scores for run in runs if run.name == name]
        means = [fmean(values) for values in zip(*own, strict=True)]
        at = [args.steps // POINTS * (number + 1) for number in range(len(means))]
        style = ("-", "--", ":", "-.")[number // 10 % 4]  # colours repeat after ten
        width = 2.5 if name in OTHERS else 1.0
        axes.plot(at, means, label=name, linewidth=width, linestyle=style)
    what = "accuracy" if args.task == "digits" else "loss"
    axes.set(xlabel="updates", ylabel=f"held-out {what}", title=args.task)
    axes.legend(frameon=False, fontsize=7)
    return figure


# Speed.

SPEED: dict[str, dict[str, Any]] = {
    "sharded, a third replicated": {"transport": {"kind": "sharded", "replicated": 1 / 3}},
    "int8": {"codec": "int8"},
    "PowerSGD": {"codec": {"kind": "powersgd", "start_step": 0}},
}
ROUND = 16
"""Updates of a turn: a round of every local variant."""
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

    def ddp(megabytes: float) -> Callable[[], None]:
        model, loss_of = case.make()
        return plain(wrapped_in_ddp(model, megabytes), loss_of)

    def ours(strategy: Mapping[str, Any]) -> Callable[[], None]:
        model, loss_of = case.make()
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        session = slipstream.accelerate(model, optimizer, None, dict(strategy))
        if "local" in strategy:
            sessions.append(session)

        def iterate() -> None:
            session.backward(loss_of(session.model))
            session.step()

        return iterate

    def torchft(delay: int) -> Callable[[], None]:
        model, loss_of = case.make()
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        rivals.append(DiLoCo(model, optimizer, ROUND, delay))

        def iterate() -> None:
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()

        return iterate

    rivals: list[DiLoCo] = []
    sessions: list[Any] = []
    made: dict[str, tuple[Callable[[], Callable[[], None]], int]] = {
        "no exchange": (lambda: plain(*case.make()), 4),
        **{f"DDP, {mb:g} MB": (partial(ddp, mb), 2) for mb in args.ddp},
        **{name: (partial(ours, {"gradients": g}), 2) for name, g in SPEED.items()},
        **{f"local, {n}": (partial(ours, {"local": settings_of(n)}), ROUND) for n in FAST},
        **{name: (partial(torchft, delay), ROUND) for name, delay in TORCHFT.items()},
        AUTO: (partial(ours, {"local": "auto"}), ROUND),
    }
    names = ["no exchange", *args.variants] if args.variants else [*made]
    variants = {name: (made[name][0](), made[name][1]) for name in names}
    forecast = predicted(case)
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    sent: dict[str, list[float]] = {name: [] for name in variants}
    quiet = Console(stderr=True, quiet=rank != 0)
    for number in track(range(args.rounds + 1), "rounds", console=quiet):
        for name in Random(number).sample([*variants], len(variants)):  # alike on all ranks
            iterate, updates = variants[name]
            for _ in range(updates):  # not timed
                iterate()
            dist.barrier()
            before, begun = sent_bytes(), time.perf_counter()
            for _ in range(updates):
                iterate()
            spent = (time.perf_counter() - begun) / updates
            bytes_sent = (sent_bytes() - before) / updates
            for session in sessions:
                session.state_dict()  # what is on its way arrives
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
            "auto": sessions[-1].state_dict()["local"]["config"] if AUTO in variants else {},
        }
        finish(args.json, "local", entry)
    for rival in rivals:
        rival.close()
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    """Start the ranks, or be one."""
    parser = arguments(__doc__, "100mbit")
    parser.add_argument("part", choices=("loss", "speed"))
    parser.add_argument("--task", choices=TASKS, default="causal")
    parser.add_argument(
        "--variants",
        nargs="*",
        metavar="NAME",
        help="of losses the first is the measure; of speed all but these are left out",
    )
    parser.add_argument("--steps", type=int, default=1600, help="updates of a training")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--round-trip-ms", type=float, default=0.0)
    parser.add_argument("--loss-percent", type=float, default=0.0)
    parser.add_argument("--keep-window", action="store_true", help="hosts set for long lines")
    parser.add_argument("--model", choices=MODELS, default="bert")
    parser.add_argument("--compute", choices=("cpu", "accelerator"), default="accelerator")
    parser.add_argument("--compute-seconds", type=float, default=0.15, help="of an update")
    parser.add_argument("--ddp", nargs="*", type=float, default=[4, 25], help="MB of buckets")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if args.part == "speed":
        distance = Distance(args.round_trip_ms / 1e3, args.loss_percent / 100, args.keep_window)
        return as_ranks(speed, args, distance)
    if "RANK" in os.environ:
        losses(args)
        return 0
    return on_loopback(sys.argv[1:], args.nodes)


if __name__ == "__main__":
    sys.exit(main())
