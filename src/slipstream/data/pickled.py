"""Samples and batches as bytes: equal ones give equal bytes, and a view no more than its values."""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy.typing as npt
import torch


class _Pickler(pickle.Pickler):
    """Tensors by their own values: torch's pickle keeps the whole storage of a view."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or value.requires_grad or value.device.type != "cpu":
            return NotImplemented
        if value.layout is not torch.strided or value.is_quantized or value.is_conj():
            return NotImplemented
        if value.dtype not in _IN_NUMPY | _NOT_IN_NUMPY:
            return NotImplemented
        values = value.contiguous()
        if value.dtype in _NOT_IN_NUMPY:
            # a view of one value may have any stride, which `contiguous` lets be
            values = values.as_strided((values.numel(),), (1,)).view(torch.uint8)
        return _tensor, (values.numpy().copy(), value.dtype, value.shape)


_NOT_IN_NUMPY = {torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2}
_IN_NUMPY = {
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
    torch.float32, torch.float64, torch.complex64, torch.complex128,
}  # fmt: skip


def _tensor(values: npt.NDArray[Any], dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    found = torch.from_numpy(values)
    return found if found.dtype == dtype else found.view(dtype).view(shape)


def pickled(sample: Any) -> bytes:
    """A sample as bytes; equal samples give equal bytes."""
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(sample)
    return buffer.getvalue()
