"""The kinds of files, and all that reads each of them."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import torch
import yaml
from typer.testing import CliRunner

import slipstream
from slipstream.cli import main
from slipstream.errors import SlipstreamError
from slipstream.planner.iteration.plan import CommPlan
from slipstream.planner.iteration.simulate import simulate
from slipstream.planner.network.profile import NetworkProfile
from slipstream.report.report import html, read_trials
from slipstream.strategy import Strategy, presets
from slipstream.trace import Trace, chrome
from tests.fuzz.damage import ODD, TENSORS, as_json, broken_bytes, damaged
from tests.planner.test_ranking import UNEVEN

PLACE = re.compile(
    r"line \d+, column \d+|at byte \d+|the key '|\(top level\)|a key of |entry \d+|data\.pkl"
    r"|[\w\]][.\[][^\s:]*: |\n +[\w.\[\]]+: |(this state|checkpoint) is damaged: [^\s:]+: "
    r"|traceEvents\[\d+\]|otherData\.|traceEvents is|: '?data/\d+|this state (is a|has|lacks \[)"
    r"|(is|document is) empty|is damaged|is packed|is there twice|promise more"
    r"|is a (strategy|trace);|no iteration|not a list|directory|truncated|MiB long|whole file"
    r"|in state_dict|another (optimizer|model)'s|this checkpoint (has|is a )"
    r"|[\w\]]: [^\n]*; allowed: |: a tensor of "
    r"|\n  [^\n]+: "
)
"""Words of a refusal that say where in the file, or that it is the whole of it."""
COMMANDS = CliRunner(env={"COLUMNS": "120"})


class Crash(Exception):
    """A reader ended with a stack trace, or with an error that does not say where."""


def refusal(path: Path, read: Callable[[], object]) -> str | None:
    """The words with which a file is refused; None: it is accepted.

    Raises:
        Crash: it is neither.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # slipstream's own words
            read()
    except SlipstreamError as error:
        return str(error)
    except Exception as error:
        raise Crash(f"{path}: {type(error).__name__}: {error!s:.300}") from error
    return None


def command(*words: object) -> None:
    """Run a command of ``slipstream`` in this process; raises what it raises."""
    result = COMMANDS.invoke(main.app, [*map(str, words)], catch_exceptions=False)
    assert "Traceback" not in result.output


@dataclass
class Kind:
    """One kind of file.

    Args:
        folder: for files that are good.
    """

    folder: Path
    name: ClassVar[str] = ""
    suffixes: ClassVar[Sequence[str]] = ()

    def document(self, chance: Random) -> Any:
        """A good document."""
        raise NotImplementedError

    def content(self, chance: Random) -> bytes:
        """A file that is damaged, in its values or in its bytes."""
        document = self.document(chance)
        how = chance.randrange(4)
        data = self.written(chance, damaged(chance, document) if how else document)
        return broken_bytes(chance, data) if how in (0, 3) else data

    def written(self, chance: Random, document: Any) -> bytes:
        return as_json(document).encode()

    def read(self, path: Path) -> object:
        """Read it by the public name."""
        raise NotImplementedError

    def commands(self, path: Path, chance: Random) -> None:
        """Read it by the command line, too."""

    def names_the_place(self, words: str, path: Path) -> bool:
        """Whether a refusal says which file it is and where in it the problem is."""
        return str(path) in words and PLACE.search(words.replace(str(path), "")) is not None


class StrategyFile(Kind):
    name, suffixes = "strategy", (".yaml", ".yml", ".json")
    GOOD: ClassVar[list[Any]] = [
        *(preset.settings for preset in presets().values()),
        Strategy().document(full=True),
        {"gradients": {"split": {"kind": "by_index", "last": [1, 4]}, "codec": "powersgd"}},
        {
            "gradients": {
                "codec": {"kind": "by_name", "rules": [{"match": "*.bias", "codec": "half"}]}
            }
        },
        {"local": {"steps": 8, "fragments": 2, "codec": "int4", "rendezvous": "node0:29400"}},
        {"precision": {"kind": "autocast", "dtype": "fp16", "loss_scale": "dynamic"}},
        {"memory": {"recompute": {"every": 2}, "offload": {"to": "disk", "folder": "x"}}},
        {"data": {"prefetch": {"workers": 2}, "cache": {"gigabytes": 1}, "balance": {}}},
        {"trace": {"steps": 10, "skip": 2, "folder": "x"}, "compute": {"compile": True}},
        {"parallel": {"pipeline": {"ranks": 2, "micro_batches": 4}}},
    ]

    def document(self, chance: Random) -> Any:
        return chance.choice(self.GOOD)

    def written(self, chance: Random, document: Any) -> bytes:
        return as_or_in_yaml(chance, document)

    def read(self, path: Path) -> object:
        strategy = Strategy.load(path)
        assert str(strategy)
        return strategy

    def commands(self, path: Path, chance: Random) -> None:
        command("strategy", chance.choice(("check", "show")), path)


def as_or_in_yaml(chance: Random, document: Any) -> bytes:
    """JSON, which is YAML, too, or the block style."""
    if chance.random() < 0.5:
        try:
            return yaml.safe_dump(document, sort_keys=False).encode()
        except (yaml.YAMLError, UnicodeEncodeError, ValueError):
            pass
    return as_json(document).encode()


