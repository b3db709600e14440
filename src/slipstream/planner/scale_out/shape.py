"""Shape of a training without a trace: the model, its batch, the machine, the parallel sizes.

A file of them is YAML or JSON, and is checked as a strategy is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from slipstream.errors import StrategyError
from slipstream.strategy.setting import Setting
from slipstream.strategy.yaml import read

Whole = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]


Backend = Literal["nccl", "gloo"]


class FabricConfig(Setting):
    """Links that hosts share, and differences between ranks.

    Example:
        >>> FabricConfig(hosts_per_rack=16, oversubscription=4.0).jitter
        0.0
    """

    hosts_per_rack: Whole | None = None
    """Hosts that share an uplink; null: no link is shared by hosts."""
    oversubscription: Annotated[float, Field(ge=1)] = 1.0
    """How many times the rate of the uplink the hosts of a rack can send together."""
    jitter: Share = 0.0
    """Spread of a rank's times from update to update, as a share of them."""
    unequal: Share = 0.0
    """Spread of the ranks' speeds that stays, as a share of them."""

    @model_validator(mode="after")
    def _has_racks(self) -> Self:
        if self.oversubscription > 1 and self.hosts_per_rack is None:
            raise ValueError(
                f"oversubscription {self.oversubscription:g} needs hosts_per_rack, the hosts that "
                "share an uplink; add it, or leave oversubscription out"
            )
        return self


class _FileConfig(Setting):
    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file.

        Raises:
            StrategyError: it cannot be read, or a value is wrong; names the place.
        """
        document = read(path)
        try:
            return cls.model_validate(document)
        except StrategyError as error:
            raise StrategyError(f"{path}: {error}") from None


class FabricFileConfig(_FileConfig):
    """A file of the fabric alone, beside a trace.

    Example:
        >>> FabricFileConfig.model_validate({"fabric": {"jitter": 0.02}}).fabric.jitter
        0.02
    """

    fabric: FabricConfig


class TransformerConfig(Setting):
    """A decoder-only transformer.

    Example:
        >>> TransformerConfig(hidden=64, layers=2, heads=2, sequence=128, vocabulary=512).recompute
        True
    """

    hidden: Whole
    layers: Whole
    heads: Whole
    sequence: Whole
    """Tokens of a sample."""
    vocabulary: Whole
    recompute: bool = True
    """Whether backward computes forward again."""
    gradient_bytes: Annotated[int, Field(ge=1, le=8)] = 2
    """Bytes of each element of a gradient as it travels."""


class BatchConfig(Setting):
    """Samples of an update, and of a micro-batch.

    Example:
        >>> BatchConfig(micro=2, total=1536).total
        1536
    """

    micro: Whole
    """Samples of a micro-batch."""
    total: Whole | None = None
    """Samples of an update of all ranks: more ranks compute fewer each."""
    per_replica: Whole | None = None
    """Samples of an update of each replica: more ranks compute more."""

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if (self.total is None) == (self.per_replica is None):
            raise ValueError(
                f"total is {self.total}, per_replica {self.per_replica}; give one of them: the "
                "samples of an update of all ranks, or of each replica"
            )
        return self


class MachineConfig(Setting):
    """Hosts and their ranks, as fast as they are in practice.

    Example:
        >>> MachineConfig(ranks_per_host=8, teraflops=250.0, memory_gbytes=750.0,
        ...               inside_gbytes=250.0, host_gbytes=90.0).layer_ms
        0.0
    """

    ranks_per_host: Whole
    backend: Backend = "nccl"
    """Of collectives: nccl of GPUs, gloo of ranks whose gradients are in the memory of CPUs, which
    alone have direct sends and sums inside hosts."""
    teraflops: Positive
    """10^12 operations a second that matrix products reach on a rank."""
    memory_gbytes: Positive
    """10^9 bytes a second that everything else reads and writes on a rank."""
    layer_ms: Annotated[float, Field(ge=0)] = 0.0
    """Milliseconds that a layer takes for a micro-batch of any size, to start its kernels."""
    update_ms: Annotated[float, Field(ge=0)] = 0.0
    """Milliseconds of an update that do not depend on its batch."""
    inside_gbytes: Positive
    """10^9 bytes a second from a rank to another one of its host, each way."""
    host_gbytes: Positive
    """10^9 bytes a second from a host to another one, each way; its ranks share them."""
    inside_us: Annotated[float, Field(ge=0)] = 5.0
    """Microseconds until a message inside a host begins to arrive."""
    host_us: Annotated[float, Field(ge=0)] = 10.0
    """The same between hosts."""


class ReplicaConfig(Setting):
    """Ranks that one replica of the model is split over; the others hold other replicas.

    Example:
        >>> ReplicaConfig(tensor=8, pipeline=4).interleaved
        1
    """

    tensor: Whole = 1
    """Ranks that compute a layer together; neighbours."""
    pipeline: Whole = 1
    """Stages of layers, each on ranks of its own, far from the next one's."""
    interleaved: Whole = 1
    """Parts of the model on each stage."""


