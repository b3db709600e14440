"""Precision where ranks share a model: split layers and stages, one decision on an overflow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

import slipstream
from slipstream.errors import StrategyError
from slipstream.parallel.pipeline.absent_parameters import AbsentParameter
from tests.harness.ranks import Ranks
from tests.parallel.models import WORDS, gpt2, known
from tests.precision.battery import TYPES, digest

SCALE = {"kind": "dynamic", "init": 512.0, "incr_every_n": 100}
TENSOR = {"tensor": {"ranks": 2}}
PIPELINE = {"pipeline": {"ranks": 2, "cut": ["transformer.h.1"], "micro_batches": 2}}
BOTH = TENSOR | PIPELINE


def wish_of(parallel: dict[str, Any], kind: str, dtype: str) -> dict[str, Any]:
    if "tensor" in parallel:
        plan = [place.document() for place in known(gpt2())]
        parallel = parallel | {"tensor": {"ranks": 2, "plan": plan}}
    precision = {"kind": kind, "dtype": dtype, "loss_scale": SCALE, "emulate": True}
    return {"parallel": parallel, "precision": precision}


def loss_fn(output: Any, words: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), words[:, 1:].flatten())


def values_here(model: Any) -> list[torch.Tensor]:
    """Of the parameters that this rank has, or its shards of them."""
    return [p.detach() for p in model.parameters() if not isinstance(p, AbsentParameter)]


def trains(parallel: dict[str, Any], kind: str, dtype: str) -> None:
    """Four ranks, two or one of them a replica; what one overflows none applies."""
    torch.manual_seed(dist.get_rank())
    model = gpt2().inner
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    objects = [*model.parameters()]
    losses = []
    with slipstream.accelerate(model, optimizer, None, wish_of(parallel, kind, dtype)) as session:
        seed = torch.Generator().manual_seed(session.data_rank)
        words = torch.randint(WORDS, (4, 9), generator=seed)
        for number in range(12):
            handle = None
            if number == 4 and dist.get_rank() == 3:  # its shard, or its stage, alone
                own = model.transformer.h[1].mlp.c_fc.weight
                handle = own.register_hook(lambda g: g * torch.inf)
            before = digest(values_here(model))
            loss = session.forward_backward(loss_fn, (words,), target=words)
            norm = session.clip_grad_norm_(1.0)
            assert session.step() == (number != 4)
            assert (number == 4) == (not norm.isfinite())
            after = digest(values_here(model))
            assert (before == after) == (number == 4)
            if handle is not None:
                handle.remove()
            losses.append(float(loss))
        assert session.skipped == 1
        assert session.state_dict()["loss_scale"] == [256.0, 7, 0]
        if kind == "half_weights":
            assert model.transformer.h[0].mlp.c_fc.weight.dtype == TYPES[dtype]
        saved = session.checkpoint("model", "optimizer")
        session.restore(saved)
        assert digest(session.checkpoint("model", "optimizer")) == digest(saved)
    assert losses[-1] < losses[0]
    every: list[Any] = [None] * 4
    dist.all_gather_object(
        every, (digest(model.state_dict()), digest(saved["model"]), digest(saved["optimizer"]))
    )
    assert all(one == every[0] for one in every)  # the whole model, everywhere
    assert digest(model.state_dict()) == digest(saved["model"])
    assert all(a is b for a, b in zip(objects, model.parameters(), strict=True))
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("parallel", "kind"),
    [
        (TENSOR, "half_weights"),
        (TENSOR, "autocast"),
        (PIPELINE, "autocast"),
        (BOTH, "autocast"),
    ],
    ids=["tensor, half", "tensor, autocast", "pipeline, autocast", "both, autocast"],
)
def test_ranks_that_share_a_model_decide_together(
    four: Ranks, parallel: dict[str, Any], kind: str, dtype: str
) -> None:
    four.run(trains, parallel, kind, dtype)


def refused() -> None:
    model = gpt2().inner
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    slipstream.accelerate(model, optimizer, None, wish_of(PIPELINE, "half_weights", "bf16"))


def test_half_weights_in_a_pipeline_are_refused(four: Ranks) -> None:
    for error in four.fail(refused).values():
        assert type(error) is StrategyError
        assert "use precision autocast" in str(error)
