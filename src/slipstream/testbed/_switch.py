"""Program that is the switch of a testbed with a long line: hands frames on late, and loses some.

``netem`` of the kernel does the same where it is installed; this needs nothing but sockets. It
carries some 20,000 frames a second and core, which is what TCP reaches on lines that lose frames.

argv: seconds of the way, the share of frames that is lost, and the ports. Ends with its parent.
"""

from __future__ import annotations

import random
import select
import socket
import sys
import time
from collections import deque
from contextlib import suppress

ALL_PROTOCOLS, FRAME = 3, 65536
BROADCAST = 1  # bit of the first byte of an address
FORCE_RECEIVE_BUFFER, RECEIVE_BYTES = 33, 32 * 2**20
IGNORE_OUTGOING = 23
SOL_PACKET = 263


def main() -> None:
    """Hand frames on, for ever."""
    delay, loss = float(sys.argv[1]), float(sys.argv[2])
    ports = [open_port(name) for name in sys.argv[3:]]
    print("up", flush=True)
    by_file = {port.fileno(): port for port in ports}
    port_of: dict[bytes, socket.socket] = {}  # by the address of a host
    late: deque[tuple[float, socket.socket, bytes]] = deque()
    chance = random.Random(0)
    ready = select.poll()
    for port in ports:
        ready.register(port, select.POLLIN)
    while True:
        wait = max(0.0, late[0][0] - time.monotonic()) if late else None
        for file, _ in ready.poll(None if wait is None else wait * 1e3):
            come = by_file[file]
            for _ in range(64):
                try:
                    frame = come.recv(FRAME)
                except BlockingIOError:
                    break
                port_of[frame[6:12]] = come
                if chance.random() >= loss:
                    late.append((time.monotonic() + delay, come, frame))
        now = time.monotonic()
        while late and late[0][0] <= now:
            _, come, frame = late.popleft()
            known = None if frame[0] & BROADCAST else port_of.get(frame[:6])
            for port in [known] if known is not None else ports:
                if port is not come:
                    hand_on(port, frame)


def open_port(name: str) -> socket.socket:
    """Open the frames that come into an interface."""
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL_PROTOCOLS))
    port.setsockopt(SOL_PACKET, IGNORE_OUTGOING, 1)
    with suppress(PermissionError):  # an ordinary user has as much as the machine allows
        port.setsockopt(socket.SOL_SOCKET, FORCE_RECEIVE_BUFFER, RECEIVE_BYTES)
    port.bind((name, ALL_PROTOCOLS))
    port.setblocking(False)
    return port


def hand_on(port: socket.socket, frame: bytes) -> None:
    """Send a frame; a full queue loses it, as that of any switch does."""
    with suppress(OSError):
        port.send(frame)


if __name__ == "__main__":
    main()
