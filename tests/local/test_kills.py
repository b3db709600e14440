"""A training goes on bit for bit, whenever a rank is killed; see ``kills``."""

from __future__ import annotations

from tests.harness.ranks import Ranks
from tests.local.kills import survive


def test_a_killed_run_goes_on_bit_for_bit() -> None:
    with Ranks(2) as two:
        assert len(survive(two, 4, seed=1)) >= 4
