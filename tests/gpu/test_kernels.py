"""The kernels on CUDA: equal to their references, and without a wait for the device."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

from slipstream.fusion import fuse_optimizer
from slipstream.kernels import (
    Objects,
    compress_by_index,
    sim_ota,
    window_attention,
    window_merge,
    window_partition,
)
from slipstream.kernels.compress_by_index import reference as compress_with_a_list
from slipstream.kernels.sim_ota import reference as assign_one_by_one
from slipstream.kernels.window_attention import reference as attention_one_by_one
from slipstream.kernels.window_partition import reference_partition
from tests.fusion.test_optimizer import OPTIMIZERS, check_same, fuse, give_gradients
from tests.kernels.attention_cases import CASES, inputs
from tests.kernels.test_sim_ota import LEVELS, scene

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings(
        "ignore:Attempting to run cuBLAS:UserWarning"
    ),  # of autograd's thread
]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 5e-2}


@pytest.fixture
def no_wait() -> Iterator[None]:
    """A wait for the device raises."""
    with warnings.catch_warnings():  # "a prototype feature"
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_window_attention(case: str, dtype: torch.dtype) -> None:
    (*given, mask), gradient = inputs(case, dtype)
    there = [t.detach().cuda().requires_grad_() for t in given]
    wide = [t.detach().double().requires_grad_() for t in given]
    ours = window_attention(*there, None if mask is None else mask.cuda())
    theirs = attention_one_by_one(*wide, None if mask is None else mask.double())
    found = (ours, *torch.autograd.grad(ours, there, gradient.cuda()))
    wanted = (theirs, *torch.autograd.grad(theirs, wide, gradient.double()))
    for a, b in zip(found, wanted, strict=True):
        bound = TOLERANCE[dtype] * float(b.detach().abs().max())
        torch.testing.assert_close(a.cpu().double(), b, rtol=0, atol=bound)


def test_window_attention_repeats_bit_for_bit() -> None:
    (*given, mask), gradient = inputs("masks", torch.float32)
    runs = []
    for _ in range(2):
        there = [t.detach().cuda().requires_grad_() for t in given]
        torch.manual_seed(0)
        result = window_attention(*there, mask.cuda(), dropout=0.2)
        runs.append((result, *torch.autograd.grad(result, there, gradient.cuda())))
    assert all(a.equal(b) for a, b in zip(*runs, strict=True))


def test_windows() -> None:
    maps = torch.randn(2, 13, 9, 8, device="cuda")
    windows = window_partition(maps, 4, 2)
    assert windows.equal(reference_partition(maps, 4, 2))
    assert window_merge(windows, 4, (13, 9), 2).equal(maps)


def test_sim_ota(no_wait: None) -> None:
    for seed in range(20):
        torch.cuda.set_sync_debug_mode("default")
        boxes, classes, objectness, objects = scene(seed)
        expected = assign_one_by_one(boxes, classes, objectness, objects, LEVELS)
        there = [t.cuda() for t in (boxes, classes, objectness)]
        moved = Objects(objects.boxes.cuda(), objects.classes.cuda(), objects.valid.cuda())
        torch.cuda.set_sync_debug_mode("error")
        found = sim_ota(*there, moved, LEVELS)
        torch.cuda.set_sync_debug_mode("default")
        assert found.foreground.cpu().equal(expected.foreground)
        assert found.object.cpu().equal(expected.object)


def test_rows_by_index(no_wait: None) -> None:
    torch.cuda.set_sync_debug_mode("default")
    values, index = torch.randn(1000, 20, 9), torch.randint(20, (1000,))
    there, where = values.cuda(), index.cuda()
    torch.cuda.set_sync_debug_mode("error")
    found = compress_by_index(there, where)
    torch.cuda.set_sync_debug_mode("default")
    assert found.cpu().equal(compress_with_a_list(values, index))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fused_optimizers(name: str) -> None:
    made = [torch.randn(shape) for shape in [(300, 40), (7,), (3, 4), (5,), (1,)]]
    both = []
    for fused in (False, True):
        parameters = [torch.nn.Parameter(value.cuda()) for value in made]
        optimizer = OPTIMIZERS[name](parameters)
        handle = fuse(optimizer) if fused else None
        for number in range(4):
            give_gradients(parameters, number)
            optimizer.step()
        if handle is not None:
            handle.close()
        both.append(optimizer)
    check_same(*both, tolerance=1e-4)


def test_a_fused_adamw_takes_over_a_state_with_steps_on_the_host() -> None:
    parameter = torch.nn.Parameter(torch.ones(8, device="cuda"))
    optimizer = torch.optim.AdamW([parameter])
    for number in range(3):
        parameter.grad = torch.ones_like(parameter)
        if number == 1:
            assert optimizer.state[parameter]["step"].device.type == "cpu"
            fuse_optimizer(optimizer)
        optimizer.step()
    assert float(optimizer.state[parameter]["step"]) == 3
