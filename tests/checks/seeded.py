"""Wrong updates that raise no error, seeded at a random place: tests and a benchmark look for them.

A fault is a function of a training under way, called on all ranks alike. It returns a pattern of
what must be said. Random numbers are the same on all ranks.
"""

from __future__ import annotations

import re
import tempfile
import warnings
from collections.abc import Callable, Collection
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from random import Random
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import slipstream
from slipstream.errors import ProofError, SlipstreamError, UsageError
from slipstream.gradients.buckets import Bucket
from slipstream.transport.host_shares import HostSum
from tests.transport.emulated_hosts import on_hosts

EVERY = 4
"""Updates from one check to the next."""
HOSTS = (0, 0, 1, 1)
"""Of each rank, where the transport is hierarchical."""

Loss = Callable[[nn.Module, int, int], torch.Tensor]
"""Of a model, by the number of the update and of the stream of data."""
Made = tuple[nn.Module, torch.optim.Optimizer, Loss]


@dataclass
class Training:
    """A training under way.

    Attributes:
        session: of this rank.
        loss: of a batch.
        chance: the same on all ranks.
        bad: the rank where things go wrong.
        stream: of this rank's data.
        undo: what is restored at the end.
        before_step: calls between backward and step.
        after_step: calls after it.
        updates: done so far.
    """

    session: Any
    loss: Loss
    chance: Random
    bad: int
    stream: int
    undo: ExitStack
    before_step: list[Callable[[], object]] = field(default_factory=list)
    after_step: list[Callable[[], object]] = field(default_factory=list)
    updates: int = 0

    @property
    def is_bad(self) -> bool:
        return bool(self.session.rank == self.bad)

    @property
    def engine(self) -> Any:
        engine = self.session._loop.engine
        return getattr(engine, "_shared", engine)  # under local, that of the warm-up

    def update(self) -> None:
        self.session.backward(self.loss(self.session.model, self.updates, self.stream))
        for call in [*self.before_step]:
            call()
        self.session.step()
        for call in [*self.after_step]:
            call()
        self.updates += 1

    def bucket(self) -> tuple[Any, str]:
        """One of those that travel by themselves, and a pattern of the names in it."""
        slots, trainables = self.engine._layout.slots, self.engine._trainables
        buckets = list(dict.fromkeys(slot.bucket for slot in slots))
        bucket = self.chance.choice(buckets)
        pairs = zip(slots, trainables, strict=True)
        return bucket, one_of([t.name for slot, t in pairs if slot.bucket is bucket])


def one_of(names: Collection[str]) -> str:
    return rf"(?<![\w.])({'|'.join(map(re.escape, names))})(?![\w]|\.\w)"


def differs(rank: int, what: str, name: str) -> str:
    return rf"rank {rank} differs from the other ranks in {what}: [^:]*{name} is the first"


def sent(bucket: Bucket) -> torch.Tensor:
    """What travels of it."""
    found: torch.Tensor = bucket.flat if hasattr(bucket, "flat") else bucket.rows  # type: ignore[attr-defined]
    return found


# Averages.


def keep_own(training: Training, *, once: bool = False) -> str:
    """The exchange of a segment is lost: the bad rank goes on with its own gradients."""
    bucket, names = training.bucket()
    if training.is_bad:
        complete, finish, size = bucket.complete, bucket.finish, training.session.data_size
        kept: list[torch.Tensor] = []

        def keep(scale: torch.Tensor) -> None:
            complete(scale)
            kept[:] = [bucket.flat * size]

        def restore(loss_scale: float) -> None:
            bucket.flat.copy_(kept[0])
            finish(loss_scale)
            if once:
                bucket.complete, bucket.finish = complete, finish

        bucket.complete, bucket.finish = keep, restore
    average = rf"{names}: rank {training.bad} did not get the average of all ranks, but has its own"
    return f"({average}|{differs(training.bad, '.*', names)})" if once else average


def keep_own_once(training: Training) -> str:
    return keep_own(training, once=True)


def send_zeros(training: Training) -> str:
    """What the bad rank sends of a segment is lost on its way."""
    bucket, names = training.bucket()
    complete = bucket.complete

    def blank(scale: torch.Tensor) -> None:
        complete(scale)
        sent(bucket).zero_()

    if training.is_bad:
        bucket.complete = blank
    return rf"{names}: the gradients of rank {training.bad} are missing in the average"


def divide_twice(training: Training) -> str:
    bucket, names = training.bucket()
    complete = bucket.complete

    def divide(scale: torch.Tensor) -> None:
        complete(scale)
        sent(bucket).div_(training.session.data_size)

    bucket.complete = divide
    return rf"{names}: the average was divided by the number of ranks twice"


