"""Stages of a model in one process: what runs, what is a placeholder, and what is refused."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slipstream import comm
from slipstream.comm.tensor_spec import TensorSpec
from slipstream.errors import ModelError
from slipstream.parallel.pipeline.micro_batches import MicroBatch, micro_batches
from slipstream.parallel.pipeline.placeholders import (
    has_nan,
    overridden_calls,
    placeholder,
)
from slipstream.parallel.pipeline.shape_inference import sequential_forward
from slipstream.parallel.pipeline.split_points import SplitPoints
from slipstream.parallel.pipeline.stages import Stages
from slipstream.pytree import mapped
from tests.parallel.staged import CASES, Case


def run_in_turn(model: nn.Module, cut: list[str], *args: Any, **kwargs: Any) -> Any:
    """All stages, one after the other, on one process."""
    batch = MicroBatch(args, kwargs, None)
    stages = Stages(model, SplitPoints.of(model, cut))
    return sequential_forward(stages, batch, None, comm.group())


def whole(case: Case, count: int) -> tuple[nn.Module, Any, Any]:
    """A model without a cut, and what its stages make of a batch, watched and then run."""
    torch.manual_seed(0)
    model = case.build()
    args, kwargs, _ = case.batch(0)
    stages = Stages(model, SplitPoints.of(model, case.cuts[count]))
    batch = MicroBatch(args, kwargs, None)
    outputs = sequential_forward(stages, batch, None, comm.group())
    hidden: Any = None
    for stage in range(count):
        hidden = stages.run(stage, hidden, batch, outputs.returned)
    return model, outputs.result, hidden


@pytest.mark.parametrize(
    ("name", "count"), [(n, k) for n, case in CASES.items() for k in case.cuts]
)
def test_stages_make_the_model(name: str, count: int) -> None:
    case = CASES[name]
    model, watched, ran = whole(case, count)
    names, modules = list(model.state_dict()), list(model.modules())
    args, kwargs, target = case.batch(0)
    expected = case.loss(model(*args, **kwargs), target)
    assert torch.equal(case.loss(watched, target), expected)
    assert torch.equal(case.loss(ran, target), expected)
    assert list(model.state_dict()) == names
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))
    assert not any(type(module).__name__ == "_OverriddenModule" for module in modules)


def test_only_the_layers_of_a_stage_compute() -> None:
    case = CASES["resnet"]
    model = case.build()
    calls: Counter[str] = Counter()
    for name, module in model.named_modules():
        module.register_forward_hook(lambda *_, name=name: calls.update([name]))
    args, kwargs, _ = case.batch(0)
    batch = MicroBatch(args, kwargs, None)
    stages = Stages(model, SplitPoints.of(model, case.cuts[4]))
    hidden, returned = stages.run_recorded(0, None, batch, {})
    assert {name.partition(".")[0] for name in calls} == {"conv1", "bn1", "relu", "layer1"}
    calls.clear()
    hidden = stages.run(1, hidden, batch, returned)
    assert {name.partition(".")[0] for name in calls} == {
        "layer1",
        "layer2",
    }  # a list of placeholders
    assert not any(name.startswith("layer1.") for name in calls)
    assert hidden.shape == (8, 6, 4, 4)


def test_spans_and_the_stages_of_tensors() -> None:
    model = CASES["positions"].build()
    split_points = SplitPoints.of(model, ["twice", "middle", "again"])
    assert split_points.spans["frozen"] == (0, 0)
    assert split_points.spans["twice"] == (1, 1)
    assert split_points.spans["head"] == (3, 3)
    assert split_points.spans[""] == (0, 3)
    assert {
        name: stages
        for name, stages in split_points.tensor_stages(model).items()
        if len(stages) > 1
    } == {
        "position": (0, 1, 2, 3),
        "scale": (0, 1, 2, 3),
        "calls": (0, 1, 2, 3),
        "words.weight": (0, 3),
        "twice.weight": (1, 3),
        "twice.bias": (1, 3),
        "again.weight": (1, 3),
        "again.bias": (1, 3),
        "head.weight": (0, 3),
    }
    nested = SplitPoints.of(CASES["resnet"].build(), ["layer2", "layer2.1"])
    assert nested.spans["layer2"] == (1, 2)
    assert nested.spans["layer2.0"] == (1, 1)
    assert nested.before(2) == ["conv1", "bn1", "relu", "layer1.0", "layer1.1", "layer2.0"]


def test_a_cut_inside_of_a_cut() -> None:
    case = CASES["resnet"]
    torch.manual_seed(0)
    model = case.build()
    (x,), _, _ = case.batch(0)
    assert torch.equal(run_in_turn(model, ["layer2", "layer2.1", "fc"], x).result, model(x))


# Refused cuts.


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        (["layer9"], r"cut at 'layer9', but ResNet has no module .* e.g. \['layer\d'"),
        ([""], "cut at '', but ResNet has no module of that path"),
        (["layer2", "layer2"], "cut at 'layer2' twice; allowed: each path once"),
        (["layer3", "layer2"], r"out of order; allowed: .* which is \['layer2', 'layer3'\]"),
    ],
)
def test_paths_that_cannot_be_cut(cut: list[str], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        SplitPoints.of(CASES["resnet"].build(), cut)


def test_a_list_is_never_called() -> None:
    with pytest.raises(ModelError, match=r"'transformer.h', a ModuleList.* e.g. .*transformer.h.0"):
        SplitPoints.of(CASES["gpt2"].build(), ["transformer.h"])


class Parts(nn.Module):
    """Two layers and the way in which they are called."""

    def __init__(self, way: Any) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(3, 3) for _ in range(3))
        self.way = way

    def forward(self, x: Tensor) -> Any:
        return self.way(self, x)


class Two(nn.Module):
    def forward(self, x: Tensor, *, other: Tensor) -> Tensor:
        return x + other


def parts_with_two(m: Parts, x: Tensor) -> Tensor:
    x = m.first(x)
    return m.second(x, other=x)


def test_more_than_one_tensor() -> None:
    model = Parts(parts_with_two)
    model.second = Two()  # type: ignore[assignment]
    with pytest.raises(ModelError, match="'second' takes more than one tensor that is computed be"):
        run_in_turn(model, ["second"], torch.ones(2, 3))


@pytest.mark.parametrize(
    ("way", "cut", "message"),
    [
        (
            lambda m, x: m.first(x) + m.second(m.first(x)),
            ["second"],
            "stage 1 on rank 0: NaN comes out of stage 1: .* from before 'second' is used after it",
        ),
        (
            lambda m, x: m.second(m.first(x)).neg().sqrt() + torch.nan,
            ["second"],
            "stage 1 on rank 0: NaN comes out .* or the model itself computes NaN there",
        ),
        (
            lambda m, x: nn.functional.linear(m.second(m.first(x)), m.first(x).T @ m.first(x)),
            ["second"],
            "'first' is registered before 'second', but runs after it",
        ),
        (
            lambda m, x: m.third(m.first(m.second(x))),
            ["second"],
            "'first' is registered before 'second', but runs after it; choose another cut",
        ),
        (
            lambda m, x: m.second(m.third(m.first(x))),
            ["second"],
            "'third' is registered after 'second', but runs before it",
        ),
        (lambda m, x: m.third(m.first(x)), ["second"], "'third' is registered after 'second'"),
        (
            lambda m, x: m.first(x),
            ["second"],
            "returned without a call of 'second'; allowed: a cut",
        ),
        (
            lambda m, x: m.second(m.second(m.first(x))),
            ["second"],
            "'second' is called twice",
        ),
        (
            lambda m, x: m.second([m.first(x)]),
            ["second"],
            r"'second' takes no tensor but \['list'\]; cut at a module",
        ),
        (
            lambda m, x: m.second(m.third(m.first(x))),
            ["second", "third"],
            "'third' is registered after 'second'",
        ),
        (
            lambda m, x: m.second(m.first(x).mul_(2)),
            ["second"],
            "stage 1 on rank 0: the model writes in place to what a module before 'second' ret",
        ),
        (lambda m, x: 1 / 0, ["second"], "stage 0 on rank 0: ZeroDivisionError: division by zero"),
    ],
)
def test_models_that_cannot_be_cut_there(way: Any, cut: list[str], message: str) -> None:
    model = Parts(way)
    modules = list(model.modules())
    with pytest.raises(ModelError, match=message):
        run_in_turn(model, cut, torch.ones(2, 3))
    assert list(model.modules()) == modules


def test_a_cut_inside_of_a_residual_block_leaks() -> None:
    case = CASES["gpt2"]
    model = case.build()
    with pytest.raises(ModelError, match=r"'transformer.h.1.mlp' is used after it, e.g. across a"):
        run_in_turn(model, ["transformer.h.1.mlp"], **case.batch(0)[1])


class Marks(nn.Module):
    """Returns what cannot be NaN."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"positive": x > 0, "number": (x > 0).sum(1)}


