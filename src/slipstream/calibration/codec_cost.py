"""Measure what a codec costs the thread that runs it, without a network.

Nothing is exchanged: the bytes of a codec's requests are counted, and its receive buffers are taken
as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import fmean, median
from time import perf_counter

import torch
import torch.distributed as dist

from slipstream.codecs import Momentum, Ranks, make_compressor
from slipstream.planner.network.costs import CodecCost
from slipstream.strategy import HalfConfig, PlainCodecConfig
from slipstream.transport.consistency import maximum
from slipstream.transport.requests import AllGather, sent_bytes

SIZES = (2**14, 2**21)
"""Elements of the two buckets that determine the line."""
ROUNDS = 5
WINDOW = 0.1
"""Seconds of a round: so long that ranks that share cores compute side by side."""
SHORTEST = 0.02
"""Seconds of a round where the whole measurement is a short one: some turns of ranks on a core."""


def codec_cost(
    codec: PlainCodecConfig,
    ranks: int,
    device: torch.device,
    together: Callable[[], object] = lambda: None,
    window: float = WINDOW,
) -> CodecCost:
    """Seconds to encode and to decode, as a line over bytes, and the ratio of bytes sent to dense.

    They are those of one rank of ``ranks`` for one bucket of an fp32 matrix; the payloads of the
    others are zeros. Encoding ends with the last request of an exchange. ``together`` is called
    before each round of ``window`` seconds: it waits for ranks that share the cores.

    Raises:
        ValueError: fewer than two ranks, which send nothing.
    """
    if ranks < 2:
        raise ValueError(f"ranks is {ranks}: a codec's share of the bytes sent needs 2 or more")
    (small, *_), (large, encode, decode, ratio) = (
        _measured(codec, numel, ranks, device, together, window) for numel in SIZES
    )
    per_byte = max(large - small, 0.0) / (4 * (SIZES[1] - SIZES[0]))
    startup = max(small - per_byte * 4 * SIZES[0], 0.0)
    coding = encode / max(encode + decode, 1e-12) * per_byte
    return CodecCost(ratio=ratio, encode=coding, decode=per_byte - coding, startup=startup / 2)


def slowest_cost(
    codec: PlainCodecConfig, world: dist.ProcessGroup, device: torch.device, share: float = 1.0
) -> CodecCost:
    """The cost on the slowest rank, measured on all at once: ranks of one host share its cores.

    ``share``: the part of the usual time to take.
    """
    together = partial(dist.barrier, group=world)
    window = max(share * WINDOW, SHORTEST)
    cost = dict(codec_cost(codec, dist.get_world_size(world), device, together, window))
    values = torch.tensor(list(cost.values()), dtype=torch.float64, device=device)
    return CodecCost(**dict(zip(cost, maximum(values, world).tolist(), strict=True)))


def _measured(
    codec: PlainCodecConfig,
    numel: int,
    ranks: int,
    device: torch.device,
    together: Callable[[], object],
    window: float,
) -> tuple[float, float, float, float]:
    """Seconds in total, to encode and to decode a bucket; the ratio of bytes sent to dense."""
    side = int(numel**0.5)
    generator = torch.Generator(device).manual_seed(0)  # the user's stays as it is
    weight = torch.randn(side, side, dtype=torch.float32, device=device, generator=generator)
    if isinstance(codec, HalfConfig):
        return _measured_half(codec, weight, together, window)
    momenta = [Momentum(0.9)]
    compressor = make_compressor(codec, [weight], Ranks(0, ranks), momenta=momenta, num_flags=2)
    later = 10**9  # a step after the warm-up of every codec
    dense = 2 * (ranks - 1) / ranks * weight.nbytes
    times: list[tuple[float, ...]] = []
    sent = 0.0
    for _ in range(ROUNDS + 1):
        together()
        begin, each = perf_counter(), list[tuple[float, float, float]]()
        while not each or perf_counter() - begin < window:
            values = torch.zeros(compressor.num_values, dtype=compressor.works_in, device=device)
            values[: weight.numel()] = weight.flatten()
            flags = torch.zeros(2, dtype=torch.uint8, device=device)
            start = asked = perf_counter()
            sent = 0.0
            for request in compressor.exchange(values, flags, later):
                sent += sent_bytes(request, ranks)
                if isinstance(request, AllGather):
                    request.receive.zero_()  # random memory would be no valid indices
                synchronize(device)
                asked = perf_counter()
            synchronize(device)
            end = perf_counter()
            compressor.commit()
            each.append((end - start, asked - start, end - asked))
        times.append(tuple(map(fmean, zip(*each, strict=True))))
    total, encode, decode = (median(column) for column in zip(*times[1:], strict=True))
    return total, encode, decode, sent / dense


def _measured_half(
    codec: HalfConfig, weight: torch.Tensor, together: Callable[[], object], window: float
) -> tuple[float, float, float, float]:
    """Only the cast back to fp32: the cast to 16 bits is part of filling the bucket."""
    narrow = weight.to(torch.bfloat16 if codec.dtype == "bf16" else torch.float16)
    times = []
    for _ in range(ROUNDS + 1):
        together()
        start, count = perf_counter(), 0
        while not count or perf_counter() - start < window:
            weight.copy_(narrow)
            synchronize(weight.device)
            count += 1
        times.append((perf_counter() - start) / count)
    seconds = median(times[1:])
    return seconds, 0.0, seconds, 0.5


def synchronize(device: torch.device) -> None:
    """Wait for what a GPU still computes."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
