"""Habits with the Trainer: callbacks, checkpoints, and what is around train()."""

from __future__ import annotations

import copy
from typing import Any

import torch

from tests.adapters.habits.habit import Given, Noted
from tests.adapters.habits.trainer_script import (
    Scored,
    Script,
    callback,
    gpt2,
    habit,
    hf,
    rows,
    sentences,
)
from tests.adapters.loops import adapter, parameters

# Callbacks.


@habit("a callback that reads gradients")
def reads_gradients(given: Given) -> Noted:
    seen: Noted = []

    def read(model: Any, **_: Any) -> None:
        seen.extend(p.grad.norm() for p in model.parameters() if p.grad is not None)

    script = Script(given, callbacks=[callback(on_pre_optimizer_step=read)]).train()
    return [*seen, *script.end()]


@habit("a callback that sets the rate")
def sets_rate(given: Given) -> Noted:
    def halve(optimizer: Any, **_: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.9

    return Script(given, callbacks=[callback(on_step_begin=halve)]).train().end()


@habit("a callback that stops training inside an epoch")
def stops(given: Given) -> Noted:
    def stop(state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step == 5

    return Script(given, callbacks=[callback(on_step_end=stop)]).train().end()


@habit("a callback that stops training inside a window")
def stops_inside(given: Given) -> Noted:
    def stop(control: Any, **_: Any) -> None:
        control.should_training_stop = True

    mine = callback(on_substep_end=stop)
    own = {"callbacks": [mine], "gradient_accumulation_steps": 2}
    return Script(given, **own).train().end()


@habit("an average of weights (EMA), by deepcopy")
def ema(given: Given) -> Noted:
    kept: list[Any] = []

    def begin(model: Any, **_: Any) -> None:
        kept.append(copy.deepcopy(getattr(model, "module", model)))

    @torch.no_grad()
    def follow(model: Any, **_: Any) -> None:
        own = getattr(model, "module", model)
        for a, b in zip(kept[0].parameters(), own.parameters(), strict=True):
            a.lerp_(b, 0.1)

    script = Script(given, callbacks=[callback(on_train_begin=begin, on_step_end=follow)]).train()
    return [*parameters(kept[0]), *script.end()]


@habit("a callback that evaluates and predicts")
def evaluates_itself(given: Given) -> Noted:
    seen: list[float] = []

    def look(state: Any, **_: Any) -> None:
        if state.global_step == 3:
            seen.append(trainer.predict(rows(16)).metrics["test_loss"])

    script = Script(given, callbacks=[callback(on_step_end=look)])
    trainer = script.t
    script.train()
    return [*script.end(), torch.tensor(seen)]


@habit("a callback that saves the model")
def saves_itself(given: Given) -> Noted:
    def save(state: Any, **_: Any) -> None:
        if state.global_step == 3:
            trainer.save_model(str(given.folder / "mine"))

    script = Script(given, callbacks=[callback(on_step_end=save)])
    trainer = script.t
    script.train()
    torch.distributed.barrier()
    read = hf("safetensors.torch").load_file(given.folder / "mine" / "model.safetensors")
    return [*script.end(), *(v for n, v in sorted(read.items()) if "running" not in n)]


@habit("a callback that works on trainer.model_wrapped")
def wrapped(given: Given) -> Noted:
    seen: Noted = []

    def look(**_: Any) -> None:
        unwrapped = trainer.accelerator.unwrap_model(trainer.model_wrapped)
        seen.append(unwrapped.net[0].weight.detach().norm())

    script = Script(given, callbacks=[callback(on_step_end=look)])
    trainer = script.t
    script.train()
    return [*script.end(), *seen]


@habit("a callback that raises, and training is begun again")
def raises(given: Given) -> Noted:
    def fail(state: Any, **_: Any) -> None:
        if state.global_step == 3 and not failed:
            failed.append(True)
            raise ValueError("an accident")

    failed: list[bool] = []
    script = Script(given, callbacks=[callback(on_step_end=fail)])
    try:
        script.train()
    except ValueError:
        script.train()
    return script.end()


# Checkpoints.
def saved_and_resumed(given: Given, at: int, **arguments: Any) -> Noted:
    saving = {"save_strategy": "steps", "save_steps": at, "save_total_limit": None}
    whole = Script(given, **saving | arguments).train().end()
    again = Script(given, **saving | arguments)
    return [*whole, *again.train(resume_from_checkpoint=f"{given.folder}/checkpoint-{at}").end()]


@habit("resumed in mid-epoch")
def resumes(given: Given) -> Noted:
    return saved_and_resumed(given, 3, gradient_accumulation_steps=2)


@habit("resumed with ignore_data_skip")
def resumes_unskipped(given: Given) -> Noted:
    return saved_and_resumed(given, 3, ignore_data_skip=True)


@habit("resumed from the last checkpoint of the folder")
def resumes_last(given: Given) -> Noted:
    script = Script(given, save_strategy="steps", save_steps=4, max_steps=8).train()
    first = script.end()
    again = Script(given, save_strategy="steps", save_steps=4, max_steps=12)
    return [*first, *again.train(resume_from_checkpoint=True).end()]


@habit("resumed from a plain Trainer's checkpoint")
def resumes_plain(given: Given) -> Noted:
    own = {"save_strategy": "steps", "save_steps": 3}
    Script(Given(None, given.folder), **own).train()
    script = Script(given, **own)
    return script.train(resume_from_checkpoint=f"{given.folder}/checkpoint-3").end()


@habit("save_only_model")
def saves_only_model(given: Given) -> Noted:
    return Script(given, save_strategy="epoch", save_only_model=True).train().end()


@habit("save_total_limit")
def limits(given: Given) -> Noted:
    own = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2}
    script = Script(given, **own).train()
    torch.distributed.barrier()
    left = sorted(int(p.name.rpartition("-")[2]) for p in given.folder.glob("checkpoint-*"))
    return [*script.end(), torch.tensor(left)]


BEST = {
    "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2,
    "load_best_model_at_end": True, "metric_for_best_model": "loss", "eval_dataset": rows(16),
}  # fmt: skip


@habit("load_best_model_at_end")
def loads_best(given: Given) -> Noted:
    script = Script(given, **BEST, learning_rate=0.3).train()
    return [*script.end(), torch.tensor(script.t.evaluate()["eval_loss"])]


@habit("early stopping")
def stops_early(given: Given) -> Noted:
    patience = hf("transformers").EarlyStoppingCallback(early_stopping_patience=1)
    return Script(given, **BEST, learning_rate=0.5, callbacks=[patience]).train().end()


@habit("a checkpoint inside an accumulation window")
def saves_inside(given: Given) -> Noted:
    def save(control: Any, state: Any, **_: Any) -> None:
        if state.global_step == 1:
            trainer._save_checkpoint(trainer.model, None)

    own = {"gradient_accumulation_steps": 2, "callbacks": [callback(on_substep_end=save)]}
    script = Script(given, **own)
    trainer = script.t
    return script.train().end()


@habit("enable_jit_checkpoint, asked for between two passes of an update")
def saves_just_in_time(given: Given) -> Noted:
    def ask(state: Any, **_: Any) -> None:
        if state.global_step == 1:  # as the signal's handler does
            own = next(c for c in trainer.callback_handler.callbacks if hasattr(c, "jit_manager"))
            own.jit_manager.is_checkpoint_requested = True

    asked = {"enable_jit_checkpoint": True, "callbacks": [callback(on_substep_end=ask)]}
    script = Script(given, gradient_accumulation_steps=2, **asked)
    trainer = script.t
    stopped = script.train().end()
    again = Script(given, gradient_accumulation_steps=2)
    return [*stopped, *again.train(resume_from_checkpoint=f"{given.folder}/checkpoint-1").end()]


# Around it.


@habit("a second Trainer of the same model, in bf16")
def in_bf16_after_fp32(given: Given) -> Noted:
    first = Script(given, num_train_epochs=1).train()
    model = first.t.model
    return first.noted + Script(given, model, num_train_epochs=1, bf16=True).train().end()


@habit("train() called twice")
def trains_twice(given: Given) -> Noted:
    return Script(given).train().train().end()


@habit("train() again after other arguments")
def trains_on(given: Given) -> Noted:
    script = Script(given).train()
    script.t.args.learning_rate, script.t.args.num_train_epochs = 0.01, 1
    script.t.optimizer = script.t.lr_scheduler = None
    return script.train().end()


@habit("evaluate() before train()")
def evaluates_first(given: Given) -> Noted:
    """The Trainer by itself (5.23) does not wrap a model that evaluate() has prepared: its ranks
    then train alone. So it evaluates here with a session only."""
    script = Script(given, eval_dataset=rows(21))
    if given.strategy is not None:
        script.t.evaluate()
    script.train()
    script.t.state.log_history = [e for e in script.t.state.log_history if "eval_loss" not in e]
    return script.end()


@habit("evaluate() and predict() behind train()")
def evaluates_behind(given: Given) -> Noted:
    script = Script(given, eval_dataset=rows(21)).train()
    last = script.t.evaluate()["eval_loss"]
    seen = torch.from_numpy(script.t.predict(rows(13)).predictions)
    return [*script.end(), torch.tensor(last), seen]


@habit("compute_metrics")
def metrics(given: Given) -> Noted:
    seen: list[float] = []

    def measured(of: Any) -> dict[str, float]:
        seen.append(float(abs(of.predictions - of.label_ids).mean()))
        return {"off": seen[-1]}

    own = {"compute_metrics": measured, "eval_dataset": rows(21), "eval_strategy": "epoch"}
    script = Script(given, **own, eval_accumulation_steps=1).train()
    return [*script.end(), torch.tensor(seen)]


@habit("model_init")
def inits(given: Given) -> Noted:
    return Script(given, model_init=lambda: Scored()).train().train().end()


@habit("hyperparameter_search")
def searches(given: Given) -> Noted:
    optuna = hf("optuna")  # which the tests do not install, only who makes the page
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    script = Script(given, model_init=lambda: Scored(), eval_dataset=rows(16), num_train_epochs=1)
    best = script.t.hyperparameter_search(
        backend="optuna", n_trials=2, direction="minimize",
        hp_space=lambda trial: {"learning_rate": trial.suggest_categorical("lr", [0.01, 0.03])},
        sampler=optuna.samplers.RandomSampler(seed=1),
    )  # fmt: skip
    return [torch.tensor(best.objective if best else 0.0)]


@habit("auto_find_batch_size")
def finds_batch_size(given: Given) -> Noted:
    class Mixin:
        def training_step(self, model: Any, inputs: Any, *rest: Any) -> Any:
            loss = super().training_step(model, inputs, *rest)  # type: ignore[misc]
            if len(inputs["x"]) > 4 and self.state.global_step == 1:  # type: ignore[attr-defined]
                raise RuntimeError("CUDA out of memory.")
            return loss

    own = {"auto_find_batch_size": True, "per_device_train_batch_size": 5}
    return Script(given, mixin=Mixin, **own).train().end()


@habit("out of memory in a window, then auto_find_batch_size")
def finds_batch_size_inside(given: Given) -> Noted:
    class Mixin:
        too_large = 0

        def training_step(self, model: Any, inputs: Any, *rest: Any) -> Any:
            self.too_large += len(inputs["x"]) > 4
            if self.too_large == 3:
                self.too_large = 0
                raise RuntimeError("CUDA out of memory.")
            return super().training_step(model, inputs, *rest)  # type: ignore[misc]

    own = {"auto_find_batch_size": True, "per_device_train_batch_size": 5}
    return Script(given, mixin=Mixin, gradient_accumulation_steps=4, **own).train().end()


@habit("the model copied behind train()")
def copies(given: Given) -> Noted:
    script = Script(given).train()
    other = copy.deepcopy(script.t.model)
    out = other(**{k: v[None].expand(4, *v.shape) for k, v in rows(1)[0].items()})
    out["loss"].backward()
    script.noted.append(other.net[0].weight.grad)
    return script.end()


@habit("the model trained by hand behind train()")
def by_hand(given: Given) -> Noted:
    script = Script(given).train()
    own = script.t.model
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    own(x=torch.ones(4, 8), labels=torch.ones(4, 1))["loss"].backward()
    optimizer.step()
    own.zero_grad()
    return script.end()


@habit("two Trainers after each other on one model")
def second_trainer(given: Given) -> Noted:
    script = Script(given, num_train_epochs=1).train()
    return [*script.end(), *Script(given, script.t.model, num_train_epochs=1).train().end()]


@habit("the accelerator's own calls: free_memory behind train()")
def frees(given: Given) -> Noted:
    script = Script(given).train()
    script.t.accelerator.free_memory()
    return script.train().end()


@habit("Seq2SeqTrainer by a class of both")
def seq2seq(given: Given) -> Noted:
    transformers = hf("transformers")
    package = hf("accelerate")
    package.state.AcceleratorState._reset_state(True)
    package.state.GradientState._reset_state()
    args = transformers.Seq2SeqTrainingArguments(
        output_dir=str(given.folder), num_train_epochs=1, learning_rate=0.01, save_strategy="no",
        per_device_train_batch_size=4, use_cpu=True, report_to=[], disable_tqdm=True,
        predict_with_generate=False,
    )  # fmt: skip
    bases: tuple[type, ...] = (transformers.Seq2SeqTrainer,)
    own = {}
    if given.strategy is not None:
        bases, own = (adapter("trainer").SessionTrainer, *bases), {"strategy": given.strategy}
    made = type("Mine", bases, {})(model=gpt2(), args=args, train_dataset=sentences(), **own)
    made.train()
    return parameters(made.model)


@habit("skip by a loss that is NaN on one rank")
def nan_loss(given: Given) -> Noted:
    class Mixin:
        def compute_loss(self, model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
            loss = super().compute_loss(model, inputs, *rest, **named)  # type: ignore[misc]
            return loss * float("nan") if self.state.global_step == 3 and given.rank else loss  # type: ignore[attr-defined]

    return Script(given, mixin=Mixin, num_train_epochs=1).train().end()
