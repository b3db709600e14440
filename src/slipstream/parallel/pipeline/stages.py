"""Runs one stage of a model: the model's own forward, entered at one split point, left at the next.

Nothing is traced, rewritten or communicated. Modules before the stage do not compute: they return
placeholders of the shapes that they returned when they were recorded. So code between modules
(residual additions, masks, position ids) runs on every stage as it is written. One tensor goes from
stage to stage: the first floating-point argument of the module at the split point.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from slipstream.comm.tensor_spec import TensorSpec
from slipstream.errors import ModelError
from slipstream.parallel.pipeline.micro_batches import MicroBatch
from slipstream.parallel.pipeline.placeholders import (
    CallOverride,
    has_nan,
    knows_nan,
    overridden_calls,
    placeholder,
)
from slipstream.parallel.pipeline.split_points import SplitPoints
from slipstream.pytree import mapped

Returned = dict[str, list[Any]]
"""By path of a module, what each of its calls returned, with `TensorSpec` in place of tensors."""


class _StageEnd(BaseException):
    """Leaves the forward at the next split point; a BaseException, so that no ``except Exception``
    of the model catches it."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = hidden


@dataclass
class _Run:
    """One forward of one stage.

    Attributes:
        received: the tensor from the stage before.
        entered: whether the stage has begun.
        ended: whether the forward is over; calls after that are recomputation in backward.
        recorded: what modules of this stage returned, where the run is recorded.
        calls: of modules before the stage, so far.
        integer: what modules before the stage return where they returned integers or bool.
        enter: called where the stage begins, if it is not the first.
    """

    stage: int
    received: torch.Tensor | None
    entered: bool
    ended: bool = False
    recorded: Returned | None = None
    calls: Counter[str] = field(default_factory=Counter)
    integer: int = 0
    enter: Callable[[], None] | None = None


