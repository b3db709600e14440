"""Trainings by their shape, for tests of scale-out."""

from __future__ import annotations

from typing import Any

from slipstream.planner.scale_out.growth import Placement
from slipstream.planner.scale_out.shape import ScaleOutConfig
from slipstream.planner.scale_out.transformer import profile, workload

MODEL = {"hidden": 1024, "layers": 24, "heads": 16, "sequence": 1024, "vocabulary": 32_000}
MACHINE = {
    "ranks_per_host": 8,
    "teraflops": 100.0,
    "memory_gbytes": 1000.0,
    "inside_gbytes": 200.0,
    "host_gbytes": 10.0,
    "backend": "gloo",
}


def document(**parts: dict[str, Any]) -> dict[str, Any]:
    """A file's values, some of them changed."""
    whole = {
        "model": MODEL,
        "batch": {"micro": 2, "total": 8192},
        "machine": MACHINE,
        "parallel": {},
        "fabric": {},
    }
    return {name: {**values, **parts.get(name, {})} for name, values in whole.items()}


def shape(**parts: dict[str, Any]) -> ScaleOutConfig:
    """The same as a value."""
    return ScaleOutConfig.model_validate(document(**parts))


def place(given: ScaleOutConfig, ranks: int) -> Placement:
    """Workload and network."""
    return Placement(workload(given, ranks), profile(given, ranks))
