"""The process of ``slipstream plan --memory``: estimates the memory of a training on shapes.

Writes JSON to a file, because the user's code may print. A model is built on the ``meta`` device,
without memory, unless its code needs values.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from runpy import run_path
from typing import Any, cast

import torch
from torch import Tensor, nn

from slipstream.errors import ModelError, SlipstreamError
from slipstream.files.write import write_whole
from slipstream.memory import Estimate, estimate
from slipstream.memory.estimate.estimate import Regions
from slipstream.optim import Lamb, Lars
from slipstream.precision.half_weights import half_weights
from slipstream.strategy import OffloadConfig

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


def _pretrained(family: str, task: str, **settings: object) -> Any:
    """A model of transformers from its settings alone, with eager attention."""
    import transformers

    config = getattr(transformers, f"{family}Config")(**settings)
    config._attn_implementation = "eager"
    config.problem_type = "single_label_classification"
    return getattr(transformers, f"{family}{task}")(config)


def bert(width: int, layers: int, heads: int, length: int) -> Built:
    """BERT with a classification head, on texts of ``length`` tokens."""
    shape = {"num_hidden_layers": layers, "num_attention_heads": heads, "hidden_size": width}
    shape |= {"intermediate_size": 4 * width, "max_position_embeddings": max(length, 512)}
    return _pretrained("Bert", "ForSequenceClassification", **shape), lambda batch: {
        "input_ids": torch.zeros(batch, length, dtype=torch.long),
        "labels": torch.zeros(batch, dtype=torch.long),
    }


def gpt2(width: int, layers: int, heads: int, length: int) -> Built:
    """GPT-2 with its language-model head, on texts of ``length`` tokens."""
    shape = {"n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": max(length, 1024)}
    model = _pretrained("GPT2", "LMHeadModel", use_cache=False, **shape)
    model.loss_type = "ForCausalLM"

    def inputs(batch: int) -> dict[str, Tensor]:
        words = torch.zeros(batch, length, dtype=torch.long)
        return {"input_ids": words, "labels": words, "attention_mask": torch.ones_like(words)}

    return model, inputs


def images(family: str, length: int, **settings: object) -> Built:
    """A classifier of square images of ``length`` pixels a side."""
    model = _pretrained(family, "ForImageClassification", num_labels=1000, **settings)
    return model, lambda batch: {
        "pixel_values": torch.zeros(batch, 3, length, length),
        "labels": torch.zeros(batch, dtype=torch.long),
    }


KNOWN: Mapping[str, tuple[Callable[[int], Built], int]] = {
    "bert-base": (lambda length: bert(768, 12, 12, length), 512),
    "bert-large": (lambda length: bert(1024, 24, 16, length), 512),
    "gpt2": (lambda length: gpt2(768, 12, 12, length), 1024),
    "gpt2-medium": (lambda length: gpt2(1024, 24, 16, length), 1024),
    "resnet50": (lambda length: images("ResNet", length), 224),
    "swin-tiny": (lambda length: images("Swin", length, image_size=length), 224),
}
"""Builders of models, and the default length of their inputs."""


def builder(name: str, length: int | None) -> Callable[[], Any]:
    """The function that builds a known model, or the one that ``FILE.py:FUNCTION`` names.

    Raises:
        ModelError: there is no such model, file or function.
    """
    if name in KNOWN:
        build, default_length = KNOWN[name]
        return lambda: build(length or default_length)
    if length is not None:
        raise ModelError(
            f"--length has no effect with --model {name}, whose function makes the inputs; allowed "
            f"with {', '.join(KNOWN)}"
        )
    file, _, function = name.rpartition(":")
    if not file:
        raise ModelError(
            f"--model {name}: unknown; allowed: {', '.join(KNOWN)}, or FILE.py:FUNCTION"
        )
    if not Path(file).is_file():
        raise ModelError(f"--model {name}: the file {file} does not exist")
    sys.argv = [file]
    # As for a script: the user's file may import modules that lie beside it.
    sys.path.insert(0, str(Path(file).resolve().parent))
    with _stage(name, "running the file"):
        from_file = run_path(file).get(function)
    if not callable(from_file):
        raise ModelError(f"--model {name}: {file} has no function {function}")
    return cast("Callable[[], Any]", from_file)


def estimate_job(job: Mapping[str, Any]) -> Estimate:
    """The memory of a model: built on ``meta``, or on the CPU if its code needs values.

    Raises:
        ModelError: building it, making inputs or its forward failed; says which.
    """
    build = builder(job["model"], job["length"])
    try:
        return _estimate_on("meta", job, build)
    except ModelError:
        if job["model"] in KNOWN:
            raise
        # Code that looks at values fails on meta; on the CPU it runs, and takes memory.
        return _estimate_on("cpu", job, build)


def _estimate_on(device: str, job: Mapping[str, Any], build: Callable[[], Any]) -> Estimate:
    name = job["model"]
    with torch.device(device), _stage(name, "building it"):
        pair = build()
    match pair:
        case (nn.Module() as model, inputs_of) if callable(inputs_of):
            pass
        case _:
            raise ModelError(
                f"--model {name}: it returned {type(pair).__name__}; it must return the model and "
                "a function from a batch size to the model's arguments by name"
            )
    with _stage(name, "making its optimizer"):
        optimizer = OPTIMIZERS[job["optimizer"]](list(model.parameters()))
    if job["dtype"] != "fp32":
        half_weights(model, optimizer, job["dtype"])

    def inputs(batch: int) -> Mapping[str, Any]:
        with torch.device(device), _stage(name, "making inputs"):
            arguments = inputs_of(batch)
        if not isinstance(arguments, Mapping):
            raise ModelError(
                f"--model {name}: the inputs are a {type(arguments).__name__}; they must be a "
                "mapping from names of the model's arguments"
            )
        return arguments

    with _stage(name, "its forward"):
        return estimate(model.train(), inputs, optimizer)


@contextmanager
def _stage(name: str, stage: str) -> Iterator[None]:
    """Turn an exception of the user's code into a ModelError that names the stage and the line."""
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


