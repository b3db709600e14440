"""The trace of a training under ``fully_shard``: what computes, and each of its collectives.

[Note: Compute is cut]
FSDP2 waits for a collective in the middle of forward or backward. These spans end where a
collective begins that is waited for, and go on behind it: so what is hidden is hidden indeed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather as AllGatherComm

from slipstream.optim.nested_step import around_all
from slipstream.pytree import tensors
from slipstream.session import trace_file
from slipstream.session.tracing import batch_size
from slipstream.strategy import Strategy
from slipstream.trace import chrome
from slipstream.trace.event import BACKWARD, FORWARD, FULLY_SHARD, OPTIMIZER, all_gather
from slipstream.trace.recorder import Recorder
from slipstream.transport.consistency import collective_errors


class FsdpTracer:
    """Tells a recorder what FSDP2 does on this rank; writes ``trace.json`` after the last step.

    An iteration ends with the optimizer's step; the next one begins there.

    Args:
        model: its forwards are the forward spans; may be a part of it.
        optimizer: of the model.
        strategy: says which steps, and where to write.
        modules: that are gathered and reduced, by path.
        control: a group of all ranks; None: there is one.

    Attributes:
        recorder: of this rank.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        strategy: Strategy,
        modules: Sequence[str],
        control: dist.ProcessGroup | None,
    ) -> None:
        assert strategy.trace.steps is not None
        rank = 0 if control is None else dist.get_rank(control)
        self.recorder = Recorder(rank, strategy.trace.skip, strategy.trace.steps)
        self._strategy, self._control = strategy, control
        self._aligned = self._closed = False
        self._phase: str | None = None
        self._since = self._optimizer_begun = 0.0
        self._step = self._samples = 0
        self._numbers = count(1)
        codec = strategy.gradients.codec
        self.recorder.meta = {
            "model": type(model).__name__.removeprefix("FSDP"),
            "engine": FULLY_SHARD,
            "modules": [*modules],
            "strategy": {} if codec is None else {"gradients": {"codec": codec.document()}},
            "compute": [f"{FULLY_SHARD}: {len(modules)} modules"],
        }
        untraced: Any = torch.compiler.disable  # as torch's own hooks, by a compiled model
        begins = untraced(self._forward_begins)
        self._hooks: list[Any] = [
            # Before FSDP2's own, which gathers the parameters of the whole.
            model.register_forward_pre_hook(begins, prepend=True, with_kwargs=True),
            model.register_forward_hook(untraced(self._forward_ends)),
            optimizer.register_step_pre_hook(around_all(lambda *_: self._update_begins())),
        ]
        trace_file.begin(self)
        self._iteration_begins()

    def gather(self, module: str, torchs: AllGatherComm) -> AllGatherComm:
        """The all-gather of a module, done by torch, and recorded."""
        return _Gather(self, module, torchs)

    def gathers(self, comm: object) -> bool:
        """Whether this is one of `gather`."""
        return isinstance(comm, _Gather)

    def exchange_begins(self, *, waited_for: bool = True) -> float | None:
        """A collective begins, and computing stops where it is waited for; None: nobody records."""
        if not self.recorder.active:
            return None
        now = self.recorder.now()
        if waited_for:
            self._cut(now)
        return now

    def computing_goes_on(self) -> None:
        """Begin the next span of computing: nothing is waited for any more."""
        self._since = self.recorder.now()

    def next_number(self) -> int:
        """Count a collective of this iteration; the first one is 1."""
        return next(self._numbers)

    def write(self) -> None:
        """Gather what was recorded, and write it on rank 0; a collective, the first time."""
        if self._closed:
            return
        self._closed = True
        with collective_errors("the gathering of the trace"):
            trace = self.recorder.gather(self._control)
        if trace is not None and trace.events:
            path = trace_file.new_path(self, Path(self._strategy.trace.folder))
            chrome.leave(trace, path)

    def close(self) -> None:
        """Record nothing more, without a collective."""
        self._closed, self.recorder.active = True, False
        trace_file.end(self)
        for hook in self._hooks:
            hook.remove()

    # What the model and the optimizer do.

    def _forward_begins(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        # Inside backward a forward is one that is computed again (torch tells nowhere else, 2.13).
        again = torch._C._current_graph_task_id() != -1
        if self.recorder.active and torch.is_grad_enabled() and not again:
            self._samples += batch_size([*args, *kwargs.values()])
            if self._phase != FORWARD:
                self._enter(FORWARD)

    def _forward_ends(self, _: nn.Module, args: object, output: object) -> None:
        if self.recorder.active and self._phase == FORWARD:
            for tensor in tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(lambda _: self._backward_begins())

    def _backward_begins(self) -> None:
        if not self.recorder.active or self._phase == BACKWARD:
            return
        self._enter(BACKWARD)
        queue: Any = torch.autograd.Variable._execution_engine.queue_callback
        queue(partial(queue, self._leave))  # behind FSDP2's, which reduces what is left

    def _update_begins(self) -> None:
        if self.recorder.active:
            self._leave()
            self._optimizer_begun = self.recorder.now()

    def update_ends(self) -> None:
        """End an iteration; write the trace behind the last one, which makes this a collective."""
        if self._closed:
            return
        if self.recorder.active:
            now = self.recorder.now()
            self.recorder.add(OPTIMIZER, self._optimizer_begun, now)
            samples = {"samples": self._samples} if self._samples else {}
            self.recorder.end_step(now, **samples)
        else:
            self.recorder.end_step()
        self._step += 1
        if self.recorder.done:
            self.write()
        else:
            self._iteration_begins()

    def _iteration_begins(self) -> None:
        """Align the clocks, a collective, before the first iteration that is recorded."""
        if self._step == self.recorder.first_step and not self._aligned:
            with collective_errors("the alignment of the clocks for the trace"):
                self.recorder.align(self._control)
            self._aligned = True
        self._phase, self._samples, self._numbers = None, 0, count(1)
        self.recorder.begin_step(self._step)

    def _enter(self, phase: str) -> None:
        self._leave()
        self._phase, self._since = phase, self.recorder.now()

    def _leave(self) -> None:
        self._cut(self.recorder.now())
        self._phase = None

    def _cut(self, now: float) -> None:
        """End the span of what is computed; the next one begins at ``_since``."""
        if self._phase is not None and now > self._since:
            self.recorder.add(self._phase, self._since, now)


class _Gather(AllGatherComm):
    """The all-gather of a module: torch's own."""

    def __init__(self, tracer: FsdpTracer, module: str, torchs: AllGatherComm) -> None:
        self._tracer, self._module, self._torchs = tracer, module, torchs

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return self._torchs.allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        tracer, recorder = self._tracer, self._tracer.recorder
        start = tracer.exchange_begins(waited_for=not async_op)
        work = self._torchs(output_tensor, input_tensor, group, async_op)
        if start is None:
            return work
        name = all_gather(tracer.next_number())
        sent = output_tensor.nbytes - input_tensor.nbytes
        args = traced_args(self._module, output_tensor) | {"sent": sent}
        if work is None or not async_op:
            recorder.add(name, start, recorder.now(), **args)
            tracer.computing_goes_on()
        else:
            ended = work.get_future().add_done_callback
            ended(lambda _: recorder.add(name, start, recorder.now(), **args))
        return work


def traced_args(module: str, tensor: torch.Tensor) -> dict[str, Any]:
    """Arguments of the span in which all parameters or gradients of a module travel."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"module": module, "dtype": dtype, "bytes": tensor.nbytes, "sent": 0}
