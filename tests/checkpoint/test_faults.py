"""Checkpoints that are torn or changed, full disks, and deaths in the middle of writing."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import pickle
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import slipstream
from slipstream.checkpoint import Checkpoints, folder as folders, read, storage
from slipstream.errors import CheckpointError
from slipstream.tuner.trials import MARK
from tests.harness.ranks import RankFailure, Ranks
from tests.session.training import Session, opened, update


def three_saved(folder: Path | str, **options: Any) -> list[str]:
    """A checkpoint after each of three updates."""
    with opened() as session:
        saved = Checkpoints(folder, **options)
        saved.restore(session)
        for _ in range(3):
            update(session)
            saved.step(session, every=1)
    return [path.name for path in saved.paths]


def test_the_newest_are_kept(tmp_path: Path) -> None:
    assert three_saved(tmp_path, keep=2) == ["update-00000002", "update-00000003"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "update-00000002",
        "update-00000003",
    ]
    assert three_saved(tmp_path, keep=1) == ["update-00000006"]


def test_a_trial_leaves_the_checkpoints_of_a_run_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    three_saved("runs/a")
    for trial in ("01", "02"):
        monkeypatch.setenv(MARK, str(tmp_path / "logs" / trial))
        assert three_saved("runs/a")[-1] == "update-00000003"  # from the first update on
        assert three_saved("other/runs/a")[-1] == "update-00000003"
    monkeypatch.delenv(MARK)
    assert three_saved("runs/a")[-1] == "update-00000006"
    assert not Path("other").exists()


def truncate(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


FAULTS: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "truncated": (truncate, "__0_0.distcp", "bytes instead of"),
    "a flipped bit": (flip, "__0_0.distcp", "another CRC-32"),
    "a flipped bit of the index": (flip, ".metadata", "another CRC-32"),
    "a file that is gone": (Path.unlink, "__0_0.distcp", "No such file"),
    "no manifest": (Path.unlink, "manifest.json", "No such file"),
    "half a manifest": (truncate, "manifest.json", "cannot be read"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_one_that_is_not_whole_is_named_and_the_one_before_is_taken(
    name: str, tmp_path: Path
) -> None:
    fault, file, words = FAULTS[name]
    three_saved(tmp_path)
    fault(tmp_path / "update-00000003" / file)
    with opened() as session:
        saved = Checkpoints(tmp_path)
        with pytest.warns(UserWarning, match=f"update-00000003 is not whole .*{words}"):
            assert saved.restore(session) == 2
        update(session)
        saved.step(session, every=1)
    assert [path.name[-1] for path in saved.paths] == ["1", "2", "3"]
    assert (tmp_path / "broken-update-00000003").is_dir()
    with opened() as session:
        assert Checkpoints(tmp_path).restore(session) == 3


def test_where_none_is_whole_the_run_does_not_begin_anew(tmp_path: Path) -> None:
    three_saved(tmp_path, keep=1)
    flip(tmp_path / "update-00000003" / "__0_0.distcp")
    with (
        opened() as session,
        pytest.warns(UserWarning, match="not whole"),
        pytest.raises(CheckpointError, match=r"none of the 1 checkpoints(?s:.*)to begin anew"),
    ):
        Checkpoints(tmp_path).restore(session)


def restored(folder: str) -> tuple[int, list[str]]:
    """The updates of the checkpoint that is taken, and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with opened() as session:
            return Checkpoints(folder).restore(session), [str(one.message) for one in caught]


STALE = OSError(errno.ESTALE, "Stale file handle")
FULL = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")
UNREAD: dict[str, tuple[str, Exception, str]] = {
    "the file system, as sums are compared": (
        "slipstream.checkpoint.folder.checksum", STALE, "Stale file handle",
    ),
    "the file system, as torch reads": (
        "slipstream.checkpoint.storage.CheckpointReader.read_data", STALE, "Stale file handle",
    ),
    "memory": ("slipstream.checkpoint.storage.load", FULL, "can't allocate memory"),
}  # fmt: skip


def read_by_one(folder: str, name: str) -> int:
    """Restore where the last rank cannot read."""
    place, error, _ = UNREAD[name]

    def fails(*_: Any, **__: Any) -> None:
        raise error

    with opened() as session, pytest.MonkeyPatch.context() as patch:
        if session.rank == session.world_size - 1:
            patch.setattr(place, fails)
        return Checkpoints(folder).restore(session)


