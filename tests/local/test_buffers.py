"""Buffers that nobody changes keep their bits, and those that ranks change are averaged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.swa_utils import update_bn

import slipstream
from slipstream.errors import UsageError
from slipstream.strategy import LocalConfig
from tests.harness.ranks import Ranks
from tests.local.test_saved_state import training
from tests.transport.emulated_hosts import on_hosts


@pytest.fixture(scope="module")
def three() -> Iterator[Ranks]:
    with Ranks(3) as ranks:
        yield ranks


def constants() -> dict[str, Tensor]:
    torch.manual_seed(5)
    return {
        "mask": torch.full((3, 3), -torch.inf).triu(1),
        "lowest": torch.full((2,), torch.finfo(torch.float32).min),
        "unknown": torch.full((2,), torch.nan),
        "wide": torch.rand(64, dtype=torch.float64),
        "frequencies": torch.rand(256),
    }


class Seen(nn.Module):
    """A layer that counts on in one buffer, for so many forward passes, and has some that stay."""

    def __init__(self, forwards: int = 99) -> None:
        super().__init__()
        self.forwards = forwards
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 1)
        self.register_buffer("seen", torch.full((1,), torch.inf))
        for name, value in constants().items():
            self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Tensor:
        if self.forwards:
            self.forwards -= 1
            self.seen.copy_(torch.where(self.seen.isinf(), 0, self.seen) + x.sum())
        return self.layer(x)


def trained(delay: int, updates: int, where: Sequence[int]) -> tuple[Seen, Seen]:
    """The model after training, and as it was evaluated before the end."""
    kind = "hierarchical" if len({*where}) < len(where) else "flat"
    strategy = {"local": {"steps": 2, "delay": delay}, "gradients": {"transport": kind}}
    model, evaluated = Seen(), Seen()
    hosts = on_hosts(where) if len(where) > 1 else nullcontext()
    optimizer = SGD(model.parameters(), lr=0.1)
    with hosts, slipstream.accelerate(model, optimizer, None, strategy) as session:
        for update in range(updates):
            x = torch.full((2, 4), 1.0 + session.rank + update)
            session.backward(model(x).square().mean() * 0.01)
            session.step()
        with session.evaluating():
            evaluated.load_state_dict(model.state_dict())
    return model, evaluated


def check(models: Sequence[Seen]) -> None:
    for model in models:
        for name, value in constants().items():
            kept = model.get_buffer(name)
            assert torch.equal(kept.nan_to_num(7), value.nan_to_num(7)), name
        assert not torch.equal(model.layer.weight, Seen().layer.weight)
        assert torch.equal(model.layer.weight, models[0].layer.weight)


def test_training_of_one_rank_is_kept_beside_a_mask_of_infinite_values() -> None:
    model, evaluated = trained(0, 4, (0,))
    check([model])
    check([evaluated])


@pytest.mark.parametrize("where", [(0, 1, 2), (0, 0, 1)], ids=["each its own", "hosts"])
@pytest.mark.parametrize(("delay", "updates"), [(0, 4), (1, 5)], ids=["at once", "delayed"])
def test_what_no_rank_changes_keeps_its_bits(
    three: Ranks, delay: int, updates: int, where: tuple[int, ...]
) -> None:
    ends, evaluated = zip(*three.run(trained, delay, updates, where), strict=True)
    check(ends)
    check(evaluated)


def test_what_ranks_change_is_averaged_though_it_was_infinite(three: Ranks) -> None:
    models = [model for model, _ in three.run(trained, 0, 2, (0, 1, 2))]
    for model in models:
        # 8 values of 1 + rank, and of 2 + rank
        assert model.seen.item() == pytest.approx(8 * (1 + 2) + 16 * (0 + 1 + 2) / 3)


def written_at_the_start(local: dict[str, Any]) -> list[Seen]:
    """The model in evaluation and at the end; its buffer was written in the first forward alone."""
    model, evaluated = Seen(1), Seen()
    optimizer = SGD(model.parameters(), lr=0.1)
    with slipstream.accelerate(model, optimizer, None, {"local": local}) as session:
        for update in range(4):
            x = torch.full((2, 4), 1.0 + session.rank)
            session.backward(model(x).square().mean() * 0.01)
            session.step()
            if local.get("auto") and not update:
                training(session).decide(LocalConfig(steps=2), "as a test says")
        with session.evaluating():
            evaluated.load_state_dict(model.state_dict())
    return [model, evaluated]


MEAN, FIRST = 8 * (1 + 2 + 3) / 3, 8
"""Of what ranks write; and of the first rank, whose buffers all have while they warm up."""


@pytest.mark.parametrize(
    ("local", "seen"),
    [
        ({"steps": 1}, MEAN),
        ({"steps": 2}, MEAN),
        ({"steps": 2, "warm_up": 2}, FIRST),
        ({"auto": True}, FIRST),
    ],
    ids=str,
)
def test_what_ranks_change_in_the_first_forward_alone_is_alike_in_the_end(
    three: Ranks, local: dict[str, Any], seen: float
) -> None:
    for models in three.run(written_at_the_start, local):
        check(models)
        for model in models:
            assert model.seen.item() == pytest.approx(seen)


def test_a_mask_that_is_loaded_does_not_keep_ranks_apart(three: Ranks) -> None:
    check(three.run(with_a_loaded_mask))


def with_a_loaded_mask() -> Seen:
    model = Seen(0)
    model.mask.fill_(-torch.inf)
    optimizer = SGD(model.parameters(), lr=0.1)
    with slipstream.accelerate(model, optimizer, None, {"local": {"steps": 2}}) as session:
        model.load_state_dict(Seen().state_dict())
        for update in range(2):
            x = torch.full((2, 4), 1.0 + session.rank + update)
            session.backward(model(x).square().mean() * 0.01)
            session.step()
    return model


def test_a_buffer_that_is_gone_is_named() -> None:
    model = Seen()
    optimizer = SGD(model.parameters(), lr=0.1)
    session = slipstream.accelerate(model, optimizer, None, {"local": {"steps": 1}})
    session.backward(model(torch.ones(2, 4)).mean())
    model.frequencies = None
    with pytest.raises(UsageError, match="buffer frequencies was there at accelerate"):
        session.step()
    model.frequencies = constants()["frequencies"]
    session.close()


class Counted(nn.Module):
    """A layer that counts its forward passes, and a norm before it."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        out: Tensor = self.layers(x)
        return out


