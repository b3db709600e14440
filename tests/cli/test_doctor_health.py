"""``slipstream doctor host`` and ``doctor links`` as their users run them."""

from __future__ import annotations

import json
import re
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from slipstream.calibration.links import knock, turns
from slipstream.cli import main
from slipstream.cli.doctor import links
from slipstream.cli.ranks import on_node
from slipstream.errors import ClusterError
from slipstream.health.facts import HostFacts
from slipstream.testbed import Testbed, unavailable
from tests.harness.ranks import free_port
from tests.harness.scripts import Script
from tests.health.machines import LOG, plain, with_gpus, write

_reason = unavailable()
SHM = {"proc/self/mounts": "shm /dev/shm tmpfs rw,size=65536k 0 0"}


def doctor(*words: object, **environ: str | None) -> Result:
    """Run a command of the doctor in this process, on a terminal of 80 columns."""
    terminal = CliRunner(env={"COLUMNS": "80", **environ})
    return terminal.invoke(main.app, ["doctor", *map(str, words)])


def test_a_healthy_host_in_three_lines(tmp_path: Path) -> None:
    ran = doctor("host", "--root", write(tmp_path, plain()))
    assert ran.exit_code == 0, ran.output
    assert ran.output.splitlines() == [
        "node0 is well.",
        "",
        "well: interface, shared memory, open files, load, no RDMA device",
    ]


def test_a_broken_host_says_what_was_read_and_how_to_mend_it(tmp_path: Path) -> None:
    ran = doctor("host", "--root", write(tmp_path, with_gpus(), {**SHM, "sys/module": None}))
    assert ran.exit_code == 1
    lines = ran.output.splitlines()
    assert lines[0] == "node0: 2 things are wrong."
    assert lines[2].split() == ["wrong", "shared", "memory"]
    assert [line.split()[0] for line in lines[3:6]] == ["read", "healthy", "fix"]
    assert max(len(line.rstrip()) for line in lines) <= 80
    assert "well: interface, open files, load, RDMA, RDMA ports" in ran.output


def test_the_well_ones_are_listed_when_asked(tmp_path: Path) -> None:
    ran = doctor("host", "-v", "--root", write(tmp_path, plain()))
    assert re.search(r"^ok\s+shared memory\s+/dev/shm has 31.2 GB", ran.output, re.MULTILINE)
    assert "well:" not in ran.output


def test_json_has_diagnoses_and_facts(tmp_path: Path) -> None:
    log = tmp_path / "nccl.log"
    log.write_text(LOG.format(host="node0", interface="eth0", way="IB/0", algorithm="RING"))
    root = write(tmp_path / "root", with_gpus())
    ran = doctor("host", "--root", root, "--nccl-log", log, "--json")
    assert ran.exit_code == 1
    found = json.loads(ran.output)
    wrong = [one for one in found["diagnoses"] if one["status"] != "ok"]
    assert [(one["check"], one["status"]) for one in wrong] == [("NCCL's network", "wrong")]
    assert HostFacts.model_validate_json(json.dumps(found["facts"])).host == "node0"


RANK = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
WRONG = {
    "no tree": (["host", "--root", "/nowhere"], {}, "has no folder proc"),
    "no log": (["host", "--nccl-log", "/nowhere"], {}, "cannot be read: No such file"),
    "one host": (["links"], {}, "one host has no link"),
    "rate in a rank": (["links", "--rate", "1gbit"], RANK, "no effect without --nodes"),
    "hosts in a rank": (["links", "--nodes", "2"], RANK, "leave out one of the two"),
}


@pytest.mark.parametrize(("words", "environ", "said"), WRONG.values(), ids=WRONG)
def test_mistakes_are_reported_before_anything_starts(
    monkeypatch, capfd, words: list[str], environ: dict[str, str], said: str
) -> None:
    for name, value in ({"COLUMNS": "100"} | environ).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["slipstream", "doctor", *words])
    with pytest.raises(SystemExit) as ended:
        main.main()
    out, err = capfd.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert said in " ".join(err.replace("│", "").split())