def document(memory: Estimate, memory_bytes: int) -> dict[str, Any]:
    """The estimate as plain numbers, with the largest batch for each technique."""
    techniques: dict[str, dict[str, Any]] = {"keep all": {}}
    if len(memory.blocks) > 1:
        singles = [[path] for path in memory.blocks]
        products = ("matmul", "convolution")
        techniques |= {
            "offload": {"offload": OffloadConfig()},
            "recompute all but products": {"regions": singles, "keep": products},
            "recompute all": {"regions": singles},
            **_best_groups(memory),
            "recompute all + offload": {"regions": singles, "offload": OffloadConfig()},
        }
    return {
        "memory": memory_bytes,
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "passing": memory.passing._asdict(),
        "blocks": [{"path": p, **memory.of_block(p)._asdict()} for p in (*memory.blocks, None)],
        "techniques": [
            {
                "name": name,
                "activations": memory.activations(**settings)._asdict(),
                "batch": memory.max_batch(memory_bytes, **settings),
                # The part of forward that runs again; what else a technique costs is not known.
                "recomputed": None if settings.keys() - {"regions"} else float(bool(settings)),
            }
            for name, settings in techniques.items()
        ],
    }


def _best_groups(memory: Estimate) -> dict[str, dict[str, Regions]]:
    """Recomputing groups of several blocks, if the best size saves more than single blocks do."""
    by_size = {
        every: [memory.blocks[i : i + every] for i in range(0, len(memory.blocks), every)]
        for every in range(1, len(memory.blocks))
    }
    best = min(by_size, key=lambda every: memory.activations(by_size[every]).each)
    return {f"recompute every {best} blocks": {"regions": by_size[best]}} if best > 1 else {}


def main() -> None:
    """Estimate the job in the first argument; write the document, or the error, to the second."""
    job, answer = json.loads(sys.argv[1]), Path(sys.argv[2])
    try:
        result = document(estimate_job(job), job["memory"])
    except SlipstreamError as error:
        result = {"error": str(error)}
    write_whole(answer, json.dumps(result), durable=False)


if __name__ == "__main__":
    main()
