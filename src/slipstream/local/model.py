"""A model whose ranks differ between meetings: its state is that of the outer parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from slipstream.errors import UsageError, warn
from slipstream.local.training import LocalTraining
from slipstream.parallel.whole_model import WholeModel
from slipstream.pytree import mapped

KEY = "local"
"""The entry of a rank's part in what ``checkpoint(sharded=True)`` returns as optimizer."""


class LocalModel(WholeModel):
    """Verbs of a model under ``local``: a state of the model holds the outer parameters."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(model, optimizer)
        self.training: LocalTraining | None = None

    def evaluating(self) -> AbstractContextManager[None]:
        """Inside, the model has the outer parameters."""
        assert self.training is not None
        return self.training.evaluating()

    def full_state_dict(self) -> dict[str, Any]:
        """``model.state_dict()`` with the outer parameters, the same on every rank."""
        assert self.training is not None
        with self.training.evaluating():
            state = super().full_state_dict()
            memo: dict[int, Any] = {}  # by which tensors that share memory still do
            copied: dict[str, Any] = mapped(state, lambda tensor: deepcopy(tensor, memo))
            return copied

    def load_full_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin anew from these parameters, on every rank."""
        assert self.training is not None
        super().load_full_state_dict(state)
        self.training.parameters_loaded()

    def sharded_optimizer_state_dict(self) -> dict[str, Any]:
        """This rank's optimizer, and all that it does not have in common with others."""
        assert self.training is not None
        part = super().sharded_optimizer_state_dict()
        ranks = self.training.ranks
        own = {"rank": ranks.rank, "ranks": ranks.count, "island": self.training.island.ranks}
        return {**part, **own, KEY: self.training.rank_state()}

    def load_full_optimizer_state_dict(self, state: dict[str, Any]) -> None:
        """Load this rank's part, if the state has those of all ranks, else a state for all."""
        assert self.training is not None
        self.training.own_state = None
        parts = state.get(KEY)
        if not isinstance(parts, list):  # a state for all, or one rank's part, which is refused
            super().load_full_optimizer_state_dict(state)
            return
        ranks, island = self.training.ranks, tuple(self.training.island.ranks)
        known = {tuple(part.get("island", (part["rank"],))) for part in parts}
        same = len(parts) == ranks.count and island in known
        if not same and ranks.rank == island[0]:
            warn(
                f"the state is of {len(parts)} ranks, of which {sorted(known)} were exact among "
                f"themselves; this run has {ranks.count}, of them {list(island)}: every rank goes "
                "on from the outer parameters, with the optimizer state of one of the old ranks; "
                "what they did since the last meetings, and what codecs have not sent, is lost",
            )
        # ranks of an island are alike
        part = parts[(ranks.rank if same else island[0]) % len(parts)]
        super().load_full_optimizer_state_dict(part["optimizer"])
        self.training.own_state = part[KEY] if same else None


def of_one_rank(state: dict[str, Any], rank: int) -> dict[str, Any]:
    """The optimizer's state for a run that averages gradients: that of the first rank, where those
    of ranks that train on their own were saved, with a warning on rank 0."""
    parts = state.get(KEY)
    if not isinstance(parts, list):
        return state
    if rank == 0:
        warn(
            f"the state is of {len(parts)} ranks under local, and this run averages gradients: it "
            "goes on from the outer parameters, with the optimizer state of rank 0; what the ranks "
            "did since their last meetings is lost",
        )
    first: dict[str, Any] = parts[0]["optimizer"]
    return first


def joined_ranks(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The parts of all ranks of a run, given in any order.

    Raises:
        UsageError: a rank's part is missing or there twice.
    """
    by_rank = sorted(parts, key=lambda part: int(part["rank"]))
    found = [part["rank"] for part in by_rank]
    if found != [*range(by_rank[0]["ranks"])]:
        raise UsageError(
            f"these are the parts of ranks {found}; allowed: those of all {by_rank[0]['ranks']} "
            "ranks of the saved run, once each; pass all files that it saved"
        )
    return {KEY: by_rank}
