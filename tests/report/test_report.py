"""The report: what is drawn is what happened, the page needs nothing else, a browser shows it."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
from html import unescape
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from slipstream.advisor.findings import Finding
from slipstream.errors import TraceError
from slipstream.report import report as report_module
from slipstream.report.alternation import KINDS, Alternation, TimedTraining
from slipstream.report.bars import MOST_RANKS, chosen_ranks, lay_out
from slipstream.report.palette import PALETTE
from slipstream.report.plots import (
    alternation_plot,
    breakdown_plot,
    comparison_plot,
    timeline_plot,
)
from slipstream.report.report import html, png, read_trials
from slipstream.report.runs import RecordedRun, comparisons, pairs
from slipstream.strategy.yaml import parse_yaml
from slipstream.trace import Event, Trace
from tests.harness.traces import MS, by_hand, many, random_traces

EVIL = "</script><script>document.title='broken'</script>$\\alpha <b>&amp; %{x}"
FINDINGS = [
    Finding("problem", "gradients.split", "60 % idle", "split it", 0.012, {"gradients": {"split": {
        "kind": "by_index", "last": [3, 7]}}}),
    Finding("warning", "rank 1, forward", "2 ms late", "balance it"),
    Finding("note", "trace", "clocks within 30 us", EVIL),
    Finding("good", "overlap", "all hidden", "leave it"),
]  # fmt: skip
TRIALS = [
    {"name": "by_bytes 25", "predicted": 0.1, "measured": 0.1, "spread": 0.002, "status":
     "measured", "strategy": {"gradients": {"overlap": True}}, "reason": "the baseline"},
    {"name": "by_bytes 25", "predicted": None, "measured": 0.104, "spread": None, "status":
     "measured", "strategy": {}, "reason": "pair 1"},
    {"name": EVIL, "predicted": 0.09, "measured": None, "spread": None, "status": "failed",
     "strategy": None, "reason": "exit code 1"},
]  # fmt: skip
IN_TURN = Alternation(
    "twice as fast",
    [
        TimedTraining("DDP", "baseline", [2.0, 2.2, 2.4]),
        TimedTraining("one", "exact", [1.9, 2.0, 2.1], "1.10x", {"final loss": "0.125"}),
        TimedTraining(EVIL, "lossy", [1.0, 1.1, 1.2], "2.00x"),
        TimedTraining("none", "floor", [0.9]),
    ],
)


def with_meta(trace: Trace, **meta: object) -> Trace:
    return Trace(trace.events, trace.meta | meta)


def run_of(trace: Trace, name: str = "one", *, predicted: bool = False) -> RecordedRun:
    return RecordedRun.of(name, trace, predicted=predicted)


def alone() -> Trace:
    """One process: nothing to exchange, nothing but an iteration and forward."""
    spans = [Event("iteration", 0, 2, 0.0, 1.0), Event("forward", 0, 2, 0.25, 1.0)]
    return Trace(tuple(spans))


def large(ranks: int, exchanges: int, steps: int = 1) -> Trace:
    """Rank r computes r microseconds longer than rank 0."""
    events = []
    for step in range(steps):
        for rank in range(ranks):
            late = rank * 1e-6
            events.append(Event("iteration", rank, step, step, step + 0.9 + late))
            events.append(Event("backward", rank, step, step, step + 0.4 + late))
            for number in range(exchanges):
                start = step + 0.8 * number / exchanges
                args = {"bytes": 1 << 20, "gradients": 1, "ready": start}
                end = start + 0.7 / exchanges
                events.append(Event(f"allreduce{number + 1}", rank, step, start, end, args))
    return Trace(
        tuple(events), {"world_size": ranks, "hosts": [f"h{r // 8}" for r in range(ranks)]}
    )


CASES = {
    "by hand": by_hand(ranks=3),
    "one process": alone(),
    "many ranks": large(ranks=40, exchanges=3),
    "no time at all": Trace((Event("iteration", 0, 0, 1.0, 1.0), Event("forward", 0, 0, 1.0, 1.0))),
    "evil names": with_meta(
        by_hand(),
        model=EVIL,
        hosts=[EVIL, "<i>"],
        segments=[{"bytes": 9, "gradients": [EVIL] * 5}],
        strategy={"gradients": {"split": EVIL}},
    ),
}


def test_the_bars_are_the_spans():
    drawing = lay_out(run_of(by_hand(ranks=2)))
    first = [(b.kind, b.start / MS, b.length / MS) for b in drawing.bars if "rank 0" in b.tip[0]]
    expected = [
        ("data_wait", 0, 5),
        ("forward", 5, 25),
        ("backward", 30, 40),
        ("optimizer", 85, 10),
        ("hidden", 40, 20),
        ("hidden", 60, 10),
        ("exposed", 70, 15),
    ]
    assert [kind for kind, *_ in first] == [kind for kind, *_ in expected]
    for (_, *drawn), (_, *times) in zip(first, expected, strict=True):
        assert drawn == pytest.approx(times)
    assert [label for label, _ in drawing.ranks] == ["rank 0\nnorth", "rank 1\nsouth"]
    *_, last = drawing.bars
    assert last.label == "2"  # the number of the segment, on its longest piece
    assert "10.0 ms hidden, 15.0 ms exposed" in last.tip
    assert "5.00 MB, 1.60 Gbit/s" in last.tip
    assert "started 1.0 ms after its gradients were ready" in last.tip


@many
@given(trace=random_traces())
def test_pieces_of_an_exchange_make_the_whole_and_nothing_overlaps(trace):
    one = run_of(trace)
    drawing = lay_out(one)
    drawn: dict[tuple[str, ...], float] = {}
    for bar in drawing.bars:
        assert bar.length > 0
        assert bar.middle - bar.height / 2 >= 0
        assert bar.middle + bar.height / 2 <= drawing.height + 1e-9
        if bar.kind in ("hidden", "exposed"):
            drawn[bar.tip] = drawn.get(bar.tip, 0.0) + bar.length
    step = int(re.match(r"Step (\d+)", drawing.note)[1])
    exchanges = [e for it in one.iterations if it.step == step for e in it.exchanges]
    assert sum(drawn.values()) == pytest.approx(sum(e.duration for e in exchanges))
    lanes = sorted(
        (b.middle, b.start, b.start + b.length)
        for b in drawing.bars
        if b.kind in ("hidden", "exposed")
    )
    for (row, _, end), (next_row, start, _) in pairwise(lanes):
        assert row != next_row or end <= start + drawing.end / 400


@given(st.dictionaries(st.integers(0, 5000), st.integers(0, 9), min_size=1), st.integers(3, 20))
def test_chosen_ranks_are_few_and_hold_the_extremes(seconds, most):
    chosen = chosen_ranks(seconds, most)
    assert len(chosen) == len(set(chosen)) <= most
    assert chosen == sorted(chosen)
    assert min(seconds) in chosen
    assert {min(seconds.values()), max(seconds.values())} <= {seconds[rank] for rank in chosen}
    assert len(seconds) > most or chosen == sorted(seconds)


@pytest.mark.parametrize("trace", CASES.values(), ids=CASES)
def test_plotly_accepts_every_plot(trace):
    graph_objects = pytest.importorskip("plotly.graph_objects")
    one = run_of(trace)
    drawing = lay_out(one)
    compared = comparisons([(one, one)], TRIALS)
    for figure in (
        timeline_plot(drawing, drawing.end),
        breakdown_plot([one, one]),
        comparison_plot(compared),
        alternation_plot(IN_TURN.trainings),
    ):
        assert len(graph_objects.Figure(figure).data) == len(figure["data"])
        assert "<script" not in json.dumps(figure)
        assert "<i>" not in json.dumps(figure)


class Loads(HTMLParser):
    """What a page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("src", "href", "srcset", "data", "action") or tag in ("link", "iframe"):
                self.found.append((tag, name, value))


