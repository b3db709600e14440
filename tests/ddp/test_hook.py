"""Codecs as a communication hook of DistributedDataParallel."""

from __future__ import annotations

import io
from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from slipstream.ddp import DdpCodec, codec_hook
from slipstream.errors import ModelError, StrategyError, UsageError
from tests.gradients.codecs import CODECS, NEAR, apart
from tests.harness.ranks import Ranks
from tests.harness.reference import digest, same_bits


class Deep(nn.Module):
    """Enough bytes for several buckets of DDP."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).square().mean()


def deep() -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(Deep(), bucket_cap_mb=0.03)


def rows(step: int) -> torch.Tensor:
    seed = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(8, 64, generator=seed)


def train(ddp: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        ddp(rows(step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def with_hook(codec: object, reload_before: int | None = None) -> nn.Module:
    """Five steps; before one of them the state is written, read and loaded again."""
    ddp = deep()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    hook = DdpCodec(ddp, codec, optimizer=optimizer if "dgc" in str(codec) else None)
    ddp.register_comm_hook(hook, codec_hook)
    for step in range(5):
        if step == reload_before:
            file = io.BytesIO()
            torch.save(hook.state_dict(), file)
            file.seek(0)
            hook.load_state_dict(torch.load(file, weights_only=True))
        train(ddp, optimizer, step, step + 1)
    assert len(hook._groups) > 1  # DDP made several buckets
    hook.close()
    return ddp


def every_codec() -> dict[str, tuple[str, str, float]]:
    """By codec: digest, that with a reload, distance from plain DDP over how far that has come."""
    plain, start = deep(), deep()
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9), 0, 5)
    found = {}
    for name, codec in CODECS.items():
        whole, again = with_hook(codec), with_hook(codec, reload_before=3)
        found[name] = (digest(whole), digest(again), apart(whole, plain, start))
    return found


@pytest.fixture(scope="module")
def on_four(four) -> list[dict[str, tuple[str, str, float]]]:
    """What each of four ranks finds of every codec."""
    return four.run(every_codec)


@pytest.mark.parametrize("world", [2, 4])
def test_every_codec_trains_several_buckets_alike_on_all_ranks(on_four, world) -> None:
    results = on_four
    if world == 2:
        with Ranks(2) as two:
            results = two.run(every_codec)
    for name in CODECS:
        digests = {found[name][0] for found in results}
        assert len(digests) == 1, name
        assert results[0][name][2] < NEAR[name], name


def test_a_state_goes_on_bit_for_bit(on_four) -> None:
    for found in on_four:
        for name, (whole, again, _) in found.items():
            assert whole == again, name


class Mixed(nn.Module):
    """Two dtypes, which DDP never puts into one bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Linear(64, 64), nn.Linear(64, 64).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wide(self.narrow(x).double()).square().mean()


def accumulate(codec: object) -> tuple[str, float, int]:
    """Two dtypes, two batches an update: digest, distance from plain DDP, updates."""
    models, start, steps = [], None, 0
    for hooked in (True, False):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(Mixed())
        start = start or deepcopy(ddp.module)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        hook = DdpCodec(ddp, codec)
        if hooked:
            ddp.register_comm_hook(hook, codec_hook)
        for step in range(4):
            with ddp.no_sync():
                ddp(rows(step)).backward()
            train(ddp, optimizer, step + 10, step + 11)
        models.append(ddp.module)
        steps = hook.step if hooked else steps
        hook.close()
    compressed, plain = models
    return digest(compressed), apart(compressed, plain, start), steps


@pytest.mark.parametrize("codec", ["bf16", "int8", "onebit"])
def test_dtypes_and_batches_of_an_update(four, codec) -> None:
    found = four.run(accumulate, CODECS[codec])
    assert len({digest for digest, *_ in found}) == 1
    assert found[0][1] < NEAR[codec]
    assert {steps for *_, steps in found} == {4}


def overflow(codec: object) -> tuple[bool, int]:
    """A step with infinite gradients on one rank, forgotten, against none; scales against none."""
    models, skipped = [], 0
    for poisoned in (True, False):
        ddp = deep()
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        scales = [1.0, 1024.0, 2.0, 64.0] if poisoned else [1.0] * 4
        scale = scales[0]
        hook = DdpCodec(ddp, codec, loss_scale=lambda: scale)  # noqa: B023 - as it is by then
        ddp.register_comm_hook(hook, codec_hook)
        for step, scale in enumerate(scales):
            if poisoned and step == 2:
                (ddp(rows(9)) * (1e38 if dist.get_rank() == 1 else 1.0) * 1e20).backward()
                assert all(not p.grad.isfinite().any() for p in ddp.parameters())
                optimizer.zero_grad()
            (ddp(rows(step)) * scale).backward()
            for parameter in ddp.parameters():
                parameter.grad.div_(scale)
            optimizer.step()
            optimizer.zero_grad()
        hook.close()
        models.append(ddp)
        skipped = max(skipped, hook.skipped)
    return same_bits(*models), skipped


