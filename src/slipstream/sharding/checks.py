"""Refusals of the sharded transport, found before anything is installed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from slipstream.codecs.compressor import is_dense
from slipstream.errors import ModelError, SlipstreamError, StrategyError
from slipstream.gradients.segments import NamedParameter, parameters_of
from slipstream.optim.elementwise import (
    ELEMENTWISE,
    acts_elsewhere,
    distinct_name,
    is_elementwise,
)
from slipstream.optim.layerwise import Layerwise
from slipstream.strategy import HalfWeightsConfig, ShardedConfig, Strategy

_FIX = "use gradients: {transport: direct}"


def check_sharded(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    trainables: Sequence[NamedParameter],
    strategy: Strategy,
) -> None:
    """Refuse a model, an optimizer or a strategy of which ranks cannot each update a shard.

    Raises:
        StrategyError: with a technique that sharding does not work with.
        ModelError: names the optimizer or the parameter.
    """
    config = strategy.gradients.transport
    if not isinstance(config, ShardedConfig):
        return
    if strategy.parallel.active:
        raise StrategyError(
            "gradients.transport sharded with parallel.tensor or parallel.pipeline: ranks share "
            f"the model already; {_FIX}"
        )
    if (problem := acts_elsewhere(optimizer)) is not None:
        raise ModelError(
            f"gradients.transport sharded with the optimizer {type(optimizer).__name__}, which "
            f"{problem}: there parameters are whole and its state is a rank's shard; {_FIX}"
        )
    known = is_elementwise(optimizer) or isinstance(optimizer, Layerwise)
    if not known and not config.elementwise:
        names = ", ".join(kind.__name__ for kind in ELEMENTWISE)
        raise ModelError(
            f"gradients.transport sharded with the optimizer {distinct_name(optimizer)}, which "
            f"slipstream does not know to treat every value on its own; allowed: {names}, Lars, "
            "Lamb; if yours does, write gradients: {transport: {kind: sharded, elementwise: true}}"
            f", else {_FIX}"
        )
    for t in trainables:
        problem = ""
        if not is_dense(t.parameter):
            problem = "has holes in its memory or is expanded; make it contiguous"
        elif not _is_plain(t.parameter):
            problem = f"is a {type(t.parameter).__name__}; allowed: a plain torch.nn.Parameter"
        if problem:
            text = f"gradients.transport sharded: parameter {t.name} {problem}"
            raise ModelError(f"{text}, or {_FIX}")
    for path, module in model.named_modules():
        if getattr(module, "sparse", False) and isinstance(module, nn.Embedding | nn.EmbeddingBag):
            raise ModelError(
                f"gradients.transport sharded: module {path} has sparse gradients, of which ranks "
                f"cannot take shards; build it with sparse=False, or {_FIX}"
            )


def refusal_of_sharded(
    model: nn.Module, optimizer: torch.optim.Optimizer, strategy: Strategy
) -> str | None:
    """Why ``transport: sharded`` in the place of the strategy's would be refused; None: it would
    not be."""
    update = {"gradients": strategy.gradients.model_copy(update={"transport": ShardedConfig()})}
    try:
        trainables = parameters_of(model, trainable=True)
        check_sharded(model, optimizer, trainables, strategy.model_copy(update=update))
    except SlipstreamError as error:
        return str(error)
    return None


def why_not_sharded(
    model: nn.Module, optimizer: torch.optim.Optimizer, strategy: Strategy
) -> str | None:
    """Why ranks that began with another transport cannot change to ``sharded``; None: they can.

    Half weights and a fused optimizer keep copies that are made for whole updates.
    """
    config = strategy.gradients
    if isinstance(strategy.precision, HalfWeightsConfig):
        return "precision keeps fp32 copies of all weights"
    if strategy.compute.fuse_optimizer:
        return "compute.fuse_optimizer"
    if config.codec is not None and not config.codec.summed:
        return f"the codec {config.codec.kind}"
    if strategy.trace.norms:
        return "trace.norms, which needs whole averages"
    return refusal_of_sharded(model, optimizer, strategy)


def _is_plain(parameter: nn.Parameter) -> bool:
    """By its names, as half weights put a class of the same names in its place."""
    kind = type(parameter)
    names = nn.Parameter.__module__, nn.Parameter.__qualname__
    return (kind.__module__, kind.__qualname__) == names