class Stages:
    """The stages of a model, which stays as it is.

    Args:
        model: any module; its parameters and submodules stay in place.
        split_points: of this model.

    Attributes:
        running: whether a stage runs now.
        integers_checked: stages that use no integers of modules before them, by mode of training,
            and whether there is no loss.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
        >>> stages = Stages(model, SplitPoints.of(model, ["1"]))
        >>> batch = MicroBatch((torch.ones(4, 2),), {}, None)
        >>> hidden, returned = stages.run_recorded(0, None, batch, {})
        >>> hidden.shape
        torch.Size([4, 3])
        >>> torch.equal(stages.run(1, hidden, batch, returned), model(*batch.args))
        True
    """

    def __init__(self, model: nn.Module, split_points: SplitPoints) -> None:
        self.model, self.split_points = model, split_points
        self.running = False
        self.integers_checked: set[tuple[int, bool, bool]] = set()
        # Found once: a run of a stage needs them for every micro-batch.
        self._others = [
            (split_points.before(stage), split_points.after(stage), split_points.ending(stage))
            for stage in range(split_points.num_stages)
        ]

    def run(
        self,
        stage: int,
        received: torch.Tensor | None,
        batch: MicroBatch,
        returned: Returned,
        *,
        integer: int = 0,
        enter: Callable[[], None] | None = None,
    ) -> Any:
        """Run the forward of one stage.

        Args:
            stage: its number, from 0.
            received: what the stage before returned; None for the first.
            batch: inputs of the whole model, the same on every stage.
            returned: what `run_recorded` recorded on the stages before, for inputs of these shapes.
            integer: takes the place of integers and bool in ``returned``.
            enter: called where the stage begins, if it is not the first.

        Returns:
            The tensor for the next stage; of the last stage, what the model returns.

        Raises:
            ModelError: the model called its modules differently than when it was recorded.
        """
        run = _Run(stage, received, stage == 0, integer=integer, enter=enter)
        return self._forward(run, batch, returned)

    def integers_before(self, stage: int, returned: Returned) -> list[str]:
        """The modules before a stage that returned a tensor which cannot be NaN."""
        return [
            path
            for path in self._others[stage][0]
            if not all(map(knows_nan, _specs(returned.get(path, []))))
        ]

    def run_recorded(
        self, stage: int, received: torch.Tensor | None, batch: MicroBatch, returned: Returned
    ) -> tuple[Any, Returned]:
        """Do as `run`; also return what modules that end in this stage returned, for later stages.

        Raises:
            ModelError: modules run in another order than they are registered in, a module at a
                split point takes no tensor or more than one from before, or the stage returns NaN
                because it uses a value from before its split point, or a parameter of another
                stage.
        """
        recorded: Returned = {}
        run = _Run(stage, received, stage == 0, recorded=recorded)
        result = self._forward(run, batch, returned)
        taken = received if stage > 0 else [batch.args, batch.kwargs]
        # rows that a mask leaves out may be NaN by themselves, and never come into the loss
        found = has_nan(result) if stage > 0 else has_nan(result, everywhere=True)
        if found and not has_nan(taken):
            paths = self.split_points.paths
            behind = f"a parameter of a module behind {paths[stage]!r}" if paths[stage:] else ""
            before = f"a value (or a parameter) from before {paths[stage - 1]!r} is used after it"
            before += ", e.g. across a residual block (cut where one tensor flows)"
            reasons = [before if stage > 0 else "", f"{behind} is used in it" if behind else ""]
            raise ModelError(
                f"NaN comes out of stage {stage}: either {', or '.join(filter(None, reasons))}, or "
                "the model itself computes NaN there (look at its parameters, and at rows that are "
                "masked wholly)"
            )
        return result, recorded

    def _forward(self, run: _Run, batch: MicroBatch, returned: Returned) -> Any:
        paths = self.split_points.paths
        self.running = True
        try:
            with overridden_calls(self.model, self._overrides(run, returned)):
                result = self.model(*batch.args, **batch.kwargs)
        except _StageEnd as end:
            return end.hidden
        except RuntimeError as error:
            # torch's message for a write to an expanded tensor, which a placeholder is.
            if "single memory location" in str(error):
                raise ModelError(
                    "the model writes in place to what a module before "
                    f"{paths[run.stage - 1]!r} returned, where only its shape is known; "
                    "write x = x + y instead of x += y there, or cut before it"
                ) from error
            raise
        finally:
            run.ended, self.running = True, False
        if missed := paths[run.stage if run.entered else run.stage - 1 :]:
            raise ModelError(
                f"the model returned without a call of {missed[0]!r}; "
                "allowed: a cut at modules that every forward calls"
            )
        return result

    def _overrides(self, run: _Run, returned: Returned) -> dict[str, CallOverride]:
        """The answers of modules of other stages, and at the stage's two split points."""
        paths, stage = self.split_points.paths, run.stage
        before, after, ending = self._others[stage]
        overrides = {path: self._skip_call(run, path, returned.get(path, [])) for path in before}
        overrides |= {path: self._refuse_stateful(run, path) for path in after}
        if stage > 0:
            overrides[paths[stage - 1]] = _enter_stage(run, paths[stage - 1])
        if stage < len(paths):
            overrides[paths[stage]] = _leave_stage(run, paths[stage])
        if run.recorded is not None:
            for path in [*overrides, *ending]:
                overrides[path] = _record_call(run, run.recorded, path, overrides.get(path, _call))
        return overrides

    def _skip_call(self, run: _Run, path: str, returned: list[Any]) -> CallOverride:
        """A module before the stage returns placeholders."""

        def override(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if run.entered:
                if path in self.split_points.stateful:
                    raise self._out_of_order(path, run.stage, "before", "runs after")
                return self._call_outside(path, run.stage, "before", module, args, kwargs)
            number = run.calls[path]
            run.calls[path] += 1
            if number >= len(returned):
                raise ModelError(
                    f"call {number + 1} of {path!r}, which was called {len(returned)} times when "
                    "the stages were set up; a pipeline needs a model that takes the same path "
                    "every time"
                )
            return mapped(returned[number], partial(placeholder, integer=run.integer), TensorSpec)

        return override

    def _refuse_stateful(self, run: _Run, path: str) -> CallOverride:
        """A module after the stage runs early, which only a module without a state may do."""

        def override(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if path in self.split_points.stateful:
                raise self._out_of_order(path, run.stage + 1, "after", "runs before")
            return self._call_outside(path, run.stage + 1, "after", module, args, kwargs)

        return override

    def _call_outside(
        self, path: str, stage: int, registered: str, module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        """Call a module on stages other than its own, which must not change what it keeps."""
        before = [buffer._version for buffer in module.buffers()]
        result = module(*args, **kwargs)
        if before != [buffer._version for buffer in module.buffers()]:
            runs = "changes its buffers " + ("after" if registered == "before" else "before")
            raise self._out_of_order(path, stage, registered, runs)
        return result

    def _out_of_order(self, path: str, stage: int, registered: str, runs: str) -> ModelError:
        split_point = self.split_points.paths[stage - 1]
        return ModelError(
            f"{path!r} is registered {registered} {split_point!r}, but {runs} it; choose another "
            "cut, or register the modules in the order in which they run"
        )


def _specs(value: Any) -> list[TensorSpec]:
    specs: list[TensorSpec] = []

    def see(spec: TensorSpec) -> TensorSpec:
        specs.append(spec)
        return spec

    mapped(value, see, TensorSpec)
    return specs


def _call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return module(*args, **kwargs)


def _record_call(run: _Run, recorded: Returned, path: str, override: CallOverride) -> CallOverride:
    """Record each call once, on the stage where it computes, and not on a later one that skips it.

    A layer without a state, e.g. an activation, may have calls on several stages.
    """

    def recording(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = override(module, args, kwargs)
        if run.entered:
            recorded.setdefault(path, []).append(mapped(result, TensorSpec.of))
        return result

    return recording


def _enter_stage(run: _Run, path: str) -> CallOverride:
    """The module at which the stage begins gets the received tensor."""

    def override(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Once the forward has ended, a second call is a checkpoint that recomputes it in backward.
        if run.entered and not run.ended:
            raise ModelError(
                f"{path!r} is called twice in one forward; cut at a module that is called once"
            )
        run.entered = True
        key = _hidden_argument(path, args, kwargs)
        if isinstance(key, int):
            args = (*args[:key], run.received, *args[key + 1 :])
        else:
            kwargs = {**kwargs, key: run.received}
        if run.recorded is not None and has_nan([args, kwargs]) and not has_nan(run.received):
            raise ModelError(
                f"{path!r} takes more than one tensor that is computed before it (cut where one "
                "tensor flows), or an input of the model itself that has NaN"
            )
        if run.enter is not None:  # in recomputation, too
            run.enter()
        return module(*args, **kwargs)

    return override


def _leave_stage(run: _Run, path: str) -> CallOverride:
    """The stage returns what the module at the next split point would have received."""

    def override(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not run.entered:
            raise ModelError(
                f"{path!r}, where stage {run.stage + 1} begins, runs before stage {run.stage} "
                "begins; give the paths of cut in order of execution"
            )
        key = _hidden_argument(path, args, kwargs)
        raise _StageEnd(args[key] if isinstance(key, int) else kwargs[key])

    return override


def _hidden_argument(path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | str:
    """Position or name of the tensor that goes from stage to stage: the first floating-point one,
    else the first one.
    """
    given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    tensors = [(key, x) for key, x in given if isinstance(x, torch.Tensor)]
    if not tensors:
        raise ModelError(
            f"{path!r} takes no tensor but {[type(x).__name__ for _, x in given]}; cut at a module "
            "that takes the hidden tensor as an argument"
        )
    return next((key for key, x in tensors if x.is_floating_point()), tensors[0][0])
