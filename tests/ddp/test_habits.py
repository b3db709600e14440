"""What people do beside the hook: settings of DDP, resuming, copies, failures, odd tensors."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from slipstream.ddp import DdpCodec, codec_hook
from slipstream.ddp._groups import BucketGroup, Routes
from slipstream.errors import ModelError, UsageError
from tests.harness.reference import digest

CODECS: dict[str, Any] = {
    "half": "half",
    "int8": "int8",
    "onebit": {"kind": "onebit", "start_step": 1, "block": 64},
    "powersgd": {"kind": "powersgd", "rank": 2, "start_step": 1},
    "by name": {"kind": "by_name", "rules": [{"match": "*.bias"}, {"match": "*", "codec": "int8"}]},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "small buckets": {"bucket_cap_mb": 0.01, "gradient_as_bucket_view": True},
    "static graph": {"static_graph": True, "bucket_cap_mb": 0.01},
    "finds unused": {"find_unused_parameters": True, "bucket_cap_mb": 0.01},
}


class Odd(nn.Module):
    """Parameters of every kind; one is used in every third step alone, if at all."""

    def __init__(self, *, skips: bool) -> None:
        super().__init__()
        self.skips = skips
        self.first = nn.Linear(16, 32)
        self.now_and_then = nn.Linear(32, 32)
        self.wide = nn.Linear(32, 32).double()
        self.narrow = nn.Linear(32, 32).bfloat16()
        self.waves = nn.Parameter(torch.randn(32, 32, dtype=torch.complex64) / 6)
        self.turned = nn.Parameter(torch.randn(32, 32).t() / 6)
        self.gain, self.nothing = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.empty(0, 32))

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        x = self.first(x).tanh()
        if not self.skips or step % 3 == 0:
            x = self.now_and_then(x)
        x = self.narrow(self.wide(x.double()).bfloat16()).float() @ self.turned
        x = (x.to(torch.complex64) @ self.waves).abs() * self.gain
        return torch.cat([x @ self.nothing.t(), x], 1).square().mean()


def data(step: int) -> torch.Tensor:
    seed = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(8, 16, generator=seed)


def trained(codec: Any, settings: dict[str, Any], resume_at: int | None = None) -> str:
    """Six steps; before one of them everything is saved, made anew and loaded."""

    def begin() -> tuple[DistributedDataParallel, torch.optim.Optimizer, DdpCodec]:
        torch.manual_seed(0)
        ddp = DistributedDataParallel(Odd(skips="find_unused_parameters" in settings), **settings)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
        return ddp, optimizer, DdpCodec(ddp, codec)

    ddp, optimizer, hook = begin()
    ddp.register_comm_hook(hook, codec_hook)
    for step in range(6):
        if step == resume_at:
            file = io.BytesIO()
            torch.save([x.state_dict() for x in (ddp, optimizer, hook)], file)
            hook.close()
            file.seek(0)
            ddp, optimizer, hook = begin()
            states = torch.load(file)
            ddp.load_state_dict(states[0])
            optimizer.load_state_dict(states[1])
            hook.load_state_dict(states[2])
            ddp.register_comm_hook(hook, codec_hook)
        ddp(data(step), step).backward()
        optimizer.step()
        optimizer.zero_grad()
    hook.close()
    return digest(ddp.module)


def resumed(settings: dict[str, Any]) -> dict[str, set[str]]:
    return {
        name: {trained(codec, settings, resume_at) for resume_at in (None, 1, 4)}
        for name, codec in CODECS.items()
    }


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_run_that_resumes_under_a_new_ddp_ends_with_the_same_bits(two, settings) -> None:
    first, second = two.run(resumed, SETTINGS[settings])
    assert first == second
    assert {name: len(ends) for name, ends in first.items()} == dict.fromkeys(CODECS, 1)


def complex_gradient() -> tuple[float, float]:
    """How far the hook's average is from the exact one; the largest value of that."""
    torch.manual_seed(0)
    layer = nn.Linear(5, 8, dtype=torch.complex64)
    ddp = DistributedDataParallel(layer)
    hook = DdpCodec(ddp, "half")
    ddp.register_comm_hook(hook, codec_hook)
    inputs = [torch.randn(4, 5, dtype=torch.complex64) for _ in range(2)]
    for _ in range(2):  # before and after DDP has rebuilt its buckets
        layer.zero_grad()
        ddp(inputs[dist.get_rank()]).abs().square().mean().backward()
    hook.close()
    plain = copy.deepcopy(layer)
    plain.zero_grad()
    torch.stack([plain(x).abs().square().mean() for x in inputs]).mean().backward()
    pairs = zip(layer.parameters(), plain.parameters(), strict=True)
    far = max(float((p.grad - q.grad).abs().max()) for p, q in pairs)
    return far, max(float(p.grad.abs().max()) for p in plain.parameters())


