"""Make configs/demo from the data folder: `python tests/golden/make_demo.py DATA [DESTINATION]`.

DATA holds questions/blimp.jsonl.xz, questions/wordnet-def.held.jsonl.xz and corpus/held.tar.xz. The choice is
by fixed strides, so the same data give the same rows.
"""

from __future__ import annotations

import argparse
import json
import lzma
import tarfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]

PAIRS_OF_EACH_PARADIGM = 5
DEFINITIONS = 220
# Held-out source, document, characters to skip, what it is. All public domain; a passage starts at a
# paragraph.
PASSAGES = (
    ("books", 2, 60_000, "Charles Brockden Brown, Wieland (1798)"),
    ("books", 4, 20_000, "Fyodor Dostoevsky, White Nights, translated by Constance Garnett (1918)"),
    ("books", 7, 40_000, "Horace Walpole, The Castle of Otranto (1764)"),
    ("books", 8, 30_000, "Jane Austen, Lady Susan (1871)"),
    ("books", 9, 50_000, "L. Frank Baum, Dorothy and the Wizard in Oz (1908)"),
    ("books", 10, 10_000, "Willa Cather, Paul's Case (1905)"),
    ("sotu", 0, 20_000, "Theodore Roosevelt, State of the Union address (1903)"),
    ("kjv", 0, 0, "King James Bible, Genesis 2"),
    ("kjv", 3, 0, "King James Bible, 1 Samuel 3"),
    ("kjv", 12, 0, "King James Bible, Ecclesiastes 6"),
)
MIN_PASSAGE_CHARACTERS = 500


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("destination", type=Path, nargs="?", default=Path("configs/demo"))
    args = parser.parse_args()
    args.destination.mkdir(parents=True, exist_ok=True)
    questions = args.data / "questions"
    _write(args.destination / "minimal-pairs.jsonl", minimal_pairs(_rows(questions / "blimp.jsonl.xz")))
    _write(
        args.destination / "definitions.jsonl", definitions(_rows(questions / "wordnet-def.held.jsonl.xz"))
    )
    _write(args.destination / "rolling.jsonl", passages(args.data / "corpus" / "held.tar.xz"))


def _rows(path: Path) -> list[Row]:
    with lzma.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def _write(path: Path, rows: Iterable[Row]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def _spread(rows: list[Row], count: int) -> list[Row]:
    """count rows at equal distances."""
    return [rows[i * len(rows) // count] for i in range(count)]


def minimal_pairs(rows: list[Row]) -> Iterator[Row]:
    """The same number of pairs from each of the 67 paradigms, the whole sentences as choices."""
    by_paradigm: defaultdict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_paradigm[row["set"].removeprefix("blimp/")].append(row)
    for paradigm, members in sorted(by_paradigm.items()):
        for row in _spread(members, PAIRS_OF_EACH_PARADIGM):
            yield _choice_row(f"blimp/{row['id']}", "", row["choices"], row, paradigm=paradigm)


def definitions(rows: list[Row]) -> Iterator[Row]:
    """Definition to word, four choices, spread over nouns, adjectives and verbs as the data are."""
    for row in _spread(rows, DEFINITIONS):
        words = [f" {word}" for word in row["choices"]]
        part = row["set"].removeprefix("wordnet/")
        yield _choice_row(f"wordnet/{row['id']}", row["prompt"], words, row, part_of_speech=part)


def _choice_row(row_id: str, context: str, choices: list[str], row: Row, **extra: str) -> Row:
    return {"id": row_id, "context": context, "choices": choices, "gold": row["answer"], **extra}


def passages(archive: Path) -> Iterator[Row]:
    """Whole paragraphs of held-out documents, about MIN_PASSAGE_CHARACTERS each."""
    with tarfile.open(archive) as files:
        for source, document, skip, title in PASSAGES:
            member = files.extractfile(f"{source}.held.txt")
            assert member is not None
            text = member.read().decode().split("\0")[document]
            yield {"id": f"{source}/{document}", "text": _passage(text, skip), "source": title}


def _passage(text: str, skip: int) -> str:
    begin = text.find("\n\n", skip) + 2 if skip else 0
    end = text.find("\n\n", begin + MIN_PASSAGE_CHARACTERS)
    return text[begin : end if end >= 0 else None].strip()


if __name__ == "__main__":
    main()
