"""What leaves, when it comes back, and that training does not notice."""

from __future__ import annotations

import gc
import threading
import weakref
from importlib import import_module

import pytest
import torch
import torch.distributed as dist
from torch import nn

import slipstream
from slipstream.errors import OffloadError, StrategyError, UsageError
from slipstream.memory.forward_override import ForwardOverride
from slipstream.memory.offload import place
from slipstream.memory.offload.disk_store import DiskStore
from slipstream.memory.offload.offload import offload
from slipstream.memory.recompute.recompute import recompute
from slipstream.strategy import Budget, Checkpoints, Every, Offload
from tests.harness.ranks import Ranks
from tests.memory.models import MODELS

ALL = Offload(to="disk", min_bytes=0)
REAL = ("bert", "gpt2", "resnet", "swin")


class Logged(DiskStore):
    """Notes the order of what is asked of it."""

    def __init__(self, *args):
        self.log = []
        super().__init__(*args)

    def put(self, raw, what):
        self.log.append(("put", what))
        return super().put(raw, what)

    def settle(self, ticket):
        self.log.append(("settle", ticket.what))
        super().settle(ticket)

    def fetch(self, ticket):
        if ticket.source is None and ticket.read is None:
            self.log.append(("fetch", ticket.what))
        super().fetch(ticket)

    def take(self, ticket):
        self.log.append(("take", ticket.what))
        return super().take(ticket)


