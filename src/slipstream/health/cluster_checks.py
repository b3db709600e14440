"""Checks across hosts: what must be the same on all, and the links between them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from slipstream.health.diagnosis import Verdict, health_check
from slipstream.health.facts import ClusterFacts, HostLink
from slipstream.health.host_checks import GLOO, better_interface, described
from slipstream.testbed import format_rate

MUST_MATCH = ("python", "torch", "slipstream", "nccl")
"""Versions that must be the same; of the kernel and the driver it is only better."""
OF_A_HOST = ("IFNAME", "NCCL_IB_HCA", "DEBUG_FILE", "NCCL_TOPO_FILE", "NCCL_HOSTID")
"""Ends of settings that may differ between hosts."""
LARGEST_SKEW = 1.0
SLOW = 0.5
"""Of the other links, or of what the interfaces announce."""
FIXES = {
    "come": "look whether its rank still runs",
    "listen": "set GLOO_SOCKET_IFNAME on every host to the interface that joins them",
    "message": "large packets are lost on the way: set one MTU on both hosts and the switch (ip "
    "link set INTERFACE mtu 1500)",
}
"""What to do about links that have failed before or after they connect."""
ONE_CONNECTION = 10e9
"""Bits per second that one connection of TCP reaches on any host: more may be announced."""


def _values(values: dict[str, str]) -> tuple[str, tuple[str, ...]]:
    """Values by host in words, and the hosts; the value that most have comes first.

    Example:
        >>> _values({"a": "2.13", "b": "2.12", "c": "2.13"})
        ('2.13 on a, c; 2.12 on b', ('a', 'c', 'b'))
    """
    by_value: dict[str, list[str]] = {}
    for host, value in values.items():
        by_value.setdefault(value, []).append(host)
    ordered = sorted(by_value.items(), key=lambda item: -len(item[1]))
    words = "; ".join(f"{value} on {', '.join(hosts)}" for value, hosts in ordered)
    words = ordered[0][0] if len(ordered) == 1 else words
    return words, tuple(host for _, hosts in ordered for host in hosts)


@health_check(
    "versions",
    reads="installed packages, `/proc/driver/nvidia/version`, the kernel",
    healthy="the same on all hosts",
    effect="mixed: ranks disagree, crash or hang; kernels and drivers may differ, in speed, too",
    fix="install the same versions on all hosts, from one file of constraints or one image",
)
def versions(cluster: ClusterFacts) -> Iterator[Verdict]:
    """Name versions that differ."""
    mixed = False
    for name in sorted({name for facts in cluster.hosts for name in facts.versions}):
        values = {facts.host: facts.versions.get(name, "none") for facts in cluster.hosts}
        if len(set(values.values())) > 1:
            words, hosts = _values(values)
            mixed = True
            yield Verdict(
                "wrong" if name in MUST_MATCH else "warning", f"{name} {words}", hosts=hosts
            )
    if not mixed:
        yield Verdict("ok", "the same on all hosts")


@health_check(
    "settings",
    reads="variables and files of NCCL and gloo",
    healthy="the same on all hosts, but for names of interfaces and devices",
    effect="ranks choose different algorithms or networks, and hang",
    fix="set them the same everywhere: pass the variables on by the launcher",
)
def settings(cluster: ClusterFacts) -> Iterator[Verdict]:
    """Name settings that differ."""
    for name in sorted({name for facts in cluster.hosts for name in facts.variables}):
        values = {facts.host: facts.setting(name) or "unset" for facts in cluster.hosts}
        if len(set(values.values())) > 1 and not name.endswith(OF_A_HOST):
            words, hosts = _values(values)
            yield Verdict("warning", f"{name}: {words}", hosts=hosts)


@health_check(
    "connections",
    reads="a connection each way between each two hosts, to a port that is free, within seconds",
    healthy="every host reaches every other",
    effect="a firewall, gloo on loopback, or a switch that drops large packets: ranks do not meet, "
    "or hang",
    fix="open all TCP ports between the hosts: those from 1024 on are chosen at random",
)
def reached(cluster: ClusterFacts) -> Iterator[Verdict]:
    """Name hosts that do not reach each other."""
    bad = [link for link in cluster.links if link.error]
    for hosts, group in _gathered(cluster, bad):
        more = f" ({len(group)} pairs of hosts like this)" if len(group) > 1 else ""
        yield Verdict("wrong", group[0].error + more, FIXES.get(group[0].failed_at, ""), hosts)
    if cluster.links and not bad:
        yield Verdict("ok", "all hosts reach each other")


def _gathered(
    cluster: ClusterFacts, bad: Sequence[HostLink]
) -> Iterator[tuple[tuple[str, ...], list[HostLink]]]:
    """Gather bad links: all if none is good; those of a host without a good one; else each."""
    pairs = {link.hosts for link in bad}
    if 1 < len(bad) == len(cluster.links):
        yield tuple(facts.host for facts in cluster.hosts), [*bad]
        return
    named: set[tuple[str, str]] = set()
    for host in (facts.host for facts in cluster.hosts):
        own = [link for link in cluster.links if host in link.hosts]
        if len(own) > 1 and all(link.hosts in pairs for link in own):
            named |= {link.hosts for link in own}
            yield (host,), own
    for link in bad:
        if link.hosts not in named:
            yield link.hosts, [link]


def _ends(cluster: ClusterFacts) -> Iterator[tuple[str, str]]:
    """Hosts, and the address that gloo had there, as `/proc/net/tcp` says."""
    ends = {
        (host, address): None
        for link in cluster.links
        for host, address in zip(link.hosts, link.addresses, strict=True)
        if address
    }
    yield from ends


@health_check(
    "gloo's interface",
    reads="the local address of gloo's connections in `/proc/net/tcp`, `/sys/class/net`",
    healthy="the fastest interface that is up",
    effect="a slow or virtual one: exchanges take many times as long",
    fix="set GLOO_SOCKET_IFNAME on every host",
)
def gloo(cluster: ClusterFacts) -> Iterator[Verdict]:
    """Judge the interface that gloo took, by proof."""
    fine = {}
    for host, address in _ends(cluster):
        facts = cluster.of(host)
        chosen = facts.interface_of(address)
        if chosen is None:
            continue
        if (better := better_interface(facts, chosen)) is not None:
            yield Verdict(
                "wrong",
                f"gloo connects over {described(facts, chosen)}; there is "
                f"{described(facts, better)}",
                f"export {GLOO}={better.name} on {host}",
                (host,),
            )
        else:
            fine[host] = chosen.name
    if fine:
        words, hosts = _values(fine)
        yield Verdict("ok", words, hosts=hosts)


@health_check(
    "packet size",
    reads="the MTU of the interfaces that gloo took",
    healthy="the same on all hosts",
    effect="jumbo frames on one side: frames stay small; where the switch carries only small ones, "
    "long messages stall while short ones arrive",
    fix="ip link set INTERFACE mtu 9000 on all hosts and the switch, or 1500 on all",
)
def mtu(cluster: ClusterFacts) -> Iterator[Verdict]:
    """Judge packet sizes."""
    mtus = {}
    for host, address in _ends(cluster):
        chosen = cluster.of(host).interface_of(address)
        if chosen is not None and chosen.mtu is not None:
            mtus[host] = str(chosen.mtu)
    if mtus:
        words, hosts = _values(mtus)
        mixed = len(set(mtus.values())) > 1
        yield Verdict("warning" if mixed else "ok", f"MTU {words}", hosts=hosts)


@health_check(
    "clocks",
    reads="the time of both hosts in round trips of gloo; the error is half of the shortest one",
    healthy="within a second of each other",
    effect="apart: logs of ranks do not fit together, certificates and tokens fail",
    fix="start a time service (chrony, systemd-timesyncd) on all hosts",
)
def clocks(cluster: ClusterFacts) -> Iterator[Verdict]:
    """Name clocks that are apart."""
    links = [link for link in cluster.links if not link.error]
    apart = [link for link in links if abs(link.skew) - link.skew_error > LARGEST_SKEW]
    for link in apart:
        ahead, behind = link.hosts[::-1] if link.skew > 0 else link.hosts
        read = f"{ahead} is {abs(link.skew):.3f} s ahead of {behind}"
        yield Verdict("warning", f"{read}, ± {1e3 * link.skew_error:.1f} ms", hosts=link.hosts)
    if links and not apart:
        most = max(abs(link.skew) + link.skew_error for link in links)
        yield Verdict("ok", f"at most {1e3 * most:.1f} ms apart")


@health_check(
    "links",
    reads="latency and bandwidth of gloo between each two hosts, what both interfaces announce",
    healthy="at least half of the other links' median, and of what is announced up to 10 Gbit/s",
    effect="a slow link: all ranks wait for it",
    fix="look at the cable, port and switch of these hosts (ethtool INTERFACE; ip -s link shows "
    "errors), and at what else sends there",
)
def links(cluster: ClusterFacts) -> Iterator[Verdict]:
    """Name links that are slower than they should be."""
    slow = slow_links(cluster)
    for hosts, group in _gathered(cluster, slow):
        there, back = map(format_rate, group[0].rates)
        first, second = group[0].hosts
        what = f"{first} to {second}: {there}, back {back}"
        if len(group) > 1:
            whose = f"all {len(group)} links" + (f" of {hosts[0]}" if len(hosts) == 1 else "")
            what = f"{whose}: {_rates(group)}"
        yield Verdict("wrong", f"{what}; {_slow(cluster, group[0])}", hosts=hosts)
    if fine := [link for link in cluster.links if not link.error and link not in slow]:
        latency = max(link.latency for link in fine)
        yield Verdict("ok", f"{_rates(fine)}, latency at most {latency * 1e6:.0f} us")


def slow_links(cluster: ClusterFacts) -> list[HostLink]:
    """The links that are slower than they should be."""
    return [link for link in cluster.links if _slow(cluster, link)]


def _slow(cluster: ClusterFacts, link: HostLink) -> str:
    """Why a link is slow; empty: it is not."""
    others = [other.rate for other in cluster.links if other is not link and not other.error]
    median = statistics.median_high(others) if others else 0.0
    announced = _announced(cluster, link)
    if link.error:
        return ""
    if link.rate < SLOW * median:
        return f"the median of the others is {format_rate(median)}"
    if announced and link.rate < SLOW * min(announced, ONE_CONNECTION):
        return f"the interfaces announce {format_rate(announced)}"
    return ""


def _rates(links: Sequence[HostLink]) -> str:
    slow, fast = (format_rate(choose(link.rate for link in links)) for choose in (min, max))
    return slow if slow == fast else f"{slow} to {fast}"


def _announced(cluster: ClusterFacts, link: HostLink) -> float | None:
    """Bits per second of the slower interface; None: one announces nothing."""
    ends = zip(link.hosts, link.addresses, strict=True)
    found = [cluster.of(host).interface_of(address) for host, address in ends if address]
    speeds = [one.speed for one in found if one is not None and one.speed]
    return min(speeds) if len(speeds) == len(link.hosts) else None
