"""The calls of ``fully_shard`` in a model: parameters that are gathered, and reduced, together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from zlib import crc32

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from slipstream.codecs import Int8Codec, OneBitCodec, Ranks, ScatterCompressor
from slipstream.codecs.compressor import mixed, real_dtype
from slipstream.codecs.int4 import Int4Codec
from slipstream.errors import ModelError
from slipstream.strategy import CodecVariant, Int4Config, Int8Config, OneBitConfig

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
"""Parts of paths that ``torch.compile`` and checkpointed activations add; torch's own
``get_state_dict`` leaves them out, too."""


@dataclass(eq=False, slots=True)
class Unit:
    """A call of ``fully_shard``: parameters that are gathered, and reduced, together.

    Attributes:
        name: path of its module; of the model its class.
        module: its comms are set on.
        group: torch's state of the parameters.
        ranks: that share them.
        paths: of all modules of the model.
        compressor: of its gradients; None: they travel as they are, or in half.
        owes: paths of the parameters to which what the compressor keeps belongs.
        used: whether an optimizer has used gradients since the last exchange.
        versions: of the parameters at the last exchange, which tell of other updates.
        nonzero: whether the last exchange gave this rank a value other than zero.
    """

    name: str
    module: FSDPModule
    group: FSDPParamGroup
    ranks: Ranks
    paths: Mapping[nn.Module, str]
    compressor: ScatterCompressor | None = None
    owes: list[str] = field(default_factory=list)
    used: bool = False
    versions: Sequence[int] = ()
    nonzero: bool = False

    @property
    def trainable(self) -> list[str]:
        """Paths of the parameters that get gradients now."""
        return [self.path(p) for p in self.group.fsdp_params if p.sharded_param.requires_grad]

    @property
    def width(self) -> int:
        """Values of a rank's part of the gradients, where every trainable parameter has one."""
        params = [p for p in self.group.fsdp_params if p.sharded_param.requires_grad]
        return sum(p.padded_sharded_param_size.numel() for p in params)

    @property
    def versions_now(self) -> Sequence[int]:
        """Versions of the parameters, which change in place; not by ``foreach``."""
        return [p.sharded_param._version for p in self.group.fsdp_params]

    @property
    def counts(self) -> bool:
        """Whether the last exchange counts already, as its gradients were used; also before the
        first one."""
        return self.used or self.versions != self.versions_now

    @property
    def gone(self) -> bool:
        """Whether the gradients of the last exchange are there no more, by ``zero_grad``."""
        grads = [p.sharded_param.grad for p in self.group.fsdp_params]
        # Set where replicas of HSDP meet later; .grad is None until then.
        return self.group._partial_reduce_output is None and all(
            grad is None or (self.nonzero and not local(grad).any()) for grad in grads
        )

    def owed(self) -> torch.Tensor | None:
        """A copy of what the codec has not sent yet, zeros before it has sent anything; None: it
        owes nothing, now or later. Without exchanges that do not count yet: who goes on from a
        state lacks their gradients."""
        compressor, width = self.compressor, self.width
        if compressor is not None and compressor.error is not None:
            error = compressor.error if self.counts else compressor.settled
            return torch.zeros_like(compressor.error) if error is None else error.clone()
        if compressor is None or not compressor.feedback or not width:
            return None
        policy = self.group.mp_policy
        own = next(p for p in self.group.fsdp_params if p.sharded_param.requires_grad)
        dtype = policy.reduce_dtype or policy.param_dtype or own.sharded_param.dtype
        return torch.zeros(self.ranks.count - 1, width, dtype=real_dtype(dtype))

    def path(self, param: FSDPParam) -> str:
        """The path of a parameter in the model."""
        info = param._module_info
        return f"{self.paths[info.module]}.{info.param_name}".removeprefix(".")


def units_of(model: nn.Module) -> list[Unit]:
    """The calls of ``fully_shard`` inside a model that have parameters of their own."""
    found: dict[int, Unit] = {}
    paths = {module: _unwrapped(name) for name, module in model.named_modules()}
    for module, name in paths.items():
        if not isinstance(module, FSDPModule):
            continue
        # torch tells nowhere else what a module's comms are, and which ranks share it (2.13).
        state = module._get_fsdp_state()
        groups: Sequence[FSDPParamGroup] = state._fsdp_param_groups
        name = name or type(module).__name__.removeprefix("FSDP")
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
            found.setdefault(id(state), Unit(name, module, group, ranks, paths))
    return list(found.values())


def _unwrapped(path: str) -> str:
    """The path of a module without wrappers around it, by which a state is of the same modules with
    and without them."""
    return ".".join(part for part in path.split(".") if part not in WRAPPERS)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def comm_of(unit: Unit) -> object:
    """The reduce-scatter that torch calls."""
    return unit.group._reduce_scatter_comm


def compressor_of(codec: CodecVariant | None, unit: Unit) -> ScatterCompressor | None:
    """The compressor of a unit's gradients; None: they travel as they are, or in half."""
    # Replicas round by streams of their own, or their errors would not average out. Ranks of tensor
    # parallelism share one: what they have in common must stay so.
    mesh = unit.group.mesh_info
    replica = mesh.replicate_mesh_rank if isinstance(mesh, HSDPMeshInfo) else 0
    seed = mixed(crc32(unit.name.encode()), replica)
    match codec:
        case Int8Config():
            coding = Int8Codec(codec.block, codec.rounding)
            return ScatterCompressor(coding, unit.ranks, feedback=codec.error_feedback, seed=seed)
        case Int4Config():
            return ScatterCompressor(Int4Codec(codec.block), unit.ranks, feedback=True, seed=seed)
        case OneBitConfig():
            return ScatterCompressor(OneBitCodec(codec.block), unit.ranks, feedback=True, seed=seed)
    return None
