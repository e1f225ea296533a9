"""The page about a job: escaped, self-contained, in step with the files, made whatever lies in the folder."""

from __future__ import annotations

import json
import math
import random
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinyloop.cluster.lanes import ReplicaMoment
from tinyloop.cluster.report import reading, writing
from tinyloop.cluster.report.markup import Markup, escape, shown, tag
from tinyloop.cluster.report.scale import duration, edges_of, histogram, nice_step, ticks
from tinyloop.cluster.report.story import rates, read_story
from tinyloop.cluster.report.style import DARK, LIGHT, MARKS, TEXTS
from tinyloop.cluster.report.writing import make_report, write_report
from tinyloop.cluster.settings import ErrorBudget, ScoreSettings
from tinyloop.cluster.timeline import Moment, Timeline

from .score_driver import score
from .test_job import make_rows, outputs, settings

HOSTILE = (
    "</title></svg><script>alert(1)</script><img src=//evil onerror=alert(1)>"
    "\" ' onload='x' \u202egnp\ud800\0"
)
ALLOWED_WORDS = (
    "html head meta title style body main header footer section figure figcaption h1 h2 h3 p "
    "div span b i small svg g line path rect text ul li dl dt dd table thead tbody tr th td pre "
    "code"
)
ALLOWED = frozenset(ALLOWED_WORDS.split())


class Page(HTMLParser):
    """Elements, attributes and text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.text += data


def assert_is_harmless(page: str) -> None:
    parsed = Page(page)
    assert set(parsed.tags) <= ALLOWED
    assert not [name for name, _ in parsed.attributes if name.startswith("on") or name in ("src", "href")]
    assert "url(" not in page
    assert "@import" not in page
    page.encode("utf-8")


@given(st.text())
def test_text_stays_text(text: str) -> None:
    parsed = Page(tag("p", text, title=text))
    assert parsed.tags == ["p"]
    assert parsed.text == shown(text)
    assert parsed.attributes == [("title", shown(text))]
    assert not re.search("[\u202a-\u202e\u2066-\u2069\ud800-\udfff\0]", shown(text))


def test_markup_is_not_escaped_twice() -> None:
    assert tag("p", Markup("<b>x</b>"), "<") == "<p><b>x</b>&lt;</p>"
    assert escape(escape("<&")) == "&lt;&amp;"


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_colours_have_the_contrast_that_reading_needs(theme: dict[str, str]) -> None:
    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(one: str, other: str) -> float:
        high, low = sorted((luminance(theme[one]), luminance(theme[other])), reverse=True)
        return (high + 0.05) / (low + 0.05)

    for back in ("back", "card"):
        assert min(contrast(text, back) for text in TEXTS) >= 4.5
        assert min(contrast(mark, back) for mark in MARKS) >= 3


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200))
def test_a_histogram_counts_every_value_once(values: list[float]) -> None:
    edges = edges_of(values)
    bins = histogram(values, edges)
    assert sum(bins.counts) == len(values)
    assert 1 <= len(bins.counts) <= 45
    inside = [sum(low <= v < high for v in values) for low, high in pairwise(edges)]
    inside[0] += sum(v < edges[0] for v in values)
    inside[-1] += sum(v >= edges[-1] for v in values)
    assert list(bins.counts) == inside


@given(st.floats(1e-6, 1e9), st.integers(1, 10))
def test_ticks_are_round_and_few(span: float, parts: int) -> None:
    step = nice_step(span, parts)
    assert span / step <= parts * (1 + 1e-6)
    assert round(step / 10 ** math.floor(math.log10(step) + 1e-9), 6) in (1, 2, 5, 10)
    assert len(ticks(0, span, parts)) <= parts + 1


def test_durations_are_read_in_two_units() -> None:
    shown_as = {0: "0 s", 0.44: "0.4 s", 9.96: "10 s", 61: "1 min 1 s", 3_600: "1 h", 93_600: "1 d 2 h"}
    assert {seconds: duration(seconds) for seconds in shown_as} == shown_as


def test_rates_add_up_to_what_was_done() -> None:
    rng, now = random.Random(4), [0.0]
    timeline = Timeline(clock_s=lambda: now[0])
    rows = 0
    for _ in range(900):
        timeline.sample(Moment(rows, 0, {"tokens_total": rows}, 1, [ReplicaMoment(0, 1, "busy")], 1))
        now[0] += rng.uniform(0.9, 3)
        rows += rng.randrange(50)
    story, why = read_story(json.loads(json.dumps(timeline.content())))
    assert story is not None, why
    found = rates(story, "rows_done")
    width = (story.times[-1] - story.times[0]) / len(found)
    total = sum(rate * width for _, rate in found if rate is not None)
    assert total == pytest.approx(story.series["rows_done"][-1], rel=1e-6)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished job of which ids, texts and file name are hostile."""
    folder = tmp_path_factory.mktemp("report")
    lines = make_rows(300)
    for k, task in enumerate(({"text": HOSTILE}, {"context": HOSTILE}, {"context": 5, "continuation": "x"})):
        lines.append(json.dumps({"id": f"{k}{HOSTILE}", **task}).encode() + b"\n")
    path = folder / "<b onload=x>&rows.jsonl"
    path.write_bytes(b"".join(lines))
    score(ScoreSettings(inputs=(str(path),), output=folder / "out", replace_surrogates=True))
    return folder / "out"