def test_all_of_a_complex_gradient_is_exchanged(two) -> None:
    for far, largest in two.run(complex_gradient):
        assert far < 0.02 * largest


def test_parts_that_do_not_cover_a_bucket_are_refused() -> None:
    weight, other = torch.zeros(2, 3), torch.zeros(4)
    group = BucketGroup(["weight"], torch.zeros(6), None, 1)
    routes = Routes({weight: (group, 0)})
    assert routes.of([weight], torch.zeros(6)) == [(slice(0, 6), group, 0)]
    with pytest.raises(ModelError, match=r"bucket of 8 values for 1 parameters with 6 \(weight\)"):
        routes.of([weight], torch.zeros(8))
    with pytest.raises(ModelError, match=r"also some of shapes \[\(4,\)\]"):
        routes.of([weight, other], torch.zeros(10))


def owed_while_unused(codec: Any) -> bool:
    """Whether what a codec owes to a parameter stays as it is while no rank uses that."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Odd(skips=True), find_unused_parameters=True)
    hook = DdpCodec(ddp, codec)
    ddp.register_comm_hook(hook, codec_hook)
    owed = []
    for step in (0, 3, 4, 5):
        ddp.zero_grad()
        ddp(data(step), step).backward()
        owed.append(hook.codec_state()["now_and_then.weight"]["error"])
    hook.close()
    return bool(owed[1].any()) and torch.equal(owed[1], owed[3])


@pytest.mark.parametrize("codec", ["onebit", "powersgd"])
def test_an_unused_parameter_is_owed_what_it_was(two, codec) -> None:
    assert two.run(owed_while_unused, CODECS[codec]) == [True, True]


def uneven() -> tuple[int, str]:
    """One rank has three batches more than the other."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Odd(skips=False), bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    hook = DdpCodec(ddp, CODECS["onebit"])
    ddp.register_comm_hook(hook, codec_hook)
    with ddp.join():
        for step in range(2 + 3 * dist.get_rank()):
            ddp(data(step), step).backward()
            optimizer.step()
            optimizer.zero_grad()
    hook.close()
    return hook.step, digest(ddp.module)


def test_a_rank_that_has_joined_takes_part_with_zeros(two) -> None:
    first, second = two.run(uneven)
    assert first == second
    assert first[0] == 5


def mistakes() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4) for _ in range(2)]
    one, other = (DistributedDataParallel(layer) for layer in layers)
    hook = DdpCodec(one, "int8")
    one.register_comm_hook(hook, codec_hook)
    other.register_comm_hook(hook, codec_hook)
    with pytest.raises(ModelError, match="register it there alone"):
        other(torch.ones(1, 4)).sum().backward()
    with pytest.raises(UsageError, match=r"owes to body\.weight, which this model does not have"):
        hook.load_state_dict({**hook.state_dict(), "codec": {"body.weight": {}}})
    with pytest.raises(UsageError, match="cannot be pickled"):
        pickle.dumps(hook)
    one(torch.ones(1, 4)).sum().backward()
    del one
    layers[0].bias.requires_grad_(False)
    fewer = DistributedDataParallel(layers[0])
    fewer.register_comm_hook(hook, codec_hook)
    with pytest.raises(ModelError, match=r"averages other .*: not bias; make a new"):
        fewer(torch.ones(1, 4)).sum().backward()
    hook.close()
    del fewer
    layers[0].bias.requires_grad_(True)
    again = DistributedDataParallel(layers[0])
    again.register_comm_hook(hook, codec_hook)
    with pytest.raises(UsageError, match=r"a backward after DdpCodec.close\(\)"):
        again(torch.ones(1, 4)).sum().backward()


def test_mistakes_are_named(two) -> None:
    two.run(mistakes)


