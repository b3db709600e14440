"""``slipstream tune`` on real ranks that train, and what it refuses before any starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from slipstream.cli import main as cli
from slipstream.cli.tune import command as command, place
from slipstream.errors import LaunchError
from slipstream.planner.network.profile import NetworkProfile
from slipstream.planner.search import candidates
from slipstream.strategy import Strategy
from slipstream.strategy.codec import SCATTERED
from slipstream.trace import chrome
from slipstream.tuner import exact_search, tune
from tests.cli.running import SMALL
from tests.planner.networks import ethernet_profile as cluster
from tests.testbed.traces import marked, wait_for_marked

TRAIN = """
import os, pathlib, sys

strategy = pathlib.Path(os.environ["SLIPSTREAM_STRATEGY"]).read_text()
if "fail" in sys.argv and "codec" in strategy:
    raise RuntimeError("not with a codec")

import torch
import slipstream

torch.manual_seed(0)
layers = [torch.nn.Linear(256, 256) for _ in range(4)]
model = torch.nn.Sequential(*layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
session = slipstream.accelerate(model, optimizer)
while True:
    session.backward(session.model(torch.ones(8, 256)).square().mean())
    session.step()
"""

SHARDED = """
import os, pathlib, time

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from slipstream.adapters.fsdp2 import accelerate_fsdp

coded = "codec:" in pathlib.Path(os.environ["SLIPSTREAM_STRATEGY"]).read_text()
dist.init_process_group("gloo")
mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))


class Paused(torch.nn.Linear):
    def forward(self, x):
        time.sleep(0.0 if coded else 0.5)
        return super().forward(x)


