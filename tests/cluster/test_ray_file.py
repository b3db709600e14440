"""The loop of examples/cluster/ray_train.py in a process group such as Ray Train makes."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from tests.harness.ranks import Ranks

FILE = Path(__file__).parents[2] / "examples/cluster/ray_train.py"


class Context:
    def get_world_rank(self) -> int:
        return dist.get_rank()


def stand_in() -> None:
    """Modules with the names of Ray (2.60) that the loop uses."""
    train, in_torch = ModuleType("ray.train"), ModuleType("ray.train.torch")
    vars(train).update(RunConfig=None, ScalingConfig=None, get_context=Context)
    vars(in_torch).update(TorchConfig=None, TorchTrainer=None)
    vars(in_torch).update(get_device=lambda: torch.device("cpu"))
    sys.modules |= {"ray": ModuleType("ray"), train.__name__: train, in_torch.__name__: in_torch}


def trained() -> tuple[bool, str]:
    """Whether the group of before is there after the loop, and what that printed."""

    stand_in()
    spec = importlib.util.spec_from_file_location("ray_train", FILE)
    assert spec is not None
    assert spec.loader is not None
    example: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    group, printed, errors = dist.group.WORLD, io.StringIO(), []

    def loop() -> None:
        try:
            example.train_loop_per_worker()
        except BaseException as error:
            errors.append(error)

    with contextlib.redirect_stdout(printed):
        worker = threading.Thread(target=loop)  # Ray's loop is in a thread, too
        worker.start()
        worker.join()
    if errors:
        raise errors[0]
    return dist.is_initialized() and dist.group.WORLD is group, printed.getvalue()


def test_a_loop_of_ray_train_trains_in_the_group_that_is_there() -> None:
    with Ranks(2) as team:
        (kept, said), (kept_too, silent) = team.run(trained)
    assert kept
    assert kept_too
    assert said.startswith("2 ranks, final loss 0.0")
    assert silent == ""
