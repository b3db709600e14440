"""torch's FSDP2 (``fully_shard``): a reduce-scatter that sends half of what gloo's does, coded or
not, and traces.

[Note: Waiting]
On a CPU FSDP2 has no streams: it waits for each of its collectives where it makes it. But what it
does with a reduced gradient is, in the usual case, to put a view of it into ``parameter.grad``, and
gradients are promised when backward is over, as on a GPU. Then the exchange goes on beside the
backward of the modules before, as many at a time as torch keeps buffers for
(``set_reduce_scatter_max_input_buffers``, 1), and what is under way holds NaN. Where torch reads
the values at once, to cast, divide, add or all-reduce them or for a hook, they are waited for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from zlib import crc32

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter as ReduceScatterComm
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from slipstream.adapters.fsdp2_trace import FsdpTracer, traced_args
from slipstream.cluster.groups import new_group
from slipstream.codecs import HalfCodec, Int8Codec, OneBitCodec, Ranks, ScatterCompressor
from slipstream.codecs.int4 import Int4Codec
from slipstream.errors import ModelError, StrategyError, UsageError
from slipstream.session.accelerate import strategy_of
from slipstream.strategy import (
    CodecVariant,
    DirectConfig,
    HalfConfig,
    Int4Config,
    Int8Config,
    OneBitConfig,
    Strategy,
)
from slipstream.trace.event import reduce_scatter
from slipstream.transport.channel import Channel, Label
from slipstream.transport.consistency import agree
from slipstream.transport.direct import DirectTransport
from slipstream.transport.requests import ExchangeSteps, ReduceScatter, Request, sent_bytes

KNOWN_TORCH = "2.13."
"""Versions of which it is known when they read a reduced gradient; others wait for each."""

CODECS: tuple[type[CodecVariant], ...] = (HalfConfig, Int8Config, Int4Config, OneBitConfig)
"""Those that can carry a reduce-scatter: each rank gets its part of the sum alone."""

REFUSED: Mapping[str, str] = {
    "gradients.split": "the modules given to fully_shard are the split",
    "gradients.accumulate": "call model.set_requires_gradient_sync(False) before the other passes",
    "local": "FSDP2 has no rank with a whole model, which could train apart",
    "parallel": "give fully_shard a mesh of several dimensions",
    "precision": "give fully_shard a MixedPrecisionPolicy",
    "memory": "use torch.utils.checkpoint, or reshard_after_forward=True",
    "compute": "use torch.compile",
    "data": "slipstream does not see the loader",
    "checks": "no session looks at the updates",
}
"""By setting that FSDP2 does not take, the reason or what to use instead."""


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
        _check_strategy(chosen)
    except Exception as caught:  # of any kind: the other ranks wait for this one's answer
        error = caught
    return FsdpExchange(model, optimizer, chosen, error)


@dataclass(eq=False, slots=True)
class _Unit:
    """A call of ``fully_shard``: parameters that are gathered, and reduced, together.

    Attributes:
        name: path of its module; of the model its class.
        module: its comms are set on.
        group: torch's state of the parameters.
        ranks: that share them.
        paths: of all modules of the model.
        compressor: of its gradients; None: they travel as they are, or in half.
    """

    name: str
    module: FSDPModule
    group: FSDPParamGroup
    ranks: Ranks
    paths: Mapping[nn.Module, str]
    compressor: ScatterCompressor | None = None

    @property
    def trainable(self) -> list[str]:
        """Paths of the parameters that get gradients now."""
        return [self.path(p) for p in self.group.fsdp_params if p.sharded_param.requires_grad]

    @property
    def width(self) -> int:
        """Values of a rank's part of the gradients, where every trainable parameter has one."""
        params = [p for p in self.group.fsdp_params if p.sharded_param.requires_grad]
        return sum(p.padded_sharded_param_size.numel() for p in params)

    def path(self, param: FSDPParam) -> str:
        """The path of a parameter in the model."""
        info = param._module_info
        return f"{self.paths[info.module]}.{info.param_name}".removeprefix(".")


