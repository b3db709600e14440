"""Sequences packed in rows: outputs, losses and gradients are those of each sequence alone."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

from slipstream.data.packing import PADDING, Packed, fill_rows, pack
from slipstream.errors import UsageError

GENERATOR = torch.Generator().manual_seed(2)
SEQUENCES = [torch.randint(5, 40, (n,), generator=GENERATOR) for n in (9, 2, 5, 1, 7, 3)]


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=40, n_positions=32, n_embd=16, n_layer=2, n_head=2)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return GPT2LMHeadModel(config).double()


def logits(model: nn.Module, packed: Packed) -> torch.Tensor:
    mask = packed.additive_mask(torch.float64, causal=True)
    output: torch.Tensor = model(
        input_ids=packed.tokens, position_ids=packed.positions, attention_mask=mask
    ).logits
    return output


@pytest.mark.parametrize("length", [None, 12])
def test_a_causal_model_gives_what_it_gives_for_each_sequence_alone(length: int | None) -> None:
    model, packed = gpt2(), pack(SEQUENCES, length)
    for sequence, ours in zip(SEQUENCES, packed.split(logits(model, packed)), strict=True):
        torch.testing.assert_close(ours, model(input_ids=sequence[None]).logits[0])


def test_a_model_that_looks_both_ways_does_so_too() -> None:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
    )
    model, packed = BertModel(config).double().eval(), pack(SEQUENCES, 10)
    mask = packed.additive_mask(torch.float64)
    states = model(packed.tokens, attention_mask=mask, position_ids=packed.positions)
    for sequence, ours in zip(SEQUENCES, packed.split(states.last_hidden_state), strict=True):
        torch.testing.assert_close(ours, model(sequence[None]).last_hidden_state[0])


def test_the_loss_of_each_sequence_and_its_gradient_are_its_own() -> None:
    model, other, packed = gpt2(), gpt2(), pack(SEQUENCES, 12)
    labels = packed.labels()
    scores = logits(model, packed)[:, :-1]
    values = torch.zeros(labels.shape, dtype=scores.dtype)
    values[:, 1:] = nn.functional.cross_entropy(
        scores.flatten(0, 1), labels[:, 1:].flatten(), reduction="none"
    ).view(len(labels), -1)
    ours = packed.means(values, labels != -100)
    theirs = torch.stack(
        [
            other(input_ids=s[None], labels=s[None]).loss if len(s) > 1 else torch.tensor(0.0)
            for s in SEQUENCES
        ]
    )
    torch.testing.assert_close(ours, theirs, check_dtype=False)
    ours.mean().backward()
    theirs.mean().backward()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_the_mean_of_many_values_of_16_bits_is_added_up_in_32() -> None:
    packed = pack([torch.arange(2000), torch.arange(2)])
    values = torch.full(packed.tokens.shape, 3.0, dtype=torch.bfloat16)
    means = packed.means(values)
    assert means.dtype is torch.bfloat16
    assert means.tolist() == [3.0, 3.0]
    assert packed.means(packed.tokens).tolist() == [999.5, 0.5], "of whole numbers"


@given(st.lists(st.integers(1, 20), min_size=1, max_size=40), st.integers(20, 40))
def test_every_sequence_is_in_one_row_that_holds_it(lengths: list[int], length: int) -> None:
    rows = fill_rows(lengths, length)
    assert sorted(n for row in rows for n in row) == list(range(len(lengths)))
    assert all(sum(lengths[n] for n in row) <= length for row in rows)
    assert len(rows) <= 1 + 2 * sum(lengths) / length  # two rows together are more than full


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_what_is_packed_can_be_unpacked(lengths: list[int]) -> None:
    sequences = [torch.full((n,), 100 + i) for i, n in enumerate(lengths)]
    packed = pack(sequences, 10, padding=7)
    assert all(map(torch.equal, packed.split(packed.tokens), sequences))
    assert (packed.tokens[packed.sequences == PADDING] == 7).all()
    edges = packed.ends().tolist()
    assert edges[0] == 0
    assert edges[-1] == packed.tokens.numel()
    flat = packed.sequences.flatten()
    for start, stop in pairwise(edges):
        assert len(set(flat[start:stop].tolist())) == 1
    firsts = (packed.positions == 0).sum().item()
    assert firsts == len(edges) - 1


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "nothing": (lambda: pack([]), "got no sequence"),
    "an empty one": (lambda: pack([torch.tensor([1]), torch.tensor([])]), r"sequence 1 has shape"),
    "a batch": (lambda: pack([torch.ones(2, 2)]), r"shape \(2, 2\)"),
    "a long one": (lambda: pack(SEQUENCES, 8), "sequence 0 has 9 tokens, a row 8"),
}


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_are_named(name: str) -> None:
    make, message = WRONG[name]
    with pytest.raises(UsageError, match=message):
        make()
