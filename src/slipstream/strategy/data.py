"""Settings of how batches come to the training. ``data`` implements them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from slipstream.strategy.setting import Exactness, Setting

_Speeds = Annotated[tuple[PositiveFloat, ...], Field(strict=False, examples=[[1.0, 1.0, 0.5]])]


class BalanceConfig(Setting):
    """Samples of each update are dealt to ranks by what they cost, so that none waits.

    Example:
        >>> BalanceConfig(mean="tokens").pads
        True
    """

    mean: Literal["samples", "tokens"] = "samples"
    """What the loss of a batch is a mean of: a rank's loss counts by how many of them it has.
    tokens: those that the dataset's ``loss_lengths`` say, if it has them, else all."""

    pads: bool = True
    """Whether samples of a batch are padded to the longest."""

    max_tokens: PositiveInt | None = None
    """Most tokens of a rank's batch, with padding: an update has as many samples as fit. null: it
    has those of the loader's ``batch_size`` on every rank."""

    linear: NonNegativeFloat = 1.0
    """What a sample costs for each token, in any unit."""

    quadratic: NonNegativeFloat = 0.0
    """What it costs for each pair of tokens, as in attention."""

    speeds: Literal["measured"] | _Speeds | None = None
    """Of the ranks, relative to each other: a slower one gets less. measured: by a piece of
    compute when the session begins; null: all alike."""


class PrefetchConfig(Setting):
    """Batches are read ahead, by workers that live as long as the session.

    Example:
        >>> PrefetchConfig(workers=2).depth
        'auto'
    """

    workers: Literal["auto"] | PositiveInt = "auto"
    """Processes that read, or threads. auto: from how long the first batches take to read and to
    compute with; none, if steps with their batches take longer than steps without."""

    depth: Literal["auto"] | PositiveInt = "auto"
    """Batches that are read ahead, in all; at most as many workers. auto: two for each worker,
    within memory."""

    threads: bool = False
    """Read in threads of this process: nothing is copied between processes. The dataset must allow
    reads from several threads at once."""

    to_device: bool = False
    """On CUDA, batches come on the device, copied while the one before is computed with."""

    timeout: PositiveFloat = 300.0
    """Seconds to wait for a batch before its workers count as hanging."""


class CacheConfig(Setting):
    """Samples that were read once are kept, for later epochs and the other ranks of the host.

    Example:
        >>> CacheConfig(gigabytes=2.0).to
        'memory'
    """

    to: Literal["memory", "disk"] = "memory"
    """``memory``: shared memory, until the last process ends; ``disk``: the folder for temporary
    files, for later runs, too."""

    gigabytes: PositiveFloat = 4.0
    """Most that is kept, of 2**30 bytes; later samples are read each time."""

    folder: str | None = Field(default=None, min_length=1)
    """Another folder."""


class DataConfig(Setting):
    """Settings of how batches come to the training.

    Example:
        >>> DataConfig(prefetch=PrefetchConfig()).active, DataConfig().active
        (True, False)
    """

    balance: BalanceConfig | None = None
    """Deal samples by what they cost; null: the loader's batches are used as they are."""

    cache: CacheConfig | None = None
    """Keep samples that were read; null: they are read in every epoch."""

    prefetch: PrefetchConfig | None = None
    """Read the loader's batches ahead, across epochs; null: the loader is used as it is."""

    @property
    def active(self) -> bool:
        """Whether anything differs from the user's loader."""
        return self != DataConfig()

    @property
    def exactness(self) -> Exactness:
        """Whether batches are the loader's, or the same samples are dealt to other ranks."""
        return "bitwise" if self.balance is None else "reordered"
