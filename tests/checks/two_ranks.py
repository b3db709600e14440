"""Start two ranks of a script at $MASTER_PORT, as a launcher would, without importing torch."""

from __future__ import annotations

import os
import subprocess
import sys


def main() -> int:
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, *sys.argv[1:]], env={**os.environ, **common, "RANK": str(rank)}
        )
        for rank in range(2)
    ]
    return max(abs(rank.wait()) for rank in ranks)


if __name__ == "__main__":
    sys.exit(main())
