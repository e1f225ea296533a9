"""Two folders in, one comparison out: what lies at the edge of the pure parts."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..report.reading import JobFiles, failure_lines, read_folder, result_lines
from ..report.row_fields import number
from .comparison import Comparison
from .pairing import Waiting, pairs

SPEED = ("elapsed_s", "rows_per_s")
WHOLE = sys.maxsize


@dataclass(slots=True)
class Compared:
    """Two jobs and what their rows say. settings: keys of the fingerprints that differ, with both values."""

    a: JobFiles
    b: JobFiles
    rows: Comparison
    settings: dict[str, tuple[Any, Any]]

    def as_json(self) -> dict[str, Any]:
        """Everything that --json prints but the verdict."""
        return {
            "a": _about(self.a),
            "b": _about(self.b),
            "settings": {key: {"a": a, "b": b} for key, (a, b) in self.settings.items()},
            **self.rows.as_json(),
        }


def compare_folders(a: Path, b: Path) -> Compared:
    """Read both runs once. Raises: UsageError if one of them is no job's folder."""
    files_a, files_b = read_folder(a), read_folder(b)
    rows = Comparison()
    with Waiting() as waiting:
        for line_a, line_b in pairs(result_lines(a, WHOLE).read(), result_lines(b, WHOLE).read(), waiting):
            rows.add(line_a, line_b)
        rows.failed_in_b = sum(waiting.take(0, row_id) is not None for row_id in _failed(b))
        rows.failed_in_a = sum(waiting.take(1, row_id) is not None for row_id in _failed(a))
    return Compared(files_a, files_b, rows, _differences(files_a.fingerprint, files_b.fingerprint))


def _failed(folder: Path) -> Iterator[str]:
    for line in failure_lines(folder, WHOLE):
        try:
            yield str(json.loads(line)["id"])
        except (ValueError, LookupError, TypeError):
            continue


def _differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    keys = sorted(key for key in a.keys() | b.keys() if a.get(key) != b.get(key))
    return {key: (a.get(key), b.get(key)) for key in keys}


def _about(files: JobFiles) -> dict[str, Any]:
    pool = files.summary.get("pool")
    hit_rate = number(pool.get("hit_rate")) if isinstance(pool, Mapping) else None
    return {
        "folder": str(files.folder),
        "state": files.summary.get("state", files.progress.get("state")),
        "rows": files.summary.get("rows"),
        "errors": files.summary.get("errors"),
        **{name: number(files.summary.get(name)) for name in SPEED},
        "hit_rate": hit_rate,
    }
