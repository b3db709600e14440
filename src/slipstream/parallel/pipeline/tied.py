"""Sums what several ranks hold a part of: gradients of parameters that two stages use.

Never decides who holds what: see ``stage_parameters``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from slipstream.transport.consistency import collective_errors


def sum_shared(
    shared: Sequence[tuple[torch.Tensor, tuple[int, ...]]], group: dist.ProcessGroup
) -> None:
    """Every tensor becomes, in place, the sum of those of the ranks that hold it.

    One round: each rank sends what it has to the others that hold it, and all add up in the order
    of the ranks. So all get the same bits, each time. Between two ranks, which is the rule, no
    exchange moves fewer bytes. Exactness: reordered.

    Args:
        shared: pairs of a tensor and the ranks of ``group`` that hold it, this one among them; on
            all of them of the same shape and dtype and in the same order.
        group: where the ranks count.

    Raises:
        ExchangeError: another rank does not come.
    """
    rank = dist.get_rank(group)
    members: dict[tuple[tuple[int, ...], torch.dtype], list[torch.Tensor]] = {}
    for tensor, ranks in shared:
        members.setdefault((ranks, tensor.dtype), []).append(tensor)
    rounds, moves = [], []
    for (ranks, _), tensors in members.items():
        own = torch.cat([tensor.reshape(-1) for tensor in tensors])
        parts = [own if other == rank else torch.empty_like(own) for other in ranks]
        for other, part in zip(ranks, parts, strict=True):
            if other != rank:
                moves.append(dist.P2POp(dist.isend, own, group=group, group_peer=other))
                moves.append(dist.P2POp(dist.irecv, part, group=group, group_peer=other))
        rounds.append((tensors, parts))
    if moves:
        with collective_errors("the sum of gradients of parameters that stages share"):
            for work in dist.batch_isend_irecv(moves):
                work.wait()
    for tensors, parts in rounds:
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        pieces = total.split([tensor.numel() for tensor in tensors])
        for tensor, piece in zip(tensors, pieces, strict=True):
            tensor.copy_(piece.view_as(tensor))
