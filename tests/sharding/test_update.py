"""The sharded update: equal to every rank's own, with optimizer state of a shard's size."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

import slipstream
from slipstream.errors import MismatchError, ModelError, StrategyError, UsageError
from slipstream.optim import Lamb, Lars
from slipstream.optim.elementwise import COUNTERS
from tests.harness.ranks import Ranks
from tests.harness.reference import digest, distance

STEPS = 4
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd, plain loop": lambda p: torch.optim.SGD(p, lr=0.1, foreach=False),
    # eps: a gradient that is rounding alone is no step, which processors round differently
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, eps=1e-5),
    "adamw, fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1, t0=1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "lars": lambda p: Lars(p, lr=1.0, trust_coefficient=0.1, weight_decay=0.01),
    "lamb": lambda p: Lamb(p, lr=0.01, max_grad_norm=0.5, adapt_vectors=True),
}
NORMS = ("lars", "lamb")
"""They add up norms, in another order where ranks have shards."""


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(request.param) as ranks:
        yield ranks


class Model(nn.Module):
    """Sizes that no number of ranks divides, weights that another module reads, a lone number."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.norm = nn.LayerNorm(6)
        self.conv = nn.Conv2d(1, 3, 3, padding=1).to(memory_format=torch.channels_last)
        self.head = nn.Linear(6, 71)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.attention(x, x, x, need_weights=False)[0])
        y = self.conv(y.unsqueeze(1)).mean(1) * self.scale
        return self.head(y).square().mean()


def batch(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(2, 3, 6, generator=generator)


def build() -> Model:
    torch.manual_seed(0)
    return Model()


def session_on(
    model: nn.Module, optimizer: Optimizer, transport: Any, **settings: Any
) -> slipstream.Session[Any, Any]:
    gradients = {"transport": transport, **settings.pop("gradients", {})}
    if transport != "sharded":
        gradients["transport"] = transport
    return slipstream.accelerate(model, optimizer, None, {"gradients": gradients, **settings})


def steps(session: slipstream.Session[Any, Any], first: int, count: int, clip: float = 0) -> None:
    for step in range(first, first + count):
        session.backward(session.model(batch(step, session.rank)))
        if clip:
            session.clip_grad_norm_(clip)
        session.step()


def trained(transport: Any, optimizer: str, clip: float = 0, **settings: Any) -> tuple[Any, ...]:
    """The model, the optimizer's whole state, and the sizes of this rank's state."""
    model = build()
    update = OPTIMIZERS[optimizer](model.parameters())
    with session_on(model, update, transport, **settings) as session:
        steps(session, 0, STEPS, clip)
        whole = copy.deepcopy(session.checkpoint("optimizer")["optimizer"])
        own = [
            value.numel()
            for state in update.state.values()
            for key, value in state.items()
            if isinstance(value, Tensor) and key not in COUNTERS
        ]
        state = session.checkpoint("model")["model"]
    after = update.state_dict()
    assert_same(after["state"], whole["state"])  # closed: every rank has the whole again
    return model, whole, sum(own), state


def assert_same(a: Any, b: Any, tolerance: float = 0) -> None:
    assert a.keys() == b.keys()
    for number in a:
        assert a[number].keys() == b[number].keys()
        for key, value in a[number].items():
            other = b[number][key]
            if isinstance(value, Tensor):
                torch.testing.assert_close(value, other, rtol=tolerance, atol=tolerance)
                assert value.shape == other.shape
            else:
                assert value == other


def compare(name: str, **settings: Any) -> None:
    direct, expected, numel, _ = trained("direct", name, **settings)
    sharded, found, own, _ = trained("sharded", name, **settings)
    if name in NORMS:
        assert distance(sharded, direct) < 1
        assert_same(found["state"], expected["state"], 1e-5)
    else:
        assert digest(sharded) == digest(direct)
        assert_same(found["state"], expected["state"])
    every = [0] * dist.get_world_size()
    dist.all_gather_object(every, own)
    assert sum(every) == numel


def each(check: Callable[..., Any], cases: Sequence[tuple[Any, ...]]) -> None:
    """All cases in one meeting of the ranks, which takes as long as a case."""
    for case in cases:
        try:
            check(*case)
        except Exception as error:
            raise AssertionError(f"{check.__name__}{case}: {error}") from error


def test_parameters_and_state_are_those_of_the_whole_update(three: Ranks) -> None:
    three.run(each, compare, [(name,) for name in OPTIMIZERS])


def compare_blocks(name: str) -> None:
    compare(name, compute={"fuse_optimizer": True})


def test_small_shards_are_stepped_together(two: Ranks) -> None:
    names = ("nadam", "radam", "adamax", "rmsprop", "adadelta", "asgd", "rprop")
    two.run(each, compare_blocks, [(name,) for name in names])


def compare_norms(name: str) -> None:
    direct, *_ = trained("direct", name)
    some, *_ = trained({"kind": "sharded", "replicated": 0.4}, name)
    assert distance(some, direct) < 1


def test_norms_count_what_every_rank_updates_once(two: Ranks) -> None:
    two.run(each, compare_norms, [(name,) for name in NORMS])


def compare_settings(settings: dict[str, Any], clip: float, bound: float) -> None:
    optimizer = "sgd" if bound > 1 else "adam"
    whole, _, _, expected = trained("direct", optimizer, clip, **copy.deepcopy(settings))
    sharded, _, _, state = trained("sharded", optimizer, clip, **copy.deepcopy(settings))
    if not bound:
        assert digest(sharded) == digest(whole)
        assert all(torch.equal(state[key], expected[key]) for key in expected)
    else:
        found = distance(sharded, whole)
        assert 0 < found < bound, found
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest(sharded))
    assert len(set(digests)) == 1


