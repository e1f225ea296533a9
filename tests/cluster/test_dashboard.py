"""The dashboard that ships is what the table of metrics makes, and asks for nothing that is not in it."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tinyloop.cluster.dashboard import dashboard, text
from tinyloop.cluster.metrics import METRICS

SHIPPED = Path(__file__).parents[2] / "configs" / "grafana" / "tinyloop.json"

# Words of PromQL, tags and legends that look like names but are none.
NAME = re.compile(r"\b(?:ray_)?tinyloop_\w+")


def queries() -> list[str]:
    return [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", ())]


def test_the_shipped_file_is_up_to_date() -> None:
    assert SHIPPED.read_text() == text(), (
        "run: python -m tinyloop.cluster.dashboard > configs/grafana/tinyloop.json"
    )


def test_the_dashboard_uses_the_exported_names_alone_and_all_of_them() -> None:
    used = {name for query in queries() for name in NAME.findall(query)}
    assert used == {metric.exported_name for metric in METRICS}


def test_counters_are_asked_for_their_rate_or_their_total() -> None:
    for query in queries():
        for name, window in re.findall(r"(ray_tinyloop_\w+)\{[^}]*\}(\[)?", query):
            assert not window or name.endswith("_total"), query


def test_queries_have_balanced_brackets_and_choose_the_pool() -> None:
    for query in queries():
        for opening, closing in ("()", "{}", "[]"):
            assert query.count(opening) == query.count(closing), query
        assert query.count('{pool=~"$pool"}') == len(NAME.findall(query)), query


def test_panels_stand_beside_each_other_within_the_width() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not taken & cells, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells


def test_no_installation_is_named() -> None:
    found = json.loads(SHIPPED.read_text())
    sources = {panel["datasource"]["uid"] for panel in found["panels"] if "datasource" in panel}
    assert sources == {"${datasource}"}