@pytest.mark.ranks
@pytest.mark.parametrize("name", UNREAD)
def test_one_that_cannot_be_read_now_stays_and_no_older_one_is_taken(
    name: str, two: Ranks, tmp_path: Path
) -> None:
    three_saved(tmp_path)
    for error in two.fail(read_by_one, str(tmp_path), name).values():
        assert isinstance(error, CheckpointError)
        assert "update-00000003 cannot be read now (rank 1: " in str(error)
        assert UNREAD[name][2] in str(error)
    assert restored(str(tmp_path)) == (3, [])


def goes_back(folder: str) -> tuple[list[int], bool]:
    """The updates from which a run goes on at its start, after two checkpoints, and after two more
    that leave none of the first; and whether the parameters are those of the last."""
    with opened() as session:
        saved = Checkpoints(folder, keep=2)
        starts = [saved.restore(session)]
        for _ in range(2):
            for _ in range(2):
                update(session)
                saved.save(session)
            expected = session.model.state_dict()["0.weight"].clone()
            with torch.no_grad():
                session.model.state_dict()["0.weight"].fill_(torch.nan)
            starts.append(saved.restore(session))
        return starts, torch.equal(session.model.state_dict()["0.weight"], expected)


def test_a_run_goes_back_to_its_newest_checkpoint(two: Ranks, tmp_path: Path) -> None:
    assert two.run(goes_back, str(tmp_path)) == [([0, 2, 4], True)] * 2
    assert goes_back(str(tmp_path)) == ([4, 6, 8], True)


def test_all_ranks_take_the_same(two: Ranks, tmp_path: Path) -> None:
    """Each checks other files."""
    two.run(three_saved, str(tmp_path))
    flip(tmp_path / "update-00000003" / "__1_0.distcp")
    (one, said), (other, silent) = two.run(restored, str(tmp_path))
    assert (one, other, silent) == (2, 2, [])
    assert "is not whole (rank " in said[0]


