"""Half weights under what code beside the training loop does to parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

from slipstream.errors import ModelError, UsageError
from slipstream.precision import half_weights
from tests.precision.half_models import Net, batches, make, small, update

CLOSE = {"rtol": 0.0, "atol": 4e-3}
"""A few roundings of 16-bit gradients, at a learning rate of 0.1."""


def beside(change: Callable[[nn.Module, torch.optim.Optimizer], Any], *, every: bool) -> None:
    """Train with half weights and without them; change both after the third update, or each."""
    trained = []
    for half in (True, False):
        torch.manual_seed(0)
        net = Net()
        optimizer = make("sgd", net.parameters())
        handle = half_weights(net, optimizer) if half else None
        for number in range(6):
            update(net, optimizer)
            if every or number == 2:
                change(net, optimizer)
        state = {name: value.clone() for name, value in net.state_dict().items()}
        if handle is not None:
            handle.close()
            torch.testing.assert_close(net.state_dict(), state, rtol=0, atol=0)
            assert {type(p) for p in net.parameters()} == {nn.Parameter}
        trained.append(state)
    torch.testing.assert_close(*trained, **CLOSE)


def ramp(like: Tensor) -> Tensor:
    return torch.linspace(-0.3, 0.3, like.numel()).view(like.shape)


def spread(net: nn.Module) -> Tensor:
    return torch.linspace(-1, 1, sum(p.numel() for p in net.parameters()))


def each(write: Callable[[nn.Parameter], Any]) -> Callable[[nn.Module, Any], None]:
    def change(net: nn.Module, _: object) -> None:
        for parameter in net.parameters():
            write(parameter)

    return change


def evaluate_averages(net: nn.Module, _: object) -> None:
    """As averages are put in and taken out again in many scripts."""
    backup = {name: p.data for name, p in net.named_parameters()}
    for parameter in net.parameters():
        parameter.data = parameter.data * 0.5
    net(torch.ones(2, 5))
    for name, parameter in net.named_parameters():
        parameter.data = backup[name]


def new_layer(net: Any, optimizer: torch.optim.Optimizer) -> None:
    torch.manual_seed(1)
    net.last = nn.Linear(8, 4)
    optimizer.add_param_group({"params": [*net.last.parameters()]})


def new_parameter(net: Any, optimizer: torch.optim.Optimizer) -> None:
    net.last.bias = nn.Parameter(torch.full((4,), 0.3))
    optimizer.param_groups[0]["params"][-1] = net.last.bias


def with_no_grad(write: Callable[[nn.Parameter], Any]) -> Callable[[nn.Parameter], None]:
    def inside(parameter: nn.Parameter) -> None:
        with torch.no_grad():
            write(parameter)

    return inside


WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "data.mul_": each(lambda p: p.data.mul_(0.5)),
    "data.copy_": each(lambda p: p.data.copy_(ramp(p))),
    "data assigned": each(lambda p: setattr(p, "data", ramp(p.data))),
    "data assigned in fp32": each(lambda p: setattr(p, "data", ramp(p))),
    "detach().mul_": each(lambda p: p.detach().mul_(0.5)),
    "no_grad mul_": each(with_no_grad(lambda p: p.mul_(0.5))),
    "vector_to_parameters": lambda net, _: nn.utils.vector_to_parameters(
        spread(net), net.parameters()
    ),
    "averages put in and out": evaluate_averages,
    "float()": lambda net, _: net.float(),
    "to(device)": lambda net, _: net.to("cpu"),
    "a plain checkpoint": lambda net, _: net.load_state_dict(
        {name: ramp(value) for name, value in net.state_dict().items()}
    ),
    "a layer replaced": new_layer,
    "a parameter replaced": new_parameter,
}


@pytest.mark.parametrize("name", WRITES)
def test_what_is_written_from_outside_counts(name: str) -> None:
    beside(WRITES[name], every=False)


@pytest.mark.parametrize(
    "clamp", [lambda p: p.data.clamp_(-0.1, 0.1), with_no_grad(lambda p: p.clamp_(-0.1, 0.1))]
)
def test_weights_clamped_after_each_update(clamp: Callable[[nn.Parameter], Any]) -> None:
    beside(each(clamp), every=True)


@pytest.mark.parametrize(
    "settings",
    [{}, {"avg_fn": get_ema_avg_fn(0.9)}, {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}],
    ids=["swa", "ema", "ema of many"],
)
@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_averages_are_those_of_the_masters(settings: dict[str, Any], first: bool) -> None:
    net, optimizer, half = small()
    masters = AveragedModel(Net(), **settings)
    if first:
        half.close()
    average = AveragedModel(net, **settings)
    if first:
        half_weights(net, optimizer)
    full = Net()
    for _ in range(4):
        update(net, optimizer)
        average.update_parameters(net)
        full.load_state_dict(net.state_dict())
        masters.update_parameters(full)
    torch.testing.assert_close(average.module.state_dict(), masters.module.state_dict())
    assert {p.dtype for p in average.parameters()} == {torch.float32}


def test_a_key_encoder_follows_below_the_rounding_of_16_bits() -> None:
    """MoCo's rule, with steps a hundredth of the spacing of bf16."""
    net, optimizer, _ = small()
    key = copy.deepcopy(net)
    before = key.first.weight.detach().clone()
    update(net, optimizer)
    expected = before.clone()
    for _ in range(3):
        for p, q in zip(key.parameters(), net.parameters(), strict=True):
            p.data.lerp_(q.data, 1e-4)
        expected.lerp_(net.state_dict()["first.weight"], 1e-4)
    assert not torch.equal(before, expected)
    assert torch.equal(key.first.weight, expected)


