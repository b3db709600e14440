"""A training of three ranks, one of which goes wrong: ``python faulty_training.py SETUP FAULT``.

It trains, prints the time at which the fault begins, and goes on, as scripts of users do. The
folder ``FAULTS_FOLDER`` gets the autopsy and checkpoints.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

BAD, RANKS = 1, 3
TIMEOUT = "30s"
UPDATES, MORE = 20, 10
"""Before the fault, and after it."""
WIDTH, LAYERS, SAMPLES = 64, 4, 8
SLOW_UPDATES, PAUSE = 400, 0.05
"""Of a run with a slow rank, which takes twice as long as the others, and seconds of these."""
LINKS, STORE = "links", "store"
NETWORK = {LINKS: 10**6, STORE: 300}
"""Faults that others bring about, and the updates after which the run would end."""

Update = Callable[[Tensor], None]


class Net(nn.Module):
    """Layers, one of which can be skipped, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.register_buffer("seen", torch.zeros(1))
        self.skipped: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number != self.skipped:
                x = layer(x).relu()
        return x


class LargeSamples(torch.utils.data.Dataset[Tensor]):
    """Samples that do not fit into a full ``/dev/shm``."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Tensor:
        return torch.ones(2**20)


# The setups.


@contextmanager
def accelerated(net: Net, folder: Path) -> Iterator[Update]:
    """slipstream."""
    import slipstream  # late: the other setups do not know it

    checks = {"timeout": TIMEOUT, "folder": str(folder / "autopsy")}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with slipstream.accelerate(net, optimizer, strategy={"checks": checks}) as session:

        def update(batch: Tensor) -> None:
            session.backward(session.model(batch).square().mean())
            session.step()

        yield update


@contextmanager
def replicated(net: Net, _: Path) -> Iterator[Update]:
    """Plain DDP."""
    dist.init_process_group("gloo")
    yield plain(DistributedDataParallel(net), net)
    dist.destroy_process_group()


@contextmanager
def sharded(net: Net, _: Path) -> Iterator[Update]:
    """Plain FSDP2."""
    from torch.distributed.fsdp import fully_shard  # late: slow to import

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (*net.layers, net):
        fully_shard(part, mesh=mesh)
    yield plain(net, net)
    dist.destroy_process_group()


def plain(model: nn.Module, net: Net) -> Update:
    """An update as torch's tutorials have it."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def update(batch: Tensor) -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return update


SETUPS = {"accelerate()": accelerated, "DDP, watch": replicated, "FSDP2, watch": sharded}


# The faults.


def go_wrong(fault: str, net: Net, update: Update, folder: Path) -> int:
    """What the bad rank does; how many updates it makes then."""
    match fault:
        case "kill -9":
            os.kill(os.getpid(), signal.SIGKILL)
        case "SIGSTOP":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "endless sleep" | "autopsy folder full":
            time.sleep(1e6)
        case "exception":
            raise ValueError("bad sample 17")
        case "exit(0)":
            sys.exit(0)
        case "loop left early":
            return 0
        case "step skipped":
            return MORE - 1
        case "layer skipped":
            net.skipped = 1
        case "batch of a wrong shape":
            update(torch.ones(SAMPLES, WIDTH + 1))
        case "buffer grows":
            net.seen = torch.zeros(2)
        case "NaN":
            update(torch.full((SAMPLES, WIDTH), torch.nan))
            return MORE - 1
        case "checkpoint folder full":
            torch.save(net.state_dict(), folder / "checkpoint.pt")
        case "/dev/shm full":
            # A new interpreter's default; that of a forked one has workers import all anew.
            samples, fork = LargeSamples(), "fork"
            next(iter(DataLoader(samples, num_workers=1, multiprocessing_context=fork)))
    return MORE


def meet_wrongly(fault: str, bad: bool) -> None:
    """Exchanges of the script in which ranks do not do the same."""
    if fault == "exchange of a wrong shape":
        dist.all_reduce(torch.ones(SAMPLES - 1 if bad else SAMPLES))
    if fault == "other order of exchanges":
        values = torch.ones(3)
        if bad:
            dist.all_reduce(values)
        dist.all_gather([torch.empty(3) for _ in range(RANKS)], values)
        dist.all_reduce(values)


def train(setup: str, fault: str) -> None:
    """Train, go wrong, and train on."""
    folder = Path(os.environ["FAULTS_FOLDER"])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = Net()
    with SETUPS[setup](net, folder) as update:
        bad = dist.get_rank() == BAD
        for _ in range(UPDATES):
            time.sleep(PAUSE)
            update(torch.randn(SAMPLES, WIDTH))
        more = MORE
        if bad:
            print(f"fault at {time.time():.3f}", flush=True)
            more = go_wrong(fault, net, update, folder)
        pause = 0.0
        if fault == "slow rank":
            more, pause = SLOW_UPDATES, PAUSE * (2 if bad else 1)
        if fault in NETWORK:
            more, pause = NETWORK[fault], 4 * PAUSE
        meet_wrongly(fault, bad)
        for done in range(more):
            time.sleep(pause)
            update(torch.randn(SAMPLES, WIDTH))
            if fault in NETWORK and done % 10 == 9:
                print(f"update {done + 1}", flush=True)
    if setup == "accelerate()":
        print(f"trained to {sum(p.sum().item() for p in net.parameters()):.9g}", flush=True)


def be_a_rank(setup: str, fault: str, environ: Mapping[str, str], output: Connection) -> None:
    """The same in a process that was forked, with the variables and the output of a new one."""
    os.setsid()
    os.environ.update(environ)
    for stream in (1, 2):
        os.dup2(output.fileno(), stream)
    output.close()
    train(setup, fault)


if __name__ == "__main__":
    train(*sys.argv[1:])
