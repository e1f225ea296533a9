"""What a score job would do, found out without a pool: rows, errors, cuts, tokens, memory, hours.

Rows are read, encoded and packed into windows by the job's own code, and cut as its pool would cut them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np

from .encoding import Encoder
from .errors import ErrorBudgetExceeded, ExitCode
from .inputs import InputFile, expand, scan
from .items import Failed, Items, Scored
from .kinds import Backend
from .plan import plan_window
from .planning import OpenWindow, WindowReader
from .progress import PoolFigures, counted
from .rows import TASK_NAMES
from .score import ScoreKind
from .segments import CutRules, cut_window
from .tasks import RowPlan

# Beyond so many tokens the cut of the whole file, which --window all would make, is not computed here either.
WHOLE_FILE_TOKENS = 64 << 20


@dataclass
class Shared:
    """Tokens of items: each computed alone, with prefixes that pay built, with all that is equal shared."""

    submitted: int = 0
    computed: int = 0
    ideal: int = 0

    def add(self, items: Items, rules: CutRules) -> None:
        """Cut items as a pool does. Tokens are rows of a pass: the last of an item is never fed."""
        head = cut_window(items, rules, client="", window=0)
        self.submitted += int(head.rows.sum())
        self.computed += int(plan_window("", head).before[-1])
        self.ideal += head.ideal_rows

    def report(self) -> dict[str, Any]:
        ratio = 1 - self.computed / self.submitted if self.submitted else 0.0
        return {
            "tokens_submitted": self.submitted,
            "tokens_to_compute": self.computed,
            "tokens_ideal": self.ideal,
            "sharing_ratio": round(ratio, 6),
        }


@dataclass
class Group:
    """Rows of one file and task."""

    rows: int = 0
    truncated_rows: int = 0
    truncated_tokens: int = 0
    merged_boundaries: int = 0

    def add(self, plan: RowPlan) -> None:
        self.rows += 1
        self.truncated_rows += any(part.n_truncated for part in plan.parts)
        self.truncated_tokens += sum(part.n_truncated for part in plan.parts)
        self.merged_boundaries += sum(part.boundary == "merged" for part in plan.parts)


@dataclass
class Findings:
    """Everything counted so far."""

    groups: dict[tuple[str, str], Group] = field(default_factory=dict)
    errors: Counter[tuple[str, str]] = field(default_factory=Counter)
    windows: int = 0
    shared: Shared = field(default_factory=Shared)


class _Cutter:
    """In the place of a pool: cuts what it is sent, and keeps distinct items for the whole file's cut."""

    def __init__(self, rules: CutRules, shared: Shared) -> None:
        self._rules = rules
        self._shared = shared
        self._seen: set[bytes] = set()
        self._ids: list[np.ndarray[Any, np.dtype[np.int32]]] = []
        self._n_scored: list[int] = []
        self._num_tokens = 0
        self._depth = 1

    def submit(self, window: int, items: Items) -> None:
        self._shared.add(items, self._rules)
        self._depth = items.depth
        self._num_tokens += int(items.offsets[-1])
        if self._num_tokens > WHOLE_FILE_TOKENS:
            self._ids, self._n_scored, self._seen = [], [], set()
            return
        offsets = items.offsets.tolist()
        for i, n_scored in enumerate(items.n_scored.tolist()):
            ids = items.token_ids[offsets[i] : offsets[i + 1]]
            key = blake2b(ids.tobytes() + n_scored.to_bytes(4, "little"), digest_size=16).digest()
            if key not in self._seen:
                self._seen.add(key)
                self._ids.append(ids)
                self._n_scored.append(n_scored)

    def collect(self, timeout_s: float) -> list[Scored | Failed]:
        return []

    def stream(self, *args: Any, **options: Any) -> Any:
        raise AssertionError("a dry run of scoring generates nothing")

    def whole_file(self) -> dict[str, Any] | None:
        """As if all rows were one window; None where that was too much."""
        if self._num_tokens > WHOLE_FILE_TOKENS:
            return None
        shared = Shared()
        if self._ids:
            lengths = [len(ids) for ids in self._ids]
            offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
            n_scored = np.array(self._n_scored, dtype=np.int32)
            shared.add(Items(np.concatenate(self._ids), offsets, n_scored, self._depth), self._rules)
        return shared.report()


