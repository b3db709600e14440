"""Loops of Hugging Face Accelerate: a session in place of DDP changes no bit on two ranks."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from slipstream.errors import ModelError, UsageError
from tests.harness.ranks import Ranks

accelerate = pytest.importorskip("accelerate", reason="Accelerate is not installed")
EXACT: dict[str, dict[str, Any]] = {
    "defaults": {},
    "direct, per layer": {"gradients": {"transport": "direct", "split": "per_layer"}},
    "sharded": {"gradients": {"transport": "sharded"}},
}


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def made(strategy: dict[str, Any] | None, **named: Any) -> Any:
    """Accelerate's own accelerator, or ours under a strategy; earlier ones are forgotten."""
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()
    if strategy is None:
        return accelerate.Accelerator(cpu=True, **named)
    ours = importlib.import_module("slipstream.adapters.accelerate")
    return ours.Accelerator(cpu=True, strategy=strategy, **named)


def parts() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
    x = torch.randn(48, 8)
    return model, optimizer, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)


def train(
    strategy: dict[str, Any] | None, folder: str | None = None, epochs: int = 3
) -> list[torch.Tensor]:
    """A typical loop; the values that it logs, then the parameters. ``folder``: go on from there,
    where it is there, else save there after the first epoch."""
    accelerator = made(strategy, gradient_accumulation_steps=2)
    model, optimizer, loader = parts()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.9)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    noted: list[torch.Tensor] = []
    resumed = folder is not None and Path(folder).exists()
    if resumed:
        accelerator.load_state(folder)
    for epoch in range(1 if resumed else 0, epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    noted += [accelerator.gather(loss.detach()), norm]
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        if folder is not None and not resumed and epoch == 0:
            accelerator.save_state(folder)
    noted += [p.detach().clone() for p in accelerator.unwrap_model(model).parameters()]
    accelerator.free_memory()  # as end_training(), which ends the process group, too
    return noted


def apart(strategy: dict[str, Any]) -> float:
    """The largest difference from the loop under DDP, of losses, norms and parameters."""
    ours, plain = train(strategy), train(None)
    assert len(ours) == len(plain)
    return max(float((a - b).abs().max()) for a, b in zip(ours, plain, strict=True))


@pytest.mark.parametrize("strategy", EXACT)
def test_a_loop_trains_as_under_ddp(two: Ranks, strategy: str) -> None:
    allowed = 1e-5 if strategy == "sharded" else 0.0  # norms are summed in another order
    assert max(two.run(apart, EXACT[strategy])) <= allowed


OTHERS: dict[str, dict[str, Any]] = {
    "powersgd": {"gradients": {"codec": {"kind": "powersgd", "rank": 1, "start_step": 2}}},
    "auto": {"gradients": {"split": "optimal", "transport": "auto"}},
    "autocast": {"precision": {"kind": "autocast", "dtype": "bf16"}},
    "local": {"local": {"steps": 4}},
    "checks": {"checks": {"every": 1}},
}


def learns(strategy: dict[str, Any]) -> bool:
    """Over twelve epochs of three updates each."""
    losses = [float(one.mean()) for one in train(strategy, epochs=12) if one.shape == (2,)]
    return sum(losses[-3:]) < 0.5 * sum(losses[:3])


@pytest.mark.parametrize("strategy", OTHERS)
def test_other_strategies_work_and_leave_a_trace(two: Ranks, strategy: str, tmp_path: Path) -> None:
    traced = OTHERS[strategy] | {"trace": {"steps": 3, "folder": str(tmp_path)}}
    assert two.run(learns, traced) == [True, True]
    assert [*tmp_path.glob("**/trace.json")] or strategy == "auto"  # which still searches


def resumes(folder: str) -> bool:
    strategy = {"gradients": {"codec": {"kind": "int8", "error_feedback": True}}}
    whole = train(strategy, folder)
    rest = train(strategy, folder)
    assert len(rest) < len(whole)
    return all(map(torch.equal, rest, whole[-len(rest) :]))


def test_a_saved_state_goes_on_bit_for_bit(two: Ranks, tmp_path: Path) -> None:
    assert two.run(resumes, str(tmp_path / "state")) == [True, True]


def refused() -> None:
    accelerator = made({})
    with pytest.raises(UsageError, match=r"before a model and its optimizer are prepared"):
        accelerator.backward(torch.ones(1, requires_grad=True).sum())
    model, optimizer, _ = parts()
    model, optimizer = accelerator.prepare(model, optimizer)
    loss = model(torch.ones(2, 8)).mean()
    with pytest.raises(UsageError, match=r"backward\(create_graph=\.\.\.\)"):
        accelerator.backward(loss, create_graph=True)
    accelerator.backward(loss)
    with pytest.raises(UsageError, match="clips the 2-norm of all"):
        accelerator.clip_grad_norm_(model.parameters(), 1.0, norm_type=1)
    with pytest.raises(UsageError, match="clips the 2-norm of all"):
        accelerator.clip_grad_norm_(model[0].parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(ModelError, match="several models"):
        accelerator.prepare(parts()[0])
    accelerator.free_memory()
    both = made({"gradients": {"accumulate": 2}})
    with pytest.raises(UsageError, match="set gradient_accumulation_steps"):
        both.prepare(*parts()[:2])
    both = made({"precision": {"kind": "autocast", "dtype": "bf16"}}, mixed_precision="bf16")
    with pytest.raises(UsageError, match="precision in the strategy and mixed_precision 'bf16'"):
        both.prepare(*parts()[:2])


def test_mistakes_are_named(two: Ranks) -> None:
    two.run(refused)
