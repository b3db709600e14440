"""Random numbers of tensor-parallel ranks: common for whole tensors, per rank for split tensors.

Dropout of a whole tensor must drop the same values on every rank, or replicas drift apart. Dropout
inside a split region must differ, or parts of a layer get correlated masks. On entry to a split
region every rank draws one number from the common stream and seeds its own stream from it; on exit
it restores the common stream, so that recomputing the region draws the same numbers.

Source: Megatron-LM.
"""

from __future__ import annotations

import torch

from slipstream.comm import Group

_LARGE = 2**31 - 1
_SEED_STRIDE = 1_000_003


class RngStreams:
    """The common and the local random stream of one model's ranks.

    Attributes:
        group: these ranks.
    """

    def __init__(self, group: Group, device: torch.device) -> None:
        self.group = group
        self._generator = _generator(device)
        self._common_state: torch.Tensor | None = None
        self._local_seed = 0

    def synchronize(self) -> None:
        """Give every rank the random states of the group's first rank."""
        if self.group.size == 1:
            return
        for generator in dict.fromkeys((self._generator, torch.default_generator)):
            state = generator.get_state().to(self.group.device)
            root = self.group.process_group_ranks[0]
            torch.distributed.broadcast(state, group=self.group.members, group_src=root)
            generator.set_state(state.cpu())

    def use_local(self) -> None:
        """Draw this rank's own numbers from here on; does nothing if it does already."""
        if self._is_local:
            return
        drawn = int(torch.randint(_LARGE, ()))  # on the CPU: a draw on the GPU would synchronise
        self._common_state = self._generator.get_state()
        self._local_seed = drawn + _SEED_STRIDE * (self.group.rank + 1)
        self._generator.manual_seed(self._local_seed)

    def use_common(self) -> None:
        """Draw the same numbers on all ranks from here on."""
        if self._is_local:
            assert self._common_state is not None
            self._generator.set_state(self._common_state)
        self._common_state = None

    @property
    def _is_local(self) -> bool:
        # Activation checkpointing may stop recomputing inside a split region and then restores the
        # generator itself, so a saved state alone does not tell; the generator's seed does.
        return self._common_state is not None and self._generator.initial_seed() == self._local_seed


def _generator(device: torch.device) -> torch.Generator:
    """The generator that dropout on ``device`` draws from."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator
