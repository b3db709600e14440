"""Graphs of blocks on a stand-in that repeats on static memory: which calls they serve."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slipstream
from slipstream.errors import ModelError, StrategyError
from slipstream.fusion import graph_blocks
from slipstream.fusion.graphs import MOST_GRAPHS, _capture_on_cuda
from slipstream.strategy import Strategy
from tests.fusion.replay_on_cpu import Captured, Uncapturable


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.0)

    def forward(
        self, x: Tensor, *, shift: Tensor | None = None, power: int = 1
    ) -> tuple[Tensor, dict[str, Tensor]]:
        y = self.drop(self.norm(self.linear(x))).relu() ** power
        return x + y if shift is None else x + y + shift, {"inner": y}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.power: Any = 1

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.blocks[0](x, power=self.power)
        x, more = self.blocks[1](x, shift=x.detach(), power=self.power)
        return x + more["inner"]


def built() -> tuple[nn.Module, nn.Module, Captured, Any]:
    """A model with graphs, the same without, what counts captures, and the handle."""
    torch.manual_seed(0)
    model = Model().double()
    plain, captured = copy.deepcopy(model), Captured()
    return model, plain, captured, graph_blocks(model, captured.capture)


def rows(number: int, count: int = 5) -> Tensor:
    return torch.randn(
        count, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(number)
    )


def same(model: nn.Module, plain: nn.Module) -> None:
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    for one, other in zip(model.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(one, other)


def test_steps_are_the_same_and_captured_once() -> None:
    model, plain, captured, graphs = built()
    for step in range(3):
        for each in (model, plain):
            given = rows(step).requires_grad_()
            each(given).square().sum().backward()
        same(model, plain)
    assert (captured.captures, captured.replays) == (2, 6)
    assert graphs.report_rows()[0].value == "2 of 2 blocks"
    graphs.close()
    assert not any("forward" in vars(module) for module in model.modules())


def test_capture_leaves_buffers_and_random_numbers() -> None:
    model, plain, _, _ = built()
    before = torch.get_rng_state()
    model(rows(0))
    plain(rows(0))
    assert torch.get_rng_state().equal(before)
    for one, other in zip(model.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(one, other)


def other_shape(model: Any, step: int) -> Tensor:
    return rows(step, 3 + step)


def other_argument(model: Any, step: int) -> Tensor:
    model.power = 1 + step
    return rows(step)


def other_mode(model: Any, step: int) -> Tensor:
    for block in model.blocks:
        block.norm.train(step % 2 == 0)
    return rows(step)


def other_memory(model: Any, step: int) -> Tensor:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return rows(step)


def needs_gradient(model: Any, step: int) -> Tensor:
    return rows(step).requires_grad_(bool(step % 2))


@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        (other_shape, 7), (other_argument, 7), (other_mode, 2), (other_memory, 7),
        (needs_gradient, 2),
    ],
)  # fmt: skip
def test_another_kind_of_call_gets_a_graph_of_its_own(
    change: Callable[[Any, int], Tensor], kinds: int
) -> None:
    model, plain, captured, graphs = built()
    for step in range(7):
        for each in (model, plain):
            each.zero_grad()
            each(change(each, step)).square().sum().backward()
        same(model, plain)
    assert captured.captures >= kinds
    assert captured.captures <= 2 * kinds
    held = int(graphs.report_rows()[0].value.split()[0])
    assert held <= 2 * MOST_GRAPHS


def change_dropout(block: Any) -> None:
    block.drop.p = 1.0


def change_momentum(block: Any) -> None:
    block.norm.momentum = 0.5


def add_hook(block: Any) -> None:
    block.norm.register_forward_hook(lambda module, given, out: 2 * out)


def replace_forward(block: Any) -> None:
    block.norm.forward = lambda x: 2 * x


def freeze(block: Any) -> None:
    block.linear.requires_grad_(False)


def replace_layer(block: Any) -> None:
    block.norm = torch.nn.Identity()


@pytest.mark.parametrize(
    "change",
    [change_dropout, change_momentum, add_hook, replace_forward, freeze, replace_layer],
)
def test_another_setting_gets_a_graph_of_its_own(change: Callable[[Any], None]) -> None:
    model, plain, captured, _ = built()
    for step in range(2):
        for each in (model, plain):
            each.zero_grad(set_to_none=True)
            each(rows(step)).square().sum().backward()
        same(model, plain)
        for each in (model, plain):
            change(each.get_submodule("blocks.1"))
    for each in (model, plain):
        each.zero_grad(set_to_none=True)
        each(rows(3)).square().sum().backward()
    same(model, plain)
    assert captured.captures >= 3, "replayed as before the change"


def test_a_second_forward_before_backward_runs_without_the_graph() -> None:
    model, plain, captured, _ = built()
    for each in (model, plain):
        losses = [each(rows(step)).square().sum() for step in range(3)]
        sum(losses[1:], losses[0]).backward()
    same(model, plain)
    assert captured.replays == 2
    model(rows(9)).sum().backward()
    assert captured.replays == 4


def test_gradients_add_up() -> None:
    """A gradient that becomes the parameter's must not lie where the next replay writes."""
    model, plain, captured, _ = built()
    for each in (model, plain):
        for step in range(3):
            each(rows(step)).square().sum().backward()
    same(model, plain)
    assert captured.replays == 6


