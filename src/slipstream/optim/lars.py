"""LARS: momentum SGD whose step in each layer is scaled by the norm of the layer's weights.

``step_one_by_one`` is the plain loop over parameters: the reference of the tests, and the place to
read the algorithm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from slipstream.errors import UsageError
from slipstream.optim.layerwise import Bunch, Layerwise, ParamGroup, bunches_of
from slipstream.optim.settings import check_flag, check_number
from slipstream.optim.trust_ratio import descend_, multiply_, norm, one_where_zero, rate_on


class Lars(Layerwise):
    """Layer-wise adaptive rate scaling: SGD for batches of thousands.

    For the weights w of one layer, their gradient g and weight decay b::

        ratio = trust_coefficient |w| / (|g| + b |w| + eps)         1 where |w| or |g| is 0
        a     = ratio (g + b w)
        v     = momentum v + a
        w     = w - lr v                            with Nesterov:  w - lr (a + momentum v)

    Before momentum, a step has ``lr * trust_coefficient`` times the norm of the layer's weights,
    whatever the norm of its gradient: hence learning rates of 1 to 30. For a batch k times as
    large, start with an lr k times as large and a linear warm-up.

    Variants, each a setting of every parameter group:

    - ``lr_in_velocity``: as in the paper, ``v = momentum v + lr a`` and ``w = w - v``. Differs only
      when lr changes: accumulated steps keep their old rate, so a change takes effect
      ``1 / (1 - momentum)`` steps later.
    - ``clip``: LARC, the ratio is ``min(ratio / lr, 1)``: lr is the upper bound of the layer's
    rate. NVIDIA
      Apex uses a trust_coefficient of 0.02 with it.
    - ``adapt_vectors``, ``decay_vectors``: parameters of at most one axis (biases, norms) have
      ratio 1 and no decay by default: norms of few values give unstable ratios. Adapt them in
      a network without normalisation, where biases at ratio 1 feel the whole of lr.
    - ``adapt_undecayed``: False leaves parameters without weight decay at ratio 1, as timm and
      lightning-bolts do by default.
    - ``exclude``: the same by name: ratio 1 and no decay.

    Args:
        params: named parameters, parameters, or groups of them with their own settings.
        lr: learning rate, a number or a tensor of one; schedulers may change it.
        momentum: in [0, 1).
        weight_decay: b above, at least 0; part of the gradient, not decoupled.
        nesterov: Nesterov's momentum.
        trust_coefficient: above 0.
        eps: at least 0; 0 in the paper.
        lr_in_velocity, clip, adapt_vectors, decay_vectors, adapt_undecayed: see above.
        exclude: patterns (``*``, ``?``, ``[...]``) for names of parameters.

    Exactness: bitwise what ``step_one_by_one`` does, on a CPU. The state (``momentum_buffer``) has
    the dtype of its parameter; norms and ratios are float32 at least. Parameters without a gradient
    are skipped. ``state_dict`` is as in torch.optim; resuming continues bit for bit.

    Norms are those of whole parameters: where they are sharded (FSDP), each shard would get
    its own ratio.

    Raises:
        UsageError: a setting out of range, a pattern that matches nothing, a complex parameter; in
            ``step``, a sparse gradient.

    Source: You, Gitman, Ginsburg, "Large Batch Training of Convolutional Networks" (2017), arXiv
    1708.03888; NVIDIA Apex ``LARC``; PyTorch Image Models ``Lars``; on lr and velocity: Goyal et
    al., "Accurate, Large Minibatch SGD" (2017), section 3.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> _ = torch.nn.init.ones_(model.weight)
        >>> optimizer = Lars(model.named_parameters(), lr=100.0, trust_coefficient=0.001)
        >>> model(torch.tensor([30.0, 40.0])).sum().backward()
        >>> optimizer.step()  # 100 * 0.001 * sqrt(2) / 50, times the gradient (30, 40)
        >>> model.weight.detach()
        tensor([[0.9151, 0.8869]])

        A warm-up over 5 steps, then a cosine down to 0:

        >>> from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
        >>> optimizer = Lars(model.named_parameters(), lr=8.0, weight_decay=1e-4)
        >>> warm_up = LinearLR(optimizer, start_factor=0.2, total_iters=4)
        >>> cosine = CosineAnnealingLR(optimizer, T_max=16)
        >>> schedule = SequentialLR(optimizer, [warm_up, cosine], milestones=[4])
        >>> rates = []
        >>> for _ in range(20):
        ...     rates.append(round(optimizer.param_groups[0]["lr"], 2))
        ...     optimizer.step()
        ...     schedule.step()
        >>> rates[:6], rates[-1]
        ([1.6, 3.2, 4.8, 6.4, 8.0, 7.92], 0.08)
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        trust_coefficient: float = 0.001,
        eps: float = 1e-8,
        lr_in_velocity: bool = False,
        clip: bool = False,
        adapt_vectors: bool = False,
        decay_vectors: bool = False,
        adapt_undecayed: bool = True,
        exclude: Sequence[str] = (),
    ) -> None:
        super().__init__(params, locals())

    def _check(self, group: ParamGroup) -> None:
        check_number("momentum", group["momentum"], "0.9", below=1)
        check_number("trust_coefficient", group["trust_coefficient"], "0.001", above=True)
        check_number("eps", group["eps"], "1e-8")
        for name in ("nesterov", "lr_in_velocity", "clip"):
            check_flag(name, group[name])
        if group["nesterov"] and not group["momentum"]:
            raise UsageError(
                "nesterov is True and momentum is 0; allowed: nesterov with a momentum above 0; "
                "pass momentum=0.9 or nesterov=False"
            )

    def _update(self, bunches: Sequence[Bunch]) -> None:
        for bunch in bunches:
            directions = self._directions(bunch)
            group = bunch.group
            lr: float | Tensor = group["lr"]
            if group["lr_in_velocity"]:
                multiply_(directions, rate_on(lr, directions[0].device))
                lr = 1.0
            if group["momentum"]:
                velocities = [self._velocity(p) for p in bunch.parameters]
                multiply_(velocities, group["momentum"])
                torch._foreach_add_(velocities, directions)
                if group["nesterov"]:
                    torch._foreach_add_(directions, velocities, alpha=group["momentum"])
                else:
                    directions = velocities
            descend_(bunch.parameters, directions, lr)

    def _directions(self, bunch: Bunch) -> list[Tensor]:
        """``ratio (g + b w)`` of each parameter, in memory of its own."""
        decay = bunch.treatment.weight_decay
        if decay:
            directions = list(torch._foreach_add(bunch.gradients, bunch.parameters, alpha=decay))
        else:  # a copy in one call; torch 2.11 has no _foreach_clone
            directions = list(torch._foreach_mul(bunch.gradients, 1.0))
        if bunch.treatment.adapted:
            weights = self._norms(bunch, bunch.parameters)
            steps = self._norms(bunch, bunch.gradients)
            torch._foreach_mul_(directions, _ratios(weights, steps, bunch).unbind())
        return directions

    def _velocity(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        velocity: Tensor = state["momentum_buffer"]
        return velocity


def _ratios(weights: Tensor, steps: Tensor, bunch: Bunch) -> Tensor:
    """The trust ratios of layers whose weights and gradients have these norms."""
    group, decay = bunch.group, bunch.treatment.weight_decay
    ratios = group["trust_coefficient"] * weights / (steps + decay * weights + group["eps"])
    if group["clip"]:  # at an lr of 0 the quotient is inf, and the ratio 1
        ratios = (ratios / rate_on(group["lr"], weights.device)).clamp(max=1.0)
    return one_where_zero(ratios, weights, steps)


@torch.no_grad()
def step_one_by_one(optimizer: Lars) -> None:
    """Do as ``optimizer.step()`` does, one parameter after another, in plain torch.

    Exactness: bitwise the same on a CPU, the state included.
    """
    for group in optimizer.param_groups:
        for bunch in bunches_of(group):
            for parameter, gradient in zip(bunch.parameters, bunch.gradients, strict=True):
                _step_one(parameter, gradient, optimizer.state[parameter], bunch)


def _step_one(parameter: Tensor, gradient: Tensor, state: dict[str, Any], bunch: Bunch) -> None:
    group, decay, momentum = bunch.group, bunch.treatment.weight_decay, bunch.group["momentum"]
    direction = gradient.add(parameter, alpha=decay)
    if bunch.treatment.adapted:
        weight, length = norm(parameter), norm(gradient)
        if weight > 0 and length > 0:
            ratio = group["trust_coefficient"] * weight / (length + decay * weight + group["eps"])
            if group["clip"]:
                ratio = (ratio / group["lr"]).clamp(max=1.0)
            direction *= ratio
    lr = group["lr"]
    if group["lr_in_velocity"]:
        direction *= lr
        lr = 1.0
    if momentum:
        velocity = state.setdefault("momentum_buffer", torch.zeros_like(parameter))
        velocity.mul_(momentum).add_(direction)
        direction = direction.add(velocity, alpha=momentum) if group["nesterov"] else velocity
    if isinstance(lr, Tensor):
        parameter.sub_(direction * lr)
    else:
        parameter.add_(direction, alpha=-lr)
