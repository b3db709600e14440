"""Program that runs a command on a host: ``_enter.py PID COMMAND...``, where PID holds the host.

It enters the namespaces of that process, starts the command in them, passes signals on to it and
ends as it ends. If it is killed, the command is killed. It never imports slipstream: it must start
fast, as any user.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys

PR_SET_PDEATHSIG = 1
# The user namespace first: being root in it is what allows to enter the others. The PID namespace
# is that of children only.
NAMESPACES = {
    "user": 0x10000000,
    "net": 0x40000000,
    "uts": 0x04000000,
    "pid": 0x20000000,
    "mnt": 0x00020000,
}
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Enter, run, and end with the same status."""
    holder, command = sys.argv[1], sys.argv[2:]
    here = os.getcwd()
    enter(holder)
    os.chdir(here)  # entering a mount namespace moves to its root
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    try:
        child = subprocess.Popen(command, close_fds=False, preexec_fn=prepare)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127)
    for number in PASSED_ON:
        signal.signal(number, lambda number, _: child.send_signal(number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    status = child.wait()
    if status < 0:  # ended by a signal, so end by it too
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


def prepare() -> None:
    """In the child: die with the parent, and receive signals again."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)


def enter(holder: str) -> None:
    """Move into all namespaces of the process ``holder`` that are not this process's own."""
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
