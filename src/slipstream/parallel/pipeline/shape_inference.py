"""Runs the stages one after another on one micro-batch, so that all ranks learn all shapes.

Buffers and random states are restored afterwards. An error on one rank is raised on all.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slipstream.comm.groups import Group
from slipstream.comm.tensor_spec import TensorSpec
from slipstream.errors import ModelError
from slipstream.memory.recompute.module_state import settings_kept
from slipstream.parallel.pipeline.micro_batches import MicroBatch
from slipstream.parallel.pipeline.shared_buffers import (
    Changes,
    are_equal,
    changed,
    check_changes,
    shared_buffers,
)
from slipstream.parallel.pipeline.stages import Returned, Stages
from slipstream.pytree import mapped, tensors
from slipstream.transport.consistency import collective_errors


@dataclass
class StageOutputs:
    """The results of a forward of all stages.

    Attributes:
        returned: what modules returned that later stages skip, see `Stages.run_recorded`.
        sent: by stage the tensor that it sends; of the last stage its loss, if there is one.
        result: of the last stage: what the model returns, or its loss.
    """

    returned: Returned = field(default_factory=dict)
    sent: list[TensorSpec] = field(default_factory=list)
    result: Any = None


def sequential_forward(
    stages: Stages,
    batch: MicroBatch,
    loss_fn: Callable[[Any, Any], torch.Tensor] | None,
    group: Group,
) -> StageOutputs:
    """Forward of all stages, stage s on rank s % ranks. Collective.

    Args:
        stages: of this rank's model.
        batch: the same on every rank.
        loss_fn: None: the result is what the model returns.
        group: the ranks of the pipeline.

    Raises:
        ModelError: what a stage raised, on every rank; names stage and rank. With a loss also: a
            buffer that several ranks hold is updated by some of them.
    """
    outputs, hidden, device = StageOutputs(), None, device_of(stages.model)
    last = stages.split_points.num_stages - 1
    place = (stages.model, stages.split_points, group.size)
    shared = shared_buffers(*place) if loss_fn is not None else {}
    changes: list[Changes] = []

    def on_device(spec: TensorSpec) -> TensorSpec:
        """``spec`` from another rank, whose model is on another device of the same type."""
        return replace(spec, device=device) if spec.device.type == device.type else spec

    for stage in range(last + 1):
        owner, payload, cause = stage % group.size, b"", None
        if owner == group.rank:
            try:
                loss_of = loss_fn if stage == last else None
                _check_integers(stages, stage, hidden, batch, outputs.returned, loss_of)
                # each stage begins as the others do, as on a rank of its own
                with state_restored(stages.model):
                    result, returned = stages.run_recorded(stage, hidden, batch, outputs.returned)
                    if stage == last and loss_fn is not None:
                        result = _checked_loss(loss_fn(result, batch.target))
                    requires_grad = isinstance(result, torch.Tensor) and result.requires_grad
                    result = mapped(result, lambda x: x.detach().cpu())
                    # Pickled inside the try: a result that cannot be is an error on all ranks.
                    made = changed(stages.model, shared)
                    payload = pickle.dumps((returned, result, requires_grad, made))
            except Exception as error:
                kind = "" if isinstance(error, ModelError) else f"{type(error).__name__}: "
                text = f"stage {stage} on rank {group.ranks[owner]}: {kind}{error}"
                payload, cause = pickle.dumps(text), error
        payloads = [payload]
        if group.size > 1:
            with collective_errors(f"the first forward of stage {stage}"):
                dist.broadcast_object_list(payloads, group=group.members, group_src=owner)
        message = pickle.loads(payloads[0])
        if isinstance(message, str):
            raise ModelError(message) from cause
        returned, result, requires_grad, made = message
        changes.append(made)
        for path, calls in mapped(returned, on_device, TensorSpec).items():
            outputs.returned.setdefault(path, []).extend(calls)
        outputs.result = mapped(result, lambda x: x.to(device))
        if stage < last or loss_fn is not None:
            hidden = outputs.result.requires_grad_(requires_grad)
            outputs.sent.append(TensorSpec.of(hidden))
    check_changes(*place, changes)
    return outputs


def _check_integers(
    stages: Stages,
    stage: int,
    received: Any,
    batch: MicroBatch,
    returned: Returned,
    loss_fn: Callable[[Any, Any], torch.Tensor] | None,
) -> None:
    """Refuse a stage that uses integers or bool of modules before it, by other ones in their place.
    Those that the model returns, and its loss does not look at, are not used.

    Raises:
        ModelError: the stage computes something else with them.
    """
    paths = stages.integers_before(stage, returned)
    key = (stage, stages.model.training, loss_fn is None)
    if not paths or key in stages.integers_checked:
        return

    def outcome(integer: int) -> list[torch.Tensor] | None:
        with state_restored(stages.model), settings_kept(stages.model), torch.no_grad():
            try:
                result = stages.run(stage, received.clone(), batch, returned, integer=integer)
                result = result if loss_fn is None else loss_fn(result, batch.target)
            except Exception:  # of an integer as an index, say: it counts as another outcome
                return None
            return [x.clone() for x in tensors(result)]

    # Twice with zeros, as a model may compute something else each time; and always three runs, as
    # ranks that share layers meet in them.
    zeros, ones, again = map(outcome, (0, 1, 0))
    if _are_equal(zeros, again) and not _are_equal(zeros, ones):
        cut, some = stages.split_points.paths[stage - 1], " or ".join(map(repr, paths[:3]))
        raise ModelError(
            f"integers or bool that {some} returned before {cut!r} are used after it, where only "
            "their shape is known; compute them in the model's own forward, which runs on every "
            "stage, or cut elsewhere"
        )
    stages.integers_checked.add(key)


def _are_equal(some: list[torch.Tensor] | None, others: list[torch.Tensor] | None) -> bool:
    """Whether two runs computed the same, NaN included, or both failed."""
    if some is None or others is None:
        return some is others
    return len(some) == len(others) and all(map(are_equal, some, others))


def _checked_loss(loss: object) -> torch.Tensor:
    """The loss, if backward can start from it."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        shape = f" of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else ""
        raise ModelError(
            f"loss_fn returned a {type(loss).__name__}{shape}; allowed: a floating-point tensor of "
            "one element, the mean over the samples"
        )
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise ModelError("the loss requires no gradient; is every parameter before it frozen?")
    return loss.reshape(())


def device_of(model: nn.Module) -> torch.device:
    """The device of the parameters."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


@contextmanager
def state_restored(model: nn.Module) -> Iterator[None]:
    """Restore buffers and random states on exit."""
    device = device_of(model)
    buffers = [(name, buffer, buffer.clone()) for name, buffer in model.named_buffers()]
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        with torch.no_grad():
            for name, buffer, values in buffers:
                path, _, attribute = name.rpartition(".")
                # A forward may have assigned a new tensor to the attribute.
                setattr(model.get_submodule(path), attribute, buffer)
                buffer.copy_(values)
