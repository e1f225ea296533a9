"""What going deeper costs, and what a cascade saves: upgrades against full runs, margins against agreement.

    python tests/bench/depth.py upgrades [--threads 1 2] [--repeats 7]
    python tests/bench/depth.py cascade --pairs blimp.jsonl.xz --definitions wordnet-def.held.jsonl.xz

upgrades: the time from depth 2 to 4 over half the time of a full run at 4 (target 1.10), taken in turns,
median over the repeats, of wall time (ratio) and of processor time (cpu_ratio, steadier where
others use the machine). "all" scores every id, so the head runs on every row again; "tail" the last 16.

cascade: every item is scored once at each depth, and the rule of tinyloop.native.cascade is replayed on the
sums for each margin: which choice wins, how often as at full depth, how many row loops were saved. Replaying
is exact, as a cascade's numbers are those of plain runs (tests/native/test_cascade.py); --timed runs the
real one on that many rows, in turns with a full run. Prompts of definitions are prefixes, and their loops
are counted with those of the choices. One JSON line a case.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from samples import start_id
from tinyloop.native import Model, PrefixCache, ResumeHandle, cascade, load_model
from tinyloop.native.cascade import group_margins
from tinyloop.native.format import read_header
from tinyloop.native.models import default_model_path
from tinyloop.native.tokenizer import load_tokenizer
from tokenizers import Tokenizer

FROM, TO = 2, 4
TAIL = 16
PREFIX = 512
MARGINS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, math.inf)
STEPS = ((2, 3, 4), (2, 4), (1, 2, 3, 4), (3, 4))
IDS_A_CALL = 8192


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=default_model_path())
    parser.add_argument("--repeats", type=int, default=7)
    commands = parser.add_subparsers(required=True)
    upgrades = commands.add_parser("upgrades")
    upgrades.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    upgrades.add_argument("--lengths", type=int, nargs="+", default=[32, 128, 512])
    upgrades.set_defaults(run=measure_upgrades)
    table = commands.add_parser("cascade")
    table.add_argument("--pairs", type=Path, help="BLiMP rows as JSON lines, plain or .xz")
    table.add_argument("--every", type=int, default=15, help="take every n-th pair of the file")
    table.add_argument("--definitions", type=Path, help="rows with a prompt and choices")
    table.add_argument("--timed", type=int, default=100, help="rows that the real cascade is timed on")
    table.add_argument("--threads", type=int)
    table.set_defaults(run=measure_cascades)
    args = parser.parse_args()
    args.run(args)


# ---- upgrades ------------------------------------------------------------------------------------


def measure_upgrades(args: argparse.Namespace) -> None:
    for threads in args.threads:
        with load_model(args.model, threads=threads) as model:
            for length in args.lengths:
                for prefix_length in (0, PREFIX):
                    for scored in (length, min(TAIL, length)):
                        measure_upgrade(model, threads, length, scored, prefix_length, args.repeats)


def measure_upgrade(
    model: Model, threads: int, length: int, scored: int, prefix_length: int, repeats: int
) -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, model.descriptor["vocab_size"], prefix_length + length + 1).astype(np.int32)
    prefix = model.prefix(ids[:prefix_length], depth=TO) if prefix_length else None
    item = ids[prefix_length:]
    flat = (item, np.array([0, len(item)]), np.array([scored], np.int32))

    def turn() -> tuple[Spent, Spent, Spent]:
        handles: list[ResumeHandle] = []
        full = Spent.by(lambda: model.score(*flat, prefixes=[prefix], depth=TO))
        start = Spent.by(lambda: handles.extend(model.start_many(*flat, FROM, TO, prefixes=[prefix])))
        upgrade = Spent.by(lambda: model.upgrade(handles, TO))
        handles[0].close()
        return full, start, upgrade

    turn()  # for the caches and the clock of the machine
    turns = [turn() for _ in range(repeats)]
    if prefix:
        prefix.close()
    print_line(
        measure=f"upgrade {FROM} to {TO} over half a full run", threads=threads, tokens=length,
        prefix=prefix_length, scored="all" if scored == length else "tail",
        ratio=middle([u.wall_s / (f.wall_s / 2) for f, _, u in turns]),
        cpu_ratio=middle([u.cpu_s / (f.cpu_s / 2) for f, _, u in turns]),
        start_and_upgrade_cpu_ratio=middle([(s.cpu_s + u.cpu_s) / f.cpu_s for f, s, u in turns]),
        full_s=middle([f.wall_s for f, _, _ in turns]), repeats=repeats, numerics_id=model.numerics_id,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds on the wall, and of processors in all threads: the latter stand a busy machine better."""

    wall_s: float
    cpu_s: float

    @staticmethod
    def by(call: Callable[[], object]) -> Spent:
        wall, cpu = time.perf_counter(), time.process_time()
        call()
        return Spent(time.perf_counter() - wall, time.process_time() - cpu)


