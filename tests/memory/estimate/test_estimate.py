"""Estimates equal measurements: bytes saved by real forwards, states after an update."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from slipstream.errors import ModelError, StrategyError, UsageError
from slipstream.memory import estimate, max_batch, offload, optimizer_bytes, recompute
from slipstream.memory.estimate.saved_bytes import saved_by, saved_on_meta
from slipstream.optim import Lamb, Lars
from slipstream.precision.autocast import autocast
from slipstream.precision.half_weights import half_weights
from slipstream.strategy import EveryConfig, OffloadConfig
from tests.memory.kept import kept_bytes
from tests.memory.models import MODELS, REAL, built


def inputs(name, batch):
    return {k: v[:1].repeat_interleave(batch, 0) for k, v in MODELS[name].batch(0).items()}


def really_saved(model, given):
    """Bytes that a real graph holds for backward, each storage once."""
    own = {t.untyped_storage() for t in (*model.parameters(), *model.buffers())}
    found = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage not in own:
            found[storage] = storage.nbytes()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(**given)
    return sum(found.values())


@pytest.mark.parametrize("name", REAL)
def test_saved_bytes_equal_those_of_a_real_forward(name):
    model = built(name)
    found = estimate(model, lambda n: inputs(name, n))
    for batch in (2, 3, 7):
        assert found.activations().at(batch) == really_saved(model, inputs(name, batch))
    assert found.blocks == [p for p, m in model.named_modules() if p in found.blocks]
    assert len(found.blocks) == MODELS[name].count


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("name", REAL)
def test_what_is_kept_with_recomputation_equals_a_real_forward(name, every):
    model, given = built(name), inputs(name, 3)
    saved = saved_by(model, given)
    recomputed = recompute(model, EveryConfig(every=every))
    model(**given)  # settles the regions
    measured = really_saved(model, given)
    recomputed.close()
    assert max(map(len, recomputed.regions)) == every
    assert kept_bytes(saved, recomputed.regions) == measured < saved.peak()


@pytest.mark.parametrize("name", REAL)
def test_counts_on_the_meta_device_are_the_same(name):
    model, given = built(name), inputs(name, 2)
    if name == "bert":  # looks into the mask, if there is one
        model.config._attn_implementation = "eager"
        del given["attention_mask"]
    if name == "gpt2":  # looks for the ends of texts, if there is no mask
        given["attention_mask"] = torch.ones_like(given["input_ids"])
    random = torch.get_rng_state()
    found = saved_on_meta(model, given)
    assert torch.equal(torch.get_rng_state(), random)
    assert not any(p.is_meta for p in model.parameters())
    measured = saved_by(model, given)
    assert found.peak() == measured.peak()
    for path in measured.blocks:
        assert found.num_bytes(path) == measured.num_bytes(path)


def measured(optimizer, model):
    """Bytes of parameters and buffers, of gradients, and of the optimizer's state."""
    kept = [value for state in optimizer.state.values() for value in state.values()]
    return (
        sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())),
        sum(p.grad.nbytes for p in model.parameters() if p.grad is not None),
        sum(value.nbytes for value in kept if isinstance(value, torch.Tensor)),
    )


@pytest.mark.parametrize("technique", ["autocast", "half_weights"])
def test_installed_precision_counts(technique):
    model = built("bert")
    optimizer = torch.optim.AdamW(model.parameters())
    half = half_weights(model, optimizer) if technique == "half_weights" else autocast(model)
    found = estimate(model, lambda n: inputs("bert", n), optimizer)
    for batch in (2, 5):
        assert found.activations().at(batch) == really_saved(model, inputs("bert", batch))
    model(**inputs("bert", 2)).loss.backward()
    optimizer.step()
    held, gradients, state = measured(optimizer, model)
    masters = half.master_bytes if technique == "half_weights" else 0
    assert (found.parameters, found.gradients) == (held + masters, gradients)
    assert found.optimizer == state
    half.close()


