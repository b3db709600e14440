"""Named strategies, each with the reason to choose it. A preset is a short YAML document."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.errors import StrategyError
from slipstream.strategy.validate import did_you_mean, shown
from slipstream.strategy.yaml import SUFFIXES, parse_yaml

_PRESETS = """
default:
  reason: the defaults
  settings: {}
exact:
  reason: the fastest exchange that keeps the mathematics, found by measuring while it trains
  settings: {gradients: {split: optimal, transport: auto}}
slow_network:
  reason: half the bytes, as bf16, by the exchange that is fastest then
  settings: {gradients: {split: optimal, transport: auto, codec: half}}
very_slow_network:
  reason: ranks train on their own, and send 4 bits of each change every 16 updates
  settings: {local: {steps: 16, fragments: 4, delay: 2, codec: int4}}
low_memory:
  reason: every block is computed again in backward; ranks share the optimizer's state
  settings: {gradients: {transport: sharded}, memory: {recompute: every}}
auto:
  reason: the same as exact, named after how it works
  settings: {gradients: {split: optimal, transport: auto}}
sequential:
  reason: "the plain reference: one exchange of all gradients, strictly after backward"
  settings: {gradients: {split: single, overlap: false}}
ddp:
  reason: "the buckets of PyTorch's DistributedDataParallel: 1 MB first, then 25 MB"
  settings: {gradients: {split: {kind: by_bytes, megabytes: 25, last_megabytes: null}}}
"""


@dataclass(frozen=True)
class Preset:
    """A named strategy: why one would choose it, and the settings that differ from the defaults."""

    reason: str
    settings: Mapping[str, object]


def presets() -> dict[str, Preset]:
    """Every preset by its name; ``Strategy.load(name)`` builds it.

    Example:
        >>> from slipstream.strategy import Strategy
        >>> presets()["sequential"].settings
        {'gradients': {'split': 'single', 'overlap': False}}
        >>> Strategy.load("sequential").gradients.overlap
        False
    """
    documents: Any = parse_yaml(_PRESETS)
    return {name: Preset(**document) for name, document in documents.items()}


def preset(name: str) -> Preset:
    """The preset called ``name``.

    Raises:
        StrategyError: no such preset; names the nearest one and all others.
    """
    known = presets()
    if name not in known:
        raise StrategyError(
            f"no preset is named {shown(name)}{did_you_mean(name, known)}; allowed: "
            f"{', '.join(known)}, or the path of a {', '.join(SUFFIXES)} file"
        )
    return known[name]
