"""Codecs between hosts alone: inside a host, ranks sum in full precision.

[Note: One exchange]
1. The ranks of a host leave the sum of each share of the bucket with the rank of its rail.
2. On each rail, one rank of each host, a compressor exchanges that share alone: a host is to the
   codec what a rank is to it elsewhere. What it keeps (errors, momentum, directions) is on this
   rank alone.
3. Inside each host the finished values are copied to all ranks.

Flags of use travel as values behind the last share. Whether a rail's share is finite is told in
band: its first value is NaN if not.

[Note: A state for other shares]
A state that is loaded may come from another split, or from other hosts. What it holds of values
that are in the share of another rank of this host goes there before the next exchange, by a sum
inside the host: errors, and DGC's momentum, are parts of a sum over ranks. Nothing is lost. A
direction of PowerSGD stays behind; its matrix begins anew from a random one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from slipstream.codecs.compressor import Compressor, Ranks, SlotState, mixed
from slipstream.codecs.dgc import Momentum
from slipstream.codecs.host_shares import (
    HostPart,
    allowed_borders,
    cut,
    join,
    nearest_borders,
    parts_of,
    taken,
)
from slipstream.codecs.make import make_compressor, real_shape
from slipstream.strategy import DgcConfig, PlainCodecConfig, keeps_state
from slipstream.transport.hosts import Rails
from slipstream.transport.requests import BetweenHosts, ExchangeSteps, ReduceInHosts, SpreadInHosts


@dataclass(frozen=True, slots=True)
class _Share:
    """The elements of a bucket on one rail of this rank, as parts of gradients."""

    values: slice
    parts: Sequence[HostPart]
    compressor: Compressor
    flags: Tensor


class HostsCompressor(Compressor):
    """The exchange of a bucket in shares between hosts.

    Args:
        codec: compresses the shares.
        parameters: slot by slot, all of one dtype.
        rails: of this rank, between two hosts or more.
        momenta: that DGC applies, slot by slot.
        num_flags: flags that travel along; at least the compressor's own.
        seed: of random streams; the same on all ranks.
    """

    def __init__(
        self,
        codec: PlainCodecConfig,
        parameters: Sequence[Tensor],
        rails: Rails,
        *,
        momenta: Sequence[Momentum] = (),
        num_flags: int = 1,
        seed: int = 0,
    ) -> None:
        first, hosts = parameters[0], Ranks(rails.host, rails.num_hosts)
        shapes = [real_shape(p) for p in parameters]
        super().__init__(
            codec, shapes, first.dtype, hosts, first.device, num_flags=num_flags, seed=seed
        )
        allowed = allowed_borders(codec, self.slots, hosts.count)
        self._borders = nearest_borders(allowed, len(rails.members))
        shares = [slice(*pair) for pair in pairwise(self._borders)]
        # Without any values, the first rail carries the flags.
        busy = [rail for rail, share in enumerate(shares) if share.start < share.stop] or [0]
        self._firsts = [shares[rail].start for rail in busy]
        self.num_values = self._borders[-1] + num_flags - 1
        self._tail = slice(self._borders[-1], self.num_values)  # flags of use
        self._tail_rail = busy[-1]
        self._with_tail = [
            *self._borders[: busy[-1] + 1],
            *[self.num_values] * (len(shares) - busy[-1]),
        ]
        self._own = {
            rail: self._share(rail, shares[rail], parameters, momenta)
            for rail in rails.own
            if rail in busy
        }
        self._sums = _SUMS.get(type(codec), ("error",)) if keeps_state(codec) else ()
        self._elsewhere: dict[str, Tensor] = {}  # loaded, of values in shares of other ranks

    def _share(
        self,
        rail: int,
        values: slice,
        parameters: Sequence[Tensor],
        momenta: Sequence[Momentum],
    ) -> _Share:
        parts = parts_of(values, self.slots) or [HostPart(0, 0, 0)]
        compressor = make_compressor(
            self.codec,
            [taken(parameters[part.slot], part) for part in parts],
            self.ranks,
            momenta=[momenta[part.slot] for part in parts] if momenta else (),
            num_flags=self.num_flags if rail == self._tail_rail else 1,
            seed=mixed(self.seed, rail),
        )
        flags = torch.zeros(compressor.num_flags, dtype=torch.uint8, device=self.device)
        return _Share(values, parts, compressor, flags)

    def exchange(self, values: Tensor, flags: Tensor, step: int) -> ExchangeSteps:
        yield from self._hand_over()
        tail = values[self._tail]
        tail.copy_(flags[:-1])
        yield ReduceInHosts(values, self._with_tail)
        for rail, share in self._own.items():
            share.flags.zero_()
            if rail == self._tail_rail:
                share.flags[:-1] = tail > 0
        yield from together(
            {
                rail: share.compressor.exchange(values[share.values], share.flags, step)
                for rail, share in self._own.items()
            }
        )
        for rail, share in self._own.items():
            if rail == self._tail_rail:
                tail.copy_(share.flags[:-1])
            values[share.values][:1].masked_fill_(share.flags[-1] > 0, torch.nan)
        yield SpreadInHosts(values, self._with_tail)
        flags[:-1] = tail > 0
        flags[-1:] = values[self._firsts].isfinite().all().logical_not()

    def _hand_over(self) -> ExchangeSteps:
        """Bring what was loaded of other ranks' values to these."""
        elsewhere, self._elsewhere = self._elsewhere, {}
        for vector in elsewhere.values():
            yield ReduceInHosts(vector, self._borders)
        if not elsewhere:
            return
        for share in self._own.values():
            states, moved = share.compressor.state(), False
            for part, state in zip(share.parts, states, strict=True):
                for key, vector in elsewhere.items():
                    more = vector[self._place(part)]
                    if more.any():  # else bits stay as they are
                        state[key] = state[key] + more if key in state else more
                        moved = True
            if moved:
                share.compressor.load(states)

    def _place(self, part: HostPart) -> slice:
        """Locate a part in the bucket."""
        start = self.slots[part.slot].start
        return slice(start + part.start, start + part.stop)

    def commit(self) -> None:
        for share in self._own.values():
            share.compressor.commit()

    def rollback(self) -> None:
        for share in self._own.values():
            share.compressor.rollback()

    def forget(self, slots: Sequence[int]) -> None:
        for share in self._own.values():
            inside = [number for number, part in enumerate(share.parts) if part.slot in slots]
            share.compressor.forget(inside)

    def sample(self) -> list[Tensor]:
        """Values of this rank's shares."""
        return [part for share in self._own.values() for part in share.compressor.sample()]

    @property
    def state_bytes(self) -> int:
        return sum(share.compressor.state_bytes for share in self._own.values())

    def state(self) -> list[dict[str, Tensor]]:
        """Entries as without hosts; zero where another rank of the host keeps the value."""
        states: list[dict[str, Tensor]] = [{} for _ in self.slots]
        for key, vector in self._elsewhere.items():
            for slot, state in zip(self.slots, states, strict=True):
                if vector[slot].any():
                    state[key] = vector[slot].clone()
        for share in self._own.values():
            for part, of_part in zip(share.parts, share.compressor.state(), strict=True):
                slot = self.slots[part.slot]
                join(states[part.slot], of_part, part, slot.stop - slot.start)
        return states

    def load(self, states: Sequence[SlotState]) -> None:
        for share in self._own.values():
            share.compressor.load([cut(states[part.slot], part) for part in share.parts])
        self._elsewhere = {key: self.zeros(self._borders[-1]) for key in self._sums}
        for key, vector in self._elsewhere.items():
            for slot, state in zip(self.slots, states, strict=True):
                if key in state:
                    vector[slot] = state[key]
                if key == "error" and "served" in state:
                    first = slot.start + int(state["served_from"])
                    vector[first : first + len(state["served"])] += state["served"]
            for share in self._own.values():
                vector[share.values] = 0


_SUMS: Mapping[type, tuple[str, ...]] = {DgcConfig: ("momentum", "velocity")}
"""Entries of a codec's state that are parts of a sum over ranks; of others, the error."""


def together(exchanges: Mapping[int, ExchangeSteps]) -> ExchangeSteps:
    """The exchanges of several rails, step by step: no rail waits for another one's end."""
    while requests := {
        rail: request
        for rail, exchange in exchanges.items()
        if (request := next(exchange, None)) is not None
    }:
        yield BetweenHosts(requests)
