"""What users do beside recomputation and offload: each the same as without them, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from slipstream.errors import UsageError
from slipstream.memory import offload, recompute
from slipstream.strategy import OffloadConfig
from slipstream.strategy.memory import EveryConfig

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
Results = Iterable[Tensor | None]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(8, 8), nn.LayerNorm(8), nn.Dropout(0.3)
        self.calls, self.counts = 1, 1

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.counts
        return x + self.dropout(torch.tanh(self.linear(self.norm(x)))) * self.calls


def build() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), *(Block() for _ in range(4)), nn.Linear(8, 8))


TECHNIQUES: dict[str, Callable[[nn.Module], Any]] = {
    "each block": lambda model: recompute(model, EveryConfig(every=1)),
    "two blocks": lambda model: recompute(model, EveryConfig(every=2)),
    "kept products": lambda model: recompute(model, EveryConfig(every=1, keep=("matmul",))),
    "offload": lambda model: offload(model, OffloadConfig(to="disk", min_bytes=0)),
}


def trained(model: Any, between: Callable[[Any], None] = lambda model: None) -> Results:
    torch.manual_seed(1)
    model.zero_grad()
    loss = model(X).square().sum()
    between(model)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


def switched_to_eval(model: Any) -> Results:
    return trained(model, lambda model: model.eval())


def dropout_changed(model: Any) -> Results:
    return trained(model, lambda model: setattr(model[2].dropout, "p", 0.9))


def frozen(model: Any) -> Results:
    return trained(model, lambda model: model[2].linear.weight.requires_grad_(False))


def parameter_assigned(model: Any) -> Results:
    old = model[2].linear.weight
    new = nn.Parameter(2 * old.detach())
    results = [*trained(model, lambda model: setattr(model[2].linear, "weight", new)), old.grad]
    assert model[2].linear.weight is new
    assert new.grad is None
    return [*results, *trained(model)]


def data_assigned(model: Any) -> Results:
    def assign(model: Any) -> None:
        model[2].linear.weight.data = 2 * model[2].linear.weight.data

    return [*trained(model, assign), *trained(model)]


def layer_replaced(model: Any) -> Results:
    trained(model)
    model[2].linear = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    return [*trained(model), *trained(model), *model.buffers()]


def called_functionally(model: Any) -> Results:
    torch.manual_seed(1)
    values = {n: (p.detach() / 2).requires_grad_() for n, p in model.named_parameters()}
    return torch.autograd.grad(functional_call(model, values, X).sum(), [*values.values()])


def gradient_by_torch_func(model: Any) -> Results:
    torch.manual_seed(1)
    values = {n: p.detach() for n, p in model.named_parameters()}
    gradients = torch.func.grad(lambda v: functional_call(model, v, X).square().sum())(values)
    return [*gradients.values(), *trained(model)]


def gradients_of_samples(model: Any) -> Results:
    model.eval()
    values = {n: p.detach() for n, p in model.named_parameters()}
    gradient = torch.func.grad(lambda v, x: functional_call(model, v, x[None]).square().sum())
    return torch.vmap(gradient, in_dims=(None, 0))(values, X).values()  # type: ignore[no-any-return]


def forward_derivative(model: Any) -> Results:
    torch.manual_seed(1)
    return torch.func.jvp(model, (X,), (X,))


def traced(model: Any) -> Results:
    traced = torch.jit.trace(model.eval(), X, check_trace=False)  # type: ignore[no-untyped-call]
    return [traced(2 * X)]


def inside_a_checkpoint(model: Any) -> Results:
    results: list[Tensor | None] = []
    for block in model[1:-1]:
        block.counts = 0  # torch's own checkpoint counts twice
    for _ in range(3):
        torch.manual_seed(1)
        model.zero_grad()
        x = X.clone().requires_grad_()
        checkpoint(model, x, use_reentrant=False).square().sum().backward()
        results += [x.grad, *(p.grad for p in model.parameters())]
    return results


def compiled(model: Any) -> Results:
    try:
        net = torch.compile(model, backend="eager")
        return [*trained(net), *trained(net)]
    finally:
        torch.compiler.reset()


HABITS = (
    switched_to_eval,
    dropout_changed,
    frozen,
    parameter_assigned,
    data_assigned,
    layer_replaced,
    called_functionally,
    gradient_by_torch_func,
    gradients_of_samples,
    forward_derivative,
    traced,
    inside_a_checkpoint,
)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("habit", HABITS, ids=lambda habit: habit.__name__)
@pytest.mark.parametrize("technique", TECHNIQUES)
def test_results_are_those_of_plain_torch(technique: str, habit: Callable[[Any], Results]) -> None:
    plain, model = build(), build()
    expected = [*habit(plain)]
    installed = TECHNIQUES[technique](model)
    for ours, theirs in zip(habit(model), expected, strict=True):
        if theirs is None:
            assert ours is None
        else:
            assert ours is not None
            assert torch.equal(ours, theirs)
    assert model[2].calls == plain[2].calls
    installed.close()


@pytest.mark.parametrize("technique", ["two blocks", "offload"])
def test_a_compiled_model_is_that_of_plain_torch(technique: str) -> None:
    test_results_are_those_of_plain_torch(technique, compiled)


@pytest.mark.parametrize("technique", ["each block", "two blocks", "kept products"])
def test_a_parameter_changed_in_place_before_backward_is_refused(technique: str) -> None:
    """As torch refuses it, which without recomputation has saved the parameter."""

    @torch.no_grad()
    def step(model: Any) -> None:
        model[2].linear.weight.mul_(2)

    model = build()
    installed = TECHNIQUES[technique](model)
    with pytest.raises(UsageError, match="weight of a Linear, of shape"):
        trained(model, step)
    assert all(value is not None for value in trained(model))  # and goes on
    installed.close()
