"""Writes corpus/: a smallest model file of every family, the seeds of the parser's fuzzer."""

from __future__ import annotations

import sys
from itertools import cycle
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from tiny_models import FAMILIES, stored, tiny_descriptor  # noqa: E402
from tinyloop.native.descriptor import expected_tensors  # noqa: E402
from tinyloop.native.format import write_model  # noqa: E402

# One layer of each part, and dims that keep a file within a few kilobytes.
SMALLEST = {"vocab_size": 3, "hidden_size": 4, "ffn_size": 2, "head_dim": 2, "eos_ids": (2,)}


def write_seed(family: str, bits: int) -> None:
    """corpus/FAMILY-BITS.tloop, the same bytes on every machine."""
    shape = dict(SMALLEST)
    whole = FAMILIES[family]
    parts = [int(whole.get(key, 0)) for key in ("n_prelude", "n_coda", "n_low")]  # type: ignore[arg-type]
    shape["n_layers"] = 1 + sum(bool(part) for part in parts)
    for key, part in zip(("n_prelude", "n_coda", "n_low"), parts, strict=True):
        if part:
            shape[key] = 1
    descriptor = tiny_descriptor(family, **shape)  # type: ignore[arg-type]
    rng = np.random.default_rng(0)
    tensors = {
        name: rng.integers(-4, 5, dims).astype(np.float32) / 4
        for name, dims in expected_tensors(descriptor).items()
    }
    path = HERE / "corpus" / f"{family}-{bits}.tloop"
    write_model(path, descriptor, stored(tensors, bits, 32), b"{}", {"name": family}, overwrite=True)


if __name__ == "__main__":
    for family, bits in zip(FAMILIES, cycle((4, 8, 16)), strict=False):
        write_seed(family, bits)
