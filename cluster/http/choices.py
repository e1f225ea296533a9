"""One choice of an answer as it grows: text up to its stop, tokens with their log-probabilities.

Whole answers and streams are made by the same steps, so they are the same text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..completion_text import CompletionText, TextPieces, Vocabulary
from ..generate_items import Tokens

FINISH_REASONS = {"stop": "stop", "length": "length"}


@dataclass(frozen=True, slots=True)
class Entry:
    """One token of an answer. logprob: None for a text's first token, which nothing comes before.

    begin: characters of the text that were whole before it. top: the likeliest id and its log-probability,
    None where that was not asked for.
    """

    token_id: int
    logprob: float | None
    begin: int
    top: tuple[int, float] | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """What came to a choice: text, entries of tokens, and the reason if it has ended."""

    text: str
    entries: tuple[Entry, ...] = ()
    finish_reason: str | None = None


class Choice:
    """One completion. base: characters that stand before it in its text, such as an echoed prompt."""

    def __init__(self, vocabulary: Vocabulary, stops: Sequence[str], *, tells_top: bool, base: int) -> None:
        self._text = CompletionText(vocabulary, stops)
        self._pieces = TextPieces(vocabulary)
        self._entries: list[Entry] = []
        self._ends: list[int] = []
        self._length = 0
        self._told = 0
        self._base = base
        self._tells_top = tells_top
        self.finish_reason: str | None = None

    @property
    def num_tokens(self) -> int:
        """Generated ids, up to the one that completed a stop string; the id that stopped it included."""
        return self._text.num_ids

    def take(self, tokens: Tokens) -> Delta:
        """The next ids. A choice that has ended takes no more."""
        if self.finish_reason is not None:
            return Delta("")
        ids, logprobs = tokens.token_ids.tolist(), tokens.logprobs.tolist()
        for token_id, logprob in zip(ids, logprobs, strict=True):
            top = (token_id, logprob) if self._tells_top else None
            self._entries.append(Entry(token_id, logprob, self._base + self._length, top))
            self._length += len(self._pieces.add(token_id))
            self._ends.append(self._length)
        text = self._text.add(ids)
        if self._text.is_cut:
            self.finish_reason = "stop"
        elif tokens.finish_reason is not None:
            text += self._text.finish()
            cut = self._text.is_cut
            self.finish_reason = "stop" if cut else FINISH_REASONS[tokens.finish_reason]
        return Delta(text, self._certain(), self.finish_reason)

    def _certain(self) -> tuple[Entry, ...]:
        """Entries whose text can be told; at the end all that count."""
        begin = self._told
        if self.finish_reason is not None:
            self._told = self._text.num_ids
        else:
            shown = len(self._text.text)
            while self._told < len(self._ends) and self._ends[self._told] <= shown:
                self._told += 1
        return tuple(self._entries[begin : self._told])
