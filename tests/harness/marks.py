"""Marks that follow from the code: which tests start ranks, processes or network namespaces.

``make quick`` leaves these tests out. Nobody marks them by hand: at collection each test's code and
its fixtures are searched for what starts such things. What the search cannot see (a command line
that is run in this process and starts ranks) is seen while the test runs, and an unmarked test that
starts something fails with the mark to add.
"""

from __future__ import annotations

import dis
import os
import sys
from collections.abc import Callable, Iterator
from functools import cache
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

MARKS = ("ranks", "process", "namespace")
RANKS_RUN = "tests.ranks.run"
"""The audit event of a ``Ranks`` that runs a function."""

_MODULES = {"subprocess", "multiprocessing"}
_STARTERS = {
    ("tests.harness.ranks", "Ranks"): "ranks",
    ("tests.harness.scripts", "Script"): "process",
    ("slipstream.cli.main", "main"): "process",
    ("slipstream.testbed.testbed", "Testbed"): "namespace",
    ("slipstream.testbed.machine", "unavailable"): "namespace",
}
_OURS = ("tests.", "slipstream.")
_PROGRAMS = ("python", "unshare", "chromium")
"""Programs that take long. ``ip``, ``ldconfig``, which torch asks once, and the like do not."""

_FLAG = int(sys.version_info >= (3, 12))
_GLOBALS = {dis.opmap["LOAD_GLOBAL"]: 1, dis.opmap["LOAD_NAME"]: 0}
_ATTRIBUTES = {dis.opmap["LOAD_ATTR"]: _FLAG, dis.opmap.get("LOAD_METHOD", -1): _FLAG}
"""By instruction, how many bits of its argument are flags; the others are the number of a name."""

_started: set[str] = set()


def watch() -> None:
    """Note from now on what this process starts."""
    sys.addaudithook(_note)


def _note(event: str, args: tuple[Any, ...]) -> None:
    if event == RANKS_RUN:
        _started.add("ranks")
    elif event == "subprocess.Popen":
        program = os.path.basename(os.fsdecode(args[0] or args[1][0]))
        if program.startswith(_PROGRAMS):
            _started.add("namespace" if program == "unshare" else "process")
    elif event == "os.fork":
        _started.add("process")


def started() -> set[str]:
    """What was started since the last call."""
    kinds = set(_started)
    _started.clear()
    return kinds


def marks_of(item: pytest.Item) -> set[str]:
    """The marks of a test by the names that its code and the code of its fixtures use."""
    return {mark for function in _entries(item) for mark in _marks_from(function)}


@cache
def _marks_from(function: Callable[..., Any]) -> frozenset[str]:
    """The marks of a test or a fixture: once for all parameters and for all tests that use it."""
    return frozenset(_reached(function, set()))


def _entries(item: pytest.Item) -> Iterator[Callable[..., Any]]:
    if not isinstance(item, pytest.Function):
        return
    # hypothesis hides the test in an attribute of the function that draws its examples
    yield getattr(getattr(item.function, "hypothesis", None), "inner_test", item.function)
    definitions = dict(item._fixtureinfo.name2fixturedefs)
    if "request" in item._fixtureinfo.argnames and hasattr(item, "callspec"):
        manager = item.session._fixturemanager  # for request.getfixturevalue(parameter)
        for value in filter(lambda v: isinstance(v, str), item.callspec.params.values()):
            definitions[value] = manager.getfixturedefs(value, item) or ()
    for *_, nearest in filter(None, definitions.values()):
        yield nearest.func


def _reached(value: object, seen: set[object]) -> set[str]:
    """The marks of a function or class of the tests, and of all that it names."""
    marks: set[str] = set()
    for function in _functions(value):
        if function in seen or not function.__module__.startswith(("tests.", "conftest")):
            continue
        seen.add(function)
        for candidate in _named(function):
            if mark := _mark(candidate):
                marks.add(mark)
            else:
                marks |= _reached(candidate, seen)
    return marks


@cache
def _named(function: FunctionType) -> list[object]:
    """What the globals that a function reads stand for; of our modules, what it takes from them."""
    names, attributes = _names(function.__code__)
    found: list[object] = []
    for name in names & function.__globals__.keys():
        named = function.__globals__[name]
        if isinstance(named, ModuleType) and named.__name__.startswith(_OURS):
            found += [vars(named)[a] for a in attributes & vars(named).keys()]
        else:
            found.append(named)
    return found


def _functions(value: object) -> Iterator[FunctionType]:
    value = getattr(value, "__wrapped__", value)  # a decorator's inside
    if isinstance(value, FunctionType):
        yield value
    elif isinstance(value, type):
        for member in vars(value).values():
            if isinstance(member, FunctionType):
                yield member


def _names(code: CodeType) -> tuple[set[str], set[str]]:
    """The globals and the attributes that the code reads, that of inner functions included.

    Its bytes are read here, as `dis` takes a quarter of the time of a collection.
    """
    names, attributes, high = set(), set(), 0
    for opcode, low in zip(code.co_code[::2], code.co_code[1::2], strict=True):
        argument = high | low
        high = argument << 8 if opcode == dis.EXTENDED_ARG else 0
        if opcode in _GLOBALS:
            names.add(code.co_names[argument >> _GLOBALS[opcode]])
        elif opcode in _ATTRIBUTES:
            attributes.add(code.co_names[argument >> _ATTRIBUTES[opcode]])
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            inner_names, inner_attributes = _names(constant)
            names |= inner_names
            attributes |= inner_attributes
    return names, attributes


def _mark(value: object) -> str | None:
    """The mark of what starts something: a module such as subprocess, or a name taken from it."""
    if isinstance(value, ModuleType):
        return "process" if value.__name__ in _MODULES else None
    module, name = getattr(value, "__module__", ""), getattr(value, "__name__", "")
    if callable(value) and str(module).partition(".")[0] in _MODULES:
        return "process"
    return _STARTERS.get((module, name))
