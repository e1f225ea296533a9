"""The Grafana dashboard as its JSON model, made from the panels. Pure.

`python -m tinyloop.cluster.dashboard > configs/grafana/tinyloop.json` writes the one that ships.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from .metrics import BY_NAME
from .panels import ROWS, Panel

UID = "tinyloop-pools"
WIDTH, PANEL_WIDTH, PANEL_HEIGHT = 24, 8, 8
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana's JSON model, for import; no ids of an installation are in it."""
    return {
        "uid": UID,
        "title": "TinyLoop pools",
        "tags": ["tinyloop", "ray"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": _variables()},
        "panels": list(_panels(ROWS)),
    }


def _variables() -> list[dict[str, Any]]:
    metric = BY_NAME["tinyloop_queued_items"].exported_name
    return [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
        {
            "name": "pool",
            "label": "Pool",
            "type": "query",
            "datasource": DATASOURCE,
            "query": {"query": f"label_values({metric}, pool)", "refId": "pool"},
            "refresh": 2,
            "multi": True,
            "includeAll": True,
            "current": {"text": ["All"], "value": ["$__all"]},
        },
    ]


def _panels(rows: Sequence[tuple[str, Sequence[Panel]]]) -> Iterator[dict[str, Any]]:
    number, top = 1, 0
    for title, panels in rows:
        place = {"x": 0, "y": top, "w": WIDTH, "h": 1}
        yield {
            "id": number,
            "type": "row",
            "title": title,
            "gridPos": place,
            "collapsed": False,
            "panels": [],
        }
        number, top = number + 1, top + 1
        for index, panel in enumerate(panels):
            line, column = divmod(index, WIDTH // PANEL_WIDTH)
            x, y = column * PANEL_WIDTH, top + line * PANEL_HEIGHT
            yield _time_series(panel, number, {"x": x, "y": y, "w": PANEL_WIDTH, "h": PANEL_HEIGHT})
            number += 1
        top += -(-len(panels) // (WIDTH // PANEL_WIDTH)) * PANEL_HEIGHT


def _time_series(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    limits = {"min": 0} | ({"max": panel.most} if panel.most is not None else {})
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.text,
        "datasource": DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, **limits}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": DATASOURCE,
                "expr": line.query,
                "legendFormat": line.legend,
            }
            for index, line in enumerate(panel.lines)
        ],
    }


def text() -> str:
    """The dashboard as the file that ships."""
    return json.dumps(dashboard(), indent=2) + "\n"


if __name__ == "__main__":
    print(text(), end="")
