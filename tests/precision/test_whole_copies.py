"""Half weights whose masters are shared out: what reads and writes parameters from outside."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from slipstream.errors import UsageError
from slipstream.precision import half_weights
from slipstream.precision.half_weights import HalfWeights


def first_half(_: nn.Parameter, tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1)[: tensor.numel() // 2]


class Training(NamedTuple):
    layer: nn.Linear
    optimizer: torch.optim.Optimizer
    handle: HalfWeights


@pytest.fixture
def training() -> Training:
    torch.manual_seed(0)
    layer = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    return Training(layer, optimizer, half_weights(layer, optimizer, shard_of=first_half))


def test_a_copy_is_in_fp32_and_has_the_own_master(training: Training) -> None:
    weight = training.layer.weight
    copy = weight.data
    assert copy.dtype == torch.float32
    assert copy is weight.detach()
    assert copy.equal(training.layer.state_dict()["weight"])
    rounded = copy.bfloat16().float()
    own, others = copy.view(-1)[:8], copy.view(-1)[8:]
    assert not own.equal(rounded.view(-1)[:8])
    assert others.equal(rounded.view(-1)[8:])


def test_what_is_written_into_a_copy_counts(training: Training) -> None:
    weight = training.layer.weight
    weight.data.fill_(1.001)
    saved = training.layer.state_dict()["weight"].view(-1)
    assert saved[:8].tolist() == [pytest.approx(1.001)] * 8
    assert saved[8:].tolist() == [1.0] * 8
    weight.data.mul_(2)
    training.layer(torch.ones(1, 4))
    assert torch.Tensor.detach(weight).view(-1).tolist() == [2.0] * 16


def test_a_copy_follows_what_is_written_into_the_parameter(training: Training) -> None:
    weight = training.layer.weight
    copy = weight.data
    with torch.no_grad():
        weight.fill_(3.0)
    assert weight.data is copy
    assert copy.view(-1).tolist() == [3.0] * 16


def test_what_is_written_after_the_next_update_is_refused(training: Training) -> None:
    weight = training.layer.weight
    copy = weight.data
    training.optimizer.step()
    assert weight.data is not copy
    copy.zero_()
    with pytest.raises(UsageError, match=r"read parameter.data again after each update"):
        training.optimizer.step()


def test_a_parameter_made_of_one_is_refused() -> None:
    layer = nn.Linear(4, 4)
    half_weights(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    with pytest.raises(UsageError, match="weight_norm and other parametrizations"):
        nn.utils.parametrizations.weight_norm(layer)


def test_a_copy_that_is_kept_stays_where_data_is_assigned(training: Training) -> None:
    """As averages are put in for an evaluation, by pointers, and taken out again."""
    weight = training.layer.weight
    before, kept = training.layer.state_dict()["weight"].clone(), weight.data
    weight.data = torch.zeros(4, 4)
    assert not weight.data.any()
    assert kept.equal(before)
    weight.data = kept
    assert training.layer.state_dict()["weight"].equal(before)
