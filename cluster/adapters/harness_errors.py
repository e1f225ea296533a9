"""What ends a run of the harness, said clearly."""

from __future__ import annotations

SHOWN_CHARACTERS = 60


class HarnessError(RuntimeError):
    """A request or a setting that cannot be served; the message says which, why and what to do."""


def shown(*texts: str) -> str:
    """Texts for a message, long ones by their ends."""
    return " + ".join(repr(text if len(text) <= SHOWN_CHARACTERS else _ends(text)) for text in texts)


def _ends(text: str) -> str:
    half = SHOWN_CHARACTERS // 2
    return f"{text[:half]}...{text[-half:]}"
