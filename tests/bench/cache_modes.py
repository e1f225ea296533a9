"""What each cache mode costs and changes: bits per byte, log-probabilities, choices, bytes, time.

    python tests/bench/cache_modes.py --texts held.tar.xz --only books textbooks chats --pairs blimp.jsonl.xz
    python tests/bench/cache_modes.py --model SMOLLM2.tloop --texts held.tar.xz --only books --windows 4

Texts: --windows windows a text, evenly spread, each --prefix tokens as a PrefixCache and --item scored tokens
after it, so that every scored row reads a stored cache. Pairs: minimal pairs after a shared prefix of
held-out text that ends in the document end. All modes are loaded at once and take turns, window by window;
times are medians of a window's ratio to fp16 in the same turn, on the wall and of processors.

"apart" compares with fp16 keys and values in the same arithmetic (the line of fp16: with float32 arithmetic
and keys and values) by log-probabilities l and probabilities p of the scored tokens:
rms_log (l), rms_p (p, the figure that llama.cpp calls RMS delta p), kl_estimate (half the mean square of
the change of l: the divergence, where tokens fall as the model says), perplexity (relative change),
perplexity_error (its standard error). One JSON line a text or summary and mode.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from samples import Pairs, Text, read_pairs, read_texts, start_id
from tinyloop.native import Model, PrefixCache, load_model, plan
from tinyloop.native.format import read_header
from tinyloop.native.models import default_model_path
from tinyloop.native.tokenizer import load_tokenizer

MODES = ("fp16", "int8", "h_fp16", "h_int8", "h_int4")
EXACT = "fp32"  # not a mode: fp16's caches with float32 arithmetic, what fp16 itself is held against


@dataclass
class Side:
    """A mode's model and all that was measured on it."""

    model: Model
    by_depth: list[NDArray[np.float64]] = field(default_factory=list)  # [depths, tokens] a window
    prefix_s: list[tuple[float, float]] = field(default_factory=list)  # wall, processors
    item_s: list[tuple[float, float]] = field(default_factory=list)


def main() -> None:
    args = arguments()
    header = read_header(args.model)
    tokenizer = load_tokenizer(header)
    modes = [mode for mode in (EXACT, *MODES) if mode in (EXACT, "fp16", *args.modes)]
    sides = {mode: open_side(args.model, mode, args.threads) for mode in modes}
    texts = list(read_texts(args.texts, tokenizer, header, set(args.only or ())))
    for side in sides.values():  # once for the caches and the clock of the machine
        side.model.score_tokens(texts[0].ids[: args.item])
    for text in texts:
        measure_text(text, sides, args)
    report_all(sides, args)
    if args.pairs:
        pairs = read_pairs(args.pairs, tokenizer, start_id(header), args.every, args.max_pairs)
        report_pairs(pairs, texts[0].ids[: args.pairs_prefix], sides, args)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=default_model_path())
    parser.add_argument("--texts", type=Path, required=True, help="tar archive or folder of NAME.held.txt")
    parser.add_argument("--only", nargs="*", metavar="NAME")
    parser.add_argument("--windows", type=int, default=6, help="of each text")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES, help="beside fp16; fewer: sooner")
    parser.add_argument("--prefix", type=int, default=512)
    parser.add_argument("--item", type=int, default=256)
    parser.add_argument("--pairs", type=Path, help="BLiMP rows as JSON lines, plain or .xz")
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--max-pairs", type=int, default=10**9)
    parser.add_argument("--pairs-prefix", type=int, default=128)
    parser.add_argument("--threads", type=int)
    return parser.parse_args()


def open_side(path: Path, mode: str, threads: int | None) -> Side:
    if mode == EXACT:
        return Side(load_model(path, cache_mode="fp16", numeric_mode="fp32", threads=threads))
    return Side(load_model(path, cache_mode=mode, threads=threads))


def measure_text(text: Text, sides: dict[str, Side], args: argparse.Namespace) -> None:
    length = args.prefix + args.item + 1  # the first id after the prefix is given, not scored
    starts = np.linspace(0, len(text.ids) - length, args.windows).astype(int)
    first = {mode: len(side.by_depth) for mode, side in sides.items()}
    for turn, start in enumerate(starts):
        window = text.ids[start : start + length]
        for mode in rotated(list(sides), turn):
            measure_window(sides[mode], window, args.prefix)
    nats_to_bits = len(text.ids) / text.n_bytes / math.log(2)
    for mode, side in sides.items():
        found = np.concatenate(side.by_depth[first[mode] :], axis=1)
        bits = -found.mean(axis=1) * nats_to_bits
        print_line(measure="bits per byte", text=text.name, mode=mode, tokens=found.shape[1],
                   by_depth=[round(float(b), 4) for b in bits])  # fmt: skip