@pytest.fixture(scope="module")
def page() -> str:
    pytest.importorskip("plotly")
    before, after = with_meta(by_hand(4), model=EVIL), by_hand(4)
    predicted = with_meta(after, predicted=True)
    findings = {"before": FINDINGS, "after": FINDINGS[-1:]}
    named = [("before", before), ("after", after), ("evil", CASES["evil names"])]
    return html(named, [("after", predicted)], findings, TRIALS, IN_TURN)


def test_the_page_loads_nothing_and_escapes_all(page):
    loads = Loads()
    loads.feed(page)
    assert loads.found == []
    assert "default-src 'none'" in page
    assert "document.title='broken'" not in page
    assert "document.title=&#x27;broken&#x27;" in page
    assert len(page.encode()) < 8e6


def test_the_page_says_what_is_asked_of_it(page):
    body = page[page.index("<header>") :]
    for text in (
        "on 4 ranks",
        "on 2 hosts",
        "saves about 12.00 ms an iteration, 12.0%",
        "2 ms late",
        "after, part by part",
        "exit code 1",
        "102.0 ms \u00b1 2.0 ms",
        "<h2>twice as fast</h2>",
        "0.125",
    ):
        assert text in body, text
    patch = re.search(r"<pre>(gradients:.*?)</pre>", body, re.DOTALL)
    assert parse_yaml(unescape(patch[1])) == FINDINGS[0].patch
    sections = ("alternation", "timeline", "breakdown", "findings", "predictions", "trials")
    places = [body.index(f'<section id="{name}">') for name in sections]
    assert places == sorted(places)
    for swatch in (*PALETTE.values(), *KINDS.values()):
        assert swatch.name in body