@dataclass
class TraceFile(Kind):
    name, suffixes = "trace", (".json", ".json.gz")
    cluster: Path = field(init=False)

    def __post_init__(self) -> None:
        work, where = UNEVEN
        traced = simulate(work, CommPlan.of(Strategy(), work.gradients), where, steps=2)
        said = {"strategy": Strategy().document(full=True), "clock_error": [0.0, 1e-5]}
        self.trace = Trace(traced.events, traced.meta | said)
        self.cluster, path = self.folder / "cluster.yaml", self.folder / "trace.json"
        where.save(self.cluster)
        chrome.write(self.trace, path)
        self.good = chrome.load_json(path, "")

    def document(self, chance: Random) -> Any:
        entries = [e for e in self.good["traceEvents"] if e["ph"] == "X"]
        if chance.random() < 0.5:  # its description
            return self.good | {"traceEvents": entries}
        return self.good | {"traceEvents": entries[: chance.randrange(1, 9)]}

    def content(self, chance: Random) -> bytes:
        if chance.random() < 0.3:
            document = self.document(chance)
            meta = damaged(chance, document["otherData"])
            if isinstance(meta, dict):
                meta = {**meta, "format": document["otherData"]["format"]}
            return as_json(document | {"otherData": meta}).encode()
        return super().content(chance)

    def read(self, path: Path) -> object:
        return chrome.read(path)

    def commands(self, path: Path, chance: Random) -> None:
        match chance.randrange(8):
            case 0 | 1 | 2:
                command("trace", "summary", path, "--per-rank")
            case 3 | 4 | 5:
                command("trace", "advise", path)
            case 6:
                command("plan", "--trace", path, "--cluster", self.cluster)
            case _:
                command("report", path, "-o", self.folder / "report.html")

    def names_the_place(self, words: str, path: Path) -> bool:
        return super().names_the_place(words, path)


@dataclass
class ClusterFile(TraceFile):
    name, suffixes = "cluster", (".yaml",)

    def document(self, chance: Random) -> Any:
        return yaml.safe_load(self.cluster.read_text())

    def content(self, chance: Random) -> bytes:
        return Kind.content(self, chance)

    def written(self, chance: Random, document: Any) -> bytes:
        return as_or_in_yaml(chance, document)

    def read(self, path: Path) -> object:
        return NetworkProfile.load(path)

    def commands(self, path: Path, chance: Random) -> None:
        trace = self.folder / "trace.json"
        match chance.randrange(3):
            case 0:
                command("trace", "advise", trace, "--cluster", path)
            case 1:
                command("plan", "--trace", trace, "--cluster", path)
            case _:
                where = ("--nodes", 4, "--ranks-per-node", 2)
                command("plan", "--trace", trace, "--cluster", path, *where)


@dataclass
class TrialsFile(TraceFile):
    name, suffixes = "trials", (".json",)

    def document(self, chance: Random) -> Any:
        one = {"name": "by_bytes 4", "strategy": {"gradients": {"split": "single"}}}
        one |= {
            "predicted": 0.5,
            "measured": 0.4,
            "spread": 0.01,
            "reason": "",
            "status": "measured",
        }
        failed = one | {
            "measured": None,
            "spread": None,
            "status": "failed",
            "reason": "exit code 1",
        }
        return [one, failed]

    def content(self, chance: Random) -> bytes:
        return Kind.content(self, chance)

    def read(self, path: Path) -> object:
        return read_trials(path)

    def commands(self, path: Path, chance: Random) -> None:
        html([("run", self.trace)], trials=read_trials(path))


@dataclass
class CheckpointFile(Kind):
    name, suffixes = "checkpoint", (".pt",)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        batches = [torch.rand(4, 3)] * 4
        settings = {"precision": {"kind": "autocast", "dtype": "fp16", "loss_scale": "dynamic"}}
        settings["precision"]["emulate"] = True
        self.session = slipstream.accelerate(model, optimizer, batches, settings)
        for batch in self.session.loader:
            self.session.backward(self.session.model(batch).square().mean())
            self.session.step()
        self.good = self.session.checkpoint()
        self.good["session"] |= {
            "split": {"kind": "single"},
            "ready_order": {
                "names": [name for name, _ in model.named_parameters()],
                "firings": [1] * 4,
                "sparse_dims": [0] * 4,
            },
            "codecs": [{"0.weight": {"error": torch.ones(12), "q": torch.ones(2, 2)}}],
        }

    def document(self, chance: Random) -> Any:
        good = {**self.good, "session": self.good["session"]}
        if chance.random() < 0.6:  # most of a checkpoint is the model's and the optimizer's
            good = {"session": good["session"]}
        return good

    def content(self, chance: Random) -> bytes:
        document, odd = self.document(chance), (*ODD, *TENSORS * 4)
        how = chance.randrange(4)
        data = self.written(chance, damaged(chance, document, odd) if how else document)
        return broken_bytes(chance, data) if how == 0 else data

    def written(self, chance: Random, document: Any) -> bytes:
        file = io.BytesIO()
        if chance.random() < 0.02:
            document = {"model": Attack()}
        torch.save(document, file)
        return file.getvalue()

    def read(self, path: Path) -> object:
        state = slipstream.read_checkpoint(path)
        try:
            self.session.restore(state)
        except SlipstreamError as error:  # it does not know the file
            raise type(error)(f"{path}: {error}") from error
        finally:
            self.session.restore(self.good)  # it is usable after a refusal
        return state


class Attack:
    """Code, where data is expected."""

    def __reduce__(self) -> Any:
        return exec, ("open('HACKED', 'w')",)


KINDS = (StrategyFile, TraceFile, ClusterFile, TrialsFile, CheckpointFile)


@contextmanager
def quietly() -> Iterator[None]:
    """Without what numpy and torch say of strange numbers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
