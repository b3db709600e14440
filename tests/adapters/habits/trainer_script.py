"""What habits of scripts with Hugging Face's Trainer share."""

from __future__ import annotations

import copy
import importlib
import importlib.util
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss

from tests.adapters.habits.habit import Given, Noted, habits_of
from tests.adapters.loops import adapter, model_of_tests, parameters

habit = habits_of("Trainer")
hf = importlib.import_module


class Scored(nn.Module):
    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        self.net = model_of_tests() if net is None else net

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.net(x)
        return {"loss": mse_loss(scores, labels), "logits": scores}


def rows(count: int = 64) -> list[dict[str, torch.Tensor]]:
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(1))
    return [{"x": a, "labels": a.sum(0, keepdim=True)} for a in x]


def gpt2() -> Any:
    transformers = hf("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=16, n_positions=8, n_embd=8, n_layer=2, n_head=2,
        resid_pdrop=0.1, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def sentences(count: int = 32, lengths: bool = False) -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(1)
    made = []
    for index in range(count):
        words = torch.randint(1, 16, (4 + index % 4 if lengths else 6,), generator=draw)
        made.append({"input_ids": words, "labels": words.clone()})
    return made


def padded(batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    def joined(key: str, value: int) -> torch.Tensor:
        return nn.utils.rnn.pad_sequence([r[key] for r in batch], True, value)

    return {"input_ids": joined("input_ids", 0), "labels": joined("labels", -100)}


class Script:
    """A script whose arguments are the same in most habits."""

    def __init__(self, given: Given, model: Any = None, data: Any = None, **arguments: Any) -> None:
        package, transformers = hf("accelerate"), hf("transformers")
        package.state.AcceleratorState._reset_state(True)
        package.state.GradientState._reset_state()
        self.given, self.noted = given, list[torch.Tensor]()
        of_trainer = {key: arguments.pop(key) for key in [*arguments] if key in OF_TRAINER}
        mixin = arguments.pop("mixin", None)
        usual = {
            "output_dir": str(given.folder), "num_train_epochs": 2, "logging_steps": 1,
            "save_strategy": "no", "learning_rate": 0.03, "per_device_train_batch_size": 4,
            "per_device_eval_batch_size": 4, "use_cpu": True, "report_to": [],
            "disable_tqdm": True,
        }  # fmt: skip
        args = transformers.TrainingArguments(**usual | arguments)
        base = type("Plain", (_Broadcasts, transformers.Trainer), {})
        own: dict[str, Any] = {}
        if given.strategy is not None:
            base, own = adapter("trainer").SessionTrainer, {"strategy": given.strategy}
        if mixin is not None:
            base = type("Mine", (mixin, base), {})
        named = {"model": Scored() if model is None else model, "args": args}
        if "model_init" in of_trainer:
            del named["model"]
        named["train_dataset"] = rows() if data is None else data
        self.t = base(**named, **own, **of_trainer)
        if given.strategy is not None:
            over = RuntimeError("over")
            given.close.append(lambda: self.t.accelerator.close(RuntimeError, over, None))

    def train(self, **named: Any) -> Script:
        self.t.train(**named)
        return self

    def end(self) -> Noted:
        for entry in self.t.state.log_history:
            for key in sorted({"loss", "grad_norm", "learning_rate", "eval_loss"} & entry.keys()):
                self.noted.append(torch.tensor(float(entry[key])))
        return self.noted + parameters(self.t.model)


class _Broadcasts:
    """The Trainer evaluates the module inside DDP's wrapper, so each rank with running statistics
    of its own last batch, which the wrapper's forward, as a session, replaces by the first rank's.
    """

    def evaluation_loop(self, *arguments: Any, **named: Any) -> Any:
        for buffer in self.model.buffers():  # type: ignore[attr-defined]
            torch.distributed.broadcast(buffer, 0)
        return super().evaluation_loop(*arguments, **named)  # type: ignore[misc]


OF_TRAINER = (
    *("callbacks", "eval_dataset", "optimizers", "compute_metrics", "data_collator", "model_init"),
    *("compute_loss_func", "optimizer_cls_and_kwargs", "preprocess_logits_for_metrics"),
)


def callback(**methods: Any) -> Any:
    """A callback with these methods, called with the keywords of the Trainer."""
    base = hf("transformers").TrainerCallback

    def method(function: Any) -> Any:
        return lambda self, args, state, control, **named: function(
            args=args, state=state, control=control, **named
        )

    return type("Mine", (base,), {name: method(f) for name, f in methods.items()})()


def plainly(**arguments: Any) -> Any:
    return lambda given: Script(given, **copy.deepcopy(arguments)).train().end()