class Marked(nn.Module):
    """Marks its input first; draws and counts, so that no run is like another one."""

    def __init__(self, way: Any) -> None:
        super().__init__()
        self.marks, self.first, self.second = Marks(), nn.Linear(3, 3), nn.Linear(3, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.way, self.runs = way, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.runs += 1
        marks = self.marks(x)
        y = self.second(self.first(x)) * torch.rand_like(x) * self.calls
        return self.way(y, marks)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "way",
    [
        lambda y, marks: y * marks["positive"],
        lambda y, marks: y.masked_fill(marks["positive"], -torch.inf),
        lambda y, marks: y[: int(marks["number"].max())],
    ],
)
def test_integers_and_bool_from_before_a_cut_are_refused(way: Any) -> None:
    with pytest.raises(ModelError, match="integers or bool that 'marks' returned before 'second'"):
        run_in_turn(Marked(way), ["second"], torch.ones(2, 3))


def test_integers_that_the_model_returns_and_its_loss_does_not_use_are_there() -> None:
    model = Marked(lambda y, marks: (y, marks["positive"]))
    batch = MicroBatch((torch.ones(2, 3),), {}, None)
    stages = Stages(model, SplitPoints.of(model, ["second"]))
    found = sequential_forward(stages, batch, lambda out, _: out[0].mean(), comm.group())
    assert found.result.isfinite()
    with pytest.raises(ModelError, match="integers or bool"):
        sequential_forward(stages, batch, None, comm.group())


