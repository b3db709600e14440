"""What is copied when, and what stays in memory."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from slipstream.memory import offload
from slipstream.strategy import OffloadConfig
from tests.memory.models import MODELS, REAL, built
from tests.memory.offload.squares import ALL, LoggedStore, Square, squares, start


def saved_storages(model, run, paths, min_bytes):
    """Bytes of the storages that the blocks save, each once, without parameters and buffers."""
    own = {t.untyped_storage() for t in (*model.parameters(), *model.buffers())}
    seen = set()

    def pack(tensor):
        storage = tensor.untyped_storage()
        if inside and storage not in own and storage.nbytes() >= min_bytes:
            seen.add(storage)
        return tensor

    inside, handles = [], []
    for path in paths:
        module = model.get_submodule(path)
        handles.append(module.register_forward_pre_hook(lambda *_: inside.append(1)))
        handles.append(module.register_forward_hook(lambda *_: inside.clear()))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    for handle in handles:
        handle.remove()
    return sum(storage.nbytes() for storage in seen)


@pytest.mark.parametrize("name", REAL)
def test_each_storage_is_copied_once(name):
    model = built(name)
    with offload(model, OffloadConfig(to="disk", min_bytes=64)) as offloader:
        torch.manual_seed(1)
        MODELS[name].loss(model, MODELS[name].batch(0)).backward()
    torch.manual_seed(1)
    expected = saved_storages(
        model,
        lambda: MODELS[name].loss(model, MODELS[name].batch(0)),
        offloader.blocks,
        min_bytes=64,
    )
    assert offloader.traffic.bytes_out == expected


def test_parameters_buffers_and_small_tensors_are_not_offloaded():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(64, 64)
            self.register_buffer("mask", torch.ones(64, 64))

        def forward(self, x):
            small = x[:1, :1].exp()
            return self.linear(x) * self.mask * small

    model = nn.Sequential(*(Block() for _ in range(3)))
    x = torch.randn(64, 64, requires_grad=True)
    with offload(model, OffloadConfig(to="disk", min_bytes=1000)) as offloader:
        loss = model(x).sum()
        # x and what is multiplied with the small one, of two blocks; the mask needs no gradient
        assert offloader.traffic.bytes_out == 2 * 2 * x.nbytes
        loss.backward()


def test_blocks_are_fetched_ahead_and_the_last_ones_are_kept():
    store = LoggedStore()
    model = squares(5)
    config = OffloadConfig(to="disk", min_bytes=0, keep_last=2)
    with offload(model, config, store=store):
        loss = model(start()).sum()
        forward, store.log = store.log, []
        loss.backward()
        backward = store.log
    assert forward == [
        ("put", "0"),
        ("put", "1"), ("settle", "0"),
        ("put", "2"), ("settle", "1"),
        ("settle", "2"),
    ]  # fmt: skip
    assert backward == [  # nothing at block 4; at 3, 2 is fetched ...
        ("fetch", "2"),
        ("fetch", "1"), ("take", "2"),
        ("fetch", "0"), ("take", "1"),
        ("take", "0"),
    ]  # fmt: skip


def test_backward_continues_while_earlier_blocks_are_read():
    class Held(LoggedStore):
        """Nothing arrives before backward has come out of the block behind."""

        def _read(self, buffer, position):
            assert released.wait(60)
            super()._read(buffer, position)

    released, store = threading.Event(), Held()
    model = squares(3)
    config = OffloadConfig(to="disk", min_bytes=0, keep_last=1, prefetch=2)
    with offload(model, config, store=store):
        hidden = model[:2](start())
        hidden.register_hook(lambda grad: (store.log.append("out of 2"), released.set())[0])
        loss = model[2](hidden).sum()
        store.log.clear()
        loss.backward()
    assert store.log == [("fetch", "1"), ("fetch", "0"), "out of 2", ("take", "1"), ("take", "0")]


def test_offloaded_activations_take_no_memory():
    alive = []

    class Watched(Square):
        def forward(self, x):
            hidden = x.exp()
            alive.append(weakref.ref(hidden.untyped_storage()))
            return hidden.log()

    model = nn.Sequential(*(Watched() for _ in range(5)))
    with offload(model, OffloadConfig(to="disk", min_bytes=0, keep_last=2)):
        loss = model(start()).sum()
        assert [weak() is not None for weak in alive] == [False] * 3 + [True] * 2
        loss.backward()


def test_a_slow_disk_holds_the_forward_back_instead_of_filling_memory():
    waiting = []

    class Slow(LoggedStore):
        def _write(self, buffer, position):
            waiting.append(sum(weak() is not None for weak in alive))
            super()._write(buffer, position)

    alive = []
    model = squares(6)
    for block in model:
        block.inner.register_forward_hook(
            lambda _, inputs, __: alive.append(weakref.ref(inputs[0].untyped_storage()))
        )
    with offload(model, ALL, store=Slow()):
        model(start()).sum().backward()
    assert max(waiting) <= 3  # one on its way, one that is computed with, one that comes out


def test_the_file_does_not_grow_from_step_to_step():
    model = squares()
    with offload(model, ALL) as offloader:
        store: Any = offloader._store
        sizes = set()
        for _ in range(5):
            model(start(1000)).sum().backward()
            sizes.add((offloader.reserved_bytes, store._slots._num_taken))
    assert len(sizes) == 1
