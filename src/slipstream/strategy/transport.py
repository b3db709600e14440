"""Transports: how a segment travels between ranks."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from slipstream.strategy.setting import OneOf, Variant
from slipstream.strategy.split import ByBytesConfig, SplitConfig


class TransportVariant(Variant):
    """A transport, and what others need to know of it.

    Attributes:
        cpu_only: whether it sends the memory of CPUs alone.
        whole_gradients: whether a rank has the whole average between ``backward()`` and ``step()``.
        between_hosts: whether it sums inside hosts first, so that a codec works between them alone.
        searches: whether it stands for a search among the others.
    """

    cpu_only: ClassVar[bool] = False
    whole_gradients: ClassVar[bool] = True
    between_hosts: ClassVar[bool] = False
    searches: ClassVar[bool] = False


class FlatConfig(TransportVariant, exactness="reordered"):
    """The backend's own all-reduce over all ranks."""

    kind: Literal["flat"] = "flat"  # written out for type checkers: the planner looks it up


class DirectConfig(TransportVariant, exactness="reordered"):
    """Each rank sums a share of every segment, and sends the sum to all others. On CPUs only.

    Receives are posted before backward begins, so messages wait neither for their receiver nor, hop
    by hop, for a core. Sums are taken in rank order: the same bits on all ranks and in every run.
    """

    kind: Literal["direct"] = "direct"
    cpu_only = True


class ShardedConfig(TransportVariant, exactness="reordered"):
    """Each rank updates a share of every parameter: gradients are summed to the ranks that own
    them, and parameters are gathered under the next forward, each before the layer that reads it.

    The bytes of an all-reduce, half of them beside backward and half beside forward, and optimizer
    state of 1/p the size. For optimizers that treat every value on its own (SGD, Adam and their
    kin), and for Lars and Lamb, whose norms are summed over ranks. Between ``backward()`` and
    ``step()`` no rank has the whole gradient: clip with ``session.clip_grad_norm_``.

    Source: ZeRO-1, https://arxiv.org/abs/1910.02054, and DeAR, https://arxiv.org/abs/2302.12445.
    """

    kind: Literal["sharded"] = "sharded"
    whole_gradients = False

    gather: SplitConfig = ByBytesConfig()
    """Which parameters travel together, in the order in which forward needs them."""

    replicated: float = Field(default=0.0, ge=0, le=1)
    """Part of the parameters' bytes, from the last registered on, that every rank updates: their
    gradients are exchanged whole, in backward, which is longer than forward. With a third, both
    halves of an exchange as long as the computation are hidden; optimizer state is 1/p of the
    rest alone."""

    elementwise: bool = False
    """Your promise that an optimizer which slipstream does not know treats every value on its
    own: its steps on a part of a parameter are those on the whole."""


class HierarchicalConfig(TransportVariant, exactness="reordered"):
    """Sums inside each host first, then exchanges the sums between the hosts. On CPUs only.

    Of the ranks of a host each exchanges another share, all at the same time: a host sends as much
    as one rank of ``direct`` would, however many ranks it has and however they are numbered. Sums
    are taken in a fixed order: the same bits on all ranks and in every run. A codec compresses what
    travels between the hosts, and nothing else.
    """

    kind: Literal["hierarchical"] = "hierarchical"
    cpu_only = between_hosts = True

    between: Annotated[FlatConfig | DirectConfig, OneOf()] = DirectConfig()
    """How shares travel between hosts: ``direct``, or ``flat``, the backend's ring, which is faster
    while cores are free and needs as many ranks on each host."""


class SharedMemoryConfig(TransportVariant, exactness="reordered"):
    """Ranks of one host sum in memory that they share, in rank order. On CPUs only."""

    kind: Literal["shared_memory"] = "shared_memory"
    cpu_only = True


class AutoConfig(TransportVariant, exactness="reordered"):
    """The fastest exact transport for this model and network, found during training.

    The first updates take turns under the transports that are exact here, on all ranks alike:
    ``flat``; between hosts ``direct``, ``sharded`` and its replicated part, and ``hierarchical``
    where hosts have several ranks; on one host ``shared_memory``, with and without ``overlap``. The
    fastest stays, or ``flat``, unless another was faster in every turn. With ``split: optimal``
    transports, splits and overlap are chosen together. ``session.report()`` shows the result,
    ``state_dict()`` keeps it.

    ``sharded`` is not tried where it would be refused, nor where the script looks at gradients
    between ``backward()`` and ``step()`` in the first updates. Where it is chosen, its rules hold
    from then on: clip with ``session.clip_grad_norm_``, save with the session's verbs.

    Where the speed of the network or of a rank changes for good, the search runs again. On CPUs.

    Example:
        >>> AutoConfig(updates=100).updates
        100
    """

    kind: Literal["auto"] = "auto"
    searches = True

    updates: int = Field(default=60, ge=24)
    """Updates that the search takes at most, but for 6 of each choice, of which there may be five.
    """

    replan: Literal[True, False, "may_shard"] = True
    """Search again where updates take 1.4 times as long as after the last search, or as short, for
    64 updates and 30 seconds of them. ``sharded`` is tried again only where it was chosen before,
    as it refuses what a script may do later; ``may_shard``: always."""


TransportConfig = Annotated[
    FlatConfig
    | DirectConfig
    | ShardedConfig
    | HierarchicalConfig
    | SharedMemoryConfig
    | AutoConfig,
    OneOf(family=TransportVariant),
]
"""A transport, or only its kind: ``flat`` for ``{kind: flat}``."""

DEFAULT_TRANSPORT = FlatConfig()
"""Of a strategy that names none."""
