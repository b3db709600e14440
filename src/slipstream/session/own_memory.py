"""Refuses parameters that train in memory that another rank has, too."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from slipstream.errors import ModelError
from slipstream.parallel.dims import gather_objects
from slipstream.transport.consistency import any_of


def check_own_memory(model: nn.Module, control: dist.ProcessGroup) -> None:
    """Refuse a model that processes have in common, as one that a script has made before
    ``mp.spawn``, and given it: torch hands on the memory of tensors, not copies. A collective.

    Raises:
        ModelError: each rank would update the same values; on all ranks alike.
    """
    trained = ((n, p) for n, p in model.named_parameters() if p.requires_grad)
    shared = ((n, p) for n, p in trained if p.device.type == "cpu" and p.is_shared())
    name, parameter = next(shared, ("", None))
    if not any_of(parameter is not None, control):
        return
    own = None if parameter is None else _place(parameter)
    places = gather_objects(own, "the comparison of the parameters' memory", control)
    for place in filter(None, places):
        ranks = [rank for rank, other in enumerate(places) if other == place]
        if len(ranks) > 1:
            raise ModelError(
                f"parameter {name} lies in memory that ranks {', '.join(map(str, ranks))} have in "
                "common, as that of a model which is given to mp.spawn or was made by "
                "share_memory(), so that each of them would update it; give each rank its own, "
                "before the optimizer is made of it: model = copy.deepcopy(model)"
            )


def _place(tensor: torch.Tensor) -> tuple[str, str, str, int] | None:
    """The machine, the file and the byte in it where the tensor begins, as Linux maps it; None: the
    system does not tell."""
    boot, maps = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/maps")
    if not (boot.exists() and maps.exists()):
        return None
    machine = boot.read_text().strip()
    for line in maps.read_text().splitlines():
        addresses, permissions, offset, device, inode, *_ = line.split()
        start, end = (int(address, 16) for address in addresses.split("-"))
        if start <= tensor.data_ptr() < end:
            if permissions[-1] != "s":  # copied where it is written
                return None
            return machine, device, inode, int(offset, 16) + tensor.data_ptr() - start
    return None
