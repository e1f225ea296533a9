"""One picture of a comparison as SVG text: a panel a workload under pressure, a bar a policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

PANEL_WIDTH, BAR_HEIGHT, LABEL_WIDTH, COLUMNS, TOP = 470, 15, 120, 2, 60
BAR_WIDTH = 190
OURS_COLOUR, OTHERS_COLOUR, MAKESPAN_COLOUR = "#1f6f8b", "#9aa5ad", "#444444"


def draw(found: Sequence[Mapping[str, object]], policies: Sequence[str]) -> str:
    """The hit rate of each policy as a bar, with makespan over bound beside it.

    found: maps with workload, pressure, policy, hit_share and slowdown; only those under pressure are drawn.
    """
    rows = [row for row in found if row["pressure"]]
    names = list(dict.fromkeys(str(row["workload"]) for row in rows))
    panel_height = BAR_HEIGHT * len(policies) + 44
    width = COLUMNS * PANEL_WIDTH + 20
    height = TOP + -(-len(names) // COLUMNS) * panel_height + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        '<text x="12" y="24" font-size="16">Hit rate in % of ideal (bar) and makespan over the bound '
        "(figure), memory under pressure</text>",
        '<text x="12" y="42" fill="#666">simulated replicas; the other routers are models of their rules'
        "</text>",
    ]
    for index, name in enumerate(names):
        left, top = 10 + index % COLUMNS * PANEL_WIDTH, TOP + index // COLUMNS * panel_height
        parts.append(_panel(name, [row for row in rows if row["workload"] == name], left, top))
    return "\n".join([*parts, "</svg>\n"])


def _panel(name: str, rows: Sequence[Mapping[str, object]], left: int, top: int) -> str:
    parts = [f'<text x="{left}" y="{top + 14}" font-size="13" font-weight="bold">{escape(name)}</text>']
    for place, row in enumerate(rows):
        hit, slowdown = float(str(row["hit_share"])), float(str(row["slowdown"]))
        colour = OURS_COLOUR if str(row["policy"]).startswith("ours") else OTHERS_COLOUR
        y = top + 22 + place * BAR_HEIGHT
        bar = BAR_WIDTH * min(max(hit, 0.0), 100.0) / 100.0
        x = left + LABEL_WIDTH
        parts += [
            f'<text x="{x - 6}" y="{y + 11}" text-anchor="end">{escape(str(row["policy"]))}</text>',
            f'<rect x="{x}" y="{y + 1}" width="{BAR_WIDTH}" height="{BAR_HEIGHT - 3}" fill="#f0f2f3"/>',
            f'<rect x="{x}" y="{y + 1}" width="{bar:.1f}" height="{BAR_HEIGHT - 3}" fill="{colour}"/>',
            f'<text x="{x + BAR_WIDTH + 6}" y="{y + 11}">{hit:.1f}</text>',
            f'<text x="{x + BAR_WIDTH + 50}" y="{y + 11}" fill="{MAKESPAN_COLOUR}">{slowdown:.2f} x</text>',
        ]
    return "\n".join(parts)
