"""The batch files of examples/cluster/slurm, with stand-ins for Slurm's programs."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from slipstream.cluster.environment import Environment
from tests.harness.ranks import free_port
from tests.harness.scripts import Script

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "examples/cluster/slurm").glob("*.sbatch"))
IDS = [file.name for file in FILES]

# Options of sbatch (manual of Slurm 22.05) that these files may use, and their values.
OPTIONS = {
    "cpus-per-task": r"\d+",
    "exclusive": None,
    "gpus-per-node": r"\d+",
    "job-name": r"\w+",
    "nodes": r"\d+",
    "ntasks-per-node": r"\d+",
    "open-mode": r"append|truncate",
    "output": r"[\w.%-]+",
    "requeue": None,
    "signal": r"(B:)?[A-Z0-9]+(@\d+)?",
    "time": r"(\d+-)?\d+(:\d\d){0,2}",
}
SRUN_OPTIONS = ("--cpus-per-task=", "--kill-on-bad-exit=1")

SRUN = """#!/bin/bash
# Note what the step is; the test starts its tasks.
env -0 > "$STEP.env"
printf '%s\\0' "$@" > "$STEP.words"
exit "${SRUN_CODE:-0}"
"""
SCONTROL = """#!/bin/bash
case "$1" in
  show) seq -f host%g 0 9999 ;; # more than a pipe holds
  *) echo "$@" >> "$STEP.scontrol" ;;
esac
"""
TRAIN = """
import sys, torch, slipstream
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
with slipstream.accelerate(model, torch.optim.SGD(model.parameters(), lr=0.1)) as session:
    session.backward(model(torch.full((1, 2), float(session.rank))).sum())
    session.step()
    weights = model.weight.sum().item()
    print(f"rank {session.rank} of {session.world_size} {sys.argv[1:]} {weights}\\n", end="")
"""


def options(file: Path) -> dict[str, str | None]:
    """What its #SBATCH lines say."""
    lines = re.findall(r"^#SBATCH (.*)$", file.read_text(), re.MULTILINE)
    pairs = [re.fullmatch(r"--([a-z-]+)(?:=(\S+))?", line) for line in lines]
    assert all(pairs), lines
    return {pair[1]: pair[2] for pair in pairs if pair}


