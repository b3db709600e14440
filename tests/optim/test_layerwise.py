"""Which parameters are adapted and decay; what is refused, and in which words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

import slipstream
from slipstream.errors import UsageError
from slipstream.optim import Lamb, Lars
from slipstream.optim.layerwise import Layerwise, Treatment, bunches_of
from tests.optim.steps import matrix, one_step
from tests.optim.variants import VARIANTS, give_gradients, parameters, same, values

both = pytest.mark.parametrize("make", [Lars, Lamb])


def treatments(optimizer: Layerwise) -> dict[str, tuple[bool, float]]:
    """Whether each named parameter with a gradient is adapted, and its decay."""
    return {
        group["param_names"][index]: (bunch.treatment.adapted, bunch.treatment.weight_decay)
        for group in optimizer.param_groups
        for bunch in bunches_of(group)
        for parameter in bunch.parameters
        for index, known in enumerate(group["params"])
        if known is parameter
    }


MATRIX, VECTOR, NORM = "linear.weight", "linear.bias", "norm.weight"


@pytest.mark.parametrize(
    ("settings", "matrix", "vector"),
    [
        ({}, (True, 0.1), (False, 0.0)),
        ({"adapt_vectors": True}, (True, 0.1), (True, 0.0)),
        ({"decay_vectors": True}, (True, 0.1), (False, 0.1)),
        ({"adapt_vectors": True, "decay_vectors": True}, (True, 0.1), (True, 0.1)),
        ({"adapt_vectors": True, "adapt_undecayed": False}, (True, 0.1), (False, 0.0)),
        ({"weight_decay": 0.0}, (True, 0.0), (False, 0.0)),
        ({"weight_decay": 0.0, "adapt_undecayed": False}, (False, 0.0), (False, 0.0)),
        ({"exclude": ("lin*",)}, (False, 0.0), (False, 0.0)),
        ({"exclude": ["*.bias"], "decay_vectors": True}, (True, 0.1), (False, 0.0)),
    ],
    ids=str,
)
@both
def test_who_is_adapted_and_who_decays(
    make: Any, settings: dict[str, Any], matrix: tuple[bool, float], vector: tuple[bool, float]
) -> None:
    named = [(n, p) for n, p in parameters() if n in (MATRIX, VECTOR)]
    optimizer = make(named, **{"lr": 1.0, "weight_decay": 0.1, **settings})
    give_gradients(named, 0)
    assert treatments(optimizer) == {MATRIX: matrix, VECTOR: vector}


@both
def test_alike_means_device_dtype_and_treatment(make: Any) -> None:
    named = [*parameters(), *((f"b.{n}", p) for n, p in parameters(dtype=torch.bfloat16))]
    give_gradients(named, 0)
    found = list(bunches_of(make(named, lr=1.0, weight_decay=0.5).param_groups[0]))
    assert [(b.parameters[0].dtype, b.treatment, len(b.parameters)) for b in found] == [
        (torch.float32, Treatment(True, 0.5), 4),
        (torch.float32, Treatment(False, 0.0), 2),
        (torch.bfloat16, Treatment(True, 0.5), 4),
        (torch.bfloat16, Treatment(False, 0.0), 2),
    ]


@both
def test_a_group_that_comes_later_has_settings_of_its_own(make: Any) -> None:
    first, second = parameters()[:3], [(f"late.{n}", p) for n, p in parameters()[:3]]
    optimizer = make(first, lr=0.1, weight_decay=0.5, exclude=("*.bias",))
    optimizer.add_param_group({"params": second, "lr": 0.2, "weight_decay": 0.0, "exclude": ()})
    assert [g["lr"] for g in optimizer.param_groups] == [0.1, 0.2]
    give_gradients([*first, *second], 0)
    assert treatments(optimizer) == {
        "conv.weight": (True, 0.5),
        "linear.weight": (True, 0.5),
        "linear.bias": (False, 0.0),
        "late.conv.weight": (True, 0.0),
        "late.linear.weight": (True, 0.0),
        "late.linear.bias": (False, 0.0),
    }
    optimizer.step()


@both
def test_a_refused_group_is_not_added(make: Any) -> None:
    optimizer = make([nn.Parameter(torch.ones(2, 2))], lr=0.1)
    with pytest.raises(UsageError, match="weight_decay is -1"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "weight_decay": -1})
    assert len(optimizer.param_groups) == 1


SHARED: list[tuple[dict[str, Any], str]] = [
    ({"lr": -0.1}, "lr is -0.1; allowed: a number from 0 on; usual is 1 to 30 for Lars, "),
    ({"lr": "1e-3"}, "lr is '1e-3'; allowed: a number from 0 on; usual is"),
    ({"lr": float("nan")}, "lr is nan; allowed"),
    ({"lr": torch.tensor(-1.0)}, "lr is -1.0; allowed"),
    ({"lr": torch.ones(2)}, "lr is tensor([1., 1.]); allowed"),
    ({"weight_decay": -1e-4}, "weight_decay is -0.0001; allowed: a number from 0 on; usual"),
    ({"weight_decay": True}, "weight_decay is True; allowed: a number from 0 on; usual is"),
    ({"eps": -1.0}, "eps is -1.0; allowed: a number"),
    ({"adapt_vectors": 1}, "adapt_vectors is 1; allowed: True or False; pass one of them"),
    ({"decay_vectors": None}, "decay_vectors is None; allowed: True or False"),
    ({"adapt_undecayed": "no"}, "adapt_undecayed is 'no'; allowed: True or False"),
    ({"exclude": "*.bias"}, "allowed: a tuple of patterns; write exclude=('*.bias',)"),
    ({"exclude": 3}, "exclude is 3; allowed: a tuple of patterns"),
    ({"exclude": (3,)}, "exclude is (3,); allowed: a tuple of patterns"),
    (
        {"exclude": ("*.bias", "*.gama")},
        "exclude has '*.gama', which matches no parameter; allowed: patterns such as '*.bias' "
        "for names such as 'conv.weight'; fix the pattern or remove it",
    ),
]
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    *((make, settings, words) for make in (Lars, Lamb) for settings, words in SHARED),
    (
        Lars,
        {"momentum": 1.0},
        "momentum is 1.0; allowed: a number from 0 on and below 1; usual is 0.9",
    ),
    (Lars, {"momentum": -0.1}, "momentum is -0.1; allowed: a number from 0 on and below 1"),
    (Lars, {"trust_coefficient": 0}, "trust_coefficient is 0; allowed: a number above 0; usual"),
    (Lars, {"nesterov": 1}, "nesterov is 1; allowed: True or False"),
    (Lars, {"clip": 2.0}, "clip is 2.0; allowed: True or False"),
    (Lars, {"lr_in_velocity": "yes"}, "lr_in_velocity is 'yes'; allowed: True or False"),
    (
        Lars,
        {"nesterov": True, "momentum": 0.0},
        "nesterov is True and momentum is 0; allowed: nesterov with a momentum above 0; pass "
        "momentum=0.9 or nesterov=False",
    ),
    (Lamb, {"betas": 0.9}, "betas is 0.9; allowed: a pair of numbers; usual is (0.9, 0.999)"),
    (Lamb, {"betas": (1.0, 0.9)}, "betas[0] is 1.0; allowed: a number from 0 on and below 1"),
    (Lamb, {"betas": (0.9, None)}, "betas[1] is None; allowed: a number from 0 on and below 1"),
    (Lamb, {"eps": 0.0}, "eps is 0.0; allowed: a number above 0; usual is 1e-6"),
    (Lamb, {"max_grad_norm": 0.0}, "max_grad_norm is 0.0; allowed: a number above 0; usual is 1.0"),
    (Lamb, {"bias_correction": 0}, "bias_correction is 0; allowed: True or False"),
    (Lamb, {"grad_averaging": None}, "grad_averaging is None; allowed: True or False"),
    (
        Lamb,
        {"clip_ratio": (2, 1)},
        "clip_ratio is (2, 1); allowed: None, or a pair (low, high) with 0 <= low <= high and high "
        "above 0; usual is (0, 1) or (0.01, 10)",
    ),
    (Lamb, {"clip_ratio": 10}, "clip_ratio is 10; allowed: None, or a pair"),
    (Lamb, {"clip_ratio": (0, 0)}, "clip_ratio is (0, 0); allowed: None, or a pair"),
    (Lamb, {"clip_weight_norm": ("a", "b")}, "clip_weight_norm is ('a', 'b'); allowed: None, or"),
]


@pytest.mark.parametrize(("make", "settings", "words"), REFUSED)
def test_what_is_out_of_range_is_refused(make: Any, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as refusal:
        make(parameters(), **{"lr": 0.1, **settings})
    assert words in str(refusal.value)


@both
def test_patterns_need_names(make: Any) -> None:
    with pytest.raises(UsageError, match=r"have no names; .*; pass model.named_parameters\(\)"):
        make([p for _, p in parameters()], lr=0.1, exclude=("*.bias",))


@both
def test_a_pattern_may_match_in_any_group_it_is_meant_for(make: Any) -> None:
    one, other = parameters()[:2], [("head.bias", nn.Parameter(torch.ones(2)))]
    make([{"params": one}, {"params": other}], lr=0.1, exclude=("*.bias",))
    with pytest.raises(UsageError, match=r"'\*.bias', which matches no parameter"):
        make([{"params": one, "exclude": ("*.bias",)}, {"params": other}], lr=0.1)


@both
def test_a_sparse_gradient_is_refused_by_name_before_anything_moves(make: Any) -> None:
    table = nn.Embedding(4, 2, sparse=True)
    model = nn.ModuleDict({"dense": nn.Linear(2, 2), "table": table})
    optimizer = make(model.named_parameters(), lr=0.1)
    model["dense"](table(torch.tensor([1, 2]))).sum().backward()
    before = values(list(model.named_parameters()))
    with pytest.raises(
        UsageError, match=r"gradient of parameter 'table.weight' is sparse; allowed"
    ):
        optimizer.step()
    assert same(values(list(model.named_parameters())), before)
    assert not optimizer.state
    unnamed = make(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match=r"parameter 2 of its group, of shape \(4, 2\), is sparse"):
        unnamed.step()


@both
def test_complex_parameters_are_refused(make: Any) -> None:
    with pytest.raises(UsageError, match=r"parameter 'z' is torch.complex64; allowed: real"):
        make([("z", nn.Parameter(torch.ones(2, 2, dtype=torch.complex64)))], lr=0.1)


@pytest.mark.parametrize("variant", ["lars", "lamb"])
def test_a_session_trains_with_it(variant: str) -> None:
    def build() -> tuple[nn.Module, Layerwise]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
        return model, VARIANTS[variant](model.named_parameters())

    batches = list(torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(1)))
    model, optimizer = build()
    with slipstream.accelerate(model, optimizer, batches) as session:
        for batch in session.loader:
            session.backward(session.model(batch).square().mean())
            session.step()
    plain, alone = build()
    for batch in batches:
        plain(batch).square().mean().backward()
        alone.step()
        alone.zero_grad()
    assert same(values(list(model.named_parameters())), values(list(plain.named_parameters())))


LENGTHS: dict[str, Any] = {
    "lars": (
        Lars,
        {"momentum": 0.0, "trust_coefficient": 0.001, "eps": 0.0},
        (1e3, (0.01, 10.0)),
        0.001,
        2e-2,  # the step is a small difference of rounded weights
    ),
    "lamb": (Lamb, {}, (1e2, (1e-3, 0.5)), 1.0, 1e-3),
}
"""Settings, the largest scale, the learning rates, the step over rate and weights, how near."""

exponents = st.floats(-1, 1)


@pytest.mark.parametrize("name", LENGTHS)
@given(st.integers(0, 99), exponents, exponents, st.floats(0, 1))
def test_a_step_is_as_long_as_the_weights_allow(
    name: str, seed: int, weights: float, gradients: float, rate: float
) -> None:
    make, settings, (scale, (least, most)), factor, near = LENGTHS[name]
    parameter = matrix(seed, scale**weights, scale**gradients)
    length, lr = parameter.detach().norm().item(), least * (most / least) ** rate
    step = one_step(make, parameter, lr=lr, **settings)
    assert step.norm().item() == pytest.approx(factor * lr * length, rel=near)


HALVES: dict[str, Any] = {
    # the norm is 60000, its square 3.6e9
    "lars": (Lars, 200.0, {"lr": 10.0, "trust_coefficient": 0.01}, 1e-2),
    "lamb": (Lamb, 2.0, {"lr": 0.1, "weight_decay": 0.0, "max_grad_norm": 1e6}, 2e-2),
}


@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_norms_of_half_precision_do_not_overflow(name: str, dtype: torch.dtype) -> None:
    make, gradient, settings, near = HALVES[name]
    parameter = nn.Parameter(torch.full((300, 300), 100.0, dtype=dtype))
    parameter.grad = torch.full((300, 300), gradient, dtype=dtype)
    step = one_step(make, parameter, **settings)
    torch.testing.assert_close(step, torch.full_like(step, 10.0), rtol=near, atol=0)
