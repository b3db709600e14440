"""What becomes of activations: a model, and every way of keeping, repeating or moving them.

Never measures: ``offload.py`` does.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers import BertConfig, BertForSequenceClassification

from slipstream.memory import offload, recompute
from slipstream.memory.blocks import blocks_of
from slipstream.memory.forward_override import ForwardOverride
from slipstream.memory.recompute.budget import peak_bytes, segments
from slipstream.strategy import BudgetBytesConfig, BudgetConfig, EveryConfig, OffloadConfig

PARTS = tuple(
    f"bert.encoder.layer.*.{part}"
    for part in ("attention.self", "attention.output", "intermediate", "output")
)
"""Of a layer: finer than whole layers, so that fewer bytes are on their way at a time."""

Batch = dict[str, torch.Tensor]
Install = Callable[[nn.Module, Batch], AbstractContextManager[object]]


def bert(width: int, layers: int, heads: int, length: int) -> nn.Module:
    """BERT with a classification head and eager attention, random weights, dropout on."""
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        max_position_embeddings=length,
    )
    config._attn_implementation = "eager"
    config.problem_type = "single_label_classification"
    model: nn.Module = BertForSequenceClassification(config)
    return model.train()


def inputs(length: int, device: str, batch: int) -> Batch:
    """Words of so many texts, and their labels."""
    words = torch.zeros(batch, length, dtype=torch.long, device=device)
    return {"input_ids": words, "labels": words[:, 0]}


@contextmanager
def ours(
    model: nn.Module, _: Batch, again: bool, offload_config: OffloadConfig | None
) -> Iterator[None]:
    """slipstream's recomputation of every block, offload, or both."""
    recomputed = recompute(model, EveryConfig()) if again else None
    offloader = offload(model, offload_config) if offload_config is not None else None
    yield
    if offloader is not None:
        offloader.close()
    if recomputed is not None:
        recomputed.close()


@contextmanager
def budgeted(model: nn.Module, given: Batch) -> Iterator[None]:
    """slipstream's cheapest plan in the memory that recomputing every block takes."""
    with closing(recompute(model, BudgetConfig(budget=1.0))) as measured:
        model(**given).loss.backward()
        assert measured.prediction is not None
        costs = measured.prediction.costs
    offload_config = BudgetBytesConfig(budget_bytes=peak_bytes(segments(len(costs), 1), costs))
    with closing(recompute(model, offload_config)):
        yield


@contextmanager
def to_files(model: nn.Module, _: Batch) -> Iterator[None]:
    """Hooks as in torch's tutorial: each saved tensor but parameters in a file of its own."""
    own = {parameter.untyped_storage() for parameter in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor | Path:
        if tensor.untyped_storage() in own:
            return tensor
        path = Path(folder, str(uuid.uuid4()))
        torch.save(tensor, path)
        return path

    def unpack(packed: torch.Tensor | Path) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        tensor: torch.Tensor = torch.load(packed)
        packed.unlink()
        return tensor

    def written(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with saved_tensors_hooks(pack, unpack):
            return forward(*args, **kwargs)

    with TemporaryDirectory() as folder:
        around = ForwardOverride(model, written)
        yield
        around.remove()


@contextmanager
def torchs(model: nn.Module, _: Batch, again: bool, to_cpu: bool) -> Iterator[None]:
    """torch's checkpoint of every block, ``save_on_cpu`` around the model, or both."""

    def repeated(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    def moved(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with save_on_cpu(pin_memory=torch.cuda.is_available()):
            return forward(*args, **kwargs)

    around = [ForwardOverride(model, moved)] if to_cpu else []
    around += [ForwardOverride(model.get_submodule(p), repeated) for p in blocks_of(model) if again]
    yield
    for replaced in reversed(around):
        replaced.remove()


def variants(offload_config: OffloadConfig) -> dict[str, Install]:
    """All that take turns, by name."""
    parts = offload_config.model_copy(update={"modules": PARTS})
    return {
        "keep all": lambda model, given: nullcontext(),
        "torch: save_on_cpu": partial(torchs, again=False, to_cpu=True),
        "torch: saved tensors to files": to_files,
        "torch: checkpoint": partial(torchs, again=True, to_cpu=False),
        "torch: checkpoint + save_on_cpu": partial(torchs, again=True, to_cpu=True),
        "recompute": partial(ours, again=True, offload_config=None),
        "recompute, budget of as much": budgeted,
        "offload": partial(ours, again=False, offload_config=offload_config),
        "offload, parts of blocks": partial(ours, again=False, offload_config=parts),
        "recompute + offload": partial(ours, again=True, offload_config=offload_config),
    }
