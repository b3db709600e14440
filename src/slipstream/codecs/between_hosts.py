"""Codecs between hosts alone: inside a host, ranks sum in full precision.

[Note: One exchange]
1. The ranks of a host leave the sum of each share of the bucket with the rank of its rail.
2. On each rail, one rank of each host, a compressor exchanges that share alone: a host is to the
   codec what a rank is to it elsewhere. What it keeps (errors, momentum, directions) is on this
   rank alone.
3. Inside each host the finished values are copied to all ranks.

Flags of use travel as values behind the last share. Whether a rail's share is finite is told in
band: its first value is NaN if not.

[Note: Which share a value is in]
``half`` cuts anywhere, ``int8`` and ``onebit`` between blocks. ``dgc`` and ``powersgd`` need whole
gradients (a norm, a matrix), so their shares begin where a gradient begins, as evenly as that goes.

[Note: A state for other shares]
A state that is loaded may come from another split, or from other hosts. What it holds of values
that are in the share of another rank of this host goes there before the next exchange, by a sum
inside the host: errors, and DGC's momentum, are parts of a sum over ranks. Nothing is lost. A
direction of PowerSGD stays behind; its matrix begins anew from a random one.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from slipstream.codecs.compressor import Compressor, Ranks, SlotState, memory_order, mixed
from slipstream.codecs.dgc import Momentum
from slipstream.codecs.make import make_compressor, real_shape
from slipstream.strategy import Dgc, Half, Int8, OneBit, PlainCodec, keeps_state
from slipstream.transport.hosts import Rails
from slipstream.transport.requests import BetweenHosts, Exchange, ReduceInHosts, SpreadInHosts


@dataclass(frozen=True, slots=True)
class Part:
    """Elements of the gradient in a slot that are in a share."""

    slot: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class _Share:
    """What is on one rail of this rank: elements of the bucket, as parts of gradients."""

    values: slice
    parts: Sequence[Part]
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
        codec: PlainCodec,
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
        parts = parts_of(values, self.slots) or [Part(0, 0, 0)]
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

    def exchange(self, values: Tensor, flags: Tensor, step: int) -> Exchange:
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

    def _hand_over(self) -> Exchange:
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

    def _place(self, part: Part) -> slice:
        """Where a part is in the bucket."""
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


_SUMS: Mapping[type, tuple[str, ...]] = {Dgc: ("momentum", "velocity")}
"""Entries of a codec's state that are parts of a sum over ranks; of others, the error."""


def allowed_borders(codec: PlainCodec, slots: Sequence[slice], hosts: int) -> Sequence[int]:
    """Where shares may begin and end, from 0 to the end, which may be behind the last slot.

    Example:
        >>> allowed_borders(Int8(block=8), [slice(0, 40)], 2)
        range(0, 49, 16)
        >>> allowed_borders(Dgc(), [slice(0, 3), slice(3, 9)], 2)
        [0, 3, 9]
    """
    end = slots[-1].stop
    match codec:
        case Int8() | OneBit():
            unit = codec.block * hosts
            return range(0, -(-end // unit) * unit + 1, unit)
        case Half():
            return range(end + 1)
        case _:
            return [0, *(slot.stop for slot in slots)]


def nearest_borders(allowed: Sequence[int], shares: int) -> list[int]:
    """Cut into so many shares as evenly as ``allowed`` borders let it; some may be empty.

    Args:
        allowed: ascending, from 0 to the end.
        shares: how many.

    Example:
        >>> nearest_borders(range(0, 17, 8), 3), nearest_borders([0, 10, 11, 100], 2)
        ([0, 8, 8, 16], [0, 11, 100])
    """
    borders = []
    for number in range(shares + 1):
        ideal = number * allowed[-1] / shares
        after = bisect(allowed, ideal)
        near = allowed[max(after - 1, 0) : after + 1]
        borders.append(min(near, key=lambda border: abs(border - ideal)))
    return borders


def parts_of(share: slice, slots: Sequence[slice]) -> list[Part]:
    """The parts of slots that are in a share.

    Example:
        >>> parts_of(slice(2, 5), [slice(0, 3), slice(3, 9)])
        [Part(slot=0, start=2, stop=3), Part(slot=1, start=0, stop=2)]
    """
    ends = [(max(s.start, share.start), min(s.stop, share.stop)) for s in slots]
    return [
        Part(number, start - slot.start, stop - slot.start)
        for number, (slot, (start, stop)) in enumerate(zip(slots, ends, strict=True))
        if start < stop
    ]


def taken(parameter: Tensor, part: Part) -> Tensor:
    """A part of a parameter, 1-D and real, or the parameter, where that is all of it."""
    values = memory_order(parameter)
    if part.stop - part.start == values.numel():
        return parameter
    return values[part.start : part.stop]


def together(exchanges: Mapping[int, Exchange]) -> Exchange:
    """The exchanges of several rails, step by step: no rail waits for another one's end."""
    while requests := {
        rail: request
        for rail, exchange in exchanges.items()
        if (request := next(exchange, None)) is not None
    }:
        yield BetweenHosts(requests)


# A slot's state and those of its parts.


def cut(state: SlotState, part: Part) -> dict[str, Tensor]:
    """What a state holds of a part; ``q`` belongs to whole gradients."""
    taken = {}
    for key, value in state.items():
        if key in ("error", "momentum", "velocity"):
            taken[key] = value[part.start : part.stop]
        elif key == "q":
            taken[key] = value
    if "served" in state:
        first = int(state["served_from"])
        start = max(first, part.start)
        stop = min(first + len(state["served"]), part.stop)
        if start < stop:
            taken["served"] = state["served"][start - first : stop - first]
            taken["served_from"] = torch.tensor(start - part.start)
    return taken


def join(state: dict[str, Tensor], of_part: SlotState, part: Part, numel: int) -> None:
    """Enter the state of a part into that of its slot, of ``numel`` values; the inverse of
    ``cut``. Parts come in their order."""
    for key, value in of_part.items():
        if key in ("error", "momentum", "velocity"):
            if key not in state:
                state[key] = value.new_zeros(numel)
            state[key][part.start : part.stop] = value
        elif key == "q":
            state[key] = value
    if "served" in of_part:
        first = part.start + int(of_part["served_from"])
        begin = int(state["served_from"]) if "served" in state else first
        served = of_part["served"].new_zeros(first + len(of_part["served"]) - begin)
        if "served" in state:
            served[: len(state["served"])] = state["served"]
        served[first - begin :] = of_part["served"]
        state["served"], state["served_from"] = served, torch.tensor(begin)
