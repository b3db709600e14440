"""Who imports what: downward only, no cycles, nothing lazy, private stays private, torch apart."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = "slipstream"
ROOT = Path(__file__).parents[1] / "src" / PACKAGE

LEVELS = {
    "errors": 0,
    "findings": 0,
    "cluster": 0,
    "nested": 1,
    "strategy": 1,
    "trace.event": 1,
    "trace.recorder": 1,
    "trace": 2,
    "codecs": 2,
    "comm": 2,
    "gradients": 3,
    "optim": 3,
    "data": 3,
    "memory": 3,
    "parallel": 3,
    "precision": 3,
    "planner": 4,
    "planner.contention": 4,
    "planner.codec_cost": 4,
    "planner.calibrate": 4,
    "adaptive": 5,
    "axes": 5,
    "checkpoint": 5,
    "checks": 5,
    "composition": 5,
    "ddp": 5,
    "lent": 5,
    "live_split": 5,
    "outcome": 5,
    "recording": 5,
    "saving": 5,
    "session": 5,
    "window": 5,
    "shared_model": 5,
    "api": 5,
    "testbed": 5,
    "cli": 6,
    "__main__": 7,
}
"""The level of each room; the longest name that fits a module is its room."""

IN_ORDER = (
    "errors",
    "cluster",
    "trace.event",
    "trace.recorder",
    "planner",
    "planner.contention",
    "planner.codec_cost",
    "planner.calibrate",
    "adaptive",
    "axes",
    "checkpoint",
    "lent",
    "ddp",
    "checks",
    "live_split",
    "outcome",
    "recording",
    "shared_model",
    "saving",
    "window",
    "session",
    "composition",
    "api",
)
"""Rooms of one level of which a later one may import an earlier one."""

ALONE = {"testbed": {"errors", "cluster"}}
"""Rooms that may import less than their level says."""

TORCH_FREE = ("errors", "findings", "strategy", "trace", "planner")
SEES_TORCH = (
    "trace.recorder",
    "planner.contention",
    "planner.calibrate",
    "planner.codec_cost",
)
NO_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}

Modules = Mapping[str, ast.Module]


def parse(sources: Mapping[str, str]) -> Modules:
    """Trees by dotted name below the package: ``comm/flat.py`` is ``comm.flat``."""
    modules = {}
    for path, text in sources.items():
        parts = path.removesuffix(".py").split("/")
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(text)
    return modules


def room_of(module: str) -> str:
    """The room of a module; the module itself where the table does not know it."""
    fits = [r for r in LEVELS if module == r or module.startswith(f"{r}.")]
    return max(fits, key=len, default=module)


def imports(modules: Modules, module: str) -> Iterator[tuple[str, ast.stmt]]:
    """What ``module`` imports of the package, at any depth of its code, with the statement."""
    for node in ast.walk(modules[module]):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}: relative import"
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [
                n if n.removeprefix(f"{PACKAGE}.") in modules else str(node.module) for n in full
            ]
        else:
            continue
        for name in names:
            if name.startswith(f"{PACKAGE}."):
                yield name.removeprefix(f"{PACKAGE}."), node


def may_import(importer: str, imported: str) -> bool:
    """Whether the table lets one room import another."""
    if importer == imported:
        return True
    if importer in ALONE:
        return imported in ALONE[importer]
    if importer in IN_ORDER and imported in IN_ORDER:
        return IN_ORDER.index(imported) < IN_ORDER.index(importer)
    return LEVELS[imported] < LEVELS[importer]


def upward(modules: Modules) -> Iterator[str]:
    for module in filter(None, modules):
        if room_of(module) not in LEVELS:
            yield f"{module} belongs to no room of the table"
            continue
        for imported, _ in imports(modules, module):
            if room_of(imported) not in LEVELS or not may_import(
                room_of(module), room_of(imported)
            ):
                yield f"{module} imports {imported}"


def cycles(modules: Modules) -> Iterator[str]:
    # The package itself imports nothing when it is imported: test_public_names proves it.
    graph = {m: {i for i, _ in imports(modules, m)} - {m} for m in filter(None, modules)}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        yield " -> ".join(error.args[1])


def lazy(modules: Modules) -> Iterator[str]:
    for module, tree in modules.items():
        inside = {
            child
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for child in ast.walk(node)
        }
        yield from (f"{module}: {i}" for i, node in imports(modules, module) if node in inside)
        called = {getattr(n.func, "id", getattr(n.func, "attr", "")) for n in inside & _calls(tree)}
        if module and called & {"import_module", "__import__"}:
            yield f"{module}: import by name"


def _calls(tree: ast.Module) -> set[ast.AST]:
    return {node for node in ast.walk(tree) if isinstance(node, ast.Call)}


def trespasses(modules: Modules) -> Iterator[str]:
    for module in modules:
        for imported, node in imports(modules, module):
            names = [a.name for a in node.names] if isinstance(node, ast.ImportFrom) else []
            home = imported.split(".")[0]
            private = any(part.startswith("_") for part in imported.split("."))
            private |= any(name.startswith("_") and name != "__version__" for name in names)
            if private and module.split(".")[0] != home:
                yield f"{module} imports the private {imported}"


def torch_users(modules: Modules) -> Iterator[str]:
    for module, tree in modules.items():
        room = room_of(module)
        if room in SEES_TORCH or room.split(".")[0] not in TORCH_FREE:
            continue
        for node in ast.walk(tree):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            if any(name.split(".")[0] == "torch" for name in names):
                yield f"{module} imports torch"


def vague_names(modules: Modules) -> Iterator[str]:
    yield from (m for m in modules if NO_NAMES & {part.strip("_") for part in m.split(".")})


RULES = {
    rule.__name__: rule for rule in (upward, cycles, lazy, trespasses, torch_users, vague_names)
}

TORCH = "import torch\n"
BROKEN = {
    "a room imports one above it": ("upward", {"comm/a.py": "import slipstream.gradients.b"}),
    "rooms of one level": ("upward", {"data/a.py": "from slipstream.gradients import b"}),
    "an early part of trace imports a late one": (
        "upward",
        {"trace/recorder.py": "from slipstream.trace import chrome", "trace/chrome.py": ""},
    ),
    "checks imports api": (
        "upward",
        {"checks.py": "from slipstream.session.accelerate import accelerate"},
    ),
    "testbed imports comm": (
        "upward",
        {"testbed/a.py": "from slipstream.transport.all_reduce import x"},
    ),
    "a room that is not in the table": ("upward", {"shed/a.py": ""}),
    "two modules import each other": (
        "cycles",
        {"comm/a.py": "from slipstream.comm import b", "comm/b.py": "import slipstream.comm.a"},
    ),
    "an import in a function": (
        "lazy",
        {"api.py": "def f():\n    import slipstream.session.session"},
    ),
    "an import in a method": (
        "lazy",
        {
            "api.py": "class A:\n    def f(self):\n        from slipstream.session.session import Session"
        },
    ),
    "an import by name": ("lazy", {"api.py": "def f(n):\n    return import_module(n)"}),
    "a private module of another room": (
        "trespasses",
        {"api.py": "import slipstream.cluster._rank"},
    ),
    "a private name of another room": (
        "trespasses",
        {"api.py": "from slipstream.cluster.connect import _x"},
    ),
    "torch in strategy": ("torch_users", {"strategy/a.py": TORCH}),
    "torch in a function of trace": ("torch_users", {"trace/a.py": f"def f():\n    {TORCH}"}),
    "torch.nn in trace": ("torch_users", {"trace/a.py": "from torch.nn import Module"}),
    "a file called helpers": ("vague_names", {"comm/_helpers.py": ""}),
}

FINE = {
    "api.py": "from slipstream.session.session import Session\nfrom slipstream.comm import flat",
    "comm/flat.py": "import torch\nfrom slipstream.trace.recorder import Recorder",
    "trace/recorder.py": "import torch\nfrom slipstream import __version__\n"
    "from slipstream.trace.event import Event",
    "cluster/connect.py": "from slipstream.cluster import _rank\nfrom slipstream.errors import E",
    "cluster/_rank.py": "def f():\n    import torch",
    "__init__.py": "def __getattr__(name):\n    return import_module(name)",
}


@pytest.mark.parametrize("rule", RULES)
def test_the_package_keeps_the_rule(rule: str) -> None:
    paths = {p.relative_to(ROOT).as_posix(): p.read_text() for p in ROOT.rglob("*.py")}
    assert len(paths) > 40
    assert list(RULES[rule](parse(paths))) == []


@pytest.mark.parametrize(("rule", "sources"), BROKEN.values(), ids=BROKEN)
def test_each_rule_can_be_broken(rule: str, sources: dict[str, str]) -> None:
    broken = {name for name, check in RULES.items() if list(check(parse(sources)))}
    assert broken == {rule}


@pytest.mark.parametrize("rule", RULES)
def test_what_is_allowed_breaks_no_rule(rule: str) -> None:
    assert list(RULES[rule](parse(FINE))) == []
