"""Refusals of the exchange under FSDP2: settings, modules and gradients that it does not take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)

from slipstream.adapters.fsdp2_units import Unit, comm_of
from slipstream.errors import ModelError, StrategyError
from slipstream.strategy import CodecVariant, HalfConfig, Strategy
from slipstream.strategy.codec import SCATTERED

REFUSED: Mapping[str, str] = {
    "gradients.split": "the modules given to fully_shard are the split",
    "gradients.accumulate": "call model.set_requires_gradient_sync(False) before the other passes",
    "local": "FSDP2 has no rank with a whole model, which could train apart",
    "parallel": "give fully_shard a mesh of several dimensions",
    "precision": "give fully_shard a MixedPrecisionPolicy",
    "memory": "use torch.utils.checkpoint, or reshard_after_forward=True",
    "compute": "use torch.compile",
    "data": "slipstream does not see the loader",
    "checks": "no session looks at the updates",
}
"""By setting that FSDP2 does not take, the reason or what to use instead."""


def check_units(units: Sequence[Unit], codec: CodecVariant | None) -> None:
    """Refuse a model that is not, or otherwise, under ``fully_shard``.

    Raises:
        ModelError: says which module.
    """
    if not units:
        raise ModelError(
            "no module of this model is under fully_shard; call fully_shard on it first, or use "
            "slipstream.accelerate(), which takes plain models"
        )
    for unit in units:
        check_device(unit.group.device, codec, unit.name)
        for comm, own in (
            (comm_of(unit), DefaultReduceScatter),
            (unit.group._all_gather_comm, DefaultAllGather),
        ):
            if type(comm) is not own:
                raise ModelError(
                    f"{unit.name}: a {type(comm).__name__} is set on it already (by "
                    "accelerate_fsdp, set_custom_..., set_symm_mem_for_comm or "
                    "set_allocate_memory_from_process_group_for_comm); allowed: torch's own: "
                    "close the other exchange, or leave out the call"
                )
        params = unit.group.fsdp_params
        complex_ones = [unit.path(p) for p in params if p.sharded_param.is_complex()]
        if codec is not None and complex_ones:
            raise ModelError(
                f"{unit.name}: the complex parameters {', '.join(complex_ones)} under the codec "
                f"{codec.kind}; allowed: real ones, or no codec"
            )
        if codec is not None and not isinstance(codec, HalfConfig):
            check_alike_outside(unit, codec)


def check_alike_outside(unit: Unit, codec: CodecVariant) -> None:
    """Refuse blocks that hold values which ranks of tensor parallelism have in common, beside some
    that differ there: values of a block share a scale, and common ones would part.

    Raises:
        ModelError: parameters of a module are split over other meshes than the rest of it.
    """
    found: dict[object, str] = {}
    for param in unit.group.fsdp_params:
        # by another name before torch 2.12
        spec = getattr(param, "_unsharded_dtensor_spec", None) or getattr(param, "_tp_spec", None)
        places = () if spec is None else spec.placements
        split = tuple(dim for dim, place in enumerate(places) if not place.is_replicate())
        found.setdefault((spec.mesh, split) if spec and split else None, unit.path(param))
    if len(found) > 1:
        one, other, *_ = found.values()
        raise ModelError(
            f"{unit.name}: {one} and {other} are not split alike outside of data parallelism (by "
            f"tensor parallelism), but blocks of the codec {codec.kind} would hold values of both, "
            "and parameters that ranks have in common would drift apart; call fully_shard on the "
            "modules of each by themselves first (of a bias beside a split weight: bias=False), or "
            "choose the codec half or none"
        )


def check_device(device: torch.device, codec: CodecVariant | None, name: str) -> None:
    """Refuse modules that are not on CPUs.

    Raises:
        ModelError: on another device.
    """
    if device.type == "cpu":
        return
    if codec is None:
        reason = (
            "there is nothing to do, as NCCL's reduce-scatter sends no more than this one: leave "
            "accelerate_fsdp out"
        )
    else:
        reason = f"the codec {codec.kind} has not been tried there: leave it out, or train on CPUs"
    raise ModelError(f"{name} is on {device.type}: {reason}")


def check_strategy(strategy: Strategy) -> None:
    """Refuse settings that FSDP2 does not take.

    Raises:
        StrategyError: names all of them.
    """
    default, wrong = Strategy(), []
    for path, reason in REFUSED.items():
        given, usual = strategy, default
        for part in path.split("."):
            given, usual = getattr(given, part), getattr(usual, part)
        if given != usual:
            wrong.append(f"{path}: {reason}")
    gradients = strategy.gradients
    if gradients.transport.kind not in ("flat", "direct"):
        wrong.append(f"gradients.transport: {gradients.transport.kind}; allowed: direct")
    if gradients.codec is not None and type(gradients.codec) not in SCATTERED:
        kinds = ", ".join(codec.model_fields["kind"].default for codec in SCATTERED)
        wrong.append(
            f"gradients.codec: {gradients.codec.kind} cannot carry a reduce-scatter; allowed: "
            f"{kinds}"
        )
    if wrong:
        lines = "\n".join(f"  {line}" for line in wrong)
        raise StrategyError(f"settings that FSDP2 does not take:\n{lines}")


def check_width(unit: Unit, width: int) -> None:
    """Refuse gradients whose place in what the codec owes is not known.

    Raises:
        ModelError: other parameters than before got gradients.
    """
    compressor = unit.compressor
    if compressor is None or not compressor.feedback:
        return
    trainable, owed = unit.trainable, compressor.error
    if width != unit.width or (
        owed is not None and (unit.owes != trainable or owed.shape[1] != width)
    ):
        changed = [] if owed is None else sorted({*unit.owes} ^ {*trainable})
        since = f"; since the pass before, {changed[0]} was frozen or unfrozen" if changed else ""
        raise ModelError(
            f"{unit.name}: gradients of {width} values a rank came; its trainable parameters have "
            f"{unit.width}{since}. The codec owes parts of earlier gradients to each of them, so "
            "all need one in every pass: call set_reduce_scatter_unused_params(True); after "
            "freezing or unfreezing, close() this exchange and make a new one, and let it "
            "load_state_dict() of this one's state_dict(): else start_step begins anew"
        )
    unit.owes = trainable
