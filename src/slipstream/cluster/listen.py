"""Stores that listen: on one interface, and for one run.

[Note: The token of a run]
torch's store asks nobody who he is: who reaches its port can read and write all of it. The token
does not change that. It keeps apart runs that meet at one address by mistake: a digest of it stands
in the store, who has another one is refused, and all keys of a run begin with it. A network whose
other users are not trusted must be closed by other means (docs/security.md).
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
import socket
from contextlib import suppress
from datetime import timedelta
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

from slipstream.cluster.environment import LOOPBACK
from slipstream.errors import ClusterError

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torch.distributed.distributed_c10d import Store

TOKEN = "SLIPSTREAM_TOKEN"
"""The variable with the token of a run; the same for all its processes."""
KEY = "slipstream/token"
_log = logging.getLogger(__name__)


def run_token() -> str:
    """The token of this process's run; empty: it has none."""
    return os.environ.get(TOKEN, "")


def new_token() -> str:
    """A token that nobody can guess."""
    return secrets.token_urlsafe(16)


def digest(token: str) -> str:
    """The name of a run, from which nobody learns its token.

    Example:
        >>> digest(""), digest("secret")
        ('open', '6cf790792e3d9e73')
    """
    return hashlib.sha256(f"slipstream {token}".encode()).hexdigest()[:16] if token else "open"


def admit(store: Store, token: str, where: str) -> str:
    """Enter a store for the run of this token: the first one claims it. Returns its digest.

    Raises:
        ClusterError: it is another run's.
    """
    own = digest(token)
    found = store.compare_set(KEY, "", own).decode(errors="replace")
    if not hmac.compare_digest(found.encode(), own.encode()):
        theirs, ours = ["no token", "one"] if found == digest("") else ["a token", "another one"]
        ours = ours if token else "none"
        raise ClusterError(
            f"the run that meets at {where} has {theirs}, and this process has {ours}: give all "
            f"processes of a run the same {TOKEN}, or let it meet at another address"
        )
    return own


def open_store(host: str, port: int, *, alone: bool = False, **options: Any) -> TCPStore:
    """Open torch's store on the interface of ``host`` alone; port 0: a free one.

    torch by itself listens on all interfaces, whatever host it is given.

    Args:
        host: an address of this machine, or a name of it.
        alone: whether nobody comes from other hosts. Else a name that is this machine's for itself
            alone, as Debian's 127.0.1.1, means all interfaces.
        options: more arguments of ``torch.distributed.TCPStore``.

    Raises:
        OSError: the host is none of this machine, or the port is taken.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # late: slow to import

    family, kind, _, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    if not alone and _is_own_name(host, str(address[0])):
        address = ("::" if family == socket.AF_INET6 else "0.0.0.0", port)
    with socket.socket(family, kind) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(socket.SOMAXCONN)
        where, port = listener.getsockname()[:2]
        everywhere = {"0.0.0.0": "127.0.0.1", "::": "::1"}
        _log.info("a store listens on %s, port %d", where, port)
        return TCPStore(
            everywhere.get(where, where),
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
            **{"timeout": timedelta(minutes=1), **options},
        )


def _is_own_name(host: str, address: str) -> bool:
    """Whether a host has this address under that name for itself alone, as Debian's 127.0.1.1."""
    if any(name in host for name in (*LOOPBACK, "loopback")):  # ip6-localhost, say
        return False
    with suppress(ValueError):
        ip_address(host)
        return False
    found = ip_address(address)
    return found.is_loopback or found.is_link_local
