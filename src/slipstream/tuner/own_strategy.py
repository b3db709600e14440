"""Scripts that give ``accelerate()`` a strategy of their own, which hides the one of a command.

Reads the script and runs nothing; what stands in another file is not found.
"""

from __future__ import annotations

import ast
from pathlib import Path

OWN = (
    "{where} gives accelerate() a strategy of its own, which hides that of the command line "
    "(SLIPSTREAM_STRATEGY); leave it out there, and give it as --strategy"
)


def own_strategy(script: str | Path) -> str | None:
    """Say where the script gives a strategy, with file and line; None where no such call is
    found."""
    path = Path(script)
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):  # running it will tell
        return None
    lines = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and _called(node.func) == "accelerate" and _gives_one(node)
    ]
    return OWN.format(where=f"{path.name}:{min(lines)}") if lines else None


def _called(function: ast.expr) -> str:
    return getattr(function, "attr", getattr(function, "id", ""))


def _gives_one(call: ast.Call) -> bool:
    """Whether the fourth argument, or that of this name, is given and not None."""
    given = [*call.args[3:4], *(k.value for k in call.keywords if k.arg == "strategy")]
    return any(not (isinstance(value, ast.Constant) and value.value is None) for value in given)
