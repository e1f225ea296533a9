"""What a finished job says: counts and means taken from the files that it wrote, not from memory."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from .completion_summary import CompletionTally
from .openai_records import native_view

# Made once, and given text: json.loads looks for the encoding of every line.
_DECODER = json.JSONDecoder()

METRICS = ("acc", "acc_norm", "acc_bytes", "acc_token", "acc_pmi")


def id_code(row_id: str) -> int:
    """A 64-bit hash of an id. Sums of these compare two sets of rows whatever their order."""
    digest = hashlib.blake2b(
        row_id.encode("utf-8", "surrogatepass"), digest_size=8, person=b"reconcile"
    ).digest()
    return int.from_bytes(digest, "little")


@dataclass
class IdSum:
    """How many rows, and the sum of their id codes modulo 2^64."""

    count: int = 0
    code: int = 0

    def add(self, row_id: str) -> None:
        self.count += 1
        self.code = (self.code + id_code(row_id)) % (1 << 64)


class Group(Protocol):
    """Running figures of one input file and task."""

    def add(self, result: dict[str, Any]) -> None:
        """Count one line of results.jsonl."""

    def report(self, task: str) -> dict[str, Any]:
        """Its entry in summary.json."""

    def notes(self) -> dict[str, int]:
        """What a reader should know of the rows, and of how many."""


@dataclass
class GroupTally:
    """Scored rows of one input file and task."""

    rows: int = 0
    with_gold: int = 0
    correct: Counter[str] = field(default_factory=Counter)
    undefined: Counter[str] = field(default_factory=Counter)
    ties: int = 0
    greedy: int = 0
    duplicate_choices: int = 0
    truncated_rows: int = 0
    truncated_tokens: int = 0
    merged_boundaries: int = 0
    zero_probability: int = 0
    empty_documents: int = 0
    logprob: float = 0.0
    tokens: int = 0
    bytes: int = 0
    words: int = 0
    bits_per_byte_sum: float = 0.0
    documents_in_mean: int = 0

    def add(self, result: dict[str, Any]) -> None:
        """Count one line of results.jsonl."""
        self.rows += 1
        if result["task"] == "continuation":
            self._add_continuation(result)
        elif result["task"] == "choices":
            self._add_choices(result)
        else:
            self._add_text(result)

    def report(self, task: str) -> dict[str, Any]:
        """Figures of one task, those that it has."""
        report: dict[str, Any] = {"rows": self.rows}
        if task == "choices":
            report |= self._accuracies()
        if task == "continuation":
            report |= {"greedy": self.greedy, "logprob": self._total(), "tokens": self.tokens}
        if task == "text":
            report |= self._perplexities()
        if task != "text":
            report |= {
                "truncated_rows": self.truncated_rows,
                "truncated_tokens": self.truncated_tokens,
                "merged_boundaries": self.merged_boundaries,
            }
        return report | {"zero_probability": self.zero_probability}

    def notes(self) -> dict[str, int]:
        """What a reader should know of the rows, and of how many."""
        return {
            "rows with two equal choices, which tie by construction": self.duplicate_choices,
            "rows with a tie for the best choice, of which the first counts": self.ties,
            "rows that lost context tokens at the left": self.truncated_rows,
            "parts with a token across context and continuation": self.merged_boundaries,
            "log-probabilities of zero probability (null)": self.zero_probability,
            "accuracies that two zero probabilities leave undefined, not counted as wrong": (
                self.undefined.total()
            ),
            "documents that are empty and not in the means": self.empty_documents,
        }

    def _add_continuation(self, result: dict[str, Any]) -> None:
        self._add_pairs([result])
        self.greedy += result["is_greedy"]
        self.tokens += result["n_continuation"]
        self.logprob += result["logprob"] or 0.0

    def _add_choices(self, result: dict[str, Any]) -> None:
        self._add_pairs(result["choices"])
        self.ties += result["tie"]
        self.duplicate_choices += result.get("duplicate_choices", False)
        if "gold" in result:
            self.with_gold += 1
            self.correct.update({metric: right is True for metric, right in result["correct"].items()})
            self.undefined.update(metric for metric, right in result["correct"].items() if right is None)

    def _add_pairs(self, pairs: list[dict[str, Any]]) -> None:
        self.truncated_rows += any(pair["n_truncated"] for pair in pairs)
        self.truncated_tokens += sum(pair["n_truncated"] for pair in pairs)
        self.merged_boundaries += sum(pair["boundary"] == "merged" for pair in pairs)
        self.zero_probability += sum(pair["logprob"] is None for pair in pairs)

    def _add_text(self, result: dict[str, Any]) -> None:
        if result["n_tokens"] == 0:
            self.empty_documents += 1
            return
        self.tokens += result["n_tokens"]
        self.bytes += result["n_bytes"]
        self.words += result["n_words"]
        if result["logprob"] is None:
            self.zero_probability += 1
            return
        self.logprob += result["logprob"]
        self.bits_per_byte_sum += -result["logprob"] / (result["n_bytes"] * math.log(2))
        self.documents_in_mean += 1

    def _accuracies(self) -> dict[str, Any]:
        """Of each metric over the rows where it is defined; the others are counted and are not wrong."""
        accuracies: dict[str, float | None] = {}
        for metric in METRICS:
            if metric in self.correct:
                rows = self.with_gold - self.undefined[metric]
                accuracies[metric] = self.correct[metric] / rows if rows else None
        return {
            "with_gold": self.with_gold,
            **accuracies,
            **({"undefined": dict(self.undefined)} if self.undefined else {}),
            "ties": self.ties,
            "rows_with_duplicate_choices": self.duplicate_choices,
        }

    def _total(self) -> float | None:
        """Nats. One zero probability makes the sum minus infinity, which JSON cannot say."""
        return None if self.zero_probability else self.logprob

    def _perplexities(self) -> dict[str, Any]:
        report: dict[str, Any] = {
            "empty_documents": self.empty_documents,
            "logprob": self._total(),
            "tokens": self.tokens,
            "bytes": self.bytes,
            "words": self.words,
        }
        known = self.tokens > 0 and self.zero_probability == 0
        return report | {
            "token_perplexity": _perplexity(self.logprob, self.tokens) if known else None,
            "byte_perplexity": _perplexity(self.logprob, self.bytes) if known else None,
            "word_perplexity": _perplexity(self.logprob, self.words) if known else None,
            "bits_per_byte": -self.logprob / (self.bytes * math.log(2)) if known else None,
            "bits_per_byte_mean_over_documents": (
                self.bits_per_byte_sum / self.documents_in_mean if known and self.documents_in_mean else None
            ),
        }


def _perplexity(logprob: float, count: int) -> float | None:
    """exp(-logprob / count); None beyond the range of a float."""
    exponent = -logprob / count if count else math.inf
    return math.exp(exponent) if exponent < 700 else None


@dataclass
class DepthTally:
    """How deep rows went. Those with nothing to score did not go anywhere."""

    rows: int = 0
    depth: float = 0.0
    histogram: Counter[int] = field(default_factory=Counter)

    def add(self, result: dict[str, Any]) -> None:
        """Count one line of results.jsonl."""
        if result["depth"]:
            self.rows += 1
            self.depth += result.get("depth_mean", result["depth"])
            self.histogram[result["depth"]] += 1

    def report(self) -> dict[str, Any]:
        """Mean loops of a row, and rows by the most loops of any of their tokens."""
        histogram = {str(depth): count for depth, count in sorted(self.histogram.items())}
        return {"mean": self.depth / self.rows if self.rows else None, "rows_by_depth": histogram}


@dataclass
class Tally:
    """Everything counted from results.jsonl and errors.jsonl."""

    ids: IdSum = field(default_factory=IdSum)
    results: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    groups: dict[tuple[str, str], Group] = field(default_factory=dict)
    depths: DepthTally = field(default_factory=DepthTally)

    @classmethod
    def of_files(cls, output: Path) -> Tally:
        """Read both files of an output folder, line by line."""
        with (output / "results.jsonl").open("rb") as results, (output / "errors.jsonl").open("rb") as errors:
            return cls.of_lines(results, errors)

    @classmethod
    def of_lines(cls, results: Iterable[bytes], errors: Iterable[bytes]) -> Tally:
        """Count lines of JSON."""
        tally = cls()
        tally._add_results(results)
        for line in errors:
            failure = native_view(_DECODER.decode(line.decode()))
            tally.ids.add(failure["id"])
            tally.failures[failure["class"]] += 1
        return tally

    def report(self) -> dict[str, Any]:
        """The part of summary.json that depends on the rows alone."""
        return {
            "rows": self.ids.count,
            "results": self.results,
            "errors": sum(self.failures.values()),
            "errors_by_class": dict(sorted(self.failures.items())),
            "groups": [
                {"file": file, "task": task, **group.report(task)}
                for (file, task), group in self.groups.items()
            ],
            **({"depth": self.depths.report()} if self.depths.rows else {}),
            "warnings": self._warnings(),
        }

    def _add_results(self, lines: Iterable[bytes]) -> None:
        for line in lines:
            self.add(native_view(_DECODER.decode(line.decode())))

    def add(self, result: dict[str, Any]) -> None:
        """Count one line of results, as a native one."""
        self.ids.add(result["id"])
        self.results += 1
        if result["task"] != "completion":
            self.depths.add(result)
        key = result["file"], result["task"]
        if key not in self.groups:
            self.groups[key] = CompletionTally() if result["task"] == "completion" else GroupTally()
        self.groups[key].add(result)

    def _warnings(self) -> list[str]:
        totals: Counter[str] = Counter()
        for group in self.groups.values():
            totals.update(group.notes())
        return [f"{text}: {total:,}" for text, total in totals.items() if total]