class Square(nn.Module):
    """Saves one tensor: what it gets."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.inner = nn.Identity()

    def forward(self, x):
        return self.inner(x) * x * self.scale.detach()


def squares(blocks=5):
    return nn.Sequential(*(Square() for _ in range(blocks)))


def start(size=64):
    return torch.linspace(0.9, 1.1, size, requires_grad=True)


def trained(name, model, steps=2):
    """Losses, gradients and buffers of some steps."""
    case = MODELS[name]
    torch.manual_seed(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for step in range(steps):
        loss = case.loss(model, case.batch(step))
        loss.backward()
        seen += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return seen + [b.clone() for b in model.buffers()]


def same(first, second):
    return len(first) == len(second) and all(map(torch.equal, first, second))


def built(name):
    torch.manual_seed(0)
    return MODELS[name].build().train()


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("name", REAL)
def test_bitwise_equal_to_the_plain_run(name, prefetch):
    plain = trained(name, built(name))
    model = built(name)
    config = Offload(to="disk", min_bytes=64, prefetch=prefetch)
    with offload(model, config) as offloader:
        ours = trained(name, model)
    assert same(plain, ours)
    assert offloader.traffic.bytes_out == offloader.traffic.bytes_back > 0
    assert len(offloader.blocks) == MODELS[name].count - 1


WISHES = [Every(), Every(every=2), Budget(budget=0.7), Checkpoints(checkpoints=("*attention",))]


@pytest.mark.parametrize(
    "config", WISHES, ids=lambda config: f"{config.kind}-{getattr(config, 'every', 0)}"
)
@pytest.mark.parametrize("name", REAL)
def test_with_recomputation_bitwise_equal_to_the_plain_run(name, config):
    if isinstance(config, Checkpoints) and name == "resnet":
        config = Checkpoints(checkpoints=("*.layers.?.layer",))
    if isinstance(config, Checkpoints) and name == "gpt2":
        config = Checkpoints(checkpoints=("*.attn",))
    plain = trained(name, built(name), steps=3)
    model = built(name)
    recomputed = recompute(model, config)
    with offload(model, Offload(to="disk", min_bytes=64)) as offloader:
        ours = trained(name, model, steps=3)
    recomputed.close()
    assert same(plain, ours)
    assert offloader.traffic.bytes_out == offloader.traffic.bytes_back > 0


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
def test_each_storage_leaves_once(name):
    model = built(name)
    with offload(model, Offload(to="disk", min_bytes=64)) as offloader:
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


def test_backward_is_fetched_ahead_and_the_last_blocks_stay():
    store = Logged()
    model = squares(5)
    config = Offload(to="disk", min_bytes=0, keep_last=2)
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


def test_backward_goes_on_while_the_blocks_before_are_read():
    class Held(Logged):
        """Nothing arrives before backward has come out of the block behind."""

        def _read(self, buffer, position):
            assert released.wait(60)
            super()._read(buffer, position)

    released, store = threading.Event(), Held()
    model = squares(3)
    config = Offload(to="disk", min_bytes=0, keep_last=1, prefetch=2)
    with offload(model, config, store=store):
        hidden = model[:2](start())
        hidden.register_hook(lambda grad: (store.log.append("out of 2"), released.set())[0])
        loss = model[2](hidden).sum()
        store.log.clear()
        loss.backward()
    assert store.log == [("fetch", "1"), ("fetch", "0"), "out of 2", ("take", "1"), ("take", "0")]


def test_activations_that_left_take_no_memory():
    alive = []

    class Watched(Square):
        def forward(self, x):
            hidden = x.exp()
            alive.append(weakref.ref(hidden.untyped_storage()))
            return hidden.log()

    model = nn.Sequential(*(Watched() for _ in range(5)))
    with offload(model, Offload(to="disk", min_bytes=0, keep_last=2)):
        loss = model(start()).sum()
        assert [weak() is not None for weak in alive] == [False] * 3 + [True] * 2
        loss.backward()


def test_a_slow_disk_holds_the_forward_back_instead_of_filling_memory():
    waiting = []

    class Slow(Logged):
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
        sizes = set()
        for _ in range(5):
            model(start(1000)).sum().backward()
            sizes.add((offloader.reserved_bytes, offloader._store._slots._taken))
    assert len(sizes) == 1


def equal_after(backward, blocks=4):
    """Whether gradients are the plain ones after what ``backward(model, x)`` does."""
    grads = []
    for config in (None, ALL):
        model, x = squares(blocks), start()
        if config is None:
            backward(model, x)
        else:
            with offload(model, config):
                backward(model, x)
        grads.append(x.grad)
    return torch.equal(*grads)


def twice(model, x):
    loss = model(x).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def two_forwards(model, x):
    losses = [model(x).sum(), model(2 * x).sum(), model(3 * x).sum()]
    losses[1].backward()
    (losses[0] + losses[2]).backward()


def one_never(model, x):
    model(x)
    model(x).sum().backward()


def failed_forward(model, x):
    def fail(*_):
        raise KeyError("oops")

    handle = model[2].inner.register_forward_hook(fail)
    with pytest.raises(KeyError):
        model(x)
    handle.remove()
    model(x).sum().backward()


def failed_backward(model, x):
    def fail(grad):
        raise KeyError("oops")

    hidden = model[:2](x)
    handle = hidden.register_hook(fail)
    with pytest.raises(KeyError):
        model[2:](hidden).sum().backward()
    handle.remove()
    del hidden
    x.grad = None
    model(x).sum().backward()


def without_grad(model, x):
    with torch.no_grad():
        model(x)
    model(x).sum().backward()


def half_of_it(model, x):
    hidden = model[:3](x)
    loss = model[3:](hidden).sum()
    torch.autograd.grad(loss, hidden, retain_graph=True)
    loss.backward()


def second_derivative(model, x):
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    grad.square().sum().backward()


def frozen_start(model, x):
    hidden = model[:2](x.detach())
    (model[2:](hidden + x)).sum().backward()


PASSES = [
    twice,
    two_forwards,
    one_never,
    failed_forward,
    failed_backward,
    without_grad,
    half_of_it,
    second_derivative,
    frozen_start,
]


@pytest.mark.parametrize("backward", PASSES)
def test_any_order_of_passes(backward):
    assert equal_after(backward)


@pytest.mark.parametrize("backward", PASSES)
def test_nothing_is_left_in_the_store(backward):
    store = Logged()
    model, x = squares(4), start()
    with offload(model, ALL, store=store):
        backward(model, x)
        gc.collect()
        store.put(torch.zeros(1, dtype=torch.uint8), "last")  # what was dropped is cleared away
        assert store._slots._taken - len(store._dropped) == 1


class Odd(nn.Module):
    """Saves a tensor as ``kind`` says."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x):
        match self.kind:
            case "transposed":
                return (x.exp().t() * x.t().exp()).t()
            case "expanded":
                return x * x[:1].exp().expand(6, 6).sin()
            case "every other":
                return x * x.exp()[:, ::2].sin().repeat(1, 2)
            case "overlapping":
                return x * x.exp().as_strided((6, 6), (1, 1)).sin()
            case "empty":
                return x + (x[:0].exp() * x[:0]).sum()
            case "complex":
                y = torch.complex(x.sin(), x.cos())
                return (y * y.conj()).real + y.imag.sin()
            case "double":
                return (x.double().exp() * x.double()).float()
            case "bfloat16":
                return (x.bfloat16().exp() * x.bfloat16()).float()
            case "bool":
                return torch.where(x > 0, x.exp(), x)
            case "parameter":
                return x @ self.weight @ self.weight.t()
            case "sparse":
                return torch.sparse.mm(torch.eye(6).to_sparse(), x).exp()
        raise KeyError(self.kind)


