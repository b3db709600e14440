"""Results that are computed when they are asked for: whoever asks, and whenever, gets torch's."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from slipstream.errors import ModelError
from slipstream.fusion import fuse_patterns

pytestmark = pytest.mark.usefixtures("without_compilation")

Between = Callable[["Unit", Tensor], Any]


class Unit(nn.Module):
    """A chain of a batch norm, with something of the user's in it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.relu = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU()
        self.between: Between | None = None
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn(self.conv(x))
        if self.between is not None:
            changed = self.between(self, y)
            y = y if changed is None else changed
        return self.relu(y)  # type: ignore[no-any-return]


class Twice(torch.autograd.Function):
    """Takes its argument past torch's Python functions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    return x * 2 + x.relu()


def keep(m: Unit, value: object) -> None:
    m.kept = value


def keep_and_change(m: Unit, y: Tensor) -> Tensor:
    m.kept = y
    y += 1
    return y


def add_to_an_alias(m: Unit, y: Tensor) -> Tensor:
    m.kept = y
    z = y
    z += m.conv.bias.view(1, 3, 1, 1).expand_as(y)  # type: ignore[union-attr]
    return z


def add_in_place(m: Unit, y: Tensor) -> Tensor:
    m.kept = y
    other = torch.ones_like(y)
    z = y
    z += other
    return z


def relu_in_place(m: Unit, y: Tensor) -> Tensor:
    z = F.relu(y, inplace=True)
    return y * 2 + z


def view(m: Unit, y: Tensor) -> Tensor:
    z = y.view(-1)
    y += 1
    return y + z.view_as(y)


def sees_gradients(m: Unit, y: Tensor) -> None:
    if y.requires_grad:
        y.register_hook(lambda gradient: 2 * gradient)


def without_gradients(m: Unit, y: Tensor) -> Tensor:
    with torch.no_grad():
        return F.relu(y) + y


def other_autocast(m: Unit, y: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.relu(y) + y


def only_if_positive(m: Unit, y: Tensor) -> Tensor:
    return y * 3 if y.detach().sum().item() > 0 else y * 5


def branches_on_type(m: Unit, y: Tensor) -> Tensor:
    return y * 3 if isinstance(y, Tensor) and y.dtype.is_floating_point else y


BETWEEN: dict[str, Between] = {
    "used again": lambda m, y: F.relu(y) + y,
    "summed with itself": lambda m, y: y + y,
    "a list": lambda m, y: torch.cat([y, y[:1]]),
    "an autograd function": lambda m, y: Twice.apply(y),
    "an autograd function before the chain": lambda m, y: Twice.apply(y) + F.relu(y),
    "keywords": lambda m, y: torch.relu(input=y) + torch.add(input=y, other=y.add(other=y)),
    "an autograd function, and again": lambda m, y: Twice.apply(y) + F.relu(y) + y,
    "TorchScript": lambda m, y: scripted(y),
    "printed": lambda m, y: keep(m, [len(repr(y)) > 0, len(y), y.shape]),
    "numpy": lambda m, y: keep(m, torch.from_numpy(y.detach().numpy().copy())),
    "in a tuple": lambda m, y: keep(m, torch.stack((y, y)).sum()),
    "kept and changed": keep_and_change,
    "added to an alias": add_to_an_alias,
    "added in place": add_in_place,
    "relu in place": relu_in_place,
    "a view": view,
    "a hook of the tensor": sees_gradients,
    "statistics are read": lambda m, y: keep(m, m.bn.running_mean.clone()),  # type: ignore[union-attr]
    "not used": lambda m, y: m.conv.weight.sum() + torch.zeros(2, 3, 6, 6),
    "no_grad": without_gradients,
    "autocast": other_autocast,
    "a branch": only_if_positive,
    "a type": branches_on_type,
    "a copy": lambda m, y: copy.deepcopy(y.detach()) + y,
    "pickled": lambda m, y: pickle.loads(pickle.dumps(y.detach())) + y,
    "checkpoint": lambda m, y: checkpoint(lambda z: F.relu(z) * 2, y, use_reentrant=False),
    "old checkpoint": lambda m, y: checkpoint(lambda z: F.relu(z) * 2, y, use_reentrant=True),
    "a dtype": lambda m, y: y.double().to(torch.float32),
    "a broadcast sum": lambda m, y: y + torch.ones(3, 1, 1),
    "a number": lambda m, y: y + 1,
    "another type": lambda m, y: y + torch.ones_like(y).double(),
    "alpha": lambda m, y: torch.add(y, torch.ones(2, 3, 6, 6), alpha=2),
    "hardtanh": lambda m, y: F.hardtanh(y),
    "gelu": lambda m, y: F.gelu(y, approximate="tanh"),
}


def pair() -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    unit = Unit()
    plain = copy.deepcopy(unit)
    fused = fuse_patterns(unit)
    return unit, plain, fused


def passed(unit: Any, x: Tensor) -> list[Tensor]:
    unit.zero_grad()
    given = x.clone().requires_grad_()
    out = unit(given)
    gradients = []
    if out.requires_grad:
        out.backward(torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out))
        gradients = [given.grad, *(p.grad for p in unit.parameters())]
    kept = [unit.kept] if isinstance(unit.kept, Tensor) else []
    return [out, *(torch.zeros(1) if g is None else g for g in gradients), *kept, *unit.buffers()]  # type: ignore[list-item]


def compare(unit: Any, plain: Any, tolerance: float = 1e-4) -> None:
    x = torch.randn(2, 3, 6, 6)
    for one, other in zip(passed(unit, x), passed(plain, x), strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("between", BETWEEN)
def test_between_a_batch_norm_and_its_activation(between: str) -> None:
    unit, plain, fused = pair()
    compare(unit, plain)
    assert fused.ran == {"batch norm + activation": 1}
    unit.between = plain.between = BETWEEN[between]
    for each in (unit.train(), unit.eval()):
        plain.train(each.training)
        compare(unit, plain, 0.02 if between == "autocast" else 1e-4)


def test_an_input_changed_in_place_is_refused() -> None:
    unit, _, _ = pair()

    def change(m: Unit, y: Tensor) -> None:
        m.kept.mul_(2)

    unit.conv.register_forward_hook(lambda m, given, out: keep(unit, out))
    unit.between = change
    with pytest.raises(ModelError, match=r"in place before it uses the result.*leave out compute"):
        unit(torch.randn(2, 3, 6, 6))


def test_an_exception_between_leaves_the_statistics_of_torch() -> None:
    unit, plain, _ = pair()

    def fail(m: Unit, y: Tensor) -> None:
        raise KeyboardInterrupt

    for each in (unit, plain):
        each.between = fail
        with pytest.raises(KeyboardInterrupt):
            each(torch.ones(2, 3, 6, 6))
        each.between = None
    compare(unit, plain)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_transforms_see_torchs_own_functions() -> None:
    unit, plain, _ = pair()
    x, results = torch.randn(2, 3, 6, 6), []
    for each in (unit, plain):
        each.bn.running_mean = each.bn.running_var = each.bn.num_batches_tracked = None
        parameters = dict(each.named_parameters())

        def loss(given: Any, each: Any = each) -> Tensor:
            return torch.func.functional_call(each, given, (x,)).square().sum()  # type: ignore[no-any-return]

        gradients = torch.func.grad(loss)(parameters)
        traced = torch.jit.trace(each, x, check_trace=False)
        results.append([*gradients.values(), traced(x), loss(parameters)])
        results[-1] += torch.func.jvp(each, (x,), (torch.ones_like(x),))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.process
def test_a_compiler_sees_torchs_own_functions() -> None:
    unit, plain, _ = pair()
    torch.compiler.set_stance("default")
    x = torch.randn(2, 3, 6, 6)
    compiled = torch.compile(unit, backend="eager")
    torch.testing.assert_close(compiled(x), plain(x))


def test_the_result_of_a_model_is_an_ordinary_tensor_where_it_is_used() -> None:
    """The last layer is the batch norm of a chain elsewhere."""
    shared = nn.BatchNorm2d(3)
    model = nn.Sequential(nn.Sequential(nn.Conv2d(3, 3, 1), shared, nn.ReLU()), shared)
    plain = copy.deepcopy(model)
    fuse_patterns(model)
    x = torch.randn(2, 3, 5, 5)
    ours, torchs = model(x), plain(x)
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    torch.testing.assert_close(torch.load(file, weights_only=False), torchs)
    (one,), (other,) = (
        torch.autograd.grad(out.sum(), m[0][0].weight)
        for out, m in ((ours, model), (torchs, plain))  # type: ignore[index]
    )
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


class Region(torch.autograd.Function):
    """Returns what a layer returned as its own result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        with torch.enable_grad():
            return layer(x.detach())  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return 3 * gradient, None


