"""Watches what a script does with averages that contain momentum, under DGC.

The codec has added momentum to them, and remembers it: so they serve one update, as they are. DDP
does not tell what follows its backward; the optimizer's hooks and those of a forward do.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from slipstream.errors import UsageError
from slipstream.gradients.momentum import largest_values
from slipstream.optim.nested_step import around_all


class MomentumWatch:
    """Looks at the gradients of parameters after a backward, before a step and before a forward.

    Args:
        ddp: whose forwards begin an iteration.
        optimizer: of the model.
        names: of the parameters whose averages contain momentum.
        settle: called with whether an update has used the averages, once for each backward.
        loss_scale: by which averages are larger, until a GradScaler divides them.
    """

    def __init__(
        self,
        ddp: nn.Module,
        optimizer: torch.optim.Optimizer,
        names: dict[torch.Tensor, str],
        settle: Callable[[bool], None],
        loss_scale: Callable[[], float],
    ) -> None:
        self._names, self._settle, self._loss_scale = names, settle, loss_scale
        self._scale, self._are_there = 1.0, True
        self._averages: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        self._largest = torch.empty(0)
        self._unsettled = False
        self._hooks: list[Any] = [
            ddp.register_forward_pre_hook(self._forward_begins),
            optimizer.register_step_pre_hook(around_all(self._step_begins)),
            optimizer.register_step_post_hook(around_all(self._step_ends)),
        ]

    def backward_begins(self) -> None:
        """The first bucket has come: the update of the backward before, if any, is over."""
        self.settle(used=False)
        self._averages, self._unsettled = [], True
        queue: Any = torch.autograd.Variable._execution_engine.queue_callback
        queue(lambda: queue(self._averaged))  # behind DDP's, which it queues after the last bucket

    def forget(self) -> None:
        """The last backward has raised, and its exchange is settled."""
        self._averages, self._unsettled = [], False

    def settle(self, *, used: bool) -> None:
        """Tell the codec once what became of its last exchange."""
        if self._unsettled:
            self._unsettled = False
            self._settle(used)

    def close(self) -> None:
        """Look no more; idempotent."""
        self.settle(used=False)
        while self._hooks:
            self._hooks.pop().remove()

    def _averaged(self) -> None:
        """DDP has written the averages into the gradients."""
        having = [(p, p.grad) for p in self._names if p.grad is not None and p.numel()]
        self._averages = [(p, gradient, gradient._version) for p, gradient in having]
        self._largest = largest_values(gradient for _, gradient, _ in self._averages)
        self._scale = self._loss_scale()

    def _step_begins(self, *_: object) -> None:
        if not self._averages:
            self._refuse_own()
        having = [p for p, _, _ in self._averages if p.grad is not None]
        self._are_there = bool(having) or not self._averages
        for parameter, before, version in self._averages:
            now = parameter.grad
            if now is None:
                continue  # an optimizer leaves it alone
            if now is not before or now._version != version:
                raise self._changed(parameter)
        if not having:
            return
        largest = largest_values(gradient for _, gradient, _ in self._averages)
        same = (largest == self._largest) | torch.isclose(largest * self._scale, self._largest)
        if not same.all():
            raise self._changed(self._averages[int(same.int().argmin())][0])

    def _refuse_own(self) -> None:
        """Refuse gradients that are no averages: to them the codec has added no momentum."""
        for parameter, name in self._names.items():
            if parameter.grad is not None and bool(parameter.grad.any()):
                raise UsageError(
                    f"the gradient of parameter {name} is none that DDP has averaged, so it has "
                    "no momentum and no weight decay, which the codec dgc applies in place of the "
                    "optimizer; compute gradients by loss.backward() outside of ddp.no_sync(), or "
                    "use another codec"
                )

    def _changed(self, parameter: torch.Tensor) -> UsageError:
        return UsageError(
            f"the gradient of parameter {self._names[parameter]} was changed after backward(), but "
            "with the codec dgc it contains the momentum of earlier updates; instead of clipping "
            "set the codec's clip; with a GradScaler make DdpCodec(..., "
            "loss_scale=scaler.get_scale); or use another codec"
        )

    def _step_ends(self, *_: object) -> None:
        self.settle(used=self._are_there)

    def _forward_begins(self, ddp: nn.Module, *_: object) -> None:
        """Refuse to add to averages.

        Raises:
            UsageError: they are still there; or ranks may leave before others.
        """
        joins: Any = getattr(ddp, "_join_config", None)  # torch's own
        if joins is not None and joins.enable:
            raise UsageError(
                "the codec dgc under ddp.join(): a rank that has joined makes no step, so its "
                "momentum would be another one's; give all ranks as many batches, or use another "
                "codec"
            )
        if not self._averages or not torch.is_grad_enabled():
            return
        left = [p for p, _, _ in self._averages if p.grad is not None and bool(p.grad.any())]
        if left:
            raise UsageError(
                f"the gradient of parameter {self._names[left[0]]} is an average with momentum, to "
                "which another backward would add; with the codec dgc call optimizer.step() and "
                "optimizer.zero_grad() after each backward, and accumulate under ddp.no_sync()"
            )
        self._averages = []
