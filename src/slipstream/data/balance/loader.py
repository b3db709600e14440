"""The user's ``DataLoader`` with its samples dealt to ranks by what they cost.

[Note: Epochs]
The order of an epoch follows the ``set_epoch`` of the user's own ``DistributedSampler``, whose
place the dealing takes; on one rank without such a sampler, passes over the loader are counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
)

from slipstream.data.balance.batches import BalancedBatches, Position
from slipstream.data.balance.cost import LengthCost
from slipstream.data.earlier_epoch import warn_of_an_earlier_epoch
from slipstream.data.loader_around import LoaderAround
from slipstream.data.own_iteration import iterates_itself
from slipstream.errors import ModelError, UsageError
from slipstream.strategy import BalanceConfig, Row


class SampleBalance:
    """Deals the samples of a loader, and knows the weight of the batch that was given out last.

    Args:
        loader: a ``DataLoader`` over a map-style dataset; on several ranks with a
            ``DistributedSampler`` over all of it. Batches have its ``batch_size`` on average.
        config: costs, and what the loss is a mean of.
        rank, ranks: this one, and how many get batches of their own.
        speeds: of the ranks; None: equal, unless ``config`` says.

    Raises:
        ModelError: the loader's order is not one that can be dealt, or the dataset does not say how
            long its samples are.
        UsageError: as `BalancedBatches`.

    Attributes:
        loader: the dealt loader; what is put around it is iterated by `over`.
        sampler: the user's, whose ``set_epoch`` is followed.

    Example:
        >>> class Texts(list):
        ...     lengths = [5, 1, 1, 3]
        >>> loader = DataLoader(Texts("abcd"), batch_size=2)
        >>> balance = SampleBalance(loader, BalanceConfig(), rank=0, ranks=1)
        >>> list(balance.over(balance.loader))
        [['a', 'b'], ['c', 'd']]
    """

    def __init__(
        self,
        loader: Any,
        config: BalanceConfig,
        *,
        rank: int,
        ranks: int,
        speeds: Sequence[float] | None = None,
    ) -> None:
        self.sampler = sampler = _checked_sampler(loader, rank, ranks)
        speeds = config.speeds if isinstance(config.speeds, tuple) else speeds
        if speeds is not None and len(set(speeds)) == 1:
            speeds = None
        self._config, self._ranks, self._speeds = config, ranks, speeds
        self._epochs = sampler if isinstance(sampler, DistributedSampler) else None
        shuffles = isinstance(sampler, RandomSampler) or getattr(sampler, "shuffle", False)
        tokens = config.max_tokens
        self._batches = BalancedBatches(
            _lengths(loader.dataset, config.speeds is not None),
            loss_lengths=_numbers(loader.dataset, "loss_lengths", "loss_length"),
            rank=rank,
            ranks=ranks,
            batch_size=loader.batch_size * ranks if tokens is None else None,
            max_tokens=tokens,
            cost=LengthCost(config.linear, config.quadratic),
            pads=config.pads,
            speeds=speeds,
            shuffle=bool(shuffles),
            drop_last=loader.drop_last,
            seed=_seed(loader),
        )
        self._position: Position = (0, 0)
        """Of the iteration that is under way, or of the next one."""
        self._taken, self._running = 0, False
        self._iteration = 0
        """Number of the latest iteration, or of the place that a state was restored to."""
        self._unweighed = 0
        """Batches that were taken since a weight was last asked for."""
        self.loader: DataLoader[Any] = DataLoader(
            loader.dataset,
            batch_sampler=self._batches,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            generator=loader.generator,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
        )

    def over(self, loader: Iterable[Any]) -> BalancedLoader:
        """Iterate over ``loader``, which gives the batches of `loader`, epoch after epoch."""
        return BalancedLoader(self, loader)

    @property
    def weight(self) -> float:
        """Weight of the loss of the batch that was given out last; 1 before the first one.

        Raises:
            UsageError: a batch before that one was not weighed: which of them the loss is of is not
                known.
        """
        if self._unweighed > self._running:
            raise UsageError(
                f"data.balance: {self._unweighed} batches were taken from session.loader since the "
                "last backward(), and each counts by its own samples: take one batch, call "
                "backward(), then take the next one; to read ahead, set data.prefetch"
            )
        self._unweighed = 0
        if not self._taken:
            return 1.0
        step, mean = self._taken - 1, self._config.mean
        return self._batches.weight(step, per=mean, position=self._position)

    @property
    def num_batches(self) -> int:
        """Number of batches of the iteration that is under way, or of the next one, to which the
        user's sampler may be set already."""
        set_anew = self._epochs is not None and self._epochs.epoch != self._position[0]
        under_way = self._running and not set_anew
        return self._batches.num_batches(self._position if under_way else self._following)

    @property
    def _following(self) -> Position:
        """Find where the next iteration begins: as the user's sampler, or the last pass, says."""
        epoch, first = self._position
        # one that a state has moved on is not over by a look at its first batch
        looked = bool(first) and self._taken == self._unweighed
        if self._running and not looked:  # the last pass was left early
            epoch, first = epoch + 1, 0
        if self._epochs is not None and self._epochs.epoch != epoch:
            epoch, first = self._epochs.epoch, 0
        return epoch, first

    def begin(self) -> int:
        """The next iteration begins; returns its number."""
        (was, done), running = self._position, self._running
        self._position = epoch, first = self._following
        if done and not running:  # a state was of the middle of a pass
            warn_of_an_earlier_epoch(epoch, was)
        self._taken = self._unweighed = 0
        self._running = True
        self._batches.set_epoch(epoch, start=first)
        self._iteration += 1
        return self._iteration

    def take(self, iteration: int) -> None:
        """A batch is given out.

        Raises:
            UsageError: its place is no more the one that batches are weighed by.
        """
        if iteration != self._iteration:
            raise UsageError(
                "data.balance: a batch was asked for in a loop over session.loader in which a "
                "state was restored, or another loop begun; begin another loop over "
                "session.loader, which goes on where the state says"
            )
        self._taken += 1
        self._unweighed += 1

    def end(self, iteration: int) -> None:
        """A pass is over."""
        if iteration != self._iteration:
            return
        self._position = self._position[0] + 1, 0
        self._taken, self._running = 0, False

    def state_dict(self) -> dict[str, Any]:
        """State to go on from: the epoch, and how many of its samples all ranks have had."""
        return self._batches.state_dict(self._taken, position=self._position)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on there, on any number of ranks, once the epoch is that of the state."""
        self._batches.load_state_dict(state)
        self._position = self._batches.position
        self._taken = self._unweighed = 0
        self._running = False
        self._iteration += 1

    def close(self) -> None:
        """Nothing was changed."""

    def report_rows(self) -> Sequence[Row]:
        """Report how evenly the ranks are predicted to compute."""
        notes = [f"{self._batches.idle():.1%} of the ranks' time is waiting, as predicted"]
        if self._speeds is not None:
            notes.append(f"speeds {', '.join(f'{speed:.2g}' for speed in self._speeds)}")
        value = f"by {self._config.mean}" + (", padded" if self._config.pads else "")
        return [Row("balance", value, "; ".join(notes))]


class BalancedLoader(LoaderAround):
    """Batches of a loader around `SampleBalance.loader`; other attributes are those of that one.

    Args:
        balance: is told of each epoch and each batch.
        loader: gives the batches.
    """

    def __init__(self, balance: SampleBalance, loader: Iterable[Any]) -> None:
        self._balance, self._loader = balance, loader

    @property
    def sample_balance(self) -> SampleBalance:
        """The balance that deals these batches out."""
        return self._balance

    def __len__(self) -> int:
        return self._balance.num_batches

    @property
    def sampler(self) -> Any:
        """The user's."""
        return self._balance.sampler

    def __iter__(self) -> Iterator[Any]:
        # at once, not with the first batch: a pass that is gone on with draws what it has drawn
        iteration = self._balance.begin()
        return self._given(iter(self._loader), iteration)

    def _given(self, batches: Iterator[Any], iteration: int) -> Iterator[Any]:
        for batch in batches:
            self._balance.take(iteration)
            yield batch
        self._balance.end(iteration)


