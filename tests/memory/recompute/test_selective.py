"""Selective recomputation keeps the results in ``keep`` once, and nothing after backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode  # as in torch's "Extending PyTorch"

from slipstream.errors import UsageError
from slipstream.memory import recompute
from slipstream.memory.blocks import blocks_of
from slipstream.memory.estimate.saved_bytes import saved_by
from slipstream.pytree import tensors
from slipstream.strategy import EveryConfig
from slipstream.strategy.memory import KeptOperation
from tests.harness.versions import needs_torch_2_12
from tests.memory.kept import kept_bytes
from tests.memory.models import MODELS, Attention, Attentive, Case, rows

RESULTS: dict[KeptOperation, set[str]] = {
    "matmul": {"aten.mm.default", "aten.addmm.default", "aten.bmm.default"},
    "convolution": {"aten.convolution.default"},
    "attention": {"aten._scaled_dot_product_flash_attention_for_cpu.default"},
}

KEEPS: list[tuple[KeptOperation, ...]] = [
    ("matmul",),
    ("convolution",),
    ("attention",),
    ("matmul", "convolution", "attention"),
]

Made = tuple[str, str, int]
"""Where a storage was made, by which operation, and its bytes."""


class Census(TorchDispatchMode):
    """Sees every storage that an operation makes, and knows it as long as it lives, whoever holds
    it: autograd, a cache, a closure. Those of ``own`` do not count.
    """

    def __init__(self, blocks: Sequence[nn.Module], own: Iterable[Tensor]) -> None:
        super().__init__()
        self.made: list[Made] = []
        self._own = {tensor.untyped_storage() for tensor in own}
        self._alive: WeakKeyDictionary[torch.UntypedStorage, Made] = WeakKeyDictionary()
        self._where = "outside"
        for block in blocks:
            block.register_forward_pre_hook(self._enter)
            block.register_forward_hook(self._leave)

    @property
    def alive(self) -> Counter[Made]:
        return Counter(self._alive.values())

    def _enter(self, *_: Any) -> None:
        self._where = "inside"

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._where = "outside"
        for tensor in tensors(output):
            _, operation, num_bytes = self._alive[tensor.untyped_storage()]
            self._alive[tensor.untyped_storage()] = ("output", operation, num_bytes)

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = operation(*args, **kwargs or {})
        for storage in {tensor.untyped_storage() for tensor in tensors(result)} - self._own:
            if storage not in self._alive:
                self._alive[storage] = (self._where, str(operation), storage.nbytes())
                self.made.append(self._alive[storage])
        return result


CASES = {name: MODELS[name] for name in ("resnet", "bert", "gpt2", "swin", "attentive")}


def counted(
    case: Case, config: EveryConfig | None
) -> tuple[Counter[Made], Counter[Made], nn.Module]:
    """What a forward makes, and what of it is alive behind it; nothing is after backward."""
    torch.manual_seed(0)
    model = case.build().train()
    if config is not None:
        recompute(model, config)
    case.loss(model, case.batch(0)).backward()  # settles the regions, and makes the gradients
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    batch = case.batch(1)
    blocks = [model.get_submodule(path) for path in blocks_of(model)]
    census = Census(blocks, [*model.parameters(), *model.buffers(), *batch.values(), *grads])
    with census:
        loss = case.loss(model, batch)
        made, alive = Counter(census.made), census.alive
        loss.backward()
    del loss
    assert not census.alive
    return made, alive, nn.ModuleList(blocks)


def of_blocks(made: Counter[Made], keep: Sequence[KeptOperation]) -> Counter[Made]:
    """Results of these operations, of those that were made inside of blocks."""
    names = {name for operation in keep for name in RESULTS[operation]}
    return Counter({m: n for m, n in made.items() if m[0] == "inside" and m[1] in names})


@pytest.fixture(scope="module")
def plain() -> Any:
    """What a forward makes without recomputation, by name of the model."""
    return cache(lambda name: counted(CASES[name], None)[0])


@needs_torch_2_12
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_inputs_and_the_kept_results_are_saved_once(plain: Any, name: str, every: int) -> None:
    _, least, blocks = counted(CASES[name], EveryConfig(every=every))
    inside = [num_bytes for where, _, num_bytes in least.elements() if where == "inside"]
    copied = [b.nbytes for name, b in blocks.named_buffers() if "index" not in name]  # a table
    assert sorted(inside) == sorted(copied)
    outputs = sum(where == "output" for where, _, _ in least.elements())
    assert outputs <= -(-CASES[name].count // every)
    for keep in KEEPS:
        _, found, _ = counted(CASES[name], EveryConfig(every=every, keep=keep))
        assert found == least + of_blocks(plain(name), keep), keep


@pytest.mark.parametrize("name", CASES)
def test_the_estimate_counts_them(plain: Any, name: str) -> None:
    model = CASES[name].build().train()
    saved = saved_by(model, CASES[name].batch(1))
    regions = [[path] for path in saved.blocks]
    without = kept_bytes(saved, regions)
    for keep in KEEPS:
        results = of_blocks(plain(name), keep).elements()
        found = kept_bytes(saved, regions, keep) - without
        assert found == sum(num_bytes for _, _, num_bytes in results), keep


def test_the_report_says_what_is_kept() -> None:
    value = recompute(Attentive(), EveryConfig(keep=("matmul", "attention"))).report_rows()[0].value
    assert value == "4 modules recomputed (results of matmul, attention kept) in 4 regions, 0 kept"


class InPlace(Attention):
    """Changes what a matrix product returns."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.into(x).relu_()[:, :6])


class Adds(nn.Module):
    """Adds to what a product of batches of matrices returns, of which torch counts no writes."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.matmul(x, x.transpose(-1, -2))
        y += 1.0
        return self.out(y)


def test_a_kept_product_of_batches_that_is_added_to_is_refused() -> None:
    model = nn.Sequential(Adds(), Adds())
    recompute(model, EveryConfig(keep=("matmul",)))
    with pytest.raises(UsageError, match=r"recompute keep: .* changed in place"):
        model(torch.ones(2, 3, 6, 6)).sum().backward()


class Residual(nn.Module):
    """Ends with a write into what a convolution returns."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x.tanh())
        y += x
        return y


def test_a_kept_result_at_the_end_of_a_block_may_be_added_to() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Residual(), Residual()), torch.randn(2, 4, 6)
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    recompute(model, EveryConfig(keep=("convolution",)))
    found = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    assert all(map(torch.equal, found, expected))


def test_errors_of_torch_say_what_to_do() -> None:
    model = nn.Sequential(InPlace(6), InPlace(6))
    recompute(model, EveryConfig(keep=("matmul",)))
    with pytest.raises(UsageError, match=r"recompute keep: .* changed in place .*inplace=True"):
        model(torch.ones(2, 6)).sum().backward()
    model = Attentive()
    recompute(model, EveryConfig(keep=("attention",)))
    loss = model(**rows(0))
    loss.backward(retain_graph=True)
    with pytest.raises(UsageError, match=r"recompute keep: .* supports one backward"):
        loss.backward()


def test_each_kind_of_operation_is_in_some_model(plain: Any) -> None:
    for keep in KEEPS:
        assert any(of_blocks(plain(name), keep) for name in CASES)
