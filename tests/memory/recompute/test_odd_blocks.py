"""Blocks that recomputation could easily get wrong are bitwise the same, or refused."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from slipstream.errors import UsageError
from slipstream.memory import recompute
from slipstream.memory.recompute import rng_state
from slipstream.memory.recompute.rng_state import RngReplay, get_rng_state
from slipstream.pytree import tensors
from slipstream.strategy import BudgetConfig, CheckpointsConfig, EveryConfig, RecomputeConfig

CONFIGS = {
    "every": EveryConfig(),
    "two": EveryConfig(every=2),
    "most": BudgetConfig(budget=0.8),
    "all": BudgetConfig(budget=1.0),
}


class Odd(nn.Module):
    """A residual block; subclasses add one oddity each."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.step = 0
        self.prepare()

    def prepare(self) -> None:
        """Make buffers."""

    @staticmethod
    def join(blocks: list[Odd]) -> None:
        """Make them share something."""

    def odd(self, y: Tensor) -> Tensor:
        return y

    def forward(self, x: Tensor) -> Tensor:
        return x + self.odd(self.linear(x)).tanh()


class ZeroMean(Odd):
    """The first forward updates a running mean to what it is."""

    def prepare(self) -> None:
        self.norm = nn.BatchNorm1d(4)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def odd(self, y: Tensor) -> Tensor:
        return self.norm(y)


class Later(Odd):
    """The first forward updates nothing, and later ones do."""

    def prepare(self) -> None:
        self.register_buffer("mean", torch.zeros(4))

    def odd(self, y: Tensor) -> Tensor:
        if self.step:
            self.mean.lerp_(y.detach().mean(0), 0.1)
        return y - self.mean.clone()


class Assigned(Later):
    """There is a new buffer each time, and none at first."""

    def prepare(self) -> None:
        self.register_buffer("mean", None)

    def odd(self, y: Tensor) -> Tensor:
        mean = y.detach().mean(0)
        self.mean = mean if self.mean is None else self.mean.lerp(mean, 0.1)
        return y - self.mean


class Codebook(Odd):
    """A large buffer is updated behind autograd's back, and a mask is not."""

    def prepare(self) -> None:
        self.register_buffer("codes", torch.zeros(2**13, 4))
        self.register_buffer("mask", torch.ones(2**17, dtype=torch.bool))

    def odd(self, y: Tensor) -> Tensor:
        if self.step:
            self.codes.data[0] += y.detach().mean(0)
        return (y - self.codes[0].clone()) * self.mask[:4]


class Anneals(Odd):
    """Counts its calls, and computes by the count."""

    def odd(self, y: Tensor) -> Tensor:
        self.step += 10
        return y * 0.9**self.step


class Counts(Odd):
    """Changes a tensor in place that is no buffer."""

    def prepare(self) -> None:
        self.calls = torch.zeros(())

    def odd(self, y: Tensor) -> Tensor:
        self.calls += 1
        return y / self.calls.clone()


class Remembers(Odd):
    """Keeps a tensor for its next call, in an attribute that is no buffer."""

    def prepare(self) -> None:
        self.mean: Tensor = torch.zeros(4)

    def odd(self, y: Tensor) -> Tensor:
        z = (y + self.mean).tanh()
        self.mean = z.detach().mean(0)
        return z


class RemembersLater(Odd):
    """Has nothing to remember at first, and not even an attribute for it."""

    def odd(self, y: Tensor) -> Tensor:
        z = (y + getattr(self, "mean", 0.0)).tanh()
        self.mean = z.detach().mean(0)
        return z


class Shared(Odd):
    """Two places hold one buffer."""

    def prepare(self) -> None:
        self.inner = nn.Module()
        self.register_buffer("mean", torch.zeros(4))
        self.inner.register_buffer("mean", self.mean)

    def odd(self, y: Tensor) -> Tensor:
        self.mean.add_(y.detach().mean(0))
        return y - self.inner.mean.clone()  # type: ignore[operator]


class Overlapping(Odd):
    """One buffer is a part of another."""

    def prepare(self) -> None:
        self.register_buffer("all", torch.zeros(3, 4))
        self.register_buffer("first", self.all[0])

    def odd(self, y: Tensor) -> Tensor:
        self.first.add_(y.detach().mean(0))
        return y - self.all.sum(0)


