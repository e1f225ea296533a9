"""What a client asked to be generated and has not all of. Pure.

Invariant: each id of a completion is handed on once, in order. A completion that is computed again, since a
replica died, comes from its start: what is known of it is compared, bit for bit, and only the rest is new.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..workers.prompts import Prompts
from ..workers.tokens import End, TokenBundle
from .generate_items import NotGenerated, Tokens
from .items import Float32Array, Int32Array

Event = Tokens | NotGenerated
_REASONS = {End.OPEN: None, End.STOP: "stop", End.LENGTH: "length"}


class RepeatDiffers(RuntimeError):
    """A completion came out differently when it was computed again: the replicas do not compute alike."""


@dataclass(slots=True)
class _Open:
    """A completion on its way: what is known of it."""

    token_ids: Int32Array
    logprobs: Float32Array
    depths: Int32Array

    def __len__(self) -> int:
        return len(self.token_ids)


class GenerateLedger:
    """Conserves completions: each one opened ends once, by its last ids, a failure or a cancellation."""

    def __init__(self) -> None:
        self._windows: dict[int, Prompts] = {}
        self._open: dict[int, dict[int, _Open]] = {}

    def open(self, prompts: Prompts) -> None:
        """A window is submitted."""
        empty = _Open(np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.int32))
        self._windows[prompts.window] = prompts
        self._open[prompts.window] = {
            item: _Open(empty.token_ids, empty.logprobs, empty.depths) for item in range(len(prompts))
        }

    def prompts(self, window: int) -> Prompts:
        """The requests of a window that is open."""
        return self._windows[window]

    def open_windows(self) -> list[int]:
        """Windows with completions that have not ended."""
        return [window for window, items in self._open.items() if items]

    def missing(self, window: int) -> Int32Array:
        """int32 indices of a window's completions that have not ended."""
        return np.array(list(self._open.get(window, ())), dtype=np.int32)

    def close(self, window: int) -> None:
        """Forget a window."""
        self._windows.pop(window, None)
        self._open.pop(window, None)

    def accept(self, bundle: TokenBundle) -> list[tuple[int, Event]]:
        """What a bundle brings that was not known, by window. Raises RepeatDiffers."""
        failures = list(bundle.failures)
        events: list[tuple[int, Event]] = []
        for entry, (window, item) in enumerate(
            zip(bundle.windows.tolist(), bundle.items.tolist(), strict=True)
        ):
            end = End(int(bundle.ends[entry]))
            failure = failures.pop(0) if end is End.FAILED else None
            known = self._open.get(window, {}).get(item)
            if known is None:
                continue
            new = _extend(known, bundle, entry, f"prompt {item} of window {window}")
            reason = _REASONS.get(end)
            if len(new) or reason is not None:
                first = len(known) - len(new)
                events.append((window, Tokens(item, first, *_columns(new), reason)))
            if failure is not None:
                events.append((window, NotGenerated(item, failure.error_class, failure.message, 1)))
            if end is not End.OPEN:
                del self._open[window][item]
        return events

    def fail(self, window: int, items: Int32Array, kind: str, message: str, attempts: int) -> list[Event]:
        """The pool gave these completions up. Returns those that had not ended."""
        given_up = [item for item in items.tolist() if self._open.get(window, {}).pop(item, None) is not None]
        return [NotGenerated(item, kind, message, attempts) for item in given_up]

    def cancel(self, window: int, item: int) -> Event | None:
        """The caller needs no more of one completion. None if it had ended."""
        known = self._open.get(window, {}).pop(item, None)
        if known is None:
            return None
        nothing = _Open(known.token_ids[:0], known.logprobs[:0], known.depths[:0])
        return Tokens(item, len(known), *_columns(nothing), "cancelled")


def _columns(part: _Open) -> tuple[Int32Array, Float32Array, Int32Array]:
    return part.token_ids, part.logprobs, part.depths


def _extend(known: _Open, bundle: TokenBundle, entry: int, what: str) -> _Open:
    """Add an entry's ids to what is known, and return those that are new."""
    first, have = int(bundle.first[entry]), len(known)
    begin, end = int(bundle.offsets[entry]), int(bundle.offsets[entry + 1])
    if first > have:
        raise RepeatDiffers(f"{what}: ids from {first} on came, and {have} are known: some were lost")
    again = min(have - first, end - begin)
    for name in ("token_ids", "logprobs", "depths"):
        came, before = (
            getattr(bundle, name)[begin : begin + again],
            getattr(known, name)[first : first + again],
        )
        if came.tobytes() != before.tobytes():
            at = int(np.flatnonzero(came.view(np.int32) != before.view(np.int32))[0])
            raise RepeatDiffers(
                f"{what} came out differently when it was computed again: {name} at {first + at} is "
                f"{came[at]} and was {before[at]}: use equal machines and builds for all replicas"
            )
    ended = End(int(bundle.ends[entry])) is not End.OPEN
    if ended and first + end - begin < have:
        raise RepeatDiffers(f"{what} ended after {first + end - begin} ids, and {have} are known")
    new = slice(begin + again, end)
    fresh = _Open(bundle.token_ids[new], bundle.logprobs[new], bundle.depths[new])
    known.token_ids = np.concatenate([known.token_ids, fresh.token_ids])
    known.logprobs = np.concatenate([known.logprobs, fresh.logprobs])
    known.depths = np.concatenate([known.depths, fresh.depths])
    return fresh