model = torch.nn.Sequential(Paused(64, 64), torch.nn.Linear(64, 64))
for module in (model[0], model):
    fully_shard(module, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
accelerate_fsdp(model, optimizer)
while True:
    model(torch.ones(8, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def slipstream(monkeypatch, capfd, tmp_path):
    """Run a command line in this process: its exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    Path("tuned.py").write_text(TRAIN)
    cluster(2).save("cluster.yaml")
    Path("optimal.yaml").write_text("gradients: {split: optimal}\n")

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["slipstream", "tune", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capfd.readouterr()
        return (ended.value.code or 0, out, " ".join(err.replace("\u2502", " ").split()))

    return run


@pytest.mark.timeout(600)  # several trainings of real ranks, one after the other
def test_it_measures_real_ranks_and_writes_what_it_found(slipstream, monkeypatch, forks) -> None:
    doctor = place.TrialPlace.doctor

    def small(where: place.TrialPlace, output: Path, seconds: float) -> list[str]:
        return [sys.executable, "-m", "small", *doctor(where, output, seconds)[3:]]

    Path("small.py").write_text(SMALL)
    monkeypatch.setattr(place.TrialPlace, "doctor", small)
    monkeypatch.setattr(tune, "LEAST_MEASURED", 1)
    # A codec is tried, come what may, and nothing is fast enough for a comparison in pairs.
    monkeypatch.setattr(tune, "MODEL_ERROR", 1.0)
    monkeypatch.setattr(tune, "_noise", lambda first: 0.99)
    monkeypatch.setattr(place, "MOST_SECONDS", 1.0)
    monkeypatch.setattr(exact_search, "STEPS", 1)
    monkeypatch.setattr(candidates, "ACCUMULATE", ())  # a codec alone, which fails
    every = candidates.coded
    monkeypatch.setattr(candidates, "coded", lambda *given: every(*given)[:1])
    given = ["--steps", "3", "--budget", "1h"]  # no test of the budget, on a busy machine neither
    Path("own.yaml").write_text(
        "{gradients: {accumulate: 2, split: single}, precision: autocast}\n"
    )
    marker = f"tuned-{uuid.uuid4()}"
    script = ["--", "tuned.py", "fail", marker]
    code, out, err = slipstream(*given, "--allow-lossy", "--strategy", "own.yaml", *script)
    assert code == 0, err
    log = json.loads(Path("trials.json").read_text())
    assert set(log[0]) == {
        "name", "strategy", "predicted", "interval", "measured", "spread", "reason", "status"
    }  # fmt: skip
    first, kept, *others = [trial for trial in log if trial["status"] != "not measured"]
    assert first["reason"] == "the baseline"
    assert first["measured"] > 0
    assert kept["reason"].startswith("kept of the exact: ")
    assert "measured in turn" in kept["reason"]
    assert kept["strategy"]["gradients"]["accumulate"] == 2
    assert {trial["status"] for trial in others} == {"failed", "measured"}
    for trial in others:
        coded = "codec" in trial["strategy"].get("gradients", {})
        assert trial["status"] == ("failed" if coded else "measured")
        assert not {"channels_last", "compile"} & {*trial["strategy"].get("compute", {})}
        assert not coded or "RuntimeError: not with a codec" in trial["reason"]
    best = Strategy.load("strategy.yaml")
    assert best.gradients.accumulate == 2
    assert best.trace.steps is None
    assert "trials" in out
    assert "baseline" in err
    [network] = Path().glob("slipstream-logs/tune-*/network")
    assert set(os.listdir(network)) == {"cluster.yaml", "output.log"}
    found = NetworkProfile.load(network / "cluster.yaml")
    assert (found.world_size, found.hosts, found.ranks_per_host) == (2, 1, 2)
    assert found.networks.keys() == {"world"}
    measured = (network / "output.log").read_text()
    assert "world: 2 ranks" in measured
    assert "all-gather" in measured
    assert measured.count("written to ") == 1
    assert marked(marker) == []


@pytest.mark.timeout(600)
def test_under_fully_shard_a_codec_is_measured_and_taken(slipstream, monkeypatch, forks) -> None:
    monkeypatch.setattr(tune, "SCATTERED", SCATTERED[1:2])  # one of four, and no pairs
    monkeypatch.setattr(tune.Tuner, "_compare", lambda self, one: (0.5, 0.5, 0.5))
    Path("sharded.py").write_text(SHARDED)
    given = ["--steps", "2", "--budget", "1h", "--allow-lossy"]
    code, out, err = slipstream(*given, "--", "sharded.py")
    assert code == 0, err
    log = json.loads(Path("trials.json").read_text())
    assert [trial["status"] for trial in log] == ["measured"] * 2
    assert "(lossy) is 50.0% faster than the baseline" in " ".join(out.split())
    codec = Strategy.load("strategy.yaml").gradients.codec
    assert type(codec) is SCATTERED[1]
    traces = sorted(Path().glob("slipstream-logs/tune-*/*/trace.json"))
    taken = [chrome.read(trace).meta["strategy"] for trace in traces]
    assert taken == [{}, {"gradients": {"codec": codec.document()}}]


def test_a_script_that_never_steps_ends_in_a_box(slipstream, forks) -> None:
    Path("never.py").write_text("print('done')")
    marker = f"tuned-{uuid.uuid4()}"
    code, out, err = slipstream("--budget", "1h", "--", "never.py", marker)
    assert (code, out) == (2, "")
    assert "TraceError" in err
    assert "the baseline run: it ended without" in err
    assert "by slipstream.accelerate() or an adapter" in err
    assert not Path("strategy.yaml").exists()
    assert marked(marker) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--strategy", "optimal.yaml", "--", "nope.py"], "tuning starts from the default"),
        (["--", "nope.py"], "'nope.py' does not exist"),
        (["--budget", "soon", "tuned.py"], "--budget 'soon'"),
        (["--ranks", "1", "tuned.py"], "a single rank exchanges nothing"),
        (["--nodes", "0", "tuned.py"], "0 nodes"),
        (["--nodes", "2", "--rate", "fast", "tuned.py"], "is not a link rate"),
        (["--strategy", "nope.yaml", "tuned.py"], "nope.yaml"),
        (["--strategy", "very_slow_network", "tuned.py"], "start from a strategy without it"),
        (["--allow-lossy", "--cluster", "nope.yaml", "tuned.py"], "nope.yaml"),
        (["--cluster", "cluster.yaml", "tuned.py"], "no effect without --allow-lossy"),
        (["--updates", "900", "tuned.py"], "--updates has no effect without --allow-lossy"),
        (["--to-loss", "3", "tuned.py"], "add --allow-lossy"),
        (["--rate", "300mbit", "tuned.py"], "--rate has no effect without --nodes"),
        (["--losses", "losses.json", "tuned.py"], "no effect without --to-loss"),
        (["--allow-lossy", "--to-loss", "3", "--steps", "9", "tuned.py"], "allowed: 40 or more"),
        (["--budget", "20s", "tuned.py"], "too short to start a training twice; allowed: 30s"),
        (["--log", "no/such/file.json", "tuned.py"], "--log no/such/file.json: cannot be written"),
        (["--log", "tuned.py", "tuned.py"], "--log tuned.py: the file name must end in .json"),
        (
            ["-o", "all.json", "--log", "all.json", "tuned.py"],
            "--log all.json would overwrite the file of --output; choose another one",
        ),
        (["-o", "strategy.txt", "tuned.py"], "must end in .yaml"),
        (["-o", "optimal.yaml", "tuned.py"], "optimal.yaml exists and would be overwritten"),
        (["--strategy", "exact", "-o", "optimal.yaml", "tuned.py"], "would be overwritten"),
        (["--strategy", "optimal.yaml", "-o", "optimal.yaml", "nope.py"], "'nope.py' does not"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_found_before_anything_starts(slipstream, words, message) -> None:
    code, out, err = slipstream(*words)
    assert (code, out) == (2, "")
    assert message in err
    assert not Path("slipstream-logs").exists()


def test_what_norms_exclude_can_be_tried_from_a_strategy_that_records_them() -> None:
    start = command._start(Strategy.load({"trace": {"steps": 20, "norms": True}}))
    assert start.with_gradients(codec="int8").trace.steps == 20


def test_a_folder_of_logs_that_cannot_be_made_is_named(slipstream) -> None:
    Path("slipstream-logs").touch()
    code, _, err = slipstream("tuned.py")
    assert code == 2
    assert "cannot be made: Not a directory; start it in a folder that can be written" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_while_a_trial_runs_it_leaves_no_process(tmp_path, number) -> None:
    (tmp_path / "tuned.py").write_text("import time; time.sleep(100)")
    marker = f"tuned-{uuid.uuid4()}"
    argv = [sys.executable, "-m", "slipstream", "tune", "--", "tuned.py", marker]
    (tmp_path / "trials.json").write_text("[]")  # of an earlier run
    with (
        (tmp_path / "said").open("w") as said,
        subprocess.Popen(argv, cwd=tmp_path, stderr=said) as run,
    ):
        assert len(wait_for_marked(marker, 4)) == 4  # tuner, launcher, two ranks
        run.send_signal(number)
        assert run.wait(90) == 128 + number
    assert (tmp_path / "said").read_text().endswith("stopped: no strategy was written\n")
    assert marked(marker) == []


def test_under_a_launcher_it_says_how_to_run_it(slipstream, monkeypatch) -> None:
    environment = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    code, _, err = slipstream("tuned.py")
    assert code == 2
    assert "as rank 1" in err
    assert "slipstream tune --ranks N -- train.py" in err
    for name in environment:
        monkeypatch.delenv(name)


@pytest.mark.parametrize("text", ["", "10", "m", "-5m", "0s", "5 days"])
def test_a_budget_is_a_number_and_a_unit(text: str) -> None:
    with pytest.raises(LaunchError, match="such as 5m or 1h"):
        command.parse_budget(text)
