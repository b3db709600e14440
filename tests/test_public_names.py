"""What ``import slipstream`` offers, and that it costs nothing until it is used."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import slipstream

ROOT = Path(__file__).parents[1]


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=60)


def test_the_names_are_these_and_no_others() -> None:
    assert slipstream.__all__ == [
        "Checkpoints",
        "HangError",
        "Session",
        "SlipstreamError",
        "Strategy",
        "__version__",
        "accelerate",
        "data_share",
        "read_checkpoint",
        "write_checkpoint",
    ]
    assert dir(slipstream) == slipstream.__all__


@pytest.mark.parametrize("name", [n for n in slipstream.__all__ if n != "__version__"])
def test_every_name_resolves_to_itself_and_is_described(name: str) -> None:
    value = getattr(slipstream, name)
    assert value.__name__ == name
    assert value.__doc__.strip()


def test_an_import_leaves_the_random_numbers_of_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of rich draws one, on those ranks alone that have not imported it before."""

    drawn = []

    def drawing(name: str) -> SimpleNamespace:
        drawn.append(random.random())
        return SimpleNamespace(accelerate=name)

    monkeypatch.setattr(slipstream, "import_module", drawing)
    monkeypatch.delitem(sys.modules, "slipstream.session.accelerate", raising=False)
    before = random.getstate()
    assert [slipstream.accelerate] == ["slipstream.session.accelerate"]
    assert len(drawn) == 1
    assert random.getstate() == before


def test_every_verb_of_the_session_is_described() -> None:
    verbs = {n: v for n, v in vars(slipstream.Session).items() if not n.startswith("_")}
    assert len(verbs) >= 8
    assert [name for name, verb in verbs.items() if not (verb.__doc__ or "").strip()] == []


def test_other_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="'slipstream' has no attribute 'Sesion'"):
        _ = slipstream.Sesion


def test_torch_and_its_compiler_are_imported_only_where_they_are_used() -> None:
    """Each takes seconds, on every rank; pipelines alone need the compiler."""
    code = """
import slipstream, sys
assert "torch" not in sys.modules, "by the package"
slipstream.Strategy()
assert "torch" not in sys.modules, "by a strategy"
import slipstream.cli.main
assert "torch" not in sys.modules, "by a command"
slipstream.accelerate
assert not {"torch.distributed.pipelining", "torch._dynamo"} & sys.modules.keys(), "by a session"
import slipstream.cli.demo.training
assert not {"transformers", "sklearn"} & sys.modules.keys(), "by a rank of the demo"
"""
    run = python("-c", code)
    assert (run.returncode, run.stderr) == (0, "")


def test_the_package_runs_as_a_command() -> None:
    run = python("-m", "slipstream", "--help")
    assert run.returncode == 0, run.stderr
    assert "launch" in run.stdout


def test_rooms_are_reachable_from_the_package() -> None:
    """As docs write them, in a fresh interpreter, where nobody has imported the room."""
    code = "import slipstream, sys; assert 'torch' not in sys.modules; slipstream.{}"
    shown = sorted(
        {
            name
            for page in (*ROOT.glob("docs/*.md"), ROOT / "README.md")
            for name in re.findall(r"(?<=slipstream\.)[a-z_]+\.[\w.]+(?=[(`])", page.read_text())
        }
    )
    assert "fusion.fuse_patterns" in shown
    lines = [code.format(shown[0]), *(f"slipstream.{name}" for name in shown[1:])]
    run = python("-c", "\n".join(lines))
    assert (run.returncode, run.stderr) == (0, "")
