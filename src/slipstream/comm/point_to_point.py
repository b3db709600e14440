"""Operators between two ranks: one sends, the other receives."""

from __future__ import annotations

import torch

from slipstream.comm.apply import apply, eager, everywhere
from slipstream.comm.arguments import Device, peer_group, received, sent
from slipstream.comm.collectives import Like, Receive, Send
from slipstream.comm.groups import Group


@eager
def send(x: torch.Tensor, to: int, group: Group | None = None) -> None:
    """This rank's tensor to rank ``to`` of the group, which calls `recv`.

    Backward: what `recv` there got as gradient; call ``comm.backward()`` where there is no loss.
    Exactness: bitwise. Returns when the tensor has gone; with gloo the receiver must have come.

    Raises:
        CommError: no such rank in the group, or this one.
        ExchangeError: the other rank does not come within the group's timeout; names it.
    """
    group = peer_group("send", to, group)
    wants = sent(x, to, group)
    apply(f"send to rank {group.ranks[to]}", Send(group, to, Like.of(x)), x, wants=wants)


@eager
def recv(
    source: int,
    group: Group | None = None,
    *,
    like: torch.Tensor | None = None,
    device: Device = None,
) -> torch.Tensor:
    """The tensor that rank ``source`` of the group sends by `send`.

    Backward: sends the gradient back. Exactness: bitwise.

    Args:
        source: place in the group; in the world, the rank.
        group: None: all ranks.
        like: in a group without ``check`` a tensor of the shape, dtype and device of the one that
            comes, which requires a gradient if that one does; else ignored.
        device: where the result goes (None: to the CPU, with NCCL to the current GPU).

    Raises:
        CommError: no such rank in the group, or this one; ``like`` is missing.
        ExchangeError: the other rank does not come within the group's timeout; names it.
    """
    group = peer_group("recv", source, group)
    what, wants = received(source, group, like, device)
    move = Receive(group, source, what)
    return everywhere(f"recv from rank {group.ranks[source]}", move, None, wants=wants)