def thaw(block: Any) -> None:
    block.linear.weight.requires_grad_()


def replace_weight(block: Any) -> None:
    block.linear.weight = nn.Parameter(block.linear.weight.detach().clone())


@pytest.mark.parametrize("change", [thaw, replace_weight])
def test_gradients_of_a_parameter_that_learns_later_add_up(change: Callable[[Any], None]) -> None:
    model, plain, captured, _ = built()
    for each in (model, plain):
        block: Any = each.get_submodule("blocks.0")
        block.linear.weight.requires_grad_(change is not thaw)
        each(rows(0)).square().sum().backward()
        change(block)
        each.zero_grad()
        for step in range(3):
            each(rows(step)).square().sum().backward()
    same(model, plain)
    assert captured.replays == 8


def test_results_stay() -> None:
    model, plain, _, _ = built()
    kept = []
    for each in (model, plain):
        results: list[Tensor] = []
        last: Any = each.get_submodule("blocks.1")
        last.register_forward_hook(lambda _, given, out, to=results: to.append(out[0].detach()))
        for step in range(3):
            each(rows(step)).square().sum().backward()
        kept.append(torch.stack(results))
    torch.testing.assert_close(*kept)


class Chooser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x)
        return x + y, y.argmax(-1)


class Choosers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Chooser() for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x, _ = self.blocks[0](x)
        x, chosen = self.blocks[1](x)
        return x, chosen


def test_results_without_a_gradient_stay_too() -> None:
    torch.manual_seed(0)
    model = Choosers().double()
    plain, captured = copy.deepcopy(model), Captured()
    graph_blocks(model, captured.capture)
    kept = []
    for each in (model, plain):
        results = []
        for step in range(3):
            x, chosen = each(rows(step))
            x.square().sum().backward()
            results.append(chosen)
        kept.append(torch.stack(results))
    assert captured.replays == 6
    assert torch.equal(*kept)


def test_a_frozen_block_runs_without_a_graph() -> None:
    model, _, captured, _ = built()
    model.requires_grad_(False)
    results = [model(rows(step)) for step in range(2)]
    assert not results[0].equal(results[1])
    assert not captured.captures


def test_a_forward_without_backward_frees_the_graph() -> None:
    model, _, captured, _ = built()
    for step in range(3):
        loss = model(rows(step)).sum()
        del loss
        gc.collect()
    assert captured.replays == 6


def test_a_graph_that_is_freed_late_frees_no_later_one() -> None:
    """``loss`` of one step lives until that of the next one is there."""
    model, plain, _, _ = built()
    for each in (model, plain):
        loss = each(rows(0)).square().sum()
        loss.backward()
        loss = each(rows(1)).square().sum()
        later = each(rows(2)).square().sum()
        (loss + later).backward()
    same(model, plain)


def test_evaluation_runs_without_graphs() -> None:
    model, plain, captured, _ = built()
    with torch.no_grad():
        model(rows(0))
        plain(rows(0))
    assert model.eval()(rows(0)).equal(plain.eval()(rows(0)))
    assert not captured.captures


def test_what_cannot_be_captured_is_reported() -> None:
    model = Model().double()
    plain = copy.deepcopy(model)
    graphs = graph_blocks(model, Uncapturable().capture)
    for each in (model, plain):
        each(rows(0)).square().sum().backward()
    same(model, plain)
    counted, failed = graphs.report_rows()
    assert (counted.value, failed.value) == ("0 of 2 blocks", "2")
    assert failed.note.startswith("blocks.0: operation not permitted when stream is capturing;")


