"""What holds for every precision, whatever it goes with: add a row, it gets the whole battery.

holds(CASES["half_weights, fp16, dgc"], "cpu")      # on any number of ranks, asserts
"""

from __future__ import annotations

import copy
import hashlib
import math
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import slipstream
from tests.harness.models import words

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
GRADIENTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulate": {"accumulate": 2},
    "half": {"codec": "half"},
    "int8": {"codec": {"kind": "int8", "error_feedback": True}, "accumulate": 2},
    "powersgd": {"codec": {"kind": "powersgd", "rank": 1, "start_step": 0}},
    "dgc": {"codec": {"kind": "dgc", "density": 0.25, "warmup_steps": 0}},
}
SCALE = {"kind": "dynamic", "init": 1024.0, "incr_every_n": 3, "decr_every_n": 1}
CASES: dict[str, dict[str, Any]] = {
    f"{kind}, {dtype}, {name}": {
        "precision": {"kind": kind, "dtype": dtype, "loss_scale": SCALE, "emulate": True},
        "gradients": gradients,
    }
    for kind, dtype, (name, gradients) in product(
        ("autocast", "half_weights"), TYPES, GRADIENTS.items()
    )
}
CASES["half_weights, bf16, exchange fp32"] = {
    "precision": {"kind": "half_weights", "loss_scale": SCALE, "exchange": "fp32"}
}
STEPS, POISONED = 6, 2


class Words(nn.Module):
    """Tied, frozen and unused parameters, both kinds of normalisation, a checkpoint, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)
        self.layer_norm, self.batch_norm = nn.LayerNorm(8), nn.BatchNorm1d(8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.never = nn.Linear(3, 3)
        self.decoder = nn.Linear(8, 11, bias=False)
        self.decoder.weight = self.embedding.weight
        self.register_buffer("places", torch.randn(6, 8) / 3)

    def block(self, x: Tensor) -> Tensor:
        return x + self.second(F.gelu(self.first(self.layer_norm(x))))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = checkpoint(self.block, self.embedding(x) + self.places, use_reentrant=False)
        hidden = self.batch_norm(self.frozen(hidden).flatten(0, 1)).view_as(hidden)
        return {"logits": self.decoder(hidden).mean(1)}


def build(device: str, seed: int = 0) -> tuple[Words, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Words().to(device)
    trained = [p for p in model.parameters() if p.requires_grad]
    return model, torch.optim.SGD(trained, lr=0.1, momentum=0.9, weight_decay=0.01)


def here() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def train(session: Any, device: str, steps: range, poisoned: int = -1) -> list[bool]:
    """What each update's ``step()`` said; on the last rank one of them overflows."""
    accumulate = session.strategy.gradients.accumulate
    last = here() == (dist.get_world_size() if dist.is_initialized() else 1) - 1
    said = []
    for step in steps:
        for micro in range(accumulate):
            x, y = (t.to(device) for t in words(here(), step * accumulate + micro))
            session.model.train()
            loss = F.cross_entropy(session.model(x)["logits"], y)
            session.backward(loss * (torch.inf if step == poisoned and last else 1.0))
            if micro == accumulate - 1 and session.strategy.gradients.codec is None:
                norm = session.clip_grad_norm_(0.5)
                assert step == poisoned or 0 < norm < 100  # not scaled
            said.append(session.step())
        assert said[-accumulate:-1] == [False] * (accumulate - 1)
    return said[accumulate - 1 :: accumulate]


def digest(value: Any) -> str:
    """Of all tensors and numbers in a state, on every device."""
    found = hashlib.sha256()

    def add(item: Any) -> None:
        if isinstance(item, Tensor):
            raw = item.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            found.update(f"{item.dtype}{tuple(item.shape)}".encode() + raw.numpy().tobytes())
        elif isinstance(item, dict):
            for key in item:
                found.update(str(key).encode())
                add(item[key])
        elif isinstance(item, list | tuple):
            for part in item:
                add(part)
        else:
            found.update(repr(item).encode())

    add(value)
    return found.hexdigest()


def same_everywhere(value: Any) -> bool:
    """Whether all ranks have the same bits."""
    if not dist.is_initialized():
        return True
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, digest(value))
    return len(set(every)) == 1


def states(session: Any) -> Any:
    return copy.deepcopy(
        (session.model.state_dict(), session.optimizer.state_dict(), session.state_dict())
    )


