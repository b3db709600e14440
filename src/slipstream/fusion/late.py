"""Results that are computed when they are asked for, so that a chain becomes one operation.

[Note: Nothing is recorded]
In every call the forwards of all modules run as the user wrote them. Where a chain may begin, a
layer returns a `Late`: a tensor that knows how to compute itself. The next function of torch that
is given it decides: one that goes on with the chain makes it one operation, any other gets the
values that the layer would have returned. So there is nothing that a later change could make stale.

[Note: Unseen readers]
Functions of torch show their arguments to ``Late.__torch_function__``. What takes tensors past
that, as autograd functions and extensions in C++ do, arrives at ``__torch_dispatch__``, which has
the values, and its gradients in ``_Unseen``, which has the derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from slipstream.errors import ModelError, UsageError
from slipstream.kernels.batch_norm_act import Statistics
from slipstream.kernels.surroundings import needs_plain_functions

Context = tuple[bool, bool, torch.dtype | None, bool]
"""Whether gradients are recorded, inference mode, the type of autocast, and whether torch.func or
torch.jit.trace follow what is called."""


@dataclass(frozen=True, eq=False, slots=True)
class Norm:
    """A batch norm in training, of which the statistics are there."""

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    statistics: Statistics

    @property
    def tensors(self) -> Sequence[Tensor]:
        return [t for t in (self.x, self.weight, self.bias) if t is not None]

    def compute(self) -> Tensor:
        return F.batch_norm(self.x, None, None, self.weight, self.bias, True, 0.0, self.eps)


@dataclass(frozen=True, eq=False, slots=True)
class Made:
    """The result of a layer that nobody else has seen."""

    values: Tensor

    @property
    def tensors(self) -> Sequence[Tensor]:
        return [self.values]

    def compute(self) -> Tensor:
        return self.values


@dataclass(frozen=True, eq=False, slots=True)
class Sum:
    """A sum of two tensors of one shape and type."""

    terms: tuple[Norm | Made, Norm | Made]

    @property
    def tensors(self) -> Sequence[Tensor]:
        return [t for term in self.terms for t in term.tensors]

    def compute(self) -> Tensor:
        left, right = (term.compute() for term in self.terms)
        return left + right


@dataclass(frozen=True, eq=False, slots=True)
class Relu:
    """A ReLU of a tensor."""

    x: Tensor

    @property
    def tensors(self) -> Sequence[Tensor]:
        return [self.x]

    def compute(self) -> Tensor:
        return torch.relu(self.x)


LateOperation = Norm | Made | Sum | Relu


class Pending:
    """The present and the future of a `Late`; ``ran`` is called with the name of a chain that
    ran."""

    def __init__(self, operation: LateOperation, ran: Callable[[str], None]) -> None:
        self.operation, self.ran = operation, ran
        self.is_passed = False
        """Whether a later result was computed past this one, whose graph it then is no part of."""
        self._values: Tensor | None = None
        self._context = context_of(operation.tensors[0])
        self._versions = [t._version for t in operation.tensors]

    def is_open(self) -> bool:
        """Whether a chain may go on: nobody has seen the values, and settings are the same."""
        return self._values is None and context_of(self.operation.tensors[0]) == self._context

    def become(self, operation: LateOperation) -> None:
        """Change in place."""
        self.operation = operation
        self._versions = [t._version for t in operation.tensors]

    def settle(self, values: Tensor) -> None:
        """Change in place into a tensor that others see, too."""
        self.operation, self._values = Made(values), values

    def checked(self) -> LateOperation:
        """The operation, whose operands are as they were.

        Raises:
            ModelError: one was changed in place.
        """
        if [t._version for t in self.operation.tensors] != self._versions:
            raise ModelError(
                "fused chains: the model changes an input of a batch norm, a sum or a relu in "
                "place before it uses the result, which is computed when it is used; change a copy "
                "(x = x.clone()), or leave out compute.fuse_bn_act, fuse_add_act and "
                "fuse_relu_depthwise"
            )
        return self.operation

    def values(self) -> Tensor:
        """Compute what the model would have without chains; from now on this is an ordinary
        tensor."""
        if self._values is None:
            self._values = self._computed()
        return self._values

    def values_again(self) -> Tensor:
        """The same values with a graph of their own."""
        return self._computed()

    def _computed(self) -> Tensor:
        operation, (learns, inference, dtype, _) = self.checked(), self._context
        with ExitStack() as context:
            if context_of(operation.tensors[0]) != self._context:
                device = operation.tensors[0].device.type
                context.enter_context(torch.inference_mode(inference))
                context.enter_context(torch.set_grad_enabled(learns))
                autocast: Any = torch.autocast(device, dtype=dtype, enabled=dtype is not None)
                context.enter_context(autocast)
            return operation.compute()

    def unseen_values(self) -> Tensor:
        """The same without a graph, below autograd, where none could be made."""
        with torch.no_grad():
            return self._computed() if self._values is None else self._values.detach()


def context_of(tensor: Tensor) -> Context:
    """The settings of torch that an operation of chains depends on."""
    device = tensor.device.type
    autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
    inference = torch.is_inference_mode_enabled()
    return torch.is_grad_enabled(), inference, autocast or None, needs_plain_functions()


_METADATA = frozenset(
    [
        *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim")),
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.__hash__),
    ]
)
"""What may be asked without the values."""
_GRAD: Any = torch.autograd.grad
_OF_GRADIENTS = frozenset(
    [_GRAD, Tensor.register_hook, Tensor.retain_grad, cast(Any, Tensor).grad_fn.__get__]
)
"""What asks for the gradient of a result, or changes it."""
GoOn = Callable[..., Any]
continuations: dict[Any, GoOn] = {}
"""Functions that may go on with a chain: called as torch's, they return NotImplemented else."""


