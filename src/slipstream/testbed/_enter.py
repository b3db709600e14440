"""Program that runs a command on a host: ``_enter.py PID COMMAND...``, where PID holds the host.

It enters the namespaces of that process, starts the command in them, forwards signals to it and
exits with its status. If it is killed, the command is killed. It does not import slipstream, so
that it starts fast, and runs as any user.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys

PR_SET_PDEATHSIG = 1
# The user namespace comes first: entering the others needs root in it. Entering a PID namespace
# affects children only.
NAMESPACES = {
    "user": 0x10000000,
    "net": 0x40000000,
    "uts": 0x04000000,
    "pid": 0x20000000,
    "mnt": 0x00020000,
}
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Enter, run, and end with the same status."""
    holder, command = sys.argv[1], sys.argv[2:]
    here = os.getcwd()
    enter(holder)
    os.chdir(here)  # entering a mount namespace moves to its root
    # Blocked until there is a child to forward them to.
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    pipe = os.pipe()
    try:
        child = subprocess.Popen(command, close_fds=False, preexec_fn=lambda: prepare(*pipe))
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127)
    for number in FORWARDED:
        signal.signal(number, lambda number, _: child.send_signal(number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    status = child.wait()
    if status < 0:  # the command was ended by a signal: end by the same one
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


def prepare(reader: int, writer: int) -> None:
    """Let this process, the child, be killed with the parent, and unblock signals.

    Both have the pipe, the parent for as long as it lives: it may have been killed already, and
    its PID does not tell in another namespace.
    """
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.close(writer)
    if select.select([reader], [], [], 0)[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)


def enter(holder: str) -> None:
    """Enter all namespaces of the process ``holder`` that this process is not in."""
    opened = []
    for name, flag in NAMESPACES.items():
        theirs, ours = f"/proc/{holder}/ns/{name}", f"/proc/self/ns/{name}"
        if os.readlink(theirs) != os.readlink(ours):
            opened.append((os.open(theirs, os.O_RDONLY), flag))
    for namespace, flag in opened:
        if libc.setns(namespace, flag):
            sys.exit(f"cannot enter the host: {os.strerror(ctypes.get_errno())}")
        os.close(namespace)


if __name__ == "__main__":
    main()