HALF = {"kind": "half_weights"}
POWERSGD = {"kind": "powersgd", "start_step": 1, "min_compression_rate": 1.0}
SOME = {"gradients": {"transport": {"kind": "sharded", "replicated": 0.4}}}
SETTINGS: dict[str, tuple[dict[str, Any], float, float]] = {
    "small segments": ({"gradients": {"split": "per_gradient", "overlap": False}}, 0, 0),
    "accumulation": ({"gradients": {"accumulate": 2}}, 0, 0),
    "clipping": ({}, 0.01, 1),
    "some replicated": (SOME, 0, 0),
    "some replicated, clipping": (SOME, 0.01, 1),
    "some replicated, half weights": ({**SOME, "precision": {**HALF, "exchange": "fp32"}}, 0, 0),
    "autocast": ({"precision": "autocast"}, 0, 0),
    "half weights": ({"precision": HALF}, 0, 100),  # as "half"
    "half weights, fp32 gradients": ({"precision": {**HALF, "exchange": "fp32"}}, 0, 0),
    "fused optimizer": ({"compute": {"fuse_optimizer": True}}, 0, 0),
    "fused optimizer, half weights": (
        {"compute": {"fuse_optimizer": True}, "precision": {**HALF, "exchange": "fp32"}},
        *(0, 0),
    ),
    "loss scale": ({"precision": {**HALF, "dtype": "fp16", "emulate": True}}, 0, 100),
    "half": ({"gradients": {"codec": "half"}}, 0, 100),  # a rank keeps its sum in fp32
    "int8": ({"gradients": {"codec": "int8"}}, 0, 0),
    "powersgd": ({"gradients": {"codec": POWERSGD}}, 0, 0),
}
"""Settings, the norm to clip to, and how far from the whole update the sharded one may be."""


def test_it_works_with_other_settings(two: Ranks) -> None:
    two.run(each, compare_settings, list(SETTINGS.values()))


