"""Who imports what: downward only, no cycles, nothing lazy, private stays private, torch apart."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = "slipstream"
ROOT = Path(__file__).parents[1] / "src" / PACKAGE

LEVELS = (
    ("errors", "files", "pytree", "version"),
    ("cluster", "kernels", "optim", "plain_copy", "strategy", "testbed", "trace"),
    ("analysis", "health", "memory", "precision", "transport"),
    ("checks", "codecs", "comm", "data"),
    ("gradients",),
    ("ddp", "fusion", "parallel", "planner"),
    ("advisor", "calibration", "local", "sharding"),
    ("report", "tuner"),
    ("session",),
    ("adapters", "checkpoint"),
    ("slipstream",),
    ("cli",),
    ("__main__",),
)
"""The rooms, lowest level first; a room may import the rooms of lower levels alone."""

LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
TORCH_FREE = (
    "errors",
    "files",
    "version",
    "strategy",
    "trace",
    "analysis",
    "health",
    "planner",
    "advisor",
    "report",
)
RECORDER = "trace.recorder"
"""The one module of a torch-free room that sees torch: it stamps events of CUDA streams."""

COLLECTIVES = {
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "irecv",
    "isend",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
    "send",
}
MAY_COMMUNICATE = (
    "transport",  # how gradients and buffers travel
    "comm",  # public operators
    "parallel",  # activations between stages, shards of parameters
    "calibration",  # times the network
    *("cluster", "trace", "data", "tuner", "session", "cli"),  # small agreements beside training
)
"""The rooms that call collectives. All others, those of gradients above all, say by values what is
to be exchanged, and the transport that the strategy names carries it out."""

NO_SUBJECT = re.compile(r"(What|Of|How|Where|Whose|Those|In which|That of|All that|As torch's)\b")
NO_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}

Modules = Mapping[str, ast.Module]


def parse(sources: Mapping[str, str]) -> Modules:
    """Trees by dotted name below the package: ``comm/flat.py`` is ``comm.flat``."""
    modules = {}
    for path, text in sources.items():
        parts = path.removesuffix(".py").split("/")
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(text)
    return modules


@cache
def package() -> Modules:
    paths = {p.relative_to(ROOT).as_posix(): p.read_text() for p in ROOT.rglob("*.py")}
    assert len(paths) > 40
    return parse(paths)


def room_of(module: str) -> str:
    """The room of a module: the folder, or the loose file at the root."""
    return module.split(".")[0]


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
            if name == PACKAGE:
                yield PACKAGE, node
            elif name.startswith(f"{PACKAGE}."):
                yield name.removeprefix(f"{PACKAGE}."), node


def upward(modules: Modules) -> Iterator[str]:
    for module in filter(None, modules):
        room = room_of(module)
        if room not in LEVEL:
            yield f"{module} belongs to no room of the table"
            continue
        for imported, _ in imports(modules, module):
            target = room_of(imported)
            if target != room and LEVEL.get(target, len(LEVELS)) >= LEVEL[room]:
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
        called = {getattr(n.func, "id", getattr(n.func, "attr", "")) for n in _calls(tree) & inside}
        if module and called & {"import_module", "__import__"}:
            yield f"{module}: import by name"


def _calls(tree: ast.Module) -> set[ast.Call]:
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
        if module == RECORDER or room_of(module) not in TORCH_FREE:
            continue
        for node in ast.walk(tree):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            if any(name.split(".")[0] == "torch" for name in names):
                yield f"{module} imports torch"


def vague_names(modules: Modules) -> Iterator[str]:
    yield from (m for m in modules if NO_NAMES & {part.strip("_") for part in m.split(".")})


def past_the_transport(modules: Modules) -> Iterator[str]:
    for module, tree in modules.items():
        if not module or room_of(module) in MAY_COMMUNICATE:
            continue
        for node in ast.walk(tree):
            names: list[str] = []
            if isinstance(node, ast.Attribute):
                owner = node.value
                inside = getattr(owner, "attr", getattr(owner, "id", "")) in ("dist", "distributed")
                names = [node.attr] if inside else []
            elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("torch.dist"):
                names = [alias.name for alias in node.names]
            yield from (f"{module} calls {name}" for name in names if name in COLLECTIVES)


def warnings_by_level(modules: Modules) -> Iterator[str]:
    """A number of frames between a warning and the script is wrong once a function moves."""
    for module, tree in modules.items():
        called = (ast.unparse(call.func) for call in _calls(tree))
        if module != "errors" and "warnings.warn" in called:
            yield f"{module}: call slipstream.errors.warn instead"


def types_of(tree: ast.Module) -> Iterator[str]:
    """Public names of classes and of types that a module gives a name."""
    for node in tree.body:
        names = [node.name] if isinstance(node, ast.ClassDef) else []
        if isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        yield from (n for n in names if re.fullmatch(r"[A-Z]\w*[a-z]\w*", n))


def one_name_for_two_types(modules: Modules) -> Iterator[str]:
    homes = defaultdict(list)
    for module, tree in modules.items():
        for name in types_of(tree):
            homes[name].append(module)
    yield from (f"{name}: {', '.join(m)}" for name, m in homes.items() if len(m) > 1)


def settings_without_config(modules: Modules) -> Iterator[str]:
    """Settings are values that a file of the same word carries out: their names must differ."""
    for module, tree in modules.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
                continue
            bases = {getattr(base, "id", "") for base in node.bases}
            is_setting = any(base == "Setting" or base.endswith("Variant") for base in bases)
            if is_setting and not node.name.endswith(("Config", "Variant")):
                yield from [] if node.name == "Strategy" else [f"{module}.{node.name}"]


def docstrings_without_a_subject(modules: Modules) -> Iterator[str]:
    """Values begin with a noun, functions with a verb."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for module, tree in modules.items():
        for node in ast.walk(tree):
            text = ast.get_docstring(node) if isinstance(node, kinds) else None
            if NO_SUBJECT.match(text or ""):
                yield f"{module}.{getattr(node, 'name', '')}"


