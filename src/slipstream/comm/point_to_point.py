"""Operators between two ranks: one sends, the other receives."""

from __future__ import annotations

import torch

from slipstream.comm.arguments import Device, checked_spec, spec_of_signature
from slipstream.comm.autograd import apply_collective, apply_with_output, graph_break
from slipstream.comm.collectives import Receive, Send
from slipstream.comm.groups import Group, member
from slipstream.comm.signature import Signature, receive_signature, send_signature
from slipstream.errors import CommError, MismatchError


@graph_break
def send(x: torch.Tensor, to: int, group: Group | None = None) -> None:
    """Send this rank's tensor to rank ``to`` of the group, which calls `recv`.

    Backward: the gradient of the `recv` there; call ``comm.backward()`` where there is no loss.
    Exactness: bitwise. Returns when the tensor is sent; with gloo the receiver must have posted.

    Raises:
        CommError: ``to`` is not another rank of the group.
        ExchangeError: the other rank does not receive within the group's timeout; names it.
    """
    group = _peer_group("send", to, group)
    if group.check:
        send_signature(Signature.of("send", x), to, group)
    spec = checked_spec("send", x)
    name = f"send to rank {group.ranks[to]}"
    apply_collective(name, Send(group, to, spec), x, needs_grad=spec.requires_grad)


@graph_break
def recv(
    source: int,
    group: Group | None = None,
    *,
    like: torch.Tensor | None = None,
    device: Device = None,
) -> torch.Tensor:
    """Receive the tensor that rank ``source`` of the group passes to `send`.

    Backward: sends the gradient back. Exactness: bitwise.

    Args:
        source: rank in the group; in the world, the rank.
        group: None: all ranks.
        like: in a group without ``check`` a tensor of the shape, dtype and device of the one that
            is sent, which requires a gradient if that one does; else ignored.
        device: where the result goes (None: to the CPU, with NCCL to the current GPU).

    Raises:
        CommError: ``source`` is not another rank of the group, or ``like`` is missing.
        MismatchError: the tensor requires a gradient, and gradients are not enabled here.
        ExchangeError: the other rank does not send within the group's timeout; names it.
    """
    group = _peer_group("recv", source, group)
    name = f"recv from rank {group.ranks[source]}"
    if group.check:
        signature = receive_signature(source, group)
        if signature.dtype is None:
            raise CommError(f"{name} of {group}, which passes no supported tensor")
        if signature.requires_grad and not torch.is_grad_enabled():
            raise MismatchError(
                f"{name} of {group}, whose tensor requires a gradient, with "
                "torch.is_grad_enabled() False here; allowed: the same on both ranks"
            )
        spec = spec_of_signature(signature, like, group, device)
    elif like is None:
        raise CommError(f"{name} of {group}, which has check=False; pass like=")
    else:
        spec = checked_spec("recv", like)
    collective = Receive(group, source, spec)
    return apply_with_output(name, collective, None, needs_grad=spec.requires_grad)


def _peer_group(operator: str, peer: int, group: Group | None) -> Group:
    """The group that holds this rank and ``peer``.

    Raises:
        CommError: the group has no such rank, or it is this one.
    """
    group = member(group, operator)
    if not 0 <= peer < group.size or peer == group.rank:
        raise CommError(
            f"{operator} with rank {peer} of {group}, on rank {group.rank} of it; allowed: another "
            f"one of 0 .. {group.size - 1}"
        )
    return group
