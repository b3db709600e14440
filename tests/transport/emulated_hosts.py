"""Hosts for ranks that share one: each sees the names of its own host alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import torch.distributed as dist

from slipstream.transport import hosts


@contextmanager
def on_hosts(where: Sequence[int]) -> Iterator[None]:
    """Put each rank of the world on the host ``where[rank]``, while it lasts.

    A rank binds and looks for names among those of its host, as in namespaces of the kernel, which
    ``test_hierarchical_on_hosts.py`` uses.
    """
    host = where[dist.get_rank()]
    with patch.object(hosts, "_address", lambda name: f"\0slipstream-{host}-{name.hex()}"):
        yield
