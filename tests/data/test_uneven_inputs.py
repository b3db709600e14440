"""The same number of batches on every rank: none lost, none changed, no hang."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import slipstream
from slipstream import comm
from slipstream.data.balance import SampleBalance
from slipstream.data.prefetch import prefetch
from slipstream.data.uneven_inputs import UnevenInputLoader
from slipstream.errors import MismatchError, ModelError, UsageError
from slipstream.strategy import BalanceConfig, PrefetchConfig
from slipstream.trace.recorder import Recorder
from tests.data.uneven_training import (
    RowStream,
    batches,
    loss_of,
    model_and_optimizer,
    reference,
    values_of,
)
from tests.harness.ranks import PerRank, Ranks


class Stream(IterableDataset[int]):
    """``length`` items, without a ``len()``."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


def loader_of(length: int, known: bool) -> Iterable[int]:
    return list(range(length)) if known else DataLoader(Stream(length), batch_size=None)


def epochs(length: int, known: bool, number: int = 2) -> list[list[tuple[int, bool, int]]]:
    """Of every batch: its value, whether it is a dummy batch, and the number of active ranks."""
    loader = UnevenInputLoader(loader_of(length, known), group=dist.group.WORLD)
    seen = [[(int(b), loader.dummy_batch, loader.active) for b in loader] for _ in range(number)]
    assert (loader.active, loader.dummy_batch) == (3, False)
    return seen


LENGTHS = {
    "equal": (3, 3, 3),
    "one each": (1, 1, 1),
    "the first is longest": (4, 2, 1),
    "the last is longest": (1, 1, 5),
    "two are longest": (1, 3, 3),
    "none at all": (0, 0, 0),
}


@pytest.mark.parametrize("known", [True, False], ids=["lengths known", "lengths unknown"])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_every_rank_gets_as_many_batches_as_the_longest_loader_has(
    three: Ranks, lengths: tuple[int, ...], known: bool
) -> None:
    steps = range(max(lengths))
    active = [sum(length > step for length in lengths) for step in steps]
    expected = [
        [(min(step, length - 1), step >= length, active[step]) for step in steps]
        for length in lengths
    ]
    assert three.run(epochs, PerRank(*lengths), known) == [[e, e] for e in expected]


def test_one_rank_without_a_length_is_enough_to_compare_step_by_step(three: Ranks) -> None:
    first, second, third = three.run(epochs, PerRank(3, 2, 1), PerRank(True, False, True), 1)
    assert first == [[(0, False, 3), (1, False, 2), (2, False, 1)]]
    assert second == [[(0, False, 3), (1, False, 2), (1, True, 1)]]
    assert third == [[(0, False, 3), (0, True, 2), (0, True, 1)]]


@pytest.mark.parametrize("known", [True, False], ids=["lengths known", "lengths unknown"])
@pytest.mark.parametrize("lengths", [(2, 0, 1), (0, 2, 0)])
def test_an_empty_loader_among_others_is_refused_on_every_rank(
    three: Ranks, lengths: tuple[int, ...], known: bool
) -> None:
    empty = [rank for rank, length in enumerate(lengths) if not length]
    for error in three.fail(epochs, PerRank(*lengths), known).values():
        assert type(error) is ModelError
        assert f"the loaders of ranks {empty} are empty" in str(error)
        assert "DistributedSampler" in str(error)


def break_off(length: int, known: bool) -> list[Any]:
    loader = UnevenInputLoader(loader_of(length, known), group=dist.group.WORLD)
    for step, _ in enumerate(loader):
        during = loader.dummy_batch, loader.active
        if step == 2:
            break
    after = loader.active, loader.dummy_batch
    return [during, after, [int(batch) for batch in loader]]


@pytest.mark.parametrize("known", [True, False], ids=["lengths known", "lengths unknown"])
def test_the_epoch_after_a_break_starts_afresh(three: Ranks, known: bool) -> None:
    long = [(False, 1), (3, False), [0, 1, 2, 3]]
    short = [(True, 1), (3, False), [0, 0, 0, 0]]
    assert three.run(break_off, PerRank(4, 1, 1), known) == [long, short, short]


def the_same_objects() -> bool:
    batches = [{"x": torch.ones(2)}, (1, "two"), None]
    seen = list(UnevenInputLoader(batches, group=dist.group.WORLD))
    return len(seen) == 3 and all(a is b for a, b in zip(seen, batches, strict=True))


