"""torch's FSDP2 (``fully_shard``): a reduce-scatter that sends half of what gloo's does, coded or
not, and traces."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)

from slipstream.adapters.fsdp2_checks import check_strategy, check_units
from slipstream.adapters.fsdp2_reduce import Reducer, UnitReduceScatter
from slipstream.adapters.fsdp2_state import load_state, state_of
from slipstream.adapters.fsdp2_trace import FsdpTracer
from slipstream.adapters.fsdp2_units import Unit, comm_of, compressor_of, units_of
from slipstream.adapters.fsdp2_used import Uses
from slipstream.cluster.groups import new_group
from slipstream.errors import StrategyError, UsageError
from slipstream.optim.nested_step import around_all, let_have_hooks, stepping
from slipstream.session.accelerate import strategy_of
from slipstream.strategy import Strategy
from slipstream.transport.consistency import agree, check_groups


def accelerate_fsdp(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: Strategy | Mapping[str, Any] | str | Path | None = None,
) -> FsdpExchange:
    """Exchange the gradients of a model under ``fully_shard`` as ``strategy`` says.

    Gloo's reduce-scatter makes each of p ranks send ``2 (p - 1) / p`` of the gradients' bytes; this
    one sends ``(p - 1) / p``, and a codec less, beside backward where torch allows it. Gradients
    are summed in rank order, those of 16 bits in float32. Parameters are gathered as before, and
    the script stays as it is. All ranks call this, after the last ``fully_shard`` and before the
    first forward.

    Args:
        model: on CPUs, or a part of it under ``fully_shard``.
        optimizer: of the model; its steps are the updates that ``start_step`` and traces count.
        strategy: as of ``slipstream.accelerate``; of its settings ``gradients.codec``,
            ``gradients.overlap`` and ``trace`` are used, others are refused, except for
            ``gradients.transport: flat`` and ``direct``.

    Exactness: reordered, and bitwise on two ranks; lossy with a codec.

    Raises:
        StrategyError: the strategy has settings or a codec that FSDP2 does not take.
        ModelError: nothing is under ``fully_shard``, not on CPUs, or with hooks of another.
        MismatchError: ranks disagree about strategy or modules.

    Example:
        >>> from torch.distributed.fsdp import fully_shard
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = fully_shard(nn.Linear(4, 1), mesh=dist.init_device_mesh("cpu", (1,)))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with accelerate_fsdp(model, optimizer, {"gradients": {"codec": "int8"}}) as exchange:
        ...     model(torch.ones(2, 4)).mean().backward()
        ...     optimizer.step()
        >>> exchange.updates, exchange.sent_bytes  # alone, it sends nothing
        (1, 0)
        >>> dist.destroy_process_group()
    """
    chosen, error = Strategy(), None
    try:
        chosen = strategy_of(strategy)
        check_strategy(chosen)
    except Exception as caught:  # of any kind: the other ranks wait for this one's answer
        error = caught
    return FsdpExchange(model, optimizer, chosen, error)


class FsdpExchange:
    """The exchange of `accelerate_fsdp` at work; leaves the model as it was at ``close()``.

    Attributes:
        strategy: in use.

    Raises, where the model is called or in backward:
        ExchangeError: an exchange failed, as another rank has ended; names the module.
        ModelError: a codec that owes values got gradients of other parameters than before.
        UsageError: gradients are not summed or averaged, or comms were set after this.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        strategy: Strategy,
        error: Exception | None = None,
    ) -> None:
        self.strategy, self._model, self._units = strategy, model, units_of(model)
        check_units(self._units, strategy.gradients.codec)
        optimizer = stepping(optimizer)
        let_have_hooks(optimizer)
        self._hooks: list[Any] = []
        groups = self._groups(error)
        self._tracer = None if strategy.trace.steps is None else self._trace(optimizer)
        for unit in self._units:
            unit.compressor = compressor_of(strategy.gradients.codec, unit)
        self._uses = Uses(self._units)
        self._reducer = Reducer(strategy, groups, self._tracer, self._uses)
        for unit in self._units:
            unit.module.set_custom_reduce_scatter(UnitReduceScatter(self._reducer, unit))
            if self._tracer is not None:
                gather = self._tracer.gather(unit.name, unit.group._all_gather_comm)
                unit.module.set_custom_all_gather(gather)
        self._hooks += [
            # As torch's own hooks: a compiled model would trace it.
            model.register_forward_pre_hook(torch.compiler.disable(lambda *_: self._begin())),
            optimizer.register_step_pre_hook(lambda *_: self.wait()),
            optimizer.register_step_post_hook(around_all(lambda *_: self._updated(optimizer))),
        ]

    @property
    def updates(self) -> int:
        """Steps of the optimizer so far that gradients came before."""
        return self._reducer.updates

    @property
    def sent_bytes(self) -> int:
        """Bytes of gradients that this rank has sent so far."""
        return self._reducer.sent_bytes

    @property
    def under_way(self) -> int:
        """Modules whose gradients travel, and hold NaN until they are there."""
        return self._reducer.under_way

    def wait(self) -> None:
        """Return when all gradients have come: called where backward ends, and before an update.

        Raises:
            ExchangeError: one of the exchanges failed; names the module.
        """
        self._reducer.wait()

    def close(self) -> None:
        """Give torch its own collectives back; write a trace that is not written yet, which makes
        this a collective while ``trace`` records. Idempotent.

        Raises:
            ExchangeError: an exchange failed that nobody has waited for.
        """
        self.wait()
        if self._tracer is not None:
            self._tracer.write()
        self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:  # other ranks may not come here
            self._release()

    def state_dict(self) -> dict[str, Any]:
        """State with which this rank goes on bit for bit, beside that of model and optimizer; every
        rank saves its own. ``error`` is what a codec has not sent yet."""
        self.wait()
        return state_of(self._units, self.updates)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict()`` of the same rank, under the same codec.

        Raises:
            UsageError: the state is of another rank, of another number of ranks, or of other
                modules.
        """
        self._reducer.updates = load_state(self._units, state)

    def _begin(self) -> None:
        """A forward begins; refuse one whose gradients would travel otherwise."""
        self.wait()  # of a backward that has raised
        lost = [
            name or "the model itself"
            for name, module in self._model.named_modules()
            if isinstance(module, FSDPModule)
            for group in module._get_fsdp_state()._fsdp_param_groups
            if not isinstance(group._reduce_scatter_comm, UnitReduceScatter)
        ]
        if lost:
            raise UsageError(
                f"{', '.join(lost)}: fully_shard or set_custom_reduce_scatter was called after "
                "accelerate_fsdp; call accelerate_fsdp after them"
            )

    def _updated(self, optimizer: torch.optim.Optimizer) -> None:
        """Count a step, but for one that no gradients came before: DCP takes it to make states."""
        self._uses.note(optimizer)  # of one without torch's hooks, too
        if not self._reducer.reduced:
            return
        self._reducer.updates += 1
        self._reducer.reduced = False
        if self._tracer is not None:
            self._tracer.update_ends()

    def _trace(self, optimizer: torch.optim.Optimizer) -> FsdpTracer:
        world = dist.get_world_size()
        sizes = {unit.group.mesh_info.mesh.size() for unit in self._units}
        if sizes != {world}:
            raise StrategyError(
                f"trace of modules on meshes of {sorted(sizes)} of {world} ranks; allowed: modules "
                "whose mesh has all ranks; leave trace out of the strategy"
            )
        control = new_group(backend="gloo") if world > 1 else None
        names = [unit.name for unit in self._units]
        return FsdpTracer(self._model, optimizer, self.strategy, names, control)

    def _groups(self, error: Exception | None) -> dict[tuple[int, ...], dist.ProcessGroup]:
        """Make a group for each set of ranks that share modules, and compare its ranks."""
        groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        units = {f"module {unit.name}": _described(unit) for unit in self._units}
        for unit in self._units:
            shared = unit.group._reduce_scatter_process_group
            members = tuple(dist.get_process_group_ranks(shared))
            if len(members) == 1 or members in groups:
                continue
            alone = len(members) < dist.get_world_size()
            if alone:
                check_groups(shared, "accelerate_fsdp (make those of some ranks alone after it)")
            group = new_group(members, like=shared, members_alone=alone)
            assert group is not None
            groups[members] = group
            agree({"strategy": self.strategy.to_json()} | units, group, error)
        if error is not None:
            raise error
        return groups

    def _release(self) -> None:
        for hook in self._hooks:
            hook.remove()
        if self._tracer is not None:
            self._tracer.close()
        for unit in self._units:
            if isinstance(comm_of(unit), UnitReduceScatter):
                unit.module.set_custom_reduce_scatter(DefaultReduceScatter())
            if self._tracer is not None and self._tracer.gathers(unit.group._all_gather_comm):
                unit.module.set_custom_all_gather(DefaultAllGather())
        self._reducer.close()
        self._uses.close()
        # The groups stay until the script destroys its own: torch would give a new one of the same
        # ranks the name of one that is gone, and read its addresses (2.13).
        self._hooks, self._tracer = [], None


def _described(unit: Unit) -> str:
    return f"{', '.join(unit.trainable)} ({unit.width} values a rank)"
