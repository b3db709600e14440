"""``data.balance``: the loader's samples dealt by cost, and losses that count by what they hold."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Subset,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

import slipstream
from slipstream.calibration import rank_speed
from slipstream.data.balance import SampleBalance, is_balanceable
from slipstream.errors import ModelError, SlipstreamError, UsageError
from slipstream.strategy import BalanceConfig
from slipstream.trace import read

LENGTHS = np.random.default_rng(0).lognormal(2.0, 0.7, 83).astype(int).clip(1, 40).tolist()


class Sequences(Dataset[Any]):
    """Each sample is a sequence of as many vectors as it is long, and its number."""

    def __init__(self, lengths: list[int] | None = None) -> None:
        self.lengths = LENGTHS if lengths is None else lengths
        generator = torch.Generator().manual_seed(5)
        self._rows = [
            torch.randn(n, 3, generator=generator, dtype=torch.float64) for n in self.lengths
        ]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self._rows[index], index


class Silent(Sequences):
    """Does not say how long its samples are."""

    def __init__(self) -> None:
        super().__init__()
        del self.lengths


class Asked(Silent):
    """Has another thing of that name, as many have."""

    def lengths(self, indices: list[int]) -> list[int]:  # type: ignore[override]
        return indices


def collate(
    samples: list[tuple[torch.Tensor, int]],
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    rows = nn.utils.rnn.pad_sequence([row for row, _ in samples], batch_first=True)
    mask = torch.zeros(rows.shape[:2], dtype=torch.bool)
    for number, (row, _) in enumerate(samples):
        mask[number, : len(row)] = True
    return rows, mask, [index for _, index in samples]


def loader_of(
    rank: int, ranks: int, batch_size: int = 4, shuffle: bool = True, **settings: Any
) -> DataLoader[Any]:
    dataset = Sequences()
    sampler: DistributedSampler[Any] = DistributedSampler(
        dataset, num_replicas=ranks, rank=rank, shuffle=shuffle, seed=11
    )
    return DataLoader(
        dataset, batch_size=batch_size, sampler=sampler, collate_fn=collate, **settings
    )


def loss_of(output: torch.Tensor, mask: torch.Tensor, mean: str) -> torch.Tensor:
    """A mean over tokens, or over samples of the means of their tokens."""
    values = output[..., 0].square() * mask
    if mean == "tokens":
        return values.sum() / mask.sum()
    return (values.sum(1) / mask.sum(1)).mean()


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def gradient_of(model: nn.Module) -> torch.Tensor:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return torch.cat([gradient.flatten() for gradient in gradients])


def train(
    strategy: dict[str, Any],
    epochs: int = 2,
    batch_size: int = 4,
    stop: int | None = None,
    state: dict[str, Any] | None = None,
    **settings: Any,
) -> tuple[list[tuple[int, list[int]]], list[torch.Tensor], dict[str, Any], str]:
    """Samples by step, gradients of each update, the last state, the report."""
    rank, ranks = slipstream.data_share()
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loader = loader_of(rank, ranks, batch_size, **settings)
    seen: list[tuple[int, list[int]]] = []
    gradients: list[torch.Tensor] = []
    mean = strategy["data"]["balance"].get("mean", "samples")
    with slipstream.accelerate(model, optimizer, loader, strategy=strategy) as session:
        start = 0
        if state is not None:
            session.load_state_dict(state)
            start = state["data"]["epoch"]
        for epoch in range(start, epochs):
            session.loader.sampler.set_epoch(epoch)
            for rows, mask, indices in session.loader:
                session.backward(loss_of(session.model(rows), mask, mean))
                seen.append((epoch, indices))
                gradients.append(gradient_of(model))
                session.step()
                if len(seen) == stop:
                    return seen, gradients, session.state_dict(), session.report()
        return seen, gradients, session.state_dict(), session.report()


def expected(indices: list[int], mean: str) -> torch.Tensor:
    """The gradient of the samples of all ranks in one batch."""
    model, dataset = model_of(), Sequences()
    rows, mask, _ = collate([dataset[i] for i in indices])
    loss_of(model(rows), mask, mean).backward()
    return gradient_of(model)


SETTINGS: dict[str, dict[str, Any]] = {
    "samples": {"balance": {}},
    "tokens": {"balance": {"mean": "tokens"}},
    "unpadded": {"balance": {"mean": "tokens", "pads": False, "quadratic": 0.05}},
    "a limit of tokens": {"balance": {"mean": "tokens", "max_tokens": 60}},
    "read ahead": {"balance": {"mean": "tokens"}, "prefetch": {"threads": True, "workers": 1}},
    "a slow rank": {"balance": {"speeds": [1.0, 0.5, 1.0]}},
}


@pytest.mark.parametrize("data", SETTINGS.values(), ids=SETTINGS)
def test_the_gradient_is_that_of_all_samples_in_one_batch(three, data: dict[str, Any]) -> None:
    runs = three.run(train, {"data": data})
    mean = data["balance"].get("mean", "samples")
    steps = list(zip(*(run[0] for run in runs), strict=True))
    for number, by_rank in enumerate(steps):
        together = list(dict.fromkeys(i for _, indices in by_rank for i in indices))
        for run in runs:
            torch.testing.assert_close(
                run[1][number], expected(together, mean), rtol=1e-9, atol=1e-12
            )
    for epoch in range(2):
        indices = {i for by_rank in steps for e, part in by_rank if e == epoch for i in part}
        assert indices == set(range(len(LENGTHS)))
    orders = [
        [i for by_rank in steps for e, part in by_rank if e == epoch for i in part]
        for epoch in range(2)
    ]
    assert orders[0] != orders[1], "another epoch has another order"
    assert "balance" in runs[0][3]


@pytest.mark.parametrize("data", [SETTINGS["tokens"], SETTINGS["read ahead"]])
def test_a_training_goes_on_in_the_middle_of_an_epoch(three, data: dict[str, Any]) -> None:
    strategy = {"data": data}
    whole = three.run(train, strategy)
    parts = three.run(train, strategy, 2, 4, 9)
    state = parts[0][2]
    assert state["data"] == {"epoch": 1, "seed": 11, "samples": 24}
    later = three.run(train, strategy, 2, 4, None, state)
    for before, first, second in zip(whole, parts, later, strict=True):
        assert first[0] + second[0] == before[0]
        assert all(map(torch.equal, first[1] + second[1], before[1]))


def test_the_order_of_samples_goes_on_with_other_batches(three) -> None:
    """What is left of an epoch, with another batch size as on another number of ranks."""
    strategy: dict[str, Any] = {"data": {"balance": {}}}
    state = three.run(train, strategy, 1, 4, 3)[0][2]
    left = three.run(train, strategy, 1, 2, None, state)
    done = three.run(train, strategy, 1, 4, 3)
    counted = sorted(i for runs in (done, left) for run in runs for _, part in run[0] for i in part)
    assert sorted(set(counted)) == list(range(len(LENGTHS)))
    assert len(counted) - len(set(counted)) < 3  # fillers of the last update alone


def test_an_epoch_goes_on_on_another_number_of_ranks(three) -> None:
    """Three ranks, then one: the updates that are left are those of three ranks."""
    strategy: dict[str, Any] = {"data": {"balance": {}}}
    whole = three.run(train, strategy, 1)
    state = three.run(train, strategy, 1, 4, 3)[0][2]
    left, *_ = train(strategy, 1, 12, None, state)
    steps = zip(*(run[0] for run in whole), strict=True)
    updates = [{i for _, part in step for i in part} for step in steps]
    assert [set(indices) for _, indices in left] == updates[3:]


def traced(folder: str, balance: dict[str, Any] | None) -> bool:
    """Whether a trace says that the samples can be dealt."""
    data = {} if balance is None else {"data": {"balance": balance}}
    rank, ranks = slipstream.data_share()
    model, loader = model_of(), loader_of(rank, ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    strategy = {**data, "trace": {"steps": 2, "folder": folder}}
    with slipstream.accelerate(model, optimizer, loader, strategy=strategy) as session:
        for rows, mask, _ in session.loader:
            session.backward(loss_of(session.model(rows), mask, "samples"))
            session.step()
    return bool(read(f"{folder}/trace.json").meta["balanceable"]) if not rank else False


def test_a_trace_says_whether_samples_can_be_dealt(three, tmp_path) -> None:
    assert three.run(traced, str(tmp_path / "as it is"), None)[0]
    assert not three.run(traced, str(tmp_path / "dealt"), {})[0], "they are already"


class Clock:
    """Goes on with each piece of compute alone, by twice as much on rank 1."""

    def __init__(self) -> None:
        self.now = 0.0

    def piece(self, device: torch.device) -> Callable[[], None]:
        return self._compute

    def _compute(self) -> None:
        self.now += 0.25 if dist.get_rank() == 1 else 0.125


def measured() -> tuple[str, list[int]]:
    """The report, and the tokens of each batch."""
    balance = {"speeds": "measured", "pads": False}
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_speed, "piece_of_compute", clock.piece)
        patch.setattr(rank_speed, "perf_counter", lambda: clock.now)
        run = train({"data": {"balance": balance}}, epochs=1)
    return run[3], [sum(LENGTHS[i] for i in part) for _, part in run[0]]


def test_a_rank_that_is_measured_slower_gets_less(three) -> None:
    runs = three.run(measured)
    assert "speeds 1, 0.5, 1" in runs[0][0]
    tokens = [sum(amounts) for _, amounts in runs]
    assert tokens[1] / sum(tokens) == pytest.approx(0.2, abs=0.03)


def build(loader: Any, rank: int = 0, ranks: int = 2, **config: Any) -> SampleBalance:
    return SampleBalance(loader, BalanceConfig(**config), rank=rank, ranks=ranks)


class Scaled(DataLoader[Any]):
    def __iter__(self) -> Any:
        return (batch / 10 for batch in super().__iter__())


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


def spread(dataset: Any, rank: int = 0, ranks: int = 2, **settings: Any) -> DataLoader[Any]:
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, num_replicas=ranks, rank=rank)
    return DataLoader(dataset, sampler=sampler, **{"batch_size": 2, **settings})


class Backwards(DistributedSampler[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([*super().__iter__()][::-1])


WRONG: dict[str, tuple[Any, type[SlipstreamError], str]] = {
    "a list": (lambda: build([1, 2]), ModelError, "this is a list"),
    "a stream": (lambda: build(DataLoader(Stream())), ModelError, "this is a Stream"),
    "an order of one rank": (
        lambda: build(DataLoader(Sequences(), shuffle=True)),
        ModelError,
        "all 2 ranks itself; the loader has a RandomSampler",
    ),
    "weighted samples": (
        lambda: build(
            DataLoader(Sequences(), sampler=WeightedRandomSampler([1.0] * 83, 83)), ranks=1
        ),
        ModelError,
        "WeightedRandomSampler",
    ),
    "a sampler's own way": (
        lambda: build(DataLoader(Sequences(), sampler=Backwards(Sequences(), 2, 0), batch_size=2)),
        ModelError,
        "as a DistributedSampler does; a Backwards draws them in its own way",
    ),
    "a part of the samples": (
        lambda: build(
            DataLoader(Sequences(), sampler=DistributedSampler(range(40), 2, 0), batch_size=2)
        ),
        ModelError,
        "whole dataset of 83 samples, and the DistributedSampler is over 40",
    ),
    "a loader's own way": (
        lambda: build(Scaled(Sequences(), batch_size=4), ranks=1),
        ModelError,
        "a Scaled iterates in its own way",
    ),
    "no batches": (
        lambda: build(spread(Sequences(), batch_size=None)),
        ModelError,
        "the loader has a DistributedSampler: give it batch_size",
    ),
    "another rank's": (
        lambda: build(spread(Sequences(), rank=1)),
        ModelError,
        "that of rank 1 of 2, this rank gets the data of 0 of 2",
    ),
    "no lengths": (lambda: build(spread(Silent())), ModelError, "Silent does not say how long"),
    "lengths of others": (
        lambda: build(spread(_with_lengths([1, 2]))),
        ModelError,
        "83 samples and 2 lengths",
    ),
    "a method": (
        lambda: build(spread(Asked())),
        ModelError,
        "lengths of Asked are a method; allowed: a list of whole numbers",
    ),
    "lengths that are no numbers": (
        lambda: build(spread(_with_lengths([(1, 2)] * 83))),
        ModelError,
        "lengths of Sequences are a list; allowed: a list of whole numbers",
    ),
    "fewer samples than ranks": (
        lambda: build(spread(Subset(Sequences(), [3]))),
        ModelError,
        "1 samples for 2 ranks",
    ),
    "no samples": (
        lambda: build(spread(Subset(Sequences(), []))),
        ModelError,
        "0 samples for 2 ranks",
    ),
    "a long sample": (
        lambda: build(spread(Sequences()), max_tokens=20),
        UsageError,
        "sample [0-9]+ has [0-9]+ tokens, max_tokens is 20",
    ),
    "speeds of other ranks": (
        lambda: build(spread(Sequences()), speeds=(1.0, 0.5, 1.0)),
        UsageError,
        "a speed above 0 for each",
    ),
}


def _with_lengths(lengths: list[Any]) -> Sequences:
    dataset = Sequences()
    dataset.lengths = lengths
    return dataset


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_are_named(name: str) -> None:
    make, kind, message = WRONG[name]
    with pytest.raises(kind, match=message):
        make()


def test_lengths_are_those_of_the_dataset_its_subset_or_a_column() -> None:
    assert is_balanceable(spread(Sequences()), 0, 2)
    assert is_balanceable(spread(Subset(Sequences(), [1, 2, 3])), 0, 2)
    assert not is_balanceable(spread(Silent()), 0, 2)
    assert not is_balanceable(spread(Asked()), 0, 2), "which a trace asks, too"
    backwards = DataLoader(Sequences(), sampler=Backwards(Sequences(), 2, 0), batch_size=2)
    assert not is_balanceable(backwards, 0, 2), "so tune does not try it"
    build(spread(Silent()), speeds=(1.0, 0.5))  # samples count as equal

    class Table(Silent):
        column_names = ("text", "length")

        def __getitem__(self, index: Any) -> Any:
            return LENGTHS if index == "length" else super().__getitem__(index)

    assert is_balanceable(spread(Table()), 0, 2)
    own = StatefulDataLoader(Table(), sampler=spread(Table()).sampler, batch_size=2)
    assert is_balanceable(own, 0, 2), "torchdata's loader has a place, which balance keeps itself"


def test_without_a_sampler_of_several_ranks_passes_are_epochs() -> None:
    torch.manual_seed(0)
    loader = DataLoader(Sequences(), batch_size=4, shuffle=True, collate_fn=collate)
    balance = build(loader, ranks=1)
    batches = balance.over(balance.loader)
    epochs = [[indices for *_, indices in batches] for _ in range(2)]
    assert len(batches) == len(epochs[0]) == 21
    assert epochs[0] != epochs[1]
    state = copy.deepcopy(balance.state_dict())
    assert state == {"epoch": 2, "seed": 0, "samples": 0}
    for _ in batches:
        assert len(batches) == 21  # as progress bars ask
        break
    assert balance.state_dict() == {"epoch": 2, "seed": 0, "samples": 4}
    next(iter(batches))
    assert balance.state_dict()["epoch"] == 3, "a pass that was left early is over"
    assert balance.weight == 1.0


def test_a_look_at_a_batch_does_not_move_a_place_that_was_restored() -> None:
    loader = DataLoader(Sequences(), batch_size=4, shuffle=True, collate_fn=collate)
    balance = build(loader, ranks=1)
    batches = iter(balance.over(balance.loader))
    for _ in range(3):
        next(batches)
    state = copy.deepcopy(balance.state_dict())
    rest = [indices for *_, indices in batches]
    balance = build(loader, ranks=1)
    balance.load_state_dict(state)
    again = balance.over(balance.loader)
    next(iter(again))
    assert [indices for *_, indices in again] == rest


def test_on_one_rank_the_order_is_that_of_the_users_generator() -> None:
    def order(seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        loader = DataLoader(
            Sequences(), batch_size=4, shuffle=True, generator=generator, collate_fn=collate
        )
        return [i for *_, indices in build(loader, ranks=1).loader for i in indices]

    assert order(1) == order(1) != order(2)


def test_a_loss_may_count_other_tokens() -> None:
    """As of a causal model, whose loss leaves out the first token of each sample."""
    dataset: Any = Sequences([9, 5, 3, 3])
    dataset.loss_lengths = [8, 4, 2, 2]
    for rank in (0, 1):
        loader = spread(dataset, rank, collate_fn=collate)
        balance = SampleBalance(
            loader, BalanceConfig(mean="tokens", pads=False), rank=rank, ranks=2
        )
        for *_, indices in balance.over(balance.loader):
            assert balance.weight == 2 * sum(dataset.loss_lengths[i] for i in indices) / 16


@pytest.mark.parametrize("setting", ["balance", "prefetch", "cache"])
def test_without_a_loader_a_setting_that_needs_it_is_refused(setting: str) -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match=r"pass it: accelerate\(model, optimizer, loader\)"):
        slipstream.accelerate(model, optimizer, strategy={"data": {setting: {}}})


def test_the_last_update_may_be_left_out() -> None:
    balance = build(spread(Sequences(), drop_last=True), ranks=2)
    assert len(balance.over(balance.loader)) == 83 // 4


def taken_with_workers(count: int | None, state: dict[str, Any] | None = None) -> tuple[Any, Any]:
    """Batches of two epochs, read by a worker, up to so many, and the state then."""
    data: Any = torch.utils.data.TensorDataset(torch.arange(12.0))
    data.lengths = [1 + number % 3 for number in range(12)]
    seed = torch.Generator().manual_seed(1)
    loader = DataLoader(data, batch_size=3, shuffle=True, generator=seed, num_workers=1)
    balance = SampleBalance(loader, BalanceConfig(), rank=0, ranks=1)
    dealt, seen = balance.over(balance.loader), []
    if state is not None:
        balance.load_state_dict(state)
    for _ in range(2):
        for (batch,) in dealt:
            seen.append(batch.tolist())
            if len(seen) == count:
                return seen, balance.state_dict()
    return seen, None


@pytest.mark.process
def test_workers_go_on_in_the_middle_of_an_epoch() -> None:
    """torch asks a sampler for two iterators where workers read."""
    whole, _ = taken_with_workers(None)
    before, state = taken_with_workers(2)
    assert before + taken_with_workers(6, state)[0] == whole
