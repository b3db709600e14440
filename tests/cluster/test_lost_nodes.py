"""Two nodes whose ranks fail in every way start them again together, also where one node is lost.

The store at which they meet is in this process, and outlives both.
"""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters

from slipstream.cluster._agent import found_backend
from slipstream.cluster.listen import open_store
from tests.harness.command_line import COMMAND_LINE
from tests.harness.ranks import free_port
from tests.harness.scripts import Script

SCRIPT = """
import os, pathlib, signal, sys, time
rank, start = os.environ["RANK"], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
part = pathlib.Path(f"part{rank}")
part.write_text(os.environ["MASTER_PORT"])
part.rename(f"start{start}.rank{rank}")  # whole: who sees it may end this process at once
while not pathlib.Path(f"start{start}.rank{1 - int(rank)}").exists():
    time.sleep(0.02)
if start == 0:
    sys.exit(0 if rank == "1" else 3)
if start == 1:
    os.kill(os.getpid(), signal.SIGSTOP if rank == "0" else signal.SIGKILL)
if start == 2:
    while not pathlib.Path("a node is lost").exists():
        time.sleep(0.02)
    sys.exit(4)
"""


def wait(happened: Callable[[], bool], nodes: dict[str, Script]) -> None:
    until = time.monotonic() + 200
    while not happened():
        assert all(node.poll() is None for node in nodes.values())
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.timeout(400)
def test_nodes_start_their_ranks_again_together(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    store = open_store("127.0.0.1", 0)
    options = ["--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{store.port}"]
    options += ["--max-restarts", "3", "--log-dir", "logs"]

    def begin(name: str) -> Script:
        words = ["launch", *options, "train.py"]
        return Script(COMMAND_LINE, *words, log=tmp_path / name, folder=tmp_path)

    nodes = {name: begin(name) for name in ("stays", "lost")}
    try:
        third = [tmp_path / f"start2.rank{rank}" for rank in (0, 1)]
        wait(lambda: all(path.exists() for path in third), nodes)
        nodes.pop("lost").kill()
        (tmp_path / "a node is lost").touch()
        nodes["new"] = begin("new")
        codes = [node.wait(200) for node in nodes.values()]
    finally:
        for node in nodes.values():
            node.kill()
    said = {name: (tmp_path / name).read_text() for name in ("stays", "lost", "new")}
    assert codes == [0, 0], said
    ports = [[(tmp_path / f"start{n}.rank{r}").read_text() for r in (0, 1)] for n in range(4)]
    assert all(one == other for one, other in ports)
    assert len({one for one, _ in ports}) == 4  # what ranks wrote before is not there
    assert said["stays"].count("all ranks start again") == 3
    assert "was killed by SIGKILL" in said["stays"] + said["lost"]  # the node of rank 1 says so
    assert "did not meet" not in said["new"]


def parameters(join_timeout: int) -> RendezvousParameters:
    """Of a node that knows where to meet; torch itself waits for a second there."""
    endpoint = f"127.0.0.1:{free_port()}"
    more = {"read_timeout": 1, "is_host": False, "join_timeout": join_timeout}
    return RendezvousParameters("c10d", endpoint, "run", 2, 2, **more)


class Said(io.StringIO):
    """Opens the store once somebody has said that it is not there."""

    store: Any = None

    def write(self, text: str) -> int:
        if self.store is None and "nobody is at 127.0.0.1:" in text:
            self.store = open_store("127.0.0.1", int(text.split("127.0.0.1:")[1].split()[0]))
        return super().write(text)


def test_a_node_waits_for_the_first_one_as_long_as_any_may_join(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = Said()
    monkeypatch.setattr(sys, "stderr", said)
    _, store = found_backend(parameters(join_timeout=60))
    store.set("met", "here")
    assert said.store.get("met") == b"here"


def test_a_node_does_not_wait_for_ever() -> None:
    with pytest.raises(RendezvousConnectionError):
        found_backend(parameters(join_timeout=1))