def test_a_page_holds_the_figures_of_the_summary_and_nothing_that_runs(job: Path) -> None:
    page = (job / "report.html").read_text()
    assert_is_harmless(page)
    summary = json.loads((job / "summary.json").read_bytes())
    text = Page(page).text
    for group in summary["groups"]:
        if "acc" in group:
            assert f"{100 * group['acc']:.1f} %" in text
        if group.get("bits_per_byte") is not None:
            assert f"{group['bits_per_byte']:,.4g}" in text
    for name, count in summary["errors_by_class"].items():
        assert f"{name} {count} row" in text
    assert f"{summary['results']:,} of {summary['rows']:,} rows have a result" in text
    assert all(re.search("Bad|Lower|Each of these|stop:", caption) for caption in captions(page))


def captions(page: str) -> list[str]:
    return re.findall(r"<figcaption>(.*?)</figcaption>", page, re.DOTALL)


@pytest.mark.parametrize("lost", ["timeline", "run", "progress", "summary"])
@pytest.mark.parametrize("content", [None, b"{oops", b"[1]", b'{"groups": 5, "samples": 3, "pool": []}'])
def test_a_page_is_made_whatever_is_missing_or_damaged(
    job: Path, tmp_path: Path, lost: str, content: bytes | None
) -> None:
    for path in job.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    if content is None:
        (tmp_path / f"{lost}.json").unlink()
    else:
        (tmp_path / f"{lost}.json").write_bytes(content)
    page = make_report(tmp_path)
    assert_is_harmless(page)
    if content in (b"{oops", b"[1]"):
        assert f"{lost}.json could not be read" in page


def test_a_stopped_job_has_a_page_of_what_was_scored(tmp_path: Path) -> None:
    from tinyloop.cluster.errors import ErrorBudgetExceeded

    with pytest.raises(ErrorBudgetExceeded):
        score(settings(tmp_path, make_rows(300), max_window_rows=32, budget=ErrorBudget(max_count=10)))
    page = (tmp_path / "out" / "report.html").read_text()
    assert_is_harmless(page)
    assert "too many errors" in page
    assert re.search("Not final: from the [1-9][0-9]* rows", page)


def test_a_page_that_fails_is_said_and_the_job_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = make_rows(80)
    score(settings(tmp_path, lines, "good"))

    def fail(*_: object, **__: object) -> str:
        raise ZeroDivisionError("made to fail")

    monkeypatch.setattr(writing, "make_report", fail)
    summary = score(settings(tmp_path, lines, "bad"))
    assert summary["state"] == "complete"
    assert outputs(tmp_path / "bad") == outputs(tmp_path / "good")
    assert not (tmp_path / "bad" / "report.html").exists()
    assert "report.html could not be made (ZeroDivisionError: made to fail)" in capsys.readouterr().err


def test_a_large_file_is_read_in_blocks_and_that_is_said(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = (job / "results.jsonl").read_bytes().splitlines(True)
    monkeypatch.setattr(reading, "BLOCK_BYTES", 2_000)
    lines = reading.result_lines(job, 20_000)
    read = list(lines.read())
    assert lines.is_sampled
    assert set(read) <= set(whole)
    assert len(set(read)) == len(read) < len(whole)
    # Spread over the file and not its beginning alone.
    assert max(whole.index(line) for line in read) > 0.8 * len(whole)
    monkeypatch.setattr(writing, "FULL_BYTES", 20_000)
    assert "evenly spaced pieces" in make_report(job)


def test_the_story_of_a_running_job_is_in_its_folder(job: Path) -> None:
    content = json.loads((job / "timeline.json").read_bytes())
    done = content["columns"].index("rows_done")
    assert content["samples"][-1][done] == json.loads((job / "summary.json").read_bytes())["rows"]
    assert np.isfinite(np.array(content["samples"])).all()


def test_an_empty_job_has_a_page(tmp_path: Path) -> None:
    score(settings(tmp_path, []))
    page = (tmp_path / "out" / "report.html").read_text()
    assert_is_harmless(page)
    assert "There was no row to work on" in page
    write_report(tmp_path / "out", {"state": "complete"})