def step(
    file: Path, folder: Path, *words: str, **env: str
) -> tuple[int, list[str], dict[str, str]]:
    """Run a batch file: its exit code, the words of its srun, and their variables."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    for stale in folder.glob("step.*"):
        stale.unlink()
    asked = options(file)
    variables = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "STEP": str(folder / "step"),
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "host[0-9999]",
        "SLURM_CPUS_PER_TASK": str(asked["cpus-per-task"]),
        **env,
    }
    done = subprocess.run(
        ["bash", str(file), *words], env=variables, capture_output=True, text=True
    )
    assert not done.stderr
    said = (folder / "step.words").read_text().split("\0")[:-1]
    left = (folder / "step.env").read_text().split("\0")[:-1]
    return done.returncode, said, dict(line.split("=", 1) for line in left)


def command_of(words: list[str]) -> list[str]:
    """The words of srun without its options, which are looked at."""
    count = next(n for n, word in enumerate(words) if not word.startswith("-"))
    assert all(word.startswith(SRUN_OPTIONS) for word in words[:count])
    return words[count:]


def test_there_are_files() -> None:
    assert IDS == ["doctor.sbatch", "launch.sbatch", "requeue.sbatch", "train.sbatch"]


@pytest.mark.parametrize("file", FILES, ids=IDS)
def test_a_file_is_a_batch_file_that_says_what_to_change(file: Path) -> None:
    lines = file.read_text().splitlines()
    assert subprocess.run(["bash", "-n", str(file)], check=False).returncode == 0
    assert lines[0] == "#!/bin/bash"
    assert f"sbatch {file.name}" in lines[1]
    assert lines[2].startswith("# Change: ")
    for name, value in options(file).items():
        allowed = OPTIONS[name]
        assert value is None if allowed is None else re.fullmatch(allowed, str(value)), name
    # sbatch reads no more of them after the first command
    first = next(n for n, line in enumerate(lines) if line and not line.startswith("#"))
    assert not any(line.startswith("#SBATCH") for line in lines[first:])


@pytest.mark.parametrize("name", ["train", "requeue"])
def test_the_tasks_of_a_step_train_together(name: str, tmp_path: Path) -> None:
    file = ROOT / f"examples/cluster/slurm/{name}.sbatch"
    code, said, variables = step(file, tmp_path, "train.py", "--epochs", "3")
    python, unbuffered, script, *words = command_of(said)
    assert (code, python, unbuffered, script) == (0, "python", "-u", "train.py")
    assert variables["OMP_NUM_THREADS"] == "12"
    (tmp_path / script).write_text(TRAIN)
    one_step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}
    one_step |= {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0"}
    one_step |= {"SLURM_STEP_TASKS_PER_NODE": "2", "MASTER_PORT": str(free_port())}
    one_step |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    own = {n: value for n, value in variables.items() if n.startswith(("SLURM_", "SLIPSTREAM_"))}
    tasks = [
        Script(
            tmp_path / script,
            *words,
            env=own | one_step | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank},
            log=tmp_path / f"{rank}.log",
        )
        for rank in ("0", "1")
    ]
    codes = [task.wait(120) for task in tasks]
    printed = [(tmp_path / f"{rank}.log").read_text().split() for rank in ("0", "1")]
    assert codes == [0, 0], printed
    assert [line[:6] for line in printed] == [
        ["rank", rank, "of", "2", "['--epochs',", "'3']"] for rank in ("0", "1")
    ]
    assert printed[0][-1] == printed[1][-1]


def test_every_step_has_a_token_of_its_own(tmp_path: Path) -> None:
    tokens = {step(f, tmp_path, "x.py")[2]["SLIPSTREAM_TOKEN"] for f in (*FILES, *FILES)}
    assert len(tokens) == 2 * len(FILES)
    assert all(re.fullmatch("[0-9a-f]{32}", token) for token in tokens)


@pytest.mark.parametrize(
    ("code", "restarts", "again"),
    [(0, "0", 0), (143, "0", 1), (143, "99", 1), (143, "100", 0), (1, "0", 0)],
)
def test_a_step_that_stopped_for_a_signal_is_queued_again(
    code: int, restarts: str, again: int, tmp_path: Path
) -> None:
    file = ROOT / "examples/cluster/slurm/requeue.sbatch"
    settings = {"SRUN_CODE": str(code), "SLURM_RESTART_COUNT": restarts, "NODE_LOSS_SECONDS": "360"}
    (tmp_path / "sleep").write_text('#!/bin/bash\necho "$1" >> "$STEP.sleep"')
    (tmp_path / "sleep").chmod(0o755)
    assert step(file, tmp_path, "train.py", **settings)[0] == code
    waited = tmp_path / "step.sleep"  # for Slurm to see that a node is lost
    assert (waited.read_text() if waited.exists() else "") == "360\n" * (code == 1)
    asked = tmp_path / "step.scontrol"
    assert (asked.read_text() if asked.exists() else "") == "requeue 4711\n" * again


def test_a_failure_is_the_jobs(tmp_path: Path) -> None:
    for file in FILES:
        assert step(file, tmp_path, "train.py", SRUN_CODE="3")[0] == 3


def test_a_launcher_a_node_meets_the_others_on_the_first(tmp_path: Path) -> None:
    file = ROOT / "examples/cluster/slurm/launch.sbatch"
    assert options(file)["ntasks-per-node"] == "1"
    words = "--nnodes 2 --nproc {} --rdzv-endpoint host0:24711 --max-restarts 3"
    words = f"slipstream launch {words} --log-dir logs-4711 train.py --epochs 3"
    said = command_of(step(file, tmp_path, "train.py", "--epochs", "3")[1])
    assert said == words.format("gpu").split()
    said = command_of(step(file, tmp_path, "train.py", "--epochs", "3", RANKS_PER_NODE="4")[1])
    assert said == words.format("4").split()


def test_the_doctor_measures_on_the_tasks(tmp_path: Path) -> None:
    file = ROOT / "examples/cluster/slurm/doctor.sbatch"
    said = command_of(step(file, tmp_path, "--seconds", "5")[1])
    assert " ".join(said) == "slipstream doctor network --output cluster.yaml --seconds 5"


def test_a_script_of_sbatch_itself_is_no_rank() -> None:
    assert Environment.read({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8"}).source == "none"
