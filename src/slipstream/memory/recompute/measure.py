"""What a block takes: seconds and bytes, measured on the arguments that it is called with."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from statistics import median
from typing import Any

import torch
from torch import nn

from slipstream.memory.forward_override import Forward
from slipstream.memory.recompute.block_dataflow import Call
from slipstream.memory.recompute.budget import Cost
from slipstream.memory.recompute.buffers import StandIns, buffers_of
from slipstream.memory.recompute.rng_state import SameDraws
from slipstream.pytree import tensors

RUNS = 3


class Saved:
    """Counts what is saved for backward, every storage once; a context.

    Args:
        aside: tensors that do not count, such as parameters.

    Example:
        >>> x = torch.ones(4, requires_grad=True)
        >>> with Saved([x]) as saved:
        ...     y = (2 * x).exp().sum()
        >>> saved.num_bytes  # of the exponential, which its own backward needs
        16
    """

    def __init__(self, aside: Iterable[torch.Tensor] = ()) -> None:
        self._aside = {_storage(tensor) for tensor in dense(aside)}
        self._sizes: dict[int, int] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    @property
    def num_bytes(self) -> int:
        """Bytes of the storages, as long as the graph is there."""
        return sum(self._sizes.values())

    def count(self, tensor: torch.Tensor) -> None:
        """One more that is kept; sparse ones do not count."""
        for one in dense([tensor]):
            if (place := _storage(one)) not in self._aside:
                self._sizes[place] = one.untyped_storage().nbytes()

    def leave_out(self, tensors: Iterable[torch.Tensor]) -> None:
        """These do not count after all."""
        for tensor in dense(tensors):
            self._sizes.pop(_storage(tensor), None)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.count(tensor)
        return tensor

    def __enter__(self) -> Saved:
        self._hooks.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._hooks.__exit__(*raised)


def measure(module: nn.Module, forward: Forward, call: Call) -> Cost:
    """What ``module`` takes in this call: bytes, and medians of a few forwards and backwards.

    Gradients, buffers and random states stay as they are.
    """
    device = next((tensor.device for tensor in call.tensors), torch.device("cpu"))
    buffers = buffers_of(module.modules())
    forwards, backwards = [], []
    kept = torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda tensor: tensor)
    with torch.random.fork_rng([device] if device.type == "cuda" else []), SameDraws():
        with StandIns(buffers, module.modules()):  # the warm-up counts
            own = _apart(call)
            with Saved((*own.tensors, *module.parameters(), *module.buffers())) as saved:
                outputs = tensors(forward(*own.args, **own.kwargs))
            sizes = {_storage(t): t.untyped_storage().nbytes() for t in dense(outputs)}
            for output in outputs:
                saved.count(output)
        del outputs
        for _ in range(RUNS):
            with (
                StandIns(buffers, module.modules()),
                kept,
            ):  # whatever becomes of saved tensors around this
                own = _apart(call)
                wanted = [t for t in (*own.tensors, *module.parameters()) if t.requires_grad]
                start = _now(device)
                outputs = tensors(forward(*own.args, **own.kwargs))
                middle = _now(device)
                ends = [output for output in outputs if output.requires_grad]
                if ends and wanted:
                    ones = [torch.ones_like(output) for output in ends]
                    torch.autograd.grad(ends, wanted, ones, allow_unused=True)
                forwards.append(middle - start)
                backwards.append(_now(device) - middle)
    return Cost(median(forwards), median(backwards), sum(sizes.values()), saved.num_bytes)


def _apart(call: Call) -> Call:
    """The call of copies of its tensors, apart from what led to these; no leaves, which may not be
    changed in place.
    """
    copies = {id(t): t.detach().requires_grad_(t.requires_grad).clone() for t in call.tensors}
    return call.of_tensors(copies[id(tensor)] for tensor in call.tensors)


def dense(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Those whose values lie in one storage."""
    return (tensor for tensor in tensors if tensor.layout is torch.strided)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
