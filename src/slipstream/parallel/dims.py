"""The process groups of a run: all ranks, those that hold the same part of the model, those that
share one model. Never moves a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from zlib import crc32

import torch
import torch.distributed as dist

from slipstream import comm
from slipstream.cluster.connect import Cluster
from slipstream.errors import MismatchError
from slipstream.parallel.mesh import Mesh
from slipstream.strategy import Parallel
from slipstream.trace.recorder import Recorder
from slipstream.transport.consistency import collective_errors

_CLOSE = 1e-5


def mesh_of(parallel: Parallel, world_size: int) -> Mesh:
    """The box that ``world_size`` ranks make.

    Raises:
        StrategyError: they make none.
    """
    tensor = parallel.tensor.ranks if parallel.tensor else 1
    pipeline = parallel.pipeline.ranks if parallel.pipeline else 1
    return Mesh.of(world_size, pipeline=pipeline, tensor=tensor)


def checksum(batch: object) -> int:
    """Of the tensors in nested tuples, lists and mappings.

    Example:
        >>> checksum((torch.ones(2), {"x": [torch.zeros(1)]})) == checksum((torch.ones(2),))
        False
    """
    match batch:
        case torch.Tensor():
            values = batch.detach().cpu().contiguous().reshape(-1)
            return crc32(values.view(torch.uint8).numpy().tobytes(), batch.dim())
        case Mapping():
            return checksum([*batch.values()])
        case tuple() | list():
            return crc32(repr([checksum(part) for part in batch]).encode())
    return 0


@dataclass(frozen=True, slots=True)
class ParallelDims:
    """This rank among the others; groups are None where it is alone in them.

    Attributes:
        mesh: all ranks.
        data_ranks: those that train this part of the model on other data, in order.
        data_rank: this one's place among them.
        control: all ranks, for CPU tensors.
        data: those of ``data_ranks``, for CPU tensors.
        model: those that share one model, for CPU tensors.
        tensor: those that share layers.
        pipeline: those that share a chain of layers.
        new_data_group: another group of ``data_ranks``, for tensors of the run's device.
    """

    mesh: Mesh
    data_ranks: tuple[int, ...]
    data_rank: int
    control: dist.ProcessGroup | None
    data: dist.ProcessGroup | None
    model: dist.ProcessGroup | None
    tensor: comm.Group
    pipeline: dist.ProcessGroup | None
    new_data_group: Callable[[], dist.ProcessGroup | None]

    @classmethod
    def of(
        cls,
        cluster: Cluster,
        parallel: Parallel,
        control: dist.ProcessGroup | None,
        recorder: Recorder | None,
    ) -> ParallelDims:
        """Every rank of the world calls it."""
        mesh = mesh_of(parallel, cluster.world_size)

        def group_along(
            groups: tuple[tuple[int, ...], ...], backend: str | None
        ) -> dist.ProcessGroup | None:
            if len(groups[0]) == 1:
                return None
            made = [cluster.new_group(ranks, backend) for ranks in groups]
            return next((group for group in made if group is not None), None)

        data = mesh.groups("data")
        tensor = group_along(mesh.groups("tensor"), None)
        return cls(
            mesh=mesh,
            data_ranks=next(ranks for ranks in data if cluster.rank in ranks),
            data_rank=mesh.coordinates(cluster.rank)["data"],
            control=control,
            data=control if mesh.model_parallel == 1 else group_along(data, "gloo"),
            model=group_along(mesh.models(), "gloo"),
            tensor=comm.Group((cluster.rank,), None, False, 0)
            if tensor is None
            else comm.group_of(tensor, check=False, recorder=recorder),
            pipeline=group_along(mesh.groups("pipeline"), None),
            new_data_group=lambda: group_along(data, None),
        )

    @property
    def data_size(self) -> int:
        """How many ranks train this part of the model."""
        return len(self.data_ranks)

    def any_rank(self, flag: bool) -> bool:
        """Whether ``flag`` is up on any rank that shares this model."""
        if self.model is None:
            return flag
        up = torch.tensor(flag, dtype=torch.uint8)
        with collective_errors("the comparison of the ranks that share a model"):
            dist.all_reduce(up, op=dist.ReduceOp.MAX, group=self.model)
        return bool(up)

    def check_same_batch(self, batch: object) -> None:
        """Refuse batches that differ between ranks that share a model.

        Raises:
            MismatchError: names two ranks; on every rank alike.
        """
        if self.control is None:
            return
        own = torch.tensor([checksum(batch)])
        every = own.new_empty(self.control.size())
        with collective_errors("the comparison of batches"):
            dist.all_gather(list(every.split(1)), own, group=self.control)
        for first, *others in self.mesh.models():
            for other in others:
                if every[first] != every[other]:
                    raise MismatchError(
                        f"ranks {first} and {other} share one model, but got different first "
                        "batches; give both the same: shard the data by "
                        "slipstream.data_share(strategy), and draw random inputs by it"
                    )

    def check_same_loss(self, loss: torch.Tensor) -> None:
        """Refuse losses that differ between ranks that share all layers: their batches do.

        Raises:
            MismatchError: names two ranks and their losses; on every rank alike.
        """
        if self.control is None or self.mesh.tensor == 1:
            return
        own = loss.detach().to("cpu", torch.float64, copy=True).reshape(1)
        every = own.new_empty(self.control.size())
        with collective_errors("the comparison of losses"):
            dist.all_gather(list(every.split(1)), own, group=self.control)
        losses = every.tolist()
        for first, *others in self.mesh.groups("tensor"):
            for other in others:
                pair = losses[first], losses[other]
                if all(map(math.isnan, pair)):
                    continue
                if not math.isclose(*pair, rel_tol=_CLOSE, abs_tol=_CLOSE):
                    raise MismatchError(
                        f"ranks {first} and {other} share the layers of one model, but their first "
                        f"losses are {losses[first]:.8g} and {losses[other]:.8g}; give both the "
                        "same batches: shard the data by slipstream.data_share(strategy), and draw "
                        "random inputs by it"
                    )
