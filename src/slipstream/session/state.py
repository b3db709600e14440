"""States of a session: those of its parts, gathered from and dealt to all ranks.

The format of a state, as plain values, is that of ``checkpoint``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from slipstream.checks.digest import Digest, digest
from slipstream.data.balance import SampleBalance
from slipstream.data.uneven_inputs import UnevenInputLoader
from slipstream.errors import UsageError, warn
from slipstream.gradients.compressed import NamedState
from slipstream.local.training import LocalTraining
from slipstream.optim.dealt_state import in_common
from slipstream.optim.shard_state import ShardState, is_part
from slipstream.parallel.dims import gather_objects
from slipstream.precision.model_precision import ModelPrecision
from slipstream.pytree import tensors
from slipstream.session import checkpoint_format
from slipstream.session.exchanging import GradientExchange
from slipstream.session.given import Given
from slipstream.strategy import Strategy, keeps_state
from slipstream.transport.consistency import agree, meet


class SessionState:
    """Saves and restores the parts of a session.

    Args:
        given: the user's model, and all ranks.
        exchange: has the ready order, the codecs' state and what the search has chosen.
        precision: has the loss scale.
        loader: knows where in the data the training is; None: the session has none.
        balance: knows that instead, if it deals out the samples.
        local: has the outer parameters, where ranks train on their own.
    """

    def __init__(
        self,
        given: Given,
        exchange: GradientExchange,
        precision: ModelPrecision,
        loader: UnevenInputLoader | None,
        balance: SampleBalance | None,
        local: LocalTraining | None,
    ) -> None:
        self.model, self.dims, self.precision = given.model, given.dims, precision
        self.loader, self.balance, self.local = loader, balance, local
        self.names, self.codec = exchange.names, exchange.codec
        self.engine, self.search = exchange.engine, exchange.search
        self.momentum = exchange.momentum

    def meet(self, verb: str) -> None:
        """Go on once all ranks are at the same verb of the session.

        Raises:
            MismatchError: another rank has called something else; on every rank alike.
        """
        if self.dims.control is not None:
            meet(verb, 0.0, self.dims.control)

    def state(self, steps: int, verb: str) -> dict[str, Any]:
        """Gather the state that ``Session.state_dict`` returns after ``steps`` updates; a
        collective, for what the user has called."""
        control, codecs = self.dims.control, []
        # from the strategy: all ranks must decide alike whether to gather, whatever they keep
        if control is not None and keeps_state(self.codec):
            self.meet(verb)
            codecs = checkpoint_format.gathered(self.engine.codec_state(), control)
        order = checkpoint_format.order_document(self.engine.order, self.names)
        if control is not None and self.dims.mesh.pipeline > 1:
            order = checkpoint_format.joined_order(order, control)
        search = self.search
        split = None if search is None else search.chosen_split
        transport = None if search is None else search.chosen_transport
        overlap = None if search is None else search.chosen_overlap
        return {
            "version": checkpoint_format.VERSION,
            "steps": steps,
            "split": None if split is None else split.document(full=True),
            "transport": None if transport is None else transport.document(full=True),
            "overlap": overlap,
            "speed": None if search is None else search.speed_state,
            "ready_order": order,
            "codecs": codecs,  # by rank
            "loss_scale": self.precision.state_dict(),
            "data": self._position(),
            "local": None if self.local is None else self.local.state(),
        }

    def _position(self) -> dict[str, Any] | None:
        if self.balance is not None:
            return self.balance.state_dict()
        return None if self.loader is None else self.loader.position()

    def _goes_to(self, position: dict[str, Any]) -> bool:
        """Go there with the next pass; False: this run cannot, and it is no begin of an epoch."""
        if self.balance is None and (self.loader is None or self.loader.go_to(position)):
            return True
        if self.balance is not None and "epoch" in position:
            self.balance.load_state_dict(position)
            return True
        return 0 in (position.get("batches"), position.get("samples"))

    def check(self, state: Mapping[str, Any]) -> None:
        """Refuse what `load` cannot load; a collective.

        Raises:
            UsageError: the state is another version's or another model's.
            MismatchError: ranks load different states, or are at different places of a round, as
                ``local.stretch`` lets them.
        """
        mesh, control = self.dims.mesh, self.dims.control
        sizes = {
            name: p.numel() * (2 if p.is_complex() else 1)
            for name, p in self.model.named_parameters()
        }
        ranks = mesh.data * mesh.model_parallel if mesh.model_parallel > 1 else None
        error = checkpoint_format.refusal(state, sizes, ranks)
        if control is not None:
            # one that is damaged may have no digest
            digest = (
                checkpoint_format.digest(self._in_common(state)) if error is None else str(error)
            )
            place = {} if self.local is None else self.local.place
            agree({**place, "state": digest}, control, error)
        elif error is not None:
            raise error

    def check_alike(
        self, state: Mapping[str, Any], steps: int, taken: int | None, began: int
    ) -> None:
        """Refuse a model and an optimizer that are not those of other ranks; a collective.

        Buffers may differ, and so may what ranks load that train on their own, but not where they
        do, after how many meetings. Ranks that share a model hold other parts of it.

        Args:
            state: of some parts.
            steps: updates so far.
            taken: updates when `Session.checkpoint` was called last; None: never.
            began: updates when the session was opened, or restored last.

        Raises:
            UsageError: this is the part of an optimizer that a single rank has saved; or the model
                itself, which was trained on.
            MismatchError: parameters or the optimizer's state differ between ranks, or these are at
                different places of a round without a session's state.
        """
        control, dims = self.dims.control, self.dims
        live = steps != began and self._is_live(state, steps, taken)
        error: Exception | None = _live_state() if live else None
        if control is None or dims.mesh.model_parallel > 1:
            if error is not None:
                raise error
            return
        if self.local is not None:
            if self.local.place and "session" not in state:  # else it replaces what ranks count
                agree({**self.local.place, "meetings": str(self.local.meetings)}, control)
            return
        try:
            is_part(state.get("optimizer", {}))
        except UsageError as caught:
            error = caught
        model = state.get("model", {})
        names = [name for name, _ in self.model.named_parameters() if name in model]
        found = {
            "the parameters to load": _digest([model[name] for name in names]),
            "the optimizer's state to load": _digest(state.get("optimizer")),
        }
        agree({what: str(value) for what, value in found.items()}, control, error)

    def _is_live(self, state: Mapping[str, Any], steps: int, taken: int | None) -> bool:
        """Whether a state is the model of this session itself, which has trained on since: nothing
        would go back but what is counted beside it."""
        then = state.get("session", {}).get("steps", taken)
        if self.local is not None or then in (None, steps):
            return False
        parameters = dict(self.model.named_parameters())
        pairs = [(t, parameters.get(name)) for name, t in state.get("model", {}).items()]
        return any(p is not None and _share_memory(t, p) for t, p in pairs)

    def _in_common(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Leave out what ranks have apart: the state of a loader that keeps its place, the end of
        a pass that is another rank's middle; where they train on their own, one alone may skip an
        update."""
        data = state.get("data") or {}
        kept = None if "own" in data else {key: data[key] for key in data if key != "over"}
        state = {**state, "data": kept}
        local = state.get("local")
        if self.local is None or local is None:
            return state
        common = {key: state[key] for key in state if key not in ("steps", "loss_scale")}
        if local["config"].get("stretch"):
            common["local"] = {key: local[key] for key in local if key != "updates"}
        return common

    def _trains_others(self, state: Mapping[str, Any]) -> bool:
        """Whether the saved run trained other parameters of this model: some were frozen, or are
        now, so that its choices are of other gradients."""
        order, apart = state["ready_order"], self.dims.mesh.model_parallel == 1
        return apart and order is not None and {*order["names"]} != {*self.names}

    def load(self, state: Mapping[str, Any]) -> int:
        """Restore what ``state()`` returned and `check` accepts; returns the number of updates."""
        keeps_codecs = self.dims.control is not None and keeps_state(self.codec)
        if state["codecs"] and not keeps_codecs:
            warn(
                "the state holds what codecs have not sent yet, but this run has no such codec: "
                "that part of the gradients is lost",
            )
        if (position := state.get("data")) is not None and not self._goes_to(position):
            warn(
                "the state has a place in the data as other settings count it (data.balance, or a "
                "loader with a state_dict), so the epoch begins anew, with samples that it has "
                "had; restore with the loader and the data settings of the run that saved it",
            )
        steps: int = state["steps"]
        self.precision.load_state_dict(state.get("loss_scale"))
        self.engine.updated(steps)
        order = checkpoint_format.order_of(state, self.names)
        if order is not None:
            self.engine.install(order)
        if self.search is not None and not self._trains_others(state):
            saved = {name: state.get(name) for name in ("split", "transport", "overlap")}
            chosen = {name: value for name, value in saved.items() if value is not None}
            gradients = Strategy.load({"gradients": chosen}).gradients
            self.search.resume(
                gradients.split if "split" in chosen else None,
                gradients.transport if "transport" in chosen else None,
                gradients.overlap,
                state.get("speed"),
            )
        if keeps_codecs:
            # after the last change of the layout, which says who serves which piece
            local: NamedState = self.momentum.buffers
            if codecs := state["codecs"]:
                if self.dims.mesh.model_parallel > 1:
                    codecs = [codecs[rank] for rank in self.dims.data_ranks]
                local = checkpoint_format.dealt_out(
                    codecs, self.dims.data_rank, self.dims.data_size
                )
            self.engine.load_codec_state(local)
        if self.local is not None:
            self.local.load(state.get("local"), steps)
        return steps


