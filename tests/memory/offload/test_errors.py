"""What offload refuses, before training or in it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import slipstream
from slipstream.errors import OffloadError, StrategyError, UsageError
from slipstream.memory import offload, recompute
from slipstream.memory.forward_override import ForwardOverride
from slipstream.memory.offload import open_store
from slipstream.strategy import CheckpointsConfig, OffloadConfig
from tests.harness.ranks import Ranks
from tests.memory.offload.squares import ALL, LoggedStore, squares, start


@pytest.mark.parametrize("block", [0, 2], ids=["offloaded", "resident"])
def test_a_change_in_place_is_an_error_as_in_torch(block):
    def run(model):
        hidden = start()
        for number, module in enumerate(model):
            result = module(hidden)
            if number == block:
                with torch.no_grad():
                    hidden.detach().mul_(2)
            kept.append(hidden)
            hidden = result
        hidden.sum().backward()

    kept = []
    words = "modified by an inplace operation"
    model = squares(3)
    with pytest.raises(RuntimeError, match=words):
        run(model)
    with offload(model, ALL), pytest.raises(RuntimeError, match=words):
        run(model)


def test_a_change_while_the_store_writes_is_an_error():
    store = LoggedStore()
    model = squares(3)
    with offload(model, ALL, store=store):
        hidden = (start() * 1).view(8, 8)
        result = model[0](hidden)
        other = hidden.detach()
        del hidden
        other.mul_(2)
        del other
        with pytest.raises(RuntimeError, match="that 0 has saved"):
            model[1:](result).sum().backward()


def test_close_leaves_a_plain_model():
    model = squares(3)
    offloader = offload(model, ALL)
    loss = model(start()).sum()
    assert "forward" in vars(model[0])
    offloader.close()
    offloader.close()
    assert "forward" not in vars(model[0])
    with pytest.raises(UsageError, match="backward through 1 after its activations were dropped"):
        loss.backward()
    model(start()).sum().backward()


def test_a_later_override_must_be_removed_first():
    model = squares()
    offloader = offload(model, ALL)
    later = ForwardOverride(model[1], lambda forward, x: forward(x))
    with pytest.raises(UsageError, match="overridden again later"):
        offloader.close()
    later.remove()
    offloader.close()
    offload(model, ALL).close()


@pytest.mark.parametrize(
    ("config", "model", "words"),
    [
        (OffloadConfig(), squares(), r"model is on the CPU, .*; use \{to: disk\}"),
        (
            OffloadConfig(to="disk"),
            nn.Linear(2, 2),
            "Linear has no repeated blocks .*; name the modules",
        ),
        (
            OffloadConfig(to="disk", keep_last=5),
            squares(),
            "model has 5 blocks.* allowed: at most 4",
        ),
        (
            OffloadConfig(to="disk", modules=("x.*",)),
            squares(),
            r"offload.modules: no module .*'x\.\*'",
        ),
    ],
)
def test_invalid_configs_are_refused(config, model, words):
    with pytest.raises(StrategyError, match=words):
        offload(model, config)
    assert "forward" not in vars(model[0] if isinstance(model, nn.Sequential) else model)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("modules", [None, ("1",)])
def test_scripted_blocks_are_refused(modules):
    model = nn.Sequential(*(torch.jit.script(nn.Sequential(nn.Linear(2, 2))) for _ in range(3)))
    words = (
        "1 is a ScriptModule" if modules else "no repeated blocks .a ScriptModule does not count"
    )
    with pytest.raises(StrategyError, match=words):
        offload(model, OffloadConfig(to="disk", modules=modules, keep_last=0))
    if modules:
        with pytest.raises(StrategyError, match=words):
            recompute(model, CheckpointsConfig(checkpoints=modules))


def test_a_second_offload_is_refused():
    model = squares()
    with (
        offload(model, ALL),
        pytest.raises(UsageError, match=r"0 is already offloaded; call close"),
    ):
        offload(model, OffloadConfig(to="disk", modules=("3.inner",), keep_last=0))
    offload(model, ALL).close()


def test_a_folder_needs_a_disk():
    with pytest.raises(StrategyError, match=r"only \{to: disk\} writes a file"):
        OffloadConfig(folder="/tmp")


def test_too_little_free_space_is_refused_at_once(monkeypatch):
    monkeypatch.setattr(open_store, "free_disk_bytes", lambda folder: 2**30)
    with pytest.raises(
        OffloadError,
        match=r"rank 2: .* 1\.00 GiB are free for 4 ranks .*each rank needs at least 0\.25 GiB",
    ):
        offload(squares(), ALL, local_ranks=4, rank=2)


def test_a_full_store_is_an_error_in_forward():
    model, store = squares(), LoggedStore(None, 2**20)
    with (
        offload(model, ALL, store=store),
        pytest.raises(OffloadError, match=r"rank 0: .* of 0 to .*; free some disk space"),
    ):
        model(start())


def refused(memory: dict[str, Any]) -> None:
    model = squares()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    slipstream.accelerate(model, optimizer, strategy={"memory": {"offload": memory}})


def little_space_on_rank_1(memory: dict[str, Any]) -> None:
    if dist.get_rank() == 1:
        pytest.MonkeyPatch().setattr(open_store, "free_disk_bytes", lambda folder: 2**29)
    refused(memory)


def test_all_ranks_refuse_before_training(tmp_path):
    with Ranks(2) as ranks:
        for error in ranks.fail(refused, {"to": "host"}).values():
            assert "use {to: disk}" in str(error)
        for error in ranks.fail(refused, {"to": "disk", "folder": str(tmp_path / "no")}).values():
            assert "No such file" in str(error)
        for error in ranks.fail(little_space_on_rank_1, {"to": "disk"}).values():
            assert "rank 1: memory.offload to disk: 0.50 GiB are free for 2 ranks" in str(error)