def test_a_clone_is_of_the_master_outside_of_the_model() -> None:
    """As torch_ema and diffusers begin averages, and store what they put back."""
    net, optimizer, half = small()
    update(net, optimizer)
    before = {p: master.clone() for p, master in half.masters.items()}
    stored = [p.clone() for p in net.parameters()]
    for p in net.parameters():
        p.data.copy_(torch.zeros_like(p))
    net(torch.ones(2, 5))
    for p, kept in zip(net.parameters(), stored, strict=True):
        p.data.copy_(kept.data)
    assert all(torch.equal(half.masters[p], before[p]) for p in before)
    net.first.weight.clone().square().sum().backward()
    assert net.first.weight.grad is not None
    torch.testing.assert_close(
        net.first.weight.grad, 2 * before[net.first.weight], rtol=0.01, atol=0
    )
    assert torch.clone(net.first.weight).dtype == torch.bfloat16


class Momentum(nn.Module):
    """MoCo, which moves its key encoder in its forward."""

    def __init__(self, move: Callable[[nn.Parameter, nn.Parameter], Any]) -> None:
        super().__init__()
        self.move, self.query, self.key = move, nn.Linear(5, 4), nn.Linear(5, 4)
        self.key.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for q, k in zip(self.query.parameters(), self.key.parameters(), strict=True):
            self.move(q, k)
        return self.query(x) * self.key(x)


MOVES: dict[str, Callable[[Any, Any], Any]] = {
    "assigned": lambda q, k: setattr(k, "data", k.data * 0.99 + q.data * 0.01),
    "in place": lambda q, k: k.data.mul_(0.99).add_(q.data, alpha=0.01),
}


@pytest.mark.parametrize("name", MOVES)
def test_an_average_that_the_forward_keeps_in_16_bits_is_refused(name: str) -> None:
    model = Momentum(MOVES[name])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    half = half_weights(model, optimizer)
    with pytest.raises(UsageError, match=r"^key\.weight, key\.bias: frozen, .*after session\.step"):
        model(batches()[0][0])
    model.move = lambda q, k: (q.data, k.data)  # to read is fine
    for _ in range(2):
        update(model, optimizer)
        MOVES[name](model.query.weight, model.key.weight)
    half.close()


def test_inside_of_the_model_data_has_16_bits() -> None:
    seen: list[torch.dtype] = []

    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.weight = weight
            return x @ weight.detach()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            seen.append(ctx.weight.data.dtype)
            return gradients[0] @ ctx.weight.data.t(), None

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.first = nn.Parameter(torch.eye(5)), nn.Linear(5, 5)

        def forward(self, x: Tensor) -> Tensor:
            seen.append(self.weight.data.dtype)
            y: Tensor = Reads.apply(self.first(x), self.weight)
            return y

    model = Reader()
    half_weights(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.ones(2, 5)).sum().backward()
    assert seen == [torch.bfloat16, torch.bfloat16]
    assert model.weight.data.dtype == model.weight.detach().dtype == torch.float32
    assert model.weight.dtype == torch.bfloat16


