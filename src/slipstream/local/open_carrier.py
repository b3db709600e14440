"""The carrier of islands that come and go: goes on with those that are left, admits new ones."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pickle import UnpicklingError
from typing import Any, Protocol
from zlib import crc32

import torch

from slipstream.codecs import Ranks
from slipstream.codecs.compressor import is_finite
from slipstream.errors import ExchangeError, ModelError
from slipstream.local.carrier import Exchange
from slipstream.local.rendezvous import Rendezvous
from slipstream.local.view import View
from slipstream.strategy import FlatConfig
from slipstream.transport.channel import Label
from slipstream.transport.flat import FlatTransport
from slipstream.transport.requests import AllReduce, Broadcast, ExchangeSteps
from slipstream.transport.transport import run

PART = 4 * 2**20
"""Bytes of a state that travel at a time."""
LEAVE = 2.0
"""Seconds for an exchange under way to end, where a script fails."""
REPEATS = 3
"""Of one exchange, until islands give up."""


class Resident(Protocol):
    """A training, which lives on an island."""

    def save(self) -> Mapping[str, Any]:
        """Collect all that another island needs in order to take part; nothing is on its way."""

    def settle(self, state: Mapping[str, Any], *, again: bool) -> None:
        """Go on from another island's state; ``again``: with what this one has done since."""

    def drop(self) -> None:
        """Take back what is on its way and that the others have gone on without."""

    def meet_as(self, islands: Ranks, slot: int) -> None:
        """Be one of so many from now on, with a share of the data."""


@dataclass(slots=True)
class _Pending:
    """An exchange under way, in a thread; ``asked``: as `Rendezvous.agree` says."""

    label: Label
    exchange: Exchange
    asked: int | None = None
    error: Exception | None = None
    # the thread does not know it, once Ctrl-C has interrupted a join (Python 3.11)
    ended: threading.Event = field(default_factory=threading.Event)