def test_integers_and_bool_from_before_a_cut_have_a_shape() -> None:
    model = Marked(lambda y, marks: y[: len(marks["number"])])
    torch.manual_seed(0)
    found = run_in_turn(model, ["second"], torch.ones(2, 3))
    assert model.calls == 0
    assert model.runs == 2  # once a stage
    torch.manual_seed(0)
    assert torch.equal(found.result, model(torch.ones(2, 3)))


def test_a_nan_that_is_the_model_s_own_is_no_leak() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert has_nan(run_in_turn(model, ["1"], torch.full((1, 2), float("nan"))).result)


def test_another_path_than_the_recorded_one() -> None:
    again = [False]

    def way(m: Parts, x: Tensor) -> Tensor:
        x = m.first(m.first(x)) if again[0] else m.first(x)
        return m.second(x)

    model = Parts(way)
    stages = Stages(model, SplitPoints.of(model, ["second"]))
    batch = MicroBatch((torch.ones(2, 3),), {}, None)
    hidden, returned = stages.run_recorded(0, None, batch, {})
    again[0] = True
    with pytest.raises(ModelError, match="call 2 of 'first', which was called 1 times"):
        stages.run(1, hidden, batch, returned)


# The parts.


def test_placeholders_keep_shape_and_type() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
        x = placeholder(torch.zeros(3, 4, dtype=dtype))
        assert x.shape == (3, 4)
        assert x.dtype == dtype
        assert bool((x.isnan() if dtype.is_floating_point else x == 0).all() or dtype.is_complex)
        assert x.untyped_storage().nbytes() == x.element_size()


def test_nested_values_are_mapped() -> None:
    from collections import namedtuple

    from transformers.modeling_outputs import CausalLMOutput

    Pair = namedtuple("Pair", "a b")
    pair = Pair(torch.ones(2), [None, torch.zeros(1)])
    specs = mapped(pair, TensorSpec.of)
    assert specs.a.shape == (2,)
    assert type(specs) is type(pair)
    output = mapped(CausalLMOutput(logits=torch.ones(2)), lambda x: x + 1)
    assert torch.equal(output.logits, output["logits"])
    assert torch.equal(output.logits, torch.full((2,), 2.0))


def test_replaced_modules_come_back_after_an_error() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    modules = list(model.modules())
    with pytest.raises(ZeroDivisionError), overridden_calls(model, {"0": lambda *_: 1 / 0}):
        model(torch.ones(1, 2))
    assert list(model.modules()) == modules


def test_batches_are_split_by_their_first_dimension() -> None:
    x, mask = torch.arange(12).view(4, 3), torch.ones(3, 3)
    parts = micro_batches((x, {"y": x[:, 0]}), {"mask": mask, "flag": True}, x, 2)
    assert [p.args[0].tolist() for p in parts] == [x[:2].tolist(), x[2:].tolist()]
    assert parts[1].args[1]["y"].tolist() == [6, 9]
    assert parts[1].kwargs["mask"] is mask
    assert parts[0].signature() == "int64[2, 3] int64[2] float32[3, 3] int64[2, 3]"


def test_constants_are_computed_wherever_they_are_used() -> None:
    """Llama registers its rotary positions last, and calls them first."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "vocab_size": 11}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=3, **sizes, **heads)).double()
    cut = ["model.layers.1", "model.layers.2"]
    words = torch.randint(11, (2, 5))
    outputs = run_in_turn(model, cut, input_ids=words, use_cache=False)
    expected = model(input_ids=words, use_cache=False)
    assert torch.equal(outputs.result.logits, expected.logits)