KINDS = """transposed, expanded, every other, overlapping, empty, complex, double, bfloat16, bool,
parameter, sparse""".replace("\n", " ").split(", ")


@pytest.mark.parametrize("kind", KINDS)
def test_any_layout_and_dtype(kind):
    model = nn.Sequential(*(Odd(kind) for _ in range(3)))
    x = torch.randn(6, 6, requires_grad=True)
    plain = torch.autograd.grad(model(x).sum(), [x, *model.parameters()], allow_unused=True)
    with offload(model, ALL):
        ours = torch.autograd.grad(model(x).sum(), [x, *model.parameters()], allow_unused=True)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(plain, ours, strict=True))


def test_parameters_buffers_and_small_tensors_stay():
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
    with offload(model, Offload(to="disk", min_bytes=1000)) as offloader:
        loss = model(x).sum()
        # x and what is multiplied with the small one, of two blocks; the mask needs no gradient
        assert offloader.traffic.bytes_out == 2 * 2 * x.nbytes
        loss.backward()


def test_the_report_tells_what_is_too_small_to_leave():
    model = squares()
    with offload(model, Offload(to="disk", min_bytes=2**20)) as offloader:
        assert offloader.report_rows()[0].value == "4 blocks leave, 1 stay"  # as far as is known
        for size in (2**16, 2**17):
            model(start(size)).sum().backward()
        assert (offloader.blocks, offloader.report_rows()[0].value) == ([], "nothing leaves")
        assert "below min_bytes (1 MiB); the largest is 0.5 MiB" in offloader.report_rows()[0].note
        with torch.no_grad():
            model(start())
        assert offloader.report_rows()[0].value == "nothing leaves"
        model(start(2**18)).sum().backward()
        assert offloader.blocks == ["0", "1", "2", "3"]
        assert "GiB out" in offloader.report_rows()[0].note


def test_a_shared_link_is_told(monkeypatch):
    monkeypatch.setattr(
        import_module("slipstream.memory.offload.offload"), "beside", lambda _: ("3d:00.0",)
    )
    with offload(squares(), ALL) as offloader:
        assert offloader.report_rows()[0].note.endswith("; the PCIe link is shared with 3d:00.0")


def test_what_stands_on_top_goes_first():
    model = squares()
    offloader = offload(model, ALL)
    later = ForwardOverride(model[1], lambda forward, x: forward(x))
    with pytest.raises(UsageError, match="replaced once more since"):
        offloader.close()
    later.remove()
    offloader.close()
    offload(model, ALL).close()


@pytest.mark.parametrize("block", [0, 2], ids=["away", "kept"])
def test_a_change_in_place_is_an_error_as_in_torch(block):
    def run(model):
        hidden = start()
        for number, module in enumerate(model):
            result = module(hidden)
            if number == block:
                with torch.no_grad():
                    hidden.detach().mul_(2)
            kept.append(hidden)
            hidden = result
        hidden.sum().backward()

    kept = []
    words = "modified by an inplace operation"
    model = squares(3)
    with pytest.raises(RuntimeError, match=words):
        run(model)
    with offload(model, ALL), pytest.raises(RuntimeError, match=words):
        run(model)


def test_a_change_while_it_is_written_is_an_error_whoever_changes_it():
    store = Logged()
    model = squares(3)
    with offload(model, ALL, store=store):
        hidden = (start() * 1).view(8, 8)
        result = model[0](hidden)
        other = hidden.detach()
        del hidden
        other.mul_(2)
        del other
        with pytest.raises(RuntimeError, match="that 0 has saved"):
            model[1:](result).sum().backward()


def test_close_leaves_a_plain_model():
    model = squares(3)
    offloader = offload(model, ALL)
    loss = model(start()).sum()
    assert "forward" in vars(model[0])
    offloader.close()
    offloader.close()
    assert "forward" not in vars(model[0])
    with pytest.raises(UsageError, match="backward through 1 after its activations were given up"):
        loss.backward()
    model(start()).sum().backward()


