"""Batches of samples of different lengths, dealt to ranks by cost.

[Note: What stays as it was]
The samples of an update are drawn by a plain shuffle, as without balance: only who computes which
of them is chosen. So the statistics of SGD stay, and the gradient of an update is the same, if each
rank's mean counts by what it is a mean of (`BalancedBatches.weight`). The draw depends on the seed
and the epoch alone, so the order of samples is the same for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler

from slipstream.data.balance.cost import LengthCost
from slipstream.data.balance.deal import DealtItems, deal, deal_padded
from slipstream.errors import UsageError

LOOKED_AT = 256
"""Updates that a prediction deals."""
Position = tuple[int, int]
"""An epoch, and how many of its samples come before."""


class BalancedBatches(Sampler[list[int]]):
    """The numbers of the samples of each batch of this rank: a ``batch_sampler``.

    Every rank gets as many batches as all others, and every sample is in one batch of an epoch. In
    the last one there may be fewer samples than ranks: a rank without any computes one of another
    rank, with weight 0.

    Args:
        lengths: of all samples, in tokens.
        rank, ranks: this one, and how many there are.
        batch_size: samples of an update, on all ranks together; or None, with ``max_tokens``.
        max_tokens: most tokens of a rank's batch, with padding if it pads; an update then has as
            many samples as fit.
        cost: of a sample by its length: a `LengthCost`, or a function from lengths to costs.
        pads: whether samples of a batch are padded to the longest.
        speeds: of the ranks, relative; None: equal. A slower rank gets less.
        loss_lengths: tokens of each sample that the loss counts, 0 or more; None: ``lengths``.
        shuffle: draw the samples anew in every epoch; else they come in order.
        drop_last: leave out an update at the end that has fewer than ``batch_size`` samples.
        seed: the same on all ranks.

    Raises:
        UsageError: too few samples, a length that is not positive, a sample that is longer than
            ``max_tokens``, or settings that do not fit.

    Example:
        >>> batches = BalancedBatches([5, 1, 1, 3], rank=0, ranks=2, batch_size=4, shuffle=False)
        >>> list(batches), batches.weight(0, per="tokens")
        ([[0]], 1.0)
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        rank: int,
        ranks: int,
        batch_size: int | None = None,
        max_tokens: int | None = None,
        cost: LengthCost | Callable[[npt.NDArray[np.int64]], npt.ArrayLike] | None = None,
        pads: bool = False,
        speeds: Sequence[float] | None = None,
        loss_lengths: Sequence[int] | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int = 0,
    ) -> None:
        self._lengths = np.asarray(lengths, dtype=np.int64)
        counted = lengths if loss_lengths is None else loss_lengths
        self._loss_lengths = np.asarray(counted, dtype=np.int64)
        self._rank, self._ranks = rank, ranks
        self._batch_size, self._max_tokens = batch_size, max_tokens
        self._cost, self._pads = cost or LengthCost(), pads
        self._speeds = [1.0] * ranks if speeds is None else [float(speed) for speed in speeds]
        self._shuffle, self._drop_last, self._seed = shuffle, drop_last, seed
        self._epoch = self._first = 0
        self._begun: Position = (0, 0)
        self._check()
        self._plan = lru_cache(maxsize=4)(self._updates)
        self._dealt = lru_cache(maxsize=64)(self._deal)

    def __len__(self) -> int:
        """Batches of the next iteration; the same on every rank."""
        return self.num_batches(self.position)

    def num_batches(self, position: Position) -> int:
        """Batches of an iteration that begins there."""
        return len(self._plan(position))

    def __iter__(self) -> Iterator[list[int]]:
        self._begun = self.position
        return self._from(self._begun)

    def _from(self, begun: Position) -> Iterator[list[int]]:
        self._first = 0  # now, as a loader with workers begins twice before it asks for a batch
        for step, samples in enumerate(self._plan(begun)):
            yield self._dealt(begun, step)[self._rank] or samples[:1]

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration goes through."""
        return self._epoch

    @property
    def position(self) -> Position:
        """That epoch, and how many of its samples come before the iteration begins."""
        return self._epoch, self._first

    def set_epoch(self, epoch: int, *, start: int = 0) -> None:
        """The next iteration goes through this epoch, without its first ``start`` samples."""
        self._epoch, self._first = epoch, start

    def state_dict(self, taken: int = 0, *, position: Position | None = None) -> dict[str, Any]:
        """State from which training goes on after so many batches of this epoch, on any number of
        ranks, with batches of any size.

        Loaders read ahead, so only the training loop knows how many it has taken. ``position`` is
        that at which the iteration began; None: that of the latest one.
        """
        begun = position or (self._begun if self._begun[0] == self._epoch else self.position)
        samples = begun[1] + sum(map(len, self._plan(begun)[:taken]))
        return {"epoch": begun[0], "seed": self._seed, "samples": samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the state was taken, with its seed, so that no sample comes twice."""
        self._seed = state["seed"]
        self._plan.cache_clear()
        self._dealt.cache_clear()
        self.set_epoch(state["epoch"], start=state["samples"])

    def weight(
        self, step: int, *, per: Literal["samples", "tokens"], position: Position | None = None
    ) -> float:
        """Factor of this rank's mean loss in the ``step``-th batch of an iteration, with which the
        mean over ranks is the mean over all samples, or tokens, of the update.

        ``ranks * own / all``; no communication, as every rank knows all lengths. Tokens are those
        that the loss counts. ``position`` is that at which the iteration began; None: that of the
        latest one, or of the next one in another epoch.
        """
        begun = position or (self._begun if self._begun[0] == self._epoch else self.position)
        parts = self._dealt(begun, step)
        amounts = [self._amount(part, per) for part in parts]
        return self._ranks * amounts[self._rank] / max(sum(amounts), 1)

    def idle(self) -> float:
        """The predicted share of the ranks' time that is spent waiting for the slowest, in the
        first LOOKED_AT updates of the epoch."""
        start = self._epoch, 0
        busy = slowest = 0.0
        for step in range(min(len(self._plan(start)), LOOKED_AT)):
            seconds = [
                self._seconds(part) / speed
                for part, speed in zip(self._dealt(start, step), self._speeds, strict=True)
            ]
            busy += sum(seconds) / len(seconds)
            slowest += max(seconds)
        return 1 - busy / slowest if slowest else 0.0

    def _updates(self, position: Position) -> list[list[int]]:
        """The samples of each update from a position on, on all ranks together."""
        epoch, first = position
        order = np.arange(len(self._lengths))
        if self._shuffle:
            order = np.random.default_rng([self._seed, epoch]).permutation(len(order))
        samples: list[int] = order[first:].tolist()
        size = self._batch_size
        if size is None:
            return list(self._by_tokens(samples))
        end = len(samples) - len(samples) % size if self._drop_last else len(samples)
        return [samples[start : start + size] for start in range(0, end, size)]

    def _by_tokens(self, order: list[int]) -> Iterator[list[int]]:
        """Cut an order into batches as large as leave no rank with more than ``max_tokens``."""
        start = 0
        while start < len(order):
            low, high = 1, min(self._ranks, len(order) - start)
            while start + high < len(order) and self._fits(order[start : start + high]):
                low, high = high, min(2 * high, len(order) - start)
            if self._fits(order[start : start + high]):
                low = high
            while high - low > 1:
                middle = (low + high) // 2
                fits = self._fits(order[start : start + middle])
                low, high = (middle, high) if fits else (low, middle)
            yield order[start : start + low]
            start += low

    def _fits(self, samples: list[int]) -> bool:
        assert self._max_tokens is not None
        return all(self._tokens(part) <= self._max_tokens for part in self._parts(samples))

    def _deal(self, position: Position, step: int) -> DealtItems:
        return self._parts(self._plan(position)[step])

    def _parts(self, samples: list[int]) -> DealtItems:
        """The samples of each rank."""
        costs = np.asarray(self._cost(self._lengths[samples]), dtype=np.float64)
        if self._pads and len(samples) >= self._ranks:
            # the longest go to another rank each time, which has their memory to hold
            first = samples[0] % self._ranks
            dealt = deal_padded(costs, self._speeds[first:] + self._speeds[:first])
            dealt = dealt[self._ranks - first :] + dealt[: self._ranks - first]
        else:
            dealt = deal(costs, self._speeds)
        return [[samples[item] for item in part] for part in dealt]

    def _seconds(self, part: list[int]) -> float:
        costs = np.asarray(self._cost(self._lengths[part]), dtype=np.float64)
        return float(len(costs) * costs.max() if self._pads else costs.sum()) if part else 0.0

    def _tokens(self, part: list[int]) -> int:
        lengths = self._lengths[part]
        return int(len(part) * lengths.max() if self._pads else lengths.sum()) if part else 0

    def _amount(self, part: list[int], per: Literal["samples", "tokens"]) -> int:
        return len(part) if per == "samples" else int(self._loss_lengths[part].sum())

    def _check(self) -> None:
        count, ranks = len(self._lengths), self._ranks
        if not 0 <= self._rank < ranks or len(self._speeds) != ranks or min(self._speeds) <= 0:
            raise UsageError(
                f"rank {self._rank} of {ranks}, speeds {self._speeds}; allowed: a rank from 0 to "
                f"{ranks - 1}, and a speed above 0 for each"
            )
        if (self._batch_size is None) == (self._max_tokens is None):
            raise UsageError(
                f"batch_size is {self._batch_size}, max_tokens {self._max_tokens}; allowed: one of "
                "them"
            )
        if count < ranks:
            raise UsageError(
                f"{count} samples for {ranks} ranks; allowed: one for each rank, or more"
            )
        if self._drop_last and count < (self._batch_size or 0):
            raise UsageError(
                f"drop_last with {count} samples and batches of {self._batch_size} leaves none"
            )
        if self._batch_size is not None and self._batch_size < ranks:
            raise UsageError(
                f"batch_size is {self._batch_size}, for {ranks} ranks together; allowed: {ranks} "
                "or more"
            )
        counted = len(self._loss_lengths), min(self._loss_lengths, default=0)
        if counted[0] != count or counted[1] < 0:
            raise UsageError(
                f"loss_lengths has {counted[0]} numbers, the smallest {counted[1]}; allowed: one "
                f"for each of {count} samples, 0 or more"
            )
        shortest, longest = int(self._lengths.argmin()), int(self._lengths.argmax())
        if self._lengths[shortest] < 1:
            raise UsageError(
                f"sample {shortest} has length {self._lengths[shortest]}; allowed: 1 or more"
            )
        if self._max_tokens is not None and self._lengths[longest] > self._max_tokens:
            raise UsageError(
                f"sample {longest} has {self._lengths[longest]} tokens, max_tokens is "
                f"{self._max_tokens}; cut or leave out longer samples, or raise max_tokens"
            )
