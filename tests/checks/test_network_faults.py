"""Links that are cut, for ever or for a moment, between emulated hosts."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from slipstream.testbed import Testbed, unavailable
from slipstream.testbed.network import shape
from tests.harness.scripts import Script

TIMEOUT, CUT = 8.0, 2
"""Of the run, and the host whose link is cut."""
_reason = unavailable()
pytestmark = pytest.mark.skipif(_reason is not None, reason=str(_reason))


@pytest.fixture
def bed() -> Iterator[Testbed]:
    with Testbed(nodes=3, rate="1gbit") as bed:
        yield bed


def start(bed: Testbed, folder: Path, env: Mapping[str, str] | None = None) -> list[Script]:
    """A rank on each host; returns once all of them train."""
    script = Path(__file__).parent / "on_hosts.py"
    ranks = []
    for node in bed.nodes:
        rank = {
            "RANK": str(node.index),
            "WORLD_SIZE": str(len(bed.nodes)),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": bed.nodes[0].address,
            "MASTER_PORT": "29500",
            **(env or {}),
        }
        place = {"host": (bed, node), "env": rank, "log": log_of(folder, node.index)}
        ranks.append(Script(script, str(folder), str(TIMEOUT), **place))
    wait_until_all_train(ranks, folder)
    return ranks


def log_of(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.log"


def ended(ranks: list[Script], folder: Path) -> list[str]:
    """What ranks have said, all of which fail."""
    said = []
    for number, rank in enumerate(ranks):
        assert rank.wait(120)
        said.append(log_of(folder, number).read_text())
    return said


def wait_until_all_train(ranks: list[Script], folder: Path) -> None:
    for path in folder.glob("trains*"):
        path.unlink()
    while not all((folder / f"trains{rank}").exists() for rank in range(len(ranks))):
        assert all(rank.poll() is None for rank in ranks), log_of(folder, 0).read_text()
        time.sleep(0.05)


def link(bed: Testbed, order: str) -> None:
    node = bed.nodes[CUT]
    argv = ["ip", "link", "set", node.interface, order]
    assert bed.popen(node, argv).wait() == 0


def set_rate(bed: Testbed, bits: int) -> None:
    for node in bed.nodes:
        argv = ["tc", *shape(node.interface, bits).replace(" add ", " change ").split()]
        assert bed.popen(node, argv).wait() == 0


def nobody_was_alarmed(ranks: list[Script], folder: Path) -> None:
    wait_until_all_train(ranks, folder)
    assert not [*folder.glob("autopsy*/autopsy.json")]


@pytest.mark.timeout(600)  # three faults of one training, one after the other
def test_a_link_that_comes_back_or_is_slow_harms_nobody_and_a_cut_ends_all_ranks(bed, tmp_path):
    ranks = start(bed, tmp_path)
    for _ in range(2):
        link(bed, "down")
        time.sleep(1.0)
        link(bed, "up")
        time.sleep(1.0)
    time.sleep(TIMEOUT)
    nobody_was_alarmed(ranks, tmp_path)

    set_rate(bed, 10_000_000)  # a hundredth
    time.sleep(2 * TIMEOUT)
    nobody_was_alarmed(ranks, tmp_path)

    set_rate(bed, 1_000_000_000)
    link(bed, "down")
    said = ended(ranks, tmp_path)
    for rank, words in enumerate(said):
        assert "HangError" in words, said
        if rank == CUT:  # it sees nobody else
            assert "store has not answered" in words
        else:
            assert f"rank {CUT} (host node{CUT}) is silent" in words
            assert "its host down, or its link cut" in words


STORE = """
import sys, time
from torch.distributed import TCPStore
store = TCPStore(sys.argv[1], 29500, is_master=True, wait_for_workers=False)
print("listens", flush=True)
time.sleep(1000)
"""


def test_ranks_whose_store_is_gone_train_on_and_say_so_when_they_fail(bed, tmp_path):
    first, script, log = bed.nodes[0], tmp_path / "store.py", tmp_path / "store.log"
    script.write_text(STORE)
    store = Script(script, first.address, host=(bed, first), log=log)
    while not (log.exists() and "listens" in log.read_text()):
        assert store.poll() is None, log.read_text()
        time.sleep(0.02)
    ranks = start(bed, tmp_path, {"TORCHELASTIC_USE_AGENT_STORE": "True"})
    store.kill()
    time.sleep(2 * TIMEOUT)
    wait_until_all_train(ranks, tmp_path)
    ranks[CUT].kill()
    for rank, said in enumerate(ended(ranks, tmp_path)):
        told = re.search("HangError: .*the run's store (is gone, too|has not answered)", said)
        assert rank == CUT or told, said
