"""The engines that quality.py can ask: the product, the PyTorch reference, and transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from tinyloop.native import load_model
from tinyloop.native.reference import Reference

Rows = Sequence[NDArray[np.int32]]
ENGINES = ("native", "reference", "transformers")
# Tokens of one call: a dozen long rows, or some hundred sentences.
BATCH_TOKENS = 8 * 1025


class Scorer(Protocol):
    def sums(self, rows: Rows, depths: Sequence[int]) -> NDArray[np.float64]:
        """Summed log-probability of each row after its first id: float64 [depths, rows]."""


def open_scorer(
    name: str, model: Path, source: Path | None, numeric_mode: Literal["fp16", "fp32"], threads: int | None
) -> Scorer:
    """One of ENGINES. source is what transformers loads; numeric_mode is the native engine's."""
    if threads is not None:
        torch.set_num_threads(threads)
    if name == "native":
        return NativeScorer(model, numeric_mode, threads)
    if name == "reference":
        return ReferenceScorer(model)
    if source is None:
        raise SystemExit("the transformers engine needs --source")
    return TransformersScorer(source)


class NativeScorer:
    def __init__(self, model: Path, numeric_mode: Literal["fp16", "fp32"], threads: int | None) -> None:
        self._model = load_model(model, threads=threads, numeric_mode=numeric_mode)

    def sums(self, rows: Rows, depths: Sequence[int]) -> NDArray[np.float64]:
        sums = np.empty((len(depths), len(rows)))
        for i, depth in enumerate(depths):
            done = 0
            for batch in _batches(rows):
                offsets = np.cumsum([0, *map(len, batch)], dtype=np.int64)
                n_scored = (np.diff(offsets) - 1).astype(np.int32)
                result = self._model.score(np.concatenate(batch), offsets, n_scored, depth=depth)
                logprobs = result.logprobs.astype(np.float64)
                sums[i, done : done + len(batch)] = np.add.reduceat(logprobs, result.offsets[:-1])
                done += len(batch)
        return sums


def _batches(rows: Rows) -> list[list[NDArray[np.int32]]]:
    batches: list[list[NDArray[np.int32]]] = []
    room = 0
    for row in rows:
        if len(row) > room:
            batches.append([])
            room = BATCH_TOKENS
        batches[-1].append(row)
        room -= len(row)
    return batches


class ReferenceScorer:
    """One row at a time, in float32: slow, for small samples."""

    def __init__(self, model: Path) -> None:
        self._model = Reference.load(model, torch.float32)

    def sums(self, rows: Rows, depths: Sequence[int]) -> NDArray[np.float64]:
        by_row = [self._model.logprobs_by_depth(row, max(depths)).sum(axis=1) for row in rows]
        return np.stack(by_row, axis=1)[np.array(depths) - 1]


class TransformersScorer:
    """A plain model in float32; depth is always 1."""

    def __init__(self, source: Path) -> None:
        from transformers import AutoModelForCausalLM

        place: dict[str, Any] = {"gguf_file": source.name} if source.is_file() else {}
        folder = source.parent if source.is_file() else source
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **place).eval()

    @torch.no_grad()
    def sums(self, rows: Rows, depths: Sequence[int]) -> NDArray[np.float64]:
        if list(depths) != [1]:
            raise SystemExit(f"transformers runs depth 1 alone, asked for {list(depths)}")
        return np.array([[self._sum(row) for row in rows]])

    def _sum(self, row: NDArray[np.int32]) -> float:
        ids = torch.from_numpy(row.astype(np.int64))
        logprobs = self._model(ids[None]).logits[0, :-1].log_softmax(-1)
        return float(logprobs.gather(1, ids[1:, None]).double().sum())