class Late(Tensor):
    """A tensor whose values are computed when they are asked for."""

    pending: Pending

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        go_on = continuations.get(func)
        if go_on is not None and args:  # not torch.relu(input=...)
            result = go_on(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if func in _OF_GRADIENTS:
            _check_on_the_way(func, args, kwargs)
        args, kwargs = settled((args, kwargs))
        if not any(type(leaf) is cls for leaf in tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func._schema.is_mutable:
            raise UsageError(
                f"fused chains: {func} changes a result in place past torch's Python functions; "
                "leave out compute.fuse_bn_act, fuse_add_act and fuse_relu_depthwise"
            )
        return func(*_unseen(args), **_unseen(kwargs or {}))


def _check_on_the_way(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse gradients of a result that is not on the way from a later one.

    Raises:
        ModelError: a chain went on from it.
    """
    wanted = args[:1]
    if func is _GRAD:
        wanted = kwargs["inputs"] if "inputs" in kwargs else args[1]
    if any(type(leaf) is Late and leaf.pending.is_passed for leaf in tree_leaves(wanted)):
        raise ModelError(
            "fused chains: the gradient of a result is asked for that later ones were computed "
            "past, in one operation with it; ask before it is used (y.retain_grad(), "
            "y.register_hook(...), or a hook on its layer before fusion), or leave out "
            "compute.fuse_bn_act, fuse_add_act and fuse_relu_depthwise"
        )


def late(operation: LateOperation, ran: Callable[[str], None]) -> Tensor:
    """A tensor that becomes the result of ``operation``."""
    pending = Pending(operation, ran)
    make: Any = _Unseen.apply
    result: Tensor = make(pending, *operation.tensors)
    return result


class _Unseen(torch.autograd.Function):
    """The derivative of a `Late` for who takes it past ``__torch_function__``."""

    @staticmethod
    def forward(ctx: Any, pending: Pending, *tensors: Tensor) -> Tensor:
        ctx.pending, ctx.operation, like = pending, pending.operation, tensors[0]
        ctx.set_materialize_grads(False)
        make: Any = Tensor._make_wrapper_subclass
        made: Late = make(
            Late, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
        )
        made.pending = pending
        return made

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.pending.operation is not ctx.operation:
            raise UsageError(
                "fused chains: a result was given to an autograd function and then changed in "
                "place; leave out compute.fuse_bn_act, fuse_add_act and fuse_relu_depthwise"
            )
        tensors = ctx.operation.tensors
        learning = [t for t in tensors if t.requires_grad]
        if gradient is None or not learning:
            return None, *(None for _ in tensors)
        values = ctx.pending.values_again()  # the graph of the others is freed by their backward
        found = iter(torch.autograd.grad(values, learning, gradient))
        return None, *(next(found) if t.requires_grad else None for t in tensors)


def is_unseen(value: Late) -> bool:
    """Whether an autograd function has returned it as its own result, past torch's Python
    functions: then its graph is that of the function."""
    with torch._C.DisableTorchFunctionSubclass():
        node = value.grad_fn
    return node is not None and getattr(node, "pending", None) is not value.pending


def settled(values: Any) -> Any:
    """Arguments with ordinary tensors, but for what only autograd has seen."""
    return tree_map(
        lambda v: v.pending.values() if type(v) is Late and not is_unseen(v) else v, values
    )


def _unseen(values: Any) -> Any:
    return tree_map(lambda v: v.pending.unseen_values() if type(v) is Late else v, values)
