"""Start one rank: `launcher` runs this file as a script, and the process becomes the rank.

Imports the standard library alone, which costs a rank about 20 ms.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    # The kernel kills the rank when the launcher ends, even by SIGKILL.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.dup2(1, 2)  # both streams go to one log, in the order in which they are written
    os.execv(sys.executable, [sys.executable, "-u", *sys.argv[1:]])
