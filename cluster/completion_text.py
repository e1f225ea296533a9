"""Generated ids to text as they come: no half characters, and the text up to the first stop string.

Invariant: the pieces of a completion, joined, are its whole decode, cut before the first place where any stop
string begins. How the ids were parted on their way changes nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

UNFINISHED = "\ufffd"
# Tokens that are one byte each, in tokenizers that fall back on bytes: a run of them is decoded as one.
BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Vocabulary:
    """What decoding needs to know of a tokenizer, read from it once and shared by all completions."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(number for number, token in added.items() if token.special)
        decoder = json.loads(tokenizer.to_str())["decoder"]
        falls_back = "ByteFallback" in json.dumps(decoder)
        vocab = tokenizer.get_vocab(with_added_tokens=True) if falls_back else {}
        self.byte_ids = frozenset(number for token, number in vocab.items() if BYTE_TOKEN.fullmatch(token))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a completion's ids, without special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def special_id(self, text: str) -> int | None:
        """The id of the special token that is spelled so. Such a text never comes out of decode."""
        number = self.tokenizer.token_to_id(text)
        return number if number in self.special_ids else None


class TextPieces:
    """One completion's ids to pieces of text: each character once it is whole."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._ids: list[int] = []
        # The last ids that are in the text already: a decoder treats the first id of a text unlike others.
        self._before: list[int] = []
        self._before_length = 0
        self._waiting: list[int] = []
        self._length = 0

    def add(self, token_id: int) -> str:
        """The text that is certain now and was not before; often empty."""
        if token_id in self._vocabulary.special_ids:
            return ""
        self._ids.append(token_id)
        self._waiting.append(token_id)
        if token_id in self._vocabulary.byte_ids:
            return ""
        text = self._vocabulary.decode([*self._before, *self._waiting])
        if text.endswith(UNFINISHED) or len(text) <= self._before_length:
            return ""
        piece = text[self._before_length :]
        self._before, self._waiting = self._waiting, []
        self._before_length = len(self._vocabulary.decode(self._before))
        self._length += len(piece)
        return piece

    def finish(self) -> str:
        """The rest, when no more ids come: what stays unfinished becomes U+FFFD, as in a whole decode."""
        return self._vocabulary.decode(self._ids)[self._length :] if self._waiting else ""


class StopStrings:
    """Finds where the first of several texts begins in a text that comes in pieces."""

    def __init__(self, stops: Iterable[str]) -> None:
        """stops: each at least one character. Raises: ValueError for an empty one."""
        self._stops = tuple(dict.fromkeys(stops))
        if not all(self._stops):
            raise ValueError("a stop string is empty: it would end every completion before its first token")
        self._longest = max(map(len, self._stops), default=0)
        self._tail = ""
        self._tail_begin = 0
        self._found: tuple[int, int] | None = None

    @property
    def found(self) -> tuple[int, int] | None:
        """First and last place + 1 of the stop string that the text is cut at, as known so far."""
        return self._found

    def add(self, piece: str) -> None:
        """Look at the next piece. After is_certain nothing more needs to be added."""
        if not self._stops:
            self._tail_begin += len(piece)
            return
        self._tail += piece
        for stop in self._stops:
            place = self._tail.find(stop)
            if place >= 0:
                begin = self._tail_begin + place
                self._found = min(self._found or (begin, begin + len(stop)), (begin, begin + len(stop)))
        if self._found is None:
            dropped = max(0, len(self._tail) - self._longest + 1)
            self._tail, self._tail_begin = self._tail[dropped:], self._tail_begin + dropped

    @property
    def open_from(self) -> int:
        """The first place at which a stop string may be beginning; the text before it is certain."""
        end = self._tail_begin + len(self._tail)
        last = end if self._found is None else self._found[0]
        for place in range(max(self._tail_begin, end - self._longest + 1), last):
            begun = self._tail[place - self._tail_begin :]
            if any(stop.startswith(begun) for stop in self._stops):
                return place
        return last

    @property
    def is_certain(self) -> bool:
        """A stop string was found, and none can still turn out to have begun before it."""
        return self._found is not None and self.open_from == self._found[0]


class CompletionText:
    """The text of one completion as its ids come, up to its stop string.

    text: all that is certain so far. is_cut: a stop string ended it, so no more ids are needed. After finish,
    text is whole and num_ids says how many ids it took, the one that completed the stop string included.
    """

    def __init__(self, vocabulary: Vocabulary, stops: Iterable[str] = ()) -> None:
        self._pieces = TextPieces(vocabulary)
        self._stops = StopStrings(stops)
        self._decoded = ""
        # How much was decoded after each id: which id completed the stop string.
        self._lengths: list[int] = []
        self._shown = 0
        self._finished = False

    @property
    def is_cut(self) -> bool:
        return self._stops.is_certain or (self._finished and self._stops.found is not None)

    @property
    def text(self) -> str:
        return self._decoded[: self._shown]

    @property
    def num_ids(self) -> int:
        """Ids that count: those up to the one that completed the stop string, else all."""
        if not self.is_cut:
            return len(self._lengths)
        assert self._stops.found is not None
        end = self._stops.found[1]
        counted = (place for place, length in enumerate(self._lengths, 1) if length >= end)
        return next(counted, len(self._lengths))

    def add(self, token_ids: Iterable[int]) -> str:
        """Take the next ids. Returns the text that is certain now and was not before."""
        for token_id in token_ids:
            if self.is_cut:
                break
            piece = self._pieces.add(token_id)
            self._decoded += piece
            self._lengths.append(len(self._decoded))
            if piece:
                self._stops.add(piece)
        return self._show(self._stops.open_from)

    def finish(self) -> str:
        """No more ids come. Returns the rest of the text."""
        if not self.is_cut and not self._finished:
            rest = self._pieces.finish()
            self._decoded += rest
            self._stops.add(rest)
        self._finished = True
        found = self._stops.found
        return self._show(len(self._decoded) if found is None else found[0])

    def _show(self, end: int) -> str:
        begin, self._shown = self._shown, max(self._shown, end)
        return self._decoded[begin : self._shown]
