"""The tiny models that C++ callers are tested with: every family, at 4, 8 and 16 bits a weight in turn."""

from __future__ import annotations

import sys
from itertools import cycle
from pathlib import Path

from tiny_models import FAMILIES, write_tiny

POSITIONS = 2048  # what load_model(path) asks for


def write_models(folder: Path) -> list[Path]:
    """FAMILY-BITS.tloop in `folder`."""
    paths = []
    for family, bits in zip(FAMILIES, cycle((4, 8, 16)), strict=False):
        paths.append(folder / f"{family}-{bits}.tloop")
        write_tiny(paths[-1], family, bits=bits, max_positions=POSITIONS)
    return paths


if __name__ == "__main__":
    for path in write_models(Path(sys.argv[1])):
        print(path)