def counted(updates: int, parts_after: int | None = None) -> tuple[int, dict[str, Tensor]]:
    """The count, and the state in the end; of a run that goes on with its parts after some."""
    model, strategy = Counted(), {"local": {"steps": 4, "delay": 2}}
    parts: list[Any] = []
    for until in (updates,) if parts_after is None else (parts_after, updates):
        optimizer = SGD(model.parameters(), lr=0.1)
        with slipstream.accelerate(model, optimizer, None, strategy) as session:
            if parts:
                session.restore(parts)
            for update in range(session.updates, until):
                rows = torch.Generator().manual_seed(3 * update + session.rank)
                x = session.rank + torch.randn(8, 4, generator=rows)
                session.backward(model(x).square().mean())
                session.step()
            parts = [None, None]
            dist.all_gather_object(parts, session.checkpoint(sharded=True))
            count = int(model.count)
            state = {name: value.clone() for name, value in model.state_dict().items()}
    return count, state


def test_a_count_that_ranks_have_alike_goes_on_while_a_change_travels(two: Ranks) -> None:
    runs = two.run(counted, 16)
    assert [count for count, _ in runs] == [16, 16]
    resumed = two.run(counted, 16, 9)
    for (_, one), (_, other) in zip(runs, resumed, strict=True):
        assert all(torch.equal(value, other[name]) for name, value in one.items())


