"""The reduce-scatter of gradients under FSDP2: half the bytes of gloo's, coded or not.

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
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter as ReduceScatterComm
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo

from slipstream.adapters.fsdp2_checks import check_width
from slipstream.adapters.fsdp2_trace import FsdpTracer, traced_args
from slipstream.adapters.fsdp2_units import Unit
from slipstream.adapters.fsdp2_used import Uses
from slipstream.codecs import HalfCodec
from slipstream.errors import UsageError
from slipstream.strategy import DirectConfig, HalfConfig, Strategy
from slipstream.trace.event import reduce_scatter
from slipstream.transport.channel import Channel, Label
from slipstream.transport.direct import DirectTransport
from slipstream.transport.requests import ExchangeSteps, ReduceScatter, Request, sent_bytes

KNOWN_TORCH = "2.13."
"""Versions of which it is known when they read a reduced gradient; others wait for each."""


class Reducer:
    """Reduces the gradients of units, beside backward where torch allows it.

    Args:
        strategy: says the codec, and whether exchanges overlap backward.
        groups: of each set of ranks that share units.
        tracer: records them; None: nobody does.
        uses: tells which exchanges count.

    Attributes:
        updates: steps of the optimizer so far that gradients came before.
        sent_bytes: of gradients that this rank has sent so far.
        under_way: modules whose gradients travel, and hold NaN until they are there.
        reduced: whether gradients came since the last update; also where nobody else is there.
    """

    def __init__(
        self,
        strategy: Strategy,
        groups: Mapping[tuple[int, ...], dist.ProcessGroup],
        tracer: FsdpTracer | None,
        uses: Uses,
    ) -> None:
        self.updates = self.sent_bytes = self.under_way = 0
        self.reduced = False
        self._gradients, self._tracer, self._uses = strategy.gradients, tracer, uses
        self._channels: dict[tuple[int, ...], Channel] = {}
        recorder = None if tracer is None else tracer.recorder
        for members, group in groups.items():
            transport, cpu = DirectTransport(DirectConfig(), group), torch.device("cpu")
            self._channels[members] = Channel(transport, [transport], cpu, recorder)

    def reduce_scatter(self, unit: Unit, rows: torch.Tensor, out: torch.Tensor, op: Any) -> None:
        """Leave in ``out`` this rank's row of the sum or average of ``rows`` over the ranks."""
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            named = dist.ReduceOp.RedOpType.__members__.items()
            given = next((name for name, value in named if op == value), str(op))
            raise UsageError(
                f"{unit.name}: gradients are to be reduced by {given}; allowed: "
                "SUM and AVG. Where a gradient_divide_factor is set, call "
                "set_force_sum_reduction_for_comms(True), too: then torch divides by it"
            )
        average, codec = op == dist.ReduceOp.AVG, self._gradients.codec
        goes_on = self._may_go_on(unit, rows, average=average)
        what = f"the reduce-scatter of {unit.name}"
        args = traced_args(unit.name, rows)
        late = self.updates < getattr(codec, "start_step", 0)
        exchange: Request | ExchangeSteps
        if unit.compressor is not None and not late:
            self._uses.before_exchange(unit)
            check_width(unit, rows.shape[1])
            exchange = self._steps(unit, rows, out, args)
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

    def make_room(self, unit: Unit) -> None:
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

    def _may_go_on(self, unit: Unit, rows: torch.Tensor, *, average: bool) -> bool:
        """Whether torch reads none of the values before backward is over."""
        group = unit.group
        in_backward = torch._C._current_graph_task_id() != -1  # torch tells nowhere else (2.13)
        return (
            self._gradients.overlap
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

    def _steps(
        self, unit: Unit, rows: torch.Tensor, out: torch.Tensor, args: dict[str, Any]
    ) -> ExchangeSteps:
        assert unit.compressor is not None
        for request in unit.compressor.exchange(rows, out):
            self._count(request, unit, args)
            yield request
        unit.nonzero = unit.compressor.feedback and bool(out.any())

    def _count(self, request: Request, unit: Unit, args: dict[str, Any]) -> None:
        sent = round(sent_bytes(request, unit.ranks.count))
        args["sent"] += sent
        self.sent_bytes += sent

    def _channel(self, unit: Unit) -> Channel:
        members = dist.get_process_group_ranks(unit.group._reduce_scatter_process_group)
        return self._channels[tuple(members)]

    def close(self) -> None:
        """End the channels, without a collective."""
        for channel in self._channels.values():
            channel.close()
        self._tracer, self.under_way = None, 0


class UnitReduceScatter(ReduceScatterComm):
    """The reduce-scatter of a unit, as FSDP2 calls it."""

    def __init__(self, reducer: Reducer, unit: Unit) -> None:
        self._reducer, self._unit = reducer, unit

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        self._reducer.make_room(self._unit)
        self._reducer.reduced = True
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
        self._reducer.reduce_scatter(self._unit, rows, output_tensor, op)