@pytest.mark.parametrize(
    ("config", "model", "words"),
    [
        (Offload(), squares(), r"model is on the CPU, .*; use \{to: disk\}"),
        (Offload(to="disk"), nn.Linear(2, 2), "Linear has no repeated blocks .*; name its modules"),
        (Offload(to="disk", keep_last=5), squares(), "model has 5 blocks.* allowed: at most 4"),
        (Offload(to="disk", modules=("x.*",)), squares(), r"offload.modules: no module .*'x\.\*'"),
    ],
)
def test_what_cannot_be_is_refused(config, model, words):
    with pytest.raises(StrategyError, match=words):
        offload(model, config)
    assert "forward" not in vars(model[0] if isinstance(model, nn.Sequential) else model)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("modules", [None, ("1",)])
def test_scripted_blocks_are_refused(modules):
    model = nn.Sequential(*(torch.jit.script(nn.Sequential(nn.Linear(2, 2))) for _ in range(3)))
    words = "1 is a ScriptModule" if modules else "no repeated blocks .a ScriptModule is none"
    with pytest.raises(StrategyError, match=words):
        offload(model, Offload(to="disk", modules=modules, keep_last=0))
    if modules:
        with pytest.raises(StrategyError, match=words):
            recompute(model, Checkpoints(checkpoints=modules))


def test_what_leaves_already_is_refused():
    model = squares()
    with offload(model, ALL), pytest.raises(UsageError, match="what 0 saves leaves already; clos"):
        offload(model, Offload(to="disk", modules=("3.inner",), keep_last=0))
    offload(model, ALL).close()


def test_a_folder_needs_a_disk():
    with pytest.raises(StrategyError, match=r"only \{to: disk\} writes a file"):
        Offload(folder="/tmp")


def test_too_little_room_is_refused_at_once(monkeypatch):
    monkeypatch.setattr(place, "free_disk_bytes", lambda folder: 2**30)
    with pytest.raises(
        OffloadError, match=r"rank 2: .* 1\.00 GiB are free for 4 ranks .*each needs 0\.25 GiB"
    ):
        offload(squares(), ALL, local_ranks=4, rank=2)


def test_what_does_not_fit_is_said_in_the_first_forward():
    model, store = squares(), Logged(None, 2**20)
    with (
        offload(model, ALL, store=store),
        pytest.raises(OffloadError, match=r"rank 0: .* of 0 to .*; make room there"),
    ):
        model(start())


def batches(name, count=3):
    return [MODELS[name].batch(step) for step in range(count)]


def test_a_session_offloads_what_its_strategy_says():
    seen = []
    config = {"to": "disk", "min_bytes": 0}
    for memory in ({}, {"offload": config}, {"offload": config, "recompute": "every"}):
        model = built("gpt2")
        names = list(model.state_dict())
        torch.manual_seed(7)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        strategy = {"memory": memory}
        with slipstream.accelerate(model, optimizer, batches("gpt2"), strategy) as session:
            for batch in session.loader:
                session.backward(session.model(**batch).loss)
                session.step()
            report = session.report()
        seen.append([p.detach() for p in model.parameters()])
        assert list(model.state_dict()) == names
        assert not any("forward" in vars(block) for block in model.transformer.h)
    assert same(seen[0], seen[1])
    assert same(seen[0], seen[2])
    assert "5 modules computed again" in report
    assert "4 blocks leave, 1 stay" in report
    assert "GiB out" in report


def refused(memory):
    model = squares()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    slipstream.accelerate(model, optimizer, strategy={"memory": {"offload": memory}})


def little_room_on_rank_1(memory):
    if dist.get_rank() == 1:
        place.free_disk_bytes = lambda folder: 2**29
    refused(memory)


def test_what_cannot_be_is_refused_by_all_ranks_before_training(tmp_path):
    with Ranks(2) as ranks:
        for error in ranks.fail(refused, {"to": "host"}).values():
            assert "use {to: disk}" in str(error)
        for error in ranks.fail(refused, {"to": "disk", "folder": str(tmp_path / "no")}).values():
            assert "No such file" in str(error)
        for error in ranks.fail(little_room_on_rank_1, {"to": "disk"}).values():
            assert "rank 1: memory.offload to disk: 0.50 GiB are free for 2 ranks" in str(error)
