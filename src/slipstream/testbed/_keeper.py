"""Program that creates the hosts of a testbed, keeps them, and ends them by ending itself.

It runs as process 1 of a PID namespace: when it ends, for whatever reason, the kernel kills every
process of every host and drops their namespaces, links and queues. It ends when stdin closes or
when the owner, whose pidfd is the argument, is gone. It does not import slipstream, so that it
starts fast, and runs as any user.

stdin: one line of JSON, the ``Plan`` and the paths of the tools. stdout: one line of JSON, the
process that holds each host, numbered as the owner sees processes; or the error.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

CLONE_NEWUTS, CLONE_NEWNET = 0x04000000, 0x40000000
SIOCETHTOOL, ETHTOOL_STXCSUM, ETHTOOL_STSO, ETHTOOL_SGSO = 0x8946, 0x17, 0x1F, 0x24


def main() -> None:
    """Build the plan from stdin, answer, and wait for the end."""
    owner = int(sys.argv[1])
    order = json.loads(sys.stdin.readline())
    try:
        result: dict[str, Any] = {"pids": build(order["plan"], order["tools"])}
    except (OSError, RuntimeError) as error:
        result = {"error": str(error)}
    print(json.dumps(result), flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # orphans become children of process 1: reap them
    select.select([sys.stdin, owner], [], [])
    os._exit(0)


def build(plan: dict[str, Any], tools: dict[str, str]) -> list[int]:
    """Start one process for each host and join them by the switch; returns those processes."""
    hosts = [start_host(host, tools) for host in plan["hosts"]]
    pids = [answer(host) for host in hosts]
    set_up(plan["switch"], tools)
    if plan["program"]:
        start_switch(plan["program"])
    for host in hosts:
        print("the switch is up", file=host, flush=True)
    for host in hosts:
        answer(host)
    # Not earlier: the hosts read from the outer /proc which numbers the owner sees.
    run([tools["mount"], "-t", "proc", "proc", "/proc"])
    with tempfile.NamedTemporaryFile("w") as names:
        names.write(plan["names"])
        names.flush()
        os.chmod(names.name, 0o644)
        run([tools["mount"], "--bind", names.name, "/etc/hosts"])
    return pids


def answer(host: TextIO) -> int:
    """The process number that a host answers; anything else is its error."""
    reply = host.readline().strip()
    if not reply.isdecimal():
        raise RuntimeError(reply or "a host ended during its setup")
    return int(reply)


def start_switch(arguments: Sequence[str]) -> None:
    """Start the program that hands frames on; it ends with this process."""
    program = [sys.executable, "-I", str(Path(__file__).with_name("_switch.py")), *arguments]
    switch = subprocess.Popen(
        program, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert switch.stdout is not None
    if (answered := switch.stdout.readline()) != b"up\n":
        words = (answered + switch.stdout.read()).decode().split("\n")
        raise RuntimeError(f"the switch: {' '.join(words[-2:])}")


def start_host(host: dict[str, Any], tools: dict[str, str]) -> TextIO:
    """Fork a process that sets up its namespaces and stays; returns the connection to it."""
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        be_host(host, tools, theirs.makefile("rw"))
    theirs.close()
    return ours.makefile("rw")


def be_host(host: dict[str, Any], tools: dict[str, str], line: TextIO) -> NoReturn:
    """Set up the namespaces in two steps, each answered with this process's number; hold them."""
    try:
        unshare(CLONE_NEWNET | CLONE_NEWUTS)
        socket.sethostname(host["name"])
        set_up(host, tools)
        print(os.readlink("/proc/self"), file=line, flush=True)
        line.readline()
        run([tools["ip"], "-batch", "-"], host["plug"])
        print(os.readlink("/proc/self"), file=line, flush=True)
    except Exception as error:
        print(f"{host['name']}: {error}", file=line, flush=True)
    while True:
        signal.pause()


def set_up(namespace: dict[str, Any], tools: dict[str, str]) -> None:
    """Set up the network namespace of this process."""
    # Without IPv6 link-local addresses: duplicate address detection would delay the interface.
    ipv6 = Path("/proc/sys/net/ipv6/conf/default/addr_gen_mode")
    if ipv6.exists():
        ipv6.write_text("1")
    # Linux's default congestion control instead of this machine's, for comparable measurements.
    with contextlib.suppress(OSError):  # an ordinary user may set only algorithms that root allows
        Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text("cubic")
    for name, value in namespace["settings"].items():
        Path("/proc/sys/net/ipv4", name).write_text(value)
    for tool in ("ip", "tc"):
        run([tools[tool], "-batch", "-"], namespace[tool])
    for interface in namespace["plain"]:
        make_frames_plain(interface)


def make_frames_plain(interface: str) -> None:
    """Let the kernel cut what is sent into frames, and add up their checksums."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for setting in (ETHTOOL_STSO, ETHTOOL_SGSO, ETHTOOL_STXCSUM):
            value = ctypes.create_string_buffer(struct.pack("II", setting, 0))
            name = interface.encode()
            fcntl.ioctl(any_socket, SIOCETHTOOL, struct.pack("16sP", name, ctypes.addressof(value)))


def run(argv: list[str], lines: Sequence[str] = ()) -> None:
    """Run a tool with ``lines`` as input; its messages become the error."""
    text = "".join(line + "\n" for line in lines)
    done = subprocess.run(argv, input=text, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)}: {' '.join(done.stderr.split())}")


def unshare(flags: int) -> None:
    """``unshare(2)``; Python has ``os.unshare`` from 3.12 on."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags):
        raise OSError(ctypes.get_errno(), "unshare: " + os.strerror(ctypes.get_errno()))


if __name__ == "__main__":
    main()