def test_batches_are_the_users_objects(two: Ranks) -> None:
    assert two.run(the_same_objects) == [True, True]


def detached() -> list[int]:
    loader = UnevenInputLoader([1, 2, 3][: dist.get_rank() + 1], group=dist.group.WORLD)
    loader.detach()
    return list(loader)


def test_a_detached_loader_is_the_users_own(three: Ranks) -> None:
    assert three.run(detached) == [[1], [1, 2], [1, 2, 3]]


def test_one_process_gets_its_own_batches() -> None:
    generator = (number for number in range(3))
    assert list(UnevenInputLoader(generator, group=None)) == [0, 1, 2]
    assert list(UnevenInputLoader([], group=None)) == []


def test_other_attributes_are_those_of_the_users_loader() -> None:
    plain = DataLoader(TensorDataset(torch.arange(7)), batch_size=2, drop_last=True)
    loader = UnevenInputLoader(plain, group=None)
    assert len(loader) == 3
    assert loader.dataset is plain.dataset
    assert loader.sampler is plain.sampler
    with pytest.raises(AttributeError, match="no_such"):
        _ = loader.no_such
    with pytest.raises(TypeError, match="no len"):
        len(UnevenInputLoader(iter(()), group=None))


def test_on_start_is_called_and_every_wait_is_recorded() -> None:
    started, recorder = [], Recorder(0, 0, 2)
    loader = UnevenInputLoader(
        "ab", group=None, recorder=recorder, on_start=lambda: started.append(1)
    )
    for step, _ in enumerate(loader):
        assert started == [1]
        recorder.end_step()
        recorder.begin_step(step)
    assert list(loader) == ["a", "b"]
    assert started == [1, 1]
    names = [row[0] for row in recorder._rows]
    assert names.count("data_wait") == 3  # one before step 0 is not recorded


# With a session: training on the batches of all ranks.


def trained(
    length: int, known: bool, accumulate: int, num_epochs: int, num_losses: int = 1
) -> list[float]:
    model, optimizer, scheduler = model_and_optimizer()
    rows = batches(dist.get_rank(), length)
    loader = rows if known else DataLoader(RowStream(rows), batch_size=None)
    strategy = {"gradients": {"accumulate": accumulate, "split": "per_gradient"}}
    with slipstream.accelerate(model, optimizer, loader, strategy) as session:
        for _ in range(num_epochs):
            for batch in session.loader:
                for _ in range(num_losses):
                    session.backward(loss_of(session.model, batch) / num_losses)
                if session.step():
                    scheduler.step()
    return values_of(model)


@pytest.mark.parametrize("known", [True, False], ids=["lengths known", "lengths unknown"])
@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("lengths", [(3, 3), (5, 2), (1, 4)])
def test_uneven_ranks_train_as_one_process_on_all_batches(
    two: Ranks, lengths: tuple[int, int], accumulate: int, known: bool
) -> None:
    first, second = two.run(trained, PerRank(*lengths), known, accumulate, 2)
    assert first == second
    assert first != values_of(model_and_optimizer()[0])
    torch.testing.assert_close(first, reference(lengths, accumulate, 2), rtol=1e-12, atol=1e-14)


def test_gradients_of_two_backward_passes_add_up_on_uneven_ranks(two: Ranks) -> None:
    first, second = two.run(trained, PerRank(5, 2), True, 1, 1, 2)
    assert first == second
    torch.testing.assert_close(first, reference((5, 2), 1, 1), rtol=1e-12, atol=1e-14)


# With collectives in the model, as synchronised batch norm has them.


class MeanOfRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return MeanOfRanks.mean(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return MeanOfRanks.mean(gradient)

    @staticmethod
    def mean(x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total / dist.get_world_size()


def layers() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList([nn.Linear(3, 4), nn.Linear(4, 1)]).double()


def rows_of(rank: int, length: int) -> list[Tensor]:
    return [*torch.randn(length, 5, 3, generator=torch.Generator().manual_seed(rank)).double()]


def trained_in_common(length: int) -> list[float]:
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with slipstream.accelerate(model, optimizer, rows_of(dist.get_rank(), length)) as session:
        for x in session.loader:
            hidden = model[0](x)
            mean = MeanOfRanks.apply(hidden.mean(0))  # type: ignore[no-untyped-call]
            session.backward(model[1](torch.tanh(hidden - mean)).square().mean())
            session.step()
    return values_of(model)


def trained_by_rows(length: int) -> list[float]:
    """A loss that counts the rows of all ranks, as `docs/data.md` writes it."""
    model, optimizer, _ = model_and_optimizer()
    with slipstream.accelerate(model, optimizer, batches(dist.get_rank(), length)) as session:
        for batch in session.loader:
            total = loss_of(session.model, batch) * len(batch[0])
            rows = torch.tensor(0 if session.loader.dummy_batch else len(batch[0]))
            dist.all_reduce(rows)
            session.backward(total * session.loader.active / rows)
            session.step()
    return values_of(model)


def reference_in_common(lengths: tuple[int, int]) -> list[float]:
    """In one process: losses of dummy batches count for nothing, their part in means does."""
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(max(lengths)):
        rows = [rows_of(rank, n)[min(step, n - 1)] for rank, n in enumerate(lengths)]
        hidden = torch.stack([model[0](x) for x in rows])
        outputs = model[1](torch.tanh(hidden - hidden.mean((0, 1))))
        counting = [rank for rank, n in enumerate(lengths) if step < n]
        outputs[counting].square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return values_of(model)


@pytest.mark.parametrize("lengths", [(3, 2), (1, 3)])
def test_collectives_of_the_model_run_in_dummy_batches_too(
    two: Ranks, lengths: tuple[int, int]
) -> None:
    first, second = two.run(trained_in_common, PerRank(*lengths))
    assert first == second
    torch.testing.assert_close(first, reference_in_common(lengths), rtol=1e-12, atol=1e-14)


class Costly(list[int]):
    lengths = (1, 1, 1, 1)


def test_what_is_set_on_it_is_set_on_the_users_loader() -> None:
    """As a loop turns mixup off that has got the session's loader."""
    loader = DataLoader([1, 2, 3, 4], batch_size=2, collate_fn=sum)
    ahead = prefetch(loader, PrefetchConfig(threads=True, workers=1))
    around = UnevenInputLoader(ahead, group=None)
    assert [*around] == [3, 7]
    around.collate_fn = max
    assert (loader.collate_fn, [*around]) == (max, [2, 4])
    ahead.close()
    with pytest.raises(ValueError, match="batch_size attribute should not be set"):
        around.batch_size = 4


def test_what_is_set_on_it_reaches_the_loader_that_is_dealt() -> None:
    loader = DataLoader(Costly([1, 2, 3, 4]), batch_size=2, collate_fn=sum)
    balance = SampleBalance(loader, BalanceConfig(), rank=0, ranks=1)
    around = UnevenInputLoader(balance.over(balance.loader), group=None)
    around.collate_fn = max
    assert sum(around) == 6


def test_a_loss_that_counts_rows_of_all_ranks(two: Ranks) -> None:
    lengths = (5, 2)
    model, optimizer, _ = model_and_optimizer()
    by_rank = [batches(rank, length) for rank, length in enumerate(lengths)]
    for step in range(max(lengths)):
        there = [rows[step] for rows in by_rank if step < len(rows)]
        inputs, targets = map(torch.cat, zip(*there, strict=True))
        loss_of(model, (inputs, targets)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for values in two.run(trained_by_rows, PerRank(*lengths)):
        torch.testing.assert_close(values, values_of(model), rtol=1e-12, atol=1e-14)


class Uncopied:
    def __copy__(self) -> None:
        raise NotImplementedError


def taken_apart(length: int) -> list[tuple[int, int]]:
    """Of every batch: what the loop takes out of it, beside an object that is not to be copied."""
    rows = [
        {"labels": [number, 0], "inner": ({"x": number},), "handle": Uncopied()}
        for number in range(length)
    ]
    loader = UnevenInputLoader(rows, group=dist.group.WORLD)
    return [(batch["labels"].pop(0), batch["inner"][0].pop("x")) for batch in loader]


def test_a_loop_may_take_entries_out_of_batches(two: Ranks) -> None:
    first, second = two.run(taken_apart, PerRank(4, 1))
    assert first == [(number, number) for number in range(4)]
    assert second == [(0, 0)] * 4


@dataclass
class Row:
    label: Any


def replaced(length: int, kind: Any, place: Any) -> list[int]:
    """Of every batch: what the loop puts another thing in the place of."""
    rows = [kind(label=torch.tensor(n)) for n in range(length)]
    batches = [row if place is None else {place: row} for row in rows]
    if place == 0:
        batches = [(row, 1) for row in rows]
    found = []
    for batch in UnevenInputLoader(batches, group=dist.group.WORLD):
        row = batch if place is None else batch[place]
        row.label = row.label.item()
        found.append(row.label)
    return found


@pytest.mark.parametrize("place", [None, 0, "row"], ids=["alone", "in a tuple", "in a mapping"])
@pytest.mark.parametrize("kind", [Row, SimpleNamespace])
def test_a_loop_may_set_attributes_of_batches(two: Ranks, kind: Any, place: Any) -> None:
    assert two.run(replaced, PerRank(3, 1), kind, place) == [[0, 1, 2], [0, 0, 0]]


class Values:
    """As an array is, whose copy is one of all of them."""

    def __init__(self) -> None:
        self.label = 1

    def __array__(self) -> None: ...


def given_twice(length: int) -> bool:
    batches = [Values() for _ in range(length)]
    found = [*UnevenInputLoader(batches, group=dist.group.WORLD)]
    assert len(found) == 3
    return all(one is batches[min(n, length - 1)] for n, one in enumerate(found))


def test_values_in_objects_are_not_copied(two: Ranks) -> None:
    assert two.run(given_twice, PerRank(3, 1)) == [True, True]


def left_out_by_all(length: int) -> str:
    loader = UnevenInputLoader(list(range(length)), group=dist.group.WORLD)
    present = iter(loader)
    next(present)  # has no backward()
    assert next(present) == 1
    assert loader.active == 2
    next(present)
    with pytest.raises(UsageError) as caught:
        _ = loader.active
    return str(caught.value)


def test_a_batch_that_all_ranks_leave_out_needs_its_backward(two: Ranks) -> None:
    for text in two.run(left_out_by_all, PerRank(4, 2)):
        assert "a batch that all ranks leave out needs its backward(), too" in text


def with_other_rates(local: bool) -> str:
    """A scheduler that each rank steps by a metric of its own."""
    model, optimizer, _ = model_and_optimizer()
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    strategy = {"local": {}} if local else {}
    rows = batches(dist.get_rank(), 2)
    with slipstream.accelerate(model, optimizer, rows, strategy) as session:
        for epoch in range(3):
            try:
                for batch in session.loader:
                    session.backward(loss_of(session.model, batch))
                    session.step()
            except MismatchError as error:
                return str(error)
            scheduler.step(float(epoch * (2 * dist.get_rank() - 1)))
    return "trained"


def test_ranks_with_other_learning_rates_are_refused_where_a_pass_begins(two: Ranks) -> None:
    texts = two.run(with_other_rates, False)
    for rank, text in enumerate(texts):
        assert "pass 3 of session.loader begins with other learning rates on rank 1" in text
        assert f"(on rank {rank}: [0.{'0' * rank}1" in text
        assert "ReduceLROnPlateau, with its mean over ranks" in text
    assert two.run(with_other_rates, True) == ["trained"] * 2


def centred(model: torch.nn.Module, rows: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """A norm over all ranks, as synchronised batch norm."""
    return model(rows - mean).square().mean()  # type: ignore[no-any-return]


def trained_across(length: int, strategy: dict[str, Any]) -> list[float]:
    model, optimizer, _ = model_and_optimizer()
    first = torch.nn.Linear(3, 3).double()
    both = torch.nn.ModuleList([first, model])
    optimizer.add_param_group({"params": list(first.parameters())})
    rows_here = batches(dist.get_rank(), length)
    with slipstream.accelerate(both, optimizer, rows_here, strategy) as session:
        for rows, _ in session.loader:
            hidden = first(rows)
            session.backward(centred(model, hidden, comm.all_reduce_mean(hidden.mean(0))))
            session.step()
    return values_of(both)


REPLAY = {"checks": {"every": 1, "replay": True}}


@pytest.mark.parametrize("strategy", [{}, REPLAY], ids=str)
def test_a_dummy_batch_takes_part_where_the_graph_meets_other_ranks(
    two: Ranks, strategy: dict[str, Any]
) -> None:
    lengths = (4, 2)
    model, optimizer, _ = model_and_optimizer()
    first = torch.nn.Linear(3, 3).double()
    optimizer.add_param_group({"params": list(first.parameters())})
    by_rank = [batches(rank, length) for rank, length in enumerate(lengths)]
    for step in range(max(lengths)):
        hidden = [first(rows[min(step, len(rows) - 1)][0]) for rows in by_rank]
        mean = torch.stack([h.mean(0) for h in hidden]).mean(0)
        losses = [centred(model, h, mean) for h, n in zip(hidden, lengths, strict=True) if step < n]
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = values_of(torch.nn.ModuleList([first, model]))
    for values in two.run(trained_across, PerRank(*lengths), strategy):
        torch.testing.assert_close(values, expected, rtol=1e-12, atol=1e-14)


def rare_weights(length: int, strategy: dict[str, Any]) -> list[float]:
    """Of a layer that only the last batch of each rank uses, after each update; it is in no loss of
    a rank that has run out, whose graph meets other ranks all the same."""
    torch.manual_seed(0)
    both = nn.ModuleDict({"common": nn.Linear(3, 1), "rare": nn.Linear(3, 1)}).double()
    optimizer = torch.optim.AdamW(both.parameters(), lr=0.1, weight_decay=0.5)
    rows_here = [(torch.ones(2, 3).double() * (step + 1), step) for step in range(length)]
    weights = []
    with slipstream.accelerate(both, optimizer, rows_here, strategy) as session:
        for rows, step in session.loader:
            out = both["common"](rows)
            loss = (out - comm.all_reduce_mean(out.mean())).square().mean()
            if step == 1:
                loss = loss + both["rare"](rows).mean()
            session.backward(loss)
            if session.step():
                weights.append(both["rare"].weight.detach().sum().item())
    return weights


@pytest.mark.parametrize(
    "strategy",
    [
        {},
        {"gradients": {"overlap": False}},
        {"gradients": {"transport": "sharded"}},
        {"gradients": {"codec": "onebit"}},
        {"gradients": {"accumulate": 2}},
    ],
    ids=str,
)
def test_a_dummy_batch_uses_no_parameter(two: Ranks, strategy: dict[str, Any]) -> None:
    """An optimizer would decay it."""
    used = 2 // strategy.get("gradients", {}).get("accumulate", 1)
    for weights in two.run(rare_weights, PerRank(6, 2), strategy):
        assert len(set(weights)) == used, "decayed"
        assert len(set(weights[used - 1 :])) == 1


def warned_of(own: Any, batches_per_pass: int = 2) -> list[tuple[str, str]]:
    """What two passes over these batches warn of, and which file the warning names."""
    loader = UnevenInputLoader([own] * batches_per_pass, group=dist.group.WORLD)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert len([*loader]) == batches_per_pass
    return [(str(w.message), w.filename) for w in caught]


def test_ranks_that_train_on_the_same_data_are_warned_of_once(three: Ranks) -> None:
    """As a loader with shuffle=True gives them, where all ranks have one seed."""
    ones, twos = {"x": torch.ones(2, 3)}, {"x": torch.full((2, 3), 2.0)}
    found = three.run(warned_of, PerRank(ones, twos, ones))
    assert found[1:] == [[], []]
    [(text, file)] = found[0]
    assert text.startswith("ranks 0, 2 got the same first batch, bit for bit")
    assert "slipstream.data_share()" in text
    assert file == __file__


def test_batches_that_differ_or_cannot_be_compared_are_no_reason_to_warn(three: Ranks) -> None:
    assert three.run(warned_of, PerRank(*[torch.tensor([float(i)]) for i in range(3)])) == [[]] * 3
    assert three.run(warned_of, ["a", 1]) == [[]] * 3  # no tensors
    labels = [(text, torch.zeros(2)) for text in "abc"]
    assert three.run(warned_of, PerRank(*labels)) == [[]] * 3
    assert three.run(warned_of, (object(), torch.zeros(2))) == [[]] * 3  # may differ unseen
    assert three.run(warned_of, torch.zeros(0, 3)) == [[]] * 3
    assert three.run(warned_of, torch.eye(3).to_sparse()) == [[]] * 3
