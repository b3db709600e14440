"""``half_weights``: 16-bit weights and activations, fp32 masters for the optimizer.

[Note: One parameter, two values] Parameters stay the user's objects, in the model and in the
optimizer's groups; only their ``data`` changes. It is 16-bit while the model computes. While the
optimizer steps or loads a state, it is the fp32 master, so the optimizer's state is fp32, too;
afterwards the masters are rounded into the 16-bit tensors, whose storage never changes. Autograd
accumulates gradients in fp32 (``Tensor.grad_dtype``), across backward passes and for clipping.

``model.state_dict()`` returns the masters and ``load_state_dict()`` takes them, and outside of the
model's computing ``parameter.data`` is the master (``masters``). If user code writes into a
parameter itself between steps, the new 16-bit value no longer equals the rounded master and
replaces it. Copies of the model are plain fp32 models (``plain_copy``). A second optimizer that
steps the same parameters is refused at its first step: updates smaller than the 16-bit rounding
would be lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from slipstream.errors import UsageError
from slipstream.optim.nested_step import around_all, closure_of
from slipstream.plain_copy import attach, copy_as
from slipstream.precision.casts import HALF_TYPES, cast
from slipstream.precision.float_modules import Modules, WrappedForward, modules_in_float
from slipstream.precision.half_checks import check_half_weights
from slipstream.precision.late import LateParameters
from slipstream.precision.masters import Masters, ShardOf, everything, wide
from slipstream.strategy import HalfType


class HalfWeights:
    """A model with 16-bit weights; made by `half_weights`.

    Args:
        shard_of: what this rank updates; it has the masters of that alone.

    Attributes:
        floats: the modules that stay fp32, by path.
        num_half: number of 16-bit parameter values.
        master_bytes: memory of the masters.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        dtype: torch.dtype,
        floats: Modules,
        shard_of: ShardOf = everything,
    ) -> None:
        self._model, self._optimizer, self._dtype, self.floats = model, optimizer, dtype, floats
        inside = {m for module in floats.values() for m in module.modules()}
        self._modules = [m for m in model.modules() if m not in inside]
        self._former: dict[nn.Parameter, torch.dtype] = {}
        self._masters = Masters(dtype, shard_of)
        self._buffers: dict[tuple[nn.Module, str], torch.Tensor] = {}
        self._widened: list[tuple[nn.Module, str]] = []
        places = Counter(p for _, p in model.named_parameters(remove_duplicate=False))
        self._tied = {p for p, count in places.items() if count > 1}
        self._last_saved: dict[nn.Parameter, Callable[[], torch.Tensor | None]] = {}
        self._undo: list[Callable[[], None]] = []
        try:
            self._narrow()
            self._widen(inside)
            self._late = LateParameters(model, inside, dtype)
            self._float_types = {p: p.dtype for m in inside for p in m.parameters(recurse=False)}
            self._undo.extend(self._hooks())
        except BaseException:  # most often out of memory
            self.close()
            raise
        self.num_half = sum(half.numel() for half in self._masters.halves.values())
        self.master_bytes = sum(master.nbytes for master in self.masters.values())

    @property
    def masters(self) -> dict[nn.Parameter, torch.Tensor]:
        """fp32 values by parameter."""
        return self._masters.values

    def close(self) -> None:
        """Restore parameters from their masters, in their former dtypes; idempotent."""
        # In this order: what the script has written into 16-bit weights goes into the masters, then
        # hooks that keep both alike come off, and only then do parameters change their types.
        self._masters.refresh()
        self._masters.swap_out()
        while self._undo:
            self._undo.pop()()
        for parameter in self._masters.halves:
            self._masters.release(parameter)
        for (module, name), former in self._buffers.items():
            if (buffer := module._buffers.get(name)) is not None:  # a script may drop one
                buffer.data = wide(buffer, former, self._dtype)
        for module, name in self._widened:
            if (buffer := module._buffers.get(name)) is not None:
                buffer.data = buffer.data.to(self._dtype)
        for parameter, dtype in self._former.items():
            gradient, parameter.grad = parameter.grad, None
            self._recast(parameter, dtype)
            parameter.data = self._masters.whole(parameter).to(dtype)
            parameter.grad_dtype = dtype
            parameter.grad = None if gradient is None else gradient.to(dtype)
        self._masters = Masters(self._dtype, everything)
        self._former, self._buffers, self._widened = {}, {}, []

    def _narrow(self) -> None:
        """Make parameters and buffers of the 16-bit modules 16-bit."""
        for module in self._modules:
            for parameter in module.parameters(recurse=False):
                narrowed = parameter.dtype in (torch.float32, self._dtype)
                if parameter not in self._former and narrowed:
                    self._change(parameter, self._dtype)
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.dtype == torch.float32:
                    self._buffers[module, name] = kept = buffer.detach().clone()
                    buffer.data = buffer.data.to(self._dtype)
                    self._undo.append(copy_as(buffer, partial(wide, buffer, kept, self._dtype)))

    def _widen(self, modules: Iterable[nn.Module]) -> None:
        """Make parameters and buffers of the fp32 modules fp32, if the model was 16-bit before."""
        for module in modules:
            for parameter in module.parameters(recurse=False):
                if parameter.dtype == self._dtype:
                    self._change(parameter, torch.float32)
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.dtype == self._dtype:
                    wide = buffer.data.float()
                    self._widened.append((module, name))
                    buffer.data = wide

    def _change(self, parameter: nn.Parameter, dtype: torch.dtype) -> None:
        """Make ``parameter`` ``dtype`` for the model and fp32 for the optimizer."""
        self._former[parameter] = parameter.dtype
        self._recast(parameter, torch.float32)
        gradient = None if parameter.grad is None else parameter.grad.float()
        before, values = parameter.data, parameter.data.to(dtype)
        parameter.grad = None  # torch refuses data of another type than the gradient's
        parameter.data = values
        parameter.grad_dtype = torch.float32
        parameter.grad = gradient
        if dtype != torch.float32:
            self._undo.append(copy_as(parameter, partial(self._masters.whole, parameter)))
            self._masters.add(parameter, before)

    def _recast(self, parameter: nn.Parameter, dtype: torch.dtype) -> None:
        """Cast the optimizer state of a parameter that was 16-bit before ``half_weights``."""
        if self._former[parameter] == torch.float32:
            return
        state = self._optimizer.state.get(parameter, {})
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                state[key] = value.to(dtype)

    def _hooks(self) -> Iterator[Callable[[], None]]:
        """Install the hooks that cast and that swap masters; yield how to remove each."""
        model, optimizer = self._model, self._optimizer
        for module in self.floats.values():
            yield attach(module.register_forward_pre_hook, self._to_float, with_kwargs=True)
            yield attach(module.register_forward_hook, self._to_half)
        yield WrappedForward(model, self._compute).remove
        yield attach(model.register_forward_pre_hook, self._enter, with_kwargs=True)
        yield attach(model.register_forward_hook, self._leave)
        yield self._watch_others()
        yield optimizer.register_step_pre_hook(around_all(self._step_begins)).remove
        yield optimizer.register_step_post_hook(around_all(self._swap_in_halves)).remove
        yield optimizer.register_load_state_dict_pre_hook(self._swap_in_masters).remove
        yield optimizer.register_load_state_dict_post_hook(self._swap_in_halves).remove
        for module in self._modules:
            yield attach(module.register_state_dict_post_hook, self._save)
            yield attach(module.register_load_state_dict_pre_hook, self._load)

    def _check_masters(self, held: Iterable[nn.Parameter]) -> None:
        """Refuse to step on 16-bit parameters without masters."""
        late = {p for p in held if p.dtype == self._dtype and p not in self._former}
        if late:
            names = [name for name, p in self._model.named_parameters() if p in late]
            raise UsageError(
                f"the optimizer got {', '.join(names[:3]) or 'a parameter'} in {self._dtype} after "
                "half_weights or accelerate(), without an fp32 master; add it before, or make it "
                "fp32, so that it is cast while the model computes"
            )

    def _check_types(self) -> None:
        """Refuse to compute after ``model.half()`` and the like."""
        for parameter, dtype in self._float_types.items():
            if parameter.dtype is not dtype:
                names = [name for name, p in self._model.named_parameters() if p is parameter]
                raise UsageError(
                    f"{names[0] if names else 'a parameter'} was made {parameter.dtype}, by "
                    "model.half() or the like; with half weights this module is fp32: leave it "
                    "out, or call it before accelerate() or after close()"
                )

    def _to_float(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return cast(args, torch.float32), cast(kwargs, torch.float32)

    def _to_half(self, module: nn.Module, args: Any, output: Any) -> Any:
        return cast(output, self._dtype)

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._swap_in_halves()  # the last step may have raised
        if not torch.compiler.is_compiling():
            self._check_types()
            self._masters.refresh()
        return cast(args, self._dtype), cast(kwargs, self._dtype)

    def _compute(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Know when the model computes; no hook is called where the keyboard interrupts it."""
        if torch.compiler.is_compiling():
            return forward(*args, **kwargs)
        masters = self._masters  # `close` inside would replace them
        masters.depth += 1
        try:
            self._late.narrow()
            output = forward(*args, **kwargs)
        finally:
            masters.depth -= 1
            self._late.widen()
            written = masters.written_inside()
        if written:
            names = [name for name, p in self._model.named_parameters() if p in written]
            raise UsageError(
                f"{', '.join(names[:3])}: frozen, and written through .data inside the model's "
                "forward, where it has 16 bits, in which the small steps of an average (a momentum "
                "encoder) are lost; with half weights update it after session.step(), where .data "
                "is the fp32 master, or use precision autocast"
            )
        return output

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        return cast(output, torch.float32)

    def _watch_others(self) -> Callable[[], None]:
        """Watch the steps of every optimizer; a weak reference, so that the hook keeps nothing
        alive."""
        me = ref(self)

        def begins(optimizer: Optimizer, *_: object) -> None:
            half = me()
            if half is not None and optimizer is not half._optimizer and not half._masters.stepping:
                half._refuse(optimizer)

        # Not taken off by the garbage collector, which may run while torch goes through the hooks:
        # that of a handle that was never closed stays, and does nothing.
        return register_optimizer_step_pre_hook(torch.compiler.disable(begins)).remove

    def _refuse(self, other: Optimizer) -> None:
        """Refuse a step of another optimizer on parameters with masters."""
        held = {p for group in other.param_groups for p in group["params"]}
        names = [n for n, p in self._model.named_parameters() if p in held and p in self.masters]
        if names:
            raise UsageError(
                f"{type(other).__name__}.step() on {', '.join(names[:3])}: only the "
                f"{type(self._optimizer).__name__} passed to half_weights steps the fp32 masters; "
                "give it all parameters, in groups of their own, or use precision autocast"
            )

    def _step_begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if closure_of(args, kwargs) is not None:
            raise UsageError(
                "optimizer.step(closure) with half weights: the closure would compute with the "
                "fp32 masters; compute loss and gradients before optimizer.step()"
            )
        self._swap_in_masters()

    def _swap_in_masters(self, *_: object) -> None:
        self._masters.swap_out()  # the last step may have raised
        held = [p for group in self._optimizer.param_groups for p in group["params"]]
        self._check_masters(held)
        self._masters.swap_in(held)

    def _swap_in_halves(self, *_: object) -> None:
        self._masters.swap_out()

    def _save(self, module: nn.Module, state: Any, prefix: str, _: object) -> None:
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter in self.masters:
                state[prefix + name] = self._saved(parameter, state)
        for name, buffer in module.named_buffers(recurse=False):
            if (module, name) in self._buffers and prefix + name in state:
                state[prefix + name] = wide(buffer, self._buffers[module, name], self._dtype)

    def _saved(self, parameter: nn.Parameter, state: Any) -> torch.Tensor:
        """Find a parameter in fp32: where it is tied, the tensor that the state has already."""
        last = self._last_saved.get(parameter, lambda: None)()
        if last is not None and any(value is last for value in state.values()):
            return last
        whole = self._masters.whole(parameter)
        if parameter in self._tied:
            self._last_saved[parameter] = ref(whole)
        return whole

    def _load(
        self, module: nn.Module, state: Any, prefix: str, metadata: dict[str, Any], *_: object
    ) -> None:
        if metadata.get("assign_to_params_buffers"):
            raise UsageError(
                "load_state_dict(assign=True) with half weights would replace the parameters; "
                "use assign=False"
            )
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            value = state.get(prefix + name)
            if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
                continue
            if parameter in self.masters:
                self._masters.whole(parameter)  # takes what was written into a copy of it before
                like = torch.empty_like(parameter, dtype=torch.float32).copy_(value.detach())
                master = self.masters[parameter]
                master.copy_(self._masters.shard_of(parameter, like))
        for (owner, name), kept in self._buffers.items():
            value = state.get(prefix + name)
            if owner is module and isinstance(value, torch.Tensor) and value.shape == kept.shape:
                kept.copy_(value.detach())

    def join(self, gather: Callable[[nn.Parameter, torch.Tensor], torch.Tensor]) -> None:
        """Make all masters whole: ``gather`` returns that of a parameter from this rank's part."""
        self._masters.join(gather)


def half_weights(
    model: nn.Module,
    optimizer: Optimizer,
    dtype: HalfType = "bf16",
    *,
    float_modules: Sequence[str] = (),
    shard_of: ShardOf = everything,
) -> HalfWeights:
    """Compute ``model`` in 16 bits while ``optimizer`` works on fp32 masters of its parameters.

    fp32 parameters and buffers become ``dtype``, except those of normalisation layers, rotary
    positions ("norm", "rotary" in the name of their class) and layers whose weights
    ``torch.nn.utils.parametrizations.orthogonal`` makes; parameters that are ``dtype`` already get
    masters, too; other types stay. Inputs are cast where they enter the model or a module that
    stays fp32; the model's outputs are fp32. The training loop stays as it is; with fp16, scale the
    loss, e.g. by ``torch.amp.GradScaler`` or by a session's loss scale. Name a module in
    ``float_modules`` if another buffer must be exact.
    Writes to parameters count, in place under ``torch.no_grad()`` or through ``.data``, which is
    the fp32 master outside of the model's forward and backward, as is ``detach()``; with
    ``shard_of`` both are fp32 copies, which count until the next step. fp32 parameters that enter
    the model later are cast while it computes. Only ``model`` itself casts: a submodule that is
    called directly takes and returns 16-bit tensors.

    Args:
        model: any module; ``close()`` restores fp32.
        optimizer: the only optimizer of its parameters; its state stays its own.
        dtype: of weights and activations.
        float_modules: patterns of module paths that stay fp32, too.
        shard_of: what this rank updates, if not everything; it has the masters of that alone.

    Exactness: lossy.

    Raises:
        StrategyError: a pattern matches no module, or one of two tied parameters.
        ModelError: the optimizer is not a torch.optim.Optimizer, computes gradients itself or holds
            no parameter of the model; or no parameter would change, e.g. because all are fp64.
        UsageError: later, at ``step(closure)``, at the step of another optimizer or with late
            16-bit parameters, and after ``model.half()`` or the like.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 1))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> half = half_weights(model, optimizer)
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()
        >>> weight = model[0].weight
        >>> weight.dtype, weight.grad.dtype, model.state_dict()["0.weight"].dtype
        (torch.bfloat16, torch.float32, torch.float32)
        >>> half.close()
        >>> weight.dtype
        torch.float32

    Source: opt level O2 of https://github.com/NVIDIA/apex, which copies gradients to masters in the
    optimizer's groups and keeps only batch normalisation in fp32.
    """
    floats = modules_in_float(model, float_modules, normalisation=True)
    check_half_weights(model, optimizer, dtype, floats)
    return HalfWeights(model, optimizer, HALF_TYPES[dtype], floats, shard_of)
