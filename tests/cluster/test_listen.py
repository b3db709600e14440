"""Stores listen on one interface, and are one run's."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from slipstream.cli import store as command
from slipstream.cluster import connect
from slipstream.cluster.environment import Environment
from slipstream.cluster.listen import TOKEN, admit, new_token, open_store
from slipstream.errors import ClusterError, LaunchError


def listening(port: int) -> Iterator[str]:
    """Addresses on which a port of this machine is listened on, as the kernel says."""
    for table in ("tcp", "tcp6"):
        with open(f"/proc/net/{table}") as file:
            for line in list(file)[1:]:
                _, local, _, state = line.split()[:4]
                address, _, number = local.partition(":")
                if state == "0A" and int(number, 16) == port:
                    yield address


LOOPBACK = "0100007F"


def test_a_store_listens_on_the_interface_of_its_host_alone():
    store = open_store("127.0.0.1", 0, multi_tenant=True)
    assert [*listening(store.port)] == [LOOPBACK]
    # as torch's rendezvous does, on the same port of the same process
    again = TCPStore("127.0.0.1", store.port, is_master=True, multi_tenant=True)
    again.set("a", "b")
    assert store.get("a") == b"b"
    assert [*listening(store.port)] == [LOOPBACK]
    torchs = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert [*listening(torchs.port)] != [LOOPBACK]  # what this is for


def test_all_interfaces_are_listened_on_where_that_is_said():
    store = open_store("0.0.0.0", 0)
    assert [*listening(store.port)] == ["00000000"]


def test_a_host_or_port_that_cannot_be_had_is_named():
    with pytest.raises(LaunchError, match=r"--host 192\.0\.2\.1 --port 0 cannot be used"):
        command.open_store(0, "192.0.2.1")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=f"--port {port} cannot be used: Address already"):
            command.open_store(port)


@pytest.fixture
def debian(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of this host, by which Debian's /etc/hosts gives it an address of its own."""
    ask = socket.getaddrinfo

    def answer(host: str, *args: Any, **kwargs: Any) -> Any:
        names = "node0", "localhost.localdomain"
        return ask("127.0.1.1" if host in names else host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    return "node0"


def test_others_reach_a_name_that_is_loopback_to_its_host_alone(debian: str):
    everywhere = open_store(debian, 0)
    assert [*listening(everywhere.port)] == ["00000000"]
    here = Environment(master_addr=debian, master_port=0, world_size=4, num_nodes=2)
    keeper = connect._keeper(here)
    assert keeper is not None
    assert [*listening(keeper.port)] == ["00000000"]
    alone = connect._keeper(replace(here, num_nodes=1))
    assert alone is not None
    assert [*listening(alone.port)] == ["0101007F"]
    for told in ("127.0.1.1", "localhost.localdomain"):
        here_alone = open_store(told, 0)  # which listens for as long as it is held
        assert [*listening(here_alone.port)] == ["0101007F"]


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ("a", "b", "has a token, and this process has another one"),
        ("a", "", "has a token, and this process has none"),
        ("", "a", "has no token, and this process has one"),
    ],
)
def test_another_run_is_refused(first, second, words):
    store = open_store("127.0.0.1", 0)
    assert admit(store, first, "here:1") == admit(store, first, "here:1")
    with pytest.raises(ClusterError, match=f"the run that meets at here:1 {words}") as caught:
        admit(store, second, "here:1")
    assert TOKEN in str(caught.value)


def test_tokens_are_long_and_differ():
    assert len({new_token() for _ in range(100)}) == 100
    assert len(new_token()) >= 22
