"""The overview names what matters, marks what was changed, and prints values as they are."""

from __future__ import annotations

import pytest

from slipstream.strategy import GradientsConfig, Row, Strategy, TraceConfig, overview, presets
from slipstream.strategy.overview import plain_text


def _lines(text: str, word: str) -> list[str]:
    return [line for line in text.splitlines() if word in line]


@pytest.mark.parametrize("name", presets())
def test_every_preset_is_drawn(name):
    strategy = Strategy.load(name)
    text = plain_text(overview(strategy), width=200)
    (split,) = _lines(text, "gradients.split")
    assert strategy.gradients.split.kind in split
    assert "reordered" in split
    assert ("gradients.split *" in split) == (strategy.gradients.split != GradientsConfig().split)
    assert ("* differs from the default" in text) == (strategy != Strategy())
    for setting in ("overlap", "transport", "accumulate"):
        assert len(_lines(text, f"gradients.{setting}")) == 1


def test_what_is_off_takes_one_line():
    assert len(_lines(str(Strategy()), "trace")) == 1
    assert "off" in _lines(str(Strategy()), "trace")[0]
    on = str(Strategy(trace=TraceConfig(steps=7, skip=0)))
    assert "7" in _lines(on, "trace.steps *")[0]
    assert "0" in _lines(on, "trace.skip *")[0]
    assert "slipstream-trace" in _lines(on, "trace.folder")[0]


def test_values_read_as_in_yaml():
    split = {"kind": "by_percent", "percents": [62.5, 37.5]}
    text = plain_text(overview(GradientsConfig(split=split, overlap=False)), width=200)
    assert "by_percent (percents [62.5, 37.5])" in text
    assert "false" in _lines(text, "overlap *")[0]
    text = plain_text(overview(Strategy.load("ddp")), width=200)
    assert "by_bytes (megabytes 25, first_megabytes 1, last_megabytes off)" in text


def test_what_was_resolved_is_added():
    row = Row("gradients.split", "161 gradients -> 6 all-reduces", "as observed")
    *_, last, _border = plain_text(overview(Strategy(), [row]), width=200).splitlines()
    assert "161 gradients -> 6 all-reduces" in last
    assert "as observed" in last


def test_values_are_no_markup():
    folder = "[red]run[/red]"
    assert folder in str(Strategy(trace=TraceConfig(steps=1, folder=folder)))


def test_fits_its_width():
    wide = Strategy(trace=TraceConfig(steps=1, folder="x" * 500))
    assert max(map(len, str(wide).splitlines())) <= 100
