"""What tests of several commands start from."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.planner.iteration.plan import CommPlan
from slipstream.planner.iteration.simulate import simulate
from slipstream.strategy import Strategy
from slipstream.trace import Trace, write
from tests.planner.test_ranking import UNEVEN


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Options that name a trace and its cluster."""
    work, where = UNEVEN
    trace = simulate(work, CommPlan.of(Strategy(), work.gradients), where, steps=2)
    meta = trace.meta | {"strategy": Strategy().document(full=True)}
    write(Trace(trace.events, meta), tmp_path / "trace.json")
    where.save(tmp_path / "cluster.yaml")
    return ["--trace", str(tmp_path / "trace.json"), "--cluster", str(tmp_path / "cluster.yaml")]
