"""The face of a pool that a generation job needs. No Ray here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .generate_items import Prompt
from .generate_ledger import Event


class PromptStream(Protocol):
    """Completions of one submission on their way."""

    def take(self, timeout_s: float) -> list[Event]:
        """Events that came. Waits up to timeout_s seconds while no stream of the pool has any."""

    def cancel(self, prompt: int) -> None:
        """Need no more of one completion."""

    def close(self) -> None:
        """Cancel what is on its way. Twice is harmless."""


class GeneratingPool(Protocol):
    """A pool that generates. Every prompt's events come in order and end once."""

    def stream(self, prompts: Sequence[Prompt]) -> PromptStream:
        """Begin to generate. Blocks while the pool is full."""