def test_a_forward_that_is_interrupted_is_over() -> None:
    net, _, _ = small()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    hook = net.norm.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        net(torch.ones(2, 5))
    hook.remove()
    assert net.first.weight.data.dtype == torch.float32
    assert net(torch.ones(2, 5)).dtype == net.first.weight.detach().dtype == torch.float32


def test_a_gradient_made_like_the_parameter_is_cast() -> None:
    net, optimizer, _ = small()
    net(batches()[0][0]).sum().backward()
    net.first.weight.grad = torch.full_like(net.first.weight, 0.5)
    assert net.first.weight.grad.dtype == torch.float32
    del net.first.weight.grad
    assert net.first.weight.grad is None
    optimizer.step()


def test_functions_of_parameters_in_fp32_and_in_16_bits() -> None:
    net, optimizer, _ = small()
    update(net, optimizer)
    x = batches()[0][0]
    plain = copy.deepcopy(net)

    def loss(parameters: dict[str, Tensor], model: nn.Module) -> Tensor:
        y: Tensor = torch.func.functional_call(model, parameters, (x,))
        return y.square().mean()

    values = {name: p.detach() for name, p in plain.named_parameters()}
    own = torch.func.grad(loss)({name: p.detach() for name, p in net.named_parameters()}, net)
    expected = torch.func.grad(loss)(values, plain)
    torch.testing.assert_close(own, expected, rtol=0.02, atol=0.01)
    halved = {name: value / 2 for name, value in values.items()}
    torch.testing.assert_close(loss(halved, net), loss(halved, plain), rtol=0.02, atol=0.01)
    assert all(isinstance(p, nn.Parameter) for p in net.parameters())
    update(net, optimizer)


def test_the_loop_of_a_gradient_scaler() -> None:
    """Scaled, unscaled, clipped, with an overflow that is skipped, after which it goes on."""
    trained = []
    for half in (True, False):
        torch.manual_seed(0)
        net = Net()
        optimizer = make("sgd", net.parameters())
        if half:
            half_weights(net, optimizer, "fp16")
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        for number, (x, y) in enumerate(batches()):
            loss = nn.functional.mse_loss(net(x), y)
            scaler.scale(loss * (float("inf") if number == 2 else 1)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scaler.get_scale() == 2.0**10  # halved once, doubled once
        trained.append(net.state_dict())
    torch.testing.assert_close(*trained, **CLOSE)


class Swapping(torch.optim.SGD):
    """As schedule-free optimizers do."""

    def eval(self) -> None:
        raise NotImplementedError


def late_half(net: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, dtype=torch.bfloat16))]})
    optimizer.step()


REFUSED: dict[str, tuple[Callable[[Any, Any], Any], type[Exception], str]] = {
    "half()": (
        lambda net, _: (net.half(), update(net, _)),
        UsageError,
        "norm.weight was made torch.float16, by model.half() or the like",
    ),
    "another shape": (
        lambda net, _: setattr(net.first.weight, "data", torch.ones(2)),
        UsageError,
        "set to a tensor of shape (2,) on cpu; allowed with half weights: (8, 5) on cpu",
    ),
    "a late 16-bit parameter": (
        late_half,
        UsageError,
        "the optimizer got a parameter in torch.bfloat16 after half_weights",
    ),
    "assign": (
        lambda net, _: net.load_state_dict(net.state_dict(), assign=True),
        UsageError,
        "use assign=False",
    ),
    "an optimizer with eval()": (
        lambda _, __: half_weights((net := Net()), Swapping(net.parameters(), lr=0.1)),
        ModelError,
        "Swapping: its eval() and train() change parameters outside of step()",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_go_wrong_is_refused(name: str) -> None:
    net, optimizer, _ = small()
    act, kind, words = REFUSED[name]
    with pytest.raises(kind) as caught:
        act(net, optimizer)
    assert words in str(caught.value)
