"""``slipstream doctor network`` as its users run it, and what its report says."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from slipstream.cli import main
from slipstream.cli.doctor import command
from slipstream.cli.doctor.report import report
from slipstream.planner.network.curve import Curve
from slipstream.planner.network.profile import NetworkProfile
from slipstream.testbed import unavailable
from tests.cli.running import SMALL
from tests.planner.networks import SIZES, ring_profile as cluster

_reason = unavailable()
NETWORK = ["doctor", "network", "--seconds", "1", "-o", "cluster.yaml"]


def slipstream(python: str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command line in ``folder``, as small.py."""
    (folder / "small.py").write_text(SMALL)
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return subprocess.run(
        [python, "-m", "small", *words],
        cwd=folder,
        env=environ | {"COLUMNS": "100"},
        text=True,
        capture_output=True,
        timeout=170,
    )


@pytest.mark.skipif(_reason is not None, reason=str(_reason))
def test_it_measures_draws_and_saves_on_emulated_hosts(tmp_path: Path, forks: str) -> None:
    """There, ranks have a launcher; alone on this host: test_tune.py."""
    hosts = ["--nodes", "2", "--ranks-per-node", "2", "--rate", "1gbit"]
    ran = slipstream(forks, tmp_path, *NETWORK, *hosts)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = NetworkProfile.load(tmp_path / "cluster.yaml")
    assert (found.world_size, found.hosts, found.ranks_per_host) == (4, 2, 2)
    assert found.networks.keys() == {"world", "intra", "inter"}
    for kind in found.networks:
        assert f"{kind}: {found.networks[kind].ranks} ranks" in ran.stdout
    assert "all-gather" in ran.stdout
    assert "written to cluster.yaml" in ran.stdout
    assert ran.stdout.count("written") == 1
    others = {"slipstream-logs", "small.py", "__pycache__"}
    assert set(os.listdir(tmp_path)) - others == {"cluster.yaml"}


WRONG = {
    "no yaml": (["-o", "cluster.txt"], {}, "must end in .yaml or .yml"),
    "no folder": (["-o", "no/cluster.yaml"], {}, "cannot be written"),
    "no rate": (["--nodes", "2", "--rate", "fast"], {}, "'fast' is not a link rate"),
    "rate of no link": (["--rate", "1gbit"], {}, "--rate has no effect without --nodes"),
    "ranks of no host": (["--ranks-per-node", "2"], {}, "--ranks-per-node has no effect without"),
    "one rank": (["--ranks", "1"], {}, "--ranks"),
    "ranks here and there": (["--ranks", "2", "--nodes", "2"], {}, "leave out one of the two"),
    "one emulated rank": (["--nodes", "1"], {}, "--nodes 1 is a single rank"),
    "half an environment": ([], {"RANK": "0"}, "WORLD_SIZE"),
    "hosts in a rank": (
        ["--nodes", "2"],
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
        "leave out one of the two",
    ),
    "ranks in a rank": (
        ["--ranks", "4"],
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
        "--ranks 4 starts ranks, but a launcher has started this one already",
    ),
}


@pytest.mark.parametrize(("words", "variables", "said"), WRONG.values(), ids=WRONG)
def test_mistakes_are_reported_before_anything_starts(
    tmp_path: Path, monkeypatch, capfd, words, variables, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in ({"COLUMNS": "100"} | variables).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["slipstream", "doctor", "network", *words])
    with pytest.raises(SystemExit) as ended:
        main.main()
    out, err = capfd.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert said in " ".join(err.replace("│", "").split())
    assert os.listdir(tmp_path) == []


class Became(Exception):
    """Which program this process is now."""


@pytest.mark.parametrize(
    ("words", "module", "said"),
    [
        (["network", "--seconds", "2"], command.MEASURE, {"file": "cluster.yaml", "seconds": 2.0}),
        (["links", "--seconds", "2"], command.LINKS, {"seconds": 2.0, "as_text": True}),
    ],
    ids=["network", "links"],
)
def test_under_a_launcher_it_becomes_the_rank_that_measures(
    tmp_path: Path, monkeypatch, words: list[str], module: str, said: dict[str, object]
) -> None:
    def become(*program: object) -> None:
        raise Became(*program)

    monkeypatch.chdir(tmp_path)
    rank = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in rank.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "execv", become)
    monkeypatch.setattr(sys, "argv", ["slipstream", "doctor", *words])
    with pytest.raises(Became) as became:
        main.main()
    program, argv = became.value.args
    assert (program, argv[:-1]) == (sys.executable, [sys.executable, "-m", module])
    assert said.items() <= json.loads(argv[-1]).items()
    assert os.listdir(tmp_path) == []


def test_a_launcher_of_one_rank_counts_as_none(tmp_path: Path, monkeypatch) -> None:
    started = []
    monkeypatch.chdir(tmp_path)
    rank = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in rank.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("it became that rank"))
    monkeypatch.setattr(command, "run_on_this_host", lambda *given: started.append(given[2]) or 0)
    for words in (["network", "--ranks", "4"], ["links"]):
        monkeypatch.setattr(sys, "argv", ["slipstream", "doctor", *words])
        with pytest.raises(SystemExit) as ended:
            main.main()
        assert ended.value.code == (0 if "network" in words else 2)  # one host has no link
    assert started == [4]


def test_a_single_rank_is_an_error(tmp_path: Path, monkeypatch, capfd) -> None:
    job = {"file": "cluster.yaml", "seconds": 1.0, "terminal": False, "columns": 80}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [command.MEASURE, json.dumps(job)])
    monkeypatch.delitem(sys.modules, command.MEASURE, raising=False)  # it runs as the program
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(command.MEASURE, run_name="__main__")
    out, err = capfd.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert err.startswith("ClusterError: 1 rank has no network to measure")
    assert os.listdir(tmp_path) == []


def drawn(found: NetworkProfile) -> str:
    console = Console(width=80)
    with console.capture() as shown:
        console.print(report(found))
    return shown.get()


def test_the_report_says_what_was_measured() -> None:
    text = drawn(cluster(4, 2))
    assert max(map(len, text.splitlines())) <= 80
    for expected in (
        "world: 8 ranks, all ranks",
        "intra: 2 ranks, the ranks of each host",
        "inter: 4 ranks, across hosts, one rank of each",
        "world: up to 0.999 Gbit/s over each rank's link",
        "computing takes 1.25 times as long",
        "an exchange 1.50 times",
    ):
        assert expected in " ".join(text.split()), text
    assert "warning" not in text
    rows = [line.split() for line in text.splitlines() if line.startswith("all-reduce")]
    assert rows[0] == ["all-reduce", "1", "KB", "0.714", "0.011", "0.020", "+0.0%"]


def test_the_report_warns_of_a_fit_that_is_off() -> None:
    fine = cluster()
    odd = Curve.fit([(m, 2e-3 if m == 2**20 else 1e-4 + 1e-9 * m) for m in SIZES])
    world = fine.networks["world"].model_copy(update={"reduce_scatter": odd})
    text = " ".join(drawn(fine.model_copy(update={"networks": {"world": world}})).split())
    assert "by more than 15%" in text
    assert re.search(r"world reduce_scatter: the fit is \d+% off in 1 MB\.\.10 MB", text)
    assert text.count("the fit is") == 1