def copied() -> tuple[bool, bool]:
    """Whether a copy of a DDP model with the hook trains without it, and the original goes on."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(4, 4))
    hook = DdpCodec(ddp, "int8")
    ddp.register_comm_hook(hook, codec_hook)
    average = torch.optim.swa_utils.AveragedModel(ddp)
    ddp(torch.ones(1, 4)).sum().backward()
    average.update_parameters(ddp)
    again = copy.deepcopy(ddp)
    again(torch.ones(1, 4)).sum().backward()
    hook.close()
    return hook.step == 1, again.module.weight.grad is not None


def test_a_model_with_a_hook_can_be_copied(two) -> None:
    assert two.run(copied) == [(True, True)] * 2


def frozen_before() -> None:
    """DDP averages what required a gradient when it was made."""
    layer = nn.Linear(4, 4)
    ddp = DistributedDataParallel(layer, find_unused_parameters=True)
    layer.bias.requires_grad_(False)
    hook = DdpCodec(ddp, "int8")
    ddp.register_comm_hook(hook, codec_hook)
    for _ in range(2):
        ddp(torch.full((1, 4), dist.get_rank() + 1.0)).sum().backward()
    hook.close()
    assert torch.allclose(layer.weight.grad, torch.full((4, 4), 3.0), rtol=0.02)


def test_a_parameter_frozen_between_ddp_and_hook(two) -> None:
    two.run(frozen_before)


def late_rank() -> list[str]:
    """Rank 1 leaves out a backward: what the next two of rank 0 raise."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    ddp = DistributedDataParallel(nn.Linear(4, 4), process_group=group)
    hook = DdpCodec(ddp, "int8")
    ddp.register_comm_hook(hook, codec_hook)
    errors = []
    for _ in range(2):  # DDP rebuilds its buckets, which would time out by itself
        ddp(torch.ones(1, 4)).sum().backward()
    for _ in range(2 * (dist.get_rank() == 0)):
        try:
            ddp(torch.ones(1, 4)).sum().backward()
        except RuntimeError as error:
            errors.append(f"{type(error).__name__}: {error}")
    dist.barrier()
    hook.close()
    return errors


def test_a_failed_exchange_ends_the_run_within_the_timeout_of_the_group(two) -> None:
    (first, second), nothing = two.run(late_rank)
    assert nothing == []
    assert "imed out" in first
    assert "start the run again from its last checkpoint" in second


def momentum_misused() -> dict[str, str]:
    """Averages with momentum serve one update, as they are."""
    torch.manual_seed(0)
    texts = {}
    for misuse in ("clipped", "scaled", "added to", "nothing"):
        layer = nn.Linear(4, 4)
        ddp = DistributedDataParallel(layer)
        sgd = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
        hook = DdpCodec(ddp, {"kind": "dgc", "density": 1.0, "warmup_steps": 0}, optimizer=sgd)
        ddp.register_comm_hook(hook, codec_hook)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        x = torch.ones(2, 4)
        try:
            loss = ddp(x).square().mean()
            (scaler.scale(loss) if misuse == "scaled" else loss).backward()
            if misuse == "clipped":
                nn.utils.clip_grad_norm_(layer.parameters(), 0.1)
            if misuse == "added to":
                ddp(x)
            scaler.step(sgd) if misuse == "scaled" else sgd.step()
            texts[misuse] = ""
        except UsageError as error:
            texts[misuse] = str(error)
        hook.close()
    return texts


def test_averages_with_momentum_serve_one_update_as_they_are(two) -> None:
    for texts in two.run(momentum_misused):
        assert "set the codec's clip" in texts["clipped"]
        assert "loss_scale=scaler.get_scale" in texts["scaled"]
        assert "another backward would add" in texts["added to"]
        assert texts["nothing"] == ""