class FsdpExchange:
    """The exchange of `accelerate_fsdp` at work; leaves the model as it was at ``close()``.

    Attributes:
        strategy: in use.
        updates: steps of the optimizer so far.
        sent_bytes: of gradients that this rank has sent so far.
        under_way: modules whose gradients travel, and hold NaN until they are there.

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
        self.strategy, self.updates, self.sent_bytes = strategy, 0, 0
        self._model = model
        self._units = _units(model)
        _check_units(self._units, strategy.gradients.codec)
        self.under_way = 0
        self._hooks: list[Any] = []
        self._tracer: FsdpTracer | None = None
        groups = self._groups(error)
        if strategy.trace.steps is not None:
            self._tracer = self._trace(optimizer)
        recorder = None if self._tracer is None else self._tracer.recorder
        self._channels: dict[tuple[int, ...], Channel] = {}
        for members, group in groups.items():
            transport, cpu = DirectTransport(DirectConfig(), group), torch.device("cpu")
            self._channels[members] = Channel(transport, [transport], cpu, recorder)
        for unit in self._units:
            unit.compressor = _compressor(strategy.gradients.codec, unit)
        for unit in self._units:
            unit.module.set_custom_reduce_scatter(_Scatter(self, unit))
            if self._tracer is not None:
                gather = self._tracer.gather(unit.name, unit.group._all_gather_comm)
                unit.module.set_custom_all_gather(gather)
        self._hooks += [
            # As torch's own hooks: a compiled model would trace it.
            model.register_forward_pre_hook(torch.compiler.disable(lambda *_: self._begin())),
            optimizer.register_step_pre_hook(lambda *_: self.wait()),
            optimizer.register_step_post_hook(lambda *_: self._updated()),
        ]

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

    # State.

    def state_dict(self) -> dict[str, Any]:
        """State with which this rank goes on bit for bit, beside that of model and optimizer; every
        rank saves its own. ``error`` is what a codec has not sent yet."""
        self.wait()
        units = {
            unit.name: {
                "calls": unit.compressor.calls,
                "parameters": unit.trainable,
                "error": None if (e := unit.compressor.error) is None else e.clone(),
            }
            for unit in self._units
            if unit.compressor is not None
        }
        ranks = dist.get_rank(), dist.get_world_size()
        return {"rank": ranks[0], "ranks": ranks[1], "updates": self.updates, "units": units}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict()`` of the same rank, under the same codec.

        Raises:
            UsageError: the state is of another rank, of another number of ranks, or of other
                modules.
        """
        here, there = (dist.get_rank(), dist.get_world_size()), (state["rank"], state["ranks"])
        if here != there:
            raise UsageError(
                f"this state is of rank {there[0]} of {there[1]}, this is rank {here[0]} of "
                f"{here[1]}: what a codec has not sent yet differs from rank to rank; save and "
                "load one state a rank, and train on as many ranks"
            )
        coded = {unit.name: unit for unit in self._units if unit.compressor is not None}
        if coded.keys() != state["units"].keys():
            raise UsageError(
                f"this state is of the modules {sorted(state['units'])}, coded are here "
                f"{sorted(coded)}: load it under the strategy and the calls of fully_shard that it "
                "was saved with"
            )
        for name, unit in coded.items():
            saved, compressor = state["units"][name], unit.compressor
            assert compressor is not None
            error = saved["error"]
            if error is not None and (
                saved["parameters"] != unit.trainable or error.shape[1] != unit.width
            ):
                raise UsageError(
                    f"{name}: this state is of {saved['parameters']} with {error.shape[1]} values "
                    f"a rank, trainable are here {unit.trainable} with {unit.width}: load it into "
                    "the model that it was saved with"
                )
            compressor.calls = saved["calls"]
            compressor.error = None if error is None else error.clone()
        self.updates = state["updates"]

    # Exchanges.

    def reduce_scatter(self, unit: _Unit, rows: torch.Tensor, out: torch.Tensor, op: Any) -> None:
        """Leave in ``out`` this rank's row of the sum or average of ``rows`` over the ranks."""
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            named = dist.ReduceOp.RedOpType.__members__.items()
            given = next((name for name, value in named if op == value), str(op))
            raise UsageError(
                f"{unit.name}: gradients are to be reduced by {given}; allowed: "
                "SUM and AVG. Where a gradient_divide_factor is set, call "
                "set_force_sum_reduction_for_comms(True), too: then torch divides by it"
            )
        average, codec = op == dist.ReduceOp.AVG, self.strategy.gradients.codec
        goes_on = self._may_go_on(unit, rows, average=average)
        what = f"the reduce-scatter of {unit.name}"
        args = traced_args(unit.name, rows)
        late = self.updates < getattr(codec, "start_step", 0)
        exchange: Request | ExchangeSteps
        if unit.compressor is not None and not late:
            _check_width(unit, rows.shape[1])
            exchange = self._steps(unit, unit.compressor.exchange(rows, out), args)
        else:
            if isinstance(codec, HalfConfig):
                if average:  # before the cast: a sum overflows only where the average would
                    rows.div_(unit.ranks.count)
                    average = False
                rows = HalfCodec(codec.dtype).encode(rows)
            exchange = ReduceScatter(rows, out)
            self._count(exchange, unit, args)
        if goes_on:
            out.fill_(torch.nan)  # nobody takes what lies there for a gradient
        span = ""
        if self._tracer is not None:
            span = reduce_scatter(self._tracer.next_number())
        label = Label(span, lambda: f"rank {unit.ranks.rank}, {what}", args, what)

        def divide() -> None:
            out.div_(unit.ranks.count)

        self._channel(unit).start(label, exchange, divide if average else None)
        self.under_way += 1
        if goes_on:
            queue: Any = torch.autograd.Variable._execution_engine.queue_callback
            queue(self.wait)
        else:
            self.wait()

    def make_room(self, unit: _Unit) -> None:
        """Wait, if as many gradients are under way as torch may keep."""
        most = getattr(unit.group.comm_ctx, "reduce_scatter_max_input_buffers", 1)  # since 2.13
        if self.under_way >= most:
            self.wait()

    def wait(self) -> None:
        """Return when all gradients have come: called where backward ends, and before an update.

        Raises:
            ExchangeError: one of the exchanges failed; names the module.
        """
        in_flight = [channel for channel in self._channels.values() if channel.in_flight]
        if in_flight and self._tracer is not None:
            self._tracer.exchange_begins()
        for channel in in_flight:
            channel.wait()
        self.under_way = 0
        if in_flight and self._tracer is not None:
            self._tracer.computing_goes_on()

    def _may_go_on(self, unit: _Unit, rows: torch.Tensor, *, average: bool) -> bool:
        """Whether torch reads none of the values before backward is over."""
        group = unit.group
        in_backward = torch._C._current_graph_task_id() != -1  # torch tells nowhere else (2.13)
        return (
            self.strategy.gradients.overlap
            and torch.__version__.startswith(KNOWN_TORCH)
            and in_backward
            and average  # else torch divides
            and not isinstance(group.mesh_info, DDPMeshInfo)
            and group._all_reduce_hook is None
            and group._orig_dtype == rows.dtype
            and not any(
                p.offload_to_cpu
                or p.sharded_param.grad is not None
                or getattr(p.sharded_param, "_post_accumulate_grad_hooks", None)
                for p in group.fsdp_params
            )
        )

    def _steps(self, unit: _Unit, steps: ExchangeSteps, args: dict[str, Any]) -> ExchangeSteps:
        for request in steps:
            self._count(request, unit, args)
            yield request

    def _count(self, request: Request, unit: _Unit, args: dict[str, Any]) -> None:
        sent = round(sent_bytes(request, unit.ranks.count))
        args["sent"] += sent
        self.sent_bytes += sent

    # Hooks.

    def _begin(self) -> None:
        """A forward begins; refuse one whose gradients would travel otherwise."""
        self.wait()  # of a backward that has raised
        lost = [
            name or "the model itself"
            for name, module in self._model.named_modules()
            if isinstance(module, FSDPModule)
            for group in module._get_fsdp_state()._fsdp_param_groups
            if not isinstance(group._reduce_scatter_comm, _Scatter)
        ]
        if lost:
            raise UsageError(
                f"{', '.join(lost)}: fully_shard or set_custom_reduce_scatter was called after "
                "accelerate_fsdp; call accelerate_fsdp after them"
            )

    def _updated(self) -> None:
        self.updates += 1

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
        units = {f"module {unit.name}": _said(unit) for unit in self._units}
        for unit in self._units:
            shared = unit.group._reduce_scatter_process_group
            members = tuple(dist.get_process_group_ranks(shared))
            if len(members) == 1 or members in groups:
                continue
            group = new_group(members, like=shared, members_alone=True)
            assert group is not None
            groups[members] = group
            agree({"strategy": self.strategy.to_json()} | units, group, error)
        if error is not None:
            raise error
        return groups

    def _channel(self, unit: _Unit) -> Channel:
        members = dist.get_process_group_ranks(unit.group._reduce_scatter_process_group)
        return self._channels[tuple(members)]

    def _release(self) -> None:
        for hook in self._hooks:
            hook.remove()
        if self._tracer is not None:
            self._tracer.close()
        for unit in self._units:
            if isinstance(_comm(unit), _Scatter):
                unit.module.set_custom_reduce_scatter(DefaultReduceScatter())
            if self._tracer is not None and self._tracer.gathers(unit.group._all_gather_comm):
                unit.module.set_custom_all_gather(DefaultAllGather())
        for channel in self._channels.values():
            channel.close()
        # The groups stay until the script destroys its own: torch would give a new one of the same
        # ranks the name of one that is gone, and read its addresses (2.13).
        self._hooks, self._tracer, self.under_way = [], None, 0


