"""The session's part of a trace: where iterations begin and end, and writing ``trace.json``.

Exchanges are recorded by the channel, the wait for data by the loader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from slipstream.fusion.chains import CONVOLUTIONS
from slipstream.gradients.interface import GradientEngine
from slipstream.gradients.layout import Gradient
from slipstream.gradients.segments import gradients_of, parameters_of
from slipstream.plain_copy import attach
from slipstream.pytree import tensors
from slipstream.session import trace_file
from slipstream.session.given import Given
from slipstream.session.gradient_norms import GradientNorms
from slipstream.sharding.checks import refusal_of_sharded
from slipstream.strategy import Row, ShardedConfig, Strategy
from slipstream.trace import chrome
from slipstream.trace.event import BACKWARD, FORWARD, OPTIMIZER, Framework, Trace
from slipstream.trace.recorder import Stamp
from slipstream.transport.consistency import collective_errors
from slipstream.tuner.speed_watch import SpeedWatch
from slipstream.tuner.turns import SETTLING


class Search(Protocol):
    """Takes windows of iterations before the user's; chooses from them what a strategy leaves
    open."""

    @property
    def steps(self) -> int:
        """Iterations in the next window."""

    @property
    def settled(self) -> bool:
        """Whether the choice no longer changes."""

    @property
    def outcome(self) -> str:
        """The result so far, as a sentence."""

    @property
    def in_use(self) -> Mapping[str, Any]:
        """Settings that it has put in the place of the strategy's, by group; None: no group."""

    @property
    def watch(self) -> SpeedWatch | None:
        """Watches the speed of updates once it has settled; None: nothing does."""

    def proceed(self, trace: Trace | None) -> bool:
        """Go on from a window, which rank 0 has; whether another follows. A collective."""

    def changed(self, update: int) -> bool:
        """Whether the speed of updates has changed and it begins anew. A collective, maybe."""


