"""An iteration under DDP and under slipstream on one scale of time: the picture of the README.

    python -m benchmarks.timelines --model resnet50 --rate 1gbit --ddp 8

Emulated hosts beside an accelerator, as in `exchange`; both train one after the other, and are
recorded by slipstream's recorder. DDP's exchanges are seen by a communication hook that calls its
own all-reduce: a bucket is ready where the hook is called, and done where its future is.
"""

# No postponed annotations: DDP reads those of the hook.

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from benchmarks.accelerator import Device
from benchmarks.baselines import wrapped_in_ddp
from benchmarks.cases import MODELS, TRANSPORTS, Case, as_ranks, wire_seconds
from benchmarks.iteration import LEARNING_RATE, accelerated, plain
from benchmarks.turns import joined_ranks
from slipstream.report.report import png
from slipstream.trace import Trace, read
from slipstream.trace.event import BACKWARD, FORWARD, OPTIMIZER, allreduce
from slipstream.trace.recorder import Recorder

PICTURE = Path(__file__).parents[1] / "docs" / "timelines.png"
FIRST, STEPS = 4, 3
"""Iterations before the recorded ones, and those."""
OURS = "sharded, a third replicated"


class RecordedDdp:
    """An iteration of DDP whose spans a recorder keeps."""

    def __init__(self, case: Case, megabytes: float, recorder: Recorder) -> None:
        model, self._loss_of = case.make()
        self._ddp = wrapped_in_ddp(model, megabytes)
        self._ddp.register_comm_hook(None, self._exchange)
        self._optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        self._recorder, self.step = recorder, 0
        self._ready: list[float] = []
        self._done: list[float] = []

    def _exchange(self, _: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        number, now = bucket.index(), self._recorder.now
        self._ready.append(now())
        self._done.append(0.0)
        place = len(self._ready) - 1
        size = bucket.buffer().nbytes

        def ended(future: Any) -> torch.Tensor:
            self._done[place] = now()
            start = max(self._ready[place], *self._done[:place], 0.0)
            span = {"segment": number, "bytes": size, "ready": self._ready[place]}
            self._recorder.add(allreduce(number + 1), start, self._done[place], **span)
            value: torch.Tensor = future.value()
            return value

        reduced: torch.futures.Future[torch.Tensor] = allreduce_hook(None, bucket)  # type: ignore[arg-type]
        return reduced.then(ended)

    def iterate(self) -> None:
        """Forward, backward beside exchanges, update."""
        now = self._recorder.now
        self._recorder.begin_step(self.step)
        self._ready, self._done = [], []
        start = now()
        loss = self._loss_of(self._ddp)
        middle = now()
        loss.backward()
        update = now()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._recorder.add(FORWARD, start, middle)
        self._recorder.add(BACKWARD, middle, self._ready[-1])
        self._recorder.add(OPTIMIZER, update, now())
        self._recorder.end_step()
        self.step += 1


def measure(args: argparse.Namespace) -> None:
    """What one rank does; rank 0 draws."""
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = Device(0.0)
    case = Case(args.model, device)
    wire = device.seconds = wire_seconds(args, case.num_bytes, world)
    with joined_ranks():
        device.fit(plain(*case.make()), wire)
        recorder = Recorder(rank, FIRST, STEPS)
        ddp = RecordedDdp(case, args.ddp, recorder)
        with TemporaryDirectory() as own:
            folders = [own]
            dist.broadcast_object_list(folders)  # all ranks have one strategy, and rank 0 writes
            trace_file = Path(folders[0]) / "trace.json"
            strategy = {
                "gradients": {"transport": TRANSPORTS[OURS]},
                "trace": {"steps": STEPS, "skip": FIRST, "folder": folders[0]},
            }
            ours, session = accelerated(*case.make(), strategy)
            for iterate in (ddp.iterate, ours):  # each in a row: an iteration reaches into the next
                dist.barrier()
                for _ in range(FIRST + STEPS + 1):
                    if iterate == ddp.iterate and ddp.step == FIRST:
                        recorder.align()
                    iterate()
            session.close()
            trace = recorder.gather()
            if trace is not None:
                traces = {f"DDP, buckets of {args.ddp:g} MB": trace}
                traces[f"slipstream, {OURS}"] = read(trace_file)
                Path(args.out).write_bytes(png([(n, first_rank(t)) for n, t in traces.items()]))
                print(args.out)


def first_rank(trace: Trace) -> Trace:
    """Of all ranks one: they are alike, and the picture is small."""
    return replace(trace, events=tuple(event for event in trace.events if event.rank == 0))


def main() -> int:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="resnet50")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--ddp", type=float, default=8, help="MB of DDP's buckets: its best")
    parser.add_argument("--out", default=str(PICTURE), help="a PNG file")
    return as_ranks(measure, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
