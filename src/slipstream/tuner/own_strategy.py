"""Scripts that give ``accelerate()`` or an adapter a strategy of their own, which hides that of a
command.

Reads the script and runs nothing; what stands in another file is not found.
"""

from __future__ import annotations

import ast
from pathlib import Path

OWN = (
    "{where} gives {name}() a strategy of its own, which{unless} hides that of the command "
    "line (SLIPSTREAM_STRATEGY); leave it out there, and give it as --strategy"
)

PLACES = {
    "accelerate": 3,
    "accelerate_fsdp": 2,
    "SessionStrategy": 0,
    "FabricStrategy": 0,
    "Accelerator": None,
    "SessionTrainer": None,
}
"""By what takes a strategy, its place among the arguments; None: it is given by name alone."""


def own_strategy(script: str | Path) -> str | None:
    """Say where the script gives a strategy, with file and line; None where no such call is
    found."""
    path = Path(script)
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):  # running it will tell
        return None
    found = [
        (node.lineno, _called(node.func), value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and (value := _given(node)) is not None
    ]
    if not found:
        return None
    line, name, value = min(found, key=lambda one: one[:2])
    unless = ", unless it is None," if _may_be_none(value) else ""
    return OWN.format(where=f"{path.name}:{line}", name=name, unless=unless)


def _called(function: ast.expr) -> str:
    return getattr(function, "attr", getattr(function, "id", ""))


def _may_be_none(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):  # of a mapping, or of the environment
        return _called(value.func) in ("get", "getenv", "pop")
    return isinstance(value, ast.Name | ast.Attribute | ast.Subscript | ast.IfExp | ast.BoolOp)


def _given(call: ast.Call) -> ast.expr | None:
    """Return the strategy that it gets; None: it takes none, or gets None."""
    name = _called(call.func)
    if name not in PLACES:
        return None
    place = PLACES[name]
    given = [k.value for k in call.keywords if k.arg == "strategy"]
    if place is not None:
        given += call.args[place : place + 1]
    return next((v for v in given if not (isinstance(v, ast.Constant) and v.value is None)), None)
