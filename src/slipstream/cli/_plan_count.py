"""What a model takes in training, counted on shapes: run by ``slipstream plan --memory`` as a
process of its own, since it imports torch; prints JSON.

Never draws anything, and never allocates the model.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from runpy import run_path
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.errors import ModelError, SlipstreamError
from slipstream.memory import Estimate, estimate
from slipstream.memory.estimate import Regions
from slipstream.optim import Lamb, Lars
from slipstream.strategy import Offload

Built = tuple[nn.Module, Callable[[int], Mapping[str, Any]]]

OPTIMIZERS: Mapping[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "lamb": lambda parameters: Lamb(parameters, lr=0.1),
    "lars": lambda parameters: Lars(parameters, lr=0.1),
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def bert(width: int, layers: int, heads: int, length: int) -> Built:
    """BERT with a classification head and eager attention, on texts of so many tokens."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        max_position_embeddings=max(length, 512),
    )
    config._attn_implementation = "eager"
    config.problem_type = "single_label_classification"
    return BertForSequenceClassification(config), lambda batch: {
        "input_ids": torch.zeros(batch, length, dtype=torch.long),
        "labels": torch.zeros(batch, dtype=torch.long),
    }


def gpt2(width: int, layers: int, heads: int, length: int) -> Built:
    """GPT-2 with its language-model head and eager attention, on texts of so many tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        n_positions=max(length, 1024),
        use_cache=False,
    )
    config._attn_implementation = "eager"
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"

    def inputs(batch: int) -> dict[str, Tensor]:
        words = torch.zeros(batch, length, dtype=torch.long)
        return {"input_ids": words, "labels": words, "attention_mask": torch.ones_like(words)}

    return model, inputs


def _images(model: nn.Module, length: int) -> Built:
    return model, lambda batch: {
        "pixel_values": torch.zeros(batch, 3, length, length),
        "labels": torch.zeros(batch, dtype=torch.long),
    }


def resnet50(length: int) -> Built:
    """ResNet-50 on images of so many pixels a side."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig()
    config.num_labels, config.problem_type = 1000, "single_label_classification"
    return _images(ResNetForImageClassification(config), length)


def swin_tiny(length: int) -> Built:
    """Swin-T on images of so many pixels a side."""
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(image_size=length)
    config.num_labels, config.problem_type = 1000, "single_label_classification"
    config._attn_implementation = "eager"
    return _images(SwinForImageClassification(config), length)


KNOWN: Mapping[str, tuple[Callable[[int], Built], int]] = {
    "bert-base": (lambda length: bert(768, 12, 12, length), 512),
    "bert-large": (lambda length: bert(1024, 24, 16, length), 512),
    "gpt2": (lambda length: gpt2(768, 12, 12, length), 1024),
    "gpt2-medium": (lambda length: gpt2(1024, 24, 16, length), 1024),
    "resnet50": (resnet50, 224),
    "swin-tiny": (swin_tiny, 224),
}
"""Builders of models, and the length of what they are trained on if nothing else is said."""


def built(name: str, length: int | None) -> Built:
    """A known model, or what a function of a file makes, on the meta device.

    Raises:
        ModelError: there is no such model, file or function, or it makes something else.
    """
    file, _, function = name.rpartition(":")
    with torch.device("meta"):
        if name in KNOWN:
            build, usual = KNOWN[name]
            try:
                return build(length or usual)
            except ImportError as error:
                raise ModelError(f"--model {name}: {error}; pip install transformers") from error
        if not file:
            raise ModelError(
                f"--model {name}: no such model; allowed: {', '.join(KNOWN)}, or FILE.py:FUNCTION"
            )
        if not Path(file).is_file():
            raise ModelError(f"--model {name}: there is no file {file}")
        made = run_path(file).get(function)
        if not callable(made):
            raise ModelError(f"--model {name}: {file} has no function {function}")
        pair = made()
    match pair:
        case (nn.Module() as model, inputs_of) if callable(inputs_of):
            return model, inputs_of
    raise ModelError(
        f"--model {name}: {function}() returned {type(pair).__name__}; it must return the model "
        "and a function that makes the model's arguments by name for a batch of so many samples"
    )


def document(found: Estimate, memory_bytes: int) -> dict[str, Any]:
    """The estimate as plain numbers."""
    singles = [[path] for path in found.blocks]
    products = ("matmul", "convolution")
    ways: dict[str, dict[str, Any]] = {"keep all": {}}
    if len(found.blocks) > 1:
        ways |= {
            "offload": {"wish": Offload()},
            "recompute every block but products": {"regions": singles, "keep": products},
            "recompute every block": {"regions": singles},
            **_best_every(found),
            "recompute every block + offload": {"regions": singles, "wish": Offload()},
        }
    return {
        "memory": memory_bytes,
        "parameters": found.parameters,
        "gradients": found.gradients,
        "optimizer": found.optimizer,
        "passing": found.passing._asdict(),
        "blocks": [{"path": p, **found.of_block(p)._asdict()} for p in (*found.blocks, None)],
        "ways": [
            {
                "name": name,
                "activations": found.activations(**way)._asdict(),
                "batch": found.max_batch(memory_bytes, **way),
            }
            for name, way in ways.items()
        ],
    }


def _best_every(found: Estimate) -> dict[str, dict[str, Regions]]:
    """Regions of several blocks, where those take less than single ones."""
    by_size = {
        every: [found.blocks[i : i + every] for i in range(0, len(found.blocks), every)]
        for every in range(1, len(found.blocks))
    }
    best = min(by_size, key=lambda every: found.activations(by_size[every]).each)
    return {f"recompute every {best} blocks": {"regions": by_size[best]}} if best > 1 else {}


def main() -> None:
    """Take a job as JSON in the one argument; print the document, or why there is none."""
    job = json.loads(sys.argv[1])
    try:
        model, inputs_of = built(job["model"], job["length"])
        optimizer = OPTIMIZERS[job["optimizer"]](list(model.parameters()))
        dtype = DTYPES.get(job["dtype"])

        def on_meta(batch: int) -> Mapping[str, Any]:
            with torch.device("meta"):
                return inputs_of(batch)

        found = estimate(model.train(), on_meta, optimizer, dtype=dtype)
        print(json.dumps(document(found, job["memory"])))
    except SlipstreamError as error:
        print(json.dumps({"error": str(error)}))


if __name__ == "__main__":
    main()
