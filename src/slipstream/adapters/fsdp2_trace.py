"""The trace of a training under ``fully_shard``: what computes, and each of its collectives.

[Note: Compute is cut]
FSDP2 waits for a collective in the middle of forward or backward. These spans end where a
collective begins that is waited for, and go on behind it: so what is hidden is hidden indeed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather as AllGatherComm

from slipstream.pytree import tensors
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
        self._recorder = Recorder(rank, strategy.trace.skip, strategy.trace.steps)
        self._strategy, self._control = strategy, control
        self._aligned = self._closed = False
        self._phase: str | None = None
        self._since = self._optimizer_begun = 0.0
        self._step = self._samples = 0
        self._numbers = count(1)
        codec = strategy.gradients.codec
        self._recorder.meta = {
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
            optimizer.register_step_pre_hook(lambda *_: self._update_begins()),
            optimizer.register_step_post_hook(lambda *_: self._update_ends()),
        ]
        self._iteration_begins()

    def gather(self, module: str, torchs: AllGatherComm) -> AllGatherComm:
        """The all-gather of a module, done by torch, and recorded."""
        return _Gather(self, module, torchs)

    def gathers(self, comm: object) -> bool:
        """Whether this is one of `gather`."""
        return isinstance(comm, _Gather)

    def exchange_begins(self, *, waited_for: bool = True) -> float | None:
        """A collective begins, and computing stops where it is waited for; None: nobody records."""
        if not self._recorder.active:
            return None
        now = self._recorder.now()
        if waited_for:
            self._cut(now)
        return now

    def exchange_ends(
        self,
        name: Callable[[int], str],
        module: str,
        tensor: torch.Tensor,
        sent: int,
        start: float,
        *,
        waited_for: bool = True,
    ) -> None:
        """It has ended, and computing goes on; any thread may call, where nobody waits.

        Args:
            name: of the span, from its number in the iteration.
            module: whose parameters or gradients travelled.
            tensor: all of them, padded, in the dtype of before a codec.
            sent: bytes that this rank sent.
            start: what `exchange_begins` said.
            waited_for: as there.
        """
        end = self._recorder.now()
        dtype = str(tensor.dtype).removeprefix("torch.")
        args = {"bytes": tensor.nbytes, "sent": sent, "dtype": dtype, "module": module}
        self._recorder.add(name(next(self._numbers)), start, end, **args)
        if waited_for:
            self._since = end

    def write(self) -> None:
        """Gather what was recorded, and write it on rank 0; a collective, the first time."""
        if self._closed:
            return
        self._closed = True
        with collective_errors("the gathering of the trace"):
            trace = self._recorder.gather(self._control)
        if trace is not None and trace.events:
            path = Path(self._strategy.trace.folder) / "trace.json"
            chrome.write(trace, path)
            print(f"slipstream: trace written to {path}", file=sys.stderr)

    def close(self) -> None:
        """Record nothing more, without a collective."""
        self._closed, self._recorder.active = True, False
        for hook in self._hooks:
            hook.remove()

    # What the model and the optimizer do.

    def _forward_begins(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        # Inside backward a forward is one that is computed again (torch tells nowhere else, 2.13).
        again = torch._C._current_graph_task_id() != -1
        if self._recorder.active and torch.is_grad_enabled() and not again:
            self._samples += batch_size([*args, *kwargs.values()])
            if self._phase != FORWARD:
                self._enter(FORWARD)

    def _forward_ends(self, _: nn.Module, args: object, output: object) -> None:
        if self._recorder.active and self._phase == FORWARD:
            for tensor in tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(lambda _: self._backward_begins())

    def _backward_begins(self) -> None:
        if not self._recorder.active or self._phase == BACKWARD:
            return
        self._enter(BACKWARD)
        queue: Any = torch.autograd.Variable._execution_engine.queue_callback
        queue(partial(queue, self._leave))  # behind FSDP2's, which reduces what is left

    def _update_begins(self) -> None:
        if self._recorder.active:
            self._leave()
            self._optimizer_begun = self._recorder.now()

    def _update_ends(self) -> None:
        if self._closed:
            return
        if self._recorder.active:
            now = self._recorder.now()
            self._recorder.add(OPTIMIZER, self._optimizer_begun, now)
            samples = {"samples": self._samples} if self._samples else {}
            self._recorder.end_step(now, **samples)
        else:
            self._recorder.end_step()
        self._step += 1
        if self._recorder.done:
            self.write()
        else:
            self._iteration_begins()

    def _iteration_begins(self) -> None:
        """Align the clocks, a collective, before the first iteration that is recorded."""
        if self._step == self._recorder.first_step and not self._aligned:
            with collective_errors("the alignment of the clocks for the trace"):
                self._recorder.align(self._control)
            self._aligned = True
        self._phase, self._samples, self._numbers = None, 0, count(1)
        self._recorder.begin_step(self._step)

    def _enter(self, phase: str) -> None:
        self._leave()
        self._phase, self._since = phase, self._recorder.now()

    def _leave(self) -> None:
        self._cut(self._recorder.now())
        self._phase = None

    def _cut(self, now: float) -> None:
        """End the span of what is computed; the next one begins at ``_since``."""
        if self._phase is not None and now > self._since:
            self._recorder.add(self._phase, self._since, now)


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
        tracer = self._tracer
        start = tracer.exchange_begins(waited_for=not async_op)
        work = self._torchs(output_tensor, input_tensor, group, async_op)
        if start is None:
            return work
        sent, waited = output_tensor.nbytes - input_tensor.nbytes, not async_op
        parts = (all_gather, self._module, output_tensor, sent, start)
        ended = partial(tracer.exchange_ends, *parts, waited_for=waited)
        if work is not None and not waited:
            work.get_future().add_done_callback(lambda _: ended())
        else:
            ended()
        return work
