"""Measure a model's quality: bits per byte of held-out texts and accuracy on minimal pairs, at each depth.

    python tests/bench/quality.py MODEL.tloop --texts held.tar.xz --pairs blimp.jsonl.xz
    python tests/bench/quality.py MODEL.tloop --pairs blimp.jsonl.xz --against transformers --source
    MODEL.gguf

One JSON line a measurement on standard output. `--against` also runs a second engine on the same token ids
and says on how many pairs both choose the same sentence, and how far their bits per byte are apart.

Bits per byte = nats a token x number of ids / (bytes + 1 a document) / ln 2, over rows of 1,025 ids that
overlap by one, no BOS, at most --limit-tokens of a text. A document ends in a byte of the text (0) and in an
id (the model's first end id). With a small limit the figure is that of the text's beginning at the whole
text's bytes a
token: right for comparing engines and bits, not with the whole text's figure.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from engines import ENGINES, Scorer, open_scorer
from numpy.typing import NDArray
from samples import ROW_TOKENS, Pairs, Text, read_pairs, read_texts, start_id
from tinyloop.native.format import read_header
from tinyloop.native.tokenizer import load_tokenizer


def main() -> int:
    args = _arguments()
    header = read_header(args.model)
    tokenizer = load_tokenizer(header)
    depths = args.depths or range(1, int(str(header.descriptor["loops"])) + 1)
    names = [args.engine, *([args.against] if args.against else [])]
    options = (args.model, args.source, args.numeric_mode, args.threads)
    scorers = [open_scorer(name, *options) for name in names]
    if args.texts:
        for text in read_texts(args.texts, tokenizer, header, set(args.only or ())):
            _report_text(text, names, scorers, depths, args.limit_tokens)
    if args.pairs:
        start = start_id(header) if args.start is None else args.start
        pairs = read_pairs(args.pairs, tokenizer, start, args.every, args.max_pairs)
        _report_pairs(pairs, names, scorers, depths)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help=".tloop file; its tokenizer makes the ids for every engine")
    parser.add_argument("--texts", type=Path, help="tar archive or folder of NAME.held.txt")
    parser.add_argument("--only", nargs="*", metavar="NAME", help="texts to take; all when not given")
    parser.add_argument("--limit-tokens", type=int, default=400_000)
    parser.add_argument("--pairs", type=Path, help="BLiMP rows as JSON lines, plain or .xz")
    parser.add_argument("--every", type=int, default=15, help="take every n-th pair of the file")
    parser.add_argument("--max-pairs", type=int, default=10**9)
    parser.add_argument("--start", type=int, metavar="ID", help="id before a sentence; BOS when not given")
    parser.add_argument("--depths", type=int, nargs="*")
    parser.add_argument("--engine", choices=ENGINES, default="native")
    parser.add_argument("--against", choices=ENGINES)
    parser.add_argument("--source", type=Path, help="what transformers loads: a folder, or a .gguf file")
    parser.add_argument("--numeric-mode", choices=("fp16", "fp32"), default="fp16")
    parser.add_argument("--threads", type=int)
    return parser.parse_args()


def _report_text(
    text: Text, names: Sequence[str], scorers: Sequence[Scorer], depths: Sequence[int], limit_tokens: int
) -> None:
    rows = text.rows(limit_tokens)
    n_scored = len(rows) * ROW_TOKENS
    per_nat = len(text.ids) / text.n_bytes / math.log(2) / n_scored
    found = []
    for name, scorer in zip(names, scorers, strict=True):
        begin = time.perf_counter()
        sums = scorer.sums(rows, depths)
        seconds = time.perf_counter() - begin
        found.append(-sums.sum(axis=1) * per_nat)
        _print(
            measure="bits per byte",
            text=text.name,
            engine=name,
            tokens=n_scored,
            by_depth=_by_depth(depths, found[-1]),
            tokens_per_s=round(n_scored * len(depths) / seconds),
        )
    if len(found) == 2:
        apart = np.abs(found[0] / found[1] - 1)
        _print(measure="bits per byte apart", text=text.name, by_depth=_by_depth(depths, apart, digits=6))


def _report_pairs(
    pairs: Pairs, names: Sequence[str], scorers: Sequence[Scorer], depths: Sequence[int]
) -> None:
    chosen = []
    for name, scorer in zip(names, scorers, strict=True):
        sums = scorer.sums(pairs.sentences, depths).reshape(len(depths), -1, 2)
        chosen.append(sums.argmax(axis=2))
        accuracy = (chosen[-1] == pairs.gold).mean(axis=1)
        _print(
            measure="minimal pairs", engine=name, pairs=len(pairs.gold), by_depth=_by_depth(depths, accuracy)
        )
    if len(chosen) == 2:
        same = (chosen[0] == chosen[1]).sum(axis=1)
        _print(measure="pairs chosen alike", pairs=len(pairs.gold), by_depth=_by_depth(depths, same))


def _by_depth(depths: Sequence[int], values: NDArray[Any], digits: int = 4) -> dict[str, float]:
    return {str(depth): round(float(value), digits) for depth, value in zip(depths, values, strict=True)}


def _print(**record: object) -> None:
    print(json.dumps(record), flush=True)


if __name__ == "__main__":
    sys.exit(main())