def holds(case: dict[str, Any], device: str) -> None:
    """The whole battery for one strategy, on every rank."""
    model, optimizer = build(device)
    before = dict(model.named_parameters())
    params = [[*group["params"]] for group in optimizer.param_groups]
    session = slipstream.accelerate(model, optimizer, None, case)
    assert train(session, device, range(POISONED)) == [True] * POISONED
    unchanged = states(session)
    assert train(session, device, range(POISONED, 3), POISONED) == [False]
    skips(session, unchanged)
    saved = states(session)
    types_are_right(session)
    assert same_everywhere([*model.state_dict().values(), saved[2]])
    assert train(session, device, range(3, STEPS)) == [True] * 3
    assert session.state_dict()["loss_scale"] == [1024.0, 0, 0]  # halved, then grown again
    trained = states(session)
    assert session.model.eval()(words(0, 0)[0].to(device))["logits"].dtype == torch.float32
    session.close()
    # Nothing is left, and nothing is lost.
    for name, parameter in model.named_parameters():
        assert (parameter, parameter.dtype, parameter.grad_dtype) == (
            before[name], torch.float32, torch.float32
        )  # fmt: skip
    for group, expected in zip(optimizer.param_groups, params, strict=True):
        assert all(a is b for a, b in zip(group["params"], expected, strict=True))
    assert digest(model.state_dict()) == digest(trained[0])
    assert all(b.dtype != TYPES[case["precision"].get("dtype", "bf16")] for b in model.buffers())
    assert all("forward" not in vars(m) for m in model.modules())
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_state_dict_hooks")
    assert not any(getattr(m, hook) for m in model.modules() for hook in hooks)
    resumes(case, device, saved, trained)


def skips(session: Any, before: Any) -> None:
    """The update with an overflow changed nothing but the scale."""
    after = states(session)
    statistics = ("batch_norm.",)
    for name, value in before[0].items():
        assert name.startswith(statistics) or torch.equal(after[0][name], value), name
    assert digest(after[1]) == digest(before[1])
    assert after[2]["steps"] == before[2]["steps"]
    assert session.skipped == 1
    assert (before[2]["loss_scale"], after[2]["loss_scale"]) == ([1024.0, 2, 0], [512.0, 0, 0])


def types_are_right(session: Any) -> None:
    """Parameters are the rounded masters, and every state is fp32."""
    config, model = session.strategy.precision, session.model
    state = model.state_dict()
    floats = [v for v in state.values() if v.is_floating_point()]
    assert {v.dtype for v in floats} == {torch.float32}
    for kept in session.optimizer.state.values():
        assert {t.dtype for t in kept.values() if isinstance(t, Tensor)} <= {torch.float32}
    half = TYPES[config.dtype] if config.kind == "half_weights" else torch.float32
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        wide = "norm" in name or not value.is_floating_point()
        assert value.dtype == (state[name].dtype if wide else half), name
        assert torch.equal(value, state[name].to(value.dtype)), name


def resumes(case: dict[str, Any], device: str, saved: Any, trained: Any) -> None:
    """From a checkpoint it goes on bit for bit, loaded before accelerate() or after."""
    lent = "dgc" in str(case)  # an optimizer's state with what dgc has borrowed comes before
    for early in (True, False)[: 1 if lent else 2]:
        model, optimizer = build(device, seed=5)
        if early:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(copy.deepcopy(saved[1]))
        with slipstream.accelerate(model, optimizer, None, case) as session:
            if not early:
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(copy.deepcopy(saved[1]))
            session.load_state_dict(saved[2])
            assert train(session, device, range(3, STEPS)) == [True] * 3
            again = states(session)
        assert [digest(part) for part in again] == [digest(part) for part in trained]


def losses(case: dict[str, Any], device: str, steps: int = 60) -> tuple[float, float]:
    """The loss on the first batch before training on it, and after."""
    model, optimizer = build(device)
    x, y = (t.to(device) for t in words(here(), 0))
    found = []
    with slipstream.accelerate(model, optimizer, None, case) as session:
        for _ in range(steps):
            loss = F.cross_entropy(session.model(x)["logits"], y)
            session.backward(loss)
            session.step()
            found.append(float(loss.detach()))
    assert all(map(math.isfinite, found))
    return found[0], found[-1]
