"""Shared by the engine's tests: models in a temporary folder, and items as flat arrays."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tiny_models import TensorMap, random_tensors, stored, tiny_descriptor
from tinyloop.native import Model, PrefixCache, ScoreResult
from tinyloop.native.format import write_model
from tinyloop.native.records import Value

VOCAB = 61  # of the tiny models
ON_GPU = os.environ.get("TINYLOOP_DEVICE", "cpu") != "cpu"
# What the engine rounds the size of a block up to: a cache line, or what a GPU's kernels want.
ALIGNMENT = 256 if ON_GPU else 64
# The modes of the product on the device that the tests run on.
NUMERIC_MODES = ("fp16",) if ON_GPU else ("fp16", "bf16")


def rounded(n_bytes: int) -> int:
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


def write_calm(
    path: Path, family: str, *, bits: int, group: int = 64, seed: int = 0, **overrides: Value
) -> Path:
    """A tiny model whose logits spread like a trained model's.

    A tied head made of standard normal embeddings gives logits of standard deviation sqrt(D), 7 here, where
    trained models have 2 to 3. FP16 rounding is relative, so such a model would multiply it by that factor.
    """
    descriptor = tiny_descriptor(family, **overrides)
    tensors: TensorMap = random_tensors(descriptor, seed)
    if descriptor["tied_head"]:
        tensors["embed"] *= np.float32(0.4)
    write_model(path, descriptor, stored(tensors, bits, group), b"", {"name": f"calm-{family}"})
    return path


def write_overflowing(path: Path) -> tuple[Path, int]:
    """A model whose values go beyond FP16 for one id; and that id, above which there is none."""
    descriptor = tiny_descriptor("llama", tied_head=False)
    tensors = random_tensors(descriptor, 0)
    huge = VOCAB - 1
    tensors["embed"][huge] = 0
    tensors["embed"][huge, 0] = 1
    values = slice((4 + 2) * 16, None)
    tensors["layers.0.qkv"][values, 0] = 3e4  # the norm scales a one-hot row by sqrt(D): past 65504
    write_model(path, descriptor, stored(tensors, 16), b"", {})
    return path, huge


def random_ids(n: int, seed: int = 0, vocab: int = VOCAB) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, vocab, n).astype(np.int32)


def score_items(
    model: Model,
    items: Sequence[tuple[NDArray[np.int32], int]],
    *,
    prefixes: Sequence[PrefixCache | None] | None = None,
    **options: Any,
) -> ScoreResult:
    """items: (ids, n_scored) each; options: those of Model.score."""
    token_ids = np.concatenate([ids for ids, _ in items]).astype(np.int32)
    offsets = np.concatenate([[0], np.cumsum([len(ids) for ids, _ in items])]).astype(np.int64)
    n_scored = np.array([n for _, n in items], np.int32)
    return model.score(token_ids, offsets, n_scored, prefixes=prefixes, **options)


def parts(result: ScoreResult) -> list[NDArray[np.float32]]:
    return [
        result.logprobs[begin:end] for begin, end in zip(result.offsets[:-1], result.offsets[1:], strict=True)
    ]
