"""Find where chains of operations are expected in the recorded forwards of blocks.

What is found is a guess: it says which layers start a chain, and what the report shows. Whether a
chain runs is decided in each call (`late`).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from slipstream.fusion.steps import BOTH, DEPTHWISE, LAYERS, NORM, SUM, Role, has_hooks
from slipstream.strategy.compute import Pattern

_ACTIVATIONS = (
    *(nn.ReLU, nn.ReLU6, nn.Sigmoid, nn.Tanh, nn.SiLU, nn.Hardswish, nn.GELU),
    *(torch.relu, F.relu, "relu", "relu_", torch.sigmoid, F.sigmoid, "sigmoid"),
    *(torch.tanh, F.tanh, "tanh", F.relu6, F.silu, F.hardswish, F.gelu),
)
"""Classes of layers, functions, and names of methods of tensors."""
_RELUS = (nn.ReLU, torch.relu, F.relu, "relu", "relu_")
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
CHAIN_PARTS = (
    *(kind for kind in _ACTIVATIONS if isinstance(kind, type)),
    *(*BATCH_NORMS, *CONVOLUTIONS),
)
"""Layers that a chain may consist of."""
_ADDS_IN_PLACE = (operator.iadd, "add_", "__iadd__")
_ADDS = (operator.add, torch.add, "add", "__add__", *_ADDS_IN_PLACE)


class Chains:
    """The chains of ``block``; ``graphs`` are those of all blocks."""

    def __init__(
        self,
        block: nn.Module,
        graphs: Mapping[nn.Module, fx.Graph],
        patterns: frozenset[Pattern],
    ) -> None:
        self._block, self._graphs = block, graphs
        self.found: list[str] = []
        """The name of each chain."""
        self.starts: list[tuple[nn.Module, Role]] = []
        """The layers that start them."""
        norms = (self._find_norm, self._find_norm_and_sum) if "bn_act" in patterns else ()
        sums = (self._find_sum,) if "add_act" in patterns else ()
        convolutions = (self._find_depthwise,) if "relu_depthwise" in patterns else ()
        for node in graphs[block].nodes:
            given = node.args[0] if len(node.args) == 1 else None
            if isinstance(given, fx.Node) and self._kind(node) in _ACTIVATIONS:
                any(find(node, given) for find in (*norms, *sums, *convolutions))

    def _find_norm(self, last: fx.Node, normal: fx.Node) -> bool:
        layer = self._maker(normal, last)
        return isinstance(layer, BATCH_NORMS) and self._add(NORM, (layer, "norm"))

    def _find_norm_and_sum(self, last: fx.Node, total: fx.Node) -> bool:
        left, right = (self._maker(term, total) for term in self._terms(total, last))
        in_place = total.target in _ADDS_IN_PLACE
        if isinstance(left, BATCH_NORMS):
            return self._add(BOTH, (left, "norm"))
        if isinstance(right, BATCH_NORMS) and not in_place:
            return self._add(BOTH, (right, "norm"))
        if isinstance(right, BATCH_NORMS) and left is not None:
            return self._add(BOTH, (right, "norm"), (left, "sum"))
        return False

    def _find_sum(self, last: fx.Node, total: fx.Node) -> bool:
        left, right = (self._maker(term, total) for term in self._terms(total, last))
        layer = left if total.target in _ADDS_IN_PLACE else left or right
        return layer is not None and self._add(SUM, (layer, "sum"))

    def _find_depthwise(self, relu: fx.Node, given: fx.Node) -> bool:
        convolved = next(iter(relu.users)) if len(relu.users) == 1 else None
        if self._kind(relu) not in _RELUS or not self._is_depthwise(convolved):
            return False
        layer: Any = self._layer(relu)
        if layer is None or layer.inplace:
            layer = self._maker(given, relu)
        return layer is not None and self._add(DEPTHWISE, (layer, "relu"))

    def _add(self, name: str, *starts: tuple[nn.Module, Role]) -> bool:
        self.found.append(name)
        self.starts += starts
        return True

    def _kind(self, node: fx.Node) -> Any:
        """The class of a layer that a node calls, or its function."""
        layer = self._layer(node)
        if layer is None:
            return node.target if node.op in ("call_function", "call_method") else None
        return None if has_hooks(layer) or "forward" in vars(layer) else type(layer)

    def _terms(self, node: fx.Node, user: fx.Node) -> tuple[fx.Node | None, fx.Node | None]:
        """Find the terms of a sum that nothing but ``user`` sees."""
        is_sum = node.op in ("call_function", "call_method") and node.target in _ADDS
        plain = len(node.args) == len(node.all_input_nodes) == 2 and not node.kwargs
        if not is_sum or not plain or list(node.users) != [user]:
            return None, None
        left, right = node.all_input_nodes
        return left, right

    def _maker(self, value: fx.Node | None, user: fx.Node) -> nn.Module | None:
        """The layer that computes a value, which nothing but ``user`` sees."""
        layer = self._layer(value)
        return self._last(layer) if layer and value and list(value.users) == [user] else None

    def _last(self, module: nn.Module) -> nn.Module | None:
        """The layer that computes the result of a module, which may be inside of it."""
        if type(module) in LAYERS and not isinstance(module, nn.ReLU):
            return None if has_hooks(module) or "forward" in vars(module) else module
        if module not in self._graphs:
            return None
        value: Any = next(n for n in self._graphs[module].nodes if n.op == "output").args[0]
        while isinstance(value, fx.Node) and value.op == "call_module":
            layer = module.get_submodule(str(value.target))
            if type(layer) is not nn.Identity:
                return self._last(layer)
            value = value.args[0]
        return None

    def _is_depthwise(self, node: fx.Node | None) -> bool:
        layer: Any = self._layer(node)
        return (
            type(layer) in CONVOLUTIONS
            and layer.groups == layer.in_channels > 1
            and layer.padding_mode == "zeros"
            and not isinstance(layer.padding, str)
        )

    def _layer(self, node: fx.Node | None) -> nn.Module | None:
        """The child that a node calls."""
        if node is None or node.op != "call_module":
            return None
        return self._block.get_submodule(str(node.target))