def test_counting_keeps_nothing_alive():
    class Watched(nn.Module):
        def forward(self, x):
            hidden = x.exp()  # saved
            alive.append(sum(storage() is not None for storage in made))
            made.append(weakref.ref(hidden.untyped_storage()))
            return hidden * 1.0

    made, alive = [], []
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), Watched()) for _ in range(4)))
    assert saved_by(model, {"input": torch.ones(2, 8)}).peak() >= 4 * 2 * 8 * 4
    assert alive == [0, 0, 0, 0]


def test_a_forward_that_reads_values_cannot_run_on_the_meta_device():
    with pytest.raises(
        ModelError, match="forward of Looks saves cannot be counted on the meta device"
    ):
        saved_on_meta(Looks(), {"x": torch.ones(2)}, blocks=[])


class Looks(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum() > 0 else x


class Cube(nn.Module):
    """Saves two tensors as large as its input: the input and its square."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()), requires_grad=False)

    def forward(self, x):
        return x * (x * x)


X = 4 * 32  # bytes of a tensor


@pytest.mark.parametrize(
    ("regions", "config", "tensors"),
    [
        ([], None, 2 * 6),
        ([[str(i)] for i in range(6)], None, 6 + 1),
        ([["0", "1"], ["2", "3"], ["4", "5"]], None, 3 + 3),
        ([["0"], ["1"], ["2"]], None, 3 + 6),  # the others are kept
        ([], OffloadConfig(to="disk", keep_last=1, prefetch=1), 2 * 2),
        ([], OffloadConfig(to="disk", keep_last=3, prefetch=1), 2 * 3),
        ([], OffloadConfig(to="disk", keep_last=0, prefetch=0), 2 * 2),
        ([[str(i)] for i in range(6)], OffloadConfig(to="disk", keep_last=1, prefetch=2), 3 + 1),
    ],
)
def test_the_peak_in_backward(regions, config, tensors):
    model = nn.Sequential(*(Cube() for _ in range(6)))
    given = {"input": torch.ones(32, requires_grad=True)}
    saved = saved_by(model, given, [str(i) for i in range(6)])
    assert saved.peak(regions, config) == tensors * X


@pytest.mark.parametrize(
    ("config", "tensors"),
    [
        (None, 6 + 6 + 1),  # inputs, products and what the last block saves besides
        (OffloadConfig(to="disk", keep_last=1, prefetch=1), 2 + 6 + 1),  # products do not leave
    ],
)
def test_the_peak_with_kept_products(config, tensors):
    blocks = [nn.Sequential(nn.Linear(32, 32, bias=False), nn.Tanh()) for _ in range(6)]
    saved = saved_by(nn.Sequential(*blocks), {"input": torch.ones(1, 32)})
    regions = [[path] for path in saved.blocks]
    assert saved.peak(regions, config, ["matmul"]) == tensors * X
    assert saved.peak(regions, config, ["convolution"]) == saved.peak(regions, config)
    assert saved.peak((), config, ["matmul"]) == saved.peak((), config)


class WithoutRate(torch.optim.Optimizer):
    """Has no ``lr``."""

    def __init__(self, params):
        super().__init__(params, {"decay": 0.9})

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                self.state[p]["mean"] = torch.zeros_like(p)


SGD, ADAMW = torch.optim.SGD, torch.optim.AdamW
OPTIMIZERS = [
    lambda p: SGD(p, lr=0.1),
    lambda p: SGD(p, lr=0.1, momentum=0.9),
    lambda p: ADAMW(p),
    lambda p: ADAMW(p, amsgrad=True, fused=True),
    lambda p: ADAMW([{"params": p[:1], "lr": 0.5}, {"params": p[1:]}], foreach=True),
    lambda p: torch.optim.Adagrad(p),
    lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    lambda p: Lamb(p, lr=0.1),
    lambda p: Lars(p, lr=0.1),
    WithoutRate,
]


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_optimizer_bytes_are_those_after_an_update(make):
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    model[1].bias.requires_grad_(False)
    optimizer = make(list(model.parameters()))
    expected = optimizer_bytes(optimizer)
    kept = [p.clone() for p in model.parameters()]
    model(torch.ones(2, 7)).sum().backward()
    assert all(map(torch.equal, kept, model.parameters()))
    optimizer.step()
    state = [value for state in optimizer.state.values() for value in state.values()]
    assert expected == sum(value.nbytes for value in state if isinstance(value, torch.Tensor))


def test_an_optimizer_that_needs_a_closure_is_refused():
    with pytest.raises(ModelError, match="state of LBFGS cannot be computed on the meta device"):
        optimizer_bytes(torch.optim.LBFGS([nn.Parameter(torch.ones(2))]))


class OfModel(torch.optim.SGD):
    """Takes a model, as AdamMini does."""

    def __init__(self, model):
        super().__init__(model.parameters(), lr=0.1)


def test_an_optimizer_that_is_made_of_a_model_is_refused():
    with pytest.raises(ModelError, match="state of OfModel cannot be computed on the meta device"):
        optimizer_bytes(OfModel(nn.Linear(2, 2)))


@pytest.mark.parametrize("name", REAL)
def test_the_estimated_largest_batch_is_found_by_trying(name):
    model = built(name)
    optimizer = torch.optim.AdamW(model.parameters())
    found = estimate(model, lambda n: inputs(name, n), optimizer)
    regions = [[path] for path in found.blocks]
    config = OffloadConfig(to="disk")
    batches = []
    for choice in ({}, {"regions": regions}, {"regions": regions, "offload": config}):
        memory = found.total().at(6)
        batches.append(found.max_batch(memory, **choice))
        measured = max_batch(
            model, lambda n: inputs(name, n), optimizer, memory_bytes=memory, **choice
        )
        assert abs(batches[-1] - measured) <= 1  # an affine function of the batch, cut to bytes
    assert batches[0] == 6 < batches[1] <= batches[2]
    assert found.max_batch(1000) == 0


INSTALLED = [
    lambda model: recompute(model, EveryConfig()),
    lambda model: offload(model, OffloadConfig(to="disk")),
]


@pytest.mark.parametrize("install", INSTALLED)
def test_counting_is_refused_while_a_technique_is_installed(install):
    model = built("bert")
    count: dict[str, Callable[[], Any]] = {
        "estimate": lambda: estimate(model, lambda n: inputs("bert", n)),
        "max_batch": lambda: max_batch(model, lambda n: inputs("bert", n), memory_bytes=2**20),
    }
    installed = install(model)
    for ask in count.values():
        with pytest.raises(UsageError, match=r"encoder\.layer\.0 saves cannot be counted .* close"):
            ask()
    installed.close()
    everything = count["estimate"]().activations()
    model.bert.encoder.gradient_checkpointing = True  # as the model's own method does
    with pytest.raises(UsageError, match=r"call model\.gradient_checkpointing_disable"):
        count["max_batch"]()
    model.bert.encoder.gradient_checkpointing = False
    assert count["estimate"]().activations() == everything


def test_regions_can_be_read_after_close():
    model = built("bert")
    recomputed = recompute(model, EveryConfig(every=2))
    model(**inputs("bert", 2))  # settles the regions
    recomputed.close()
    found = estimate(model, lambda n: inputs("bert", n))
    memory = found.total(recomputed.regions).at(5)
    batches = [
        max_batch(model, lambda n: inputs("bert", n), memory_bytes=memory, regions=regions)
        for regions in ((), recomputed.regions)
    ]
    assert batches[0] < 4 <= batches[1] <= 6
    with pytest.raises(
        StrategyError, match=r"layer\.9' is not one of the counted blocks.* did you mean 'bert"
    ):
        found.max_batch(memory, [["bert.encoder.layer.9"]])


def test_memory_that_does_not_depend_on_the_batch():
    found = estimate(nn.Linear(2, 2), lambda _: {"input": torch.ones(2, 2)})
    with pytest.raises(ModelError, match="three samples saves no more than one of two"):
        found.max_batch(2**20)


def test_a_cpu_needs_a_limit():
    with pytest.raises(UsageError, match="pass memory_bytes"):
        max_batch(nn.Linear(2, 2), lambda n: {"input": torch.ones(n, 2)})
