"""The place where trials run, and what exchanges cost there."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream.cli.ranks import slipstream
from slipstream.cli.tune.display import Display
from slipstream.errors import LaunchError, TestbedError
from slipstream.planner.network.profile import NetworkProfile
from slipstream.testbed import Testbed, unavailable
from slipstream.tuner.trials import STRATEGY, last_words, started

MOST_SECONDS = 20.0  # of the network's measurement


@dataclass(frozen=True)
class Place:
    """The place of trials: ranks of this host, or emulated hosts.

    Raises:
        LaunchError: a single rank.
        TestbedError: the hosts cannot be emulated as asked, or not on this machine.
    """

    ranks: int
    nodes: int | None
    rate: str

    def __post_init__(self) -> None:
        if self.nodes is not None:
            Testbed(self.nodes, self.rate)
            if reason := unavailable():
                raise TestbedError(reason)
        if self.ranks * (self.nodes or 1) == 1:
            raise LaunchError(
                "a single rank exchanges nothing, so there is nothing to tune; give --ranks"
            )

    def command(self, script: str, args: Sequence[str]) -> Callable[[Path], list[str]]:
        """The command of a trial, given its folder."""

        def command(folder: Path) -> list[str]:
            files = {"strategy": folder / STRATEGY, "log_dir": folder / "logs"}
            if self.nodes is None:
                return slipstream("launch", "--", script, *args, nproc=self.ranks, **files)
            return slipstream("testbed run", "--", script, *args, **self.hosts, **files)

        return command

    def doctor(self, output: Path, seconds: float) -> list[str]:
        """The command that measures the network there."""
        ranks = self.hosts if self.nodes else {"ranks": self.ranks}
        return slipstream("doctor network", **ranks, output=output, seconds=round(seconds))

    @property
    def hosts(self) -> dict[str, object]:
        """The options of emulated hosts."""
        return {"nodes": self.nodes, "rate": self.rate, "ranks_per_node": self.ranks}


@dataclass(frozen=True)
class PlaceNetwork:
    """Costs of exchanges where the trials run: known, or measured into a folder."""

    place: Place
    known: NetworkProfile | None
    folder: Path
    display: Display

    def profile(self) -> NetworkProfile:
        """The profile, with a warning for each doubt about it.

        Raises:
            LaunchError: it could not be measured within the budget.
        """
        profile = self.known or _measured(self.place, self.folder.resolve(), self.display)
        for doubt in profile.doubts:
            self.display.warn(doubt)
        return profile


def _measured(place: Place, folder: Path, display: Display) -> NetworkProfile:
    display.doing("measuring the network")
    file = folder / "cluster.yaml"
    seconds = min(MOST_SECONDS, max(2.0, display.left() / 20))
    with started(place.doctor(file, seconds), folder) as process:
        try:
            code = process.wait(display.left())
        except subprocess.TimeoutExpired:
            raise LaunchError(
                "the budget ended while the network was measured: give a larger --budget, or the "
                "file of an earlier measurement (--cluster)"
            ) from None
    if code:
        raise LaunchError(f"the network could not be measured: {last_words(folder)}")
    return NetworkProfile.load(file)
