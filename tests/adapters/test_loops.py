"""Loops of other frameworks: a session in place of DDP changes no bit on two ranks."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import io
import os
import re
import runpy
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard

from slipstream.errors import ModelError, UsageError
from slipstream.trace import read
from slipstream.tuner import online_search
from tests.adapters.habits import trainer_script
from tests.adapters.habits.habit import Given
from tests.adapters.loops import (
    LOOPS,
    UPDATES,
    Noted,
    adamw,
    adapter,
    lightning,
    model_of_tests,
    samples,
    trainer,
)
from tests.harness.ranks import Ranks

MISSING = [name for name in ("accelerate", "lightning") if not importlib.util.find_spec(name)]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")

EXACT: dict[str, dict[str, Any]] = {
    "defaults": {},
    "direct, per layer": {"gradients": {"transport": "direct", "split": "per_layer"}},
    "sharded": {"gradients": {"transport": "sharded"}},
}


@cache
def plain(loop: str) -> Noted:
    return LOOPS[loop](None)


def apart(loop: str, strategy: dict[str, Any]) -> float:
    """The largest difference from the loop under DDP, of losses, norms and parameters."""
    ours, theirs = LOOPS[loop](strategy), plain(loop)
    assert len(ours) == len(theirs) >= 3 * UPDATES
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("strategy", EXACT)
@pytest.mark.parametrize("loop", LOOPS)
def test_it_trains_as_under_ddp(two: Ranks, loop: str, strategy: str) -> None:
    allowed = 1e-5 if strategy == "sharded" else 0.0  # norms are summed in another order
    assert max(two.run(apart, loop, EXACT[strategy])) <= allowed


def apart_by_hand(strategy: dict[str, Any]) -> float:
    ours, theirs = lightning(strategy, manual=True), lightning(None, manual=True)
    for noted in (ours, theirs):  # the loss of validation: there Lightning's DDP has the running
        del noted[-6]  # statistics of each rank, as it broadcasts none with manual optimization
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("strategy", ["defaults", "sharded"])
def test_manual_optimization_trains_as_under_ddp(two: Ranks, strategy: str) -> None:
    assert max(two.run(apart_by_hand, EXACT[strategy])) <= (1e-5 if strategy == "sharded" else 0.0)


HABITS: dict[str, dict[str, Any]] = {
    "averages of weights, whose last epoch has no backward": {"averages": True},
    "a checkpoint inside an accumulation window": {"val_check_interval": 3},
}


def apart_with(habit: str, folder: Path) -> float:
    ours, theirs = (
        lightning(strategy, folder=folder / str(strategy), **HABITS[habit])
        for strategy in ({}, None)
    )
    for noted in (ours, theirs):  # the loss of validation: averaging exchanges buffers for new
        del noted[-6]  # ones, which DDP broadcasts no more
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("habit", HABITS)
def test_habits_with_lightning_train_as_under_ddp(two: Ranks, habit: str, tmp_path: Path) -> None:
    assert two.run(apart_with, habit, tmp_path) == [0.0, 0.0]
    assert len([*tmp_path.glob("{}/*.ckpt")]) >= 3


def by_its_own_launcher() -> bool:
    theirs = plain("lightning")
    del os.environ["RANK"]  # which it sets nowhere
    ours = lightning({}, launcher="LightningEnvironment")
    return all(map(torch.equal, ours, theirs))


def test_lightnings_own_launcher_starts_a_session(two: Ranks) -> None:
    assert two.run(by_its_own_launcher) == [True, True]


OTHERS: dict[str, dict[str, Any]] = {
    "powersgd": {"gradients": {"codec": {"kind": "powersgd", "rank": 1, "start_step": 2}}},
    "auto": {"gradients": {"split": "optimal", "transport": "auto"}},
    "autocast": {"precision": {"kind": "autocast", "dtype": "bf16"}},
    "local": {"local": {"steps": 4}},
    "checks": {"checks": {"every": 1}},
}


def learns(loop: str, strategy: dict[str, Any]) -> float:
    """The loss of the trained model, as a share of that before."""
    with patch.object(online_search, "CALIBRATION_SECONDS", 0.2):
        values = LOOPS[loop](strategy, epochs=12)
    model, (x, y) = model_of_tests(), samples()[:]
    before = nn.functional.mse_loss(model(x), y).item()
    for own, trained in zip(model.parameters(), values[-5:], strict=True):
        own.data.copy_(trained)
    return nn.functional.mse_loss(model(x), y).item() / before


@pytest.mark.parametrize(
    ("loop", "strategy"),
    [(loop, name) for loop in LOOPS for name in OTHERS if loop != "trainer" or name == "local"],
)
def test_other_strategies_work_and_leave_a_trace(
    two: Ranks, loop: str, strategy: str, tmp_path: Path
) -> None:
    traced = OTHERS[strategy] | {"trace": {"steps": 3, "folder": str(tmp_path)}}
    assert max(two.run(learns, loop, traced)) < 0.5
    traces = [*tmp_path.glob("**/trace.json")]
    assert traces or strategy == "auto"  # which still searches
    for trace in map(read, traces):
        assert trace.framework.name == {"trainer": "Accelerate"}.get(loop, loop.capitalize())
        assert set(trace.framework.own_settings) == {"gradients.accumulate"}
        batches = [e.args["samples"] for e in trace.events if e.name == "iteration"]
        assert set(batches) == {8}  # two of four


RESUMED: dict[str, dict[str, Any]] = {
    "int8": {"gradients": {"codec": {"kind": "int8", "error_feedback": True}}},
    "sharded": {"gradients": {"transport": "sharded"}},
    "sharded masters": {"gradients": {"transport": "sharded"}, "precision": "half_weights"},
}


def resumes(loop: str, strategy: dict[str, Any], folder: Path) -> bool:
    whole = LOOPS[loop](strategy, folder=folder)
    rest = LOOPS[loop](strategy, folder=folder, resume=True)
    assert UPDATES < len(rest) < len(whole)
    return all(map(torch.equal, rest, whole[-len(rest) :]))


@pytest.mark.parametrize("strategy", RESUMED)
@pytest.mark.parametrize("loop", LOOPS)
def test_it_goes_on_from_its_checkpoint_bit_for_bit(
    two: Ranks, loop: str, strategy: str, tmp_path: Path
) -> None:
    assert two.run(resumes, loop, RESUMED[strategy], tmp_path / "saved") == [True, True]


SAVED: dict[str, str] = {
    "accelerate": "model.safetensors",
    "trainer": f"checkpoint-{UPDATES}/model.safetensors",
    "lightning": "epoch=0.ckpt",
    "fabric": "",
}


def saved(loop: str, folder: Path) -> Noted:
    """The parameters in the checkpoint of ranks that have not met yet, from which one goes on."""
    LOOPS[loop]({"local": {"steps": 100}}, folder=folder, epochs=2)
    LOOPS[loop]({"local": {"steps": 100}}, folder=folder, epochs=2, resume=True)
    file = folder / SAVED[loop]
    state = load_file(file) if file.suffix == ".safetensors" else torch.load(file)
    state = next((state[key] for key in ("state_dict", "model") if key in state), state)
    own = {key.removeprefix("net."): value for key, value in state.items()}
    return [own[name] for name, _ in model_of_tests().named_parameters()]


@pytest.mark.parametrize("loop", LOOPS)
def test_a_checkpoint_has_the_parameters_that_evaluate_best(
    two: Ranks, loop: str, tmp_path: Path
) -> None:
    """Those of the last meeting, here of the start."""
    for values in two.run(saved, loop, tmp_path / "saved"):
        assert all(map(torch.equal, values, model_of_tests().parameters()))


def validated() -> list[float]:
    """A sum of the parameters at each validation of Lightning, with ranks that meet never."""
    sums: list[float] = []
    looked = lightning({"local": {"steps": 100}}, at_validation=lambda m: sums.append(of(m)))
    assert len(looked) > UPDATES
    return sums


def of(model: nn.Module) -> float:
    return float(sum(p.detach().double().sum() for p in model.parameters()))


def test_lightning_validates_the_parameters_that_evaluate_best(two: Ranks) -> None:
    """Those of the last meeting, which all ranks share."""
    of_both = two.run(validated)
    assert of_both[0] == of_both[1]
    assert len(set(of_both[0])) == 1


def mistakes_with_accelerate() -> None:
    package = importlib.import_module("accelerate")
    ours = adapter("accelerate").Accelerator

    def made(strategy: dict[str, Any], **named: Any) -> Any:
        package.state.AcceleratorState._reset_state(True)
        package.state.GradientState._reset_state()
        return ours(cpu=True, strategy=strategy, **named)

    accelerator, model = made({}), model_of_tests()
    with pytest.raises(UsageError, match=r"before a model and its optimizer are prepared"):
        accelerator.backward(torch.ones(1, requires_grad=True).sum())
    model, optimizer = accelerator.prepare(model, adamw(model))
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
    with pytest.raises(ModelError, match=r"prepare\(\) got several models"):
        accelerator.prepare(model_of_tests())
    accelerator.free_memory()
    model = model_of_tests()
    with pytest.raises(ModelError, match=r"does not step the Linear: freeze one .* not trained"):
        accelerator.prepare(model, nn.Linear(2, 1), adamw(model))
    accelerator.free_memory()
    for strategy, named, words in [
        (TWICE["accumulates"], {}, "set gradient_accumulation_steps"),
        (TWICE["casts"], {"mixed_precision": "bf16"}, "and mixed_precision 'bf16' of Accelerate"),
    ]:
        both, model = made(strategy, **named), model_of_tests()
        with pytest.raises(UsageError, match=words):
            both.prepare(model, adamw(model))


TWICE: dict[str, dict[str, Any]] = {
    "accumulates": {"gradients": {"accumulate": 2}},
    "casts": {"precision": {"kind": "autocast", "dtype": "bf16"}},
}


def mistakes_with_trainer() -> None:
    def split(model: Any) -> None:
        fully_shard(model).is_distributed_loading_by_transformers = True  # as it loads by a plan

    with pytest.raises(ModelError, match=r"parameter net\.0\.weight is split over ranks already"):
        trainer({}, change=split)
    arguments = importlib.import_module("transformers").TrainingArguments
    with patch.object(arguments, "n_gpu", 2), pytest.raises(UsageError, match="2 GPUs in one"):
        trainer({})
    transformers = importlib.import_module("transformers")

    class Other(transformers.Trainer):  # type: ignore[name-defined]  # as TRL's PPOTrainer
        def __init__(self, **named: Any) -> None:
            self.accelerator = importlib.import_module("accelerate").Accelerator(cpu=True)

    mine = type("Mine", (adapter("trainer").SessionTrainer, Other), {})
    with pytest.raises(UsageError, match="Mine makes an accelerator of its own"):
        mine(model=model_of_tests())


def mistakes_with_lightning() -> None:
    ours = adapter("lightning").SessionStrategy
    with pytest.raises(UsageError, match=r"SessionStrategy\(static_graph=\.\.\.\)"):
        ours(static_graph=True)
    with pytest.raises(UsageError, match=r"SessionStrategy\(ddp_comm_hook=\.\.\.\)"):
        ours(ddp_comm_hook=print)
    with pytest.raises(UsageError, match=r"Trainer\(accumulate_grad_batches="):
        lightning(TWICE["accumulates"])
    with pytest.raises(UsageError, match="and precision='bf16-mixed' of Lightning"):
        lightning(TWICE["casts"], precision="bf16-mixed")

    def two_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD([p], lr=0.1) for p in model.parameters()][:2]

    with pytest.raises(UsageError, match=r"clipping by a norm without net\.0\.weight"):
        lightning({}, optimizers=lambda model: adamw(model.net[3]))
    with pytest.raises(ModelError, match=r"configure_optimizers\(\) got several optimizers"):
        lightning({}, manual=True, optimizers=two_optimizers)


def mistakes_with_fabric() -> None:
    package = importlib.import_module("lightning.fabric")
    plugins = importlib.import_module("lightning.fabric.plugins")
    ours = adapter("fabric").FabricStrategy
    with pytest.raises(UsageError, match=r"FabricStrategy\(static_graph=\.\.\.\)"):
        ours(static_graph=True)

    def made(strategy: dict[str, Any], **named: Any) -> Any:
        torchrun = plugins.environments.TorchElasticEnvironment()
        chosen = ours(strategy, cluster_environment=torchrun)
        fabric = package.Fabric(accelerator="cpu", devices=2, strategy=chosen, **named)
        fabric.launch()
        return fabric

    fabric, model = made({}), model_of_tests()
    with pytest.raises(UsageError, match=r"before a model and its optimizer are set up"):
        fabric.backward(torch.ones(1, requires_grad=True).sum())
    with pytest.raises(UsageError, match=r"setup_optimizers\(\) before its model"):
        fabric.setup_optimizers(adamw(model))
    model, optimizer = fabric.setup(model, adamw(model))
    loss = model(torch.ones(2, 8)).mean()
    with pytest.raises(UsageError, match=r"backward\(create_graph\) under a session"):
        fabric.backward(loss, create_graph=True)
    fabric.backward(loss)
    with pytest.raises(UsageError, match="clips the 2-norm of all"):
        fabric.clip_gradients(model, optimizer, max_norm=1.0, norm_type=1)
    with pytest.raises(UsageError, match=r"clipping by a norm without 0\.weight"):
        fabric.clip_gradients(model, adamw(model.module[3]), max_norm=1.0)
    optimizer.step()
    with pytest.raises(ModelError, match=r"setup\(\) got several optimizers"):
        fabric.setup_optimizers(adamw(model_of_tests()))
    with pytest.raises(ModelError, match=r"setup\(\) got several models.*freeze one"):
        fabric.setup_module(model_of_tests())  # without an optimizer that Fabric knows
    fabric.setup_module(model_of_tests().requires_grad_(False))
    fabric.strategy.close()
    fabric.setup_module(model_of_tests())
    with pytest.raises(ModelError, match=r"setup\(\) got several models"):
        fabric.setup_module(model_of_tests())
    fabric.strategy.close()
    again = model_of_tests()
    fabric.setup(again, adamw(again))  # as for the next fold of a cross-validation
    fabric.strategy.close()
    for strategy, named, words in [
        (TWICE["accumulates"], {}, r"set fabric\.no_backward_sync"),
        (TWICE["casts"], {"precision": "bf16-mixed"}, "and precision='bf16-mixed' of Fabric"),
        (
            {"gradients": {"codec": "onebit"}},
            {"plugins": [plugins.MixedPrecision("16-mixed", "cpu")]},
            "codec onebit, .* under precision='16-mixed' of Fabric, whose loss scale changes",
        ),
    ]:
        both, model = made(strategy, **named), model_of_tests()
        with pytest.raises(UsageError, match=words):
            both.setup(model, adamw(model))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "data": ({"data": {"balance": {}}}, "data in the strategy under Accelerate, which has its own"),
    "parallel": (
        {"parallel": {"tensor": {"ranks": 2}}},
        "parallel in the strategy under Accelerate",
    ),
    "stretch": ({"local": {"steps": 4, "stretch": 2}}, r"local\.stretch under Accelerate"),
}


def refused(name: str) -> None:
    strategy, words = REFUSED[name]
    with pytest.raises(UsageError, match=words):
        LOOPS["accelerate"](strategy)


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_framework_does_by_itself_is_refused(two: Ranks, name: str) -> None:
    two.run(refused, name)


# What Trainer's users do.

COMPILED = {"torch_compile": True, "torch_compile_backend": "eager", "times": 2}
DGC = {"gradients": {"codec": {"kind": "dgc", "start_step": 0, "warmup_steps": 0, "density": 0.5}}}


def compiled_again() -> bool:
    ours, theirs = (trainer({}, **settings) for settings in (COMPILED, {"times": 2}))
    return all(map(torch.equal, ours, theirs))


def test_trainer_trains_again_what_it_has_compiled(two: Ranks) -> None:
    assert two.run(compiled_again) == [True, True]


def by_momentum() -> int:
    named = {"max_grad_norm": 0.0, "optim": "sgd", "optim_args": "momentum=0.9"}
    return len(trainer(DGC, **named))


def test_trainer_trains_by_a_codec_with_momentum(two: Ranks) -> None:
    assert min(two.run(by_momentum)) >= 3 * UPDATES


def from_weights_alone(folder: Path) -> int:
    trainer({}, folder=folder, save_only_model=True)
    return len(trainer({}, folder=folder, resume=True))


def test_trainer_goes_on_from_weights_alone(two: Ranks, tmp_path: Path) -> None:
    assert min(two.run(from_weights_alone, tmp_path / "saved")) > UPDATES


def best(folder: Path, epochs: int) -> bool:
    """Whether Trainer ends with the best checkpoint, though a meeting is on its way."""
    named = {"eval_strategy": "steps", "eval_steps": UPDATES, "load_best_model_at_end": True}
    strategy = {"local": {"steps": 4, "fragments": 2, "delay": 2}}
    found = trainer(strategy, folder=folder, epochs=epochs, **named)[-len(PARAMETERS) :]
    files = [load_file(file) for file in folder.glob("checkpoint-*/model.safetensors")]
    kept = [[file[f"net.{name}"] for name in PARAMETERS] for file in files]
    return any(all(map(torch.equal, found, values)) for values in kept)


PARAMETERS = [name for name, _ in model_of_tests().named_parameters()]


@pytest.mark.parametrize("epochs", [2, 3])
def test_trainer_ends_with_the_best_model_under_local(
    two: Ranks, epochs: int, tmp_path: Path
) -> None:
    assert two.run(best, tmp_path / "saved", epochs) == [True, True]


class ScheduleFree(torch.optim.SGD):
    """As the schedule-free optimizers: evaluates at another point than it trains at."""

    def eval(self) -> None:
        self._to(mode=False, weight=-0.5)

    def train(self) -> None:
        self._to(mode=True, weight=1 / 3)

    @torch.no_grad()
    def _to(self, *, mode: bool, weight: float) -> None:
        for group in self.param_groups:
            if group.setdefault("train_mode", True) != mode:
                group["train_mode"] = mode
                for p in group["params"]:
                    p.lerp_(self.state[p].setdefault("z", torch.ones_like(p)), weight)


def evaluated(strategy: dict[str, Any] | None, **named: Any) -> Noted:
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return ScheduleFree(model.parameters(), lr=0.01)

    return trainer(strategy, optimizer=optimizer, **named)


def moved_by_evaluation(strategy: dict[str, Any] | None) -> float:
    """How far evaluations move the losses and norms by a schedule-free optimizer."""
    often = {"eval_strategy": "steps", "eval_steps": 3}
    one, other = evaluated(strategy, **often), evaluated(strategy)
    pairs = [*zip(one, other, strict=True)][: -len(PARAMETERS)]  # one ends with an evaluation
    return max(float((a - b).abs().max()) for a, b in pairs)


@pytest.mark.parametrize("strategy", [None, {}, {"local": {"steps": 5}}], ids=str)
def test_evaluations_move_nothing_of_a_schedule_free_optimizer(two: Ranks, strategy: Any) -> None:
    assert max(two.run(moved_by_evaluation, strategy)) < 1e-5


class Averages:
    """Evaluates an average of its own, here ones."""

    def evaluate(self, *arguments: Any, **named: Any) -> Any:
        own = [p.detach().clone() for p in self.model.parameters()]  # type: ignore[attr-defined]
        for p in self.model.parameters():  # type: ignore[attr-defined]
            p.data.fill_(1.0)
        found = super().evaluate(*arguments, **named)  # type: ignore[misc]
        self.save_model(f"{self.args.output_dir}/mine")  # type: ignore[attr-defined]
        for p, value in zip(self.model.parameters(), own, strict=True):  # type: ignore[attr-defined]
            p.data.copy_(value)
        return found


def average_evaluated(strategy: Any, folder: Path) -> tuple[list[float], Noted, Noted]:
    """Losses of evaluations of one average, what it saved, and the trained parameters."""
    named = {"eval_dataset": trainer_script.rows(16), "eval_strategy": "steps", "eval_steps": 3}
    script = trainer_script.Script(Given(strategy, folder), mixin=Averages, **named).train()
    losses = [e["eval_loss"] for e in script.t.state.log_history if "eval_loss" in e]
    torch.distributed.barrier()
    saved = load_file(folder / "mine/model.safetensors")
    return losses, [saved[f"net.{name}"] for name in PARAMETERS], script.end()[-5:-1]


@pytest.mark.parametrize("strategy", [{}, {"local": {"steps": 4}}], ids=str)
def test_trainer_evaluates_and_saves_an_average_that_is_put_in(
    two: Ranks, strategy: Any, tmp_path: Path
) -> None:
    for losses, saved, trained in two.run(average_evaluated, strategy, tmp_path):
        assert len(losses) > 3
        assert all(bool((value == 1.0).all()) for value in saved)
        assert not all(bool((value == 1.0).all()) for value in trained)


def trained_state() -> tuple[bool, bool]:
    """Whether Accelerate's state dict has the outer parameters, of the start, as the model has not;
    and whether it has the model's own again afterwards."""
    package = importlib.import_module("accelerate")
    package.state.AcceleratorState._reset_state(True)
    package.state.GradientState._reset_state()
    accelerator = adapter("accelerate").Accelerator(cpu=True, strategy={"local": {"steps": 100}})
    model = model_of_tests()
    model, optimizer = accelerator.prepare(model, adamw(model))
    accelerator.backward(model(torch.ones(2, 8)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    own = [p.detach().clone() for p in model.parameters()]
    state = accelerator.get_state_dict(model)
    same = [torch.equal(state[n], p) for n, p in model_of_tests().named_parameters()]
    kept = all(map(torch.equal, own, model.parameters()))
    accelerator.free_memory()
    return all(same), kept and not all(map(torch.equal, own, model_of_tests().parameters()))


def test_accelerates_state_dict_has_the_parameters_that_evaluate_best(two: Ranks) -> None:
    assert two.run(trained_state) == [(True, True)] * 2


def saves_tied(strategy: dict[str, Any], folder: Path) -> bool:
    """Whether Accelerate saves, and loads, a model of tied weights, as most language models are."""
    package = importlib.import_module("accelerate")
    package.state.AcceleratorState._reset_state(True)
    package.state.GradientState._reset_state()
    accelerator = adapter("accelerate").Accelerator(cpu=True, strategy=strategy)
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
    model[1].weight = model[0].weight
    saved = model[0].weight.detach().clone()
    model, _ = accelerator.prepare(model, adamw(model))
    accelerator.save_state(str(folder))
    accelerator.wait_for_everyone()
    model[0].weight.data.zero_()
    accelerator.load_state(str(folder))
    accelerator.free_memory()
    return torch.equal(model[1].weight, saved)


@pytest.mark.parametrize("strategy", ["int8", "sharded masters"])
def test_accelerate_saves_tied_weights(two: Ranks, strategy: str, tmp_path: Path) -> None:
    assert two.run(saves_tied, RESUMED[strategy], tmp_path / "saved") == [True, True]


def skips() -> list[tuple[bool, float]]:
    """Whether Accelerate takes an update for skipped, and the rate after it, for two updates."""
    package = importlib.import_module("accelerate")
    package.state.AcceleratorState._reset_state(True)
    package.state.GradientState._reset_state()
    strategy = {"checks": {"nonfinite": "skip"}}
    accelerator = adapter("accelerate").Accelerator(cpu=True, strategy=strategy)
    model = model_of_tests()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)  # of one in two ranks
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    seen = []
    for factor in (torch.inf, 1.0):
        accelerator.backward(model(torch.ones(2, 8)).square().mean() * factor)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        seen.append((accelerator.optimizer_step_was_skipped, scheduler.get_last_lr()[0]))
    accelerator.free_memory()
    return seen


def test_accelerate_knows_updates_that_a_session_skips(two: Ranks) -> None:
    assert two.run(skips) == [[(True, 1.0), (False, 0.5)]] * 2


@pytest.mark.parametrize(
    "mistakes",
    [
        mistakes_with_accelerate,
        mistakes_with_trainer,
        mistakes_with_lightning,
        mistakes_with_fabric,
    ],
)
def test_mistakes_are_named(two: Ranks, mistakes: Callable[[], None]) -> None:
    two.run(mistakes)


# The scripts of examples/frameworks.

SCRIPTS = Path(__file__).parents[2] / "examples/frameworks"
FRAMEWORKS = ("ddp", "fsdp2", *LOOPS)


def changed(framework: str) -> list[str]:
    before, after = (
        (SCRIPTS / f"{framework}_{when}.py").read_text().splitlines()
        for when in ("before", "after")
    )
    return [line for line in difflib.unified_diff(before, after, n=0) if CHANGED.match(line)]


CHANGED = re.compile(r"[-+](?![-+]{2}) *\S")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_at_most_five_lines_change_and_the_page_shows_them(framework: str) -> None:
    lines = changed(framework)
    assert 1 <= sum(line.startswith("+") for line in lines) <= 5
    page = (SCRIPTS.parents[1] / "docs/adapters.md").read_text()
    shown = [
        [line for line in diff.splitlines() if CHANGED.match(line)]
        for diff in re.findall(r"```diff\n(.*?)```", page, re.DOTALL)
    ]
    assert sorted(lines) in [sorted(diff) for diff in shown]


def printed(script: str) -> str:
    sys.path.insert(0, str(SCRIPTS))
    try:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            runpy.run_path(str(SCRIPTS / script))
    finally:
        sys.path.remove(str(SCRIPTS))
    return out.getvalue()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_script_with_an_adapter_runs(two: Ranks, framework: str, tmp_path: Path) -> None:
    strategy = tmp_path / "strategy.yaml"
    strategy.write_text("gradients: {codec: {kind: int8, error_feedback: true}}")
    env = {"UPDATES": "8", "SLIPSTREAM_STRATEGY": str(strategy)}
    first, second = two.run(printed, f"{framework}_after.py", connect=False, env=env)
    assert re.search(r"after 8 updates: loss [1-4]\.\d+, \d+\.\d+ s an update", first)
    assert "loss" not in second.replace("'loss'", "")
