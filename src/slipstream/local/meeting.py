"""The meetings of one fragment: what is sent, what the outer optimizer makes of it, what is merged.

With the outer parameters g, a rank's own parameters x, and its weight w (updates since the last
meeting):

    sent        d = g - x(t)                       in fp32, or wider
    on the way  D = sum over ranks of w d / sum of w
    merged      g' = g - outer(D)                  SGD with Nesterov momentum
                x' = x(now) + (1 - mix) (g' - x(t))

``x(now)`` is ``x(t)`` where there is no delay, and with ``mix: 0`` a rank then goes on from g'.
With a delay, what it learned meanwhile, ``x(now) - x(t)``, is kept as it is, and is a part of the
next change: nothing is thrown away or counted twice. (Streaming DiLoCo takes ``mix x(now) + (1 -
mix) g'``, which throws away that part of it.)

A rank whose change is not finite sends nothing, with weight 0, and goes on from the outer
parameters with a new optimizer state: its error stays its own. Where the ranks of a host are an
island, they have one change, and are one rank here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from slipstream.codecs import Compressor, make_compressor, wire_bytes
from slipstream.codecs.compressor import is_finite
from slipstream.errors import warn
from slipstream.local.carrier import Exchange
from slipstream.local.fragments import Fragment
from slipstream.local.island import Island
from slipstream.local.shared_buffers import SharedBuffers
from slipstream.strategy import LocalConfig
from slipstream.transport.requests import AllReduce, ExchangeSteps

ALIKE = (
    "without local.stretch all ranks make the same number of step() calls: give each as many "
    "batches, or pass the loader to accelerate(), which keeps ranks in step"
)
CLOSES = 2.0**40
"""Added to the second of a meeting's weights, a number of ranks, by each island that closes."""


@dataclass(slots=True)
class Flight:
    """A change on its way.

    Attributes:
        due: the update after which it is merged.
        change: of this rank, then the mean over ranks.
        sent: this rank's parameters when it was sent.
        buffers: what this rank offers, then what all share.
        own_buffers: what this rank offers.
        weights: of this rank's change: its updates, and whether it is finite; and seconds that
            ranks tell each other, if any.
        totals: the sums of these over ranks.
        lost: whether this rank's change was not finite.
        begun, done: whether its exchange has begun, and ended, as all ranks know.
    """

    due: int
    change: torch.Tensor
    sent: torch.Tensor
    buffers: torch.Tensor
    own_buffers: torch.Tensor
    weights: torch.Tensor
    totals: torch.Tensor
    lost: bool = False
    begun: bool = False
    done: bool = False

    @property
    def seconds(self) -> torch.Tensor:
        """Seconds that ranks have told each other, those of all once the exchange is done."""
        return self.totals[2:]