class _Nothing:
    """No line is there before."""

    def pop(self, number: int) -> bytes | None:
        return None


def find_out(kind: ScoreKind, encoder: Encoder, depth: int, rules: CutRules) -> dict[str, Any]:
    """Read, encode and cut all inputs. rules: of the pool that the job would run on.

    Returns the report but for memory and hours. Raises: UsageError.
    """
    settings = kind.settings
    files = scan(expand(settings.inputs), settings.input_format)
    found = Findings()
    cutter = _Cutter(rules, found.shared)
    work = kind.begin(Backend(cutter, encoder, depth, {}, PoolFigures))
    reader = WindowReader(settings, files, kind, work, 0, _Nothing(), after_batch=lambda _: None)
    for window in reader.windows():
        _add(found, window)
        plans = [plan for plan in window.plans if isinstance(plan, RowPlan)]
        work.release(work.submit(plans))
    return _report(found, cutter, files, settings.budget.allowed(reader.rows_total))


def _add(found: Findings, window: OpenWindow) -> None:
    found.windows += 1
    for plan in window.plans:
        assert isinstance(plan, RowPlan)
        key = plan.row.file, TASK_NAMES[type(plan.row.task)]
        found.groups.setdefault(key, Group()).add(plan)
    for line in window.lines:
        if line is not None:
            failure = json.loads(line)
            found.errors[failure["file"], failure["class"]] += 1


def _report(found: Findings, cutter: _Cutter, files: list[InputFile], allowed: int) -> dict[str, Any]:
    num_errors = sum(found.errors.values())
    code = ExitCode.SCORED if not num_errors else ExitCode.ROW_ERRORS
    if num_errors > allowed:
        code = ErrorBudgetExceeded.exit_code
    by_class: Counter[str] = Counter()
    for (_, name), count in found.errors.items():
        by_class[name] += count
    return {
        "exit_code": int(code),
        "rows": sum(group.rows for group in found.groups.values()) + num_errors,
        "errors": num_errors,
        "errors_allowed": allowed,
        "errors_by_class": dict(sorted(by_class.items())),
        "errors_by_file": [
            {"file": file, "class": name, "rows": count} for (file, name), count in found.errors.items()
        ],
        "groups": [
            {"file": file, "task": task, **vars(group)} for (file, task), group in found.groups.items()
        ],
        "blank_lines": sum(file.num_blank for file in files),
        "windows": found.windows,
        "by_window": found.shared.report(),
        "whole_file": cutter.whole_file(),
        "notes": [f"{file.label}: {note}" for file in files for note in file.notes],
    }


def lines_of(report: Mapping[str, Any]) -> Iterator[str]:
    """The report for people."""
    for group in report["groups"]:
        yield f"{group['file']} [{group['task']}]: {counted(group['rows'], 'row')}, " + (
            f"{group['truncated_rows']:,} truncated (-{group['truncated_tokens']:,} tokens), "
            f"{group['merged_boundaries']:,} merged boundaries"
        )
    for error in report["errors_by_file"]:
        yield f"{error['file']}: {counted(error['rows'], 'row')} with {error['class']}"
    yield f"{counted(report['rows'], 'row')}, {counted(report['errors'], 'error')}"
    yield f"{counted(report['windows'], 'window')}: {_sharing(report['by_window'])}"
    whole = report["whole_file"]
    what = "not computed: too many tokens" if whole is None else _sharing(whole)
    yield f"as one window (--window all): {what}"
    memory = report["memory"]
    yield f"memory: {memory['model_bytes']:,} bytes a replica, {memory['prefix_bytes']:,} a prefix of " + (
        f"{memory['prefix_tokens']:,} tokens (plan for a CPU)"
    )
    hours = report["estimate"]
    yield (
        f"about {hours['hours']:.3g} hours on {counted(hours['replicas'], 'replica')} at "
        f"{hours['tokens_per_s']:,.0f} tokens/s each; rate: {hours['source']}"
    )
    yield from (f"note: {note}" for note in report["notes"])


def _sharing(shared: Mapping[str, Any]) -> str:
    return (
        f"{shared['tokens_submitted']:,} tokens submitted, {shared['tokens_to_compute']:,} to compute "
        f"(sharing {100 * shared['sharing_ratio']:.1f} %, {shared['tokens_ideal']:,} at the least)"
    )
