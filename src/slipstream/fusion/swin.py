"""The Swin models of ``transformers`` on the kernels for windows, from outside."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.errors import ModelError
from slipstream.kernels import window_attention, window_merge, window_partition
from slipstream.kernels.surroundings import needs_plain_functions, product_type
from slipstream.memory.forward_override import ForwardReplacement
from slipstream.strategy import Row

_HOME = "transformers.models.swin.modeling_swin"
_SAME_ATTENTION = ("eager", "sdpa", None)
"""Implementations of attention that compute what `window_attention` does."""
_STEPS = frozenset(("set_shift_and_window_size", "get_attn_mask", "maybe_pad", "cyclic_shift"))
"""Methods of a layer that the fused one stands for."""


def fuse_swin(model: nn.Module) -> FusedSwin:
    """Run the layers of a Swin of ``transformers`` on fused kernels, until ``close()``.

    Maps are cut into windows and put together in one pass each (`window_partition`), and attention
    inside them is one operation (`window_attention`); the mask of shifted windows is made once for
    each size of map. Names of parameters, hooks and ``state_dict()`` do not change, and settings
    are read at each call. A call runs as without this where it asks for the attention weights,
    under transforms of ``torch.func`` and ``torch.jit.trace``, and where the layer's steps or its
    ``attn_implementation`` are others than those of transformers. So do copies of the model.

    Exactness: reordered; dropout of attention draws other values on CUDA.

    Raises:
        ModelError: the model has no such layer, or the forward of one is replaced already.

    Example:
        >>> from transformers import SwinConfig, SwinModel
        >>> config = SwinConfig(image_size=32, patch_size=4, window_size=4, embed_dim=8,
        ...                     depths=[2], num_heads=[2])
        >>> model = SwinModel(config)
        >>> fused = fuse_swin(model)
        >>> fused.report_rows()[0].value
        '2 layers'
        >>> model(torch.zeros(1, 3, 32, 32)).last_hidden_state.shape
        torch.Size([1, 64, 8])
        >>> fused.close()
    """
    return FusedSwin(model)


class FusedSwin:
    """A Swin on fused kernels; made by `fuse_swin`."""

    def __init__(self, model: nn.Module) -> None:
        self._overrides: list[ForwardReplacement] = []
        self._masks: dict[tuple[Any, ...], Tensor | None] = {}
        layers = [m for m in model.modules() if _is(m, "SwinLayer")]
        if not layers:
            raise ModelError(
                f"{type(model).__name__} has no layer of a Swin model of transformers; allowed: "
                "SwinModel and the models around it"
            )
        self._count = len(layers)
        attentions = [m for m in model.modules() if _is(m, "SwinAttention")]
        _check_own_forwards([*layers, *attentions])
        for layer in layers:
            self._override(layer, partial(_layer, layer, self._mask))
        for attention in attentions:
            self._override(attention, partial(_attention, attention))

    def close(self) -> None:
        """Restore the layers; idempotent."""
        while self._overrides:
            self._overrides.pop().remove()
        self._masks.clear()

    def report_rows(self) -> list[Row]:
        """Report how many layers run on the kernels."""
        return [Row("swin", f"{self._count} layers", "attention in windows in one operation")]

    def _override(self, module: nn.Module, wrapper: Callable[..., Any]) -> None:
        self._overrides.append(ForwardReplacement(module, wrapper))

    def _mask(self, layer: Any, height: int, width: int, like: Tensor) -> Tensor | None:
        """The layer's own mask, made once for each size of map."""
        dtype = product_type(like)  # of the scores
        key = (height, width, layer.window_size, layer.shift_size, dtype, like.device)
        if key in self._masks:
            return self._masks[key]
        with torch.inference_mode(False), torch.no_grad():  # backward may keep it later
            mask: Tensor | None = layer.get_attn_mask(height, width, dtype, like.device)
        if mask is None or type(mask) is Tensor:  # not one of a mode that only pretends
            self._masks[key] = mask
        return mask


def _check_own_forwards(modules: list[nn.Module]) -> None:
    """Refuse to replace a forward that is not the class's own, as it would not run any more."""
    for module in modules:
        found = vars(module).get("forward")
        if found is not None and getattr(found, "__func__", None) is not type(module).forward:
            raise ModelError(
                f"fuse_swin: the forward of a {type(module).__name__} is replaced already, by "
                f"{getattr(found, '__qualname__', type(found).__name__)}, which would not run any "
                "more; call fuse_swin once, before accelerate() and all else that wraps a forward"
            )


def _is(module: nn.Module, name: str) -> bool:
    kind = type(module)
    return kind.__name__ == name and kind.__module__ == _HOME


def _layer(
    layer: Any,
    mask_of: Callable[[Any, int, int, Tensor], Tensor | None],
    forward: Callable[..., Any],
    hidden_states: Tensor,
    input_dimensions: tuple[int, int],
    always_partition: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """``SwinLayer.forward``, with maps cut and put together in one pass."""
    if needs_plain_functions() or not _STEPS.isdisjoint(vars(layer)):
        plain: tuple[Tensor, Tensor | None]
        plain = forward(hidden_states, input_dimensions, always_partition, **kwargs)
        return plain
    if not always_partition:
        layer.set_shift_and_window_size(input_dimensions)
    height, width = input_dimensions
    images, _, channels = hidden_states.shape
    window, shift = int(layer.window_size), int(layer.shift_size)
    maps = layer.layernorm_before(hidden_states).view(images, height, width, channels)
    windows = window_partition(maps, window, shift).flatten(1, 2)
    padded = [-(-side // window) * window for side in (height, width)]
    mask = mask_of(layer, padded[0], padded[1], windows)
    attended, weights = layer.attention(windows, mask, **kwargs)
    merged = window_merge(layer.dropout(attended), window, (height, width), shift)
    hidden_states = hidden_states + layer.drop_path(merged.flatten(1, 2))
    moved = layer.dropout(layer.mlp(layer.layernorm_after(hidden_states)))
    return moved + hidden_states, weights


def _attention(
    attention: Any,
    forward: Callable[..., Any],
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """``SwinAttention.forward`` without its weights."""
    config = attention.config
    if (
        kwargs.get("output_attentions")
        or config.output_attentions
        or config._attn_implementation not in _SAME_ATTENTION
        or needs_plain_functions()
    ):
        weighted: tuple[Tensor, Tensor | None] = forward(hidden_states, attention_mask, **kwargs)
        return weighted
    shape = hidden_states.shape[:-1]
    query, key, value = (
        project(hidden_states).view(*shape, -1, attention.head_dim).transpose(1, 2)
        for project in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    attended = window_attention(
        query,
        key,
        value,
        attention.relative_position_bias()[0],
        attention_mask,
        scale=attention.scaling,
        dropout=attention.attention_dropout if attention.training else 0.0,
    )
    return attention.o_proj(attended.transpose(1, 2).reshape(*shape, -1)), None
