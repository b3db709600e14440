"""Whether a script has written parameters since the last update, as to take the best it knows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from slipstream.gradients.segments import NamedParameter
from slipstream.local.meeting import Meeting


class WrittenSince:
    """Remembers parameters as an update has left them, by a row of each: torch counts no writes to
    ``data``.

    Args:
        trained: the parameters that meet.
    """

    def __init__(self, trained: Sequence[NamedParameter]) -> None:
        self._trained = tuple(trained)
        self._rows: list[torch.Tensor] | None = None

    def note(self, awaits: bool) -> None:
        """An update has ended; ``awaits``: a meeting is still to be merged, or announced."""
        self._rows = self._read() if awaits else None

    @contextmanager
    def kept(self, meetings: Sequence[Meeting]) -> Iterator[None]:
        """Keep parameters and buffers that the script has written since the last update: a meeting
        that ends now is not of them. An average that was put in and taken out again does not count
        as written."""
        if self._rows is None or all(map(_same, self._rows, self._read())):
            yield
            return
        values = [(meeting.read(), meeting.buffers.read()) for meeting in meetings]
        yield
        for meeting, (parameters, buffers) in zip(meetings, values, strict=True):
            meeting.write(parameters)
            meeting.buffers.write(buffers)

    def _read(self) -> list[torch.Tensor]:
        values = (t.parameter.detach() for t in self._trained)
        return [(value[:1] if value.dim() else value).clone() for value in values]


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)