def examine_as(monkeypatch, world_size: int) -> int:
    place = {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    sizes = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    for name, value in (place | sizes | {"MASTER_PORT": str(free_port())}).items():
        monkeypatch.setenv(name, value)
    return links.examine(1.0, 80, True, False)


def test_a_rank_that_does_not_come_is_named(monkeypatch) -> None:
    monkeypatch.setattr(links, "JOIN", timedelta(seconds=0.5))
    with pytest.raises(ClusterError, match=r"ranks 1, 2 of 3 have not come to 127.0.0.1:\d+"):
        examine_as(monkeypatch, 3)


def test_ranks_of_one_host_have_no_link(monkeypatch) -> None:
    with pytest.raises(ClusterError, match="all ranks are on one host"):
        examine_as(monkeypatch, 1)


def test_hosts_with_other_facts_have_another_version(monkeypatch) -> None:
    class Later:
        def model_dump_json(self) -> str:
            return '{"versions": {"slipstream": "9.1"}, "colour": "red"}'

    monkeypatch.setattr(links, "read_host", lambda files: Later())
    with pytest.raises(ClusterError, match=r"versions of slipstream .* \(9.1\): install the same"):
        examine_as(monkeypatch, 1)


@pytest.mark.parametrize("count", [2, 3, 4, 7, 8])
def test_all_meet_all_and_nobody_is_in_two_pairs_at_once(count: int) -> None:
    met = [*turns(count)]
    pairs = [pair for turn in met for pair in turn]
    assert sorted(pairs) == [(a, b) for a in range(count) for b in range(a + 1, count)]
    for turn in met:
        busy = [place for pair in turn for place in pair]
        assert len(busy) == len({*busy})


def test_a_port_that_nobody_listens_on_is_refused() -> None:
    address = next((a for a in _own_addresses() if not a.startswith("127.")), None)
    if address is None:
        pytest.skip("this host has loopback only")
    said = knock(f"{address}:{free_port()}", "node0", "node1")
    assert said == f"node0 cannot connect to node1 ({address}): Connection refused"


def _own_addresses() -> list[str]:
    trie = Path("/proc/net/fib_trie").read_text()
    return re.findall(r"\|-- ([\d.]+)\n\s+/32 host LOCAL", trie)


@pytest.mark.skipif(_reason is not None, reason=str(_reason))
def test_a_slow_host_and_a_firewall_are_found_and_named(tmp_path: Path) -> None:
    """node3's link at a hundredth of the rate, so that other work on the machine makes no other one
    as slow; between node1 and node2 frames go to nobody."""
    job = {"seconds": 0.6, "columns": 80, "as_text": False, "verbose": False}
    with Testbed(4, "1gbit") as bed:
        slow = "tc qdisc replace dev eth0 root tbf rate 10mbit burst 80k latency 20ms"
        silent = f"ip neighbour replace {bed.nodes[2].address} lladdr 02:00:00:00:00:99 dev eth0"
        assert bed.popen(bed.nodes[3], slow.split()).wait() == 0
        assert bed.popen(bed.nodes[1], silent.split()).wait() == 0
        ranks = []
        for node in bed.nodes:
            env = dict(word.split("=") for word in on_node(bed, node, [])[1:])
            log, errors = (tmp_path / f"{node.index}.{end}" for end in ("out", "err"))
            place = {"host": (bed, node), "env": env, "log": log, "errors": errors}
            ranks.append(Script(Path(links.__file__), json.dumps(job), **place))
        codes = [rank.wait(280) for rank in ranks]
    assert codes == [1, 0, 0, 0], [file.read_text() for file in tmp_path.glob("*.err")]
    said: dict[str, Any] = json.loads((tmp_path / "0.out").read_text())
    wrong = {one["check"]: one for one in said["diagnoses"] if one["status"] == "wrong"}
    assert wrong.keys() == {"connections", "links"}
    assert wrong["connections"]["hosts"] == ["node1", "node2"]
    assert "does not answer node1 within 5 s" in wrong["connections"]["read"]
    assert wrong["links"]["hosts"] == ["node3"]
    assert "all 3 links of node3" in wrong["links"]["read"]
    found = {tuple(one["hosts"]): one for one in said["facts"]["links"]}
    sound = found["node0", "node1"]
    assert sound["addresses"] == ["198.18.0.1", "198.18.0.2"]
    assert 0 < sound["latency"] == sound["skew_error"]
    assert abs(sound["skew"]) < 1.0  # of one clock
    took = next(one for one in said["diagnoses"] if one["check"] == "gloo's interface")
    assert (took["status"], took["read"]) == ("ok", "eth0")