class _Scatter(ReduceScatterComm):
    """The reduce-scatter of a unit, as FSDP2 calls it."""

    def __init__(self, exchange: FsdpExchange, unit: _Unit) -> None:
        self._exchange, self._unit = exchange, unit

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        self._exchange.make_room(self._unit)
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        rows = input_tensor.view(self._unit.ranks.count, -1)
        self._exchange.reduce_scatter(self._unit, rows, output_tensor, op)


def _units(model: nn.Module) -> list[_Unit]:
    """The calls of ``fully_shard`` inside a model that have parameters of their own."""
    found: dict[int, _Unit] = {}
    paths = {module: name for name, module in model.named_modules()}
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        # torch tells nowhere else what a module's comms are, and which ranks share it (2.13).
        state = module._get_fsdp_state()
        groups: Sequence[FSDPParamGroup] = state._fsdp_param_groups
        name = name or type(model).__name__.removeprefix("FSDP")
        if len(groups) > 1:
            raise ModelError(
                f"{name}: fully_shard put its parameters on {len(groups)} meshes "
                "(shard_placement_fn); allowed: one, as torch takes no reduce-scatter of others "
                "for several"
            )
        for group in groups:
            if not isinstance(group.mesh_info, FSDPMeshInfo):
                raise ModelError(
                    f"{name}: its parameters are replicated, and nothing is reduce-scattered; "
                    "allowed: modules under fully_shard"
                )
            shared = group._reduce_scatter_process_group
            ranks = Ranks(dist.get_rank(shared), dist.get_world_size(shared))
            found.setdefault(id(state), _Unit(name, module, group, ranks, paths))
    return list(found.values())