class Meeting:
    """One fragment's outer parameters, and its exchange.

    Args:
        model: has the buffers.
        fragment: what meets.
        config: of the strategy.
        island: of this rank.
        seed: of the codec's random streams.
        shared: buffers by name, as all ranks share them.

    Attributes:
        config: of the strategy; with a longer delay later on, where ``auto`` finds that ranks wait.
        outer: the parameters that all ranks share, one after the other, in fp32 or wider.
        buffers: those of this rank, and what all ranks share of them.
        done: how often it has met.
        counted: updates of all ranks that these meetings have averaged.
        flight: what is on its way; None: nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        fragment: Fragment,
        config: LocalConfig,
        island: Island,
        seed: int,
        shared: Mapping[str, torch.Tensor],
    ) -> None:
        self.fragment, self.config, self._island = fragment, config, island
        first = fragment.pieces[0].values
        self.device = first.device
        widest = max((piece.values.dtype for piece in fragment.pieces), key=lambda d: d.itemsize)
        self.dtype = widest if widest.itemsize >= 4 else torch.float32
        self._home = torch.device("cpu") if config.offload else self.device
        self.outer = torch.zeros(fragment.num_values, dtype=self.dtype, device=self._home)
        self.buffers = SharedBuffers(model, fragment.buffers, self.device, shared)
        self.take_outer()
        self._optimizer = torch.optim.SGD(
            [self.outer],
            config.lr,
            config.momentum,
            nesterov=config.momentum > 0,
            fused=self._home.type in ("cpu", "cuda"),  # a third of the time
        )
        self._seed = seed
        self._compressor: Compressor | None = None
        self.meet_as(island)
        self.done = self.counted = 0
        self.flight: Flight | None = None

    def meet_as(self, island: Island) -> None:
        """Meet as one among these islands from now on; what the codec has left out is lost."""
        self._island, config = island, self.config
        self._compressor = None
        if config.codec is not None and island.meets:
            like = [p.values.to(self.dtype) for p in self.fragment.pieces]
            self._compressor = make_compressor(
                config.codec, like, island.islands, num_flags=1, seed=self._seed
            )

    def take_outer(self) -> None:
        """Let the outer parameters be those that this rank has now. Buffers that all share stay, as
        a forward pass may have changed them; but for values that have no mean."""
        self.outer.copy_(self.read())
        self.buffers.take_without_mean()

    def take_sent(self) -> None:
        """Let what this rank has now be what it sent: a saved run's own is not known."""
        if self.flight is not None:
            self.flight.sent = self.read()

    def begin_anew(self) -> None:
        """Share what the model has now, and forget momentum, what codecs have left out, and what is
        on its way."""
        self.buffers.share(self.buffers.read())
        self.take_outer()
        self._optimizer.state.clear()
        self.flight = None
        if self._compressor is not None:
            self._compressor.load([{} for _ in self._compressor.slots])

    # Flat tensors of the fragment's values.

    def read(self) -> torch.Tensor:
        """Copy this rank's parameters."""
        flat = torch.empty(self.fragment.num_values, dtype=self.dtype, device=self.device)
        for piece, part in self._parts(flat):
            part.copy_(piece)
        return flat

    def write(self, flat: torch.Tensor) -> None:
        """Set this rank's parameters."""
        for piece, part in self._parts(flat.to(self.device)):
            piece.copy_(part)

    def _parts(self, flat: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        values = [piece.values for piece in self.fragment.pieces]
        parts = flat.split([v.numel() for v in values])
        return [(v, part.view(v.shape)) for v, part in zip(values, parts, strict=True)]

    def can_meet(self, values: torch.Tensor, offer: torch.Tensor) -> bool:
        """Whether parameters, or a change of them, and an offer of buffers are finite; of these but
        for what all share."""
        return is_finite(values) and self.buffers.have_mean(offer)

    # A meeting.

    def send(self, weight: int, due: int, seconds: torch.Tensor | None = None) -> None:
        """Begin a meeting; `exchange` is to be carried out then.

        Args:
            weight: of this rank's change: updates.
            due: the update after which it is merged.
            seconds: to be added up over ranks with it, of as many values on each.
        """
        sent = self.read()
        change = self.outer.to(self.device) - sent
        self._drop_rounding(change)
        buffers = self.buffers.offer()
        self._island.average(buffers)
        lost = not self.can_meet(change, buffers)
        if lost:
            change.zero_()
            buffers.zero_()
        weights = torch.zeros(2, dtype=torch.float64, device=self.device)
        weights[0], weights[1] = (not lost) * weight, not lost
        weights *= len(self._island.ranks)
        if seconds is not None:
            weights = torch.cat([weights, seconds])
        own = buffers.clone()
        self.flight = Flight(due, change, sent, buffers, own, weights, weights.clone(), lost)

    def _restore(self, flight: Flight) -> None:
        """Undo what an exchange that was broken off has done."""
        flight.change.copy_(self.outer).sub_(flight.sent)
        self._drop_rounding(flight.change)
        if flight.lost:
            flight.change.zero_()
        flight.buffers.copy_(flight.own_buffers)
        flight.totals.copy_(flight.weights)

    def exchange(self, step: int) -> ExchangeSteps:
        """Leave the weighted means in the flight; may begin anew, among other islands.

        Args:
            step: updates of the run.
        """
        flight = self.flight
        assert flight is not None
        if flight.begun:
            self._restore(flight)
        flight.begun = True
        weights, total = flight.weights, flight.totals
        several = self._island.islands.count > 1
        if several:
            yield AllReduce(total)
            if total[1] >= CLOSES:  # what follows there is of other sizes
                raise RuntimeError(f"another rank has closed its session already; {ALIKE}")
        flight.change.mul_(float(weights[0] / total[0].clamp(min=1)))
        flight.buffers.mul_(float(weights[1] / total[1].clamp(min=1)))
        if not several:
            return
        if self._compressor is None:
            yield AllReduce(flight.change)
        else:
            compressor = self._compressor
            values = compressor.zeros(compressor.num_values)
            values[: len(flight.change)] = flight.change
            flags = torch.zeros(1, dtype=torch.uint8, device=self.device)
            yield from compressor.exchange(values, flags, step)
            if flags[-1]:  # finite changes, and an infinite sum of them in 16 bits
                compressor.rollback()
                values.zero_()
            else:
                compressor.commit()
            flight.change.copy_(values[: len(flight.change)])
        if len(flight.buffers) and total[1]:
            yield AllReduce(flight.buffers)

    def with_norms(self, exchange: Exchange, norms: dict[str, Any]) -> ExchangeSteps:
        """Carry an exchange out, with the squared norms of what this rank sends and gets."""
        flight = self.flight
        assert flight is not None
        # a second attempt begins with a change that the first one has scaled
        norms.setdefault("own_norm2", torch.linalg.vector_norm(flight.change).square())
        yield from exchange()
        norms["average_norm2"] = torch.linalg.vector_norm(flight.change).square()

    def flies(self, due: Callable[[Flight], bool]) -> bool:
        """Whether a change is on its way that is due."""
        return self.flight is not None and due(self.flight)

    def landed(self) -> None:
        """Hand on to the ranks of this island what came back."""
        flight = self.flight
        if flight is not None and not flight.done:
            for values in (flight.change, flight.buffers, flight.totals):
                self._island.hand_on(values)
            flight.buffers, flight.done = self.buffers.agreed(flight.buffers), True

    def merge(self, reset: Callable[[nn.Parameter], None]) -> None:
        """End a meeting whose exchange is done.

        Args:
            reset: forgets the state of the user's optimizer for a parameter.
        """
        flight, self.flight = self.flight, None
        assert flight is not None
        change = flight.change.to(self._home)
        kept = self._unmoved(change)
        self.outer.grad = change
        self._optimizer.step()
        self.outer.grad = None
        for part, before in kept:  # no momentum carries on what nobody trains
            part.copy_(before)
        self.buffers.share(flight.buffers)
        self.done += 1
        self.counted += int(flight.totals[0])
        if flight.lost:
            names = ", ".join(self.fragment.names[:3])
            warn(
                f"{self._island.name}: the change of {names} was infinite or NaN; it goes on from "
                "the parameters of the other ranks, with a new state of the optimizer",
            )
        if flight.lost or not (self.config.delay or self.config.mix):
            self.write(self.outer)  # the same bits on every rank
        else:
            behind = flight.sent.sub_(self.outer.to(self.device))
            for values, part in self._parts(behind):
                values.sub_(part, alpha=1 - self.config.mix)
        buffers, islands = self.buffers, self._island.islands.count
        goes_on = self.config.delay and not flight.lost
        buffers.write(buffers.gone_on(flight.own_buffers, islands) if goes_on else buffers.shared)
        if flight.lost or self.config.inner_state == "reset":
            for piece in self.fragment.pieces:
                reset(piece.parameter)

    def _drop_rounding(self, change: torch.Tensor) -> None:
        """Let this rank's change of what is frozen be zero, where it is what adding leaves."""
        pieces = zip(self.fragment.pieces, self._parts(change), strict=True)
        for piece, (values, part) in pieces:
            if piece.parameter.requires_grad:
                continue
            eps = torch.finfo(values.dtype).eps if self.config.delay else 0.0
            outer = values + part
            rounding = (outer.to(values.dtype) - values).norm() <= 2 * eps * values.norm()
            part.mul_(~rounding)

    def _unmoved(self, change: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Copy parts of the outer parameters that no rank has changed: by the mean, which is the
        same on all ranks, as they may freeze at other moments; but a codec leaves changes out."""
        if self.config.codec is not None and self._island.islands.count > 1:
            return []  # alike in an island, whose first rank alone has a compressor
        parts = [
            (outer, part)
            for (_, outer), (_, part) in zip(
                self._parts(self.outer), self._parts(change), strict=True
            )
            if part.numel()
        ]
        # a tenth of the time of ``any`` over all values (torch 2.13); NaN counts as moved
        found = [torch.stack(part.aminmax()).any() for _, part in parts]
        moved = torch.stack(found).tolist() if found else []
        return [(p, p.clone()) for (p, _), moves in zip(parts, moved, strict=True) if not moves]

    def adopt(self, reset: Callable[[nn.Parameter], None]) -> None:
        """Go on from what all ranks share: this rank's own is not finite."""
        self.write(self.outer)
        self.buffers.write(self.buffers.shared)
        for piece in self.fragment.pieces:
            reset(piece.parameter)

    # State.

    @property
    def _names(self) -> list[str]:
        """Names, in order, of what lies in the flat tensors of a state."""
        rows = (
            p.name if p.is_whole else f"{p.name}[{p.first}:{p.last}]" for p in self.fragment.pieces
        )
        return [*rows, *self.fragment.buffers]

    def fits(self, state: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
        """Whether `state` and a rank's `rank_state` are of one moment."""
        return all(own.get(key, state[key]) == state[key] for key in ("done", "due"))

    def state(self) -> dict[str, Any]:
        """State of the outer optimizer, the same on every rank; nothing may be on its way."""
        momentum = self._optimizer.state.get(self.outer, {}).get("momentum_buffer")
        flight = self.flight
        return {
            "done": self.done,
            "counted": self.counted,
            "names": self._names,
            "outer": self.outer.clone(),
            "momentum": None if momentum is None else momentum.clone(),
            "buffers": self.buffers.shared.clone(),
            "due": None if flight is None else flight.due,
            "mean": None if flight is None else flight.change.clone(),
            "mean_buffers": None if flight is None else flight.buffers.clone(),
            "totals": None if flight is None else flight.totals[:2].clone(),
        }

    def rank_state(self) -> dict[str, Any]:
        """State of this rank alone: what it has sent, and what its codec has left out."""
        flight = self.flight
        codec = [] if self._compressor is None else [*map(dict, self._compressor.state())]
        sent = None if flight is None else flight.sent.clone()
        size = len(self.buffers.shared)
        buffers = None if flight is None else flight.own_buffers[:size].clone()
        due = None if flight is None else flight.due
        return {
            "done": self.done,
            "due": due,
            "sent": sent,
            "sent_buffers": buffers,
            "lost": flight is not None and flight.lost,
            "codec": codec,
        }

    def refusal(self, state: Mapping[str, Any], own: Mapping[str, Any] | None) -> str | None:
        """Why this is not the state of this fragment; None: it is."""
        if (names := [*state.get("names", self._names)]) != self._names:
            mine, theirs = next(
                pair for pair in zip_longest(self._names, names) if pair[0] != pair[1]
            )
            return (
                f"local.meetings have {theirs} where this model has {mine}; allowed: the same in "
                "the same order, or session.restore({'model': ...}), which begins new rounds"
            )
        like = {"outer": self.outer, "momentum": self.outer, "buffers": self.buffers.shared}
        if state["due"] is not None:
            like |= {"mean": self.outer, "mean_buffers": self.buffers.shared}
        found = {key: state[key] for key in like}
        if own is not None and own["due"] is not None:
            like |= {"sent": self.outer, "sent_buffers": self.buffers.shared}
            found |= {"sent": own["sent"], "sent_buffers": own.get("sent_buffers")}
        for key, tensor in found.items():
            if tensor is not None and tensor.shape != like[key].shape:
                shapes = f"{tuple(tensor.shape)}; allowed: {tuple(like[key].shape)}"
                return f"{key} of local.meetings has shape {shapes}"
        return None

    def load(self, state: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
        """Go on from `state`, and from `rank_state` where this rank has one."""
        self.done, self.counted = state["done"], state.get("counted", 0)
        self.outer.copy_(state["outer"])
        own_buffers = self.buffers.shared
        self.buffers.share(state["buffers"].to(own_buffers.device, own_buffers.dtype, copy=True))
        self._optimizer.state.clear()
        if state["momentum"] is not None:
            momentum = state["momentum"].to(self._home, self.dtype, copy=True)
            self._optimizer.state[self.outer]["momentum_buffer"] = momentum
        self.flight = None
        if state["due"] is not None:
            sent = self._as_loaded(state["outer"]) if own is None else own["sent"]
            sent = sent.to(self.device, copy=True)
            mean, buffers, totals = (
                state[key].to(self.device, copy=True) for key in ("mean", "mean_buffers", "totals")
            )
            offered = None if own is None else own.get("sent_buffers")
            offered = torch.full_like(buffers, torch.nan) if offered is None else offered
            lost = own is not None and own["lost"]
            due = state["due"]
            offered = offered.to(self.device, copy=True)
            self.flight = Flight(due, mean, sent, buffers, offered, totals, totals, lost, done=True)
        if self._compressor is not None:
            left_out = own["codec"] if own is not None else []
            self._compressor.load(left_out or [{} for _ in self._compressor.slots])

    def _as_loaded(self, outer: torch.Tensor) -> torch.Tensor:
        """Round outer parameters as a model does that they are loaded into, now or later."""
        rounded = outer.to(self.device, copy=True)
        for piece, part in self._parts(rounded):
            part.copy_(part.to(piece.dtype))
        return rounded

    @cached_property
    def sent_bytes(self) -> int:
        """Bytes of a change, as its codec sends it."""
        pieces = [piece.values.to(self.dtype) for piece in self.fragment.pieces]
        return sum(wire_bytes(self.config.codec, piece) for piece in pieces)
