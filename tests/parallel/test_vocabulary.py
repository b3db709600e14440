"""A split vocabulary: embedding, logits and cross entropy against whole ones."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch.nn import functional as F

from slipstream.errors import CommError
from slipstream.parallel.tensor.loss import vocabulary_cross_entropy
from slipstream.parallel.tensor.split import split_layers
from tests.harness.ranks import Ranks
from tests.parallel.models import places
from tests.parallel.tensor_models import Words, world


def cross_entropy() -> None:
    group = world()
    torch.manual_seed(0)
    for shape, reduction in (((6,), "mean"), ((2, 5), "sum"), ((3, 2), "none"), ((0,), "sum")):
        whole = (30 * torch.randn(*shape, 13, dtype=torch.float64)).requires_grad_()
        target = torch.randint(13, shape)
        if target.numel():
            target.view(-1)[0] = -100
        local = whole.detach().split([7, 6], -1)[group.rank].clone().requires_grad_()
        expected = F.cross_entropy(whole.flatten(0, -2), target.flatten(), reduction=reduction)
        loss = vocabulary_cross_entropy(local, target, 13, group, reduction=reduction)
        torch.testing.assert_close(loss.flatten(), expected.flatten())
        expected.square().sum().backward()
        loss.square().sum().backward()
        torch.testing.assert_close(local.grad, whole.grad.split([7, 6], -1)[group.rank])
    half = (10 * torch.randn(4, 13)).bfloat16()
    target = torch.randint(13, (4,))
    with torch.autocast("cpu", torch.bfloat16):
        expected = F.cross_entropy(half, target)
        loss = vocabulary_cross_entropy(half.split([7, 6], -1)[group.rank], target, 13, group)
    torch.testing.assert_close(loss, expected)
    with pytest.raises(CommError, match=re.escape("target 13; allowed: 0 .. 12")):
        vocabulary_cross_entropy(torch.ones(1, [7, 6][group.rank]), torch.tensor([13]), 13, group)
    with pytest.raises(CommError, match=re.escape("allowed: [1, ")):
        vocabulary_cross_entropy(torch.ones(1, 5), torch.tensor([1]), 13, group)


def test_cross_entropy_of_a_split_vocabulary(two: Ranks) -> None:
    two.run(cross_entropy)


def vocabulary_never_whole() -> None:
    group = world()
    torch.manual_seed(0)
    whole = Words()
    model = copy.deepcopy(whole)
    uneven = {"kind": "column", "uneven": True}
    split = split_layers(model, group, places({"embed": "vocabulary", "head": uneven}))
    words, target = torch.randint(13, (4, 3)), torch.randint(13, (4, 3))
    words[0, 0] = 2
    logits = model(words)
    assert logits.shape[-1] == [7, 6][group.rank]
    loss = vocabulary_cross_entropy(logits, target, 13, group)
    expected = F.cross_entropy(whole(words).flatten(0, 1), target.flatten())
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    local = split.shards["embed.weight"].piece(whole.embed.weight.grad, group.rank)
    torch.testing.assert_close(model.embed.weight.grad, local)
    for invalid in (-1, 13):
        with pytest.raises(IndexError):
            model(torch.tensor([[invalid]]))


def test_a_tied_vocabulary_stays_split_from_embedding_to_loss(two: Ranks) -> None:
    two.run(vocabulary_never_whole)
