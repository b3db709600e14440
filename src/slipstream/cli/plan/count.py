"""What a model takes in training, counted on shapes: run by ``slipstream plan --memory`` as a
process of its own, since it imports torch; writes JSON to a file, as models print.

Never draws anything, and never allocates a model that can be built of shapes.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from runpy import run_path
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.errors import ModelError, SlipstreamError
from slipstream.memory import Estimate, estimate
from slipstream.memory.estimate.estimate import Regions
from slipstream.optim import Lamb, Lars
from slipstream.precision.half_weights import half_weights
from slipstream.strategy import Offload

Built = tuple[nn.Module, Callable[[int], Mapping[str, Any]]]

OPTIMIZERS: Mapping[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "lamb": lambda parameters: Lamb(parameters, lr=0.1),
    "lars": lambda parameters: Lars(parameters, lr=0.1),
}


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


def builder(name: str, length: int | None) -> Callable[[], Any]:
    """What makes a known model, or the function of a file.

    Raises:
        ModelError: there is no such model, file or function.
    """
    if name in KNOWN:
        build, usual = KNOWN[name]
        return lambda: build(length or usual)
    file, _, function = name.rpartition(":")
    if not file:
        raise ModelError(
            f"--model {name}: no such model; allowed: {', '.join(KNOWN)}, or FILE.py:FUNCTION"
        )
    if not Path(file).is_file():
        raise ModelError(f"--model {name}: there is no file {file}")
    sys.argv = [file]
    sys.path.insert(0, str(Path(file).resolve().parent))  # as where a script is run
    with _stage(name, "running the file"):
        made = run_path(file).get(function)
    if not callable(made):
        raise ModelError(f"--model {name}: {file} has no function {function}")
    build_own: Callable[[], Any] = made
    return build_own


def counted(job: Mapping[str, Any]) -> Estimate:
    """What a model takes: built of shapes, or on the CPU where a function looks at values.

    Raises:
        ModelError: it cannot be built, makes no inputs, or does not go forward; says which.
    """
    build = builder(job["model"], job["length"])
    try:
        return _counted(job, build, "meta")
    except ModelError:
        if job["model"] in KNOWN:
            raise
        return _counted(job, build, "cpu")


def _counted(job: Mapping[str, Any], build: Callable[[], Any], device: str) -> Estimate:
    """With everything on a device."""
    name = job["model"]
    with torch.device(device), _stage(name, "building it"):
        pair = build()
    match pair:
        case (nn.Module() as model, inputs_of) if callable(inputs_of):
            pass
        case _:
            raise ModelError(
                f"--model {name}: it returned {type(pair).__name__}; it must return the model and "
                "a function that makes the model's arguments by name for a batch of so many samples"
            )
    with _stage(name, "making its optimizer"):
        optimizer = OPTIMIZERS[job["optimizer"]](list(model.parameters()))
    if job["dtype"] != "fp32":
        half_weights(model, optimizer, job["dtype"])

    def inputs(batch: int) -> Mapping[str, Any]:
        with torch.device(device), _stage(name, "making inputs"):
            found = inputs_of(batch)
        if not isinstance(found, Mapping):
            raise ModelError(
                f"--model {name}: the inputs are a {type(found).__name__}; they must be a mapping, "
                "of the names of the model's arguments"
            )
        return found

    with _stage(name, "its forward"):
        return estimate(model.train(), inputs, optimizer)


@contextmanager
def _stage(name: str, stage: str) -> Iterator[None]:
    """Inside, what a model raises becomes a ModelError that says where it was raised."""
    try:
        yield
    except SlipstreamError:
        raise
    except (Exception, SystemExit) as error:
        file = name.rpartition(":")[0]
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
        where = f" in line {lines[-1]} of {file}" if lines else ""
        missing = isinstance(error, ImportError) and name in KNOWN
        install = "; pip install transformers" if missing else ""
        raise ModelError(
            f"--model {name}: {stage} failed{where}: {type(error).__name__}: {error}{install}"
        ) from error


def document(found: Estimate, memory_bytes: int) -> dict[str, Any]:
    """The estimate as plain numbers."""
    singles = [[path] for path in found.blocks]
    products = ("matmul", "convolution")
    ways: dict[str, dict[str, Any]] = {"keep all": {}}
    if len(found.blocks) > 1:
        ways |= {
            "offload": {"offload": Offload()},
            "recompute every block but products": {"regions": singles, "keep": products},
            "recompute every block": {"regions": singles},
            **_best_every(found),
            "recompute every block + offload": {"regions": singles, "offload": Offload()},
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
    """Take a job as JSON, and a file for the document, or for why there is none."""
    job, answer = json.loads(sys.argv[1]), Path(sys.argv[2])
    try:
        found = document(counted(job), job["memory"])
    except SlipstreamError as error:
        found = {"error": str(error)}
    answer.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
