"""Runs one stage of a model: the model's own forward, entered at one cut and left at the next.

Never traces or rewrites the model, and never communicates. Modules before the stage do not compute:
they return placeholders of the shapes that were seen when they ran. So what lies between modules
(residual additions, masks, position ids) runs as it is written, on every stage, and one tensor
travels: the first floating-point argument of the module at the cut.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from slipstream.errors import ModelError
from slipstream.parallel.pipeline.placeholders import (
    Act,
    TensorSpec,
    has_nan,
    placeholder,
    replaced,
)
from slipstream.parallel.pipeline.split_points import Cuts
from slipstream.pytree import mapped

Seen = dict[str, list[Any]]
"""By path of a module: what each of its calls returned, `TensorSpec` instead of tensors."""


class _Left(BaseException):
    """The next stage begins; a BaseException, so that no ``except Exception`` holds it up."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = hidden


@dataclass
class _Run:
    """One forward of one stage."""

    stage: int
    received: torch.Tensor | None
    entered: bool
    ended: bool = False
    seen: Seen | None = None
    calls: Counter[str] = field(default_factory=Counter)


class Stages:
    """The stages of a model, which runs from outside as it is.

    Args:
        model: any module; its parameters and submodules stay in their places.
        cuts: of this model, from `cut_model`.

    Example:
        >>> from slipstream.parallel.pipeline.split_points import cut_model
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
        >>> stages, x = Stages(model, cut_model(model, ["1"])), torch.ones(4, 2)
        >>> hidden, seen = stages.watch(0, None, (x,), {}, {})
        >>> hidden.shape
        torch.Size([4, 3])
        >>> torch.equal(stages.run(1, hidden, (x,), {}, seen), model(x))
        True
    """

    def __init__(self, model: nn.Module, cuts: Cuts) -> None:
        self.model, self.cuts = model, cuts
        self.running = False
        numbers = range(cuts.stages)
        self._before = [cuts.before(stage) for stage in numbers]
        self._after = [cuts.after(stage) for stage in numbers]
        self._ending = [cuts.ending(stage) for stage in numbers]

    def run(
        self,
        stage: int,
        received: torch.Tensor | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        seen: Mapping[str, list[Any]],
    ) -> Any:
        """Forward of one stage.

        Args:
            stage: its number, from 0.
            received: what the stage before returned; None for the first.
            args: of the whole model, the same on every stage.
            kwargs: as ``args``.
            seen: what `watch` saw on the stages before, at inputs of these shapes.

        Returns:
            The tensor that goes to the next stage; of the last stage, what the model returns.

        Raises:
            ModelError: the model called its modules otherwise than when it was watched.
        """
        return self._forward(_Run(stage, received, stage == 0), args, kwargs, seen)

    def watch(
        self,
        stage: int,
        received: torch.Tensor | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        seen: Mapping[str, list[Any]],
    ) -> tuple[Any, Seen]:
        """As `run`, and what the modules that end in this stage returned, for the stages after it.

        Raises:
            ModelError: modules run in another order than they are registered in, a module at a cut
                takes no tensor or more than one from before, or the stage returns NaN because it
                uses a value from before its cut.
        """
        run = _Run(stage, received, stage == 0, seen={})
        result = self._forward(run, args, kwargs, seen)
        if stage > 0 and has_nan(result) and not has_nan(received):
            raise ModelError(
                f"NaN comes out of stage {stage}, since a value (or a parameter) from before "
                f"{self.cuts.paths[stage - 1]!r} is used after it, e.g. across a residual block; "
                "cut where one tensor flows"
            )
        assert run.seen is not None
        return result, run.seen

    def _forward(
        self,
        run: _Run,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        seen: Mapping[str, list[Any]],
    ) -> Any:
        self.running = True
        try:
            with replaced(self.model, self._acts(run, seen)):
                result = self.model(*args, **kwargs)
        except _Left as left:
            return left.hidden
        except RuntimeError as error:
            if "single memory location" in str(error):  # torch's words, of an expanded tensor
                raise ModelError(
                    "the model writes in place to what a module before "
                    f"{self.cuts.paths[run.stage - 1]!r} returned, where only its shape is known; "
                    "write x = x + y instead of x += y there, or cut before it"
                ) from error
            raise
        finally:
            run.ended, self.running = True, False
        missed = self.cuts.paths[run.stage :] if run.entered else self.cuts.paths[run.stage - 1 :]
        if missed:
            raise ModelError(
                f"the model returned without a call of {missed[0]!r}; "
                "allowed: cuts at modules that every forward calls"
            )
        return result

    def _acts(self, run: _Run, seen: Mapping[str, list[Any]]) -> dict[str, Act]:
        """What happens at the modules of other stages, and at the two cuts."""
        cuts, stage = self.cuts.paths, run.stage
        acts = {path: self._stand_in(run, path, seen.get(path, [])) for path in self._before[stage]}
        acts |= {path: self._too_early(run, path) for path in self._after[stage]}
        if stage > 0:
            acts[cuts[stage - 1]] = _enter(run, cuts[stage - 1])
        if stage < len(cuts):
            acts[cuts[stage]] = _leave(run, cuts[stage])
        if run.seen is not None:
            for path in [*acts, *self._ending[stage]]:
                acts[path] = _watched(run, run.seen, path, acts.get(path, _call))
        return acts

    def _stand_in(self, run: _Run, path: str, returned: list[Any]) -> Act:
        def act(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if run.entered:
                if path in self.cuts.stateful:
                    raise self._out_of_order(path, run.stage, "before", "runs after")
                return module(*args, **kwargs)
            number = run.calls[path]
            run.calls[path] += 1
            if number >= len(returned):
                raise ModelError(
                    f"call {number + 1} of {path!r}, which was called "
                    f"{len(returned)} times when the stages were set up; a pipeline needs a model "
                    "that takes the same path every time"
                )
            return mapped(returned[number], placeholder, TensorSpec)

        return act

    def _too_early(self, run: _Run, path: str) -> Act:
        def act(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if path in self.cuts.stateful:
                raise self._out_of_order(path, run.stage + 1, "after", "runs before")
            return module(*args, **kwargs)

        return act

    def _out_of_order(self, path: str, stage: int, registered: str, runs: str) -> ModelError:
        cut = self.cuts.paths[stage - 1]
        return ModelError(
            f"{path!r} is registered {registered} {cut!r}, but {runs} it; allowed: a cut such that "
            "the modules before it run before it: choose another, or register them as they run"
        )


def _call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return module(*args, **kwargs)


def _watched(run: _Run, seen: Seen, path: str, act: Act) -> Act:
    """Each call is noted once, on the stage where it computes: not on one that comes there later
    and repeats it. A layer without a state, e.g. an activation, may have calls on several stages.
    """

    def watched(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = act(module, args, kwargs)
        if run.entered:
            seen.setdefault(path, []).append(mapped(result, TensorSpec.of))
        return result

    return watched


def _enter(run: _Run, path: str) -> Act:
    """The stage begins: the module gets what was received."""

    def act(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if run.entered and not run.ended:  # a checkpoint calls it again in backward
            raise ModelError(
                f"{path!r} is called twice in one forward; cut at a module that is called once"
            )
        run.entered = True
        place = _hidden(path, args, kwargs)
        if isinstance(place, int):
            args = (*args[:place], run.received, *args[place + 1 :])
        else:
            kwargs = {**kwargs, place: run.received}
        if run.seen is not None and has_nan([args, kwargs]) and not has_nan(run.received):
            raise ModelError(
                f"{path!r} takes more than one tensor that is computed before it; cut where one "
                "tensor flows"
            )
        return module(*args, **kwargs)

    return act


def _leave(run: _Run, path: str) -> Act:
    """The stage ends: what the module would have got is the stage's result."""

    def act(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not run.entered:
            raise ModelError(
                f"{path!r}, where stage {run.stage + 1} begins, runs before stage {run.stage} "
                "begins; give the cuts in order of execution"
            )
        place = _hidden(path, args, kwargs)
        raise _Left(args[place] if isinstance(place, int) else kwargs[place])

    return act


def _hidden(path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | str:
    """Where the tensor that travels is among the arguments: the first of a floating-point type,
    else the first."""
    given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    found = [(place, x) for place, x in given if isinstance(x, torch.Tensor)]
    if not found:
        raise ModelError(
            f"{path!r} takes no tensor but {[type(x).__name__ for _, x in given]}; cut at a module "
            "that takes the hidden tensor as an argument"
        )
    return next((place for place, x in found if x.is_floating_point()), found[0][0])
