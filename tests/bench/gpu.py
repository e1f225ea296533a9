"""How fast the engine is on one GPU, beside what others reached and what the machine allows.

    python tests/bench/gpu.py --folder DIR [--cases decode-1 documents ...] [--json out.jsonl]

Writes the models that are missing into the folder (made_models.py: real shapes, random weights), times
every case, median of its repeats, and prints a table and one JSON line a case. `peer` is the best figure that
another engine reached on the same kind of machine and shape (one H200, bf16; the case's note says which);
`limit` is what the machine's bytes or operations allow. Both are of an H200 and mean nothing elsewhere.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from made_models import SHAPES, make
from numpy.typing import NDArray
from tinyloop.native import GenerateRequest, Model, devices, load_model

MEGABYTE = 1e6


@dataclass
class Figure:
    case: str
    value: float
    unit: str
    repeats: list[float]
    peer: float | None = None
    peer_note: str = ""
    limit: float | None = None
    target: float | None = None
    details: dict[str, Any] = field(default_factory=dict)


class Bench:
    """Models by name, one loaded at a time."""

    def __init__(self, folder: Path, device: str, repeats: int) -> None:
        self.folder, self.device, self.repeats = folder, device, repeats

    def path(self, shape: str, bits: int) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        return make(self.folder / f"{shape}-{bits}.tloop", shape, bits=bits)

    def load(self, shape: str, bits: int, rows: int, chunk: int = 0, **options: Any) -> Model:
        return load_model(self.path(shape, bits), rows, chunk, device=self.device, **options)

    def times(self, run: Callable[[], Any], warm_ups: int = 1) -> list[float]:
        """Seconds of each repeat. Calls return results to the host, so they have ended when they return."""
        for _ in range(warm_ups):
            run()
        seconds = []
        for _ in range(self.repeats):
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
        return seconds


def ids_of(rng: np.random.Generator, model: Model, n: int) -> NDArray[np.int32]:
    return rng.integers(0, model.descriptor["vocab_size"], n).astype(np.int32)


def rate(case: str, amount: float, unit: str, seconds: list[float], **more: Any) -> Figure:
    rates = [amount / s for s in seconds]
    return Figure(case, statistics.median(rates), unit, rates, **more)


# ---- generation --------------------------------------------------------------------------------------


def decode(
    bench: Bench, case: str, shape: str, bits: int, n: int, new: int = 256, prompt: int = 128, **more: Any
) -> Figure:
    """Tokens a second while all n sequences decode: the time of `new` tokens less that of 16."""
    rng = np.random.default_rng(1)
    options = {name: more.pop(name) for name in ("cache_mode", "deterministic") if name in more}
    with bench.load(shape, bits, max(2048, n), **options) as model:
        prompts = [ids_of(rng, model, prompt) for _ in range(n)]

        def run(tokens: int) -> None:
            model.generate([GenerateRequest(p, tokens, stop_ids=()) for p in prompts], max_batch=n)

        short = statistics.median(bench.times(lambda: run(16)))
        long = bench.times(lambda: run(new))
        steady = [s - short for s in long]
        whole = n * new / statistics.median(long)
        details = {"context": prompt + new, "whole_call_tok_s": whole, "numerics": model.numerics_id}
    return rate(case, n * (new - 16), "tok/s", steady, details=details, **more)


def decode_fast(bench: Bench, case: str, shape: str, bits: int, **more: Any) -> Figure:
    """How much longer a step takes as it is than in the fast class of numbers."""
    exact = decode(bench, case, shape, bits, 1)
    fast = decode(bench, case, shape, bits, 1, deterministic=False)
    details = {"deterministic_tok_s": exact.value, "fast_tok_s": fast.value}
    ratios = [b / a for a, b in zip(exact.repeats, fast.repeats, strict=True)]
    return Figure(case, statistics.median(ratios), "x the time", ratios, details=details, **more)


# ---- scoring -----------------------------------------------------------------------------------------


def documents(
    bench: Bench, case: str, shape: str, bits: int, n: int, length: int = 2048, **more: Any
) -> Figure:
    rng = np.random.default_rng(2)
    with bench.load(shape, bits, 8192, fp16_cache="all") as model:
        ids = ids_of(rng, model, n * length)
        offsets = np.arange(0, n * length + 1, length, dtype=np.int64)
        scored = np.full(n, length - 1, np.int32)
        seconds = bench.times(lambda: model.score(ids, offsets, scored))
        details = {"documents": n, "numerics": model.numerics_id}
    return rate(case, n * length, "tok/s", seconds, details=details, **more)


def shared_prefixes(bench: Bench, case: str, shape: str, bits: int, **more: Any) -> Figure:
    prefixes, prefix_length, per_prefix, own = 64, 1024, 64, 32
    rng = np.random.default_rng(3)
    with bench.load(shape, bits, 8192, fp16_cache="all", cache_mode="int8") as model:
        starts = [ids_of(rng, model, prefix_length) for _ in range(prefixes)]
        tails = [ids_of(rng, model, per_prefix * own) for _ in range(prefixes)]

        def run() -> None:
            for first in range(0, prefixes, 8):
                held = [model.prefix(ids[:-1], upgradable=False) for ids in starts[first : first + 8]]
                # The last id of the prefix is each item's first: it predicts the first of its own.
                rows = [
                    np.concatenate([[ids[-1]], tail[k * own : (k + 1) * own]])
                    for ids, tail in zip(starts[first : first + 8], tails[first : first + 8], strict=True)
                    for k in range(per_prefix)
                ]
                offsets = np.arange(0, len(rows) * (own + 1) + 1, own + 1, dtype=np.int64)
                owners = [prefix for prefix in held for _ in range(per_prefix)]
                model.score(
                    np.concatenate(rows).astype(np.int32),
                    offsets,
                    np.full(len(rows), own, np.int32),
                    prefixes=owners,
                )
                for prefix in held:
                    prefix.close()

        before = model.counters["rows"]
        run()
        after = model.counters["rows"]
        seconds = bench.times(run, warm_ups=0)
        details = {
            "tokens_computed": after - before,
            "tokens_ideal": prefixes * (prefix_length - 1) + prefixes * per_prefix * own,
            "numerics": model.numerics_id,
        }
    return rate(case, prefixes * per_prefix, "items/s", seconds, details=details, **more)


def upgrade(bench: Bench, case: str, shape: str, bits: int, **more: Any) -> Figure:
    """The time from 2 loops to 4 over half the time of a run at 4, taken in turns."""
    rng = np.random.default_rng(4)
    n, length = 8, 1024
    with bench.load(shape, bits, 8192, fp16_cache="all") as model:
        ids = ids_of(rng, model, n * length)
        offsets = np.arange(0, n * length + 1, length, dtype=np.int64)
        scored = np.full(n, length - 1, np.int32)
        ratios = []
        for turn in range(bench.repeats + 1):
            start = time.perf_counter()
            handles = model.start_many(ids, offsets, scored, 4)
            full = time.perf_counter() - start
            for handle in handles:
                handle.close()
            handles = model.start_many(ids, offsets, scored, 2)
            start = time.perf_counter()
            model.upgrade(handles, 4)
            if turn > 0:
                ratios.append((time.perf_counter() - start) / (full / 2))
            for handle in handles:
                handle.close()
    return Figure(case, statistics.median(ratios), "x half of a run", ratios, **more)


# ---- loading and memory ------------------------------------------------------------------------------


def loading(bench: Bench, case: str, shape: str, bits: int, **more: Any) -> Figure:
    path = bench.path(shape, bits)
    size = path.stat().st_size
    seconds = bench.times(lambda: load_model(path, 2048, device=bench.device, fp16_cache="off").close())
    return Figure(
        case,
        statistics.median(seconds) * 1e9 / size,
        "s for 1 GB",
        seconds,
        details={"file_bytes": size},
        **more,
    )


def used_by_device(device: str) -> float:
    index = device.partition(":")[2] or "0"
    text = subprocess.run(
        ["nvidia-smi", f"--id={index}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return float(text) * 2**20


def memory(bench: Bench, case: str, shape: str, bits: int, **more: Any) -> Figure:
    """What the device says that a load, prefixes and handles took, over what the books say, less 1."""
    rng = np.random.default_rng(5)
    bench.load("smollm2-135m", 4, 256).close()  # the context and the library's own memory
    before = used_by_device(bench.device)
    model = bench.load(shape, bits, 4096)
    steps: dict[str, tuple[float, float]] = {}

    def note(name: str) -> None:
        steps[name] = (used_by_device(bench.device) - before, float(model.vram_usage_bytes))

    note("load")
    model.score_tokens(ids_of(rng, model, 512))
    note("after a call")
    prefixes = [model.prefix(ids_of(rng, model, 1024)) for _ in range(4)]
    note("4 prefixes")
    handle = model.start(ids_of(rng, model, 512), 2, 4)
    note("a handle")
    handle.close()
    for prefix in prefixes:
        prefix.close()
    note("handles closed")
    model.close()
    left = used_by_device(bench.device) - before
    apart = {name: device - books for name, (device, books) in steps.items()}
    worst = max(abs(apart[name]) / steps[name][1] for name in steps)
    details = {"apart_mb": {k: v / MEGABYTE for k, v in apart.items()}, "left_mb": left / MEGABYTE}
    return Figure(case, worst * 100, "% apart", [worst * 100], details=details, **more)


CASES: dict[str, Callable[[Bench, str], Figure]] = {
    "decode-1 w4": lambda b, c: decode(
        b, c, "ouro-1.4b", 4, 1, peer=160.4, peer_note="torch compiled, CUDA graph", limit=1700, target=550
    ),
    "decode-1 exact/fast": lambda b, c: decode_fast(b, c, "ouro-1.4b", 4, target=1.25),
    "decode-1 w8": lambda b, c: decode(b, c, "ouro-1.4b", 8, 1, peer=160.4, limit=900),
    "decode-1 fp16": lambda b, c: decode(b, c, "ouro-1.4b", 16, 1, peer=160.4, limit=460, target=300),
    "decode-64 w4": lambda b, c: decode(
        b, c, "ouro-1.4b", 4, 64, peer=5263, peer_note="vLLM 0.24", limit=17700, target=12000
    ),
    "decode-64 w4 int8": lambda b, c: decode(
        b, c, "ouro-1.4b", 4, 64, cache_mode="int8", peer=5263, peer_note="vLLM 0.24", limit=29900
    ),
    "documents": lambda b, c: documents(
        b, c, "ouro-1.4b", 4, 64, peer=50878, peer_note="torch compiled", limit=72700, target=51000
    ),
    "shared-prefixes": lambda b, c: shared_prefixes(
        b, c, "ouro-1.4b", 4, peer=137.1, peer_note="vLLM 0.24, cache forced", limit=1515, target=900
    ),
    "upgrade 2 to 4": lambda b, c: upgrade(b, c, "ouro-1.4b", 4, target=1.10),
    "loading": lambda b, c: loading(b, c, "ouro-1.4b", 4, target=3.0),
    "memory": lambda b, c: memory(b, c, "ouro-1.4b", 4, target=1.0),
    "decode-1 llama-1b w4": lambda b, c: decode(b, c, "llama-1b", 4, 1),
    "documents llama-1b": lambda b, c: documents(b, c, "llama-1b", 4, 64),
    "decode-1 huginn w4": lambda b, c: decode(b, c, "huginn-0125", 4, 1, new=48),
    "documents huginn": lambda b, c: documents(b, c, "huginn-0125", 4, 8),
    "decode-1 nanbeige w4": lambda b, c: decode(b, c, "nanbeige-3b", 4, 1),
}


def run_all(bench: Bench, names: list[str]) -> Iterator[Figure]:
    for name in names:
        yield CASES[name](bench, name)


def row(figure: Figure) -> str:
    def number(x: float | None) -> str:
        return "" if x is None else f"{x:,.1f}" if x < 1000 else f"{x:,.0f}"

    cells = (figure.value, figure.target, figure.peer, figure.limit)
    return f"{figure.case:24}" + "".join(f"{number(x):>12}" for x in cells) + f"  {figure.unit}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help=f"for models of {', '.join(SHAPES)}")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = devices()
    if not found:
        raise SystemExit("no usable GPU was found: this bench is for one")
    print(f"{found[0].name}\n{'case':24}{'ours':>12}{'target':>12}{'peer':>12}{'limit':>12}", flush=True)
    figures = []
    for figure in run_all(Bench(options.folder, options.device, options.repeats), options.cases):
        print(row(figure), flush=True)
        figures.append(figure)
    lines = "".join(json.dumps({**asdict(f), "gpu": found[0].name}) + "\n" for f in figures)
    if options.json:
        options.json.write_text(lines)
    print(lines)


if __name__ == "__main__":
    main()