def _comm(unit: _Unit) -> object:
    return unit.group._reduce_scatter_comm


def _check_units(units: Sequence[_Unit], codec: CodecVariant | None) -> None:
    if not units:
        raise ModelError(
            "no module of this model is under fully_shard; call fully_shard on it first, or use "
            "slipstream.accelerate(), which takes plain models"
        )
    for unit in units:
        check_device(unit.group.device, codec, unit.name)
        for comm, own in (
            (_comm(unit), DefaultReduceScatter),
            (unit.group._all_gather_comm, DefaultAllGather),
        ):
            if type(comm) is not own:
                raise ModelError(
                    f"{unit.name}: a {type(comm).__name__} is set on it already (by "
                    "accelerate_fsdp, set_custom_..., set_symm_mem_for_comm or "
                    "set_allocate_memory_from_process_group_for_comm); allowed: torch's own: "
                    "close the other exchange, or leave out the call"
                )
        params = unit.group.fsdp_params
        complex_ones = [unit.path(p) for p in params if p.sharded_param.is_complex()]
        if codec is not None and complex_ones:
            raise ModelError(
                f"{unit.name}: the complex parameters {', '.join(complex_ones)} under the codec "
                f"{codec.kind}; allowed: real ones, or no codec"
            )


def check_device(device: torch.device, codec: CodecVariant | None, name: str) -> None:
    """Refuse modules that are not on CPUs.

    Raises:
        ModelError: on another device.
    """
    if device.type == "cpu":
        return
    if codec is None:
        reason = (
            "there is nothing to do, as NCCL's reduce-scatter sends no more than this one: leave "
            "accelerate_fsdp out"
        )
    else:
        reason = f"the codec {codec.kind} has not been tried there: leave it out, or train on CPUs"
    raise ModelError(f"{name} is on {device.type}: {reason}")


