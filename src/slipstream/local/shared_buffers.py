"""Buffers of a fragment, whose mean all ranks share: running statistics, counters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from slipstream.errors import UsageError


def learned_buffers(model: nn.Module) -> Iterator[str]:
    """Names of the buffers that a training may change, and a state has: no caches."""
    for name, buffer in model.named_buffers():
        owner, _, own = name.rpartition(".")
        cached = own in model.get_submodule(owner)._non_persistent_buffers_set
        if (buffer.is_floating_point() or buffer.is_complex()) and not cached:
            yield name


class SharedBuffers:
    """Buffers in a flat tensor, one after the other.

    Args:
        model: has them.
        names: of buffers in floating point, or complex.
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
        self._lengths = [_real(buffer).numel() for buffer in named]
        wide = any(_real(buffer).dtype == torch.float64 for buffer in named)
        self._dtype = torch.float64 if wide else torch.float32
        self._sizes: list[tuple[int, ...]] = []
        self.share(self.read(given))

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
        flat = [_real(buffer.detach()).reshape(-1).to(self._dtype) for buffer in named]
        return torch.cat([torch.empty(0, dtype=self._dtype, device=self._device), *flat])

    def write(self, flat: torch.Tensor, held: Mapping[str, torch.Tensor] | None = None) -> None:
        """Set this rank's; ``held``: those that the model had, of which some may be gone, or of
        another size, by now."""
        now = dict(self._model.named_buffers(remove_duplicate=False))
        for name, part in zip(self._names, flat.split(self._lengths), strict=True):
            buffer = now.get(name)
            if buffer is None or _real(buffer).numel() != part.numel():
                buffer = (held or now)[name]
            _real(buffer).copy_(part.view(_real(buffer).shape))

    def share(self, values: torch.Tensor) -> None:
        """Let all ranks share these, which they have alike."""
        self.shared, self._unknown = values, ~values.isfinite()

    def take_without_mean(self) -> None:
        """Share what this rank has where values have no mean: a forward pass may have changed the
        others."""
        own = self.read()
        self.shared = torch.where(own.isfinite(), self.shared, own)

    def offer(self) -> torch.Tensor:
        """Copy this rank's, and after them a 1 for each that is not what all share; and for each
        value that is not finite there, as of a class that nobody has seen, whether it is here."""
        own, unknown = self.read(), self._unknown
        parts = (~_same(own, self.shared)).split(self._lengths)
        changed = [part.any().to(own.dtype).view(1) for part in parts]
        known = own.isfinite()
        values = own.masked_fill(unknown & ~known, 0.0)
        return torch.cat([values, *changed, known[unknown].to(own.dtype)])

    def agreed(self, mean: torch.Tensor) -> torch.Tensor:
        """Take buffers out of a mean of offers; one that no rank has changed keeps its bits, as
        means round, and of a mask of infinite values there is none. A value that some ranks know
        is their mean."""
        values, changed, known = mean.tensor_split(
            [len(self.shared), len(self.shared) + len(self._lengths)]
        )
        unknown, values = self._unknown, values.clone()
        values[unknown] = torch.where(known > 0, values[unknown] / known, self.shared[unknown])
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
        alike = ((sent - shared).abs() <= near) | ~shared.isfinite()  # which no rank knew
        each = [same.all() for same in alike.split(self._lengths)]
        goes_on = torch.stack(each).tolist() if each else []  # one wait for a device
        parts = [flat.split(self._lengths) for flat in (self.read(), shared)]
        kept = [own if on else common for on, own, common in zip(goes_on, *parts, strict=True)]
        return torch.cat([shared[:0], *kept])


def _real(buffer: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(buffer) if buffer.is_complex() else buffer


def _same(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Whether values are equal, or both NaN."""
    return (a == b) | (a.isnan() & b.isnan())