def rolled_back(pending: bool) -> tuple[str, str]:
    """The same updates twice, from one state; ``pending``: a backward is dropped before."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(16, 8))
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    codec = {"kind": "dgc", "density": 0.1, "warmup_steps": 3}
    hook = DdpCodec(ddp, codec, optimizer=sgd)
    ddp.register_comm_hook(hook, codec_hook)
    parts: list[Any] = [ddp, sgd, hook]
    ends: list[str] = []
    for run in range(2):
        for step in range(4):
            if step == 1 and run == 0:
                saved = copy.deepcopy([part.state_dict() for part in parts])
            elif run == 1 and step == 0:
                continue
            ddp(data(step)).square().mean().backward()
            sgd.step()
            sgd.zero_grad()
        ends.append(digest(ddp.module))
        if run == 0:
            if pending:
                ddp(data(9)).square().mean().backward()
            for part, state in zip(parts, copy.deepcopy(saved), strict=True):
                part.load_state_dict(state)
            sgd.zero_grad()
    hook.close()
    return ends[0], ends[1]


@pytest.mark.parametrize("pending", [False, True])
def test_a_run_that_is_rolled_back_goes_the_same_way_again(two, pending) -> None:
    for first, again in two.run(rolled_back, pending):
        assert first == again


def ended() -> list[tuple[int, int]]:
    """Groups and threads after each of some hooks."""
    gc.collect()  # what earlier tests have left ends before it is counted
    counts = []
    for _ in range(3):
        ddp = DistributedDataParallel(nn.Linear(4, 4))
        hook = DdpCodec(ddp, "int8")
        ddp.register_comm_hook(hook, codec_hook)
        ddp(torch.ones(1, 4)).sum().backward()
        hook.close()
        hook.close()
        groups = len(dist.distributed_c10d._world.pg_map)
        counts.append((groups, len(os.listdir("/proc/self/task"))))
    return counts


def test_a_hook_that_is_closed_leaves_no_group(two) -> None:
    for counts in two.run(ended):
        assert len(set(counts[1:])) == 1


def skipped_update() -> tuple[int, int]:
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    ddp = DistributedDataParallel(layer)
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    hook = DdpCodec(ddp, {"kind": "dgc", "density": 1.0, "warmup_steps": 0}, optimizer=sgd)
    ddp.register_comm_hook(hook, codec_hook)
    plain = nn.Linear(4, 4)
    plain.load_state_dict(layer.state_dict())
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for number in range(4):
        x = torch.full((2, 4), 1.0 + number)
        for model, optimizer in ((ddp, sgd), (plain, theirs)):
            model(x).square().mean().backward()
            if number != 1:
                optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(layer.state_dict(), plain.state_dict())
    counts = hook.step, hook.skipped
    hook.close()
    return counts


def test_an_update_that_the_script_skips_leaves_no_momentum(two) -> None:
    assert two.run(skipped_update) == [(3, 1)] * 2


def own_gradients_and_momentum() -> tuple[str, str]:
    """Assigned by a script before the first backward, and left of a backward in no_sync()."""
    ddp = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    hook = DdpCodec(ddp, "dgc", optimizer=optimizer)
    ddp.register_comm_hook(hook, codec_hook)
    said = []
    for by_hand in (True, False):
        if by_hand:
            for parameter in ddp.parameters():
                parameter.grad = torch.ones_like(parameter)
        else:
            with ddp.no_sync():
                ddp(torch.ones(2, 4)).mean().backward()
        with pytest.raises(UsageError) as caught:
            optimizer.step()
        said.append(str(caught.value))
        optimizer.zero_grad()
        ddp(torch.ones(2, 4)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    hook.close()
    return said[0], said[1]


def test_gradients_that_ddp_has_not_averaged_are_refused_as_they_have_no_momentum(two) -> None:
    for each in two.run(own_gradients_and_momentum):
        for said in each:
            assert "is none that DDP has averaged" in said


def joined_with_momentum() -> str:
    ddp = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    hook = DdpCodec(ddp, "dgc", optimizer=optimizer)
    ddp.register_comm_hook(hook, codec_hook)
    try:
        with pytest.raises(UsageError) as caught, ddp.join():
            ddp(torch.ones(2, 4))
    finally:
        hook.close()
    return str(caught.value)


def test_momentum_of_ranks_that_join_is_refused(two) -> None:
    for said in two.run(joined_with_momentum):
        assert "the codec dgc under ddp.join()" in said


def owed_in_half() -> bool:
    """Gradients in fp16 whose part of a mean has no place there."""
    ddp = DistributedDataParallel(nn.Linear(64, 64, bias=False).half())
    hook = DdpCodec(ddp, "topk", loss_scale=lambda: 1024.0)
    ddp.register_comm_hook(hook, codec_hook)
    ddp(torch.full((1, 64), 3e-5).half()).sum().backward()
    state: Any = hook.state_dict()
    owed = [value for one in state["codec"].values() for value in one.values()]
    hook.close()
    return any(bool(value.any()) for value in owed)


def test_a_scale_is_undone_before_rounding(two) -> None:
    assert two.run(owed_in_half) == [True, True]
