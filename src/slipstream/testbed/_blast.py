"""Program that measures links by plain TCP: it serves on one host, or measures from another.

The measuring side makes three connections to each serving one: for echoes, for bytes towards
itself, for bytes towards the server. Whoever receives takes the time. It never imports slipstream:
it must start fast, on every host.
"""

from __future__ import annotations

import json
import select
import socket
import statistics
import struct
import sys
import time
from contextlib import suppress

PORT = 5201
ECHOES = 20
PARTS = 8
RESULT = struct.Struct("!d")
BLOCK = 256 * 1024


def main() -> None:
    """``serve ADDRESS WARMUP WINDOW`` or ``measure ADDRESS,... WARMUP WINDOW``, in seconds."""
    role, addresses = sys.argv[1], sys.argv[2].split(",")
    warmup, window = map(float, sys.argv[3:])
    if role == "serve":
        serve(addresses[0], warmup, window)
    else:
        print(json.dumps([measure(address, warmup, window) for address in addresses]))


def serve(address: str, warmup: float, window: float) -> None:
    """Answer one measuring peer, then end."""
    with socket.create_server((address, PORT)) as listener:
        with accept(listener) as sock:
            while byte := sock.recv(1):
                sock.sendall(byte)
        with accept(listener) as sock:
            blast(sock)
        with accept(listener) as sock:
            sock.sendall(RESULT.pack(carried(sock, warmup, window)))
            drain(sock)


def measure(address: str, warmup: float, window: float) -> dict[str, float]:
    """Bits per second towards ``address`` and back, and the median round trip in seconds."""
    with connect(address) as sock:
        round_trip = statistics.median(echo(sock) for _ in range(ECHOES))
    with connect(address) as sock:
        back = carried(sock, warmup, window)
        abort(sock)
    with connect(address) as sock:
        blast(sock)
        (there,) = RESULT.unpack(sock.recv(RESULT.size, socket.MSG_WAITALL))
        abort(sock)
    return {"there": there, "back": back, "round_trip": round_trip}


def echo(sock: socket.socket) -> float:
    """Seconds for one byte to go and come back."""
    start = time.perf_counter()
    sock.sendall(b"x")
    sock.recv(1)
    return time.perf_counter() - start


def blast(sock: socket.socket) -> None:
    """Send until the peer answers or hangs up."""
    block = bytes(BLOCK)
    with suppress(ConnectionError):
        while not select.select([sock], [], [], 0)[0]:
            sock.send(block)


def receive(sock: socket.socket, seconds: float) -> float:
    """Bits per second that arrive within ``seconds``."""
    buffer = bytearray(BLOCK)
    count, start = 0, time.perf_counter()
    now = start
    while now - start < seconds:
        count += sock.recv_into(buffer)
        now = time.perf_counter()
    return count * 8 / (now - start)


def carried(sock: socket.socket, warmup: float, window: float) -> float:
    """Bits per second of the link behind ``sock``: the median over parts of ``window``.

    The median passes over the parts in which a busy machine lets the sender or this process wait.
    """
    receive(sock, warmup)
    return statistics.median(receive(sock, window / PARTS) for _ in range(PARTS))


def drain(sock: socket.socket) -> None:
    """Read until the peer hangs up, so that what was sent to it is not lost."""
    buffer = bytearray(BLOCK)
    with suppress(ConnectionError):
        while sock.recv_into(buffer):
            pass


def abort(sock: socket.socket) -> None:
    """Hang up and drop what is queued: it must not fill the link under the next measurement."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def accept(listener: socket.socket) -> socket.socket:
    """The next connection, without delays for small messages."""
    sock, _ = listener.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def connect(address: str, patience: float = 10.0) -> socket.socket:
    """A connection, tried again while the peer is still starting."""
    end = time.perf_counter() + patience
    while True:
        try:
            sock = socket.create_connection((address, PORT), timeout=patience)
        except ConnectionRefusedError:
            if time.perf_counter() > end:
                raise
            time.sleep(0.002)
        else:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock


if __name__ == "__main__":
    main()
