"""Start one rank: `launcher` runs this file as a script, and it becomes the rank.

Never imports anything but the standard library: it costs a rank some 20 ms.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    # However the launcher ends, kill -9 included, no rank outlives it.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.dup2(1, 2)  # one log a rank, its two streams in the order in which they were written
    os.execv(sys.executable, [sys.executable, "-u", *sys.argv[1:]])
