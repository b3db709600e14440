"""The program ``slipstream``, for ``Script(COMMAND_LINE, "launch", ...)``."""

from __future__ import annotations

from pathlib import Path

from slipstream.cli.main import main

COMMAND_LINE = Path(__file__)

if __name__ == "__main__":
    main()