def divide_by_hand(training: Training) -> str:
    """The script divides what was divided already."""

    def divide() -> None:
        for parameter in training.session.model.parameters():
            if parameter.grad is not None:
                parameter.grad /= training.session.data_size

    training.before_step.append(divide)
    return "the gradients were divided by the number of ranks between backward"


def skip_in_host(training: Training) -> str:
    """The sum of a host leaves one of its ranks out."""
    add, skipped = HostSum.add, HOSTS[: training.bad].count(HOSTS[training.bad])

    def add_others(shares: HostSum, slot: int, chunk: int) -> None:
        for owner, block in enumerate(shares.blocks[slot][skipped]):
            if owner % shares.rows == shares.row:
                piece = shares.cut.piece(owner, chunk)
                (piece if shares.row == skipped else block).zero_()
        add(shares, slot, chunk)

    if HOSTS[training.session.rank] == HOSTS[training.bad]:
        training.undo.enter_context(patch.object(HostSum, "add", add_others))
    return rf"the gradients of rank {training.bad} are missing in the average"


def lose_residual(training: Training) -> str:
    """What a codec keeps of a segment is zero."""
    keeping = [
        named
        for named in training.engine._codecs._attached
        if any(residual.error.any() for residual in named.compressor.residuals)
    ]
    named = training.chance.choice(keeping)
    if training.is_bad:
        for residual in named.compressor.residuals:
            residual.error.zero_()
    name = one_of(named.names[:1])
    return rf"what the codec keeps on rank {training.bad} of the segment of {name}"


# What ranks have.


def keep_buffer(training: Training) -> str:
    """One buffer of the bad rank stays as it is."""
    name, buffer = training.chance.choice([*training.session.model.named_buffers()])
    old, buffers = buffer.clone(), training.engine._buffers
    restore = buffers.restore

    def restore_others() -> None:
        restore()
        buffer.copy_(old)

    if training.is_bad:
        buffers.restore = restore_others
    return differs(training.bad, "buffers", one_of([name]))


def keep_statistics(training: Training) -> str:
    """Those of the first rank do not arrive any more."""
    training.bad = training.chance.randrange(1, training.session.world_size)
    if training.is_bad:
        training.engine._buffers.arrived = lambda: None
    first = [name for name, _ in training.session.model.named_buffers()]
    return differs(training.bad, "buffers", one_of(first))


def change_rate(training: Training) -> str:
    groups = training.session.optimizer.param_groups
    number, factor = training.chance.randrange(len(groups)), training.chance.choice((0.5, 0.9, 2))
    if training.is_bad:
        groups[number]["lr"] *= factor
    return differs(training.bad, "the optimizer's settings", f"lr of group {number}").removesuffix(
        " is the first"
    )


def flip(training: Training, bits: range) -> str:
    """One bit of a weight of the bad rank."""
    name, parameter = training.chance.choice([*training.session.model.named_parameters()])
    place, bit = training.chance.randrange(parameter.numel()), training.chance.choice(bits)
    if training.is_bad:
        word = parameter.detach().view(torch.int32).view(-1)[place]
        word ^= torch.tensor(1 << bit if bit < 31 else -(1 << 31), dtype=torch.int32)
    return differs(training.bad, "(parameters|the optimizer's state)", one_of([name]))


def flip_sign(training: Training) -> str:
    return flip(training, range(31, 32))


def flip_exponent(training: Training) -> str:
    return flip(training, range(23, 31))


def flip_mantissa(training: Training) -> str:
    return flip(training, range(23))


def step_twice(training: Training) -> str:
    """The optimizer of the bad rank steps a second time with the same gradients, once."""
    parameters, optimizer = [*training.session.model.parameters()], training.session.optimizer
    kept: list[torch.Tensor | None] = []

    def keep() -> None:
        kept[:] = [None if p.grad is None else p.grad.clone() for p in parameters]

    def again() -> None:
        for parameter, gradient in zip(parameters, kept, strict=True):
            parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad()
        training.before_step.clear()
        training.after_step.clear()

    if training.is_bad:
        training.before_step.append(keep)
        training.after_step.append(again)
    return differs(training.bad, "the optimizer's state", "")


def forget_moments(training: Training) -> str:
    state, model = training.session.optimizer.state, training.session.model
    held = [(name, p) for name, p in model.named_parameters() if p in state]
    name, parameter = training.chance.choice(held)
    moments = [v for v in state[parameter].values() if isinstance(v, torch.Tensor) and v.dim()]
    if training.is_bad:
        training.chance.choice(moments).zero_()
    return differs(training.bad, "the optimizer's state", one_of([name]))


def share_data(training: Training) -> str:
    """The bad rank trains on the data of another one."""
    size = training.session.world_size
    other = (training.bad + training.chance.randrange(1, size)) % size
    if training.is_bad:
        training.stream = other
    first, second = sorted((training.bad, other))
    return rf"ranks {first}, {second} had the same (gradients|inputs) bit for bit"


