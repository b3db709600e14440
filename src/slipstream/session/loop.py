"""What happens inside a training loop, in one fixed order: backward passes, then an update.

Each part does its own work (engine, precision, tracer, accumulation window); here they are called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from slipstream.codecs.compressor import any_infinite
from slipstream.errors import UsageError
from slipstream.gradients.interface import GradientEngine
from slipstream.gradients.momentum import MomentumCorrection
from slipstream.parallel.dims import ParallelDims
from slipstream.parallel.full_state import FullState
from slipstream.parallel.pipeline.pipeline import Pipeline
from slipstream.precision.model_precision import ModelPrecision
from slipstream.session.accumulation import AccumulationWindow
from slipstream.session.tracing import Tracer


@dataclass
class TrainingLoop:
    """Backward passes and updates of one model.

    Attributes:
        model: gradients of all its parameters are cleared after an update.
        optimizer: steps once per update.
        window: counts the backward passes of an update.
        engine: averages the gradients.
        precision: scales the loss.
        momentum_correction: what codecs took over from the optimizer.
        dims: compares ranks that share the model.
        full_state: completes parameters that are still on their way.
        any_rank: whether a flag is up on any rank that holds a part of the gradients.
        tracer: records the spans.
        steps: updates so far.
        skipped: updates that were skipped because of gradients that were not finite.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    window: AccumulationWindow
    engine: GradientEngine
    precision: ModelPrecision
    momentum_correction: MomentumCorrection
    dims: ParallelDims
    full_state: FullState
    any_rank: Callable[[bool], bool]
    tracer: Tracer

    steps = skipped = 0
    _backward_done = _local_only = _compared = False

    def __post_init__(self) -> None:
        self._parameters = tuple(self.model.parameters())

    @property
    def window_open(self) -> bool:
        """Whether gradients were gathered that no update has used yet."""
        return self.window.contributions > 0

    # Backward passes.

    def backward(self, loss: torch.Tensor, *, retain_graph: bool, loss_scale: float) -> None:
        """Backward of one loss; raises as ``Session.backward``."""
        loss_scale = self._checked_scale(loss_scale, self.dims.check_same_loss, loss)

        def run() -> None:
            part = self.precision.scaled(loss)
            weight = self.window.weight
            part = part * weight if weight != 1.0 else part
            part = part / self.window.accumulate if self.window.accumulate > 1 else part
            part.backward(retain_graph=retain_graph)

        self._run_backward(run, loss_scale)

    def pipeline_backward(
        self,
        pipeline: Pipeline,
        loss_fn: Callable[[Any, Any], torch.Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: Any,
        *,
        loss_scale: float,
    ) -> torch.Tensor:
        """Forward and backward of all micro-batches; raises as ``Session.forward_backward``."""
        batch = (args, kwargs, target)
        loss_scale = self._checked_scale(loss_scale, self.dims.check_same_batch, batch)
        self.tracer.forward_begins(args, kwargs)
        scale = loss_scale * self.window.weight / self.window.accumulate
        loss = torch.full((), torch.nan)  # of a dummy batch, which is not computed

        def run() -> None:
            nonlocal loss
            loss = pipeline.forward_backward(loss_fn, args, kwargs, target, scale=scale)

        self._run_backward(run, loss_scale)
        return loss

    def _checked_scale(self, given: float, compare: Callable[[Any], None], value: object) -> float:
        """The loss scale of a backward pass.

        Ranks that share a model need the same batches; the first ones are compared.
        """
        loss_scale = self.precision.take(given)
        self.window.check_scale(loss_scale)
        if not self._compared:
            compare(value)
            self._compared = True
        return loss_scale

    def _run_backward(self, run: Callable[[], None], loss_scale: float) -> None:
        """``run`` a backward pass; average the gradients if an update follows it."""
        dummy_batch = self.window.count()
        self.full_state.complete()
        self.tracer.backward_begins(dummy_batch=dummy_batch)
        exchange = self.window.last and not self._local_only
        self.engine.begin(exchange=exchange, scale=self.window.scale, loss_scale=loss_scale)
        try:
            if not dummy_batch:  # such a rank takes part in the exchange, with zeros
                run()
        except BaseException as error:
            self.engine.abort(error)
            raise
        self.tracer.backward_ends()
        self.engine.end()
        self.tracer.exchanged(self.engine.ready)
        self._backward_done = True

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward passes add up gradients on this rank, and ``step()`` updates nothing."""
        before, self._local_only = self._local_only, True
        self.engine.local_only(True)
        try:
            yield
        finally:
            self._local_only = before
            self.engine.local_only(before)

    # Updates.

    def step(self) -> bool:
        """End a backward pass; whether parameters were updated, the same on every rank.

        Raises:
            UsageError: there was no backward pass since the last call.
        """
        if not self._backward_done:
            raise UsageError(
                "step() without a backward() before it: call session.backward(loss) first, "
                "then session.step(), once each for every batch"
            )
        self._backward_done = False
        if self._local_only or not self.window.advance():
            return False
        overflowed = self._overflowed()
        self._update(skip=overflowed)
        return not overflowed

    def _overflowed(self) -> bool:
        """Whether the update must be skipped; the same on every rank."""
        if self.engine.overflowed:
            return True
        if self.window.loss_scale == 1.0 and not self.precision.scales:
            return False  # without a loss scale, NaN gradients are an update like any other
        averages = self.engine.averages(self._parameters)
        infinite = [any_infinite(g._values() if g.is_sparse else g) for g in averages]
        # Averages are the same on all data-parallel ranks, unless each has a share of them; those
        # that share a model must agree.
        return self.any_rank(bool(infinite) and bool(torch.stack(infinite).any()))

    def _update(self, *, skip: bool) -> None:
        self.tracer.update_begins()
        if skip:
            self.skipped += 1
        else:
            self.momentum_correction.check()
            try:
                self.optimizer.step()
            except BaseException:
                self.full_state.complete()
                raise
            self.steps += 1
        self.optimizer.zero_grad(set_to_none=True)
        for parameter in self._parameters:  # also those that the optimizer does not hold
            parameter.grad = None
        self.window.close()
        self.precision.updated(skip)
        self.engine.updated(self.steps)
        self.tracer.update_ends()  # last, as it may change the split
