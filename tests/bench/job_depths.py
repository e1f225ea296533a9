"""What cascades and exit gates save and cost on rows of a job, against the same rows at full depth.

    python tests/bench/job_depths.py ROWS.jsonl ... [--repeats 3] [--threads 1] [--limit N]

Rows go through encoder, windows, placement and one replica's executor in this process, without Ray. Each
setting runs in turns with plain full depth, so that both see the same machine; "cpu_ratio" is the median of
the ratios of their processor time. "saved" is of row loops, prefixes included; "same" is the share of rows
with the choice of full depth; "difference" the mean distance of summed log-probabilities. One JSON line each.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOMS = Path(__file__).parents[1]
sys.path[:0] = [str(ROOMS / "cluster")]

from engine_pool import EnginePool  # noqa: E402
from tinyloop.cluster.encoding import Encoder, EncodingPolicy  # noqa: E402
from tinyloop.cluster.scoring import score_rows  # noqa: E402
from tinyloop.cluster.tasks import ChoicesResult, TaskOptions  # noqa: E402
from tinyloop.native import Model, load_model  # noqa: E402
from tinyloop.native.format import read_header  # noqa: E402
from tinyloop.native.models import default_model_path  # noqa: E402
from tinyloop.native.tokenizer import load_tokenizer  # noqa: E402
from tinyloop.workers.effort import Effort  # noqa: E402

FULL = 4
SETTINGS = {
    "--cascade 3:4 --margin 1": Effort((3, 4), 1.0),
    "--cascade 3:4 --margin 2": Effort((3, 4), 2.0),
    "--cascade 2:4 --margin 2": Effort((2, 4), 2.0),
    "--exit-threshold 0.5": Effort((1, 4), None, 0.5),
    "--exit-threshold 0.9": Effort((1, 4), None, 0.9),
}


def run(
    model: Model, encoder: Encoder, rows: list[dict[str, Any]], effort: Effort | None
) -> tuple[list[ChoicesResult], float, EnginePool]:
    """Results, processor seconds, and the pool that counted loops."""
    pool = EnginePool([model])
    began_s = time.process_time()
    results = score_rows(pool, encoder, rows, depth=FULL, options=TaskOptions(), cascade=effort)
    spent_s = time.process_time() - began_s
    pool.close()
    return [result for result in results if isinstance(result, ChoicesResult)], spent_s, pool


def accuracy(results: list[ChoicesResult]) -> float:
    return sum(result.pred["acc"] == result.gold for result in results) / len(results)


def compare(results: list[ChoicesResult], full: list[ChoicesResult]) -> dict[str, float]:
    pairs = list(zip(results, full, strict=True))
    choices = [both for a, b in pairs for both in zip(a.choices, b.choices, strict=True)]
    return {
        "accuracy": accuracy(results),
        "accuracy_full": accuracy(full),
        "same": sum(a.pred["acc"] == b.pred["acc"] for a, b in pairs) / len(pairs),
        "difference": math.fsum(abs(a.score.logprob - b.score.logprob) for a, b in choices) / len(choices),
        "mean_depth": sum(result.depth for result in results) / len(results),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", type=Path, nargs="+")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--limit", type=int)
    args = parser.parse_args()
    header = read_header(default_model_path())
    encoder = Encoder(load_tokenizer(header), EncodingPolicy.of_model(header.descriptor, 2048))
    with load_model(default_model_path(), threads=args.threads) as model:
        for path in args.rows:
            rows = [json.loads(line) for line in path.read_text().splitlines()][: args.limit]
            for name, effort in SETTINGS.items():
                turns = [
                    (run(model, encoder, rows, effort), run(model, encoder, rows, None))
                    for _ in range(args.repeats)
                ]
                (results, _, pool), (full, _, _) = turns[0]
                record = compare(results, full) | {
                    "saved": 1 - pool.row_loops / pool.full_row_loops,
                    "cpu_ratio": statistics.median(a[1] / b[1] for a, b in turns),
                    "cpu_s": statistics.median(a[1] for a, _ in turns),
                }
                rounded = {key: round(value, 4) for key, value in record.items()}
                print(
                    json.dumps({"rows": f"{path.name} ({len(rows)})", "setting": name, **rounded}), flush=True
                )


if __name__ == "__main__":
    main()