def rotated(modes: list[str], turn: int) -> list[str]:
    """Another one begins each turn, so that none always runs behind the same neighbour."""
    return modes[turn % len(modes) :] + modes[: turn % len(modes)]


def measure_window(side: Side, window: NDArray[np.int32], prefix_length: int) -> None:
    model, item = side.model, window[prefix_length:]
    began = clocks()
    with model.prefix(window[:prefix_length], upgradable=False) as prefix:
        built = clocks()
        flat = (item, np.array([0, len(item)]), np.array([len(item) - 1], np.int32))
        model.score(*flat, prefixes=[prefix])
        scored = clocks()
        side.prefix_s.append((built[0] - began[0], built[1] - began[1]))
        side.item_s.append((scored[0] - built[0], scored[1] - built[1]))
        result = model.score(*flat, prefixes=[prefix], by_depth=True)
    side.by_depth.append(result.by_depth.astype(np.float64))


def clocks() -> tuple[float, float]:
    """On the wall, and of processors in all threads: the latter stands a busy machine better."""
    return time.perf_counter(), time.process_time()


def report_all(sides: dict[str, Side], args: argparse.Namespace) -> None:
    base = sides["fp16"]
    for mode in (mode for mode in MODES if mode in sides):
        side = sides[mode]
        against = sides[EXACT] if mode == "fp16" else base
        found, wanted = (np.concatenate(s.by_depth, axis=1) for s in (side, against))
        print_line(
            measure="all texts", mode=mode, numerics_id=side.model.numerics_id, model=args.model.name,
            apart=[apart(a, b) for a, b in zip(found, wanted, strict=True)],
            token_bytes=plan(args.model, cache_mode=mode).cache_token_bytes,
            prefix_time=ratios(side.prefix_s, base.prefix_s), item_time=ratios(side.item_s, base.item_s),
            prefix=args.prefix, item=args.item, windows=len(side.item_s),
        )  # fmt: skip


def apart(found: NDArray[np.float64], wanted: NDArray[np.float64]) -> dict[str, float]:
    change = found - wanted
    figures = {
        "rms_log": math.sqrt(np.mean(change**2)),
        "rms_p": math.sqrt(np.mean((np.exp(found) - np.exp(wanted)) ** 2)),
        "kl_estimate": float(np.mean(change**2)) / 2,
        "max_log": float(np.abs(change).max()),
        "perplexity": math.expm1(-change.mean()),
        "perplexity_error": float(change.std()) / math.sqrt(len(change)),
    }
    return {name: float(f"{value:.3g}") for name, value in figures.items()}


def ratios(times: list[tuple[float, float]], base: list[tuple[float, float]]) -> dict[str, float]:
    return {
        clock: round(statistics.median(a[i] / b[i] for a, b in zip(times, base, strict=True)), 3)
        for i, clock in enumerate(("wall", "cpu"))
    }


def report_pairs(
    pairs: Pairs, passage: NDArray[np.int32], sides: dict[str, Side], args: argparse.Namespace
) -> None:
    chosen = {mode: choose(side.model, pairs, passage) for mode, side in sides.items()}
    for mode in (mode for mode in MODES if mode in sides):
        choice, _ = chosen[mode]
        base_choice, base_sums = chosen[EXACT if mode == "fp16" else "fp16"]
        flips = choice != base_choice
        decided = np.abs(base_sums[:, 0] - base_sums[:, 1])
        print_line(
            measure="minimal pairs", mode=mode, model=args.model.name, pairs=len(pairs.gold),
            prefix=len(passage), accuracy=round(float((choice == pairs.gold).mean()), 4),
            agreement=round(float((~flips).mean()), 4),
            largest_margin_lost=round(float(decided[flips].max(initial=0)), 3),
        )  # fmt: skip


def choose(
    model: Model, pairs: Pairs, passage: NDArray[np.int32]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Which sentence of each pair has the larger sum, and the sums: float64 [pairs, 2]."""
    with model.prefix(passage, upgradable=False) as prefix:
        sums = sentence_sums(model, pairs.sentences, prefix).reshape(-1, 2)
    return sums.argmax(axis=1), sums


def sentence_sums(
    model: Model, sentences: list[NDArray[np.int32]], prefix: PrefixCache
) -> NDArray[np.float64]:
    offsets = np.cumsum([0, *map(len, sentences)], dtype=np.int64)
    n_scored = (np.diff(offsets) - 1).astype(np.int32)
    result = model.score(np.concatenate(sentences), offsets, n_scored, prefixes=[prefix] * len(sentences))
    return np.add.reduceat(result.logprobs.astype(np.float64), result.offsets[:-1])


def print_line(**record: Any) -> None:
    print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
