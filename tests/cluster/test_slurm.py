"""Slurm's list notations against a writer of them."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from slipstream.cluster.slurm import expand_counts, expand_hosts
from slipstream.errors import ClusterError

names = st.text("abcxyz-.", min_size=1, max_size=4).filter(lambda name: name[0].isalpha())
ranges = st.tuples(st.integers(0, 120), st.integers(0, 30), st.integers(1, 4))


@st.composite
def node_lists(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A node list, and its hosts one by one."""
    items: list[str] = []
    hosts: list[str] = []
    for name in draw(st.lists(names, min_size=1, max_size=4)):
        spans = draw(st.lists(ranges, max_size=3))
        if not spans:
            items.append(name)
            hosts.append(name)
            continue
        written = []
        for first, more, width in spans:
            low, high = f"{first:0{width}d}", f"{first + more:0{width}d}"
            written.append(low if more == 0 else f"{low}-{high}")
            hosts += [f"{name}{n:0{len(low)}d}" for n in range(first, first + more + 1)]
        items.append(f"{name}[{','.join(written)}]")
    return ",".join(items), hosts


@given(node_lists())
def test_a_node_list_names_every_host_in_order(case: tuple[str, list[str]]) -> None:
    nodelist, hosts = case
    assert list(expand_hosts(nodelist)) == hosts


@pytest.mark.parametrize(
    "nodelist", ["", "n[", "n]", "n[1", "n[a]", "n[3-1]", "n[]", "n[1-]", "a,,b", "n[[1]]", "a b"]
)
def test_a_broken_node_list_is_quoted(nodelist: str) -> None:
    with pytest.raises(ClusterError) as error:
        expand_hosts(nodelist)
    assert repr(nodelist) in str(error.value)


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(1, 9)), min_size=1, max_size=6))
def test_counts_repeat(runs: list[tuple[int, int]]) -> None:
    written = ",".join(f"{tasks}(x{nodes})" if nodes > 1 else str(tasks) for tasks, nodes in runs)
    assert list(expand_counts(written)) == [tasks for tasks, nodes in runs for _ in range(nodes)]


@pytest.mark.parametrize("counts", ["", "x", "2(3)", "2(x)", "2,,1", "-1"])
def test_broken_counts_are_quoted(counts: str) -> None:
    with pytest.raises(ClusterError, match="tasks per node"):
        expand_counts(counts)
