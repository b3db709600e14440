"""Rates and plans: pure text in, pure data out."""

from __future__ import annotations

import pytest

from slipstream.errors import TestbedError
from slipstream.testbed.network import MOST_NODES, SMALLEST_BURST, Distance, make_nodes, plan, shape
from slipstream.testbed.rate import format_rate, parse_rate


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("1gbit", 10**9),
        ("2.5gbit", 2_500_000_000),
        ("300mbit", 300 * 10**6),
        ("5000kbit", 5 * 10**6),
        (" 10 GBit ", 10**10),
        ("1mbit", 10**6),
        ("100gbit", 10**11),
    ],
)
def test_rates(text: str, bits: int) -> None:
    assert parse_rate(text) == bits


@pytest.mark.parametrize(
    "text",
    [
        "",
        "fast",
        "1",
        "1gb",
        "1gbps",
        "-1gbit",
        "0mbit",
        "1e3mbit",
        "999kbit",
        "101gbit",
        "1 gbit x",
    ],
)
def test_a_wrong_rate_is_refused_with_examples(text: str) -> None:
    with pytest.raises(TestbedError, match=r"1mbit to 100gbit, such as 300mbit") as refused:
        parse_rate(text)
    assert repr(text) in str(refused.value)


def test_a_formatted_rate_reads_in_the_larger_unit_as_soon_as_it_rounds_to_it() -> None:
    rates = (1e6, 99.96e6, 999.4e6, 999.6e6, 1.25e9, 100e9)
    assert [format_rate(rate) for rate in rates] == [
        "1 Mbit/s",
        "100 Mbit/s",
        "999 Mbit/s",
        "1 Gbit/s",
        "1.25 Gbit/s",
        "100 Gbit/s",
    ]


@pytest.mark.parametrize("count", [1, 3, MOST_NODES])
def test_a_plan_joins_every_node_to_the_switch_and_shapes_both_ends(count: int) -> None:
    nodes = make_nodes(count)
    planned = plan(nodes, 10**9, Distance())

    assert len({node.address for node in nodes}) == count
    assert [host.name for host in planned.hosts] == [node.name for node in nodes]
    for node, host in zip(nodes, planned.hosts, strict=True):
        port = f"port{node.index}"
        assert f"link add eth0 type veth peer name {port} netns 1" in host.ip
        assert f"address add {node.address}/24 dev eth0" in host.ip
        assert host.tc == [shape("eth0", 10**9)]
        assert f"link set {port} master bridge up" in planned.switch.ip
        assert shape(port, 10**9) in planned.switch.tc
        assert f"{node.address} {node.name}\n" in planned.names
    assert len(planned.switch.tc) == count


@pytest.mark.parametrize("count", [-1, 0, MOST_NODES + 1])
def test_a_wrong_number_of_nodes_is_refused(count: int) -> None:
    with pytest.raises(TestbedError, match=f"{count} nodes: a testbed has 1 to"):
        make_nodes(count)


def test_the_bucket_grows_with_the_rate() -> None:
    assert "burst 125000b" in shape("eth0", 10**9)
    assert "burst 81920b" in shape("eth0", 3 * 10**8)  # a packet of 64 KB fits
    assert "burst 81920b" in shape("eth0", 10**8)
    assert "burst 1250000b" in shape("eth0", 10**10)
    assert f"burst {SMALLEST_BURST}b" in shape("eth0", 10**6)