def middle(values: Sequence[float]) -> float:
    return round(statistics.median(values), 3)


# ---- cascades ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """prompt: ids before every choice, maybe none. choices: the last given id, then the scored ones."""

    prompt: NDArray[np.int32]
    choices: list[NDArray[np.int32]]
    answer: int


@dataclass(frozen=True, slots=True)
class Scored:
    """Rows whose choices were scored at each depth. sums: float64 [depths, choices]; group: row of each."""

    rows: list[Row]
    sums: NDArray[np.float64]
    group: NDArray[np.int64]


def measure_cascades(args: argparse.Namespace) -> None:
    header = read_header(args.model)
    tokenizer = load_tokenizer(header)
    start = start_id(header)
    with load_model(args.model, threads=args.threads) as model:
        if args.pairs:
            pairs = [as_pair(row, tokenizer, start) for row in read_rows(args.pairs)[:: args.every]]
            measure_set(model, "minimal pairs", pairs, args)
        if args.definitions:
            rows = [as_question(row, tokenizer, start) for row in read_rows(args.definitions)]
            measure_set(model, "definitions", rows, args)


def read_rows(path: Path) -> list[dict[str, Any]]:
    raw = path.read_bytes()
    return [json.loads(line) for line in (lzma.decompress(raw) if path.suffix == ".xz" else raw).splitlines()]


def encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def as_pair(row: dict[str, Any], tokenizer: Tokenizer, start: int) -> Row:
    choices = [np.array([start, *encoded(tokenizer, text)], np.int32) for text in row["choices"]]
    return Row(np.empty(0, np.int32), choices, row["answer"])


def as_question(row: dict[str, Any], tokenizer: Tokenizer, start: int) -> Row:
    prompt = [start, *encoded(tokenizer, row["prompt"])]
    choices = [np.array([prompt[-1], *encoded(tokenizer, f" {text}")], np.int32) for text in row["choices"]]
    return Row(np.array(prompt[:-1], np.int32), choices, row["answer"])


def measure_set(model: Model, name: str, rows: list[Row], args: argparse.Namespace) -> None:
    scored = score_rows(model, rows)
    for steps in STEPS:
        for margin in MARGINS:
            print_line(measure="cascade", set=name, rows=len(rows), **replay(scored, steps, margin))
    if args.timed:
        sample = rows[:: max(1, len(rows) // args.timed)]
        for margin in MARGINS:
            report_time(model, name, sample, margin, args.repeats)


def score_rows(model: Model, rows: list[Row]) -> Scored:
    sums = []
    for batch in batches(rows):
        flat, prefixes = flattened(model, batch, TO)
        result = model.score(*flat, prefixes=prefixes, depth=TO, by_depth=True)
        sums.append(np.add.reduceat(result.by_depth.astype(np.float64), result.offsets[:-1], axis=1))
        close(prefixes)
    group = np.repeat(np.arange(len(rows)), [len(row.choices) for row in rows])
    return Scored(rows, np.concatenate(sums, axis=1), group)


def batches(rows: list[Row]) -> list[list[Row]]:
    found: list[list[Row]] = []
    room = 0
    for row in rows:
        size = len(row.prompt) + sum(map(len, row.choices))
        if size > room:
            found.append([])
            room = IDS_A_CALL
        found[-1].append(row)
        room -= size
    return found


Flat = tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int32]]


