"""Which values of each parameter belong to which rank, and this rank's shard of the averages.

Never communicates. A parameter of ``n`` values is cut, in the order of its memory, into p shards of
``n / p``, rounded up; the last ones may be shorter or empty. Shards do not depend on segments, so
gradients and parameters can be cut into segments of their own, and anew while training runs.

[Note: Bits]
torch's CPU kernels compute a tensor in vectors, and what is left at its end value by value, which
may round differently. So shards begin at multiples of 64 values: every value is computed as it is
in a whole tensor. Beyond 16 ranks that would send too much padding, and the multiple shrinks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from slipstream.codecs import Ranks
from slipstream.codecs.compressor import is_dense
from slipstream.errors import UsageError
from slipstream.gradients.buckets import gradient_dtype
from slipstream.gradients.layout import nearest_border
from slipstream.pytree import among
from slipstream.transport.ahead import aligned_length

ALIGNMENT = 64
"""Bytes; rows begin at multiples of it, as vectorized sums like."""


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The values in the order of their memory: a 1-D view of a tensor without holes.

    Example:
        >>> flat(torch.tensor([[1, 2], [3, 4]]).T).tolist()
        [1, 2, 3, 4]
    """
    tensor = torch.Tensor.detach(tensor)  # the memory itself, whatever a class answers
    assert is_dense(tensor)
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


