"""The proof that no update went wrong: ranks compare what must be equal, every so many updates.

[Note: What is compared]
Between ranks that hold the same part of the model, and update all of it: digests of parameters,
buffers, the optimizer's state and its settings; where each updates a shard, its own state is left
out; where ranks train on their own, what all of them have alike counts. And some averages of each
segment are computed a second way (``checks.sketch``). Only where digests differ, those of single
tensors are compared, too. Where gradients are infinite or NaN, ranks are compared at once: that one
of them had other parameters is the cause then.

What codecs keep on a rank must be there unchanged when the next exchange begins. It leaves no trace
if it is not, so after each update, not only after those that are checked, some values of it are
kept until then. Other ranks learn of it at the next check, so that all of them end alike.

Ranks that train on their own make different numbers of updates, and nobody must wait: they write
the digests of what they share after a meeting into the store of the run, and look at those of
others that are there.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isfinite
from typing import Any

import torch
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore, Store

from slipstream.checks.digest import Digest, digest
from slipstream.checks.sketch import AverageSamples, divided_again, wrong_average
from slipstream.errors import ProofError, UsageError, warn
from slipstream.gradients.compressed import CodecSample
from slipstream.local.training import LocalTraining
from slipstream.optim.dealt_state import may_be_part
from slipstream.parallel.dims import gather_objects
from slipstream.plain_copy import attach
from slipstream.pytree import tensors
from slipstream.session.exchanging import GradientExchange
from slipstream.session.given import Given

_STATE = "the optimizer's state"
_BUFFERS = "buffers"
_ONCE = {
    "use_reentrant": (
        "checks.replay beside torch.utils.checkpoint(use_reentrant=True), through which torch "
        "computes no gradients twice: set use_reentrant=False, or leave replay out"
    ),
    "donated_buffer": (
        "checks.replay with a model or a loss under torch.compile, whose backward frees what it "
        "has used: set torch._functorch.config.donated_buffer = False before it is compiled, or "
        "leave replay out"
    ),
}
"""Refusals of graphs that support one backward alone, by a part of torch's words."""