def replace_parameter(training: Training) -> str:
    """The script puts another parameter in place of one, on all ranks."""
    model = training.session.model
    name, parameter = training.chance.choice([*model.named_parameters()])
    path, _, key = name.rpartition(".")
    setattr(model.get_submodule(path), key, nn.Parameter(parameter.detach().clone()))
    return rf"the model has other parameters than at accelerate\(\) \(.*{one_of([name])}"


def add_parameter(training: Training) -> str:
    """The script adds a parameter to a module, or to the optimizer, on all ranks."""
    session, new = training.session, nn.Parameter(torch.zeros(3))
    path, module = training.chance.choice([*session.model.named_modules()])
    if training.chance.random() < 0.5:
        session.optimizer.add_param_group({"params": [new]})
        number = len(session.optimizer.param_groups) - 1
        return rf"the optimizer's group {number} holds a parameter of shape \(3,\)"
    module.register_parameter("added", new)
    name = f"{path}.added" if path else "added"
    return rf"the model has other parameters than at accelerate\(\) \(new: {one_of([name])}"


FAULTS: dict[str, Callable[[Training], str]] = {
    "segment lost once: own gradients": keep_own_once,
    "segment lost from then on: own gradients": keep_own,
    "segment lost from then on: zeros sent": send_zeros,
    "average divided twice": divide_twice,
    "average divided by the script": divide_by_hand,
    "rank skipped in its host": skip_in_host,
    "residual lost": lose_residual,
    "stale buffer": keep_buffer,
    "drifted statistics": keep_statistics,
    "another learning rate": change_rate,
    "sign flipped": flip_sign,
    "exponent flipped": flip_exponent,
    "mantissa flipped": flip_mantissa,
    "optimizer stepped twice": step_twice,
    "moments lost": forget_moments,
    "same data": share_data,
    "parameter replaced": replace_parameter,
    "parameter added": add_parameter,
}
REFUSED = ("parameter replaced", "parameter added")
"""By any session."""
WARNED = ("average divided by the script", "same data")
"""As they may be meant."""
ALIKE_UNDER_SHARDED = (
    "segment lost once: own gradients", "segment lost from then on: own gradients",
    "average divided by the script", "sign flipped", "exponent flipped", "mantissa flipped",
    "optimizer stepped twice", "moments lost",
)  # fmt: skip
"""Wrong values of a shard, which reach all ranks."""


@dataclass(frozen=True)
class Outcome:
    """One run as one rank saw it.

    Attributes:
        kind: of the error, or ``warning``; empty: there was neither.
        said: its words.
        named: whether they are those of the fault.
        updates: from the fault on.
    """

    kind: str
    said: str
    named: bool
    updates: int


def seeded(
    make: Callable[[], Made],
    fault: str,
    run: int,
    gradients: dict[str, Any],
    parallel: dict[str, Any] | None = None,
    local: dict[str, Any] | None = None,
) -> Outcome:
    """Train, seed a fault, and go on for two checks; on each rank."""
    chance = Random(f"{fault}, {run}")
    torch.manual_seed(run)
    model, optimizer, loss = make()
    on = on_hosts(HOSTS) if gradients.get("transport") == "hierarchical" else nullcontext()
    wanted, updates, training = "", 0, None
    with tempfile.TemporaryDirectory() as folder, ExitStack() as undo, on:
        caught = undo.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        checks = {"every": EVERY, "folder": folder}
        try:
            strategy = {"gradients": gradients, "checks": checks}
            if parallel is not None:
                strategy["parallel"] = parallel
            if local is not None:
                strategy["local"] = local
            with slipstream.accelerate(model, optimizer, strategy=strategy) as session:
                torch.manual_seed(1000 * run + session.data_rank)
                bad = chance.randrange(session.world_size)
                training = Training(session, loss, chance, bad, session.data_rank, undo)
                for _ in range(chance.randint(2, 1 + EVERY)):
                    training.update()
                updates = training.updates
                wanted = FAULTS[fault](training)
                for _ in range(updates, (updates // EVERY + 2) * EVERY):
                    training.update()
                    said = [str(warning.message) for warning in caught]
                    if named := [text for text in said if re.search(wanted, text)]:
                        return Outcome("warning", named[0], True, training.updates - updates)
        except (SlipstreamError, RuntimeError) as error:
            done = 0 if training is None else training.updates + 1 - updates
            right = UsageError if fault in REFUSED else ProofError
            named_right = isinstance(error, right) and bool(re.search(wanted, str(error)))
            return Outcome(type(error).__name__, str(error), named_right, done)
    return Outcome("", "", False, 0)


def is_found(fault: str, outcome: Outcome) -> bool:
    """Whether it was noticed as it should be, whatever was named."""
    if fault in WARNED:
        return outcome.kind == "warning"
    return outcome.kind == ("UsageError" if fault in REFUSED else "ProofError")
