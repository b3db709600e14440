"""The parallel dimensions of a run: which ranks split the data, the stages and the layers.

`Mesh` is a pure function of three sizes; `ParallelDims` makes its process groups. No gradients move
here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from slipstream import comm
from slipstream.cluster.connect import Cluster
from slipstream.errors import MismatchError, StrategyError
from slipstream.pytree import checksum
from slipstream.strategy import ParallelConfig
from slipstream.trace.recorder import Recorder
from slipstream.transport.consistency import collective_errors

T = TypeVar("T")
RankGroups = tuple[tuple[int, ...], ...]

_LOSS_TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks 0 .. ``world_size - 1`` in a box of data x pipeline x tensor.

    Tensor-parallel ranks are neighbours, since they communicate most and should share a host; then
    come pipeline stages, then data.

    Example:
        >>> mesh = Mesh.of(8, pipeline=2, tensor=2)
        >>> mesh.data, mesh.coordinates(6)
        (2, {'data': 1, 'pipeline': 1, 'tensor': 0})
        >>> mesh.groups("tensor")
        ((0, 1), (2, 3), (4, 5), (6, 7))
        >>> mesh.groups("data")
        ((0, 4), (1, 5), (2, 6), (3, 7))
        >>> mesh.groups("pipeline", "tensor")
        ((0, 1, 2, 3), (4, 5, 6, 7))
    """

    data: int
    pipeline: int = 1
    tensor: int = 1

    @classmethod
    def of(cls, world_size: int, *, pipeline: int = 1, tensor: int = 1) -> Mesh:
        """The mesh of ``world_size`` ranks; ranks that are left over train data-parallel.

        Raises:
            StrategyError: ``world_size`` is not a multiple of ``pipeline * tensor``.
        """
        model_parallel = pipeline * tensor
        if world_size % model_parallel:
            raise StrategyError(
                f"parallel: {pipeline} stages x {tensor} tensor ranks take {model_parallel} ranks, "
                f"but {world_size} were started; allowed: a multiple of {model_parallel}"
            )
        return cls(world_size // model_parallel, pipeline, tensor)

    @property
    def model_parallel(self) -> int:
        """Number of ranks that one copy of the model is spread over."""
        return self.pipeline * self.tensor

    @property
    def sizes(self) -> dict[str, int]:
        """Ranks along each axis."""
        return {"data": self.data, "pipeline": self.pipeline, "tensor": self.tensor}

    def coordinates(self, rank: int) -> dict[str, int]:
        """The position of a rank along each axis."""
        rank, tensor = divmod(rank, self.tensor)
        data, pipeline = divmod(rank, self.pipeline)
        return {"data": data, "pipeline": pipeline, "tensor": tensor}

    def groups(self, *axes: str) -> RankGroups:
        """The ranks that differ along ``axes`` only, group by group; every rank is in one."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(math.prod(self.sizes.values())):
            others = [place for axis, place in self.coordinates(rank).items() if axis not in axes]
            groups.setdefault(tuple(others), []).append(rank)
        return tuple(map(tuple, groups.values()))


def gather_objects(local: T, what: str, group: dist.ProcessGroup) -> list[T]:
    """Gather what every rank of ``group`` has, on every rank.

    Raises:
        ExchangeError: another rank is gone.
    """
    by_rank = [local] * dist.get_world_size(group)
    with collective_errors(f"the gathering of {what}"):
        dist.all_gather_object(by_rank, local, group=group)
    return by_rank


def mesh_of(parallel: ParallelConfig, world_size: int) -> Mesh:
    """The mesh of a strategy on ``world_size`` ranks.

    Raises:
        StrategyError: as `Mesh.of`.
    """
    tensor = parallel.tensor.ranks if parallel.tensor else 1
    pipeline = parallel.pipeline.ranks if parallel.pipeline else 1
    return Mesh.of(world_size, pipeline=pipeline, tensor=tensor)


@dataclass(frozen=True, slots=True)
class ParallelDims:
    """The mesh and this rank's process groups in it; a group of one rank is None.

    Not torch's ``DeviceMesh``: it makes one group for each dimension, with one backend. Here the
    data dimension needs a gloo group for CPU tensors beside any number of groups for gradients,
    which are made later, and the two model-parallel dimensions need a common group.

    Attributes:
        mesh: all ranks.
        data_ranks: the ranks that train this part of the model on other data, in order.
        data_rank: this rank's place among them.
        control: all ranks, for CPU tensors.
        data: ``data_ranks``, for CPU tensors.
        model: the ranks of this copy of the model, for CPU tensors.
        tensor: the ranks that share this rank's layers.
        pipeline: the ranks of this rank's pipeline.
        new_data_group: makes another group of ``data_ranks``, for tensors of the run's device.
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
        parallel: ParallelConfig,
        control: dist.ProcessGroup | None,
        recorder: Recorder | None,
    ) -> ParallelDims:
        """The dimensions of a strategy. Collective over the world."""
        mesh = mesh_of(parallel, cluster.world_size)

        def group_among(groups: RankGroups, backend: str | None) -> dist.ProcessGroup | None:
            # Every rank makes all groups, in the same order: torch demands it.
            if len(groups[0]) == 1:
                return None
            made = [cluster.new_group(ranks, backend) for ranks in groups]
            return next((group for group in made if group is not None), None)

        data = mesh.groups("data")
        tensor = group_among(mesh.groups("tensor"), None)
        return cls(
            mesh=mesh,
            data_ranks=next(ranks for ranks in data if cluster.rank in ranks),
            data_rank=mesh.coordinates(cluster.rank)["data"],
            control=control,
            data=control if mesh.model_parallel == 1 else group_among(data, "gloo"),
            model=group_among(mesh.groups("pipeline", "tensor"), "gloo"),
            tensor=comm.Group((cluster.rank,), None, False, 0)
            if tensor is None
            else comm.group_of(tensor, check=False, recorder=recorder),
            pipeline=group_among(mesh.groups("pipeline"), None),
            new_data_group=lambda: group_among(data, None),
        )

    @property
    def data_size(self) -> int:
        """Number of ranks that train this part of the model."""
        return len(self.data_ranks)

    @property
    def connected(self) -> bool:
        """Whether the groups are there: a script may have destroyed them."""
        try:
            return self.control is None or dist.get_rank(self.control) >= 0
        except ValueError:  # the script has
            return False

    def any_rank(self, flag: bool) -> bool:
        """Whether ``flag`` is set on any rank of this copy of the model."""
        if self.model is None:
            return flag
        combined = torch.tensor(flag, dtype=torch.uint8)
        with collective_errors("the comparison of the ranks of one model"):
            dist.all_reduce(combined, op=dist.ReduceOp.MAX, group=self.model)
        return bool(combined)

    def check_same_batch(self, batch: object) -> None:
        """Refuse batches that differ between ranks of one copy of the model. Collective.

        Raises:
            MismatchError: names two ranks; on every rank alike.
        """
        if self.control is None:
            return
        value, groups = torch.tensor([checksum(batch)]), self.mesh.groups("pipeline", "tensor")
        for first, other, _, _ in _differences(value, "batches", self.control, groups):
            raise MismatchError(
                f"ranks {first} and {other} train one model, but got different first batches; "
                f"{_SAME_BATCHES}"
            )

    def check_same_loss(self, loss: torch.Tensor) -> None:
        """Refuse losses that differ between tensor-parallel ranks: their batches differ.

        Raises:
            MismatchError: names two ranks and their losses; on every rank alike.
        """
        if self.control is None or self.mesh.tensor == 1:
            return
        scalar = loss.detach().to("cpu", torch.float64, copy=True).reshape(1)
        groups = self.mesh.groups("tensor")
        differences = _differences(scalar, "losses", self.control, groups, _LOSS_TOLERANCE)
        for first, other, a, b in differences:
            raise MismatchError(
                f"ranks {first} and {other} train the layers of one model, but their first "
                f"losses are {a:.8g} and {b:.8g}; {_SAME_BATCHES}"
            )


_SAME_BATCHES = (
    "give both the same batches: shard the data, and seed random inputs, by "
    "slipstream.data_share(strategy)"
)


def _differences(
    x: torch.Tensor, what: str, control: dist.ProcessGroup, groups: RankGroups, tolerance: float = 0
) -> Iterator[tuple[int, int, float, float]]:
    """The first rank of a group, another one, and their values of ``x``, where these differ."""
    gathered = x.new_empty(control.size())
    with collective_errors(f"the comparison of {what}"):
        dist.all_gather(list(gathered.split(1)), x, group=control)
    values = gathered.tolist()
    for first, *others in groups:
        for other in others:
            a, b = values[first], values[other]
            equal = math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance)
            if not equal and not (math.isnan(a) and math.isnan(b)):
                yield first, other, a, b