class Workspace:
    """Memory that gradients use in backward, and parameters on their way under forward.

    Example:
        >>> workspace = Workspace(torch.device("cpu"))
        >>> workspace.begin(64)
        >>> workspace.rows(2, 3, torch.float32).shape
        torch.Size([2, 3])
    """

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)
        self._taken = 0

    def begin(self, num_bytes: int = 0) -> None:
        """Reuse the memory from its start; grow it to ``num_bytes``."""
        self._taken = 0
        if num_bytes > len(self._memory):
            self._memory = self._memory.new_zeros(num_bytes)

    def rows(self, count: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """The next rows, of undefined values; memory of their own where the room is used up."""
        num_bytes = count * width * dtype.itemsize
        start, self._taken = self._taken, -(-(self._taken + num_bytes) // ALIGNMENT) * ALIGNMENT
        if start + num_bytes > len(self._memory):
            return torch.empty(count, width, dtype=dtype, device=self._memory.device)
        return self._memory[start:][:num_bytes].view(dtype).view(count, width)


class Shards:
    """This rank's shard of every parameter, and of the averages of their gradients.

    Args:
        ranks: that share the parameters.
        names: of the parameters that are cut; others are updated whole by every rank.

    Attributes:
        ranks, names: as given.
        workspace: for all rows of shards.
        gradients: by parameter, this rank's shard of the average, with as many axes as the
            parameter; a parameter that got no gradient on any rank is absent.
        delivered: whether the averages of this update are there, and no later backward has begun.
    """

    def __init__(self, ranks: Ranks, names: Mapping[nn.Parameter, str]) -> None:
        self.ranks, self.names = ranks, names
        self._unit = max(min(64, 1024 // ranks.count), 1)
        self.gradients: dict[nn.Parameter, torch.Tensor] = {}
        self.delivered = False
        self._guards: dict[nn.Parameter, ShardedGradient] = {}
        self._owned: dict[nn.Parameter, tuple[int, torch.Tensor]] = {}  # where its memory begins
        self._forms: dict[nn.Parameter, tuple[torch.dtype, torch.Size, tuple[int, ...]]] = {}
        self.workspace = Workspace(next((p.device for p in names), torch.device("cpu")))

    def length(self, parameter: torch.Tensor) -> int:
        """Number of values in a shard; the last shards may have fewer."""
        return self._length(parameter.numel())

    def _length(self, numel: int) -> int:
        return aligned_length(numel, self.ranks.count, self._unit)

    def size(self, parameter: torch.Tensor) -> torch.Size:
        """Number of values of the whole parameter, whose data may be a shard at the moment."""
        form = self._forms.get(cast(nn.Parameter, parameter))
        return parameter.shape if form is None else form[1]

    def shape(self, parameter: torch.Tensor) -> torch.Size:
        """Shape of this rank's shard."""
        size = self.size(parameter)
        length = self._length(size.numel())
        own = min(max(size.numel() - self.ranks.rank * length, 0), length)
        return torch.Size([1] * (len(size) - 1) + [own])

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's shard of a parameter, or of a tensor laid out like it: a view.

        Of shape (1, ..., 1, values), with as many axes as the tensor and at least one: optimizers
        treat vectors differently from matrices.

        Example:
            >>> shards = Shards(Ranks(1, 2), {})
            >>> shards.own(torch.zeros(10, 12)).shape
            torch.Size([1, 56])
        """
        length = self.length(tensor)
        part = flat(tensor)[self.ranks.rank * length :][:length]
        return part.view(*[1] * (tensor.ndim - 1), part.numel())

    def own_of(self, parameter: nn.Parameter) -> torch.Tensor:
        """`own` of a parameter, made once: a step of many small layers feels it.

        Raises:
            UsageError: the parameter has another type or another order in memory than before, in
                which its state was cut.
        """
        at, (known, own) = parameter.data_ptr(), self._owned.get(parameter, (-1, parameter))
        if at != known:
            form = parameter.dtype, parameter.shape, parameter.stride()
            before = self._forms.setdefault(parameter, form)
            if form != before:
                now, then = (
                    f"{d}, {tuple(size)} with strides {s}" for d, size, s in (form, before)
                )
                raise UsageError(
                    f"parameter {self.names[parameter]} is {now}, but was {then} when accelerate() "
                    "was called, and with gradients.transport sharded ranks share it and its "
                    "optimizer state in that form; change the model before (model.to, half, double)"
                )
            own = self.own(parameter)
            self._owned[parameter] = at, own
        return own

    def shard_of(self, parameter: nn.Parameter, tensor: torch.Tensor) -> torch.Tensor:
        """View the part that this rank updates, of a tensor laid out like ``parameter``."""
        return self.own(tensor) if parameter in self.names else tensor.detach()

    def deliver(self, parameter: nn.Parameter, average: torch.Tensor | None) -> None:
        """Keep this rank's shard of an average; None: no rank had a gradient.

        Adds to what an earlier exchange of the same update has left.
        """
        self.delivered = True
        if average is not None:
            before = self.gradients.get(parameter)
            self.gradients[parameter] = average if before is None else before.add_(average)
        parameter.grad = self._guard(parameter) if parameter in self.gradients else None

    def adopt(self) -> None:
        """Take what the user has left in ``parameter.grad`` for the average, as a step would.

        All ranks have the same there, as in plain data-parallel training.

        Raises:
            UsageError: it is the gradient of another parameter, of which a rank has a shard alone.
        """
        for parameter, name in self.names.items():
            given = parameter.grad
            if given is None:
                self.gradients.pop(parameter, None)
            elif isinstance(given, ShardedGradient) and parameter not in self.gradients:
                raise UsageError(
                    f"optimizer.step() once more with the gradient of {name}, which the last step "
                    "has used: under gradients.transport sharded a rank keeps its share no longer; "
                    "call session.backward() before each step, or use transport: direct"
                )
            elif isinstance(given, ShardedGradient) and given.zeroed and given.of == name:
                self.gradients[parameter].zero_()
            elif not isinstance(given, ShardedGradient) or given.of != name:
                _, size, strides = self._forms[parameter]  # half weights may be exchanged by now
                like = torch.empty_strided(size, strides, dtype=given.dtype, device=given.device)
                self.gradients[parameter] = self.own(like.copy_(given)).clone()

    def begin(self) -> None:
        """A backward pass begins: gradients of this rank may accumulate, and exchanges overwrite
        the memory in which averages arrived."""
        if not self.delivered:  # what this rank has gathered since stays
            self._keep_zeros()
            return
        self.adopt()
        self.delivered = False
        for parameter, gradient in self.gradients.items():
            parameter.grad = None
            self.gradients[parameter] = gradient.clone()

    def _keep_zeros(self) -> None:
        """Add the next average to zeros where a script has zeroed the last one in place."""
        for parameter in self._zeroed():
            parameter.grad = None
            shape, dtype = self.shape(parameter), gradient_dtype(parameter)
            self.gradients[parameter] = parameter.detach().new_zeros(shape, dtype=dtype)

    def end(self) -> None:
        """Every rank updates everything from now on: zeros that a script has left are whole."""
        self.clear()
        for parameter in self._zeroed():
            parameter.grad = torch.zeros_like(parameter, dtype=gradient_dtype(parameter))

    def _zeroed(self) -> list[nn.Parameter]:
        """The parameters whose averages a script has zeroed in place."""
        given = ((p, p.grad) for p in self.names)
        return [p for p, grad in given if isinstance(grad, ShardedGradient) and grad.zeroed]

    def clear(self) -> None:
        """The averages were used."""
        self.delivered = False
        for parameter in self.gradients:
            parameter.grad = None
        self.gradients.clear()

    def guard(self) -> None:
        """Let nobody take a shard for the whole average."""
        for parameter in self.gradients:
            if parameter.shape == self.size(parameter):
                parameter.grad = self._guard(parameter)

    def _guard(self, parameter: nn.Parameter) -> ShardedGradient:
        guard = self._guards.get(parameter)
        if guard is None:
            blank = torch.zeros((), dtype=parameter.grad_dtype or parameter.dtype)
            guard = blank.to(parameter.device).expand(parameter.shape).as_subclass(ShardedGradient)
            guard.of = self.names[parameter]
            self._guards[parameter] = guard
        guard.zeroed = False  # that was another update's
        return guard


def cut_first(named: Sequence[tuple[str, nn.Parameter]], part: float) -> dict[nn.Parameter, str]:
    """Names by parameter of the first ones, up to the border nearest to a part of all bytes."""
    stop = nearest_border([parameter.nbytes for _, parameter in named], part)
    return {parameter: name for name, parameter in named[:stop]}


_PROPERTIES = (
    *("shape", "dtype", "device", "layout", "ndim", "requires_grad", "grad_fn", "is_leaf", "names"),
    *("is_sparse", "is_sparse_csr", "is_cuda", "is_cpu", "is_meta", "is_mkldnn", "is_mps"),
    *("is_quantized", "is_xla", "is_nested", "itemsize", "nbytes", "grad", "grad_dtype"),
    *("_backward_hooks", "_version", "output_nr", "_base"),
)
_METHODS = (
    *("size", "stride", "dim", "numel", "element_size", "storage_offset", "is_contiguous"),
    *("is_floating_point", "is_complex", "is_signed", "is_conj", "get_device", "nelement"),
    *("ndimension", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_"),
    *("__hash__", "__len__", "is_neg", "_is_view"),
)
_ASKED: Sequence[Any] = [getattr(torch.Tensor, name, None) for name in _PROPERTIES]
METADATA = frozenset(
    [
        *(asked.__get__ for asked in _ASKED if asked is not None),
        *(getattr(torch.Tensor, name) for name in _METHODS),
        *(cast(Any, torch.Tensor.grad).__set__, cast(Any, torch.Tensor.grad).__delete__),
        cast(Any, torch.Tensor.requires_grad).__set__,
    ]
)
"""Functions that ask a tensor for anything but its values."""


ZEROING: frozenset[Any] = frozenset([torch.Tensor.zero_, torch._foreach_zero_])
DETACHED: frozenset[Any] = frozenset(
    [cast(Any, torch.Tensor.data).__get__, torch.Tensor.detach, torch.Tensor.detach_]
)
"""The gradient itself by another name, as ``p.grad.data.zero_()`` asks for it."""


class ShardedGradient(torch.Tensor):
    """Stands in ``parameter.grad`` for an average of which every rank has a shard: it has a shape
    and a type, and can be zeroed, but whoever asks for its values gets an error instead of wrong
    ones."""

    of: str
    zeroed = False

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # a compiler asks for the memory of all tensors; here there is none
        if func in METADATA or func is torch.Tensor.untyped_storage:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func in DETACHED:
            return args[0]
        if func in ZEROING:
            for guard in args[0] if isinstance(args[0], list | tuple) else args[:1]:
                guard.zeroed = True
            return args[0]
        names = [x.of for x in among([args, *(kwargs or {}).values()], ShardedGradient)]
        raise UsageError(
            f"the gradient of {names[0] if names else 'a parameter'} was read between backward() "
            "and step(), or changed in place, but with gradients.transport sharded every rank has "
            "only a shard of the average; call session.clip_grad_norm_(max_norm) to clip, set "
            "precision.loss_scale instead of a GradScaler, assign a new tensor to parameter.grad, "
            "or use transport: direct"
        )