def agree_on_optimizer(given: Given) -> None:
    """Refuse an optimizer that is not that of other ranks, as where rank 0 alone has loaded its
    state: parameters are broadcast, and its state is not. A collective.

    Not where ranks share a model, or train on their own. Of an optimizer that deals its work out to
    ranks, each has another part.

    Raises:
        MismatchError: its settings or its state differ between ranks.
    """
    control, optimizer = given.dims.control, given.optimizer
    if control is None or given.dims.mesh.model_parallel > 1 or given.strategy.local is not None:
        return
    found = {
        f"{key} of the optimizer's group {number}": repr(plain)
        for number, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if isinstance(plain := _plain(value), int | float | str | None)
    }
    held = [p for group in optimizer.param_groups for p in group["params"]]
    own = getattr(optimizer, "state", {})  # one that is none of torch's may have none
    states = [own.get(p, {}) for p in held]
    kept = [sorted(map(str, state)) if isinstance(state, Mapping) else [] for state in states]
    # shares of a session that has failed differ, and are looked at when the next one takes them
    alike = [in_common(state, p) for state, p in zip(states, held, strict=True)]
    state = "shares" if isinstance(own, ShardState) else str(_digest(alike)) if any(kept) else ""
    rows = gather_objects((found, kept, state), "the comparison of the optimizers", control)
    if "shares" not in (of_rank for *_, of_rank in rows):
        if all(names == kept for _, names, _ in rows):
            found["the optimizer's state"] = state
        elif not all(of_rank for *_, of_rank in rows):
            found["the optimizer's state"] = (
                "there" if state else "not there: load it on every rank"
            )
    if any(row != rows[0] for row in rows):
        agree(found, control)


def _plain(value: object) -> object:
    is_number = isinstance(value, torch.Tensor) and value.numel() == 1
    return value.item() if is_number else value  # type: ignore[attr-defined]


def _live_state() -> UsageError:
    return UsageError(
        "the state to restore is the model itself, which has been trained on since: "
        "session.checkpoint() gives the tensors of the model, as torch's state_dict() does; "
        "keep copy.deepcopy(session.checkpoint()), or save it and read it again"
    )


def _share_memory(one: object, other: torch.Tensor) -> bool:
    if not isinstance(one, torch.Tensor) or one.device != other.device or not one.numel():
        return False
    try:
        return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() != 0
    except (NotImplementedError, RuntimeError):  # a tensor without a storage of its own
        return False


def _digest(state: object) -> Digest:
    """The digest of the tensors whose bits can be read: a quantized optimizer's cannot."""
    return digest(t for t in tensors(state) if type(t) in (torch.Tensor, nn.Parameter))
