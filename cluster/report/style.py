"""The style sheet of the page. Colours are data, so that a test can hold every pair against the contrast it
needs.
"""

from __future__ import annotations

# Text on these backgrounds needs a contrast of 4.5, marks need 3 (WCAG 2). Blue and orange are told apart by
# all common kinds of colour blindness; red is never the only sign of anything.
LIGHT = {
    "back": "#f3f5f7",
    "card": "#ffffff",
    "text": "#1a1f24",
    "soft": "#56606b",
    "line": "#d5dbe1",
    "one": "#0b63a5",
    "two": "#b3540a",
    "idle": "#7d8894",
    "good": "#1a7340",
    "warn": "#8a5200",
    "bad": "#b3261e",
}
DARK = {
    "back": "#11161b",
    "card": "#1a2027",
    "text": "#e8edf2",
    "soft": "#a3afbb",
    "line": "#38424d",
    "one": "#62b0f4",
    "two": "#f2a950",
    "idle": "#8793a0",
    "good": "#62c98a",
    "warn": "#e9b45c",
    "bad": "#ff8f85",
}
TEXTS = ("text", "soft", "good", "warn", "bad")
MARKS = ("one", "two", "idle", "bad")

_RULES = """
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--back); color: var(--text); font: 15px/1.5 system-ui, -apple-system,
  "Segoe UI", Roboto, sans-serif; overflow-wrap: anywhere; }
main { max-width: 1180px; margin: 0 auto; padding: 20px 16px 48px; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 6px; }
h2 { font-size: 19px; margin: 34px 0 10px; }
h3 { font-size: 15px; margin: 0 0 8px; }
p { margin: 0 0 8px; }
.kind { color: var(--soft); margin: 0 0 2px; }
.lead { font-size: 17px; max-width: 46em; margin-bottom: 16px; }
.badge { display: inline-block; font-size: 13px; font-weight: 600; line-height: 1; padding: 5px 9px;
  border-radius: 99px; border: 1.5px solid currentColor; vertical-align: middle; }
.good { color: var(--good); }
.warn { color: var(--warn); }
.bad { color: var(--bad); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(132px, 1fr)); gap: 10px; }
.tile, .card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.tile { padding: 12px 14px; display: flex; flex-direction: column; }
.tile b { font-size: 22px; line-height: 1.2; font-variant-numeric: tabular-nums; }
.tile span, .tile small, .aside, .note, .empty, figcaption, .axis-name, dd, .lane-note { color: var(--soft);
  }
.tile small { font-size: 13px; min-height: 1.5em; }
.card { margin: 0 0 14px; padding: 14px 16px; min-width: 0; }
.aside { font-weight: 400; }
.flag { white-space: nowrap; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 430px), 1fr)); gap: 0 14px;
  align-items: stretch; }
.grid > .wide { grid-column: 1 / -1; }
figcaption, .note, .empty { font-size: 13.5px; line-height: 1.45; max-width: 62em; }
figcaption { margin-top: 10px; }
.metrics { display: grid; grid-template-columns: repeat(auto-fill, minmax(136px, 1fr)); gap: 8px 14px;
  margin-bottom: 8px; }
.metric b { display: block; font-size: 18px; font-variant-numeric: tabular-nums; }
.metric span { color: var(--soft); font-size: 13px; }
.axis-name { font-size: 13px; margin: 6px 0 0; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 14px; font-size: 13px; margin: 0 0 4px; }
.legend span { display: inline-flex; align-items: center; gap: 6px; }
.key { display: inline-block; width: 14px; height: 10px; }
svg { display: block; overflow: hidden; }
.plot { display: flex; }
.scale { flex: none; }
.chart { flex: 1; width: 100%; min-width: 0; }
svg text { fill: var(--text); font-size: 12px; }
svg .tick { fill: var(--soft); font-size: 11.5px; font-variant-numeric: tabular-nums; }
svg line.grid { stroke: var(--line); stroke-width: 1; }
svg line.axis { stroke: var(--soft); stroke-width: 1; }
svg line.mark { stroke: var(--soft); stroke-width: 1.5; stroke-dasharray: 4 3; }
.curve { fill: none; stroke-width: 2; vector-effect: non-scaling-stroke; stroke-linejoin: round; }
.area { stroke: none; fill-opacity: .22; }
.hover { fill: transparent; }
.hover:hover, g:hover > .hover { fill: var(--text); fill-opacity: .08; }
.curve.one { stroke: var(--one); }
.area.one, .bar.one { fill: var(--one); }
.key.one { background: var(--one); }
.curve.two { stroke: var(--two); }
.area.two, .bar.two { fill: var(--two); }
.key.two { background: var(--two); }
.curve.ideal { stroke: var(--two); stroke-dasharray: 6 4; }
.key.ideal { height: 0; border-top: 2px dashed var(--two); }
.bar.busy, .bar.right, .bar.first-half { fill: var(--one); }
.key.busy, .key.right, .key.first-half { background: var(--one); }
.bar.wrong, .bar.second-half, .bar.loading { fill: var(--two); }
.key.wrong, .key.second-half, .key.loading { background: var(--two); }
.key.loading { height: 7px; }
.key.ready { height: 3px; }
.key.draining { height: 7px; }
.bar.ready, .bar.unknown, .bar.draining { fill: var(--idle); }
.key.ready, .key.unknown, .key.draining { background: var(--idle); }
.bar.dead { fill: var(--bad); stroke: var(--text); stroke-width: 1; }
.key.dead { background: var(--bad); border: 1px solid var(--text); }
.meter-room { fill: var(--line); }
.meters > div { margin-bottom: 12px; }
.meter-text { margin: 0 0 3px; font-size: 14px; }
ul { margin: 6px 0 0; padding-left: 20px; }
.examples, .notes { font-size: 13.5px; }
.examples li { margin-bottom: 3px; }
code, pre { font: 13px/1.45 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
pre { white-space: pre-wrap; background: var(--back); border-radius: 8px; padding: 12px; margin: 0 0 8px; }
dl { margin: 0; font-size: 14px; }
dl > div { display: grid; grid-template-columns: minmax(110px, 24%) 1fr; gap: 0 14px; padding: 4px 0;
  border-top: 1px solid var(--line); }
dl > div:first-child { border-top: 0; }
dd { margin: 0; }
dt { font-weight: 600; }
.even dl > div { grid-template-columns: minmax(150px, 48%) 1fr; }
.counters dt span { font-weight: 400; }
.counters > div { grid-template-columns: minmax(150px, 34%) 1fr; }
table { width: 100%; border-collapse: collapse; font-size: 14px; }
th, td { text-align: left; padding: 4px 10px 4px 0; border-top: 1px solid var(--line); vertical-align: top;
  }
th.num { text-align: right; }
thead th { border-top: 0; color: var(--soft); font-weight: 600; }
.num { text-align: right; font-variant-numeric: tabular-nums; padding-right: 0; white-space: nowrap; }
th:last-child { padding-right: 0; }
footer { color: var(--soft); font-size: 13px; margin-top: 28px; }
@media (max-width: 560px) {
  main { padding: 14px 10px 32px; }
  h1 { font-size: 21px; }
  .card { padding: 12px; }
  .tiles { grid-template-columns: repeat(2, 1fr); gap: 8px; }
  .lead { font-size: 16px; }
  dl > div, .counters > div { grid-template-columns: 1fr; }
  thead { display: none; }
  tr { display: block; padding: 6px 0; border-top: 1px solid var(--line); }
  td { display: flex; justify-content: space-between; gap: 12px; border: 0; padding: 1px 0; text-align:
    right; }
  td::before { content: attr(data-label); color: var(--soft); text-align: left; flex: none; }
}
@media print {
  body { font-size: 11pt; background: #fff; }
  main { max-width: none; padding: 0; }
  .card, .tile { break-inside: avoid; }
  section { break-before: auto; }
  * { -webkit-print-color-adjust: exact; print-color-adjust: exact; }
}
"""


def style_sheet() -> str:
    """All rules; dark where the reader's system is, always light on paper."""
    return (
        f":root {{ color-scheme: light dark; {_variables(LIGHT)} }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {_variables(DARK)} }} }}\n{_RULES}"
    )


def _variables(colours: dict[str, str]) -> str:
    return " ".join(f"--{name}: {value};" for name, value in colours.items())