class Made(Odd):
    """The first forward makes a buffer."""

    def odd(self, y: Tensor) -> Tensor:
        if not hasattr(self, "mean"):
            self.register_buffer("mean", torch.zeros(4))
        self.mean.lerp_(y.detach().mean(0), 0.1)
        return y - self.mean.clone()


class Sparse(Odd):
    """Has a sparse buffer."""

    def prepare(self) -> None:
        self.register_buffer("scale", torch.eye(4).to_sparse(), persistent=False)

    def odd(self, y: Tensor) -> Tensor:
        return torch.sparse.mm(self.scale, y.t()).t()


class Same(Odd):
    """Gets one tensor twice, and asks whether it is one."""

    def forward(self, x: Any) -> Any:
        x, again = x if isinstance(x, tuple) else (x, x)
        found = super().forward(x * 2 if x is again else x)
        return found, found


class Kids(list[Any]):
    """A list with a constructor of its own."""

    def __init__(self, name: str, items: list[Any]) -> None:
        super().__init__(items)
        self.name = name


@dataclass
class Tree:
    """Refers to itself through its kids."""

    value: Tensor
    kids: list[Tree]
    root: Tree | None = None


class Trees(Odd):
    """Gets a tree whose nodes know its root."""

    def forward(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            x = Tree(x, Kids("kids", []))
            x.kids.append(Tree(x.value + 1, [], x))
        assert x.kids[0].root is x
        value = super().forward(x.value + x.kids[0].value)
        found = Tree(value, Kids(x.kids.name, []))
        found.kids.append(Tree(value + 1, [], found))
        return found


class Draws(Odd):
    """Draws from Python and numpy."""

    def odd(self, y: Tensor) -> Tensor:
        return y * random.random() * np.random.standard_normal()


class DrawsItsOwn(Odd):
    """Draws from generators of its own."""

    def prepare(self) -> None:
        self.torch = torch.Generator().manual_seed(1)
        self.numpy, self.python = np.random.default_rng(2), random.Random(3)

    def odd(self, y: Tensor) -> Tensor:
        kept = torch.rand(y.shape, generator=self.torch) < 0.5
        return y * kept * self.numpy.standard_normal() * self.python.random()


class Nested(Odd):
    """Tensors come in a mapping of lists, and one weight is shared by all blocks."""

    @staticmethod
    def join(blocks: list[Odd]) -> None:
        for block in blocks:
            block.linear = blocks[0].linear

    def forward(self, x: Any) -> Any:
        (y,) = x["in"] if isinstance(x, dict) else [x]
        return {"in": [super().forward(y)]}


class Fills(Odd):
    """Writes what it returns into what it got."""

    def forward(self, x: Any) -> Any:
        found = x if isinstance(x, dict) else {"in": x}
        found["in"] = super().forward(found["in"])
        return found


class Packed(Odd):
    """Takes a container that looks at what it gets."""

    def forward(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            x = nn.utils.rnn.pack_sequence([x, x[:3]])
        return x._replace(data=super().forward(x.data))


class InPlace(Odd):
    """Begins with an operation in place."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.relu_())


class InPlaceNested(Odd):
    """The same, in a list."""

    def forward(self, x: Any) -> Any:
        y = x[0] if isinstance(x, list) else x + 0
        return [super().forward(y.add_(1.0))]


def trained(
    block: type[Odd], config: RecomputeConfig | None, kind: type[nn.Sequential] = nn.Sequential
) -> dict[str, Any]:
    """Losses, gradients and state of a few steps."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    blocks = [block() for _ in range(4)]
    block.join(blocks)
    model = kind(*blocks)
    recomputed = recompute(model, config) if config is not None else None
    seen: dict[str, Any] = {}
    for step in range(3):
        for inner in blocks:
            inner.step = step
        y, *_ = tensors(model(torch.randn(8, 4)))
        loss = y.square().mean()
        loss.backward()
        seen |= {f"loss {step}": loss.detach()}
        seen |= {f"{step} {name}": value.clone() for name, value in model.state_dict().items()}
        seen |= {f"{step} {name} grad": p.grad for name, p in model.named_parameters()}
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
                p.grad = None
    if recomputed is not None:
        recomputed.close()
    return seen | {"next": torch.tensor([random.random(), np.random.rand()])}


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(
    "block",
    [
        *(ZeroMean, Later, Assigned, Codebook, Shared, Overlapping, Made, Sparse),
        *(Draws, DrawsItsOwn, Nested, Fills, Packed, Same, Trees),
        *(Anneals, Counts, Remembers, RemembersLater),
    ],
)
def test_bitwise_as_without(block: type[Odd], config: str) -> None:
    plain, found = trained(block, None), trained(block, CONFIGS[config])
    assert found.keys() == plain.keys()
    assert [name for name in plain if not torch.equal(found[name], plain[name])] == []


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(("block", "first"), [(InPlace, 0), (InPlaceNested, 1)])
def test_blocks_that_change_their_input_are_named(
    block: type[Odd], first: int, config: str
) -> None:
    words = rf"^{first} changes its input in place, .* copy \(x = x\.clone\(\)"
    with pytest.raises(UsageError, match=words):
        trained(block, CONFIGS[config])


class CountsMuch(Odd):
    """Changes a large tensor in place that is no buffer."""

    def prepare(self) -> None:
        self.calls = torch.zeros(2**20)

    def odd(self, y: Tensor) -> Tensor:
        self.calls[0] += 1
        return y / self.calls[0]


@pytest.mark.parametrize("config", CONFIGS)
def test_a_large_tensor_that_is_changed_in_place_must_be_a_buffer(config: str) -> None:
    said = r"a CountsMuch changes calls, .* of 4194304 bytes .* register it as a buffer"
    with pytest.raises(UsageError, match=said):
        trained(CountsMuch, CONFIGS[config])


class MovesAnAverage(Odd):
    """Keeps a codebook in parameters, as the EmbeddingEMA of taming-transformers."""

    def prepare(self) -> None:
        self.codebook = nn.Parameter(torch.zeros(4), requires_grad=False)

    def odd(self, y: Tensor) -> Tensor:
        self.codebook.data.mul_(0.9).add_(0.1 * y.detach().mean(0))
        return y + self.codebook


class Lends(Odd):
    """Quantizes weights for the time of its forward."""

    def forward(self, y: Tensor) -> Tensor:
        kept, self.linear.weight.data = self.linear.weight.data, self.linear.weight.data.sign()
        y = self.linear(y).tanh()
        self.linear.weight.data = kept
        return y


class Normalises(Odd):
    """Writes nearly the same again, as the layers of EDM2, which normalise their weights."""

    def prepare(self) -> None:
        self.scale = nn.Parameter(torch.arange(1.0, 5.0))

    def odd(self, y: Tensor) -> Tensor:
        self.scale.data.div_(self.scale.data.norm() + 1e-4)
        return y * self.scale


@pytest.mark.parametrize("config", CONFIGS)
def test_a_parameter_that_forward_moves_on_must_be_a_buffer(config: str) -> None:
    with pytest.raises(UsageError, match=r"parameter codebook, of shape \[4\].*in a buffer"):
        trained(MovesAnAverage, CONFIGS[config])
    with pytest.raises(UsageError, match=r"parameter weight.*beside the parameter.*linear\("):
        trained(Lends, CONFIGS[config])
    plain, found = trained(Normalises, None), trained(Normalises, CONFIGS[config])
    for name, value in plain.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4)


class Penalty(Odd):
    """Keeps a term of the loss, which no backward goes through."""

    def odd(self, y: Tensor) -> Tensor:
        self.penalty = y.square()
        return y


def test_what_a_block_keeps_has_no_graph_of_an_earlier_step() -> None:
    model = nn.Sequential(*(Penalty() for _ in range(4)))
    recomputed = recompute(model, EveryConfig())
    inputs = []
    for _ in range(4):
        x = torch.ones(2, 4).requires_grad_() + 0
        inputs.append(ref(x))
        model(x).sum().backward()
        del x
    gc.collect()
    assert [x() is None for x in inputs[:-1]] == [True] * 3
    recomputed.close()


class Iterates(Odd):
    """Gets and returns an iterator."""

    def forward(self, x: Any) -> Any:
        return iter([super().forward(x if isinstance(x, Tensor) else next(x))])


class Graph:
    """As the data of PyTorch Geometric: attributes lie in a store of its own."""

    def __init__(self, x: Tensor) -> None:
        self.store = {"x": x}
        self.calls = 0


class PassesOn(Odd):
    """Takes its input from an object, leaves its output there, and returns the object."""

    def forward(self, graph: Any) -> Any:
        graph.store["x"] = super().forward(graph.store["x"])
        graph.calls += 1
        return graph


class Graphs(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        graph = super().forward(Graph(x))
        assert graph.calls == len(self)
        return graph.store["x"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("config", CONFIGS)
def test_blocks_pass_on_what_they_compute_in_an_object(config: str) -> None:
    plain = trained(PassesOn, None, Graphs)
    found = trained(PassesOn, CONFIGS[config], Graphs)
    assert plain.keys() == found.keys()
    assert all(torch.equal(found[key], value) for key, value in plain.items())


def through_normed_layers(config: RecomputeConfig | None) -> list[Tensor]:
    """As a discriminator: two batches, and one backward. Each forward makes other weights."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.utils.spectral_norm(nn.Linear(4, 4)) for _ in range(3)))
    recomputed = recompute(model, config) if config is not None else None
    real, fake = torch.randn(5, 4), torch.randn(5, 4, requires_grad=True)
    (model(real).square().mean() - model(fake).tanh().mean()).backward()
    if recomputed is not None:
        recomputed.close()
    return [fake.grad, *(p.grad for p in model.parameters())]  # type: ignore[list-item]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_block_whose_weight_a_hook_makes_before() -> None:
    plain, found = map(through_normed_layers, (None, CheckpointsConfig(checkpoints=["*"])))
    assert all(map(torch.equal, found, plain))


class Shows(Odd):
    """Keeps what it has computed for the script, which looks at it behind backward."""

    shown: Tensor | None

    def prepare(self) -> None:
        self.shown = None

    def odd(self, y: Tensor) -> Tensor:
        z = y.exp().log()
        self.shown = z * 2
        return z


@pytest.mark.parametrize("config", CONFIGS)
def test_what_a_block_shows_for_the_first_time_stays_behind_backward(config: str) -> None:
    model = nn.Sequential(*(Shows() for _ in range(4)))
    recomputed = recompute(model, CONFIGS[config])
    loss = model(torch.ones(2, 4)).sum()
    shown = [block.shown for block in model]
    loss.backward()
    assert all(one is not None for one in shown)
    assert all(block.shown is one for block, one in zip(model, shown, strict=True))
    recomputed.close()


@pytest.mark.parametrize("config", CONFIGS)
def test_iterators_are_refused(config: str) -> None:
    with pytest.raises(UsageError, match=r"1 is called with a list_iterator, .* pass a list"):
        trained(Iterates, CONFIGS[config])


class Checkpointed(nn.Sequential):
    """Checkpoints every other block itself."""

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self):
            x = checkpoint(block, x, use_reentrant=False) if number % 2 else block(x)
        return x


@pytest.mark.parametrize("config", CONFIGS)
def test_checkpoints_in_the_model_itself_are_supported(config: str) -> None:
    plain, found = trained(Odd, None), trained(Odd, CONFIGS[config], Checkpointed)
    assert [name for name in plain if not torch.equal(found[name], plain[name])] == []


DRAWS: dict[str, Callable[[], object]] = {
    "random": random.random,
    "numpy": np.random.rand,
    "one normal number": np.random.standard_normal,
    "two normal numbers, which are one draw": lambda: np.random.standard_normal(2),
    "many": lambda: np.random.rand(10_000),
}


@pytest.mark.parametrize("waiting", [False, True], ids=["", "a normal number waits"])
@pytest.mark.parametrize("generator", [np.random.MT19937, np.random.PCG64])
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_draw_is_noticed_and_replayed(draw, generator, waiting, monkeypatch) -> None:
    monkeypatch.setattr(rng_state, "_numpy_state", rng_state._NumpyState())
    usual = np.random.get_bit_generator()  # type: ignore[attr-defined]
    np.random.set_bit_generator(generator(0))  # type: ignore[attr-defined]
    try:
        if waiting:
            np.random.standard_normal()  # numpy draws two at a time
        replay = RngReplay()
        with replay.record():
            before = get_rng_state()
            draw()
            after = get_rng_state()
        assert before != after
        for _ in range(2):
            with replay:
                assert get_rng_state() == before
                draw()
                assert get_rng_state() == after
            assert get_rng_state() == after
    finally:
        np.random.set_bit_generator(usual)  # type: ignore[attr-defined]


def test_generators_are_left_alone_if_the_first_run_drew_nothing() -> None:
    replay = RngReplay()
    with replay.record():
        pass
    before = get_rng_state()
    with replay:
        random.random()
    assert get_rng_state() != before
