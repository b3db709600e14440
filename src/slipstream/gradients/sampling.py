"""Fills a sample of averages: gradients of each bucket, before their exchange and after it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from slipstream.checks.sketch import AverageSample, AverageSamples
from slipstream.gradients.buckets import Bucket
from slipstream.gradients.compressed import CompressionPlan
from slipstream.gradients.segments import GradientLayout, NamedParameter
from slipstream.gradients.shards import Shards


class SampledGradients:
    """Some gradients of each bucket whose averages are exact, or rounded at most.

    Args:
        samples: get their sketches; their seed chooses the gradients, others in each turn.
        trainables: of the engine.
        layout: of the segments.
        plan: says which gradients a codec approximates.
        scale: makes the sum over ranks the average.
        shards: who updates what, where each rank gets its part of an average.
    """

    def __init__(
        self,
        samples: AverageSamples,
        trainables: Sequence[NamedParameter],
        layout: GradientLayout,
        plan: CompressionPlan,
        scale: float,
        shards: Shards | None,
    ) -> None:
        self._trainables = trainables
        self._shards = shards
        # a part of a model may be replicated, and is averaged whole then
        buckets: defaultdict[tuple[Bucket, bool], list[int]] = defaultdict(list)
        for index, t in enumerate(trainables):
            codec = plan.of(t.name, t.parameter)
            if not layout.order.sparse_dims[index] and (codec is None or codec.summed):
                cut = shards is not None and t.parameter in shards.names
                buckets[layout.slots[index].bucket, cut].append(index)
        count = max(samples.MOST // max(len(buckets), 1), 1)
        self._samples: dict[int, AverageSample] = {}  # by index of the parameter
        self._in_segment: defaultdict[int, list[int]] = defaultdict(list)
        numbers = {id(segment): number for number, segment in enumerate(layout.segments)}
        for (_, cut), exact in buckets.items():
            start = samples.seed * count % len(exact)
            chosen = (exact[start:] + exact[:start])[:count]
            some = [trainables[index] for index in chosen]
            narrow = any(plan.of(t.name, t.parameter) or t.parameter.itemsize < 4 for t in some)
            names = [t.name for t in some]
            sample = AverageSample(samples.seed, names, scale, narrow=narrow, in_parts=cut)
            samples.buckets.append(sample)
            self._samples |= dict.fromkeys(chosen, sample)
            self._in_segment[numbers[id(layout.slots[chosen[0]].segment)]] += chosen

    def own(self, index: int) -> None:
        """Take this rank's gradient of a parameter, if it is sampled, before it is scaled; once."""
        sample = self._samples.get(index)
        trainable = self._trainables[index]
        if sample is not None and trainable.parameter.grad is not None:
            sample.own(trainable.name, trainable.parameter.grad)

    def complete(self, segment: int) -> None:
        """Take those of a segment, by its number, that were not taken yet."""
        for index in self._in_segment[segment]:
            self.own(index)

    def averages(self) -> None:
        """Take what came back: all of it, or this rank's shards."""
        shards = self._shards
        for index, sample in self._samples.items():
            name, parameter = self._trainables[index].name, self._trainables[index].parameter
            if shards is None or parameter not in shards.names:
                if parameter.grad is not None:
                    sample.average(name, parameter.grad)
            elif parameter in shards.gradients:
                signs = sample.signs(name, parameter).whole(parameter.numel())
                laid_out = [
                    torch.empty_like(parameter, dtype=row.dtype).copy_(row.view(parameter.shape))
                    for row in signs
                ]
                own = torch.stack([shards.own(one).view(-1) for one in laid_out])
                sample.average(name, shards.gradients[parameter], own)