RULES = {
    rule.__name__: rule
    for rule in (
        upward,
        cycles,
        lazy,
        trespasses,
        torch_users,
        vague_names,
        past_the_transport,
        warnings_by_level,
        one_name_for_two_types,
        settings_without_config,
        docstrings_without_a_subject,
    )
}

TORCH = "import torch\n"
BROKEN = {
    "a room imports one above it": ("upward", {"comm/a.py": "import slipstream.tuner.b"}),
    "rooms of one level": ("upward", {"data/a.py": "from slipstream.gradients import b"}),
    "a part of the session imports the whole package": (
        "upward",
        {"session/checks.py": "from slipstream import accelerate"},
    ),
    "testbed imports a room of its level": (
        "upward",
        {"testbed/a.py": "from slipstream.cluster.launcher import x"},
    ),
    "a room that is not in the table": ("upward", {"shed/a.py": ""}),
    "two modules import each other": (
        "cycles",
        {"comm/a.py": "from slipstream.comm import b", "comm/b.py": "import slipstream.comm.a"},
    ),
    "an import in a function": (
        "lazy",
        {"cli/a.py": "def f():\n    import slipstream.session.session"},
    ),
    "an import in a method": (
        "lazy",
        {"cli/a.py": "class A:\n    def f(self):\n        from slipstream.errors import E"},
    ),
    "an import by name": ("lazy", {"cli/a.py": "def f(n):\n    return import_module(n)"}),
    "a private module of another room": (
        "trespasses",
        {"session/a.py": "import slipstream.cluster._rank"},
    ),
    "a private name of another room": (
        "trespasses",
        {"session/a.py": "from slipstream.cluster.connect import _x"},
    ),
    "torch in strategy": ("torch_users", {"strategy/a.py": TORCH}),
    "torch in a function of trace": ("torch_users", {"trace/a.py": f"def f():\n    {TORCH}"}),
    "torch.nn in trace": ("torch_users", {"trace/a.py": "from torch.nn import Module"}),
    "a codec that communicates": (
        "past_the_transport",
        {"codecs/a.py": "import torch.distributed as dist\ndist.all_reduce(x)"},
    ),
    "a hook that imports a collective": (
        "past_the_transport",
        {"ddp/a.py": "from torch.distributed import all_gather"},
    ),
    "gradients that send themselves": (
        "past_the_transport",
        {"gradients/a.py": "import torch\ntorch.distributed.isend(x)"},
    ),
    "a warning that counts frames": (
        "warnings_by_level",
        {"data/a.py": "import warnings\nwarnings.warn('', stacklevel=3)"},
    ),
    "a class of one name in two rooms": (
        "one_name_for_two_types",
        {"comm/a.py": "class Plan: ...", "data/b.py": "Plan = tuple[int, ...]"},
    ),
    "a setting that is named like its technique": (
        "settings_without_config",
        {"strategy/a.py": "class Cache(Setting): ..."},
    ),
    "a function that is described by a question": (
        "docstrings_without_a_subject",
        {"comm/a.py": 'def f():\n    """How many there are."""'},
    ),
    "a function that is described by its object": (
        "docstrings_without_a_subject",
        {"comm/a.py": 'def f():\n    """Those of a host."""'},
    ),
    "a file called helpers": ("vague_names", {"comm/_helpers.py": ""}),
}

FINE = {
    "session/accelerate.py": "from slipstream.session.session import Session\n"
    "from slipstream.transport import flat",
    "gradients/engine.py": "import torch.distributed as dist\ndist.get_rank()",
    "transport/flat.py": "import torch\nimport torch.distributed as dist\ndist.all_reduce(x)\n"
    "from slipstream.trace.recorder import Recorder",
    "trace/recorder.py": "import torch\nfrom slipstream.version import __version__\n"
    "from slipstream.trace.event import Event",
    "cluster/connect.py": "from slipstream.cluster import _rank\nfrom slipstream.errors import E",
    "cluster/_rank.py": "def f():\n    import torch",
    "__init__.py": "def __getattr__(name):\n    return import_module(name)",
}


@pytest.mark.parametrize("rule", RULES)
def test_the_package_keeps_the_rule(rule: str) -> None:
    assert list(RULES[rule](package())) == []


@pytest.mark.parametrize(("rule", "sources"), BROKEN.values(), ids=BROKEN)
def test_each_rule_can_be_broken(rule: str, sources: dict[str, str]) -> None:
    broken = {name for name, check in RULES.items() if list(check(parse(sources)))}
    assert broken == {rule}


@pytest.mark.parametrize("rule", RULES)
def test_what_is_allowed_breaks_no_rule(rule: str) -> None:
    assert list(RULES[rule](parse(FINE))) == []


def test_the_page_shows_every_room_and_modules_that_are_there() -> None:
    page = (ROOT.parents[1] / "docs/architecture.md").read_text()
    rooms: defaultdict[int, list[str]] = defaultdict(list)
    for level, room in re.findall(r"^\| (\d+) \| `(\w+)` \|", page, re.MULTILINE):
        rooms[int(level)].append(room)
    assert [tuple(rooms[level]) for level in range(len(LEVELS))] == [*LEVELS]
    drawn = re.findall(r'\["([\w/]+\.py)<br/>', page)
    assert len(drawn) > 15
    assert [module for module in drawn if not (ROOT / module).exists()] == ["train.py"]
