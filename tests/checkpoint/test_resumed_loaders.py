"""Loaders whose workers live on, and datasets that are told the epoch: a resumed run takes the
batches of the one that nobody interrupted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

import slipstream
from slipstream.checkpoint import Checkpoints
from slipstream.errors import UsageError


def opened(loader: Any, strategy: Any = None) -> slipstream.Session[Any, Any]:
    model = torch.nn.Linear(1, 1)
    return slipstream.accelerate(model, torch.optim.SGD(model.parameters()), loader, strategy)


def lives_on(folder: Path, stop: int, ahead: bool, goes_back: bool = False) -> list[list[int]]:
    """The batches of two passes from a checkpoint to a checkpoint, or after going back to it."""
    rows: Any = range(9)
    loader = DataLoader(rows, 3, shuffle=True, num_workers=1, persistent_workers=True)
    strategy = {"data": {"prefetch": {"threads": True, "workers": 1}}} if ahead else {}
    with opened(loader, strategy) as session:
        saved = Checkpoints(folder)
        torch.manual_seed(99 if saved.paths else 5)
        saved.restore(session)
        batches = (batch.tolist() for _ in range(9) for batch in session.loader)
        found = list(islice(batches, stop))
        saved.save(session, wait=True)
        if goes_back:
            list(islice(batches, 4))
            batches.close()
            saved.restore(session)
            found += [batch.tolist() for batch in session.loader]
    return found


@pytest.mark.process
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("stop", [1, 3, 4])  # in the first pass, at its end, in the second one
def test_workers_that_live_on_draw_no_seed_again(stop: int, ahead: bool, tmp_path: Path) -> None:
    whole = lives_on(tmp_path / "whole", 7, ahead)
    first = lives_on(tmp_path / "parted", stop, ahead)
    assert first + lives_on(tmp_path / "parted", 7 - stop, ahead) == whole


@pytest.mark.process
def test_a_run_that_goes_back_to_its_first_pass_draws_the_seed_again(tmp_path: Path) -> None:
    whole = lives_on(tmp_path / "whole", 3, ahead=False)
    assert lives_on(tmp_path / "back", 1, ahead=False, goes_back=True) == whole


class Stream(IterableDataset[int]):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(10 * self.epoch, 10 * self.epoch + 4))


def stateful() -> StatefulDataLoader[int]:
    rows: Any = range(4)
    return StatefulDataLoader(rows, 2, sampler=DistributedSampler(rows, 1, 0))


def whole_batches() -> DataLoader[Any]:
    """A sampler draws whole batches; what it draws from is told the epoch."""
    rows: Any = torch.arange(4)
    share = DistributedSampler(rows, 1, 0)
    return DataLoader(rows, batch_size=None, sampler=BatchSampler(share, 2, drop_last=False))


def epochs_of(folder: Path, stop: int, kind: Callable[[], Any]) -> list[int]:
    """The samples of a run in the loop of docs/checkpoints.md, until so many updates are done."""
    found: list[int] = []
    with opened(loader := kind()) as session:
        saved = Checkpoints(folder)
        saved.restore(session)
        for epoch in range(session.updates // 2, 3):
            told = [loader.dataset, loader.sampler, getattr(loader.sampler, "sampler", None)]
            next(part for part in told if hasattr(part, "set_epoch")).set_epoch(epoch)
            for batch in session.loader:
                found += batch.tolist()
                session.backward(session.model(torch.ones(1, 1)).mean())
                session.step()
                saved.step(session, every=1)
                if session.updates == stop:
                    return found
    return found


@pytest.mark.parametrize("kind", [lambda: DataLoader(Stream(), 2), stateful, whole_batches])
def test_the_next_epoch_is_none_of_the_one_that_is_over(
    kind: Callable[[], Any], tmp_path: Path
) -> None:
    """Whether the dataset is told it, the sampler of a loader that keeps its place itself, or a
    sampler in another one."""
    whole = epochs_of(tmp_path / "whole", 6, kind)
    for stop in (1, 2, 3):
        first = epochs_of(tmp_path / str(stop), stop, kind)
        assert first + epochs_of(tmp_path / str(stop), 6, kind) == whole


def shuffled(folder: Path, stop: int) -> list[list[int]]:
    """The batches of some passes up to a checkpoint, or from there on; a sampler draws them, from a
    generator of its own."""
    rows: Any = torch.arange(9)
    order = RandomSampler(rows, generator=torch.Generator().manual_seed(7))
    loader = DataLoader(rows, batch_size=None, sampler=BatchSampler(order, 3, drop_last=False))
    with opened(loader) as session:
        saved = Checkpoints(folder)
        saved.restore(session)
        batches = (batch.tolist() for _ in range(9) for batch in session.loader)
        found = list(islice(batches, stop))
        saved.save(session, wait=True)
    return found


def test_whole_batches_are_drawn_as_before(tmp_path: Path) -> None:
    whole = shuffled(tmp_path / "whole", 8)
    first = shuffled(tmp_path / "parted", 4)
    assert first + shuffled(tmp_path / "parted", 4) == whole


def test_what_keeps_the_place_beside_the_session_is_refused(tmp_path: Path) -> None:
    sampler: Any = StatefulDistributedSampler([*range(8)], 1, 0)
    loader = DataLoader([*range(8)], sampler=sampler)
    with opened(loader) as session:
        saved = slipstream.Checkpoints(tmp_path, also={"sampler": sampler})
        with pytest.raises(UsageError, match="StatefulDistributedSampler, which keeps the place"):
            saved.restore(session)


class Numbers(list[int]):
    lengths = (1, 2, 3, 4) * 2


@pytest.mark.parametrize("strategy", [None, {"data": {"balance": {}}}], ids=["plain", "balance"])
def test_an_epoch_before_the_saved_one_is_a_warning(strategy: Any) -> None:
    """The script counts epochs by updates, of which a loss scale has skipped some."""
    data = Numbers(range(8))
    sampler: Any = DistributedSampler(data, 1, 0)
    loader = DataLoader(data, sampler=sampler)
    state: Any = None
    for resumes in (False, True):
        with opened(loader, strategy) as session:
            sampler.set_epoch(1)
            if resumes:
                session.restore(state)
                sampler.set_epoch(0)
                sets = "epoch 1, and the sampler is set to epoch 0"
                with pytest.warns(UserWarning, match=sets) as caught:
                    assert len([*session.loader]) == 8
                assert caught[0].filename == __file__
            else:
                batches = iter(session.loader)
                next(batches)
                state = session.checkpoint()
