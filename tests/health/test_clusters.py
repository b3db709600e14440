"""Hosts that do not fit together, and links that are slow, are named with their fix."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import pytest

from slipstream.health.diagnosis import Diagnosis
from slipstream.health.facts import ClusterFacts, HostFacts, HostLink
from slipstream.health.judge import CLUSTER_CHECKS, judge_cluster
from tests.health.machines import Changes, environ, interfaces, plain, read

GIGABIT = 1e9
HOSTS = ("node0", "node1", "node2", "node3")
VERSIONS = {"python": "3.11.7", "torch": "2.13.0", "slipstream": "0.1.0", "driver": "580.95.05"}
CABLES = {"eth0": 1000, "ens1": 10_000}


def cluster(
    folder: Path,
    changes: Changes | None = None,
    links: Sequence[HostLink] = (),
    versions: dict[str, str] | None = None,
    hosts: Sequence[str] = HOSTS,
) -> ClusterFacts:
    """Hosts of 10 Gbit/s; the last one is changed, and ``links`` take the place of sound ones."""
    facts: list[HostFacts] = []
    for number, host in enumerate(hosts):
        last = number == len(hosts) - 1
        found = read(folder / host, plain(host, f"10.0.0.{number + 1}"), changes if last else None)
        own = VERSIONS | ((versions or {}) if last else {})
        facts.append(found.model_copy(update={"versions": own}))
    changed = {link.hosts: link for link in links}
    sound = [link(a, b) for a, b in combinations(hosts, 2)]
    return ClusterFacts(hosts=tuple(facts), links=tuple(changed.get(s.hosts, s) for s in sound))


def link(first: str, second: str, **figures: object) -> HostLink:
    """A sound link between two of the hosts, but for some figures."""
    sound: dict[str, object] = {
        "addresses": tuple(f"10.0.0.{int(host[-1]) + 1}" for host in (first, second)),
        "latency": 30e-6,
        "rates": (9.4 * GIGABIT, 9.4 * GIGABIT),
        "skew": 0.002,
        "skew_error": 0.0001,
    }
    return HostLink.model_validate({"hosts": (first, second), **sound, **figures})


def not_well(facts: ClusterFacts) -> list[Diagnosis]:
    return [found for found in judge_cluster(facts) if found.status != "ok"]


def test_hosts_that_fit_together_are_well(tmp_path: Path) -> None:
    found = judge_cluster(cluster(tmp_path))
    assert {one.status for one in found} == {"ok"}
    said = {one.check: one.read for one in found}
    assert said["links"] == "9.4 Gbit/s, latency at most 30 us"
    assert said["gloo's interface"] == "eth0"
    assert "interface" not in said  # what gloo would take, as there is proof of what it took
    assert said["clocks"] == "at most 2.1 ms apart"


SLOW = {"rates": (0.9 * GIGABIT, 9.1 * GIGABIT)}
LOST = "node2 (10.0.0.3) does not answer node1 within 5 s"
BROKEN = {
    # changes of the cluster, (check, status, hosts, words of what was read, words of the fix)
    "a firewall between two hosts": (
        {"links": [HostLink(hosts=("node1", "node2"), error=LOST, failed_at="connect")]},
        ("connections", "wrong", ("node1", "node2"), LOST, "open all TCP ports"),
    ),
    "a firewall around a host": (
        {
            "links": [
                HostLink(hosts=(host, "node3"), error=f"{host} is lost", failed_at="connect")
                for host in HOSTS[:3]
            ]
        },
        ("connections", "wrong", ("node3",), "node0 is lost (3 pairs", "open all TCP ports"),
    ),
    "gloo on loopback everywhere": (
        {
            "links": [
                HostLink(hosts=pair, error="node1 listens on 127.0.0.1", failed_at="listen")
                for pair in combinations(HOSTS, 2)
            ]
        },
        ("connections", "wrong", HOSTS, "on 127.0.0.1 (6 pairs", "set GLOO_SOCKET_IFNAME"),
    ),
    "a switch that drops large packets": (
        {"links": [link("node1", "node2", error="no message arrives", failed_at="message")]},
        ("connections", "wrong", ("node1", "node2"), "no message arrives", "mtu 1500"),
    ),
    "one link at a tenth of its rate": (
        {"links": [link("node1", "node3", **SLOW)]},
        ("links", "wrong", ("node1", "node3"), "900 Mbit/s, back 9.1 Gbit/s; the median", "cable"),
    ),
    "all links of a host at a tenth": (
        {"links": [link(host, "node3", **SLOW) for host in HOSTS[:3]]},
        ("links", "wrong", ("node3",), "all 3 links of node3: 900 Mbit/s; the median", "cable"),
    ),
    "both ends announce more": (
        {"hosts": HOSTS[:2], "links": [link("node0", "node1", rates=(GIGABIT, GIGABIT))]},
        ("links", "wrong", ("node0", "node1"), "the interfaces announce 10 Gbit/s", "ethtool"),
    ),
    "gloo took the slow interface": (
        {
            "changes": {
                **interfaces({"eth0": "10.0.0.4", "ens1": "10.0.1.4"}, CABLES, "eth0"),
            },
            "links": [
                link(
                    host,
                    "node3",
                    rates=(0.94 * GIGABIT,) * 2,
                    addresses=(f"10.0.0.{n}", "10.0.0.4"),
                )
                for n, host in enumerate(HOSTS[:3], 1)
            ],
        },
        (
            "gloo's interface",
            "wrong",
            ("node3",),
            "gloo connects over eth0",
            "IFNAME=ens1 on node3",
        ),
    ),
    "jumbo frames on one side": (
        {"changes": {"sys/class/net/eth0/mtu": "9000"}},
        (
            *("packet size", "warning", (*HOSTS[:3], "node3")),
            *("MTU 1500 on node0, node1, node2; 9000 on node3", "mtu 9000 on all hosts"),
        ),
    ),
    "mixed versions": (
        {"versions": {"torch": "2.12.1"}},
        ("versions", "wrong", HOSTS, "torch 2.13.0 on node0, node1, node2; 2.12.1 on", "image"),
    ),
    "mixed drivers": (
        {"versions": {"driver": "570.1"}},
        ("versions", "warning", HOSTS, "driver 580.95.05 on node0, node1, node2; 570.1", "image"),
    ),
    "mixed settings": (
        {"changes": environ(NCCL_ALGO="Tree", NCCL_SOCKET_IFNAME="eth0")},
        ("settings", "warning", HOSTS, "NCCL_ALGO: unset on node0, node1, node2; Tree", "launcher"),
    ),
    "a clock that is ahead": (
        {"links": [link("node0", "node3", skew=90.0)]},
        (
            "clocks",
            "warning",
            ("node0", "node3"),
            "node3 is 90.000 s ahead of node0, ± 0.1",
            "chrony",
        ),
    ),
    "a clock that is behind": (
        {"links": [link("node0", "node3", skew=-90.0)]},
        ("clocks", "warning", ("node0", "node3"), "node0 is 90.000 s ahead of node3", "chrony"),
    ),
    "a loaded host": (
        {"changes": {"proc/loadavg": "14.70 12.00 9.10 15/400 9000"}},
        ("load", "warning", ("node3",), "14.7 processes want to run on 16 CPUs", "top"),
    ),
}


@pytest.mark.parametrize(("changes", "expected"), BROKEN.values(), ids=BROKEN)
def test_a_broken_cluster_is_named_with_its_fix(tmp_path: Path, changes, expected) -> None:
    check, status, hosts, words, fix = expected
    found = not_well(cluster(tmp_path, **changes))
    if check == "gloo's interface":  # such a link is slow, too
        assert found.pop(0).check == "links"
    (one,) = found
    assert (one.check, one.status, set(one.hosts)) == (check, status, set(hosts))
    assert words in one.read
    assert fix in one.fix


def test_every_check_of_a_cluster_is_broken_by_some_cluster() -> None:
    assert {expected[0] for _, expected in BROKEN.values()} == {c.name for c in CLUSTER_CHECKS} | {
        "load"
    }


def test_a_clock_within_the_error_of_its_measurement_is_well(tmp_path: Path) -> None:
    late = link("node0", "node3", skew=1.5, skew_error=0.9)
    assert not_well(cluster(tmp_path, links=[late])) == []


def test_what_two_hosts_have_in_common_is_said_once(tmp_path: Path) -> None:
    busy: Changes = {"proc/loadavg": "99.00 99.00 99.00 1/1 1"}
    one = read(tmp_path / "a", plain("node0"), busy)
    other = read(tmp_path / "b", plain("node1"), busy)
    (found,) = not_well(ClusterFacts(hosts=(one, other)))
    assert (found.check, found.hosts) == ("load", ("node0", "node1"))