def flattened(model: Model, rows: list[Row], depth: int) -> tuple[Flat, list[PrefixCache | None]]:
    choices = [choice for row in rows for choice in row.choices]
    prefixes: list[PrefixCache | None] = []
    for row in rows:
        prefix = model.prefix(row.prompt, depth=depth) if len(row.prompt) else None
        prefixes += [prefix] * len(row.choices)
    offsets = np.cumsum([0, *map(len, choices)], dtype=np.int64)
    return (np.concatenate(choices), offsets, (np.diff(offsets) - 1).astype(np.int32)), prefixes


def close(prefixes: list[PrefixCache | None]) -> None:
    for prefix in prefixes:
        if prefix:
            prefix.close()


def replay(scored: Scored, steps: Sequence[int], margin: float) -> dict[str, Any]:
    """The cascade's rule on sums that are known at every depth."""
    depth = np.full(len(scored.rows), steps[-1])
    running = np.ones(len(depth), bool)
    for step in steps[:-1]:
        settled = running & ~(group_margins(scored.sums[step - 1], scored.group) < margin)
        depth[settled] = step
        running &= ~settled
    reached = scored.sums[depth[scored.group] - 1, np.arange(len(scored.group))]
    chosen, full = (best_of(scored.group, sums) for sums in (reached, scored.sums[steps[-1] - 1]))
    work = np.array([len(row.prompt) + sum(len(choice) - 1 for choice in row.choices) for row in scored.rows])
    answers = np.array([row.answer for row in scored.rows])
    return {
        "depths": list(steps),
        "margin": str(margin),
        "loops_saved": round(1 - float(work @ depth) / (float(work.sum()) * steps[-1]), 4),
        "agreement": round(float((chosen == full).mean()), 4),
        "accuracy": round(float((chosen == answers).mean()), 4),
        "accuracy_full": round(float((full == answers).mean()), 4),
        "rows_by_depth": {str(step): int((depth == step).sum()) for step in steps},
    }


def best_of(group: NDArray[np.int64], sums: NDArray[np.float64]) -> NDArray[np.int64]:
    """Which choice of each row has the largest sum, the first on ties."""
    order = np.lexsort((-sums, group))
    first = np.flatnonzero(np.diff(group, prepend=-1))
    return np.asarray(order[first] - first)


def report_time(model: Model, name: str, rows: list[Row], margin: float, repeats: int) -> None:
    """The real cascade over a full run of the same rows, prefixes included, in turns."""
    groups = np.repeat(np.arange(len(rows)), [len(row.choices) for row in rows]).astype(np.int32)

    def full() -> None:
        flat, prefixes = flattened(model, rows, TO)
        model.score(*flat, prefixes=prefixes, depth=TO)
        close(prefixes)

    def cascaded() -> None:
        flat, prefixes = flattened(model, rows, FROM)
        cascade(model, *flat, groups=groups, depths=STEPS[0], margin=margin, prefixes=prefixes)
        close(prefixes)

    turns = [(Spent.by(cascaded), Spent.by(full)) for _ in range(repeats)]
    print_line(
        measure="cascade time over full time", set=name, rows=len(rows), margin=str(margin), depths=STEPS[0],
        ratio=middle([a.wall_s / b.wall_s for a, b in turns]),
        cpu_ratio=middle([a.cpu_s / b.cpu_s for a, b in turns]), repeats=repeats,
        numerics_id=model.numerics_id,
    )  # fmt: skip


def print_line(**record: Any) -> None:
    print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
