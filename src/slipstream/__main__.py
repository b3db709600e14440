"""``slipstream``, and ``python -m slipstream`` where that script is not on the path."""

from __future__ import annotations

import sys

try:
    from slipstream.cli.main import main
except KeyboardInterrupt:  # torch takes seconds
    sys.exit(130)

if __name__ == "__main__":
    main()