def test_the_result_of_an_autograd_function_has_its_gradient() -> None:
    unit, plain, _ = pair()
    x, gradients = torch.randn(2, 3, 6, 6), []
    for each in (unit, plain):
        given = x.clone().requires_grad_()
        out = each.relu(Region.apply(given, each.bn)) + 1
        out.square().sum().backward()
        gradients += [out, given.grad]
    torch.testing.assert_close(gradients[:2], gradients[2:], rtol=1e-4, atol=1e-4)


def test_changes_in_place_reach_all_who_hold_a_result() -> None:
    """Without gradients of relu, which would refuse them."""
    unit, plain, _ = pair()

    def change(m: Unit, y: Tensor) -> Tensor:
        m.kept = y
        with torch.no_grad():
            z = F.relu_(y)  # type: ignore[attr-defined]
            y += torch.ones_like(z)
            z *= 2
            y += z
        return y.detach()

    unit.between = plain.between = change
    compare(unit, plain)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_around_half_a_chain(reentrant: bool) -> None:
    """A batch norm that is recomputed, and an activation that is not."""

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
            self.relu = nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            return self.relu(self.inner(x))  # type: ignore[no-any-return]

        def inner(self, x: Tensor) -> Tensor:
            return self.first(x)  # type: ignore[no-any-return]

    model = Half()
    plain = copy.deepcopy(model)
    fused = fuse_patterns(model)
    for each in (model, plain):
        inner = each.first
        each.inner = lambda x, f=inner: checkpoint(f, x, use_reentrant=reentrant)  # type: ignore[method-assign]
    x = torch.randn(2, 3, 5, 5)
    for each in (model, plain):
        each(x.clone().requires_grad_()).square().sum().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4)
    assert reentrant or fused.ran


def test_second_derivatives_are_right_or_refused() -> None:
    unit, plain, _ = pair()
    x, found = torch.randn(2, 3, 6, 6), []
    for each in (unit, plain):
        given = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(each(given).square().sum(), given, create_graph=True)
        try:
            first.square().sum().backward()
        except RuntimeError as error:
            if "once_differentiable" not in str(error):
                raise
            return
        found.append([p.grad for p in each.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
