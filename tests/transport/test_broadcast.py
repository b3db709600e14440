"""Tensors of all kinds travel together, and arrive bit for bit."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from slipstream.transport import broadcast
from tests.harness.ranks import Ranks

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
]


def tensors(seed: int) -> list[torch.Tensor]:
    """Odd sizes first, so that the parts behind them start at odd bytes."""
    generator = torch.Generator().manual_seed(seed)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    made = [(values(3) * 100).to(dtype) for dtype in DTYPES]
    made += [(values() * 100).to(dtype) for dtype in DTYPES]  # no axis
    made += [values(0), values(2, 0, 3), values(0).to(torch.int64)]  # no element
    made += [
        values(4, 3).t(),  # not contiguous
        values(4, 6)[:, ::2],  # every second element, on a line
        values(8)[::4][:1],
        values(5)[1:],
        values(2, 3, 4, 5).to(memory_format=torch.channels_last),
        values(1).expand(1, 1),
        values(2).to(torch.complex64).t(),
    ]
    return [*made, torch.tensor([float("nan"), -0.0, float("inf")])]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype == torch.bfloat16:  # numpy has none
        a, b = a.view(torch.int16), b.view(torch.int16)
    layout = (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
    return layout and a.numpy(force=True).tobytes() == b.numpy(force=True).tobytes()


def broadcast_all() -> tuple[int, list[bool]]:
    own, expected = tensors(dist.get_rank()), tensors(0)
    parameter = torch.nn.Parameter(torch.full((3,), float(dist.get_rank())))
    places = [t.data_ptr() for t in own]
    number = broadcast.broadcast([*own, parameter], dist.group.WORLD)
    assert [t.data_ptr() for t in own] == places
    assert parameter.requires_grad
    assert parameter.tolist() == [0.0] * 3
    return number, [same_bits(a, b) for a, b in zip(own, expected, strict=True)]


def test_every_kind_of_tensor_arrives_in_one_broadcast(two: Ranks) -> None:
    for number, same in two.run(broadcast_all):
        assert number == 1
        assert all(same), same


def counted(limit: int, sizes: list[int]) -> tuple[int, int, list[float]]:
    """Broadcasts that ``broadcast`` reports, those that it made, and one value of each tensor."""
    made = 0
    plain = dist.broadcast

    def counting(*args: object, **kwargs: object) -> None:
        nonlocal made
        made += 1
        plain(*args, **kwargs)

    rank = dist.get_rank()
    own = [torch.full((size,), i + 1.0 - 100 * rank) for i, size in enumerate(sizes)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(broadcast, "LIMIT_BYTES", limit)
        patch.setattr(dist, "broadcast", counting)
        number = broadcast.broadcast(own, dist.group.WORLD)
    return number, made, [float(t.sum()) / t.numel() for t in own if t.numel()]


LIMITS = {  # bytes of a transfer, elements of 4 bytes -> transfers
    "exactly full": (32, [4, 4], 1),
    "one byte too little": (31, [4, 4], 2),
    "one tensor above the limit": (8, [1, 9, 1], 3),
    "first and last above it": (8, [9, 1, 1, 9], 3),
    "empty ones cost nothing": (8, [0, 2, 0, 2, 0], 2),
    "only empty ones": (8, [0, 0], 0),
    "none": (8, [], 0),
}


@pytest.mark.parametrize(("limit", "sizes", "transfers"), LIMITS.values(), ids=LIMITS)
def test_transfers_stay_below_the_limit(
    two: Ranks, limit: int, sizes: list[int], transfers: int
) -> None:
    values = [i + 1.0 for i, size in enumerate(sizes) if size]
    assert two.run(counted, limit, sizes) == [(transfers, transfers, values)] * 2
