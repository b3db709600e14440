"""``slipstream store``: where jobs or nodes that come and go meet."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from typer import Option

from slipstream.cluster import listen
from slipstream.cluster.listen import TOKEN, new_token, run_token
from slipstream.errors import LaunchError

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

console = Console(stderr=True)


def store(
    port: Annotated[int, Option(help="Port that it listens on.", min=1, max=65535)] = 29400,
    host: Annotated[
        str, Option(help="Name or address of the interface that it listens on.")
    ] = "127.0.0.1",
) -> None:
    """Keep what jobs under local.rendezvous have in common, or nodes of launch, until Ctrl-C.

    Start it on a machine that stays; the jobs may come and go. A run needs a store of its own.
    Only jobs with its token in SLIPSTREAM_TOKEN are taken in; it prints one, unless there is one.

    [dim]slipstream store --host node0 --port 29400[/dim]
    """
    token = run_token() or new_token()
    keeper = open_store(port, host, token)
    said = f"listens on {host}, port {keeper.port}; jobs of this run need its token. Ctrl-C ends it"
    console.print(said, markup=False, highlight=False, soft_wrap=True)
    if not run_token():
        console.print(f"export {TOKEN}={token}", markup=False, highlight=False, soft_wrap=True)
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        console.print("the store has ended")


def open_store(port: int, host: str = "127.0.0.1", token: str = "") -> TCPStore:
    """Open a store for the run of one token; port 0: one that is free.

    Raises:
        LaunchError: the port is taken, or the host is none of this machine.
    """
    try:
        keeper = listen.open_store(host, port)
    except (RuntimeError, OSError) as error:
        reason = getattr(error, "strerror", None) or str(error).strip().partition("\n")[0]
        raise LaunchError(
            f"--host {host} --port {port} cannot be used: {reason}; give another one"
        ) from error
    listen.admit(keeper, token, f"{host}:{port}")
    return keeper
