"""Hugging Face's Trainer."""

from typing import Any

import torch.distributed as dist
from text import UPDATES, Meter, Source, gpt2
from transformers import TrainerCallback, TrainingArguments

from slipstream.adapters.trainer import SessionTrainer

meter = Meter()


class Measured(TrainerCallback):
    """Tells the meter."""

    def on_log(self, *_: Any, logs: dict[str, float] | None = None, **__: Any) -> None:
        if logs and "loss" in logs:
            meter.update(logs["loss"])


arguments = TrainingArguments(
    output_dir="checkpoints",
    max_steps=UPDATES,
    per_device_train_batch_size=8,
    learning_rate=1e-3,
    lr_scheduler_type="constant",
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
    use_cpu=True,
)
data = Source()
trainer = SessionTrainer(model=gpt2(), args=arguments, train_dataset=data, callbacks=[Measured()])
trainer.train()

meter.report()
dist.destroy_process_group()
