"""Many kills: python -m tests.chaos.long --replica 700 --router 200 --driver 100 --folder DIR

Rounds of one job each on one named pool; every round's output is held against an undisturbed run. What is
done is noted in DIR/totals.json after every round: the same command goes on where it was stopped, and
--seconds splits it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import ray

os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).parents[1] / "workers"), *filter(None, [os.environ.get("PYTHONPATH")])]
)

from tinyloop.cluster import registry
from tinyloop.cluster.named_pool import ask_status, raise_pool
from tinyloop.cluster.session import connect

from .under_fire import KINDS, Fire, fire_config

NAME = "chaos-long"
ROUND_STRIKES = 25


def next_plan(wanted: Counter[str], done: Counter[str], rng: random.Random) -> list[str]:
    """What one round does: drawn from what is left, in random order."""
    left = [kind for kind in KINDS for _ in range(max(wanted[kind] - done[kind], 0))]
    rng.shuffle(left)
    return left[:ROUND_STRIKES]


class Totals:
    """What all rounds did so far, in a file that is replaced after every round."""

    def __init__(self, path: Path) -> None:
        self.path = path
        read: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self.done: Counter[str] = Counter(read.get("done", {}))
        self.rounds: int = read.get("rounds", 0)
        self.rows: int = read.get("rows", 0)
        self.seconds: float = read.get("seconds", 0.0)
        self.failures: list[str] = read.get("failures", [])

    def add(self, fire: Fire, seconds: float, failure: str) -> None:
        self.done += fire.done
        self.rounds += 1
        self.rows += 0 if failure else fire.num_rows
        self.seconds += seconds
        self.failures += [failure] if failure else []
        whole = {name: getattr(self, name) for name in ("done", "rounds", "rows", "seconds", "failures")}
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps(whole, indent=1))
        temporary.replace(self.path)

    def __str__(self) -> str:
        kills = sum(self.done[kind] for kind in ("replica", "router", "driver"))
        done = ", ".join(f"{kind} {self.done[kind]}" for kind in KINDS if self.done[kind])
        per_kill = self.seconds / kills if kills else 0.0
        return (
            f"{kills} kills ({done}) in {self.rounds} jobs with {self.rows:,} rows compared, "
            f"{self.seconds:,.0f} s, {per_kill:.2f} s a kill; jobs that failed or differed: "
            f"{len(self.failures)}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for kind in KINDS:
        parser.add_argument(f"--{kind.replace('_', '-')}", type=int, default=0)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no round after these")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--rows", type=int, default=700, help="rows of each job")
    parser.add_argument("--row-seconds", type=float, default=1e-3)
    parser.add_argument("--pause", type=float, default=0.7, help="mean seconds between strikes")
    asked = parser.parse_args()
    wanted = Counter({kind: getattr(asked, kind) for kind in KINDS})
    asked.folder.mkdir(parents=True, exist_ok=True)
    totals = Totals(asked.folder / "totals.json")
    began_s = time.monotonic()
    connect("local" if "RAY_ADDRESS" not in os.environ else None)
    config = fire_config(asked.folder, asked.replicas, asked.row_seconds)
    raise_pool(config, NAME)
    try:
        while time.monotonic() - began_s < asked.seconds:
            seed = asked.seed + totals.rounds
            plan = next_plan(wanted, totals.done, random.Random(seed))
            if not plan:
                break
            run_round(asked, config, totals, seed, plan)
        print(f"router: {ask_status(NAME)['counters']}")
    finally:
        registry.reap(NAME)
        ray.shutdown()
    print(totals)
    return 1 if totals.failures else 0


def run_round(asked: argparse.Namespace, config: Any, totals: Totals, seed: int, plan: list[str]) -> None:
    """One job. Its folder stays only if it failed."""
    folder = asked.folder / f"round-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    fire = Fire(NAME, config, folder, seed, plan, asked.rows, asked.pause)
    began_s, failure = time.monotonic(), ""
    try:
        fire.run()
    except AssertionError as error:
        failure = str(error)
    seconds = time.monotonic() - began_s
    totals.add(fire, seconds, failure)
    if not failure:
        shutil.rmtree(folder)
    did = ", ".join(f"{kind} {count}" for kind, count in sorted(fire.done.items()))
    print(f"seed {seed}: {failure or 'same bytes'}: {did} in {seconds:.1f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
