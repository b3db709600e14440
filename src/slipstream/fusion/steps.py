"""The steps of a chain, as functions of torch that a `ChainInput` or a `Late` answers.

[Note: Where a chain runs]
A layer at the start of a chain is called as always, with its input as a `ChainInput`. Its forward
hands that to a function of torch, with all settings as they are in this call. So hooks of layers
fire, such as those that wait for parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from slipstream.fusion.late import (
    Late,
    LateOperation,
    Made,
    Norm,
    Pending,
    Relu,
    Sum,
    context_of,
    continuations,
    is_unseen,
    late,
    settled,
)
from slipstream.kernels.activations import ActivationName
from slipstream.kernels.add_act import add_act, is_alike, is_small as is_small_sum
from slipstream.kernels.batch_norm_act import batch_norm_act, batch_statistics, is_small
from slipstream.kernels.relu_depthwise import is_small as is_small_convolution, relu_depthwise
from slipstream.kernels.surroundings import product_type

Role = Literal["norm", "sum", "relu"]
"""What a layer starts: a chain of its batch norm, of a sum of its result, or of relu before a
depthwise convolution, where the layer is that relu or the one before it."""
NORM, SUM, BOTH = "batch norm + activation", "add + activation", "batch norm + add + activation"
DEPTHWISE = "relu + depthwise convolution"
LAYERS: dict[type[nn.Module], Any] = {
    kind: kind.forward
    for kind in (
        *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.ReLU, nn.Linear),
        *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    )
}
"""Layers that may start a chain, and their forwards, which hand their input to torch at once."""

_OF_TORCH = {
    function.__name__: function
    for function in (
        *(F.batch_norm, F.relu, F.relu6, F.hardtanh),
        *(F.silu, F.hardswish, F.sigmoid, F.tanh),
    )
}
"""Where one is replaced, torch would show the new one to a `ChainInput` or a `Late` again."""


class ChainInput(Tensor):
    """The input of a layer at the start of a chain, inside of its forward alone; a tensor, as
    modes of torch and wrappers around its functions may see it."""

    tensor: Tensor
    roles: set[Role]
    ran: Callable[[str], None]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        step = _STARTS.get(func)
        if step is not None and args and type(args[0]) is cls:
            return step(args[0], func, args[0].tensor, *args[1:], **kwargs)
        if len(args) == 1 and type(args[0]) is cls and not kwargs:
            return func(args[0].tensor)
        args, kwargs = tree_map(lambda v: v.tensor if type(v) is cls else v, (args, kwargs))
        return func(*args, **kwargs)


def as_start(tensor: Tensor, roles: set[Role], ran: Callable[[str], None]) -> ChainInput:
    """``tensor``, for a layer that may start a chain."""
    made = tensor.as_subclass(ChainInput)
    made.tensor, made.roles, made.ran = tensor, roles, ran
    return made


def may_start(layer: nn.Module, roles: set[Role], args: tuple[Any, ...]) -> bool:
    """Whether a chain may start in this call of a layer: it is torch's own, and no hook, transform
    or compiler follows what it does."""
    if len(args) != 1 or type(args[0]) is not Tensor or torch.compiler.is_compiling():
        return False
    if roles == {"norm"} and (is_small(args[0]) or not layer.training):  # the usual case: quickly
        return False
    # An autograd function, which gives its results a graph of its own, records no gradients.
    learns, inference, _, followed = context_of(args[0])
    return (
        learns
        and all(vars(F)[name] is function for name, function in _OF_TORCH.items())
        and type(layer).forward is LAYERS.get(type(layer))
        and not has_hooks(layer)
        and not (inference or followed or args[0].is_inference())
        and forward_ad._current_level < 0
    )


def has_hooks(layer: nn.Module) -> bool:
    """Whether somebody sees the calls of a layer."""
    return bool(
        layer._forward_hooks
        or layer._forward_pre_hooks
        or layer._backward_hooks
        or layer._backward_pre_hooks
    )


def _start_norm(
    start: ChainInput,
    func: Callable[..., Tensor],
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """``F.batch_norm``. Statistics are those of the call, whatever becomes of its result."""
    affine, running = (_arrived(weight), _arrived(bias)), (running_mean, running_var)
    fits = training and (running_mean is None) is (running_var is None)
    if not ("norm" in start.roles and fits and _fits(x, *affine, *running)):
        result = func(
            *(x, running_mean, running_var),
            weight=weight, bias=bias, training=training, momentum=momentum, eps=eps,
        )  # fmt: skip
        return _made(start, result)
    mean, variance = batch_statistics(x)
    if running_mean is not None and running_var is not None:
        count = x.numel() // x.shape[1]
        with torch.no_grad():
            unbiased = variance * (count / (count - 1))
            for kept, batch in ((running_mean, mean), (running_var, unbiased)):
                kept.mul_(1 - momentum).add_(batch.to(kept.dtype), alpha=momentum)
    return late(Norm(x, *affine, eps, (mean, variance)), start.ran)


def _arrived(parameter: Tensor | None) -> Tensor | None:
    """A parameter whose values are there: a transport that still gathers it is asked."""
    if parameter is not None and type(parameter) is not nn.Parameter:
        parameter.detach()
    return parameter


def _fits(x: Tensor, *of_channels: Tensor | None) -> bool:
    """Whether the kernel computes what torch does."""
    if is_small(x) or x.ndim < 2 or not x.shape[1] < x.numel() or not x.is_floating_point():
        return False
    wide = (x.dtype, torch.float32 if x.itemsize == 2 else x.dtype)
    return all(
        type(t) in (Tensor, nn.Parameter)
        and t.shape == x.shape[1:2]
        and t.dtype in wide
        and t.device == x.device
        and not t.is_inference()
        for t in of_channels
        if t is not None
    )


def _start_made(
    start: ChainInput, func: Callable[..., Tensor], *args: Any, **kwargs: Any
) -> Tensor:
    """A layer whose result is added, or is given to relu."""
    return _made(start, func(*args, **kwargs))


def _made(start: ChainInput, result: Tensor) -> Tensor:
    awaits_sum = "sum" in start.roles and not is_small_sum(result)
    awaits_relu = "relu" in start.roles and not is_small_convolution(result)
    if type(result) is not Tensor or not (awaits_sum or awaits_relu):
        return result
    return late(Made(result), start.ran)


def _start_relu(
    start: ChainInput, func: Callable[..., Tensor], x: Tensor, inplace: bool = False
) -> Tensor:
    if inplace or is_small_convolution(x):
        return func(x, inplace)
    return late(Relu(x), start.ran)


_CONVOLUTIONS = (torch.conv1d, torch.conv2d, torch.conv3d)
_STARTS: dict[Any, Callable[..., Tensor]] = {
    F.batch_norm: _start_norm,
    F.relu: _start_relu,
    **dict.fromkeys((*_CONVOLUTIONS, F.linear), _start_made),
}


def _open(value: Any) -> Pending | None:
    if type(value) is not Late or is_unseen(value):
        return None
    return value.pending if value.pending.is_open() else None


def _activate(name: ActivationName, x: Any, inplace: bool = False, **others: Any) -> Any:
    """The end of a chain, or relu before a convolution."""
    pending = _open(x)
    if pending is None or others:
        return NotImplemented
    operation = pending.checked()
    if isinstance(operation, Made):
        return _relu(name, x, pending, operation.values, inplace)
    result = _fused(operation, name, pending.ran)
    if result is None:
        return NotImplemented
    pending.is_passed = True
    if inplace:
        pending.settle(result)
    return result


def _relu(name: str, x: Any, pending: Pending, values: Tensor, inplace: bool) -> Any:
    if name != "relu" or is_small_convolution(values):
        return NotImplemented
    if not inplace:
        return late(Relu(values), pending.ran)
    pending.become(Relu(values))
    return x


def _fused(
    operation: LateOperation, name: ActivationName, ran: Callable[[str], None]
) -> Tensor | None:
    """A chain as one operation."""
    if isinstance(operation, Norm):
        ran(NORM)
        return _normed(operation, name)
    if not isinstance(operation, Sum):
        return None
    left, right = operation.terms
    for term, other in ((left, right), (right, left)):
        if isinstance(term, Norm):
            ran(BOTH)
            return _normed(term, name, other.compute())
    if is_small_sum(left.compute()):
        return None
    ran(SUM)
    return add_act(left.compute(), right.compute(), name)


def _normed(norm: Norm, name: ActivationName, residual: Tensor | None = None) -> Tensor:
    return batch_norm_act(
        *(norm.x, norm.weight, norm.bias, name),
        residual=residual,
        eps=norm.eps,
        statistics=norm.statistics,
    ).values


def _gelu(x: Any, approximate: str = "none", **others: Any) -> Any:
    names: dict[str, ActivationName] = {"none": "gelu", "tanh": "gelu_tanh"}
    return _activate(names[approximate], x, **others) if approximate in names else NotImplemented


def _hardtanh(x: Any, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Any:
    return _activate("relu6", x, inplace) if (min_val, max_val) == (0, 6) else NotImplemented


def _add(left: Any, right: Any = None, in_place: bool = False, **others: Any) -> Any:
    """A sum, for the activation after it."""
    pending = _open(left) or (None if in_place else _open(right))
    if pending is None or others or left is right or not is_alike(left, right):
        return NotImplemented
    terms = _term(left), _term(right)
    if terms[0] is None or terms[1] is None:
        return NotImplemented
    total = Sum((terms[0], terms[1]))
    if not in_place:
        return late(total, pending.ran)
    pending.become(total)
    return left


def _term(value: Any) -> Norm | Made | None:
    """Match an operand that a sum may have."""
    pending = _open(value)
    if pending is not None and isinstance(pending.operation, Norm | Made):
        operation = pending.checked()
        assert isinstance(operation, Norm | Made)
        pending.is_passed |= isinstance(operation, Norm)
        return operation
    values = settled(value)
    return Made(values) if type(values) is Tensor else None


def _convolve(*args: Any, **kwargs: Any) -> Any:
    """A depthwise convolution after relu."""
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    given: dict[str, Any] = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}
    given |= dict(zip(names, args, strict=False)) | kwargs
    pending = _open(given["input"])
    if pending is None or not isinstance(pending.operation, Relu):
        return NotImplemented
    x, weight = pending.checked().tensors[0], given["weight"]
    for parameter in (weight, given["bias"]):
        _arrived(parameter)
    sizes = [given[name] for name in ("stride", "padding", "dilation")]
    is_depthwise = weight.shape[1] == 1 and given["groups"] == x.shape[1] > 1
    is_depthwise &= product_type(weight) == product_type(x)
    if not is_depthwise or x.ndim != weight.ndim or isinstance(given["padding"], str):
        return NotImplemented
    pending.ran(DEPTHWISE)
    pending.is_passed = True
    stride, padding, dilation = (_each_dimension(size, x.ndim - 2) for size in sizes)
    return relu_depthwise(
        x, weight, given["bias"], stride=stride, padding=padding, dilation=dilation
    )


def _each_dimension(size: Any, count: int) -> list[int]:
    sizes = [size] if isinstance(size, int) else [*size]
    return sizes * count if len(sizes) == 1 else sizes


def _activations(name: ActivationName, *functions: Any) -> dict[Any, Callable[..., Any]]:
    return dict.fromkeys(functions, partial(_activate, name))


continuations.update(
    {
        **dict.fromkeys((torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__), _add),
        **dict.fromkeys((Tensor.add_, Tensor.__iadd__), partial(_add, in_place=True)),
        **dict.fromkeys(_CONVOLUTIONS, _convolve),
        **_activations("relu", F.relu, torch.relu, Tensor.relu),
        **dict.fromkeys((torch.relu_, Tensor.relu_), partial(_activate, "relu", inplace=True)),
        **_activations("sigmoid", torch.sigmoid, Tensor.sigmoid, F.sigmoid),
        **_activations("tanh", torch.tanh, Tensor.tanh, F.tanh),
        **_activations("relu6", F.relu6),
        **_activations("silu", F.silu),
        **_activations("hardswish", F.hardswish),
        F.hardtanh: _hardtanh,
        F.gelu: _gelu,
    }
)