@pytest.mark.parametrize("codec", ["onebit", "int8, stochastic", "powersgd"])
def test_a_step_with_an_overflow_is_forgotten(four, codec) -> None:
    assert four.run(overflow, CODECS[codec]) == [(True, 1)] * 4


def poisoned(codec: object) -> tuple[str, str, bool]:
    """Two ranks get NaN in the second step: the error, and whether no bit has moved."""
    ddp = deep()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    hook = DdpCodec(ddp, codec, optimizer=optimizer if "dgc" in str(codec) else None)
    ddp.register_comm_hook(hook, codec_hook)
    train(ddp, optimizer, 0, 1)
    before = digest(ddp)
    loss = ddp(rows(1))
    if dist.get_rank() in (1, 2):
        layer = ddp.module.body[3 * dist.get_rank()]
        layer.weight.register_hook(lambda gradient: gradient * torch.nan)
        loss = ddp(rows(1))
    try:
        loss.backward()
    except RuntimeError as error:
        return type(error).__name__, str(error), digest(ddp) == before
    finally:
        hook.close()
    return "", "", False


@pytest.mark.parametrize("codec", ["bf16", "int8", "onebit", "powersgd", "dgc"])
def test_gradients_that_are_nan_end_backward_on_all_ranks_with_the_ranks_that_had_them(
    four, codec
) -> None:
    found = four.run(poisoned, CODECS[codec])
    assert len({*found}) == 1
    kind, text, same = found[0]
    assert same
    assert kind == "RuntimeError"  # DDP makes one of all errors
    assert "NonFiniteError: update 2: gradients are infinite or NaN" in text
    own = {1: "body.3.weight", 2: "body.6.weight"}
    named = {rank: f"that of {name} on rank {rank}" in text for rank, name in own.items()}
    assert any(named.values()), text  # both where they travel together
    assert "before the exchange" in text


def refused() -> None:
    torch.manual_seed(0)
    with pytest.raises(ModelError, match="not a Deep"):
        DdpCodec(Deep(), "int8")
    ddp = deep()
    with pytest.raises(ModelError, match="optimizer=\\.\\.\\."):
        DdpCodec(ddp, "dgc")
    with pytest.raises(ModelError, match="name the codec itself"):
        DdpCodec(ddp, "adaptive")
    with pytest.raises(ModelError, match="cannot search for a transport"):
        DdpCodec(ddp, "int8", transport="auto")
    with pytest.raises(ModelError, match="transport sharded gives each rank a part"):
        DdpCodec(ddp, "int8", transport={"kind": "sharded"})
    with pytest.raises(StrategyError, match="transport"):
        DdpCodec(ddp, "int8", transport="fast")
    with pytest.raises(ModelError, match="dgc with AdamW"):
        DdpCodec(ddp, "dgc", optimizer=torch.optim.AdamW(ddp.parameters()))
    hook = DdpCodec(ddp, "int8")
    state = hook.state_dict()
    with pytest.raises(UsageError, match="state is of rank 9"):
        hook.load_state_dict({**state, "rank": 9})
    with pytest.raises(UsageError, match="state is of 9 ranks, this run has 4"):
        hook.load_state_dict({**state, "ranks": 9})
    with pytest.raises(UsageError, match="state lacks codec, rank, ranks, step; allowed"):
        hook.load_state_dict({"hook": state})
    hook.close()
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    hook = DdpCodec(ddp, "dgc", optimizer=sgd)
    ddp.register_comm_hook(hook, codec_hook)
    sgd.param_groups[0]["momentum"] = 0.5
    with pytest.raises(UsageError, match="momentum became"):
        ddp(rows(0)).backward()
    hook.close()
    with pytest.raises(UsageError, match="nonfinite 'skip'; allowed: 'raise' and 'allow'"):
        DdpCodec(ddp, "int8", nonfinite="skip")
    dist.barrier()  # a rank that leaves must not end groups that others still make


def test_mistakes_are_named(four) -> None:
    four.run(refused)
