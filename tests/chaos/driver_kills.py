"""Many kills of one job's driver: python -m tests.chaos.driver_kills [--kills 100] [--rows 4000] [--seed 1]

The driver runs in a forked process over the fake pool; each is killed with SIGKILL at a random write or a
random delivery, and the next one resumes. What comes out is held against an undisturbed run and against the
input, row by row: none lost, none doubled, no byte changed.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tinyloop.cluster.errors import ExitCode

from ..cluster.score_driver import run_in_child
from ..cluster.test_job import outputs

WINDOW_ROWS = 64


def write_rows(path: Path, count: int) -> None:
    """Every seventh row cannot be read."""
    with path.open("w") as file:
        for i in range(count):
            row = {"id": str(i), "context": f"one of {i % 50} ships", "continuation": f" is {i % 13}"}
            file.write("not a row\n" if i % 7 == 3 else json.dumps(row) + "\n")


def killed_job(rows: Path, output: Path, kills: int, count: int, rng: random.Random) -> Counter[str]:
    """Kill and resume until that many have been killed, then let it end. Returns how they were."""
    job: dict[str, Any] = {"inputs": [str(rows)], "output": str(output), "max_window_rows": WINDOW_ROWS}
    # Early enough that a hundred of them do not run into the end of the job.
    most = max(4, 2 * count // (37 * kills))
    done: Counter[str] = Counter()
    while sum(done.values()) < kills:
        place = rng.choice(("kill_at_write", "kill_at_collect"))
        code = run_in_child(job | {"resume": True, "seed": rng.random(), place: rng.randint(1, most)})
        if code != -signal.SIGKILL:
            raise AssertionError(
                f"the job ended with {code} after {sum(done.values())} kills: give it more rows"
            )
        done[place] += 1
    code = run_in_child(job | {"resume": True})
    if code != ExitCode.ROW_ERRORS:
        raise AssertionError(f"the job ended with {code} after its kills")
    return done


def check(output: Path, undisturbed: Path, count: int) -> None:
    """Raises: AssertionError if a row is lost, doubled or changed."""
    results, errors = outputs(output)
    if (results, errors) != outputs(undisturbed):
        raise AssertionError("the output differs from that of an undisturbed run")
    lines = [json.loads(line)["line"] for part in (results, errors) for line in part.splitlines()]
    if sorted(lines) != list(range(1, count + 1)):
        raise AssertionError(
            f"{count} rows went in, {len(lines)} came out, {len(set(lines))} of them different"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder / "rows.jsonl", asked.rows)
        job = {"inputs": [str(folder / "rows.jsonl")], "output": str(folder / "undisturbed")}
        assert run_in_child(job) == ExitCode.ROW_ERRORS
        rng = random.Random(asked.seed)
        done = killed_job(folder / "rows.jsonl", folder / "out", asked.kills, asked.rows, rng)
        check(folder / "out", folder / "undisturbed", asked.rows)
    kinds = ", ".join(f"{kind.removeprefix('kill_at_')} {count}" for kind, count in sorted(done.items()))
    print(
        f"{asked.kills} kills ({kinds}) of one job of {asked.rows:,} rows, seed {asked.seed}: 0 lost, "
        f"0 doubled, same bytes, in {time.monotonic() - began_s:.0f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