class NoTracing:
    """The tracer of a session that records nothing."""

    def loop_is_of(self, framework: Framework) -> None: ...

    def iteration_begins(self) -> None: ...

    def forward_begins(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None: ...

    def sees_loss(self, loss: torch.Tensor) -> None: ...

    def backward_begins(self, *, dummy_batch: bool) -> None: ...

    def backward_ends(self) -> None: ...

    def exchanged(self, ready: list[Stamp | None] | None) -> None: ...

    def flush_begins(self) -> None: ...

    def flushed(self) -> None: ...

    def update_begins(self) -> None: ...

    def update_ends(self) -> None: ...


class SessionTracer:
    """Tells the recorder what the session does; writes ``trace.json`` when all steps are recorded.

    An iteration begins where the last one ended, or where an epoch starts: what a script does
    between epochs belongs to no iteration. A search (``split: optimal``, ``transport: auto``,
    ``local: auto``) uses the recorder first, in windows of its own; that of the user's
    ``trace.steps`` comes after it. A search that begins anew later does the same again.

    Args:
        given: the recorder of this rank; the model, whose forward begins the forward span; the
            strategy, which says which steps, and where to write; ranks that share a model, of which
            each counts its part of the samples.
        engine: exchanges the gradients of the model.
        search: for the fastest exchange; None: there is none.
        computing: rows of the report on how the device computes.
    """

    def __init__(
        self,
        given: Given,
        engine: GradientEngine,
        search: Search | None,
        computing: Callable[[], Sequence[Row]],
    ) -> None:
        # Not ``given`` itself, whose handles hold this tracer: a circle would keep the groups of a
        # session that is over.
        assert given.recorder is not None
        self.recorder, self.model, self.optimizer = given.recorder, given.model, given.optimizer
        self.strategy, self.engine, self.dims = given.strategy, engine, given.dims
        self.search, self.device, self.computing = search, given.cluster.device, computing
        self._in_users_window = search is None
        self._aligned = self._closed = False
        self._watch: SpeedWatch | None = None  # while nothing is recorded until speed changes
        # Where in an iteration the training is:
        self._iteration = self._samples = self._batch_size = 0
        self._under_way = self._in_backward = False
        self._losses: list[torch.Tensor] = []
        self._forward_start: Stamp | None = None
        self._start: Stamp = 0.0
        self._end: Stamp = 0.0
        self.iteration_begins()  # a collective that may fail: before the hook is installed
        trained = [t.parameter for t in parameters_of(self.model, trainable=True)]
        strategy = self.strategy
        norms = trained if strategy.trace.norms and strategy.local is None else []
        self._norms = GradientNorms(norms, engine, self.recorder)
        self._remove_hook = self._hook_forward()
        trace_file.begin(self)

    def _hook_forward(self) -> Callable[[], None]:
        return attach(
            self.model.register_forward_pre_hook,
            lambda _, args, kwargs: self.forward_begins(args, kwargs),
            with_kwargs=True,
        )

    def loop_is_of(self, framework: Framework) -> None:
        """Note for all traces whose loop this is."""
        self.recorder.meta["framework"] = framework._asdict()

    def iteration_begins(self) -> None:
        """Aligns the clocks, a collective, before the first iteration that is recorded."""
        if self._closed or self._under_way:
            return
        if self._iteration == self.recorder.first_step and not self._aligned:
            with collective_errors("the alignment of the clocks for the trace"):
                self.recorder.align(self.dims.control)
            self._aligned = True
        self.recorder.begin_step(self._iteration, self.recorder.stamp(self.device))
        self._forward_start = None

    def forward_begins(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """The model is called with these inputs."""
        # A forward inside backward is no new one: a stage of a pipeline, or a recomputed block. One
        # without gradients is an evaluation, or a teacher's.
        is_new = self._forward_start is None and not self._in_backward
        if self.recorder.active and is_new and torch.is_grad_enabled():
            self._forward_start = self.recorder.stamp(self.device)
            self._batch_size = batch_size([*args, *kwargs.values()])

    def sees_loss(self, loss: torch.Tensor) -> None:
        """Keep a copy on the device: a value would be waited for, and a graph writes it again."""
        if self.recorder.active:
            self._losses.append(loss.detach().float().clone())

    def backward_begins(self, *, dummy_batch: bool) -> None:
        """Forward and loss are done; the samples of a dummy batch do not count."""
        self._under_way = self._in_backward = True
        self._samples += 0 if dummy_batch else self._batch_size
        self._batch_size = 0
        if self._watch is not None:
            self._watch.backward_begins()
        if self.recorder.active:
            self._start = self.recorder.stamp(self.device)
            self.recorder.add(FORWARD, self._forward_start or self._start, self._start)
            self._forward_start = None

    def backward_ends(self) -> None:
        """All gradients of this rank are ready; exchanges may still run."""
        self._in_backward = False
        if self._watch is not None:
            self._watch.backward_ends()
        if self.recorder.active:
            self._end = self.recorder.stamp(self.device)

    def exchanged(self, ready: list[Stamp | None] | None) -> None:
        """The exchanges are done; ``ready``: when each gradient was, None: not recorded."""
        if self._watch is not None:
            self._watch.exchanged()
        args = {} if ready is None else {"gradients_ready": ready}
        self.recorder.add(BACKWARD, self._start, self._end, **args)
        self._norms.averaged()

    def flush_begins(self) -> None:
        """An exchange without a backward pass is next."""
        if self._watch is not None:
            self._watch.backward_begins()
            self._watch.backward_ends()

    def flushed(self) -> None:
        """The exchange of a flush has ended."""
        if self._watch is not None:
            self._watch.exchanged()

    def update_begins(self) -> None:
        """The optimizer is next."""
        if self.recorder.active:
            self._start = self.recorder.stamp(self.device)

    def update_ends(self) -> None:
        """The iteration is over. Gathers the trace, a collective, after the last recorded one."""
        if self._closed:
            return
        if self.recorder.active:
            now = self.recorder.stamp(self.device)
            self.recorder.add(OPTIMIZER, self._start, now)
            ranks = self.dims.mesh.model_parallel
            samples = self._samples / ranks if ranks > 1 else self._samples
            args = {"samples": samples} if samples else {}
            self.recorder.end_step(now, **args, **self._mean_loss(), **self._norms.take())
        else:
            self.recorder.end_step()
        self._iteration += 1
        self._samples, self._under_way = 0, False
        self._losses = []
        if self._watch is not None:
            self._look()
        elif self.recorder.done:
            self._window_ends()
        if not self._closed:
            self.iteration_begins()

    def write(self) -> None:
        """Gather what was recorded, and write it on rank 0; a collective, the first time."""
        if not self._closed:
            self.drop()
            if self._in_users_window:
                self._write()
        trace_file.end(self)

    def _write(self) -> None:
        if not self.dims.connected:
            if self._has_recorded:
                trace_file.say_lost(self.recorder.rank)
            return
        trace = self._gather()
        if trace is not None and trace.events:
            path = trace_file.new_path(self, Path(self.strategy.trace.folder))
            chrome.leave(trace, path)

    @property
    def _has_recorded(self) -> bool:
        return self._iteration > self.recorder.first_step

    def abandon(self) -> None:
        """After an error other ranks may not be there to gather a trace; a single one writes it."""
        if self._closed or not (self._in_users_window and self._has_recorded):
            self.drop()
        elif self.dims.control is None:
            try:
                self.write()
            except Exception:  # the error that has ended the run is the one to see
                trace_file.say_lost(self.recorder.rank)
        else:
            self.drop()
            trace_file.say_lost(self.recorder.rank)
        trace_file.end(self)

    def drop(self) -> None:
        """Stop recording, without a collective."""
        self._closed = True
        self._remove_hook()
        self._norms.close()

    def _mean_loss(self) -> dict[str, torch.Tensor]:
        """Average the losses of this update's backward passes, if they were of losses."""
        losses = self._losses
        return {"loss": torch.stack([one.view(()) for one in losses]).mean()} if losses else {}

    def _window_ends(self) -> None:
        """All iterations of a window are recorded: for the search, or for the user."""
        search, config = self.search, self.strategy.trace
        if search is None or self._in_users_window:
            self._write()
            self._rest()
        elif not search.settled and search.proceed(self._gather()):
            self._next_window(self._iteration + SETTLING, search.steps)
        elif config.steps is not None:
            self._in_users_window = True
            self._next_window(max(config.skip, self._iteration + SETTLING), config.steps)
        else:
            self._rest()

    def _rest(self) -> None:
        """Record nothing any more, or nothing until the speed of updates changes."""
        self._in_users_window = False
        self._watch = None if self.search is None else self.search.watch
        if self._watch is None:
            self.drop()
        else:
            self._remove_hook()

    def _look(self) -> None:
        """See whether the search begins anew; a collective now and then."""
        assert self.search is not None
        if self.search.changed(self._iteration):
            self._watch = None
            self._remove_hook = self._hook_forward()
            self._next_window(self._iteration + SETTLING, self.search.steps)

    def _next_window(self, first_step: int, num_steps: int) -> None:
        self.recorder.restart(first_step, num_steps)
        self._aligned = False

    def _gather(self) -> Trace | None:
        self.recorder.meta |= _metadata(self.model, self.strategy, self.engine, self.search)
        self.recorder.meta["compute"] = [f"{r.setting}: {r.value}" for r in self.computing()]
        self.recorder.meta["optimizer"] = {
            "bytes": _state_bytes(self.optimizer),
            "shardable": _is_shardable(self.model, self.optimizer, self.strategy),
            "sgd": type(self.optimizer) is torch.optim.SGD,
        }
        with collective_errors("the gathering of the trace"):
            return self.recorder.gather(self.dims.control)


Tracer = NoTracing | SessionTracer


def _metadata(
    model: nn.Module, strategy: Strategy, engine: GradientEngine, search: Search | None
) -> dict[str, Any]:
    """Describe the session for a trace: model, strategy, segments and gradients."""
    document = strategy.document(full=True)
    if engine.order is None:  # nothing is exchanged, or not yet: assume reverse registration
        trainables = parameters_of(model, trainable=True)[::-1]
        gradients: Sequence[Gradient] = gradients_of(trainables, [0] * len(trainables))
    else:
        gradients = engine.gradients
        document["gradients"]["split"] = engine.split.document(full=True)
    in_use = {} if search is None else search.in_use
    for group, settings in in_use.items():
        document[group] = None if settings is None else {**document[group], **settings}
    places = {t.name: i for i, t in enumerate(parameters_of(model, trainable=True))}
    said = {} if search is None else {"search": search.outcome}
    return said | {
        "model": type(model).__name__,
        "convolutions": _convolutions(model),
        "strategy": document,
        "segments": [
            {"bytes": s.num_bytes, "wire_bytes": s.wire_bytes, "gradients": [*s.gradients]}
            for s in engine.segments
        ],
        "gradients": [
            {
                "name": g.name,
                "layer": g.layer,
                "bytes": g.num_bytes,
                "dtype": g.dtype,
                "registered": places.get(g.name, -1),
            }
            for g in gradients
        ],
        "change_bytes": _change_bytes(model, gradients),
    }


def _change_bytes(model: nn.Module, gradients: Sequence[Gradient]) -> int:
    """Bytes of a change of the parameters with gradients, in fp32 or wider."""
    names = {gradient.name for gradient in gradients}
    named = [(n, p) for n, p in model.named_parameters() if n in names]
    return sum(p.numel() * max(p.itemsize, 4) for _, p in named)


def _convolutions(model: nn.Module) -> float:
    """The part of the layers with matrices of weights that are convolutions."""
    layers = [m for m in model.modules() if any(w.ndim > 1 for w in m.parameters(recurse=False))]
    return sum(isinstance(layer, CONVOLUTIONS) for layer in layers) / max(len(layers), 1)


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes that this rank keeps for the optimizer."""
    states = [state for state in optimizer.state.values() if isinstance(state, Mapping)]
    values = (value for state in states for value in state.values())
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    # A sparse tensor knows no ``nbytes``; optimizers keep sparse state for sparse gradients alone.
    return sum(t.nbytes for t in tensors if t.layout is torch.strided)


def _is_shardable(model: nn.Module, optimizer: torch.optim.Optimizer, strategy: Strategy) -> bool:
    """Whether ``transport: sharded`` is or would be accepted here."""
    if isinstance(strategy.gradients.transport, ShardedConfig):
        return True
    return refusal_of_sharded(model, optimizer, strategy) is None


def batch_size(inputs: Iterable[Any]) -> int:
    """The size of the first axis of the first tensor; where all are in containers, as in the batch
    of a ``training_step``, the one that they share. 0: there is none; or they are images alike in
    kind, each a sample, whose first axis is that of channels."""
    jit: Any = torch.jit
    if jit.is_tracing():  # sizes are tensors there
        return 0
    given = [*inputs]
    sizes = [x.shape[0] for x in given if isinstance(x, torch.Tensor) and x.ndim]
    if not sizes:
        found = [x for x in tensors(given) if x.ndim]
        inside, kinds = {x.shape[0] for x in found}, {(x.dtype, x.ndim) for x in found}
        images = len(found) > 1 and len(kinds) == 1 and found[0].ndim == 3 and max(inside) <= 4
        sizes = [*inside] if len(inside) == 1 and not images else [0]
    return sizes[0]
