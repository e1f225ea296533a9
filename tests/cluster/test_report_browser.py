"""The page in a real browser: each width and colour scheme, no overflow, no request, all text readable.

Run where chromium is; where TINYLOOP_BROWSER is set its absence is a failure and not a skip.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tinyloop.cluster.compare.page import compare_page
from tinyloop.cluster.compare.runs import compare_folders
from tinyloop.cluster.lanes import ReplicaMoment
from tinyloop.cluster.report.writing import make_report
from tinyloop.cluster.timeline import Moment, Timeline

from .score_driver import score
from .test_job import make_rows, settings

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-quic",
]  # fmt: skip
WIDTHS = (360, 768, 1280)

# Every element with text of its own: its colour against the nearest background that is not transparent.
CONTRASTS = """
() => {
  const parse = c => (c.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => {
    const f = v => { v /= 255; return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; };
    return 0.2126 * f(r) + 0.7152 * f(g) + 0.0722 * f(b);
  };
  const back = e => {
    for (; e; e = e.parentElement) {
      const c = parse(getComputedStyle(e).backgroundColor);
      if (c.length && c[3] !== 0) return c;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const e of document.body.querySelectorAll('*')) {
    const own = [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
    if (!own || e.tagName === 'title') continue;
    const style = getComputedStyle(e);
    const box = e.getBoundingClientRect();
    const text = parse(e instanceof SVGElement ? style.fill : style.color);
    const [high, low] = [light(text), light(back(e))].sort((x, y) => y - x);
    found.push({text: e.textContent.slice(0, 60), contrast: (high + 0.05) / (low + 0.05),
                width: box.width, height: box.height, size: parseFloat(style.fontSize),
                left: box.left, right: box.right, shown: style.display !== 'none' && !e.closest('thead')});
  }
  return found;
}
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None and "TINYLOOP_BROWSER" not in os.environ:
        pytest.skip("chromium is not installed")
    assert CHROMIUM is not None, "TINYLOOP_BROWSER is set and chromium is not installed"
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield started
        started.close()


def story() -> dict[str, Any]:
    """A job of three replicas, one of which dies, with a resume."""
    now = [0.0]
    timeline = Timeline(clock_s=lambda: now[0])
    host = "a-host-with-a-long-name"
    for second in range(200):
        now[0] = float(second)
        died = "ActorDiedError" * (second >= 80)
        state = "loading" if 80 <= second < 90 else "busy" if second < 190 else "ready"
        moments = [
            ReplicaMoment(slot, 1 + (second >= 80), state if slot == 1 else "busy", host, 0.9 * second, 2,
                          second << 20, 1 << 30, second << 21, died)
            for slot in range(3)
        ]  # fmt: skip
        tokens = {"tokens_total": 900 * second, "tokens_computed": 300 * second, "tokens_sent": 180_000}
        timeline.sample(Moment(5 * second, 0, tokens | {"tokens_ideal": 50_000}, 3, moments, 3))
        if second % 40 == 0:
            timeline.window_sent(200 * second, 200, 9_000)
            timeline.rows_back(200 * second, 200, "a-very-long-identifier-" * 9)
    resumed = Timeline(clock_s=lambda: now[0], earlier=timeline.content())
    now[0] += 5
    resumed.sample(Moment(1_000, 0, {"tokens_total": 10, "tokens_computed": 5}, 3, [], 3), force=True)
    return resumed.content()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages of a job with every kind of row and error, of an empty one, and of a comparison."""
    import json

    folder = tmp_path_factory.mktemp("pages")
    rows = make_rows(300)
    rows.append(json.dumps({"id": "x" * 300 + "</script>", "text": "a"}).encode() + b"\n")
    score(settings(folder, rows, "full"))
    score(settings(folder, rows, "other", depth=1))
    score(settings(folder, [], "empty"))
    (folder / "full" / "timeline.json").write_text(json.dumps(story()))
    content = compare_folders(folder / "full", folder / "other").as_json()
    found = {
        "full": make_report(folder / "full"),
        "empty": make_report(folder / "empty"),
        "compare": compare_page(content, ["not equal: an example"], 0.0),
    }
    for name, page in found.items():
        (folder / f"{name}.html").write_text(page)
    return {name: folder / f"{name}.html" for name in found}


@pytest.fixture(params=[(width, mode) for width in WIDTHS for mode in ("light", "dark")], ids=str)
def view(request: pytest.FixtureRequest, browser: Browser) -> Iterator[tuple[Page, list[str]]]:
    """A page of a width and colour scheme, and what it asked for or complained of."""
    width, mode = request.param
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=mode)
    page = context.new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(f"console: {message.text}"))
    page.on("pageerror", lambda error: said.append(f"error: {error}"))
    page.on("request", lambda asked: said.append(f"request: {asked.url}"))
    yield page, said
    context.close()


@pytest.mark.parametrize("name", ["full", "empty", "compare"])
def test_a_page_fits_is_readable_and_asks_for_nothing(
    pages: dict[str, Path], view: tuple[Page, list[str]], name: str
) -> None:
    page, said = view
    page.goto(pages[name].as_uri())
    assert said == [f"request: {pages[name].as_uri()}"]
    width = page.evaluate("innerWidth")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    texts = [text for text in page.evaluate(CONTRASTS) if text["shown"]]
    assert len(texts) > 20
    faint = [text for text in texts if text["contrast"] < 4.5]
    unseen = [text for text in texts if text["width"] == 0 or text["height"] == 0 or text["size"] < 11]
    outside = [text for text in texts if text["left"] < -0.5 or text["right"] > width + 0.5]
    assert (faint, unseen, outside) == ([], [], [])


def test_dark_is_dark_and_paper_is_light(pages: dict[str, Path], browser: Browser) -> None:
    context = browser.new_context(color_scheme="dark")
    page = context.new_page()
    page.goto(pages["full"].as_uri())
    colour = "getComputedStyle(document.querySelector('.card')).backgroundColor"
    assert page.evaluate(colour) == "rgb(26, 32, 39)"
    page.emulate_media(media="print")
    assert page.evaluate(colour) == "rgb(255, 255, 255)"
    context.close()