class ScaleOutConfig(_FileConfig):
    """A whole file.

    Example:
        >>> shape = ScaleOutConfig.model_validate({
        ...     "model": {"hidden": 4096, "layers": 32, "heads": 32, "sequence": 2048,
        ...               "vocabulary": 51200},
        ...     "batch": {"micro": 2, "total": 1024},
        ...     "machine": {"ranks_per_host": 8, "teraflops": 250.0, "memory_gbytes": 750.0,
        ...                 "inside_gbytes": 250.0, "host_gbytes": 90.0},
        ...     "parallel": {"tensor": 4},
        ... })
        >>> shape.replicas(512)
        128
    """

    model: TransformerConfig
    batch: BatchConfig
    machine: MachineConfig
    parallel: ReplicaConfig = ReplicaConfig()
    fabric: FabricConfig = FabricConfig()

    @model_validator(mode="after")
    def _is_divisible(self) -> Self:
        if self.parallel.interleaved > 1 and self.parallel.pipeline == 1:
            raise ValueError(
                f"parallel.interleaved is {self.parallel.interleaved} with pipeline 1, where "
                "there is nothing to fill; leave it out, or set parallel.pipeline"
            )
        stages = self.parallel.pipeline * self.parallel.interleaved
        if self.model.layers % stages:
            raise ValueError(
                f"model.layers is {self.model.layers}, which {stages} parts (parallel.pipeline x "
                "interleaved) do not divide; allowed: a divisor of the layers"
            )
        if self.model.heads % self.parallel.tensor:
            raise ValueError(
                f"model.heads is {self.model.heads}, which parallel.tensor {self.parallel.tensor} "
                "does not divide; allowed: a divisor of the heads"
            )
        return self

    def replicas(self, ranks: int) -> int:
        """Count the replicas of the model on so many ranks.

        Raises:
            StrategyError: the ranks, or the batch, cannot be divided so.
        """
        each, host = self.parallel.tensor * self.parallel.pipeline, self.machine.ranks_per_host
        if ranks > host and ranks % host:
            raise StrategyError(
                f"{ranks} ranks are not a multiple of {host}, the ranks of each host "
                "(machine.ranks_per_host); choose other numbers of ranks"
            )
        if ranks % each:
            raise StrategyError(
                f"{ranks} ranks are not a multiple of {each}, the ranks of a replica "
                "(parallel.tensor x pipeline); choose other numbers of ranks or other sizes"
            )
        return ranks // each

    def micro_batches(self, ranks: int) -> int:
        """Count the micro-batches that a replica computes for an update.

        Raises:
            StrategyError: the ranks, or the batch, cannot be divided so.
        """
        replicas, micro = self.replicas(ranks), self.batch.micro
        samples = self.batch.per_replica or 0
        if self.batch.total is not None:
            if self.batch.total % replicas:
                raise StrategyError(
                    f"batch.total is {self.batch.total}, which {replicas} replicas on {ranks} "
                    "ranks cannot share equally; choose a multiple of them, or batch.per_replica"
                )
            samples = self.batch.total // replicas
        if samples % micro:
            raise StrategyError(
                f"a replica has {samples} samples of an update on {ranks} ranks, which "
                f"micro-batches of {micro} do not divide; choose another batch.micro or fewer ranks"
            )
        return samples // micro
