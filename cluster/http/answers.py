"""Answers as OpenAI's API shapes them: JSON objects out of choices and counts. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .choices import Delta, Entry
from .tokens import TokenTexts

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Frame:
    """What all objects of one answer carry. created: seconds since 1970."""

    id: str
    created: int
    model: str
    fingerprint: str

    def around(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**head, "system_fingerprint": self.fingerprint, "choices": choices, **more}


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Counts: a prompt once however many choices it has."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def event(body: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + as_json(body) + b"\n\n"


def as_json(body: Mapping[str, Any]) -> bytes:
    """JSON in UTF-8. Floats are written so that they read back as the same bits."""
    return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


class CompletionShape:
    """/v1/completions; a stream's events have the same shape as the whole answer."""

    whole = chunk = "text_completion"

    def __init__(self, texts: TokenTexts, *, logprobs: bool) -> None:
        self._texts = texts
        self._logprobs = logprobs

    def choice(self, index: int, deltas: Sequence[Delta]) -> dict[str, Any]:
        """A whole choice, from all that came to it."""
        entries = [entry for delta in deltas for entry in delta.entries]
        return {
            "index": index,
            "text": "".join(delta.text for delta in deltas),
            "logprobs": self._columns(entries) if self._logprobs else None,
            "finish_reason": deltas[-1].finish_reason,
        }

    def opening(self, index: int) -> list[dict[str, Any]]:
        """Events before the first text."""
        return []

    def step(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        """Events of what came."""
        return [self.choice(index, [delta])] if delta.text or delta.entries or delta.finish_reason else []

    def _columns(self, entries: Sequence[Entry]) -> dict[str, Any]:
        tops = [self._top(entry) for entry in entries]
        return {
            "tokens": [self._texts.text_of(entry.token_id) for entry in entries],
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": tops if any(tops) else None,
            "text_offset": [entry.begin for entry in entries],
        }

    def _top(self, entry: Entry) -> dict[str, float] | None:
        """The given token and the likeliest, by their texts; where those are the same, by its id."""
        if entry.logprob is None or entry.top is None:
            return None
        given = self._texts.text_of(entry.token_id)
        top_id, logprob = entry.top
        top = self._texts.text_of(top_id)
        if top == given and top_id != entry.token_id:
            top = f"token_id:{top_id}"
        return {top: logprob, given: entry.logprob}


class ChatShape:
    """/v1/chat/completions."""

    whole, chunk = "chat.completion", "chat.completion.chunk"

    def __init__(self, texts: TokenTexts, *, logprobs: bool) -> None:
        self._texts = texts
        self._logprobs = logprobs

    def choice(self, index: int, deltas: Sequence[Delta]) -> dict[str, Any]:
        """A whole choice, from all that came to it."""
        content = "".join(delta.text for delta in deltas)
        entries = [entry for delta in deltas for entry in delta.entries]
        return {
            "index": index,
            "message": {"role": "assistant", "content": content, "refusal": None},
            "logprobs": self._content(entries),
            "finish_reason": deltas[-1].finish_reason,
        }

    def opening(self, index: int) -> list[dict[str, Any]]:
        """Events before the first text: who speaks."""
        return [self._event(index, {"role": "assistant", "content": ""}, None, None)]

    def step(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        """Events of what came; the end is one of its own."""
        events = []
        if delta.text or (delta.entries and self._logprobs):
            events.append(self._event(index, {"content": delta.text}, self._content(delta.entries), None))
        if delta.finish_reason is not None:
            events.append(self._event(index, {}, None, delta.finish_reason))
        return events

    def _event(self, index: int, delta: dict[str, Any], logprobs: Any, reason: str | None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def _content(self, entries: Sequence[Entry]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        content = []
        for entry in entries:
            top = [] if entry.top is None else [self._token(*entry.top)]
            content.append({**self._token(entry.token_id, entry.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        found = self._texts.bytes_of(token_id)
        return {"token": self._texts.text_of(token_id), "logprob": logprob, "bytes": list(found)}
