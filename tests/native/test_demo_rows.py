"""The demo rows keep their promises: counts, unique ids, the fields of a row, balance over paradigms."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

DEMO = Path(__file__).parents[2] / "configs" / "demo"


def _rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DEMO / name).read_text(encoding="utf-8").splitlines()]


def test_choice_rows_are_many_enough_and_well_formed() -> None:
    pairs, words = _rows("minimal-pairs.jsonl"), _rows("definitions.jsonl")
    assert len(pairs) >= 300
    assert len(words) >= 200
    assert 500 <= len(pairs) + len(words) <= 600
    for row in pairs + words:
        assert 0 <= row["gold"] < len(row["choices"]) == len(set(row["choices"]))
    assert len({row["id"] for row in pairs + words}) == len(pairs) + len(words)


def test_pairs_are_spread_evenly_and_words_continue_their_context() -> None:
    counts = Counter(row["paradigm"] for row in _rows("minimal-pairs.jsonl"))
    assert len(counts) == 67
    assert len(set(counts.values())) == 1
    for row in _rows("definitions.jsonl"):
        assert not row["context"].endswith(" ")
        assert all(choice.startswith(" ") for choice in row["choices"])


def test_rolling_rows_are_whole_texts_with_a_source() -> None:
    rows = _rows("rolling.jsonl")
    assert len(rows) == 10
    assert all(len(row["text"]) > 400 and row["source"] for row in rows)
