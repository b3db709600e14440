"""Buffers of a fragment, whose mean all ranks share: running statistics, counters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from slipstream.errors import UsageError


class SharedBuffers:
    """Buffers in a flat tensor, one after the other.

    Args:
        model: has them.
        names: of buffers in floating point.
        device: of the flat tensors.
        given: what all ranks share at first, by name.

    Attributes:
        shared: what all ranks share.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        device: torch.device,
        given: Mapping[str, torch.Tensor],
    ) -> None:
        self._model, self._names, self._device = model, names, device
        named = [model.get_buffer(name) for name in names]
        self._lengths = [buffer.numel() for buffer in named]
        wide = any(buffer.dtype == torch.float64 for buffer in named)
        self._dtype = torch.float64 if wide else torch.float32
        self._sizes: list[tuple[int, ...]] = []
        self.shared = self.read(given)

    def read(self, given: Mapping[str, torch.Tensor] | None = None) -> torch.Tensor:
        """Copy this rank's, or those that are given by name.

        Raises:
            UsageError: one is gone, or has another size than when the ranks compared them.
        """
        present = self._model.named_buffers(remove_duplicate=False)
        found = dict(present) if given is None else given
        if gone := [name for name in self._names if name not in found]:
            raise UsageError(
                f"buffer {gone[0]} was there at accelerate() and is gone now; it is averaged over "
                "ranks, so it must stay: keep what comes and goes in a plain attribute"
            )
        named = [found[name] for name in self._names]
        sizes = [tuple(buffer.shape) for buffer in named]
        self._sizes = self._sizes or sizes
        for name, before, now in zip(self._names, self._sizes, sizes, strict=True):
            if before != now:
                raise UsageError(
                    f"buffer {name} was {before} at accelerate() and is {now} now; it is averaged "
                    "over ranks, so its size must stay: keep what grows in a plain attribute of "
                    "the module"
                )
        flat = [buffer.detach().reshape(-1).to(self._dtype) for buffer in named]
        return torch.cat([torch.empty(0, dtype=self._dtype, device=self._device), *flat])

    def write(self, flat: torch.Tensor, held: Mapping[str, torch.Tensor] | None = None) -> None:
        """Set this rank's; ``held``: those that the model had, of which some may be gone, or of
        another size, by now."""
        now = dict(self._model.named_buffers(remove_duplicate=False))
        for name, part in zip(self._names, flat.split(self._lengths), strict=True):
            buffer = now.get(name)
            if buffer is None or buffer.numel() != part.numel():
                buffer = (held or now)[name]
            buffer.copy_(part.view(buffer.shape))

    def take_without_mean(self) -> None:
        """Share what this rank has where values have no mean: a forward pass may have changed the
        others."""
        own = self.read()
        self.shared = torch.where(own.isfinite(), self.shared, own)

    def offer(self) -> torch.Tensor:
        """Copy this rank's, and after them a 1 for each that is not what all share."""
        own = self.read()
        parts = (~_same(own, self.shared)).split(self._lengths)
        return torch.cat([own, *(part.any().to(own.dtype).view(1) for part in parts)])

    def agreed(self, mean: torch.Tensor) -> torch.Tensor:
        """Take buffers out of a mean of offers; one that no rank has changed keeps its bits, as
        means round, and of a mask of infinite values there is none."""
        values, changed = mean.split([len(self.shared), len(self._lengths)])
        parts = zip(values.split(self._lengths), self.shared.split(self._lengths), strict=True)
        flags = zip(parts, (changed != 0).tolist(), strict=True)
        agreed = [new if flag else old for (new, old), flag in flags]
        return torch.cat([self.shared[:0], *agreed])

    def have_mean(self, offer: torch.Tensor) -> bool:
        """Whether an offer is finite, but for what all share."""
        buffers = self.agreed(offer)
        return bool((buffers.isfinite() | _same(buffers, self.shared)).all())

    def gone_on(self, offered: torch.Tensor, ranks: int) -> torch.Tensor:
        """Take what all share, after a delay; but of one that all ranks had alike when it was
        offered, as a counter, what this rank has by now.

        Args:
            offered: by this rank.
            ranks: of which it is a mean.
        """
        shared, sent = self.shared, offered[: len(self.shared)]
        near = (4 + ranks) * torch.finfo(sent.dtype).eps * sent.abs()  # as such a mean rounds
        alike = ((sent - shared).abs() <= near) | _same(sent, shared)
        each = [same.all() for same in alike.split(self._lengths)]
        goes_on = torch.stack(each).tolist() if each else []  # one wait for a device
        parts = [flat.split(self._lengths) for flat in (self.read(), shared)]
        kept = [own if on else common for on, own, common in zip(goes_on, *parts, strict=True)]
        return torch.cat([shared[:0], *kept])


def _same(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Whether values are equal, or both NaN."""
    return (a == b) | (a.isnan() & b.isnan())
