"""Plans for kinds of models that many people train: which module is split how.

Never touches a model: a plan follows from the configuration that models of transformers carry.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from slipstream.errors import StrategyError
from slipstream.strategy.parallel import Column, Heads, Place, Row, Sequence, Style, TensorParallel

Plan = tuple[Place, ...]


def known_plan(config: Any, *, sequence: bool = False) -> Plan:
    """The plan for a model with this configuration (``model.config``).

    Args:
        config: of transformers; None where a model has none.
        sequence: also split the sequence between the split layers.

    Raises:
        StrategyError: no plan is known for this kind of model.

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
            f"parallel.tensor.plan: none is known for {kind or 'a model without model.config'}"
            f"{' with the sequence split' if sequence else ''}; allowed: {', '.join(plans)}, or a "
            'plan of your own, e.g. {"*.up": column, "*.down": row}'
        )
    styles = plans[kind](config) | (_SEQUENCES[kind] if sequence else {})
    return tuple(
        Place(match=match, style=_with(style, sequence)) for match, style in styles.items()
    )


def plan_of(wish: TensorParallel, model: nn.Module) -> Plan:
    """The plan of a strategy for ``model``, or for the model of transformers inside it."""
    if wish.plan is not None:
        return wish.plan
    configs = (m.config for m in model.modules() if hasattr(m, "config"))
    return known_plan(next(configs, None), sequence=wish.sequence)


def _with(style: Style, sequence: bool) -> Style:
    if sequence and isinstance(style, Column | Row) and not getattr(style, "gather", False):
        return style.model_copy(update={"sequence": True})
    return style


def _head(config: Any) -> int:
    given = getattr(config, "head_dim", None)
    return int(given or config.hidden_size // config.num_attention_heads)


def _gpt2(config: Any) -> dict[str, Style]:
    return {
        "*.attn": Heads(divide=("num_heads", "split_size")),
        "*.attn.c_attn": Column(parts=3, block=_head(config)),
        "*.attn.c_proj": Row(),
        "*mlp.c_fc": Column(),
        "*mlp.c_proj": Row(),
    }


def _bert(config: Any) -> dict[str, Style]:
    own = Column(block=_head(config))
    return {
        "*attention.self.query": own,
        "*attention.self.key": own,
        "*attention.self.value": own,
        "*attention.output.dense": Row(),
        "*intermediate.dense": Column(),
        "*.output.dense": Row(),
    }


def _llama(config: Any) -> dict[str, Style]:
    own = Column(block=_head(config))
    return {
        "*self_attn.q_proj": own,
        "*self_attn.k_proj": own,
        "*self_attn.v_proj": own,
        "*self_attn.o_proj": Row(),
        "*mlp.gate_proj": Column(),
        "*mlp.up_proj": Column(),
        "*mlp.down_proj": Row(),
    }


_PLANS: dict[str, Callable[[Any], dict[str, Style]]] = {
    "gpt2": _gpt2,
    "bert": _bert,
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _llama,
}

_SEQUENCES: dict[str, dict[str, Style]] = {
    "gpt2": {
        "*drop": Sequence(enter=True),
        "*.ln_1": Sequence(),
        "*.ln_2": Sequence(),
        "*attn.resid_dropout": Sequence(),
        "*mlp.dropout": Sequence(),
        "*ln_f": Sequence(leave=True),
    },
}
"""Modules that work on their part of the sequence, by the kind of model."""