def _check_strategy(strategy: Strategy) -> None:
    default, wrong = Strategy(), []
    for path, reason in REFUSED.items():
        given, usual = strategy, default
        for part in path.split("."):
            given, usual = getattr(given, part), getattr(usual, part)
        if given != usual:
            wrong.append(f"{path}: {reason}")
    gradients = strategy.gradients
    if gradients.transport.kind not in ("flat", "direct"):
        wrong.append(f"gradients.transport: {gradients.transport.kind}; allowed: direct")
    if gradients.codec is not None and type(gradients.codec) not in CODECS:
        kinds = ", ".join(codec.model_fields["kind"].default for codec in CODECS)
        wrong.append(
            f"gradients.codec: {gradients.codec.kind} cannot carry a reduce-scatter; allowed: "
            f"{kinds}"
        )
    if wrong:
        lines = "\n".join(f"  {line}" for line in wrong)
        raise StrategyError(f"settings that FSDP2 does not take:\n{lines}")


def _check_width(unit: _Unit, width: int) -> None:
    """Refuse gradients whose place in what the codec owes is not known."""
    compressor = unit.compressor
    if compressor is None or not compressor.feedback:
        return
    owed = compressor.error
    if width != unit.width or (owed is not None and owed.shape[1] != width):
        before = "" if owed is None else f", and {owed.shape[1]} in the pass before"
        raise ModelError(
            f"{unit.name}: gradients of {width} values a rank came; its trainable parameters have "
            f"{unit.width}{before}. The codec owes parts of earlier gradients to each of them, so "
            "all need one in every pass: call set_reduce_scatter_unused_params(True); after "
            "freezing or unfreezing, close() this exchange and make a new one"
        )


def _compressor(codec: CodecVariant | None, unit: _Unit) -> ScatterCompressor | None:
    seed = crc32(unit.name.encode())
    match codec:
        case Int8Config():
            coding = Int8Codec(codec.block, codec.rounding)
            return ScatterCompressor(coding, unit.ranks, feedback=codec.error_feedback, seed=seed)
        case Int4Config():
            return ScatterCompressor(Int4Codec(codec.block), unit.ranks, feedback=True, seed=seed)
        case OneBitConfig():
            return ScatterCompressor(OneBitCodec(codec.block), unit.ranks, feedback=True, seed=seed)
    return None


def _said(unit: _Unit) -> str:
    return f"{', '.join(unit.trainable)} ({unit.width} values a rank)"
