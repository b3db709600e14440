"""The section of losses over time: a line, a band and dots for each strategy."""

from __future__ import annotations

import pytest

from slipstream.planner.progress.calibration import LossCalibration, LossRun
from slipstream.report import losses as section

pytest.importorskip("plotly")


def calibration() -> LossCalibration:
    dense = [1 + 4 * update**-0.5 for update in range(1, 121)]
    twice = dense[1::2]
    return LossCalibration(
        runs=[
            LossRun(strategy={}, seconds=60.0, error=0.01, losses=dense),
            LossRun(
                strategy={"gradients": {"accumulate": 2}}, seconds=90.0, error=0.01, losses=twice
            ),
        ]
    )


def test_each_strategy_has_a_line_in_its_band_and_dots(monkeypatch) -> None:
    figures, plot = [], section.losses_plot
    monkeypatch.setattr(section, "POINTS", 12)  # a point of a larger batch takes 0.1 s
    monkeypatch.setattr(
        section, "losses_plot", lambda *given: figures.append(plot(*given)) or figures[-1]
    )
    written = section.losses(calibration())
    [figure] = figures
    bands = [one for one in figure["data"] if one.get("fill")]
    lines = [one for one in figure["data"] if one["mode"] == "lines" and not one.get("fill")]
    dots = [one for one in figure["data"] if one["mode"] == "markers"]
    assert len(bands) == len(lines) == len(dots) == 2
    assert [one["name"] for one in lines][1].endswith("accumulate 2")
    for band, line in zip(bands, lines, strict=True):
        upper, lower = band["y"][: len(line["y"])], band["y"][len(line["y"]) :][::-1]
        assert all(low <= at <= high for low, at, high in zip(lower, line["y"], upper, strict=True))
        assert line["y"] == sorted(line["y"], reverse=True)
    assert dots[0]["x"][-1] == pytest.approx(2.0, rel=0.1)  # hours: 120 updates of a minute
    assert figure["layout"]["xaxis"]["title"]["text"] == "hours"
    assert "Loss over time" in written
    assert "60 s" in written
    assert 'id="plot-losses"' in written