class Evil:
    """Runs code where a pickle of it is read."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("/tmp/never",)


def test_reading_runs_no_code(tmp_path: Path) -> None:
    three_saved(tmp_path)
    path = tmp_path / "update-00000003"
    index = path / ".metadata"
    index.write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match=r"\.metadata has 47 bytes instead of"):
        read(path)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][index.name] = folders.checksum(index)
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"names posix\.mkdir, which no index does"):
        read(path)


def test_a_run_that_counts_less_keeps_its_checkpoints(tmp_path: Path) -> None:
    """As one on fewer ranks, under ``local.stretch``, counts less than what it goes on from."""
    there = folders.Folder(tmp_path)
    for updates in (800, 900, 1000, 520, 540):
        writing = there.temporary(updates)
        writing.mkdir()
        kept = there.commit(writing, updates, keep=3)
        assert kept in there.complete()
    assert [path.name for path in there.complete()][1:] == [
        "update-00001000.1", "update-00001000.2",
    ]  # fmt: skip


def test_what_a_killed_run_left_is_swept_and_nothing_else(tmp_path: Path) -> None:
    left = ["writing-00000003", "removed-update-00000001", "removed-update-00000001.2"]
    for name in [*left, "writing-prompts", "removed-2019"]:
        (tmp_path / name).mkdir()
    folders.Folder(tmp_path).sweep()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["removed-2019", "writing-prompts"]


# Full disks.


@contextmanager
def tiny_disk(path: Path, size: str) -> Iterator[None]:
    """A file system of its own."""
    path.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", bytes(path), b"tmpfs", 0, f"size={size}".encode()):
        pytest.skip(f"cannot mount a small file system: {os.strerror(ctypes.get_errno())}")
    try:
        yield
    finally:
        libc.umount2(bytes(path), 2)


class Big(torch.nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size))


def fills_the_disk(folder: str) -> tuple[list[str], str, str, bool]:
    """A checkpoint that fits, one that does not, and one after the disk was freed."""
    model = Big(100_000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ballast = Path(folder) / "ballast"
    said = ""
    with slipstream.accelerate(model, optimizer) as session:
        saved = Checkpoints(Path(folder) / "saved")
        saved.save(session, wait=True)
        first = [path.name for path in saved.paths]
        if session.rank == 0:
            with suppress(OSError), ballast.open("wb") as file:
                while True:
                    file.write(bytes(4096))
                    file.flush()
        for number in range(2):
            session.backward(model.weight.sum())
            session.step()
            if not number:
                saved.save(session)
        session.backward(model.weight.sum())
        session.step()
        try:
            saved.save(session)  # on its way while the one before is reported
        except CheckpointError as error:
            said = str(error)
        with suppress(CheckpointError):
            saved.wait()
        after = [path.name for path in saved.paths]
        if session.rank == 0:
            ballast.unlink()
        session.backward(model.weight.sum())
        session.step()
        saved.save(session, wait=True)
        left = [path.name for path in (Path(folder) / "saved").iterdir()]
        return first, said, " ".join(after), any("writing" in name for name in left)


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_full_disk_is_told_at_the_next_call(ranks: int, two: Ranks, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with tiny_disk(disk, "3m"):
        runs = two.run(fills_the_disk, str(disk)) if ranks == 2 else [fills_the_disk(str(disk))]
        for first, said, after, left in runs:
            assert first == ["update-00000000"]
            assert "the checkpoint after update 1 was not written" in said
            assert str(disk / "saved") in said
            assert "No space left" in said
            assert "free space there" in said
            assert ("rank 0: " if ranks == 2 else "this rank: ") in said
            assert after == "update-00000000"
            assert not left


def test_a_failure_nobody_waits_for_is_warned_of_and_raised_by_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(storage, "checksum", fails)
    session: Session = opened()
    saved = Checkpoints(tmp_path)
    update(session)
    saved.step(session, every=1)
    saved._writing.join()  # type: ignore[union-attr]
    update(session)
    with pytest.warns(UserWarning, match="Read-only file system.*every rank can write"):
        saved.step(session, every=100)
    with pytest.raises(CheckpointError, match="update 1 was not written"):
        session.close()
    assert list(tmp_path.iterdir()) == []


# Deaths.


def dies_while_writing(folder: str, moment: str) -> None:
    """Rank 0 is killed in the middle of its third checkpoint."""
    with opened() as session:
        saved = Checkpoints(folder)
        saved.restore(session)
        for number in range(3):
            update(session)
            if number == 2 and session.rank == 0:
                where: Any = folders.Folder if moment == "commit" else storage
                setattr(where, moment, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
            saved.save(session, wait=True)


@pytest.mark.parametrize("moment", ["checksum", "write_manifest", "commit"])
def test_a_death_while_writing_leaves_the_one_before(
    moment: str, two: Ranks, tmp_path: Path
) -> None:
    with pytest.raises(RankFailure, match="died"):
        two.run(dies_while_writing, str(tmp_path), moment)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["in-use", "update-00000001", "update-00000002", "writing-00000003"]
    assert two.run(restored, str(tmp_path)) == [(2, []), (2, [])]
    assert sorted(path.name for path in tmp_path.iterdir()) == names[1:3]


def test_a_folder_that_another_run_uses_is_refused(two: Ranks, tmp_path: Path) -> None:
    there = folders.Folder(tmp_path)
    claim = there.claim()
    assert claim is not None
    assert there.claim() is claim  # a second session of this process
    there.release(claim)
    there.temporary(7).mkdir()
    for error in two.fail(restored, str(tmp_path)).values():
        assert isinstance(error, CheckpointError)
        assert f"process {os.getpid()} on " in str(error)
        assert "read(path)" in str(error)
    assert there.temporary(7).is_dir()
    claim.truncate(0)
    claim.write("another machine\nprocess 7 on there")
    claim.flush()
    (_, said), (_, nothing) = two.run(restored, str(tmp_path))
    assert "process 7 on there uses the folder" in said[0]
    assert not nothing
    there.release(claim)
    assert two.run(restored, str(tmp_path)) == [(0, []), (0, [])]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_an_error_on_all(two: Ranks, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for error in two.fail(restored, str(tmp_path / "file" / "a")).values():
        assert isinstance(error, CheckpointError)
        assert "rank 0 cannot use the folder" in str(error)


def test_programs_of_torch_read_the_model(tmp_path: Path) -> None:
    """Its tensors have their names in the checkpoint of torch.distributed.checkpoint."""
    three_saved(tmp_path)
    keys = storage.CheckpointReader(tmp_path / "update-00000003").read_metadata()
    assert {"model.0.weight", "model.2.bias"} <= set(keys.state_dict_metadata)
