"""Cutting a document into windows so that every token is scored exactly once.

Pure arithmetic over positions; the windows are those of the common evaluation harness.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RollingPolicy:
    """How documents longer than the window are cut.

    stride: tokens scored in each window after the first; None scores as many as fit (disjoint predictions).
    bos_every_window: begin every window with the prefix token, not the first alone. It changes the numbers.
    """

    stride: int | None = None
    bos_every_window: bool = False


@dataclass(frozen=True, slots=True)
class RollingWindow:
    """Ids of one window: the prefix token if with_prefix, then tokens[begin:end].

    The last n_scored of them are scored.
    """

    begin: int
    end: int
    n_scored: int
    with_prefix: bool


def rolling_windows(n_tokens: int, max_rows: int, policy: RollingPolicy) -> list[RollingWindow]:
    """Windows over tokens 0..n_tokens-1, each at most max_rows + 1 ids long.

    Every token is in the scored part of exactly one window; each has at least one id before it. The last
    window is shifted left, so that it has as much context as fits.
    """
    room = max_rows - 1 if policy.bos_every_window else max_rows
    step = max(1, min(policy.stride or room, room))
    windows: list[RollingWindow] = []
    scored = min(n_tokens, max_rows)
    if scored:
        windows.append(RollingWindow(0, scored, scored, with_prefix=True))
    while scored < n_tokens:
        n_scored = min(step, n_tokens - scored)
        scored += n_scored
        # max_rows + 1 ids are fed and scored: without the prefix all of them are the document's own.
        begin = scored - max_rows if policy.bos_every_window else scored - max_rows - 1
        windows.append(RollingWindow(begin, scored, n_scored, policy.bos_every_window))
    return windows