class Growing(nn.Module):
    """A norm, and a table that grows with the rows that it sees, as old rotary positions did."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.register_buffer("table", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > len(self.table):
            self.register_buffer("table", torch.ones(len(x)))
        out: Tensor = self.head(self.norm(x)) * self.table[: len(x), None]
        return out


def test_buffers_come_out_of_an_evaluation_that_has_changed_the_model() -> None:
    model = Growing()
    optimizer = SGD(model.parameters(), lr=0.1)
    with slipstream.accelerate(model, optimizer, None, {"local": {"steps": 1}}) as session:
        session.backward(model(torch.randn(3, 4)).square().mean())
        session.step()
        with torch.no_grad():
            for buffer in (*model.norm.buffers(), *model.head.buffers()):
                buffer += 1
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with session.evaluating():
            head, model.head = model.head, nn.Identity()  # type: ignore[assignment]
            model.eval()(torch.randn(9, 4))
        model.head = head
        model.register_buffer("table", torch.ones(3))  # one that has grown cannot meet
        assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())


def test_counters_are_those_of_training_after_an_evaluation_that_counts() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None))
    optimizer = SGD(model.parameters(), lr=0.1)
    with slipstream.accelerate(model, optimizer, None, {"local": {"steps": 9}}) as session:
        for _ in range(3):
            session.backward(model(torch.randn(5, 4)).square().mean())
            session.step()
        with session.evaluating():
            update_bn([torch.randn(5, 4)], model)
            assert model[1].num_batches_tracked == 1
        assert model[1].num_batches_tracked == 3


class Odd(nn.Module):
    """Has a complex buffer, and one that knows the least values of the classes it has seen."""

    turn: Tensor
    nearest: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 1)
        self.register_buffer("turn", torch.ones(3, dtype=torch.complex64))
        self.register_buffer("nearest", torch.full((4,), torch.inf))

    def forward(self, x: Tensor, seen: int) -> Tensor:
        self.turn.add_(x.mean() * 1j)
        self.nearest[seen] = x.mean()
        return self.layer(x)


def trained_oddly(delay: int, where: Sequence[int]) -> list[Odd]:
    """The model in evaluation and in the end: rank r sees class r, and all of them class 3."""
    kind = "hierarchical" if len({*where}) < len(where) else "flat"
    strategy = {"local": {"steps": 4, "delay": delay}, "gradients": {"transport": kind}}
    model, evaluated = Odd(), Odd()
    with (
        on_hosts(where),
        slipstream.accelerate(model, SGD(model.parameters(), 0.1), None, strategy) as session,
    ):
        for update in range(4 + delay):
            x = torch.full((2, 4), 1.0 + session.rank)
            if update < 4:
                seen = session.rank if update else 3
                session.backward(model(x, seen).square().mean() * 0.01)
            else:  # a change travels
                session.backward(model.layer(x).square().mean() * 0.01)
            session.step()
        with session.evaluating():
            evaluated.load_state_dict(model.state_dict())
    return [model, evaluated]


INF = torch.inf
ODD = {(0, 1, 2): (8.0, [1.0, 2.0, 3.0, 2.0]), (0, 0, 1): (20 / 3, [1.0, INF, 3.0, 5 / 3])}
"""Ranks of a host have the buffers of its first one, as under DistributedDataParallel."""


@pytest.mark.parametrize("where", ODD, ids=["each its own", "hosts"])
@pytest.mark.parametrize("delay", [0, 1])
def test_complex_buffers_meet_and_values_that_some_ranks_alone_know(
    three: Ranks, delay: int, where: Sequence[int]
) -> None:
    for models in three.run(trained_oddly, delay, where):
        for model in models:
            turned, nearest = ODD[tuple(where)]
            torch.testing.assert_close(model.turn, torch.full((3,), 1 + turned * 1j))
            torch.testing.assert_close(model.nearest, torch.tensor(nearest))


class Late(nn.Module):
    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.register_buffer("mean", None, persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = x.mean(0).detach()
        out: Tensor = self.layer(x)
        return out


@pytest.mark.parametrize("persistent", [True, False], ids=["learned", "a cache"])
def test_a_buffer_that_comes_later_is_refused_if_it_is_of_the_state(persistent: bool) -> None:
    model = Late(persistent)
    optimizer = SGD(model.parameters(), lr=0.1)
    session = slipstream.accelerate(model, optimizer, None, {"local": {"steps": 1}})
    session.backward(model(torch.ones(2, 4)).mean())
    refused = pytest.raises(UsageError, match=r"buffer mean came after accelerate\(\)")
    with refused if persistent else nullcontext():
        session.step()
    model.mean = None
    session.close()


class Nowhere(nn.Module):
    """The first rank alone has a mean of the class that it looks for; the other divides by zero."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 1)
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.copy_(x[:0].mean(0)[:2] if x[0, 0] > 1 else x.mean(0)[:2])
        out: Tensor = self.layer(x)
        return out


def trained_from_nowhere() -> int:
    model = Nowhere()
    optimizer = SGD(model.parameters(), lr=0.1)
    with slipstream.accelerate(model, optimizer, None, {"local": {"steps": 2}}) as session:
        for _ in range(4):
            session.backward(model(torch.full((2, 4), 1.0 + session.rank)).mean())
            session.step()
        return session.updates


@pytest.mark.filterwarnings("ignore:.*was infinite or NaN")
def test_messages_are_alike_where_one_rank_alone_does_not_know_a_value(two: Ranks) -> None:
    assert two.run(trained_from_nowhere) == [4, 4]