class Keeps(nn.Module):
    """Keeps something for its next call."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.linear, self.what, self.calls = nn.Linear(4, 4), what, 0
        self.memory = torch.zeros(4, dtype=torch.float64)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        if self.what == "calls":
            self.calls += 1
            return y * self.calls
        if self.what == "mean":
            self.mean = 0.5 * self.mean + y.detach().mean(0)
            return y * self.mean
        if self.what == "memory":
            self.memory = 0.5 * self.memory + y.detach().mean(0)
        elif self.what == "cache":
            if not hasattr(self, "cache"):
                self.cache = torch.full((4,), 3.0, dtype=torch.float64)
            return y * self.cache
        else:
            self.memory.mul_(0.5).add_(y.detach().mean(0))
        return y + self.memory.clone()


@pytest.mark.parametrize(
    ("what", "replays"), [("calls", 0), ("mean", 0), ("memory", 0), ("in place", 8), ("cache", 6)]
)
def test_what_a_block_keeps_for_its_next_call(what: str, replays: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Keeps(what), Keeps(what)).double()
    plain, captured = copy.deepcopy(model), Captured()
    graphs = graph_blocks(model, captured.capture)
    for step in range(4):
        for each in (model, plain):
            each.zero_grad()
            each(rows(step)).square().sum().backward()
        same(model, plain)
        for one, other in zip(model, plain, strict=True):
            torch.testing.assert_close(one.memory, other.memory)
    assert captured.replays == replays
    if not replays:
        assert graphs.report_rows()[1].note.startswith(f"0: its forward assigns {what}, and a rep")


def test_another_tensor_in_an_attribute_gets_a_graph_of_its_own() -> None:
    model = nn.Sequential(Keeps("in place"), Keeps("in place")).double()
    captured = Captured()
    graph_blocks(model, captured.capture)
    for memory in (model[0].memory, torch.ones(4, dtype=torch.float64)):
        model[0].memory = memory
        model(rows(0)).square().sum().backward()
    assert captured.captures == 3


class Grows(nn.Module):
    """Makes a longer table where rows are more than it has, as old rotary positions did."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(4, 4), torch.zeros(0, 1, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > len(self.table):
            self.table = torch.full((len(x), 1), 3.0, dtype=torch.float64)
        return self.linear(x) * self.table[: len(x)]


def test_a_cache_that_grows_twice_still_gets_graphs() -> None:
    model = nn.Sequential(Grows(), Grows()).double()
    captured = Captured()
    graphs = graph_blocks(model, captured.capture)
    for step, count in enumerate((5, 5, 5, 9, 9, 9)):
        model(rows(step, count)).square().sum().backward()
    assert captured.replays == 8
    assert len(graphs.report_rows()) == 1


def test_attributes_that_are_others_each_time_end_the_captures() -> None:
    model = nn.Sequential(Keeps("in place"), Keeps("in place")).double()
    captured, made = Captured(), []
    graphs = graph_blocks(model, captured.capture)
    for _ in range(3 * MOST_GRAPHS):
        made.append(torch.ones(4, dtype=torch.float64))  # kept, so that each has another place
        model[0].memory = made[-1]
        model(rows(0)).square().sum().backward()
    assert captured.captures == 2 * MOST_GRAPHS + 1
    assert "other tensors in attributes" in graphs.report_rows()[1].note


def test_a_call_with_another_object_is_not_captured() -> None:
    model, _, captured, graphs = built()
    model.power = torch.nn.Identity()  # type: ignore[assignment]
    with pytest.raises(TypeError):
        model(rows(0))
    assert not captured.captures
    assert graphs.report_rows()[1].note == "blocks.0: it is called with a Identity"


def test_blocks_are_captured_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device torch captures nothing while autocast keeps the weights that it has cast."""
    captured = Captured()

    def made(module: nn.Module, samples: tuple[Tensor, ...], **_: Any) -> Callable[..., Any]:
        if torch.is_autocast_cache_enabled():
            raise RuntimeError("make_graphed_callables does not support the autocast caching")
        return captured.capture(module, samples)

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", made)
    torch.manual_seed(0)
    model = Model()
    plain, graphs = copy.deepcopy(model), graph_blocks(model, _capture_on_cuda)
    for step in range(2):
        for each in (model, plain):
            with torch.autocast("cpu", torch.bfloat16):
                each(rows(step).float()).square().sum().backward()
                assert torch.is_autocast_cache_enabled()
        same(model, plain)
    assert graphs.report_rows()[0].value == "2 of 2 blocks"


def test_gradients_come_block_by_block() -> None:
    model, _, _, _ = built()
    order: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))  # type: ignore[misc]
    model(rows(0)).sum().backward()
    assert [name.split(".")[1] for name in order] == ["1"] * 4 + ["0"] * 4


def test_on_a_host_without_cuda() -> None:
    with pytest.raises(ModelError, match=r"compute\.cuda_graph: Model is on cpu; allowed: cuda"):
        graph_blocks(Model())
    model = Model()
    with pytest.raises(ModelError, match=r"compute\.cuda_graph: Model is on cpu"):
        slipstream.accelerate(
            model,
            torch.optim.SGD(model.parameters()),
            strategy={"compute": {"cuda_graph": True}},
        )


def test_compile_and_graphs_exclude_each_other() -> None:
    with pytest.raises(StrategyError, match="compile and cuda_graph exclude each other"):
        Strategy.load({"compute": {"compile": True, "cuda_graph": True}})
