"""Random numbers of tensor ranks: the same where tensors are whole, their own where they are split.

Dropout of a whole tensor must drop the same values on every rank, or replicas drift apart; dropout
inside a split region must not, or parts of a layer are tied to each other. A split region begins by
drawing one number from the common stream, from which each rank seeds its own, and ends by going
back to the common stream: so recomputing it draws the same again. Source: Megatron-LM.
"""

from __future__ import annotations

import torch

from slipstream.comm import Group

_LARGE = 2**31 - 1
_STRIDE = 1_000_003


class Streams:
    """The random numbers of one model's ranks; ``split`` and ``whole`` switch between the two."""

    def __init__(self, group: Group, device: torch.device) -> None:
        self._group = group
        self._generator = _generator(device)
        self._common: torch.Tensor | None = None
        self._own = 0  # the seed of this rank's stream

    def unify(self) -> None:
        """Every rank goes on with the common streams of the group's first rank."""
        if self._group.size == 1:
            return
        aside = [] if self._generator is torch.default_generator else [torch.default_generator]
        for generator in [self._generator, *aside]:
            on_wire = generator.get_state().to(self._group.device)
            root = self._group.places[0]
            torch.distributed.broadcast(on_wire, group=self._group.members, group_src=root)
            generator.set_state(on_wire.cpu())

    def split(self) -> None:
        """From here on this rank draws its own numbers; nothing if it does already."""
        if self._is_split:
            return
        drawn = int(torch.randint(_LARGE, ()))  # on the CPU, for that of a GPU would wait for it
        self._common = self._generator.get_state()
        self._own = drawn + _STRIDE * (self._group.rank + 1)
        self._generator.manual_seed(self._own)

    def whole(self) -> None:
        """From here on all ranks draw the same numbers again."""
        if self._is_split:
            assert self._common is not None
            self._generator.set_state(self._common)
        self._common = None

    @property
    def _is_split(self) -> bool:
        """Recomputing may leave a split region in its middle, and puts torch's state back then."""
        return self._common is not None and self._generator.initial_seed() == self._own


def _generator(device: torch.device) -> torch.Generator:
    """The generator that dropout on ``device`` draws from."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator
