"""Exactness: however gradients are exchanged, training goes as with DDP and as on one process."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch import nn

from tests.harness import reference
from tests.harness.models import MODELS

STEPS = 3
BYTES = 1 / 2**20

SPLITS = {
    "by_bytes": {"megabytes": 100 * BYTES, "first_megabytes": 1 * BYTES, "last_megabytes": None},
    "by_percent": {"percents": [20, 50, 30]},
    "by_index": {},
    "by_layers": {"layers": 2},
    "per_layer": {},
    "per_gradient": {},
    "single": {},
}


def plans(name: str, world: int) -> list[tuple[str, str, bool, int]]:
    """Split, transport, overlap and accumulation for a model: all pairs, not their product.

    A model is cut in every way, and meets every transport and every window, beside backward and
    after it. The next model meets the other transport and the other window of each split. Four
    ranks do every other split: nothing but the order of the sum differs.
    """
    windows = [((True, 1), (False, 3)), ((True, 3), (False, 1))]
    transports = [
        ("flat", "sharded"),
        ("direct", "hierarchical"),
        ("shared_memory", "direct"),
        ("sharded", "flat"),
    ]
    turn = [*MODELS].index(name)
    every = []
    for n, split in enumerate(SPLITS):
        which = (n // 2 + n + turn) % 2
        every.append((split, transports[n // 2][which], *windows[n % 2][which]))
    return every if world == 2 else every[::2]


def train_all_ways(name: str) -> list[tuple[str, str, bool, float, float]]:
    """By plan: what was planned, digest, bits of DDP, and how far from DDP and one process."""
    case, world = MODELS[name], dist.get_world_size()
    oracles: dict[int, tuple[nn.Module, nn.Module]] = {}
    found = []
    for split, transport, overlap, accumulate in plans(name, world):
        if case.sparse and transport == "sharded":
            continue  # refused: there is nothing to cut
        optimizer = "sgd" if case.sparse or accumulate == 1 else "adamw"
        if accumulate not in oracles:
            oracles[accumulate] = (
                reference.ddp(case, optimizer, STEPS, accumulate),
                reference.one_process(case, optimizer, STEPS, accumulate, world),
            )
        peer, alone = oracles[accumulate]
        split_config = {"kind": split, **SPLITS[split]}
        settings = {"split": split_config, "transport": transport, "overlap": overlap}
        if split == "by_index":
            last = sum(p.requires_grad for p in peer.parameters()) - 1
            settings["split"]["last"] = sorted({0, last // 2, last})
        model = reference.accelerated(case, optimizer, STEPS, accumulate, settings)
        found.append(
            (
                f"{split}, {transport}, overlap {overlap}, accumulate {accumulate}, {optimizer}",
                reference.digest(model),
                reference.same_bits(model, peer),
                reference.distance(model, peer),
                0.0 if case.batch_statistics else reference.distance(model, alone),
            )
        )
    return found


@pytest.mark.parametrize("world", ["two", "four"])
@pytest.mark.parametrize("name", MODELS)
def test_parameters_after_training(request, world, name):
    ranks = request.getfixturevalue(world)
    by_rank = ranks.run(train_all_ways, name)
    for same_plan in zip(*by_rank, strict=True):
        plan, *_ = same_plan[0]
        assert len({digest for _, digest, *_ in same_plan}) == 1, f"{plan}: ranks differ"
        for _, _, same_bits, from_ddp, from_one_process in same_plan:
            assert same_bits or ranks.size > 2, f"{plan}: not the bits of DDP ({from_ddp:.3g})"
            assert from_ddp <= 1, f"{plan}: {from_ddp:.3g} tolerances from DDP"
            assert from_one_process <= 1, f"{plan}: {from_one_process:.3g} from one process"


def beside_and_after(name: str) -> list[str]:
    """Digests of a training that exchanges beside backward, and of one that does so after it."""
    case, split = MODELS[name], {"kind": "by_bytes", **SPLITS["by_bytes"]}
    return [
        reference.digest(
            reference.accelerated(case, "sgd", STEPS, 1, {"split": split, "overlap": overlap})
        )
        for overlap in (True, False)
    ]


GRAPHS = ("new_buffer", "complex", "unused_by_rank", "changing_order", "checkpoint", "gpt2")
"""Models whose gradients come in every order: one of each kind."""


def test_overlap_changes_no_bit(four) -> None:
    """On two ranks every model has the bits of DDP, with overlap and without."""
    for name in GRAPHS:
        for beside, after in four.run(beside_and_after, name):
            assert beside == after, name
