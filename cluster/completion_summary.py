"""Figures of completed rows, as they stand in summary.json."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class CompletionTally:
    """Completed rows of one input file."""

    rows: int = 0
    completions: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    truncated_rows: int = 0
    truncated_tokens: int = 0
    empty: int = 0
    loops: int = 0
    finish_reasons: Counter[str] = field(default_factory=Counter)

    def add(self, result: dict[str, Any]) -> None:
        """Count one line of results.jsonl."""
        self.rows += 1
        self.tokens_in += result["n_prompt"]
        self.truncated_rows += result["n_truncated"] > 0
        self.truncated_tokens += result["n_truncated"]
        for completion in result.get("completions", [result]):
            self.completions += 1
            self.tokens_out += completion["n_tokens"]
            self.loops += completion["depth_sum"]
            self.finish_reasons[completion["finish_reason"]] += 1
            self.empty += not completion.get("n_characters", completion.get("text"))

    def report(self, task: str) -> dict[str, Any]:
        """Its entry in summary.json; depth is the mean of loops over generated tokens."""
        return {
            "rows": self.rows,
            "completions": self.completions,
            "tokens_in": self.tokens_in,
            "tokens_out": self.tokens_out,
            "finish_reasons": dict(sorted(self.finish_reasons.items())),
            "depth_sum": self.loops,
            "depth_mean": self.loops / self.tokens_out if self.tokens_out else None,
            "truncated_rows": self.truncated_rows,
            "truncated_tokens": self.truncated_tokens,
        }

    def notes(self) -> dict[str, int]:
        """What a reader should know of the rows, and of how many."""
        return {
            "prompts that lost tokens at the left": self.truncated_rows,
            "completions that were cut at max_new_tokens": self.finish_reasons["length"],
            "completions without text": self.empty,
        }
