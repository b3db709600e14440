"""Program that measures links by plain TCP: a server on each host, a client that measures them.

The client makes three connections to each server: for echoes, for bytes from the server, and for
bytes to the server. The receiving side takes the time. It does not import slipstream, so that it
starts fast on every host.
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
    """Serve one client, then end."""
    with socket.create_server((address, PORT)) as listener:
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # connections inherit it
        with listener.accept()[0] as sock:
            while byte := sock.recv(1):
                sock.sendall(byte)
        with listener.accept()[0] as sock:
            send_until_stopped(sock)
        with listener.accept()[0] as sock:
            sock.sendall(RESULT.pack(bandwidth(sock, warmup, window)))
            drain(sock)


def measure(address: str, warmup: float, window: float) -> dict[str, float]:
    """Bits per second towards ``address`` and back, and the median round trip in seconds."""
    with connect(address) as sock:
        round_trip = statistics.median(echo(sock) for _ in range(ECHOES))
    with connect(address) as sock:
        back = bandwidth(sock, warmup, window)
        abort(sock)
    with connect(address) as sock:
        send_until_stopped(sock)
        (there,) = RESULT.unpack(sock.recv(RESULT.size, socket.MSG_WAITALL))
        abort(sock)
    return {"there": there, "back": back, "round_trip": round_trip}


def echo(sock: socket.socket) -> float:
    """Seconds of the round trip of one byte."""
    start = time.perf_counter()
    sock.sendall(b"x")
    sock.recv(1)
    return time.perf_counter() - start


def send_until_stopped(sock: socket.socket) -> None:
    """Send until the peer answers or closes the connection."""
    block = bytes(BLOCK)
    with suppress(ConnectionError):
        while not select.select([sock], [], [], 0)[0]:
            sock.send(block)


def receive_for(sock: socket.socket, seconds: float) -> float:
    """Bits per second that arrive in ``seconds``."""
    buffer = bytearray(BLOCK)
    count, start = 0, time.perf_counter()
    now = start
    while now - start < seconds:
        count += sock.recv_into(buffer)
        now = time.perf_counter()
    return count * 8 / (now - start)


def bandwidth(sock: socket.socket, warmup: float, window: float) -> float:
    """Bits per second that ``sock`` receives: the median over parts of ``window``.

    The median ignores the parts in which a busy machine delays the sender or this process.
    """
    receive_for(sock, warmup)
    return statistics.median(receive_for(sock, window / PARTS) for _ in range(PARTS))


def drain(sock: socket.socket) -> None:
    """Read until the peer closes: closing with unread data would reset the connection."""
    buffer = bytearray(BLOCK)
    with suppress(ConnectionError):
        while sock.recv_into(buffer):
            pass


def abort(sock: socket.socket) -> None:
    """Let closing drop the queued data, which would fill the link during the next measurement."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def connect(address: str, patience: float = 10.0) -> socket.socket:
    """A connection, retried while the server is still starting."""
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
