"""Exceptions in the middle of an update that a script catches, to go on."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from tests.conformance.habit import habit
from tests.conformance.loop import Batch, Loop, mse


class Stopped(Exception):
    """What a script catches."""


def _in_forward(run: Loop, kind: type[BaseException]) -> None:
    raised: set[int] = set()

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        loss = mse(model, batch)
        if batch.rank not in raised:
            raised.add(batch.rank)
            raise kind("in forward")
        return loss

    run.start()
    run.update()
    try:
        run.update(loss_of)
    except kind:
        run.optimizer.zero_grad()
    run.update(times=2)


def _in_backward(run: Loop, kind: type[BaseException]) -> None:
    """When the gradients of the head are there, and those of the body are not."""
    raised: set[int | None] = set()
    armed: list[bool] = []

    def watch(module: nn.Module, args: Any, hidden: Tensor) -> None:
        whose = run._computing

        def fail(gradient: Tensor) -> None:
            if armed and whose not in raised:
                raised.add(whose)
                raise kind("in backward")

        hidden.register_hook(fail)

    run.model.plugs.append(nn.Identity())
    run.model.plugs.register_forward_hook(watch)
    run.start()
    run.update()
    armed.append(True)
    try:
        run.update()
    except kind:
        run.optimizer.zero_grad()
    run.update(times=2)


def _in_step(run: Loop, kind: type[BaseException]) -> None:
    raised: list[int] = []

    def fail(*_: Any) -> None:
        if not raised:
            raised.append(1)
            raise kind("in step")

    run.start()
    run.update()
    run.optimizer.register_step_pre_hook(fail)
    run.gradients()
    try:
        run.step()
    except kind:
        run.optimizer.zero_grad()
    run.update(times=2)


def _in_exchange(run: Loop, kind: type[BaseException]) -> None:
    """The first rank is interrupted while it waits for the second, which comes after that."""
    if run.plain:  # nothing is awaited, so nothing is interrupted
        run.start()
        run.update(times=3)
        return
    import torch.distributed as dist

    store = dist.distributed_c10d._get_default_store()
    signal.signal(signal.SIGINT, _raises(kind))
    once: list[bool] = []

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        loss = mse(model, batch)
        if not once:
            once.append(True)
            if run.rank == 0:
                waiting = (store, threading.get_native_id())
                threading.Thread(target=_interrupt, args=waiting, daemon=True).start()
            else:
                store.wait(["interrupted"])
        return loss

    run.start()
    run.update()
    try:
        run.update(loss_of)
    except kind:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    run.update()


def _interrupt(store: Any, main: int) -> None:
    """Once the main thread waits for something, and does not just wait for a core."""
    waits = 0
    while waits < 5:
        time.sleep(0.01)
        stat = Path(f"/proc/self/task/{main}/stat").read_text()
        waits = waits + 1 if stat.rpartition(")")[2].split()[0] == "S" else 0
    os.kill(os.getpid(), signal.SIGINT)
    store.set("interrupted", "1")  # where it waits in C++, it sees that when the other has come


def _raises(kind: type[BaseException]) -> Callable[..., None]:
    def handler(*_: Any) -> None:
        raise kind("a signal")

    return handler


for _kind, _name in ((Stopped, "exception"), (KeyboardInterrupt, "KeyboardInterrupt")):
    for _where, _run in (
        ("forward", _in_forward),
        ("backward", _in_backward),
        ("exchange", _in_exchange),
        ("step", _in_step),
    ):
        _needs = ("not DDP",) if _where in ("backward", "exchange") else ()
        habit(f"{_name} in {_where}, then on", *_needs, apart=_where == "exchange")(
            lambda run, do=_run, kind=_kind: do(run, kind)
        )