class OpenCarrier:
    """Carries out each exchange on all islands of a view, or on none of them.

    Args:
        rendezvous: says who they are.
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._rendezvous = rendezvous
        self._view = View(0, (), (), (), 0)
        self._transport: FlatTransport | None = None
        self._number = 0  # of exchanges in this view
        self._pending: _Pending | None = None
        self._latest: _Pending | None = None  # whose thread may not have ended
        self._asked = 0
        self._repeats = 0  # of an exchange, although nobody was gone
        self.resident: Resident | None = None

    # The carrier.

    fixed = False

    def start(self, label: Label, exchange: Exchange) -> None:
        self._pending = self._begin(_Pending(label, exchange))

    @property
    def arrived(self) -> bool:
        return self._pending is None or self._pending.ended.is_set()

    def wait(self) -> None:
        while (pending := self._pending) is not None:
            pending.ended.wait()
            if pending.error is not None:
                raise pending.error
            if pending.asked is not None:
                self._asked, self._pending, self._repeats = pending.asked, None, 0
                return
            try:
                self._pending = None
                if self._go_on(pending.label.describe()):
                    self._pending = self._begin(pending)
            except BaseException as error:  # who waits once more must not take it for done
                what = f"{pending.label.describe()} was broken off: {error!r}"
                pending.error = error if isinstance(error, Exception) else ExchangeError(what)
                pending.ended.set()
                self._pending = pending
                raise

    def _begin(self, pending: _Pending) -> _Pending:
        pending.ended.clear()
        # a daemon: a script that fails while an island is silent must end
        threading.Thread(
            target=self._carry, args=(pending,), name="slipstream-meeting", daemon=True
        ).start()
        self._latest = pending
        return pending

    def _carry(self, pending: _Pending) -> None:
        try:
            pending.asked = self._attempt(pending.exchange)
        except Exception as error:
            pending.error = error
        finally:
            pending.ended.set()

    def _is_done(self, exchange: Exchange) -> bool:
        """Carry out an exchange that is not repeated; whether all islands do."""
        pending = self._begin(_Pending(Label("welcome", lambda: "the welcome"), exchange))
        pending.ended.wait()  # torch's own waits hear no Ctrl-C
        if pending.error is not None:
            raise pending.error
        return pending.asked is not None

    def _attempt(self, exchange: Exchange) -> int | None:
        """Carry out an exchange, if all islands do."""
        number, done = self._number, True
        self._number += 1
        try:
            if self._transport is not None:
                run(exchange(), self._transport)
            else:
                for _ in exchange():
                    pass
        except RuntimeError:
            done = False
            self._transport = None  # its connections close: others need not wait for the time limit
        return self._rendezvous.agree(self._view, number, done)

    # Views.

    @property
    def newcomers(self) -> bool:
        return self._asked > self._view.asked

    def join(self) -> None:
        """Join the islands, and take over their state."""
        self._enter(self._join(trained=False), again=False)

    def same(self, what: str, value: str) -> None:
        """Refuse something else than the first island has."""
        self._rendezvous.same(what, value)

    def admit(self) -> None:
        self._enter(self._rendezvous.open(self._view.admitting(self._asked)), again=True)

    def _go_on(self, where: str) -> bool:
        """Go on with those that are left; False: without this island, which has joined again."""
        self._transport = None
        return self._enter(self._next_view(self._view, where), again=True, where=where)

    def _next_view(self, before: View, where: str) -> View:
        """The view after one that has lost an island, which the first that is left names."""
        view = self._rendezvous.next_view(before)
        self._count_repeats(before, view)
        gone = sorted({*before.islands} - {*view.islands})
        if gone and view.islands[0] == self._rendezvous.island:
            print(
                f"slipstream: island {', '.join(map(str, gone))} is gone: {where}; "
                f"{len(view.islands)} go on",
                file=sys.stderr,
            )
        return view

    def _rejoin(self, where: str, *, trained: bool) -> View:
        """Join again, as the others have gone on without this island."""
        print(
            f"slipstream: island {self._rendezvous.island} came too late: {where}; it joins again"
            f"{', with what it has done' if trained else ''}",
            file=sys.stderr,
        )
        assert self.resident is not None
        self.resident.drop()
        return self._join(trained=trained)

    def _join(self, *, trained: bool) -> View:
        view = self._rendezvous.join(trained=trained)
        # by this number the others speak of it
        print(f"slipstream: this job is island {self._rendezvous.island}", file=sys.stderr)
        return view

    def _count_repeats(self, before: View, view: View) -> None:
        """Give up where islands repeat an exchange again and again, although all are there."""
        self._repeats = self._repeats + 1 if before.islands == view.islands else 0
        if self._repeats >= REPEATS:
            raise ExchangeError(
                f"{REPEATS} times an exchange did not end within half of local.rendezvous.timeout, "
                "although no island was gone; set it to more than twice the time of the longest "
                "exchange"
            )

    def _enter(self, view: View, *, again: bool, where: str = "the admission of others") -> bool:
        """Meet in a view from now on; whether this island is still what it was."""
        assert self.resident is not None
        stays = True
        while True:
            if self._rendezvous.island not in view.islands:
                stays, view = False, self._rejoin(where, trained=again)
            own = self._rendezvous.island
            self._view, self._number, self._transport = view, 0, None
            view = self._view = self._rendezvous.led(view)
            fresh = own in view.fresh
            stays = stays and not fresh
            welcome = _Welcome(self.resident, view, own)
            if self._connect(view) and self._is_done(welcome.exchange):
                break
            view = self._next_view(view, where)
        self._rendezvous.begun()
        self._repeats = 0
        if fresh:
            self.resident.settle(welcome.state(), again=again)
        self._view = view = View(view.number, view.islands, view.slots, (), view.asked)
        self._asked = view.asked
        place = view.islands.index(own)
        self.resident.meet_as(Ranks(place, len(view.islands)), view.slots[place])
        if again and welcome.newcomers and place == 0:
            print(
                f"slipstream: island {', '.join(map(str, welcome.newcomers))} has joined; "
                f"{len(view.islands)} go on",
                file=sys.stderr,
            )
        return stays

    def _connect(self, view: View) -> bool:
        try:
            group = self._rendezvous.group(view)
        except RuntimeError:
            self._rendezvous.agree(view, 0, done=False)
            return False
        self._transport = None if group is None else FlatTransport(FlatConfig(), group)
        return True

    def close(self) -> bool:
        return self._rendezvous.close(self._view)

    def leave(self) -> None:
        """Take part no longer; idempotent."""
        self._transport = self.resident = None
        self._rendezvous.leave()
        if self._latest is not None:
            # one that came back from torch while the interpreter ends would abort it
            self._latest.ended.wait(LEAVE)
        self._pending = self._latest = None  # their errors know the process group


class _Welcome:
    """The first island's state for those that are new, with the mean of all optimizers' states."""

    def __init__(self, resident: Resident, view: View, own: int) -> None:
        self.newcomers = view.fresh
        self._is_new, self._is_first = own in view.fresh, own == view.islands[0]
        self._own = resident.save() if view.fresh and not self._is_new else None
        self._content = torch.empty(0, dtype=torch.uint8)
        self._mean = torch.empty(0)

    def exchange(self) -> ExchangeSteps:
        """Carry it from island to island."""
        if not self.newcomers:
            return
        if self._is_first:
            file = io.BytesIO()
            torch.save(self._own, file)
            self._content = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
        size = torch.tensor([len(self._content)])
        yield Broadcast(size)
        if not self._is_first:
            self._content = torch.empty(int(size), dtype=torch.uint8)
        for part in self._content.split(PART):  # each within the time limit
            yield Broadcast(part)
        # islands whose optimizers keep other things than the first one's keep out of the mean
        kept = _floats(self._received() if self._is_new else self._own)
        like, layout = _values(kept), _layout(kept)
        first = torch.tensor([len(like), layout])
        yield Broadcast(first)
        same = first.tolist() == [len(like), layout]
        counts = torch.tensor([float(not self._is_new and same and is_finite(like))])
        self._mean = like if counts else torch.zeros(int(first[0]), dtype=like.dtype)
        yield AllReduce(counts)
        for part in self._mean.split(PART // self._mean.itemsize):
            yield AllReduce(part)
        self._mean /= counts

    def _received(self) -> dict[str, Any]:
        file = io.BytesIO(self._content.numpy().tobytes())
        try:
            state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
        except UnpicklingError as error:
            # no ExchangeError, after which all would try again: this island ends, others go on
            raise ModelError(
                "the optimizer state of the run holds more than tensors and plain values, and only "
                "these are taken from another job; keep the rest outside of optimizer.state: "
                f"{str(error).splitlines()[0]}"
            ) from error
        return state

    def state(self) -> dict[str, Any]:
        """Build what a new island takes over."""
        state = self._received()
        start = 0
        if not self._mean.isfinite().all():  # of nobody
            return state
        for value in _floats(state).values():
            part = self._mean[start : start + value.numel()]
            value.copy_(part.view(value.shape))
            start += value.numel()
        return state


def _floats(state: Mapping[str, Any] | None) -> dict[tuple[int, str], torch.Tensor]:
    """Name what an optimizer keeps for each value, in one order on all islands: an optimizer has
    its parameters in the order in which they got a state."""
    assert state is not None
    kept = state["optimizer"]["state"]
    # what it keeps of itself lies under words
    known = sorted(index for index in kept if isinstance(index, int))
    pairs = [((index, key), kept[index][key]) for index in known for key in sorted(kept[index])]
    return {
        name: torch.view_as_real(value) if value.is_complex() else value
        for name, value in pairs
        if isinstance(value, torch.Tensor)
        and value.dim()
        and (value.is_floating_point() or value.is_complex())
    }


def _layout(kept: Mapping[tuple[int, str], torch.Tensor]) -> int:
    """Compute a checksum of what is kept for which parameter."""
    return crc32(repr([(name, tuple(value.shape)) for name, value in kept.items()]).encode())


def _values(kept: Mapping[tuple[int, str], torch.Tensor]) -> torch.Tensor:
    flat = [value.detach().cpu().reshape(-1).float() for value in kept.values()]
    return torch.cat([torch.empty(0), *flat])
