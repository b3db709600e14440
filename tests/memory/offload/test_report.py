"""What the report says of offload, and that a session installs and removes it."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

import slipstream
from slipstream.memory import Offloader, offload
from slipstream.strategy import OffloadConfig, Row
from tests.memory.models import MODELS, built
from tests.memory.offload.squares import ALL, squares, start


def report_row(offloader: Offloader) -> Row:
    (row,) = offloader.report_rows()
    return row


def test_the_report_says_that_tensors_are_too_small():
    model = squares()
    with offload(model, OffloadConfig(to="disk", min_bytes=2**20)) as offloader:
        assert report_row(offloader).value == "4 blocks offloaded, 1 kept"  # as far as is known
        for size in (2**16, 2**17):
            model(start(size)).sum().backward()
        assert (offloader.blocks, report_row(offloader).value) == ([], "nothing is offloaded")
        assert "below min_bytes (1 MiB); the largest is 0.5 MiB" in report_row(offloader).note
        with torch.no_grad():
            model(start())
        assert report_row(offloader).value == "nothing is offloaded"
        model(start(2**18)).sum().backward()
        assert offloader.blocks == ["0", "1", "2", "3"]
        assert "GiB out" in report_row(offloader).note


def test_the_report_names_gpus_on_a_shared_link(monkeypatch):
    monkeypatch.setattr(
        import_module("slipstream.memory.offload.offload"),
        "gpus_sharing_link",
        lambda _: ("3d:00.0",),
    )
    with offload(squares(), ALL) as offloader:
        assert report_row(offloader).note.endswith("; the PCIe link is shared with 3d:00.0")


def batches(name: str, count: int = 3) -> list[Any]:
    return [MODELS[name].batch(step) for step in range(count)]


def test_a_session_offloads_what_its_strategy_says():
    seen = []
    config = {"to": "disk", "min_bytes": 0}
    for memory in ({}, {"offload": config}, {"offload": config, "recompute": "every"}):
        model = built("gpt2")
        names = list(model.state_dict())
        torch.manual_seed(7)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        strategy = {"memory": memory}
        with slipstream.accelerate(model, optimizer, batches("gpt2"), strategy) as session:
            for batch in session.loader:
                session.backward(session.model(**batch).loss)
                session.step()
            report = session.report()
        seen.append([p.detach() for p in model.parameters()])
        assert list(model.state_dict()) == names
        assert not any("forward" in vars(block) for block in model.transformer.h)
    assert all(map(torch.equal, seen[0], seen[1]))
    assert all(map(torch.equal, seen[0], seen[2]))
    assert "5 modules recomputed" in report
    assert "4 blocks offloaded, 1 kept" in report
    assert "GiB out" in report
