"""Refusals for ranks that share a model, found before anything is installed."""

from __future__ import annotations

import torch
from torch import nn, optim

from slipstream.errors import ModelError, StrategyError
from slipstream.optim.layerwise import Layerwise
from slipstream.parallel.dims import mesh_of
from slipstream.parallel.pipeline.balance import balance_parameters
from slipstream.parallel.pipeline.schedules import check_schedule
from slipstream.parallel.pipeline.split_points import SplitPoints
from slipstream.parallel.tensor.assign import assign
from slipstream.parallel.tensor.plans import plan_of
from slipstream.strategy import (
    AdaptiveConfig,
    ByIndexConfig,
    HalfWeightsConfig,
    OptimalConfig,
    PipelineParallelConfig,
    Strategy,
    TensorParallelConfig,
)
from slipstream.strategy.parallel import SequenceConfig, SwitchConfig

_OF_WHOLE_PARAMETERS = (Layerwise, optim.Adafactor, optim.LBFGS, optim.Muon)


def check_parallel(
    model: nn.Module, optimizer: torch.optim.Optimizer, strategy: Strategy, world_size: int
) -> None:
    """Refuse a model, an optimizer or a strategy that model parallelism cannot serve.

    Raises:
        StrategyError: the ranks do not fill the mesh, or two settings exclude each other.
        ModelError: a stage of the pipeline has nothing to train.
    """
    config, gradients = strategy.parallel, strategy.gradients
    mesh_of(config, world_size)
    if not config.active:
        return
    if config.pipeline is not None:
        _check_pipeline(model, config.pipeline, strategy)
    if config.tensor is not None:
        _check_tensor(model, optimizer, config.tensor)
    for setting, measures, fix in (
        ("split optimal", isinstance(gradients.split, OptimalConfig), "another split (by_bytes)"),
        (
            "codec adaptive",
            isinstance(gradients.codec, AdaptiveConfig),
            "its codec without adaptive",
        ),
    ):
        if measures:
            raise StrategyError(
                f"parallel with gradients.{setting}: it measures the network between all ranks, "
                f"not between those that exchange gradients here; use {fix}"
            )


def _check_tensor(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: TensorParallelConfig
) -> None:
    assign(model, plan_of(config, model), config.ranks)
    if isinstance(optimizer, _OF_WHOLE_PARAMETERS):
        raise StrategyError(
            f"parallel.tensor with {type(optimizer).__name__}: it needs whole parameters, but a "
            "rank holds a share of them; use an optimizer that treats values one by one (SGD, "
            "AdamW)"
        )


def _check_pipeline(model: nn.Module, config: PipelineParallelConfig, strategy: Strategy) -> None:
    tensor = strategy.parallel.tensor
    split_points = SplitPoints.of(model, cut_of(model, config))
    check_schedule(config.schedule, split_points.num_stages, config.ranks, config.micro_batches)
    if tensor is not None:
        for assignment in assign(model, plan_of(tensor, model), tensor.ranks):
            style = assignment.style
            if isinstance(style, SequenceConfig | SwitchConfig) or getattr(
                style, "sequence", False
            ):
                raise StrategyError(
                    f"parallel.pipeline with {assignment.path} split along the sequence or the "
                    "batch: a stage does not know the full length of what an earlier stage has "
                    "split; use one of the two"
                )
    _check_stages(model, split_points, config.ranks)
    if isinstance(strategy.gradients.split, ByIndexConfig):
        raise StrategyError(
            "parallel.pipeline with gradients.split by_index: each stage has its own number of "
            "gradients; use a split that does not count them (by_bytes, by_percent)"
        )
    if isinstance(strategy.precision, HalfWeightsConfig):
        raise StrategyError(
            "parallel.pipeline with precision half_weights: a rank holds the parameters of its "
            "own stages alone, and the whole model would be gathered without the fp32 masters; "
            "use precision autocast"
        )


def cut_of(model: nn.Module, config: PipelineParallelConfig) -> tuple[str, ...]:
    """Choose where stages begin: as the strategy says, or balanced.

    Raises:
        StrategyError: the model has fewer modules at which a stage could begin than stages.
    """
    if config.cut is not None:
        return config.cut
    stages = config.ranks * (2 if config.schedule == "interleaved_1f1b" else 1)
    return tuple(balance_parameters(model, stages))


def _check_stages(model: nn.Module, split_points: SplitPoints, ranks: int) -> None:
    """Refuse a pipeline in which a rank has nothing to train."""
    holders = split_points.tensor_stages(model)
    trained = [holders[name] for name, p in model.named_parameters() if p.requires_grad]
    busy = {stage % ranks for stages in trained for stage in stages}
    for rank in set(range(ranks)) - busy:
        raise ModelError(
            f"parallel.pipeline: the stages of pipeline rank {rank} have no parameter that "
            "requires a gradient; cut the model so that every rank has one"
        )
