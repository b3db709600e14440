"""The files that the project is installed, cited, tried and released with, held to one another."""

from __future__ import annotations

import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

import slipstream

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
REQUIREMENT = re.compile(r"([A-Za-z0-9_-]+)(?:\[[\w,]+\])?[>=]=([\d.]+)")
USERS = ("examples", "report", "cache", "cluster", "test")
"""Extras whose minima are tried. ``bench`` and ``dev`` are for who works on slipstream."""
NO_MINIMUM = {"triton"}
"""torch says exactly which one it needs."""


def name_of(package: str) -> str:
    return package.lower().replace("_", "-")


def minima() -> dict[str, str]:
    """The least version of each package that pyproject.toml allows."""
    project = PROJECT["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    lines += [line for extra in USERS for line in project["optional-dependencies"][extra]]
    found = [REQUIREMENT.match(line) for line in lines if not line.startswith("slipstream[")]
    assert all(found)
    return {name_of(m[1]): m[2] for m in found if m and name_of(m[1]) not in NO_MINIMUM}


def pins(file: str) -> dict[str, str]:
    lines = (ROOT / file).read_text().splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {name_of(package): version for package, version in pairs}


def test_the_minima_that_are_tried_are_those_that_are_allowed() -> None:
    assert pins("constraints-minimum.txt") == minima()


def test_what_the_suite_runs_with_is_allowed() -> None:
    def numbers(version: str) -> list[int]:
        return [int(part) for part in version.split(".")[:3]]

    pinned = pins("constraints.txt")
    assert set(minima()) <= set(pinned)
    for package, least in minima().items():
        assert numbers(pinned[package]) >= numbers(least), package


# What a source distribution contains.


def test_the_source_distribution_has_what_its_tests_read() -> None:
    included = PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    always = {"pyproject.toml"}
    read: set[str] = set()
    for test in (ROOT / "tests").rglob("test_*.py"):
        read |= set(re.findall(r'\bROOT / "([^"/]+)', test.read_text()))
    assert {"README.md", "docs", "pyproject.toml"} <= read
    missing = {n for n in read - always if not any(fnmatch(n, pattern) for pattern in included)}
    assert missing == set()


# The citation, by the rules of version 1.2.0 of its schema.

CITATION = {
    "cff-version": "1.2.0",
    "message": str,
    "title": str,
    "type": "software",
    "authors": list,
    "version": slipstream.__version__,
    "license": PROJECT["project"]["license"],
    "abstract": str,
    "keywords": list,
}


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(citation) <= set(CITATION)
    for key, value in citation.items():
        allowed = CITATION[key]
        assert isinstance(value, allowed) if isinstance(allowed, type) else value == allowed, key
    assert all(set(author) == {"name"} for author in citation["authors"])
    assert all(isinstance(word, str) for word in citation["keywords"])


# The workflow of the public CI.

TARGETS = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
VARIABLES = set(re.findall(r"^([A-Z]+) \?=", (ROOT / "Makefile").read_text(), re.MULTILINE))


def workflow() -> dict[Any, Any]:
    return yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())


def steps_of(job: dict[str, Any]) -> list[str]:
    """The command of each step of a job, once for each cell of its matrix."""
    matrix = job.get("strategy", {}).get("matrix", {})
    cells = list(matrix.get("versions", [""]))
    cells += [cell["versions"] for cell in matrix.get("include", [])]
    lines = [step["run"] for step in job["steps"] if "run" in step]
    return [
        line.replace("${{ matrix.versions }}", cell).strip() for line in lines for cell in cells
    ]


@pytest.mark.parametrize("name", ["check", "quick", "test"])
def test_a_job_of_the_workflow_is_a_target_of_the_makefile(name: str) -> None:
    job = workflow()["jobs"][name]
    assert set(job) <= {"needs", "runs-on", "timeout-minutes", "strategy", "steps"}
    assert set(job.get("strategy", {})) <= {"fail-fast", "matrix"}
    assert job.get("needs", "check") in workflow()["jobs"]
    assert [set(step) & {"run", "uses"} for step in job["steps"]] == [{"uses"}, {"uses"}, {"run"}]
    for line in steps_of(job):
        make, target, *settings = line.split()
        assert (make, target) == ("make", name)
        assert target in TARGETS
        assert {setting.partition("=")[0] for setting in settings} <= VARIABLES


def test_the_workflow_runs_all_that_is_promised() -> None:
    whole = workflow()
    assert set(whole) == {
        "name",
        True,
        "permissions",
        "concurrency",
        "jobs",
    }  # True: "on" in YAML 1.1
    assert set(whole["jobs"]) == {"check", "quick", "test"}
    matrix = whole["jobs"]["quick"]["strategy"]["matrix"]
    promised = PROJECT["project"]["classifiers"]
    pythons = [line.rpartition(" ")[2] for line in promised if "Python :: 3." in line]
    assert matrix["python"] == pythons
    assert "make quick MINIMUM=1" in steps_of(whole["jobs"]["quick"])