def test_a_page_of_one_trace_has_no_empty_sections():
    pytest.importorskip("plotly")
    body = html([("one", alone())])
    for name in ("alternation", "findings", "predictions", "trials"):
        assert f'<section id="{name}">' not in body


@pytest.mark.parametrize(
    ("trace", "says"),
    [
        ({"ranks": 4096, "exchanges": 10}, f"{MOST_RANKS} of 4,096 ranks"),
        (
            {"ranks": 4, "exchanges": 2500, "steps": 10},
            "Of each rank the 2,000 longest exchanges",
        ),
    ],
    ids=["4096 ranks", "100,000 events"],
)
def test_of_a_large_trace_a_part_is_shown_and_said(trace, says):
    pytest.importorskip("plotly")
    body = html([("one", large(**trace))])
    assert says in body
    assert len(body.encode()) < 8e6


def test_a_prediction_meets_its_measurement():
    base = {"gradients": {"split": {"kind": "by_bytes", "megabytes": 8}, "overlap": True}}
    by_index = {"gradients": {"split": {"kind": "by_index", "last": [2]}}}  # the same by default
    segments = [{"bytes": 12, "gradients": ["a"]}]
    traced = base | {"trace": {"steps": 5}}
    real = run_of(with_meta(by_hand(4), strategy=traced, segments=segments), "real")
    same = run_of(
        with_meta(by_hand(4), strategy=by_index, segments=segments), "plan", predicted=True
    )
    others = [
        run_of(with_meta(by_hand(2), strategy=base, segments=segments), "few", predicted=True),
        run_of(with_meta(by_hand(4), strategy=base, segments=[]), "split", predicted=True),
        run_of(
            with_meta(by_hand(4), strategy={"gradients": {"overlap": False}}, segments=segments),
            "after backward",
            predicted=True,
        ),
    ]
    assert pairs([real, same, *others]) == [(same, real)]
    named = run_of(with_meta(by_hand(4), strategy=None), "real", predicted=True)
    assert pairs([real, named]) == [(named, real)]


def test_a_bar_ends_at_the_median_and_its_line_at_the_quartiles():
    ddp, *_, dots = alternation_plot(IN_TURN.trainings)["data"]
    assert ddp["x"] == [2200.0]
    assert (ddp["error_x"]["array"], ddp["error_x"]["arrayminus"]) == ([100.0], [100.0])
    assert dots["x"] == [900.0]
    colours = {bar["marker"]["color"] for bar in alternation_plot(IN_TURN.trainings)["data"]}
    assert len(colours) == len(KINDS)


