"""SimOTA for a batch against YOLOX's loop: equal on random scenes and on those at the edge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from slipstream.errors import UsageError
from slipstream.kernels import sim_ota
from slipstream.kernels.sim_ota import Assignment, Level, Objects, reference

LEVELS = (Level(8, 10, 8), Level(4, 5, 16), Level(2, 3, 32))
ANCHORS = sum(level.height * level.width for level in LEVELS)
WIDTH, HEIGHT, CLASSES = 80, 64, 5

Scene = tuple[torch.Tensor, torch.Tensor, torch.Tensor, Objects]


def scene(seed: int, images: int = 3, most: int = 6, dtype: torch.dtype = torch.float64) -> Scene:
    """Objects also beyond the border, and predictions around some of them."""
    random = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=random, dtype=dtype)

    area = torch.tensor([WIDTH, HEIGHT], dtype=dtype)
    centers = (1.4 * uniform(images, most, 2) - 0.2) * area
    truths = torch.cat([centers, 4 + 40 * uniform(images, most, 2)], 2)
    valid = torch.rand(images, most, generator=random) < 0.6
    truths[~valid] = torch.nan  # padding does not count
    classes = torch.randint(CLASSES, (images, most), generator=random)
    classes[~valid] = -1
    whose = torch.randint(most, (images, ANCHORS), generator=random)
    around = truths.nan_to_num(20.0).gather(1, whose.unsqueeze(2).expand(-1, -1, 4))
    boxes = around * (0.7 + 0.6 * uniform(images, ANCHORS, 4))
    logits = 6 * uniform(images, ANCHORS, CLASSES) - 3
    return boxes, logits, 6 * uniform(images, ANCHORS) - 3, Objects(truths, classes, valid)


def equal(found: Assignment, expected: Assignment) -> bool:
    same = found.foreground.equal(expected.foreground) and found.object.equal(expected.object)
    return same and torch.allclose(found.overlap, expected.overlap, rtol=1e-6)


@pytest.mark.parametrize("part", range(4))
def test_thousands_of_batches_are_assigned_as_by_the_loop(part: int) -> None:
    taken = 0
    for seed in range(500 * part, 500 * (part + 1)):
        given = scene(seed, images=1 + seed % 3, most=1 + seed % 8)
        found = sim_ota(*given, LEVELS)
        assert equal(found, reference(*given, LEVELS)), seed
        taken += int(found.foreground.sum())
    assert taken > 1000  # there was something to assign


@pytest.mark.parametrize("radius", [0.5, 1.5, 2.5])
def test_other_settings_are_those_of_the_loop(radius: float) -> None:
    for seed in range(50):
        given = scene(seed)
        settings = {"radius": radius, "overlap_weight": 5.0}
        assert equal(sim_ota(*given, LEVELS, **settings), reference(*given, LEVELS, **settings))


def test_half_logits_cost_what_they_cost_in_fp32() -> None:
    boxes, classes, objectness, objects = scene(7, dtype=torch.float32)
    half = (classes.half(), objectness.half())
    wide = sim_ota(boxes, half[0].float(), half[1].float(), objects, LEVELS)
    assert equal(sim_ota(boxes, *half, objects, LEVELS), wide)


def test_single_precision_agrees_wherever_no_two_costs_are_close() -> None:
    different = 0
    for seed in range(500):
        given = scene(seed, dtype=torch.float32)
        different += not equal(sim_ota(*given, LEVELS), reference(*given, LEVELS))
    # a penalty of 1e6 leaves 1/16 of resolution to those costs, so some of them tie
    assert different <= 5


def test_no_object_is_all_background() -> None:
    boxes, classes, objectness, objects = scene(0)
    none = Objects(objects.boxes[:, :0], objects.classes[:, :0], objects.valid[:, :0])
    hidden = replace(objects, valid=torch.zeros_like(objects.valid))
    for nothing in (none, hidden):
        found = sim_ota(boxes, classes, objectness, nothing, LEVELS)
        assert not any(t.any() for t in (found.foreground, found.object, found.overlap))


def test_objects_beyond_all_cells_have_no_candidates() -> None:
    boxes, classes, objectness, objects = scene(1)
    away = replace(objects, boxes=objects.boxes + 1e4, valid=torch.ones_like(objects.valid))
    away = replace(away, classes=away.classes.clamp(min=0))
    assert not sim_ota(boxes, classes, objectness, away, LEVELS).foreground.any()


def test_one_object_takes_at_least_one_anchor_and_at_most_ten() -> None:
    level = [Level(16, 16, 8)]
    for size, count in ((1e-3, 1), (400.0, 9)):
        boxes = torch.tensor([60.0, 60.0, 400.0, 400.0]).expand(1, 256, 4)
        objects = Objects(
            torch.tensor([[[60.0, 60.0, size, size]]]),
            torch.tensor([[0]]),
            torch.tensor([[True]]),
        )
        found = sim_ota(boxes, torch.zeros(1, 256, 2), torch.zeros(1, 256), objects, level)
        assert int(found.foreground.sum()) == count


def test_equal_objects_share_anchors_without_loss() -> None:
    """All costs tie: whichever object wins, as many anchors as in the loop are taken."""
    boxes, classes, objectness, objects = scene(3)
    same = Objects(
        objects.boxes.nan_to_num(30.0)[:, :1].expand(-1, 4, -1),
        objects.classes.clamp(min=0)[:, :1].expand(-1, 4),
        torch.ones(3, 4, dtype=torch.bool),
    )
    found = sim_ota(boxes, classes, objectness, same, LEVELS)
    assert found.foreground.equal(reference(boxes, classes, objectness, same, LEVELS).foreground)


def test_nothing_is_read_back_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that has no values a read of one would raise."""
    given = [value.to("meta") for value in scene(5)[:3]]
    objects = scene(5)[3]
    there = Objects(*(t.to("meta") for t in (objects.boxes, objects.classes, objects.valid)))
    found = sim_ota(*given, there, LEVELS)
    assert (found.foreground.shape, found.foreground.device.type) == ((3, ANCHORS), "meta")


@pytest.mark.parametrize("wrong", ["anchors", "levels", "classes", "valid"])
def test_shapes_that_do_not_fit_are_named(wrong: str) -> None:
    boxes, classes, objectness, objects = scene(2)
    levels: Sequence[Level] = LEVELS
    if wrong == "anchors":
        objectness = objectness[:, 1:]
    elif wrong == "levels":
        levels = LEVELS[:2]
    elif wrong == "classes":
        objects = replace(objects, classes=objects.classes[:, 1:])
    else:
        objects = replace(objects, valid=objects.valid.int())
    with pytest.raises(UsageError, match="allowed"):
        sim_ota(boxes, classes, objectness, objects, levels)
