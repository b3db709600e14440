"""16 bits, recomputation and offload at once: bit for bit what 16 bits alone give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import slipstream

WORDS = torch.randint(0, 32, (2, 16), generator=torch.Generator().manual_seed(1))
KINDS: list[dict[str, Any]] = [
    {"kind": "autocast", "dtype": "bf16"},
    {"kind": "half_weights", "dtype": "bf16"},
    {"kind": "half_weights", "dtype": "bf16", "loss_scale": {"kind": "static", "scale": 8.0}},
]


def trained(precision: dict[str, Any], memory: dict[str, Any]) -> tuple[list[float], list[Any]]:
    """Losses and parameters of three steps."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=4, n_head=2)
    config.use_cache = False
    model = GPT2LMHeadModel(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    strategy = {"precision": precision, "memory": memory}
    with slipstream.accelerate(model, optimizer, strategy=strategy) as session:
        for _ in range(3):
            logits = session.model(WORDS).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), WORDS.flatten())
            session.backward(loss)
            assert session.step()
            losses.append(float(loss.detach()))
        report = session.report()
    assert ("memory.recompute" in report) or not memory
    return losses, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(
    ("precision", "recompute"),
    [
        (KINDS[0], {"every": 1}),
        (KINDS[1], {"every": 2}),
        (KINDS[1], {"budget": 0.7}),
        (KINDS[2], {"budget": 0.7}),
    ],
    ids=str,
)
def test_bitwise_as_without(precision: dict[str, Any], recompute: dict[str, Any]) -> None:
    memory = {"recompute": recompute, "offload": {"to": "disk", "min_bytes": 1}}
    losses, parameters = trained(precision, memory)
    plain_losses, plain = trained(precision, {})
    assert losses == plain_losses
    assert all(torch.equal(a, b) for a, b in zip(parameters, plain, strict=True))


def gradients_of_a_part(memory: dict[str, Any]) -> list[torch.Tensor]:
    """Of a part that the script calls by itself, after an update."""
    torch.manual_seed(0)
    blocks = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(2)]
    model = torch.nn.Sequential(torch.nn.Embedding(32, 8), torch.nn.Sequential(*blocks))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy = {"precision": KINDS[1], "memory": memory}
    with slipstream.accelerate(model, optimizer, strategy=strategy) as session:
        session.backward(session.model(WORDS).square().mean())
        session.step()
        session.backward(model[1](model[0](WORDS)).square().mean())
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        session.step()
    return gradients


def test_a_part_of_the_model_that_is_called_by_itself_is_recomputed() -> None:
    found, plain = gradients_of_a_part({"recompute": {"every": 1}}), gradients_of_a_part({})
    assert len(plain) == 5
    assert all(map(torch.equal, found, plain))
