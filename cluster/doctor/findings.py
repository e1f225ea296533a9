"""What a check comes to, and how sizes are written."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from .facts import Unknown

GB = 10**9


class Level(StrEnum):
    """A failure stops pools or makes them wrong; a warning makes them slow, or will fail later."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    FAILURE = "failure"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found, and what to do where something is to be done."""

    level: Level
    found: str
    todo: str = ""


def unknown(fact: Unknown, todo: str = "", level: Level = Level.WARNING) -> Finding:
    """The finding for a fact that is not there."""
    return Finding(level, f"could not be found out: {fact.reason}", todo)


def size_text(size_bytes: int) -> str:
    """Bytes for people, as 12.3 GB or 45 MB."""
    return f"{size_bytes / GB:,.1f} GB" if size_bytes >= GB else f"{size_bytes / 10**6:,.0f} MB"
