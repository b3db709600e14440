"""Start two ranks of a script, as a launcher would, without importing torch."""

from __future__ import annotations

import os
import socket
import subprocess
import sys


def main() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [sys.executable, *sys.argv[1:]], env={**os.environ, **common, "RANK": str(rank)}
        )
        for rank in range(2)
    ]
    return max(abs(rank.wait()) for rank in ranks)


if __name__ == "__main__":
    sys.exit(main())
