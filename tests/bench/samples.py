"""What the quality benchmarks measure on: held-out texts and minimal pairs, as token ids."""

from __future__ import annotations

import json
import lzma
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tinyloop.native.format import Header
from tokenizers import Tokenizer

ROW_TOKENS = 1024
PIECE_CHARACTERS = 20_000  # how the training text was cut before encoding; the ids depend on it at the seams


@dataclass(frozen=True, slots=True)
class Text:
    """ids: int32 [n], documents joined by the end id. n_bytes: UTF-8 bytes and one a document."""

    name: str
    ids: NDArray[np.int32]
    n_bytes: int

    def rows(self, limit_tokens: int) -> list[NDArray[np.int32]]:
        use = min(len(self.ids) - 1, limit_tokens) // ROW_TOKENS * ROW_TOKENS
        return [self.ids[begin : begin + ROW_TOKENS + 1] for begin in range(0, use, ROW_TOKENS)]


@dataclass(frozen=True, slots=True)
class Pairs:
    """sentences: two a pair, behind the start id. gold: int [pairs], which of the two is right."""

    sentences: list[NDArray[np.int32]]
    gold: NDArray[np.int64]


def read_texts(path: Path, tokenizer: Tokenizer, header: Header, only: set[str]) -> Iterator[Text]:
    for name, raw in sorted(_documents_by_name(path)):
        if only and name not in only:
            continue
        documents = [document for document in raw.split("\0") if document.strip()]
        ids: list[int] = []
        for document in documents:
            for begin in range(0, len(document), PIECE_CHARACTERS):
                piece = document[begin : begin + PIECE_CHARACTERS]
                ids += tokenizer.encode(piece, add_special_tokens=False).ids
            ids.append(end_id(header))
        n_bytes = sum(len(document.encode()) + 1 for document in documents)
        text = Text(name, np.array(ids, np.int32), n_bytes)
        if text.rows(ROW_TOKENS):
            yield text


def _documents_by_name(path: Path) -> Iterator[tuple[str, str]]:
    suffix = ".held.txt"
    if path.is_dir():
        for file in path.glob(f"*{suffix}"):
            yield file.name.removesuffix(suffix), file.read_text(encoding="utf-8")
        return
    with tarfile.open(path) as archive:
        for member in archive:
            content = archive.extractfile(member)
            if content and member.name.endswith(suffix):
                yield Path(member.name).name.removesuffix(suffix), content.read().decode()


def end_id(header: Header) -> int:
    ids = header.descriptor["eos_ids"]
    assert isinstance(ids, tuple)
    return ids[0]


def start_id(header: Header) -> int:
    """The model's BOS id, or its end id when it has none."""
    bos_id = int(str(header.descriptor["bos_id"]))
    return bos_id if bos_id >= 0 else end_id(header)


def read_pairs(path: Path, tokenizer: Tokenizer, start: int, every: int, limit: int) -> Pairs:
    raw = path.read_bytes()
    lines = (lzma.decompress(raw) if path.suffix == ".xz" else raw).decode().splitlines()
    rows: list[dict[str, Any]] = [json.loads(line) for line in lines[::every][:limit]]
    sentences = [
        np.array([start, *tokenizer.encode(choice, add_special_tokens=False).ids], np.int32)
        for row in rows
        for choice in row["choices"]
    ]
    return Pairs(sentences, np.array([row["answer"] for row in rows]))