def averages_cannot_be_read() -> list[str]:
    model = build()
    errors = []
    with session_on(model, OPTIMIZERS["sgd"](model.parameters()), "sharded") as session:
        session.backward(model(batch(0, session.rank)))
        assert model.head.weight.grad is not None
        assert model.head.weight.grad.shape == model.head.weight.shape
        for read in (
            lambda: clip_grad_norm_(model.parameters(), 1.0),
            lambda: print(model.head.weight.grad),
            lambda: model.head.weight.grad.mul_(2),
        ):
            with pytest.raises(UsageError) as caught:
                read()
            errors.append(str(caught.value))
        session.step()
    return errors


def test_an_average_that_no_rank_has_is_not_read(two: Ranks) -> None:
    for errors in two.run(averages_cannot_be_read):
        for text in errors:
            assert "session.clip_grad_norm_" in text
            assert "was read between backward() and step()" in text


def overflow_on_one_rank() -> tuple[bool, str]:
    model = build()
    update = OPTIMIZERS["adam"](model.parameters())
    with session_on(model, update, "sharded") as session:
        loss = model(batch(0, session.rank))
        if session.rank == 1:
            # one infinite value, in the shard of one rank alone
            model.head.weight.register_hook(
                lambda g: g + torch.full_like(g, math.inf).tril_(-6) if g.isfinite().all() else g
            )
        session.backward(loss * 1024.0, loss_scale=1024.0)
        updated = session.step()
        assert session.skipped == 1
    return updated, digest(model)


def test_all_ranks_skip_where_one_share_is_infinite(ranks: Ranks) -> None:
    found = ranks.run(overflow_on_one_rank)
    assert {updated for updated, _ in found} == {False}
    assert len({digest for _, digest in found}) == 1


def two_losses(codec: Any, scale: float, bound: float) -> str:
    """Two backward passes that exchange, for one update."""
    models = [build(), build()]
    for model, transport in zip(models, ("direct", "sharded"), strict=True):
        gradients = {} if codec is None else {"codec": codec}
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        with session_on(model, optimizer, transport, gradients=gradients) as session:
            for step in range(2):
                for number in (step, step + 10):
                    loss = model(batch(number, session.rank))
                    session.backward(loss * scale, loss_scale=scale)
                session.step()
    assert distance(*models) < bound
    return digest(models[1])


@pytest.mark.parametrize(
    ("codec", "scale", "bound"),
    [(None, 1.0, 1), ({"kind": "half", "dtype": "fp16"}, 64.0, 100)],  # the bound as in SETTINGS
    ids=["plain", "fp16 with a loss scale"],
)
def test_two_backward_passes_before_a_step_add_up(
    two: Ranks, codec: Any, scale: float, bound: float
) -> None:
    assert len(set(two.run(two_losses, codec, scale, bound))) == 1


def with_uneven_loader(transport: str) -> str:
    model = build()
    update = OPTIMIZERS["sgd"](model.parameters())
    batches = [batch(step, dist.get_rank()) for step in range(3 + dist.get_rank())]
    strategy = {"gradients": {"transport": transport}}
    with slipstream.accelerate(model, update, batches, strategy) as session:
        for _ in range(2):
            for one in session.loader:
                session.backward(model(one))
                session.step()
    return digest(model)


def test_ranks_that_run_out_of_batches_update_their_shares(two: Ranks) -> None:
    assert set(two.run(with_uneven_loader, "sharded")) == set(two.run(with_uneven_loader, "direct"))


def lamb_of_another_package(parameters: Any) -> torch.optim.Optimizer:
    kind = type("Lamb", (torch.optim.SGD,), {"__module__": "timm.optim.lamb"})
    made: torch.optim.Optimizer = kind(parameters)
    return made