def is_balanceable(loader: Any, rank: int, ranks: int) -> bool:
    """Whether `SampleBalance` takes it, with lengths of its dataset's own.

    Example:
        >>> is_balanceable(DataLoader([1, 2]), 0, 1)
        False
    """
    try:
        _checked_sampler(loader, rank, ranks)
        _lengths(loader.dataset, equal=False)
    except ModelError:
        return False
    return True


_PLAIN = (DistributedSampler, RandomSampler, SequentialSampler)


def _checked_sampler(loader: Any, rank: int, ranks: int) -> Any:
    """The sampler of a loader whose samples can be dealt.

    Raises:
        ModelError: they cannot.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        what = type(getattr(loader, "dataset", loader)).__name__
        raise ModelError(
            f"data.balance deals the samples of a map-style dataset in a torch DataLoader; this is "
            f"a {what}: give a DataLoader over a map-style dataset, or leave data.balance out"
        )
    if iterates_itself(loader) and not hasattr(loader, "state_dict"):  # torchdata's: its own place
        raise ModelError(
            f"data.balance reads the samples of a DataLoader itself; a {type(loader).__name__} "
            "iterates in its own way, which would be lost: give a DataLoader of torch's own class, "
            "or leave data.balance out"
        )
    sampler: Any = loader.sampler
    plain = isinstance(sampler, RandomSampler | SequentialSampler) and ranks == 1
    replaces = getattr(sampler, "replacement", False) or getattr(sampler, "_num_samples", None)
    spread = isinstance(sampler, DistributedSampler)
    if loader.batch_size is None or not (spread or (plain and not replaces)):
        outer = loader.batch_sampler if loader.batch_size is None else None
        seen = type(sampler if outer is None else outer).__name__
        allowed = "a DistributedSampler over the whole dataset"
        raise ModelError(
            f"data.balance draws the samples of all {ranks} ranks itself; the loader has a {seen}: "
            f"give it batch_size and {allowed}, or leave data.balance out"
        )
    if spread and (sampler.num_replicas, sampler.rank) != (ranks, rank):
        raise ModelError(
            f"the DistributedSampler is that of rank {sampler.rank} of {sampler.num_replicas}, "
            f"this rank gets the data of {rank} of {ranks}: DistributedSampler(dataset, "
            f"num_replicas={ranks}, rank={rank}), as slipstream.data_share(strategy) says"
        )
    base = next(kind for kind in _PLAIN if isinstance(sampler, kind))
    of_torchdata = type(sampler).__module__.startswith("torchdata.")  # draws as its base does
    if type(sampler).__iter__ is not base.__iter__ and not of_torchdata:
        raise ModelError(
            f"data.balance draws the samples itself, as a {base.__name__} does; a "
            f"{type(sampler).__name__} draws them in its own way, which would be lost: give the "
            f"loader a {base.__name__}, or leave data.balance out"
        )
    dataset: Any = loader.dataset
    drawn = getattr(sampler, "dataset", None) if spread else sampler.data_source
    if drawn is not None and len(drawn) != len(dataset):
        raise ModelError(
            f"data.balance draws from the whole dataset of {len(dataset)} samples, and the "
            f"{base.__name__} is over {len(drawn)}: make a torch.utils.data.Subset of what is to "
            "be drawn, for both, or leave data.balance out"
        )
    if len(dataset) < ranks:
        raise ModelError(
            f"data.balance: {len(dataset)} samples for {ranks} ranks; allowed: one for each rank, "
            "or more"
        )
    return sampler


def _seed(loader: DataLoader[Any]) -> int:
    """Read what the user's order of samples depends on; on several ranks it is the sampler's."""
    sampler: Any = loader.sampler
    if isinstance(sampler, DistributedSampler):
        return int(sampler.seed)
    generator = getattr(sampler, "generator", None) or loader.generator or torch.default_generator
    return int(generator.initial_seed())


def _lengths(dataset: Any, equal: bool) -> Sequence[int]:
    """Read the lengths of samples from a dataset's ``lengths`` or its column ``length``.

    Args:
        dataset: may be a ``Subset`` of one that says it.
        equal: whether samples of a dataset that says nothing count as equal.

    Raises:
        ModelError: it says nothing, or has another number of samples.
    """
    found = _numbers(dataset, "lengths", "length")
    if found is None and not equal:
        raise ModelError(
            f"data.balance: {type(dataset).__name__} does not say how long its samples are; give "
            "it an attribute lengths, a number for each sample (or a column length), or leave "
            "data.balance out"
        )
    return [1] * len(dataset) if found is None else found


def _numbers(dataset: Any, attribute: str, column: str) -> list[int] | None:
    """A number for each sample, as an attribute or a column says; None: neither is there.

    Raises:
        ModelError: they are no numbers, or those of another number of samples.
    """
    if isinstance(dataset, Subset):
        found = _numbers(dataset.dataset, attribute, column)
        return None if found is None else [found[index] for index in dataset.indices]
    numbers = getattr(dataset, attribute, None)
    if numbers is None and column in (getattr(dataset, "column_names", None) or ()):
        numbers = dataset[column]
    if numbers is None:
        return None
    try:
        found = [int(number) for number in numbers]
    except (TypeError, ValueError, RuntimeError):  # of something else, or a method
        raise ModelError(
            f"data.balance: {attribute} of {type(dataset).__name__} are a "
            f"{type(numbers).__name__}; allowed: a list of whole numbers, one for each sample"
        ) from None
    if len(found) != len(dataset):
        raise ModelError(
            f"data.balance: {type(dataset).__name__} has {len(dataset)} samples and "
            f"{len(found)} {attribute}; allowed: one for each sample"
        )
    return found
