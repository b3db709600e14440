"""Find chains of operations in the recorded forward of a block, and write each as one call.

[Note: Where a chain runs]
A chain runs inside the module that owns its parameters: the batch norm is called with the residual
and the name of the activation, the convolution with ``relu``, and the activation is not called any
more. So hooks of these modules still fire, such as those that wait for their parameters.

[Note: In place]
``out += identity`` and ``ReLU(inplace=True)`` become operations that leave their input alone. That
is the same only where nothing else sees the input, so it must have been made by a module with
parameters or by a sum, for this chain alone.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from slipstream.fusion.block_graph import IN_PLACE
from slipstream.kernels.activations import ActivationName
from slipstream.kernels.add_act import add_act
from slipstream.strategy.compute import Pattern

_MODULES: dict[type[nn.Module], ActivationName] = {
    nn.ReLU: "relu",
    nn.ReLU6: "relu6",
    nn.Sigmoid: "sigmoid",
    nn.Tanh: "tanh",
    nn.SiLU: "silu",
    nn.Hardswish: "hardswish",
}
_FUNCTIONS: dict[Any, ActivationName] = {
    **dict.fromkeys((torch.relu, F.relu, "relu", "relu_"), "relu"),
    **dict.fromkeys((torch.sigmoid, F.sigmoid, "sigmoid"), "sigmoid"),
    **dict.fromkeys((torch.tanh, F.tanh, "tanh"), "tanh"),
    F.relu6: "relu6",
    F.silu: "silu",
    F.hardswish: "hardswish",
}
"""By function, or by the name of a method of tensors."""
_GELU: dict[str, ActivationName] = {"none": "gelu", "tanh": "gelu_tanh"}
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
CHAIN_PARTS = (*_MODULES, nn.GELU, *BATCH_NORMS, *CONVOLUTIONS)
"""Modules that a chain may consist of."""
_ADDS = (operator.add, operator.iadd, torch.add, "add", "add_", "__add__", "__iadd__")
_ADDS_IN_PLACE = (operator.iadd, "add_", "__iadd__")


class Chains:
    """Rewrites the graph of ``block``."""

    def __init__(self, block: nn.Module, graph: fx.Graph, patterns: frozenset[Pattern]) -> None:
        self._block, self._graph = block, graph
        self.found: list[str] = []
        """The name of each chain."""
        self.owners: list[nn.Module] = []
        """The modules that chains run in."""
        batch_norms = (self._fuse_norm, self._fuse_norm_and_sum) if "bn_act" in patterns else ()
        sums = (self._fuse_sum,) if "add_act" in patterns else ()
        convolutions = (self._fuse_depthwise,) if "relu_depthwise" in patterns else ()
        for node in list(graph.nodes):
            activation = self._activation(node)
            if activation is not None and isinstance(node.args[0], fx.Node):
                any(fuse(node, activation) for fuse in (*batch_norms, *sums, *convolutions))
        graph.lint()

    def _fuse_norm(self, last: fx.Node, activation: ActivationName) -> bool:
        normal: Any = last.args[0]
        if not self._is_batch_norm(normal) or not self._only_for(normal, last):
            return False
        self._run_in(normal, normal.args, {"activation": activation}, [last, normal])
        self.found.append("batch norm + activation")
        return True

    def _fuse_norm_and_sum(self, last: fx.Node, activation: ActivationName) -> bool:
        total: Any = last.args[0]
        terms = self._terms(total)
        if terms is None or not self._only_for(total, last):
            return False
        for normal, residual in (terms, terms[::-1]):
            if (
                self._is_batch_norm(normal)
                and self._only_for(normal, total)
                and not self._changes_between(normal, last, total)
            ):
                options: dict[str, Any] = {"residual": residual, "activation": activation}
                if total.target in _ADDS_IN_PLACE:
                    options["into"] = "normal" if total.args[0] is normal else "residual"
                self._run_in(normal, normal.args, options, [last, total, normal])
                self.found.append("batch norm + add + activation")
                return True
        return False

    def _fuse_sum(self, last: fx.Node, activation: ActivationName) -> bool:
        total: Any = last.args[0]
        terms = self._terms(total)
        if terms is None or not self._only_for(total, last):
            return False
        with self._graph.inserting_before(last):
            in_place: dict[str, Any] = {"in_place": True} if total.target in _ADDS_IN_PLACE else {}
            fused = self._graph.call_function(add_act, (*terms, activation), in_place)
        self._replace([last, total], fused)
        self.found.append("add + activation")
        return True

    def _fuse_depthwise(self, relu: fx.Node, activation: ActivationName) -> bool:
        if activation != "relu" or len(relu.users) != 1:
            return False
        if _is_in_place(relu, self._module(relu)) and not self._only_for(relu.args[0], relu):
            return False
        (convolved,) = relu.users
        if not self._is_depthwise(convolved):
            return False
        self._run_in(convolved, (relu.args[0],), {"relu": True}, [convolved, relu])
        self.found.append("relu + depthwise convolution")
        return True

    def _run_in(
        self, called: fx.Node, args: Any, options: dict[str, Any], chain: list[fx.Node]
    ) -> None:
        """Call the module of ``called`` with the rest of its chain, where the chain ends."""
        self.owners.append(self._block.get_submodule(str(called.target)))
        with self._graph.inserting_before(chain[0]):
            fused = self._graph.call_module(str(called.target), args, options)
        self._replace(chain, fused)

    def _replace(self, chain: list[fx.Node], fused: fx.Node) -> None:
        """The chain, last node first."""
        chain[0].replace_all_uses_with(fused)
        for node in chain:
            self._graph.erase_node(node)

    def _activation(self, node: fx.Node) -> ActivationName | None:
        module = self._module(node)
        if module is not None:
            if len(node.args) != 1 or node.kwargs or is_watched(module):
                return None
            if type(module) is nn.GELU:
                return _GELU[module.approximate]
            return _MODULES.get(type(module))
        if node.op not in ("call_function", "call_method") or len(node.args) != 1:
            return None
        if node.target is F.gelu:
            return _GELU[str(node.kwargs.get("approximate", "none"))]
        return _FUNCTIONS.get(node.target)

    def _terms(self, node: Any) -> tuple[fx.Node, fx.Node] | None:
        """What a sum adds."""
        if node.op not in ("call_function", "call_method") or node.target not in _ADDS:
            return None
        if len(node.args) != 2 or node.kwargs or len(node.all_input_nodes) != 2:
            return None
        if node.target in _ADDS_IN_PLACE and not self._only_for(node.args[0], node):
            return None
        left, right = node.args
        return left, right

    def _only_for(self, value: Any, user: fx.Node) -> bool:
        """Whether nothing but ``user`` sees a value; for an in-place one, through aliases, too."""
        if list(value.users) != [user]:
            return False
        if not _is_in_place(user, self._module(user)):
            return True
        module = self._module(value)
        made = module is not None and next(module.parameters(), None) is not None
        return made or value.target in _ADDS or self._is_batch_norm(value)

    def _changes_between(self, first: fx.Node, last: fx.Node, apart_from: fx.Node) -> bool:
        """Whether an operation between two changes a tensor in place."""
        nodes = list(self._graph.nodes)
        between = nodes[nodes.index(first) + 1 : nodes.index(last)]
        return any(_is_in_place(n, self._module(n)) for n in between if n is not apart_from)

    def _is_batch_norm(self, node: Any) -> bool:
        module = self._module(node)
        return type(module) in BATCH_NORMS and self._is_plain_call(node, module)

    def _is_depthwise(self, node: fx.Node) -> bool:
        module: Any = self._module(node)
        return (
            type(module) in CONVOLUTIONS
            and module.groups == module.in_channels > 1
            and module.padding_mode == "zeros"
            and not isinstance(module.padding, str)
            and self._is_plain_call(node, module)
        )

    def _is_plain_call(self, node: fx.Node, module: Any) -> bool:
        return len(node.args) == 1 and not node.kwargs and not is_watched(module)

    def _module(self, node: Any) -> nn.Module | None:
        """The child that a node calls."""
        return self._block.get_submodule(str(node.target)) if node.op == "call_module" else None


def is_watched(module: nn.Module) -> bool:
    """Whether someone's hooks, or another forward, see the calls of a module."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return "forward" in vars(module) or any(getattr(module, name) for name in hooks)


def _is_in_place(node: fx.Node, module: nn.Module | None) -> bool:
    if module is not None:
        return bool(getattr(module, "inplace", False))
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    method = name.endswith("_") and not name.endswith("__")
    return method or node.target in IN_PLACE or bool(node.kwargs.get("inplace"))
