"""``slipstream report``: files in, a page and a picture out."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from slipstream.cli.report import names
from slipstream.errors import LaunchError, TraceError
from slipstream.trace import Trace, write
from tests.cli.running import run
from tests.harness.traces import by_hand

pytest.importorskip("plotly")
pytest.importorskip("matplotlib")


_run = partial(run, "report")


def test_a_device_takes_the_page(tmp_path):
    write(by_hand(), tmp_path / "trace.json")
    assert "/dev/null" in _run(tmp_path / "trace.json", "-o", "/dev/null")
    assert Path("/dev/null").is_char_device()


def test_it_writes_page_and_picture(tmp_path):
    before, after, plan = (tmp_path / name / "trace.json" for name in ("before", "after", "plan"))
    write(by_hand(), before)
    write(by_hand(), after)
    write(Trace(by_hand().events, by_hand().meta | {"predicted": True}), plan)
    log = tmp_path / "trials.json"
    log.write_text(json.dumps([{"name": "per_layer", "status": "failed", "reason": "exit code 9"}]))
    page, picture = tmp_path / "new" / "report.html", tmp_path / "timeline.png"
    shown = _run(before, after, plan, "-o", page, "--png", picture, "--trials", log)
    assert str(page) in shown
    assert str(picture) in shown
    text = page.read_text()
    assert "slipstream report: before, after, plan" in text
    assert "plan (predicted)" in text
    assert "exit code 9" in text
    assert '<section id="findings">' in text
    assert '<section id="predictions">' in text
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_predictions_alone_are_a_report_too(tmp_path):
    write(Trace(by_hand().events, by_hand().meta | {"predicted": True}), tmp_path / "plan.json")
    _run(tmp_path / "plan.json", "-o", tmp_path / "report.html")
    assert '<section id="findings">' in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("paths", "called"),
    [
        (["trace-1.json", "b.json.gz"], ["trace-1", "b"]),
        (["x/trace.json", "x/trace.json"], ["x/trace.json", "x/trace.json"]),
        (["x/a.json", "y/a.json", "z.json"], ["x/a.json", "y/a.json", "z"]),
        (["/trace.json"], ["trace"]),
    ],
)
def test_traces_are_called_by_what_tells_them_apart(paths, called):
    assert names(list(map(Path, paths))) == called


def test_a_page_that_cannot_be_written_is_an_error(tmp_path):
    write(by_hand(), tmp_path / "a.json")
    (tmp_path / "file").write_text("")
    with pytest.raises(TraceError, match="cannot be written: File exists"):
        _run(tmp_path / "a.json", "-o", tmp_path / "file" / "report.html")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["-o", "a.json"], "--output a.json: the file name must end in .html"),
        (["--png", "a.jpg"], "--png a.jpg: the file name must end in .png"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_page_does_not_take_the_place_of_what_it_shows(tmp_path, monkeypatch, words, problem):
    monkeypatch.chdir(tmp_path)
    write(by_hand(), Path("a.json"))
    before = Path("a.json").read_bytes()
    with pytest.raises(LaunchError, match=problem):
        _run("a.json", *words)
    assert Path("a.json").read_bytes() == before