def test_samples_count_over_all_ranks_though_few_are_in_the_trace():
    spans = [Event("iteration", rank, 0, 0.0, 0.5, {"samples": 8}) for rank in range(2)]
    assert run_of(Trace(tuple(spans), {"world_size": 64})).samples_per_second == 64 * 8 / 0.5


def test_the_picture_shows_the_colours_of_what_ran():
    pytest.importorskip("matplotlib")
    image = pytest.importorskip("PIL.Image")
    data = png([("one", by_hand()), ("evil $\\alpha", CASES["evil names"])])
    with image.open(io.BytesIO(data)) as picture:
        shades = {colour[:3] for _, colour in picture.getcolors(1 << 20)}
    for kind, swatch in PALETTE.items():
        shade = tuple(bytes.fromhex(swatch.colour.removeprefix("#")))
        assert (shade in shades) == (kind != "other"), kind


@pytest.mark.parametrize("trace", CASES.values(), ids=CASES)
def test_every_trace_has_a_picture(trace):
    pytest.importorskip("matplotlib")
    assert png([("one", trace)]).startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("draw", "package"), [(html, "plotly"), (png, "matplotlib")], ids=["html", "png"]
)
def test_a_missing_package_is_named_with_its_cure(monkeypatch, draw, package):
    monkeypatch.setattr(report_module, "find_spec", lambda name: None)
    with pytest.raises(TraceError, match=rf"needs {package}.*pip install '\.\[report\]'"):
        draw([("one", by_hand())])


@pytest.mark.parametrize("draw", [html, png])
def test_no_trace_is_refused(draw):
    with pytest.raises(TraceError, match="there is none: give one or more"):
        draw([])


def test_trials_are_read(tmp_path):
    (tmp_path / "trials.json").write_text(json.dumps(TRIALS))
    assert read_trials(tmp_path / "trials.json") == TRIALS
    (tmp_path / "none.json").write_text("[]")
    assert read_trials(str(tmp_path / "none.json")) == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "cannot be read: No such file"),
        ("[", "cannot be read: not valid JSON, line 1, column 2"),
        ('{"traceEvents": []}', "it is not a list"),
        ('[{"name": "a"}, 3]', "entry 2 has no name"),
        ('[{"name": 3}]', "entry 1 has no name"),
        ('[{"name": "a", "measured": "fast"}]', "measured of entry 1 is 'fast'"),
        ('[{"name": "a", "spread": true}]', "spread of entry 1 is True"),
    ],
)
def test_a_file_that_is_not_a_log_is_refused_with_a_reason(tmp_path, text, reason):
    path = tmp_path / "trials.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(TraceError, match=re.escape(reason)):
        read_trials(path)


@pytest.fixture(scope="module")
def browser() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    pytest.skip("no chromium on PATH: apt-get install chromium")


def test_a_browser_shows_the_page_without_an_error(browser, page, tmp_path):
    file = tmp_path / "report.html"
    file.write_text(page)
    run = subprocess.run(
        [
            browser,
            "--headless=new",
            "--no-sandbox",  # root has none
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--host-resolver-rules=MAP * ~NOTFOUND",  # whatever is asked of a network fails
            f"--user-data-dir={tmp_path / 'profile'}",
            "--enable-logging=stderr",
            "--virtual-time-budget=5000",
            "--window-size=1000,900",
            "--dump-dom",
            file.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert [line for line in run.stderr.splitlines() if "CONSOLE" in line] == []
    dom = run.stdout
    assert "<title>broken" not in dom
    plots = dom.split('class="plotly-graph-div')[1:]
    assert len(plots) == 1 + 4 + 2  # in turn, timelines, breakdown, compared
    for plot in plots:
        assert "barlayer" in plot
        assert 'class="point"' in plot
    assert plots[0].count('class="point"') == 4 + 10  # bars, dots
    assert "since the step began" in plots[1]
    assert "rank 3" in plots[1]