class Proof:
    """Compares ranks after every so many updates.

    Args:
        given: the user's model and optimizer, how often, and the ranks that hold the same part of
            the model.
        exchange: averages the gradients, and says whether each rank updates a shard.
        local: holds what is alike where ranks train on their own; None: they do not.
    """

    def __init__(
        self, given: Given, exchange: GradientExchange, local: LocalTraining | None
    ) -> None:
        self._store: Store | None = None  # of the run; None: one process
        if given.name is not None:
            self._store = PrefixStore(f"slipstream/proof/{given.name}", given.cluster.store)
        self._meetings = 0
        self._loads = 0  # of states, in which ranks take part alike
        checks, model = given.strategy.checks, given.model
        self._every, self._replays = checks.every, checks.replay
        self._model, self._optimizer, self._dims = model, given.optimizer, given.dims
        self._engine, self._sharding, self._local = exchange.engine, exchange.sharding, local
        self._samples: AverageSamples | None = None
        self._kept: CodecSample | None = None  # after an update
        self._lost: tuple[int, str] | None = None  # after how many updates, and of which segment
        self._due = self.is_due(0)  # whether the update that comes is checked
        self._inputs: list[object] = []  # of its forwards
        self.close = attach(model.register_forward_pre_hook, self._forward_begins, with_kwargs=True)
        self._warned: set[str] = set()

    def is_due(self, step: int) -> bool:
        """Whether the update after ``step`` updates is checked."""
        return self._every is not None and (step + 1) % self._every == 0

    def forget(self) -> None:
        """A state was loaded, on all ranks: what codecs keep is its own, and meetings are counted
        from its number."""
        self._kept = self._lost = None
        self._meetings = 0
        self._loads += 1

    # In the order of an update.

    def begin(self, step: int) -> None:
        """An exchange begins, mostly with a backward pass."""
        kept, self._kept = self._kept, None
        if kept is not None and (changed := _changed(kept, self._engine.codec_sample())):
            self._lost = self._lost or (step, changed)
        self._samples = None
        if self.is_due(step) and self._dims.data is not None and not self._apart:
            assert self._every is not None
            self._samples = AverageSamples((step + 1) // self._every)
        self._engine.sample(self._samples)

    def replay(self, loss: torch.Tensor, step: int) -> None:
        """Compute the gradients of a loss twice where a check is due and that is asked for; they
        are left nowhere.

        Raises:
            ProofError: they differ.
            UsageError: torch refuses, as a part of the model is computed again by a reentrant
                checkpoint, or compiled.
        """
        if not self._replays or not self.is_due(step):
            return
        named = [(name, p) for name, p in self._model.named_parameters() if p.requires_grad]
        parameters = [p for _, p in named]
        try:
            twice = [
                torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
                for _ in range(2)
            ]
        except RuntimeError as error:
            refusal = next((words for part, words in _ONCE.items() if part in str(error)), None)
            if refusal is None:
                raise
            raise UsageError(refusal) from error
        for (name, _), one, other in zip(named, *twice, strict=True):
            if one is not None and digest([one]) != digest([other]):
                raise ProofError(
                    f"the gradient of {name} was computed twice from one graph, and differs: a "
                    "kernel that is not deterministic (torch.use_deterministic_algorithms tells), "
                    "or a device that computes wrongly"
                )

    def before_update(self) -> None:
        """The optimizer is about to step: look at what it gets."""
        if self._samples is None or self._sharding.is_sharded:
            return
        by_name = {name: sample for sample in self._samples.buckets for name in sample.names}
        for name, parameter in self._model.named_parameters():
            if name in by_name and parameter.grad is not None:
                by_name[name].used(name, parameter.grad)

    def updated(self, step: int, *, used: bool) -> None:
        """``step`` updates are done; collective where a check was due.

        Raises:
            ProofError: on all ranks alike.
        """
        self._due = self.is_due(step)
        inputs, self._inputs = self._inputs, []
        if self._dims.data is None:
            return
        if self._apart:
            self._check_meetings(step)
            return
        self._kept = self._engine.codec_sample()
        if used and self.is_due(step - 1):
            self._check_average(step, _digest_of_inputs(inputs))
            if apart := self._first_difference(self._alike(), step):
                raise ProofError(f"update {step}: {apart}")

    def explain_nonfinite(self, step: int) -> None:
        """Gradients are infinite or NaN after ``step`` updates, on all ranks; collective.

        Raises:
            ProofError: a rank had other parameters than the others, which is why.
        """
        if self._dims.data is None or self._apart:
            return
        alike = {what: named for what, named in self._alike().items() if what != _BUFFERS}
        if apart := self._first_difference(alike, step):  # buffers are on their way
            raise ProofError(f"update {step + 1}: gradients are infinite or NaN, and {apart}")

    @property
    def _apart(self) -> bool:
        """Whether ranks train on their own now."""
        return self._local is not None and not self._local.warms_up

    # The average.

    def _check_average(self, step: int, inputs: Digest | None) -> None:
        samples, self._samples = self._samples, None
        self._engine.sample(None)
        if samples is None:
            return
        assert self._dims.data is not None
        own = [sample.result() for sample in samples.buckets], inputs, self._lost
        gathered = gather_objects(own, "the sketches of averages", self._dims.data)
        everyone, all_inputs, lost = zip(*gathered, strict=True)
        for rank, found in zip(self._dims.data_ranks, lost, strict=True):
            if found is not None:
                raise ProofError(
                    f"update {step}: what the codec keeps on rank {rank} of the segment of "
                    f"{found[1]} (its residual) was lost or changed after update {found[0]}; leave "
                    "the codec's state to the session, and load it by session.restore() alone"
                )
        sharded = self._sharding.is_sharded
        for sample, ranks in zip(samples.buckets, zip(*everyone, strict=True), strict=True):
            if not all(isfinite(rank.norm) for rank in ranks):
                continue  # such gradients are allowed, and have no sketch
            by_rank = dict(zip(self._dims.data_ranks, ranks, strict=True))
            wrong = wrong_average(by_rank, in_parts=sample.in_parts, tolerance=sample.tolerance)
            if wrong is not None:
                segment = f"the segment of {sample.names[0]}"
                raise ProofError(f"update {step}, {segment}: {wrong}")
        with_gradients = [
            ranks for ranks in zip(*everyone, strict=True) if any(rank.norm for rank in ranks)
        ]
        if not sharded and with_gradients and all(map(divided_again, with_gradients)):
            self._warn_once(
                "division",
                f"update {step}: the gradients were divided by the number of ranks between "
                "backward() and step(), but session.backward() leaves the average already, not "
                "the sum; leave the division out, if it is that of a loop without averages",
            )
        gradients = [
            tuple(s.own for s in one) if any(s.norm for s in one) else None for one in everyone
        ]
        for what, values in (("gradients", gradients), ("inputs", all_inputs)):
            if same := self._repeated(values):
                self._warn_once(
                    "same data",
                    f"update {step}: ranks {', '.join(map(str, same))} had the same {what} bit for "
                    "bit, so they train on the same data; shard it by session.data_rank and "
                    "session.data_size (a DistributedSampler)",
                )

    def _repeated(self, values: Sequence[object]) -> list[int]:
        """The ranks whose value another one has, too; None is no value."""
        times = Counter(values)
        pairs = zip(self._dims.data_ranks, values, strict=True)
        return [rank for rank, value in pairs if value is not None and times[value] > 1]

    def _forward_begins(self, module: nn.Module, args: object, kwargs: object) -> None:
        """Masks of dropout differ between ranks on the same data, their inputs do not."""
        if self._due and torch.is_grad_enabled():
            self._inputs.append((args, kwargs))

    def _warn_once(self, kind: str, text: str) -> None:
        """Warn of what may be meant."""
        if kind not in self._warned:
            self._warned.add(kind)
            warn(text)

    # What must be alike after a meeting.

    def _check_meetings(self, step: int) -> None:
        """Compare what ranks share that train on their own, after every so many meetings."""
        local, store, every = self._local, self._store, self._every
        assert local is not None
        assert every is not None
        done = local.meetings
        if store is None or done // local.meetings_in(every) == self._meetings:
            return
        self._meetings = done // local.meetings_in(every)
        own = {name: digest([tensor]) for name, tensor in local.alike().items()}
        rank, ranks = self._dims.data_rank, len(self._dims.data_ranks)
        place = f"meeting/{self._loads}/{done}"
        store.set(f"{place}/{rank}", json.dumps(own))
        for other in range(ranks) if rank == 0 else (0, (rank + 1) % ranks):
            key = f"{place}/{other}"
            if other == rank or not store.check([key]):
                continue
            theirs = json.loads(store.get(key))
            for name, value in own.items():
                if list(value) != theirs.get(name):
                    raise ProofError(
                        f"update {step}: {name} differs between ranks "
                        f"{self._dims.data_ranks[rank]} and {self._dims.data_ranks[other]} after "
                        f"{done} meetings, though all ranks share it"
                    )

    # What must be alike.

    def _first_difference(
        self, groups: Mapping[str, Callable[[], Mapping[str, Any]]], step: int
    ) -> str | None:
        """Say where ranks differ, and which; None: nowhere."""
        data = self._dims.data
        assert data is not None
        own: dict[str, Any] = {"the optimizer's settings": self._settings()}  # causes first
        own |= {what: digest(named().values()) for what, named in groups.items()}
        if _BUFFERS in own and not self._engine.buffers_alike:
            own[_BUFFERS] = None  # each rank has those of a forward of its own
        everyone = gather_objects(own, "the digests of all ranks", data)
        for what in own:
            found = {digests[what] for digests in everyone}
            if len(found) == 1 or (what == _BUFFERS and None in found):
                continue
            named = groups.get(what, self._single_settings)()
            # before they are compared: another rank may have all of what this one has a part of
            parts = self._parts() if what == _STATE else set[str]()
            single = {
                name: digest([t]) if isinstance(t, torch.Tensor) else t
                for name, t in named.items()
                if name not in parts
            }
            details = gather_objects(single, "the digests of single tensors", data)
            if what == _STATE:  # an optimizer may deal its work out to ranks, as Muon's do
                kept = set.intersection(*map(set, details))
                details = [{name: one[name] for name in one if name in kept} for one in details]
                if all(one == details[0] for one in details):
                    continue
            return self._apart_in(what, details, step)
        return None

    def _alike(self) -> dict[str, Callable[[], Mapping[str, Any]]]:
        """Name what is equal on all ranks, and how to get it; what is changed first comes first."""
        groups: dict[str, Callable[[], Mapping[str, Any]]] = {}
        if not self._sharding.is_sharded:
            groups[_STATE] = self._optimizer_state
        groups["parameters"] = lambda: dict(self._model.named_parameters())
        groups[_BUFFERS] = lambda: dict(self._model.named_buffers())
        return groups

    def _optimizer_state(self) -> Mapping[str, torch.Tensor]:
        return {name: value for name, value, _ in self._named_state()}

    def _parts(self) -> set[str]:
        """Name the state of which each rank may have a part."""
        return {name for name, value, p in self._named_state() if may_be_part(value, p)}

    def _named_state(self) -> Iterator[tuple[str, torch.Tensor, nn.Parameter]]:
        """Yield the tensors of the optimizer's state with their names and parameters."""
        names = {p: name for name, p in self._model.named_parameters()}
        held = [p for group in self._optimizer.param_groups for p in group["params"]]
        for number, p in enumerate(held):
            state = self._optimizer.state.get(p, {})
            for key, value in sorted(state.items(), key=lambda item: str(item[0])):
                if isinstance(value, torch.Tensor):
                    yield f"{key} of {names.get(p, f'parameter {number}')}", value, p

    def _single_settings(self) -> dict[str, str]:
        return {
            f"{key} of group {number}": repr(_plain(value))
            for number, group in enumerate(self._optimizer.param_groups)
            for key, value in group.items()
            if key != "params"
        }

    def _settings(self) -> str:
        return json.dumps(self._single_settings(), sort_keys=True)

    def _apart_in(self, what: str, details: Sequence[Mapping[str, Any]], step: int) -> str:
        """Say where ranks differ, and which of them are few."""
        ranks = self._dims.data_ranks
        assert self._every is not None
        ago = step % self._every or min(self._every, step)
        for name in dict.fromkeys(name for one in details for name in one):
            values = [one.get(name) for one in details]
            counts = Counter(map(repr, values))
            if len(counts) == 1:
                continue
            (most, times), *_ = counts.most_common()
            few = [r for r, value in zip(ranks, values, strict=True) if repr(value) != most]
            if times <= len(values) - times:
                few = [*ranks]
            who = f"rank{'s' if len(few) > 1 else ''} {', '.join(map(str, few))}"
            other = "from one another" if len(few) == len(ranks) else "from the other ranks"
            different = " and ".join(dict.fromkeys(map(str, values)))
            shown = f" ({different})" if what == "the optimizer's settings" else ""
            return (
                f"{who} differ{'' if len(few) > 1 else 's'} {other} in {what}: {name} is the first"
                f"{shown}; they have drifted apart since the last check, {ago} updates ago"
            )
        return f"ranks differ in {what}"


def _digest_of_inputs(inputs: list[object]) -> Digest | None:
    """The digest of all that forwards got; None: nothing, or nothing whose values can be read."""
    plain = [t for t in tensors(inputs) if type(t) is torch.Tensor and t.numel()]
    try:
        return digest(plain) if plain else None
    except RuntimeError:  # nested, sparse by rows, without data, or of a transform that has ended
        return None


def _changed(kept: CodecSample, now: CodecSample) -> str | None:
    """The first name whose values are others now; laid out anew, they are not compared."""
    if kept.keys() != now.keys():
        return None
    for name, values in kept.items():
        pairs = [*zip(values, now[name], strict=False)]
        alike_laid = len(values) == len(now[name]) and all(a.shape == b.shape for a, b in pairs)
        if alike_laid and not all(torch.equal(a, b) for a, b in pairs):
            return name
    return None


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value
