"""The schedule of meetings: a pure function of the number of updates, the same on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from slipstream.strategy import LocalConfig


@dataclass(frozen=True, slots=True)
class MeetingSchedule:
    """When each fragment is sent, and when what came back is merged.

    Fragment f of F is sent after update ``(f + 1) steps / F``, and every ``steps`` updates from
    then on; so fragments take turns, and the last one meets after whole rounds. It is merged
    ``delay`` updates later, before the next one is sent.

    Example:
        >>> schedule = MeetingSchedule(steps=4, fragments=2, delay=1)
        >>> [(update, *schedule.sent(update)) for update in range(1, 9) if [*schedule.sent(update)]]
        [(2, 0), (4, 1), (6, 0), (8, 1)]
    """

    steps: int
    fragments: int
    delay: int

    @classmethod
    def of(cls, config: LocalConfig) -> MeetingSchedule:
        """The schedule of a strategy."""
        return cls(config.steps, config.fragments, config.delay)

    def sent(self, update: int) -> Iterator[int]:
        """Fragments that are sent after so many updates without warm-up."""
        for fragment in range(self.fragments):
            first = (fragment + 1) * self.steps // self.fragments
            if update >= first and (update - first) % self.steps == 0:
                yield fragment
