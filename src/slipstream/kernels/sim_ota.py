"""SimOTA, YOLOX's assignment of objects to anchors, for a whole batch at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.errors import UsageError

_MOST_ANCHORS = 10
"""An object gets at most so many: as many as the sum of its ten best overlaps, each at most 1."""


@dataclass(frozen=True, slots=True)
class Level:
    """A map of the pyramid: one anchor a cell, row after row.

    Attributes:
        height, width: cells.
        stride: pixels between the centres of neighbouring cells.
    """

    height: int
    width: int
    stride: int


@dataclass(frozen=True, slots=True)
class Objects:
    """The objects of a batch, padded to one number an image.

    Attributes:
        boxes: (images, objects, 4) centre x, centre y, width, height in pixels.
        classes: (images, objects), int64.
        valid: (images, objects), bool; False: padding, whose boxes and classes do not count.
    """

    boxes: Tensor
    classes: Tensor
    valid: Tensor


@dataclass(frozen=True, slots=True)
class Assignment:
    """The target of each anchor.

    Attributes:
        foreground: (images, anchors), bool; False: background.
        object: (images, anchors), int64: the number of the object in its image; 0 in background.
        overlap: (images, anchors): intersection over union with it; 0 in background.
    """

    foreground: Tensor
    object: Tensor
    overlap: Tensor


@torch.no_grad()
def sim_ota(
    boxes: Tensor,
    class_logits: Tensor,
    object_logits: Tensor,
    objects: Objects,
    levels: Sequence[Level],
    *,
    radius: float = 1.5,
    overlap_weight: float = 3.0,
) -> Assignment:
    """Which anchor is to detect which object, by the cost of each pair.

    A candidate is an anchor whose centre lies within ``radius`` strides of the centre of some
    object, along x and along y. With p = sqrt(sigmoid(class) sigmoid(object)) and IoU of an
    object and the anchor's predicted box::

        cost  = BCE(p, one-hot class) - overlap_weight log(IoU + 1e-8)
                + 1e6 where the centres are farther apart
        count = max(1, int(sum of the object's 10 largest IoU with candidates))

    Each object takes its ``count`` cheapest candidates; an anchor that several objects took goes to
    the object, of all in the image, for which it is cheapest.

    YOLOX runs this image by image and object by object, with a wait for the device in each round.
    Here the few cells around each object are counted off the grid, candidates move to the front of
    a table of a size that is known beforehand, and the cost of classes is one sum for each anchor
    and one gathered term for each pair: no loop, no value is read back, and memory grows with
    objects times candidates, not with objects times anchors times classes.

    Args:
        boxes: (images, anchors, 4) predicted centre x, centre y, width, height in pixels.
        class_logits: (images, anchors, classes).
        object_logits: (images, anchors).
        objects: what is in the images.
        levels: the maps, in the order of their anchors.
        radius: in strides.
        overlap_weight: see above.

    Exactness: the assignment of `reference`; the cost of classes is summed in another order, so two
    costs that differ by less than rounding may change places. Among equal costs neither promises
    an order. Costs are float32 at least, whatever the logits are.

    Raises:
        UsageError: shapes that do not fit, or levels with another number of anchors.

    Source: Ge et al., "YOLOX: Exceeding YOLO Series in 2021", arXiv 2107.08430, and
    ``YOLOXHead.get_assignments``.

    Example:
        >>> level = Level(height=4, width=4, stride=8)
        >>> boxes = torch.tensor([12.0, 12.0, 16.0, 16.0]).expand(1, 16, 4)
        >>> objects = Objects(
        ...     boxes=torch.tensor([[[12.0, 12.0, 16.0, 16.0]]]),
        ...     classes=torch.tensor([[2]]),
        ...     valid=torch.tensor([[True]]),
        ... )
        >>> found = sim_ota(boxes, torch.zeros(1, 16, 3), torch.zeros(1, 16), objects, [level])
        >>> int(found.foreground.sum())  # the nine cells around the centre overlap it fully
        9
    """
    _check(boxes, class_logits, object_logits, objects, levels)
    anchors = boxes.shape[1]
    if objects.valid.shape[1] == 0 or anchors == 0:
        return _background(boxes)
    near, which = _candidates(objects, levels, radius)
    table = _Table.of(near, which, anchors)
    at = table.anchors.clamp(max=anchors - 1)
    costs, overlaps = _costs(
        _rows(boxes, at),
        _rows(class_logits, at),
        object_logits.gather(1, at),
        objects,
        overlap_weight,
    )
    costs = costs + 1e6 * ~table.near
    allowed = objects.valid.unsqueeze(2) & table.used.unsqueeze(1)
    costs = costs.masked_fill(~allowed, torch.inf)
    overlaps = overlaps.masked_fill(~allowed, 0.0)
    return _spread(_take(costs, overlaps), overlaps, table, boxes)


def _candidates(objects: Objects, levels: Sequence[Level], radius: float) -> tuple[Tensor, Tensor]:
    """The anchors around each object: whether they are near, and their numbers; both
    (images, objects, cells around an object on all levels)."""
    span = ceil(2 * radius) + 1  # one more, for the comparison below decides, not this rounding
    steps = torch.arange(span, device=objects.boxes.device)
    near, which, first = [], [], 0
    for level in levels:
        columns, close_x = _around(
            objects.boxes[..., 0:1], level.width, level.stride, radius, steps
        )
        rows, close_y = _around(objects.boxes[..., 1:2], level.height, level.stride, radius, steps)
        close = close_y.unsqueeze(3) & close_x.unsqueeze(2) & objects.valid[..., None, None]
        cells = rows.unsqueeze(3) * level.width + columns.unsqueeze(2) + first
        near.append(close.flatten(2))
        which.append(cells.flatten(2))
        first += level.height * level.width
    return torch.cat(near, 2), torch.cat(which, 2)


def _around(
    centers: Tensor, cells: int, stride: int, radius: float, steps: Tensor
) -> tuple[Tensor, Tensor]:
    """The cells along one axis that may be near each centre, (images, objects, span), clamped to
    the map, and whether each is."""
    reach = radius * stride
    lowest = ((centers - reach) / stride - 0.5).floor().clamp(-1, cells)
    numbers = lowest.to(torch.int64) + steps
    middle = (numbers + 0.5) * stride
    # as YOLOX compares, so that rounding decides alike
    near = (middle - (centers - reach) > 0) & ((centers + reach) - middle > 0)
    inside = (numbers >= 0) & (numbers < cells)
    return numbers.clamp(0, cells - 1), near & inside


@dataclass(frozen=True, slots=True)
class _Table:
    """The candidates of each image, in the order of the anchors, at the front of as many slots as
    there may be.

    Attributes:
        anchors: (images, slots); the number of anchors where a slot is not used.
        used: (images, slots).
        near: (images, objects, slots), whether the slot's anchor is around the object.
    """

    anchors: Tensor
    used: Tensor
    near: Tensor

    @staticmethod
    def of(near: Tensor, which: Tensor, anchors: int) -> _Table:
        """Scatter what is not near, and what has no slot, into a spare column, which is dropped."""
        images, objects, _ = near.shape
        which = which.masked_fill(~near, anchors).flatten(1)
        chosen = near.new_zeros(images, anchors + 1).scatter_(1, which, 1)
        chosen[:, anchors] = False
        # On a CPU reading the largest count costs nothing; on a device it would be waited for.
        on_cpu = near.device.type == "cpu"
        slots = int(chosen.sum(1).max()) if on_cpu else min(anchors, which.shape[1])
        slot = (chosen.cumsum(1) - 1).masked_fill(~chosen, slots)
        numbers = torch.arange(anchors + 1, device=near.device).expand(images, -1)
        table = numbers.new_full((images, slots + 1), anchors).scatter_(1, slot, numbers)
        table = table[:, :slots]
        places = slot.gather(1, which).view(images, objects, -1)
        around = near.new_zeros(images, objects, slots + 1).scatter_(2, places, 1)
        return _Table(table, table < anchors, around[..., :slots])


def _rows(values: Tensor, at: Tensor) -> Tensor:
    """(images, anchors, n) at (images, slots): (images, slots, n), float32 at least."""
    taken = values.gather(1, at.unsqueeze(2).expand(-1, -1, values.shape[2]))
    return taken.to(_wide(values.dtype))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _costs(
    boxes: Tensor,
    class_logits: Tensor,
    object_logits: Tensor,
    objects: Objects,
    overlap_weight: float,
) -> tuple[Tensor, Tensor]:
    """The cost of each pair without the penalty of distance, and its overlap; both
    (images, objects, slots)."""
    overlaps = _overlaps(objects.boxes.to(boxes.dtype), boxes)
    chances = class_logits.sigmoid() * object_logits.to(class_logits.dtype).sigmoid().unsqueeze(2)
    chances = chances.sqrt()
    absent = _log1p(-chances).sum(2)  # as if no class were there
    classes = objects.classes.masked_fill(~objects.valid, 0)
    wanted = classes.unsqueeze(2).expand(-1, -1, chances.shape[1])
    own = chances.transpose(1, 2).gather(1, wanted)  # (images, objects, slots)
    class_costs = _log1p(-own) - own.log().clamp(min=-100) - absent.unsqueeze(1)
    return class_costs - overlap_weight * (overlaps + 1e-8).log(), overlaps


def _log1p(values: Tensor) -> Tensor:
    """log(1 + values), bounded as in torch's binary cross entropy."""
    return values.log1p().clamp(min=-100)


def _overlaps(objects: Tensor, boxes: Tensor) -> Tensor:
    """Intersection over union of (..., objects, 4) and (..., slots, 4)."""
    first, second = objects.unsqueeze(-2), boxes.unsqueeze(-3)
    low = torch.maximum(first[..., :2] - first[..., 2:] / 2, second[..., :2] - second[..., 2:] / 2)
    high = torch.minimum(first[..., :2] + first[..., 2:] / 2, second[..., :2] + second[..., 2:] / 2)
    meet = (low < high).all(-1)
    shared = (high - low).prod(-1) * meet
    return shared / (first[..., 2:].prod(-1) + second[..., 2:].prod(-1) - shared)


def _take(costs: Tensor, overlaps: Tensor) -> Tensor:
    """The object that takes each slot, (images, slots); as many as there are objects: none."""
    most, objects = min(_MOST_ANCHORS, costs.shape[2]), costs.shape[1]
    counts = overlaps.topk(most, dim=2).values.sum(2).to(torch.int32).clamp(min=1)
    cheapest = costs.topk(most, dim=2, largest=False)
    rank = torch.arange(most, device=costs.device)
    wanted = (rank < counts.unsqueeze(2)) & (cheapest.values < torch.inf)
    taken = torch.zeros_like(costs, dtype=torch.bool).scatter_(2, cheapest.indices, wanted)
    several = taken.sum(1, keepdim=True) > 1
    taken = torch.where(several, costs == costs.amin(1, keepdim=True), taken)
    # argmax and argmin across rows are many times as slow as a smallest number
    numbers = torch.arange(objects, dtype=torch.int32, device=costs.device).view(1, -1, 1)
    return torch.where(taken, numbers, objects).amin(1)


def _spread(owners: Tensor, overlaps: Tensor, table: _Table, boxes: Tensor) -> Assignment:
    """Bring what slots have found back to their anchors."""
    found = _background(boxes, extra=1)
    at, anchors, objects = table.anchors, boxes.shape[1], overlaps.shape[1]
    foreground = owners < objects
    numbers = (owners * foreground).to(torch.int64)
    overlap = overlaps.gather(1, numbers.unsqueeze(1)).squeeze(1) * foreground
    found.foreground.scatter_(1, at, foreground)
    found.object.scatter_(1, at, numbers)
    found.overlap.scatter_(1, at, overlap.to(found.overlap.dtype))
    return Assignment(
        found.foreground[:, :anchors], found.object[:, :anchors], found.overlap[:, :anchors]
    )


def _background(boxes: Tensor, extra: int = 0) -> Assignment:
    shape = (boxes.shape[0], boxes.shape[1] + extra)
    return Assignment(
        boxes.new_zeros(shape, dtype=torch.bool),
        boxes.new_zeros(shape, dtype=torch.int64),
        boxes.new_zeros(shape, dtype=_wide(boxes.dtype)),
    )


@torch.no_grad()
def reference(
    boxes: Tensor,
    class_logits: Tensor,
    object_logits: Tensor,
    objects: Objects,
    levels: Sequence[Level],
    *,
    radius: float = 1.5,
    overlap_weight: float = 3.0,
) -> Assignment:
    """The same, as YOLOX computes it: image by image, object by object."""
    found = _background(boxes)
    middles, strides = _grid(levels, boxes.device)
    for image in range(len(boxes)):
        valid = objects.valid[image]
        if not valid.any():
            continue
        truths, classes = objects.boxes[image][valid], objects.classes[image][valid]
        reach = strides * radius
        low = middles - (truths[:, None, :2] - reach[:, None])
        high = (truths[:, None, :2] + reach[:, None]) - middles
        near = torch.cat([low, high], 2).amin(2) > 0
        candidates = near.any(0)
        if not candidates.any():
            continue
        wide = _wide(boxes.dtype)
        predicted = boxes[image][candidates].to(wide)
        overlaps = _overlaps(truths.to(wide), predicted)
        chances = class_logits[image][candidates].to(wide).sigmoid()
        chances = (chances * object_logits[image][candidates, None].to(wide).sigmoid()).sqrt()
        one_hot = F.one_hot(classes, chances.shape[1]).to(wide)
        shape = (len(truths), *chances.shape)
        class_costs = F.binary_cross_entropy(
            chances.expand(shape), one_hot[:, None].expand(shape), reduction="none"
        ).sum(2)
        costs = class_costs - overlap_weight * (overlaps + 1e-8).log()
        costs = costs + 1e6 * ~near[:, candidates]
        taken = _take_one_by_one(costs, overlaps)
        at = candidates.nonzero().squeeze(1)
        found.foreground[image, at] = taken.any(0)
        numbers = valid.nonzero().squeeze(1)[taken.to(torch.uint8).argmax(0)]
        found.object[image, at] = numbers * taken.any(0)
        found.overlap[image, at] = (overlaps * taken).sum(0)
    return found


def _take_one_by_one(costs: Tensor, overlaps: Tensor) -> Tensor:
    taken = torch.zeros_like(costs, dtype=torch.bool)
    best = overlaps.topk(min(_MOST_ANCHORS, overlaps.shape[1]), dim=1).values
    for number, count in enumerate(best.sum(1).int().clamp(min=1).tolist()):
        taken[number, costs[number].topk(count, largest=False).indices] = True
    several = taken.sum(0) > 1
    if several.any():
        cheapest = costs[:, several].argmin(0)
        taken[:, several] = False
        taken[cheapest, several] = True
    return taken


def _grid(levels: Sequence[Level], device: torch.device) -> tuple[Tensor, Tensor]:
    """The centre of each anchor, (anchors, 2), and its stride, (anchors,)."""
    middles, strides = [], []
    for level in levels:
        y, x = torch.meshgrid(
            torch.arange(level.height, device=device),
            torch.arange(level.width, device=device),
            indexing="ij",
        )
        middles.append((torch.stack([x, y], 2).flatten(0, 1) + 0.5) * level.stride)
        strides.append(torch.full((level.height * level.width,), level.stride, device=device))
    return torch.cat(middles), torch.cat(strides)


def _check(
    boxes: Tensor,
    class_logits: Tensor,
    object_logits: Tensor,
    objects: Objects,
    levels: Sequence[Level],
) -> None:
    anchors = sum(level.height * level.width for level in levels)
    images = boxes.shape[0]
    padded = objects.valid.shape[1] if objects.valid.ndim == 2 else -1
    wanted = {
        "boxes": (boxes, (images, anchors, 4)),
        "class_logits": (class_logits, (images, anchors, class_logits.shape[-1])),
        "object_logits": (object_logits, (images, anchors)),
        "objects.boxes": (objects.boxes, (images, padded, 4)),
        "objects.classes": (objects.classes, (images, padded)),
        "objects.valid": (objects.valid, (images, padded)),
    }
    for name, (tensor, shape) in wanted.items():
        if tuple(tensor.shape) != shape:
            raise UsageError(
                f"{name} has the shape {tuple(tensor.shape)}; allowed: {shape}, for {images} "
                f"images and the {anchors} anchors of {len(levels)} levels"
            )
    if objects.valid.dtype != torch.bool or objects.classes.dtype != torch.int64:
        raise UsageError(
            f"objects.valid is {objects.valid.dtype} and objects.classes {objects.classes.dtype}; "
            "allowed: torch.bool and torch.int64"
        )
