"""Tensor-parallel plans for well-known kinds of models: which module is split how.

A plan follows from ``model.config`` of a transformers model alone; the model is not touched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from slipstream.errors import StrategyError
from slipstream.strategy.parallel import (
    ColumnConfig,
    HeadsConfig,
    LayerRuleConfig,
    RowConfig,
    SequenceConfig,
    StyleConfig,
    TensorParallelConfig,
)

TensorPlan = tuple[LayerRuleConfig, ...]


def known_plan(config: Any, *, sequence: bool = False) -> TensorPlan:
    """The plan for a model with this ``model.config``.

    Args:
        config: a transformers configuration; None where a model has none.
        sequence: also split the sequence between the split layers.

    Raises:
        StrategyError: this kind of model has no known plan.

    Example:
        >>> from types import SimpleNamespace
        >>> config = SimpleNamespace(model_type="bert", hidden_size=64, num_attention_heads=4)
        >>> query = known_plan(config)[0]
        >>> query.match, query.style.kind, query.style.block
        ('*attention.self.query', 'column', 16)
    """
    plans = {kind: plan for kind, plan in _PLANS.items() if not sequence or kind in _SEQUENCES}
    kind = getattr(config, "model_type", None)
    if kind not in plans:
        raise StrategyError(
            f"parallel.tensor.plan: no plan is known for {kind or 'a model without model.config'}"
            f"{' with the sequence split' if sequence else ''}; allowed: {', '.join(plans)}, or a "
            'plan of your own, e.g. {"*.up": column, "*.down": row}'
        )
    styles = plans[kind](config)
    if sequence:
        styles = {match: _with_sequence(style) for match, style in styles.items()}
        styles |= _SEQUENCES[kind]
    return tuple(LayerRuleConfig(match=match, style=style) for match, style in styles.items())


def plan_of(config: TensorParallelConfig, model: nn.Module) -> TensorPlan:
    """The plan of ``config``; if it has none, the plan known for ``model`` or a model inside it."""
    if config.plan is not None:
        return config.plan
    model_configs = (m.config for m in model.modules() if hasattr(m, "config"))
    return known_plan(next(model_configs, None), sequence=config.sequence)


def _with_sequence(style: StyleConfig) -> StyleConfig:
    """Columns and rows take and give tensors that are split along the sequence."""
    if isinstance(style, ColumnConfig | RowConfig):
        return style.model_copy(update={"sequence": True})
    return style


def _head_size(config: Any) -> int:
    head_dim = getattr(config, "head_dim", None)
    return int(head_dim or config.hidden_size // config.num_attention_heads)


def _gpt2(config: Any) -> dict[str, StyleConfig]:
    return {
        "*.attn": HeadsConfig(divide=("num_heads", "split_size")),
        "*.attn.c_attn": ColumnConfig(parts=3, block=_head_size(config)),
        "*.attn.c_proj": RowConfig(),
        "*mlp.c_fc": ColumnConfig(),
        "*mlp.c_proj": RowConfig(),
    }


def _bert(config: Any) -> dict[str, StyleConfig]:
    heads = ColumnConfig(block=_head_size(config))
    return {
        "*attention.self.query": heads,
        "*attention.self.key": heads,
        "*attention.self.value": heads,
        "*attention.output.dense": RowConfig(),
        "*intermediate.dense": ColumnConfig(),
        "*.output.dense": RowConfig(),
    }


def _llama(config: Any) -> dict[str, StyleConfig]:
    heads = ColumnConfig(block=_head_size(config))
    return {
        "*self_attn.q_proj": heads,
        "*self_attn.k_proj": heads,
        "*self_attn.v_proj": heads,
        "*self_attn.o_proj": RowConfig(),
        "*mlp.gate_proj": ColumnConfig(),
        "*mlp.up_proj": ColumnConfig(),
        "*mlp.down_proj": RowConfig(),
    }


_PLANS: dict[str, Callable[[Any], dict[str, StyleConfig]]] = {
    "gpt2": _gpt2,
    "bert": _bert,
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _llama,
}

_SEQUENCES: dict[str, dict[str, StyleConfig]] = {
    "gpt2": {
        "*drop": SequenceConfig(enter=True),
        "*.ln_1": SequenceConfig(),
        "*.ln_2": SequenceConfig(),
        "*attn.resid_dropout": SequenceConfig(),
        "*mlp.dropout": SequenceConfig(),
        "*ln_f": SequenceConfig(leave=True),
    }
}
"""By kind of model, the modules that compute on their rank's piece of the sequence."""
