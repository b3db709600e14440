"""LAMB: Adam whose step in each layer is scaled by the norm of the layer's weights.

``step_one_by_one`` is the plain loop over parameters: the reference of the tests, and the place to
read the algorithm.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.optimizer import ParamsT

from slipstream.errors import UsageError
from slipstream.optim.layerwise import Bunch, Layerwise, ParamGroup, bunches_of
from slipstream.optim.memory_order import laid_like
from slipstream.optim.settings import check_bounds, check_flag, check_number
from slipstream.optim.trust_ratio import descend_, multiply_, norm, one_where_zero

MOMENTS = ("exp_avg", "exp_avg_sq")


class Lamb(Layerwise):
    """Layer-wise adaptive moments: Adam for batches of thousands.

    For the weights w of one layer, their gradient g, weight decay b and step number t::

        m     = beta1 m + (1 - beta1) g,    v = beta2 v + (1 - beta2) g^2
        d     = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + b w
        ratio = |w| / |d|                                           1 where |w| or |d| is 0
        w     = w - lr ratio d

    A step has ``lr`` times the norm of the layer's weights. For a batch k times as large, start
    with an lr ``sqrt(k)`` times as large and a linear warm-up.

    Variants, each a setting of every parameter group:

    - ``bias_correction``: False leaves out the divisions by ``1 - beta^t``, as version 3 of the
      paper does. The ratio normalises d, so this changes only the weight of b w and eps in the
      first steps, and parameters with ratio 1.
    - ``max_grad_norm``: every gradient is first divided by
      ``max(1, |all gradients| / max_grad_norm)`` (pre-normalisation). NVIDIA Apex and timm use 1.0
      by default, the paper none.
    - ``grad_averaging``: False takes ``m = beta1 m + g``.
    - ``clip_ratio``: bounds of the ratio: (0, 1) is timm's ``trust_clip``, (0.01, 10) DeepSpeed's.
    - ``clip_weight_norm``: bounds of |w| in the ratio, the paper's phi; (0, 10) in early code.
    - ``adapt_vectors``, ``decay_vectors``: parameters of at most one axis (biases, norms) have
      ratio 1 and no decay by default: norms of few values give unstable ratios.
    - ``adapt_undecayed``: False leaves parameters without weight decay at ratio 1, as Apex (without
      ``use_nvlamb``) and timm (without ``always_adapt``) do.
    - ``exclude``: the same by name: ratio 1 and no decay.

    Args:
        params: named parameters, parameters, or groups of them with their own settings.
        lr: learning rate, a number or a tensor of one; schedulers may change it.
        betas: decay rates of both moments, in [0, 1).
        eps: above 0.
        weight_decay: b above, at least 0; part of the direction, so also of its norm.
        bias_correction: see above.
        max_grad_norm: above 0, or None; the norm is that of all gradients of all groups.
        grad_averaging, clip_ratio, clip_weight_norm: see above.
        adapt_vectors, decay_vectors, adapt_undecayed: see above.
        exclude: patterns (``*``, ``?``, ``[...]``) for names of parameters.

    Exactness: bitwise what ``step_one_by_one`` does, on a CPU. The state has ``exp_avg`` and
    ``exp_avg_sq`` in the dtype of their parameter, and ``step``, an int, for each; norms and ratios
    are float32 at least. Parameters without a gradient are skipped. ``state_dict`` is as in
    torch.optim; resuming continues bit for bit.

    Norms are those of whole parameters: where they are sharded (FSDP), each shard would get
    its own ratio.

    Raises:
        UsageError: a setting out of range, a pattern that matches nothing, a complex parameter; in
            ``step``, a sparse gradient.

    Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes"
    (2020), arXiv 1904.00962; NVIDIA Apex ``FusedLAMB``; PyTorch Image Models ``Lamb``; DeepSpeed
    ``FusedLamb``.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> _ = torch.nn.init.ones_(model.weight)
        >>> optimizer = Lamb(model.named_parameters(), lr=0.1, weight_decay=0.0)
        >>> model(torch.tensor([30.0, 40.0])).sum().backward()
        >>> optimizer.step()  # the first direction is (1, 1), its ratio 1
        >>> model.weight.detach()
        tensor([[0.9000, 0.9000]])

        A warm-up over 5 steps, then a cosine down to 0:

        >>> from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
        >>> optimizer = Lamb(model.named_parameters(), lr=0.01, max_grad_norm=1.0)
        >>> warm_up = LinearLR(optimizer, start_factor=0.2, total_iters=4)
        >>> cosine = CosineAnnealingLR(optimizer, T_max=16)
        >>> schedule = SequentialLR(optimizer, [warm_up, cosine], milestones=[4])
        >>> rates = []
        >>> for _ in range(20):
        ...     rates.append(round(optimizer.param_groups[0]["lr"], 4))
        ...     optimizer.step()
        ...     schedule.step()
        >>> rates[:6], rates[-1]
        ([0.002, 0.004, 0.006, 0.008, 0.01, 0.0099], 0.0001)
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        bias_correction: bool = True,
        max_grad_norm: float | None = None,
        grad_averaging: bool = True,
        clip_ratio: tuple[float, float] | None = None,
        clip_weight_norm: tuple[float, float] | None = None,
        adapt_vectors: bool = False,
        decay_vectors: bool = False,
        adapt_undecayed: bool = True,
        exclude: Sequence[str] = (),
    ) -> None:
        super().__init__(params, locals())

    def _check(self, group: ParamGroup) -> None:
        betas = group["betas"]
        if not isinstance(betas, tuple | list) or len(betas) != 2:
            raise UsageError(
                f"betas is {betas!r}; allowed: a pair of numbers; usual is (0.9, 0.999)"
            )
        check_number("betas[0]", betas[0], "0.9", below=1)
        check_number("betas[1]", betas[1], "0.999", below=1)
        check_number("eps", group["eps"], "1e-6", above=True)
        if group["max_grad_norm"] is not None:
            check_number("max_grad_norm", group["max_grad_norm"], "1.0, or None", above=True)
        for name in ("bias_correction", "grad_averaging"):
            check_flag(name, group[name])
        check_bounds("clip_ratio", group["clip_ratio"], "(0, 1) or (0.01, 10)")
        check_bounds("clip_weight_norm", group["clip_weight_norm"], "(0, 10)")

    def _update(self, bunches: Sequence[Bunch]) -> None:
        total = self._total_norm(bunches)
        for bunch in bunches:
            directions = self._directions(bunch, total)
            if bunch.treatment.adapted:
                ratios = _ratios(
                    self._norms(bunch, bunch.parameters),
                    self._norms(bunch, directions),
                    bunch.group,
                )
                torch._foreach_mul_(directions, ratios.unbind())
            descend_(bunch.parameters, directions, bunch.group["lr"])

    def _directions(self, bunch: Bunch, total: Tensor | None) -> list[Tensor]:
        """Update the moments; return the direction ``d`` of each parameter."""
        group, states = bunch.group, [self._state(p) for p in bunch.parameters]
        firsts = [state["exp_avg"] for state in states]
        seconds = [state["exp_avg_sq"] for state in states]
        gradients = bunch.gradients
        if total is not None and group["max_grad_norm"] is not None:
            excess = total.to(gradients[0].device) / group["max_grad_norm"]
            gradients = list(torch._foreach_div(gradients, excess.clamp(min=1.0)))
        if (
            self.fused
            and group["grad_averaging"]
            and _fit_one_kernel(bunch.parameters, gradients, firsts, seconds)
        ):
            return self._fused_directions(bunch, gradients, states)
        beta1, beta2 = group["betas"]
        multiply_(firsts, beta1)
        torch._foreach_add_(firsts, gradients, alpha=1 - beta1 if group["grad_averaging"] else 1.0)
        multiply_(seconds, beta2)
        torch._foreach_addcmul_(seconds, gradients, gradients, value=1 - beta2)
        denominators = torch._foreach_sqrt(seconds)
        if group["bias_correction"]:
            steps = [state["step"] for state in states]
            torch._foreach_div_(denominators, [sqrt(1 - beta2**t) for t in steps])
            torch._foreach_add_(denominators, group["eps"])
            directions = torch._foreach_div(firsts, [1 - beta1**t for t in steps])
            torch._foreach_div_(directions, denominators)
        else:
            torch._foreach_add_(denominators, group["eps"])
            directions = torch._foreach_div(firsts, denominators)
        if decay := bunch.treatment.weight_decay:
            torch._foreach_add_(directions, bunch.parameters, alpha=decay)
        return list(directions)

    def _fused_directions(
        self, bunch: Bunch, gradients: Sequence[Tensor], states: Sequence[dict[str, Any]]
    ) -> list[Tensor]:
        """The same by torch's fused Adam: where a parameter is 0, a step of -1 leaves ``d``. The
        kernel goes through its operands by their memory, so all get one order."""
        group, parameters = bunch.group, bunch.parameters
        beta1, beta2 = group["betas"]
        directions = self._zeros_like(parameters)
        for state, direction in zip(states, directions, strict=True):
            for name in MOMENTS:
                state[name] = laid_like(state[name], direction)
        # it counts the step itself; after very many its corrections are 1
        before = [state["step"] - 1.0 if group["bias_correction"] else 1e9 for state in states]
        steps = torch.tensor(before, dtype=torch.float32, device=parameters[0].device)
        adam(
            directions,
            [laid_like(g, d) for g, d in zip(gradients, directions, strict=True)],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            max_exp_avg_sqs=[],
            state_steps=list(steps.unbind()),
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=-1.0,
            weight_decay=0.0,
            eps=group["eps"],
            maximize=False,
        )
        if decay := bunch.treatment.weight_decay:
            torch._foreach_add_(directions, parameters, alpha=decay)
        return directions

    def _zeros_like(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Zeros for each, valid until the next call; on a CPU in the same memory every time, since
        touching new memory takes longer than the arithmetic."""
        first, total = parameters[0], sum(p.numel() for p in parameters)
        alike = all(p.is_contiguous() for p in parameters)
        if first.device.type != "cpu" or not alike:
            return [torch.zeros_like(parameter) for parameter in parameters]
        kept: dict[torch.dtype, Tensor] = vars(self).setdefault("_memory", {})  # copies have none
        memory = kept.get(first.dtype)
        if memory is None or memory.numel() < total:
            memory = kept[first.dtype] = first.detach().new_empty(total)
        parts = memory[:total].zero_().split([p.numel() for p in parameters])
        return [part.view(p.shape) for part, p in zip(parts, parameters, strict=True)]

    def _total_norm(self, bunches: Sequence[Bunch]) -> Tensor | None:
        """The norm of all gradients; None: no group needs it."""
        if all(bunch.group["max_grad_norm"] is None for bunch in bunches):
            return None
        each = [self._norms(bunch, bunch.gradients) for bunch in bunches]
        all_norms = torch.cat([one.to(each[0].device) for one in each])
        total: Tensor = torch.linalg.vector_norm(all_norms)
        return total

    def _state(self, parameter: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = 0  # an int: counting needs no kernel
            for name in MOMENTS:
                state[name] = torch.zeros_like(parameter)
        state["step"] += 1
        return state


def _fit_one_kernel(parameters: Sequence[Tensor], *parts: Sequence[Tensor]) -> bool:
    """Whether gradients and moments are of their parameters' type and shape, and none comes
    twice."""
    kinds = [[(t.dtype, t.shape) for t in part] for part in (parameters, *parts)]
    once = len({*map(id, parameters)}) == len(parameters)
    return once and all(kind == kinds[0] for kind in kinds)


def _ratios(weights: Tensor, steps: Tensor, group: ParamGroup) -> Tensor:
    """Trust ratios from the norms of weights and directions."""
    if group["clip_weight_norm"] is not None:
        weights = weights.clamp(*group["clip_weight_norm"])
    ratios = weights / steps
    if group["clip_ratio"] is not None:
        ratios = ratios.clamp(*group["clip_ratio"])
    return one_where_zero(ratios, weights, steps)


@torch.no_grad()
def step_one_by_one(optimizer: Lamb) -> None:
    """Do as ``optimizer.step()`` does, one parameter after another, in plain torch.

    Exactness: bitwise the same on a CPU, the state included.
    """
    bunches = [bunch for group in optimizer.param_groups for bunch in bunches_of(group)]
    each = [norm(gradient) for bunch in bunches for gradient in bunch.gradients]
    total = torch.linalg.vector_norm(torch.stack(each)) if each else torch.zeros(())
    for bunch in bunches:
        for parameter, gradient in zip(bunch.parameters, bunch.gradients, strict=True):
            _step_one(parameter, gradient, optimizer.state[parameter], bunch, total)


def _step_one(
    parameter: Tensor, gradient: Tensor, state: dict[str, Any], bunch: Bunch, total: Tensor
) -> None:
    group, (beta1, beta2) = bunch.group, bunch.group["betas"]
    if group["max_grad_norm"] is not None:
        gradient = gradient / (total / group["max_grad_norm"]).clamp(min=1.0)
    step = state["step"] = state.get("step", 0) + 1
    first = state.setdefault("exp_avg", torch.zeros_like(parameter))
    second = state.setdefault("exp_avg_sq", torch.zeros_like(parameter))
    first.mul_(beta1).add_(gradient, alpha=1 - beta1 if group["grad_averaging"] else 1.0)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    if group["bias_correction"]:
        spread = second.sqrt() / sqrt(1 - beta2**step)
        direction = first / (1 - beta1**step) / (spread + group["eps"])
    else:
        direction = first / (second.sqrt() + group["eps"])
    direction.add_(parameter, alpha=bunch.treatment.weight_decay)
    if bunch.treatment.adapted:
        weight, length = norm(parameter), norm(direction)
        if group["clip_weight_norm"] is not None:
            weight = weight.clamp(*group["clip_weight_norm"])
        if weight > 0 and length > 0:
            ratio = weight / length
            if group["clip_ratio"] is not None:
                ratio = ratio.clamp(*group["clip_ratio"])
            direction *= ratio
    if isinstance(group["lr"], Tensor):
        parameter.sub_(direction * group["lr"])
    else:
        parameter.add_(direction, alpha=-group["lr"])
