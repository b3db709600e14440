"""Fills a sample of an average: gradients of one segment, before their exchange and after it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slipstream.checks.sketch import AverageSample
from slipstream.gradients.compressed import CompressionPlan
from slipstream.gradients.segments import GradientLayout, NamedParameter
from slipstream.gradients.shards import Shards


class SampledSegment:
    """Gradients of one segment whose average is exact, or rounded at most.

    Args:
        sample: gets their sketches; its seed chooses the segment, and some of its gradients.
        trainables: of the engine.
        layout: of the segments.
        plan: says which gradients a codec approximates.
        scale: makes the sum over ranks the average.

    Attributes:
        number: of the segment.
        names: of the gradients, by index of their parameter.
    """

    def __init__(
        self,
        sample: AverageSample,
        trainables: Sequence[NamedParameter],
        layout: GradientLayout,
        plan: CompressionPlan,
        scale: float,
    ) -> None:
        self._sample, self._trainables = sample, trainables
        turn, self.number = divmod(sample.seed, len(layout.segments))
        of_segment = {*layout.segments[self.number].names}
        exact = [
            (index, t)
            for index, t in enumerate(trainables)
            if t.name in of_segment
            and not layout.order.sparse_dims[index]
            and ((codec := plan.of(t.name, t.parameter)) is None or codec.summed)
        ]
        start = turn * AverageSample.MOST % len(exact) if exact else 0  # others in each turn
        chosen = (exact[start:] + exact[:start])[: AverageSample.MOST]
        self.names = {index: t.name for index, t in chosen}
        narrow = any(plan.of(t.name, t.parameter) or t.parameter.itemsize < 4 for _, t in chosen)
        sample.open([*self.names.values()], scale, narrow=narrow)

    def own(self, index: int) -> None:
        """Take this rank's gradient of a parameter, once, before it is scaled."""
        gradient = self._trainables[index].parameter.grad
        if gradient is not None:
            self._sample.own(self.names[index], gradient)

    def averages(self, shards: Shards | None) -> None:
        """Take what came back: all of it, or this rank's shards."""
        for index, name in self.names.items():
            parameter = self._trainables[index].parameter
            if shards is None or parameter not in shards.names:
                if parameter.grad is not None:
                    self._sample.average(name, parameter.grad)
            elif parameter in shards.gradients:
                signs = self._sample.signs(name, parameter)
                laid_out = [torch.empty_like(parameter, dtype=s.dtype).copy_(s) for s in signs]
                own = torch.stack([shards.own(one).view(-1) for one in laid_out])
                self._sample.average(name, shards.gradients[parameter], own)
