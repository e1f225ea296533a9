"""Looks at a pool again and again and shows it: the part of `tinyloop top` that waits and prints."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from .top import View, render

# A pipe has no width: every column and line is printed whole.
PIPE_WIDTH = 1000

Look = Callable[[], Mapping[str, Any]]


def console_for() -> Console:
    """The console of standard output: as wide as the terminal, or as a line of a pipe may get."""
    console = Console(highlight=False, soft_wrap=False)
    return console if console.is_terminal else Console(highlight=False, width=PIPE_WIDTH)


def show_once(
    pool: str, look: Look, console: Console, *, period_s: float, pause: Callable[[float], None] = time.sleep
) -> None:
    """Print a pool once, with the rates of the period between two looks. Raises what `look` raises."""
    before = View(look(), time.monotonic())
    pause(period_s)
    console.print(render(pool, View(look(), time.monotonic()), before))


def watch(
    pool: str,
    look: Look,
    console: Console,
    *,
    failure: type[Exception],
    period_s: float,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Show a pool until KeyboardInterrupt. A look that fails with `failure` is shown beside the last one.

    Raises `failure` if the very first look fails.
    """
    before, now = None, View(look(), time.monotonic())
    with Live(render(pool, now), console=console, screen=True, auto_refresh=False) as live:
        live.refresh()
        while True:
            pause(period_s)
            trouble = ""
            try:
                before, now = now, View(look(), time.monotonic())
            except failure as error:
                trouble = str(error)
            live.update(_with_trouble(render(pool, now, before), trouble, now), refresh=True)


def _with_trouble(block: RenderableType, trouble: str, last: View) -> RenderableType:
    if not trouble:
        return block
    age_s = time.monotonic() - last.taken_s
    return Group(block, Text(f"\nas of {age_s:.0f} s ago: {trouble}", style="bold red"))
