"""Every rank is in the group of its host, once."""

from __future__ import annotations

from hypothesis import given, strategies as st

from slipstream.cluster.topology import ranks_by_host


@given(st.lists(st.sampled_from("abc")))
def test_ranks_are_parted_by_host(hosts: list[str]) -> None:
    by_host = ranks_by_host(hosts)
    assert sorted(rank for ranks in by_host.values() for rank in ranks) == list(range(len(hosts)))
    assert all(hosts[rank] == host for host, ranks in by_host.items() for rank in ranks)
    assert list(by_host) == list(dict.fromkeys(hosts))