REFUSED: dict[str, tuple[Any, Any, dict[str, Any], type[Exception], str]] = {
    "optimizer of a known name": (
        build,
        lamb_of_another_package,
        {},
        ModelError,
        r"optimizer timm\.optim\.lamb\.Lamb, which slipstream does not know",
    ),
    "optimizer": (
        build,
        lambda p: torch.optim.LBFGS(p),
        {},
        ModelError,
        "optimizer LBFGS, which slipstream does not know",
    ),
    "sparse": (
        lambda: nn.Sequential(nn.Embedding(4, 2, sparse=True)),
        OPTIMIZERS["sgd"],
        {},
        ModelError,
        "module 0 has sparse gradients",
    ),
    "codec": (
        build,
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        {"gradients": {"codec": "dgc"}},
        StrategyError,
        "dgc",
    ),
    "parallel": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
        OPTIMIZERS["sgd"],
        {"parallel": {"pipeline": {"ranks": 2, "cut": ["1"]}}},
        StrategyError,
        "ranks share the model already",
    ),
}


def refused(name: str) -> None:
    make, optimizer, settings, error, text = REFUSED[name]
    model = make()
    with pytest.raises(error, match=text):
        session_on(model, optimizer(model.parameters()), "sharded", **copy.deepcopy(settings))


def test_it_refuses(two: Ranks) -> None:
    two.run(each, refused, [(name,) for name in REFUSED])


class Signs(Optimizer):
    """An optimizer of the user's: treats every value on its own, as its maker promises."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p].setdefault("step", torch.zeros(1)).add_(1)
                    momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    momentum.mul_(0.9).add_(p.grad)
                    p.sub_(momentum.sign(), alpha=group["lr"])


def with_own_optimizer() -> None:
    models = []
    for transport in ("direct", {"kind": "sharded", "elementwise": True}):
        model = build()
        update = Signs(model.parameters())
        with session_on(model, update, transport) as session:
            steps(session, 0, 2)
            session.restore(session.checkpoint())
            steps(session, 2, STEPS - 2)
        assert {state["step"].shape for state in update.state.values()} == {torch.Size([1])}
        models.append(digest(model))
    assert models[0] == models[1]


def with_a_state_of_one_rank() -> str:
    model = build()
    update = Signs(model.parameters())
    try:
        with session_on(model, update, {"kind": "sharded", "elementwise": True}) as session:
            steps(session, 0, 1)
            if session.rank == 1:
                del update.state[model.head.bias]
            session.checkpoint("optimizer")
    except MismatchError as error:
        return str(error)
    return ""


def test_a_state_that_other_ranks_lack_is_refused(two: Ranks) -> None:
    for text in two.run(with_a_state_of_one_rank):
        assert "tensors of the optimizer's state have the shape of this rank's shards" in text


def test_a_promise_lets_an_unknown_optimizer_in(two: Ranks) -> None:
    two.run(with_own_optimizer)


def stepped_twice() -> str:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy = {"gradients": {"transport": "sharded"}}
    with slipstream.accelerate(model, optimizer, None, strategy) as session:
        session.backward(model(batch(0, session.rank)).square().mean())
        optimizer.step()
        with pytest.raises(UsageError) as caught:
            optimizer.step()
        optimizer.zero_grad()
    return str(caught.value)


def test_a_second_step_with_gradients_that_are_gone_is_refused(two: Ranks) -> None:
    for said in two.run(stepped_twice):
        assert "which the last step has used" in said


def failed_and_begun_again() -> int:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    strategy = {"gradients": {"transport": "sharded"}}
    for fails in (True, False):
        with (
            suppress(ValueError),
            slipstream.accelerate(model, optimizer, None, strategy) as session,
        ):
            session.backward(model(batch(0, session.rank)).square().mean())
            session.step()
            if fails:
                model(batch(1, session.rank))  # all of the update has arrived
                raise ValueError("a bad batch")
            done = session.updates
    return done


def test_a_session_begins_again_with_the_shares_of_one_that_failed(two: Ranks) -> None:
    assert two.run(failed_and_begun_again) == [1, 1]
