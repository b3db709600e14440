"""Files of checkpoints: whole and data alone, or refused before anything is loaded."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path

import pytest
import torch

import slipstream
from slipstream.errors import CheckpointError, ModelError, SlipstreamError


class Attack:
    def __reduce__(self):
        return Path.touch, (Path("HACKED"),)


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path / "a.pt"


def refused(path: Path, words: str) -> None:
    with pytest.raises(CheckpointError, match=words) as caught:
        slipstream.read_checkpoint(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not Path("HACKED").exists()


def test_code_is_refused_and_not_run(path):
    torch.save({"model": Attack()}, path)
    refused(path, "holds tensors and plain values alone")
    path.write_bytes(pickle.dumps({"model": Attack()}))
    refused(path, "no whole file of torch.save")


def test_every_flipped_bit_is_found(path):
    slipstream.write_checkpoint({"model": {"weight": torch.arange(1000.0)}}, path)
    data = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        entry = next(e for e in archive.infolist() if e.filename.endswith("data/0"))
    at = data.index(torch.arange(1000.0).numpy().tobytes()) + 2001
    path.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
    assert torch.load(path, weights_only=True)["model"]["weight"].shape == (1000,)  # torch's own
    refused(path, rf"{entry.filename} is damaged: its checksum is another")
    for end in (0, 1, 100, len(data) - 1):
        path.write_bytes(data[:end])
        refused(path, "no whole file of torch.save")


def test_what_grows_is_refused(path):
    torch.save({"a": torch.zeros(10**6)}, path)
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(path.with_suffix(".zip"), "w", 8) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))
    refused(path.with_suffix(".zip"), "is packed")
    torch.save({"a": torch.zeros(1).expand(10**12)}, path)
    refused(path, "a: a tensor of 4,000,000,000,000 bytes")
    endless: list[object] = []
    endless.append(endless)
    torch.save({"a": endless}, path)
    refused(path, r"nested deeper than 32")
    wide: object = 1
    for _ in range(30):
        wide = [wide] * 30
    torch.save(wide, path)
    refused(path, "more than 10,000,000 values")


def test_what_is_no_file_is_refused(path):
    refused(path, "cannot be read: No such file")
    path.mkdir()
    refused(path, "cannot be read: Is a directory")


def session_of(width: int = 3):
    model = torch.nn.Linear(width, 2)
    return slipstream.accelerate(model, torch.optim.Adam(model.parameters(), lr=0.1))


STATE = ("session",)
DAMAGE = {
    "no mapping of parameters": (("model",), [], r"model: a list; allowed: a mapping"),
    "no tensor": (("model", "weight"), 3, r"model\.weight: 3; allowed: a tensor"),
    "another model": (("model", "weight"), torch.ones(7), "size mismatch for weight"),
    "no groups": (("optimizer", "param_groups"), None, r"optimizer\.param_groups: None; allowed"),
    "more groups": (("optimizer", "param_groups"), [], "another optimizer's"),
    "numbers that are text": (("optimizer", "state"), {"0": {}}, r"optimizer\.state\['0'\]"),
    "steps": ((*STATE, "steps"), -1, r"steps: -1; allowed: a whole number >= 0"),
    "version": ((*STATE, "version"), torch.ones(3), "version tensor"),
    "split": ((*STATE, "split"), {"kind": "x"}, "split.kind: got 'x'"),
    "order": (
        (*STATE, "ready_order"),
        {"names": ["weight", "weight"]},
        "ready_order.firings: None",
    ),
    "codecs": ((*STATE, "codecs"), [{"weight": {"error": torch.ones(9)}}], "9 numbers; allowed: 6"),
    "sparse": (
        (*STATE, "codecs"),
        [{"weight": {"q": torch.ones(2).to_sparse()}}],
        "a dense tensor",
    ),
    "scale": ((*STATE, "loss_scale"), [float("nan"), 0, 0], r"loss_scale\[0\]: nan"),
    "place": ((*STATE, "data"), {"batches": "3", "ranks": 1}, r"data\.batches: '3'"),
    "meetings": ((*STATE, "local"), {"updates": 1, "config": {}}, r"local\.meetings: None"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_state_is_refused_with_its_place(path, case):
    keys, value, words = DAMAGE[case]
    with session_of() as session:
        slipstream.write_checkpoint(session.checkpoint(), path)
        state = slipstream.read_checkpoint(path)
        before = session.model.weight.clone()
        *above, last = keys
        inner = state
        for key in above:
            inner = inner[key]
        inner[last] = value
        with pytest.raises(SlipstreamError, match=words):
            session.restore(state)
        assert torch.equal(session.model.weight, before)
        session.restore(slipstream.read_checkpoint(path))


def test_the_state_of_another_optimizer_is_refused():
    model = torch.nn.Linear(3, 2)
    two = torch.optim.Adam([{"params": [model.weight]}, {"params": [model.bias]}], lr=0.1)
    with session_of() as session, pytest.raises(ModelError, match="another optimizer's"):
        session.restore({"optimizer": two.state_dict()})
