"""Files are written as a whole, or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from slipstream.files.write import whole_file, write_whole


def test_an_error_leaves_what_was_there(tmp_path):
    path = tmp_path / "a"
    write_whole(path, "old")

    def broken():
        with whole_file(path) as file:
            file.write(b"half of the ne")
            assert path.read_text() == "old"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        broken()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]


def test_parts_that_killed_processes_have_left_go_and_no_others(tmp_path):
    path, other = tmp_path / "a", tmp_path / "b"
    with whole_file(path) as file, whole_file(other):
        mine, theirs = sorted(tmp_path.iterdir(), key=lambda part: _locked_by(part, file))
        left = [mine.with_name(f"{mine.name[:-21]}{n:016}.part") for n in range(2)]
        for one in left:
            one.write_text("half")
        write_whole(path, "new")  # beside another writer
        assert sorted(tmp_path.iterdir()) == sorted([path, mine, theirs])
        file.write(b"newer")
    assert path.read_text() == "newer"
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def _locked_by(part: Path, file) -> bool:
    return part.stat().st_ino != os.fstat(file.fileno()).st_ino


def test_what_is_new_takes_the_place_of_the_old(tmp_path):
    path, link = tmp_path / "a", tmp_path / "link"
    path.write_text("old")
    path.chmod(0o640)
    link.symlink_to("a")
    write_whole(link, "\xe9", durable=False)
    assert path.read_bytes() == "\xe9".encode()
    assert link.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert sorted(os.listdir(tmp_path)) == ["a", "link"]


def test_a_new_file_has_the_usual_permissions(tmp_path):
    before = os.umask(0o027)
    try:
        write_whole(tmp_path / "a", b"")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640


def test_a_reader_never_sees_a_part(tmp_path, monkeypatch):
    """The content is there, and safe, before it takes the place."""
    path, events = tmp_path / "a", []
    replace, sync = Path.replace, os.fsync

    def noted(source: Path, target: Path) -> Path:
        events.append(("replace", source.read_text(), source.parent == target.parent))
        return replace(source, target)

    monkeypatch.setattr(Path, "replace", noted)
    monkeypatch.setattr(os, "fsync", lambda file: (events.append("sync"), sync(file)))
    write_whole(path, "new")
    assert events == ["sync", ("replace", "new", True)]


def test_a_folder_that_is_not_there_is_an_error_and_a_device_is_written_to(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_whole(tmp_path / "no" / "a", "")
    write_whole("/dev/null", "x")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
