"""Windows of accumulation, by a setting or by hand: ``no_sync()`` and ``flush()``."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor, nn

from tests.conformance.habit import habit
from tests.conformance.loop import Batch, Loop, mse


@habit("accumulate: an epoch's last window is partial, flushed", "session")
def partial_window_flushed(run: Loop) -> None:
    run.start(accumulate=2)
    for _ in range(2):
        run.update()
        run.backward()
        run.step()
        run.flush()


@habit("accumulate: a partial window flushed, clipped", "session", "optimizer's momentum")
def partial_window_clipped(run: Loop) -> None:
    run.start(accumulate=3)
    run.update()
    run.backward()
    run.step()
    run.flush(max_norm=0.05)
    run.update()


@habit("every backward in no_sync(), step() behind it", "session")
def step_behind_no_sync(run: Loop) -> None:
    run.start()
    for _ in range(3 * run.accumulate):
        with run.no_sync():
            run.backward()
        run.step()


@habit("every backward in no_sync(), flush() behind it", "session")
def flush_behind_no_sync(run: Loop) -> None:
    run.start(accumulate=1)
    for _ in range(3):
        with run.no_sync():
            run.backward()
        run.flush()


@habit("a second backward in no_sync(), loss scale of one's own", "session")
def added_in_no_sync(run: Loop) -> None:
    run.start()
    for _ in range(3):
        run.gradients(scale=8.0)
        with run.no_sync():
            run.backward(scale=8.0)
        run.step()


@habit("accumulate by hand: the last backward alone outside no_sync()", "session")
def accumulated_by_hand(run: Loop) -> None:
    run.start()
    for _ in range(3 * run.accumulate):
        for _ in range(2):
            with run.no_sync():
                run.backward()
        run.backward()
        run.step()


@habit("accumulate by hand: a window that grows", "session")
def window_grows(run: Loop) -> None:
    run.start()
    for passes in (1, 2, 4):
        for _ in range(run.accumulate):
            for _ in range(passes - 1):
                with run.no_sync():
                    run.backward()
            run.backward()
            run.step()


@habit("a look at own gradients in no_sync(), zeroed", "session")
def looked_at_in_no_sync(run: Loop) -> None:
    run.start()
    for _ in range(3):
        with run.no_sync():
            run.backward()
        run.optimizer.zero_grad()
        run.update()


@habit("a backward fails in no_sync(), zeroed, and on", "session")
def failed_in_no_sync(run: Loop) -> None:
    run.start()
    for _ in range(2):
        with run.no_sync():
            run.backward()
            with contextlib.suppress(ZeroDivisionError):
                run.backward(_fails)
        run.optimizer.zero_grad()
        run.update(times=2)


@habit("a second backward fails in no_sync(), step() behind it", "session")
def second_failed_in_no_sync(run: Loop) -> None:
    run.start()
    for _ in range(2):
        run.gradients()
        with run.no_sync(), contextlib.suppress(ZeroDivisionError):
            run.backward(_fails)
        run.step()
    run.update()


def _fails(model: nn.Module, batch: Batch) -> Tensor:
    """A loss whose backward raises at once."""
    loss = mse(model, batch)
    loss.register_hook(_refuse)
    return loss


def _refuse(gradient: Tensor) -> Tensor:
    raise ZeroDivisionError


@habit("accumulate: zeroed at the top of the loop", "session")
def zeroed_at_the_top(run: Loop) -> None:
    run.start(accumulate=2)
    for _ in range(4):
        run.optimizer.zero_grad()
        run.backward()
        run.step()


@habit("accumulate: a window open at close() is told", "session", own_buffers=True)
def window_left_open(run: Loop) -> None:
    run.start(accumulate=2)
    run.update(times=2)
    run.backward()
    run.step()
    run.close()
    for parameter in run.model.parameters() if run.plain else ():
        parameter.grad = None
    run.note("told", run.plain or any("window" in text for text in run.warned))


@habit("clipping inside a window", "session")
def clipping_inside(run: Loop) -> None:
    """Plain torch clips the sum of the joined batches; partial sums of ranks are none."""
    run.start(accumulate=2)
    for _ in range(2):
        run.backward()
        run.clip(0.1)
        run.step()
        run.backward()
        run.step()


@habit("clipping inside a window by torch", "session")
def clipping_inside_by_torch(run: Loop) -> None:
    run.start(accumulate=2)
    for _ in range(2):
        run.backward()
        nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
        run.step()
        run.backward()
        run.step()


@habit("a scaler skips a window by hand, zeroed in no_sync()", "session")
def scaler_zeroed_in_no_sync(run: Loop) -> None:
    """Lightning zeroes so, behind a skipped step too."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)

    def scaled(model: nn.Module, batch: Batch) -> Tensor:
        return scaler.scale(0.5 * mse(model, batch))

    def overflows(model: nn.Module, batch: Batch) -> Tensor:
        return scaled(model, batch) * float("inf")

    run.start(accumulate=1)
    for number in range(4):
        with run.no_sync():
            run.optimizer.zero_grad()
            run.backward(scaled)
        run.backward(overflows if number == 1 else scaled)
        scaler.step(run.optimizer)
        scaler.update()
        run.note("scale", scaler.get_scale())
