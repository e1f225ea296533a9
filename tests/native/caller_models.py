"""The tiny models that C++ callers are tested with: every family, at 4 and at 16 bits a weight."""

from __future__ import annotations

import sys
from pathlib import Path

from tiny_models import FAMILIES, write_tiny

BITS = (4, 16)
POSITIONS = 2048  # what load_model(path) asks for


def write_models(folder: Path) -> list[Path]:
    """FAMILY-BITS.tloop in `folder`, for each of both."""
    paths = []
    for family in FAMILIES:
        for bits in BITS:
            paths.append(folder / f"{family}-{bits}.tloop")
            write_tiny(paths[-1], family, bits=bits, max_positions=POSITIONS)
    return paths


if __name__ == "__main__":
    for path in write_models(Path(sys.argv[1])):
        print(path)
