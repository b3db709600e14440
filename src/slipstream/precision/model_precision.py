"""A strategy's precision installed on a model: autocast or half weights, loss scale, TF32."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from slipstream import precision
from slipstream.errors import ModelError, StrategyError, UsageError
from slipstream.precision.float_modules import modules_in_float
from slipstream.precision.half_checks import check_half_weights
from slipstream.precision.loss_scale import LossScaler, ScaleState
from slipstream.precision.masters import ShardOf, everything
from slipstream.precision.op_casts import check_ops
from slipstream.precision.tf32 import allow_tf32
from slipstream.strategy import (
    AutocastConfig,
    ComputeConfig,
    HalfWeightsConfig,
    PrecisionConfig,
    Row,
)

_SHOWN = 4  # module paths in the report


def check_precision(model: nn.Module, optimizer: Optimizer, config: PrecisionConfig | None) -> None:
    """Refuse what does not fit this model, this optimizer or this machine.

    Raises:
        StrategyError: a name or a pattern matches nothing, or fp16 on a CPU without instructions.
        ModelError: half weights cannot serve the optimizer; or the model is never called.
    """
    if config is None:
        return
    own = getattr(type(model), "forward", None)  # a scripted model's is found on objects alone
    if own is nn.Module.forward and "forward" not in vars(model):
        raise ModelError(
            "precision casts what enters and leaves the forward of a model, and a "
            f"{type(model).__name__} has none, so that its members would be called as they are; "
            "write a module whose forward calls them, or accelerate() each in a session of its own"
        )
    half = isinstance(config, HalfWeightsConfig)
    floats = modules_in_float(model, config.float_modules, normalisation=half)
    if isinstance(config, AutocastConfig):
        check_ops([*config.float_ops, *config.half_ops])
    else:
        check_half_weights(model, optimizer, config.dtype, floats)
    if config.dtype == "fp16" and not config.emulate and not has_fp16(_device(model)):
        raise StrategyError(
            "precision.dtype fp16 on a CPU without fp16 instructions is hundreds of times slower; "
            "allowed: dtype bf16, or emulate: true, e.g. for a test"
        )


def precision_warnings(model: nn.Module, config: PrecisionConfig | None) -> list[str]:
    """Settings that work here, but slower than fp32."""
    device = _device(model)
    if config is None or config.dtype != "bf16" or has_bf16(device):
        return []
    return [
        f"precision.dtype bf16 on a {device.type} without bf16 instructions is slower than fp32; "
        "precision: null is faster here"
    ]


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def has_fp16(device: torch.device) -> bool:
    """Whether the device has instructions for fp16 matrix products."""
    return device.type != "cpu" or bool(
        torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_fp16_supported()
    )


def has_bf16(device: torch.device) -> bool:
    """Whether the device has instructions for bf16 matrix products."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return device.type != "cpu" or bool(
        torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


class ModelPrecision:
    """The precision of a model, installed for training.

    Args:
        model: as ``check_precision`` accepts it.
        optimizer: of the model.
        config: None: nothing is cast.
        compute: TF32.
        shard_of: what this rank updates of a parameter.

    Attributes:
        scales: whether there is a loss scale, so that gradients are checked before an update.
        exchanges_wide: whether gradients of 16-bit parameters travel in fp32.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        config: PrecisionConfig | None,
        compute: ComputeConfig,
        shard_of: ShardOf = everything,
    ) -> None:
        self._config, self._compute = config, compute
        self._scaler = LossScaler(config.scale) if config is not None and config.scale else None
        self.scales = self._scaler is not None
        self._skipped = 0
        self.exchanges_wide = isinstance(config, HalfWeightsConfig) and config.exchange == "fp32"
        self._numel = sum(p.numel() for p in model.parameters())
        self._casts: precision.Autocast | precision.HalfWeights | None = None
        if config is not None:
            options = config.model_dump(include={"dtype", "float_ops", "half_ops", "float_modules"})
            if isinstance(config, AutocastConfig):
                self._casts = precision.autocast(model, **options)
            else:
                self._casts = precision.half_weights(model, optimizer, shard_of=shard_of, **options)
        self._undo = allow_tf32() if compute.tf32 and torch.cuda.is_available() else None

    @property
    def masters(self) -> precision.HalfWeights | None:
        """The half weights, if the strategy asks for them."""
        return self._casts if isinstance(self._casts, precision.HalfWeights) else None

    def take(self, loss_scale: float) -> float:
        """The loss scale of a backward pass; ``loss_scale``: the user's own, 1 if none.

        Raises:
            UsageError: the strategy has a loss scale, too.
        """
        if self._scaler is None:
            return loss_scale
        if loss_scale != 1.0:
            raise UsageError(
                f"loss_scale={loss_scale}, but the strategy has a precision.loss_scale, which "
                "scales the loss itself; remove one of the two"
            )
        return self._scaler.scale

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the scale, in at least fp32."""
        if self._scaler is None:
            return loss
        return (loss.float() if loss.itemsize < 4 else loss) * self._scaler.scale

    def updated(self, overflowed: bool) -> None:
        """An update is over; it was skipped where gradients ``overflowed``."""
        self._skipped += overflowed
        if self._scaler is not None:
            self._scaler.update(overflowed)

    def state_dict(self) -> list[float] | None:
        """Scale, good and bad updates (`ScaleState`); None: no loss scale."""
        return None if self._scaler is None else [*self._scaler.state]

    def load_state_dict(self, state: list[Any] | None) -> None:
        """Restore ``state_dict()``, if both runs have a loss scale."""
        if self._scaler is not None and state is not None:
            self._scaler.restore(ScaleState(*state))

    def report_rows(self) -> list[Row]:
        """Rows for the report."""
        rows = []
        if self._config is not None:
            rows.append(self._row(self._config))
        if self._casts is not None and self._casts.floats:
            paths = [*self._casts.floats]
            more = f", ... ({len(paths)} in all)" if len(paths) > _SHOWN else ""
            rows.append(Row("fp32", f"{len(paths)} modules", ", ".join(paths[:_SHOWN]) + more))
        if self._scaler is not None:
            scale, good, _ = self._scaler.state
            note = f"{good} updates without overflow since the scale changed"
            rows.append(Row("loss scale", f"{scale:g}, {self._skipped} updates skipped", note))
        if self._compute.tf32:
            here = torch.cuda.is_available()
            note = "products and convolutions" if here else "no CUDA device"
            rows.append(Row("tf32", "active" if here else "inactive", note))
        return rows

    def _row(self, config: PrecisionConfig) -> Row:
        if not isinstance(self._casts, precision.HalfWeights):
            return Row(
                "precision", f"{config.dtype} autocast", "weights are fp32", config.exactness
            )
        megabytes = self._casts.master_bytes / 2**20
        note = (
            f"{self._casts.num_half / 1e6:.3g} of {self._numel / 1e6:.3g} M parameters are "
            f"{config.dtype}; their fp32 masters take {megabytes:.1f} MB"
        )
        return Row("precision", f"{config.dtype} weights", note, config.exactness)

    def close(self) -> None:
        """Undo everything; idempotent."""
        if self._casts is not None:
            self._casts.close()
        if self._undo is not None:
            self._undo()
            self._undo = None
