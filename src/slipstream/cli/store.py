"""``slipstream store``: where jobs that come and go meet."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from typer import Option

from slipstream.errors import LaunchError

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

console = Console(stderr=True)


def store(
    port: Annotated[int, Option(help="Port that it listens on.", min=1, max=65535)] = 29400,
) -> None:
    """Keep what jobs under local.rendezvous have in common, until Ctrl-C.

    Start it on a machine that stays; the jobs may come and go. A run needs a store of its own.

    [dim]slipstream store --port 29400[/dim]
    """
    keeper = open_store(port)
    console.print(f"jobs meet at port {keeper.port}; Ctrl-C ends the store")
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        console.print("the store has ended")


def open_store(port: int) -> TCPStore:
    """Open a store for one run; port 0: one that is free.

    Raises:
        LaunchError: the port is taken.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # late: slow to import

    try:
        return TCPStore(
            "0.0.0.0",
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(minutes=1),
        )
    except (RuntimeError, OSError) as error:
        raise LaunchError(
            f"--port {port} cannot be used: {str(error).strip().splitlines()[0]}; give another one"
        ) from error
