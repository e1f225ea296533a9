"""A whole pipeline as people run it: python -m tests.bench.pipeline [--no-token] [CASE...]

Parquet in, shaped by Ray Data, scored through a named pool, Parquet out: one entrypoint, submitted with Ray's
own `ray job submit`; `tinyloop submit` then reads its true exit code. Cases: success, row-errors, budget,
usage, stop, crash. Each is held against the exit code and the summary that it must have.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from tinyloop.native.models import default_model_path

from ..cluster.ray_head import RayHead, ray_head
from ..cluster.test_submit_on_ray import newest_process_of

POOL = "shared"
DEADLINE_S = 180.0
CASES = {"success": 0, "row-errors": 3, "budget": 4, "usage": 2, "stop": 130, "crash": 5}

# What a user would write: Ray Data makes rows of records, the job takes the place of this process.
SHAPE_AND_SCORE = """
import os, sys
import ray
source, prepared, *job = sys.argv[1:]
def shape(batch):
    batch["context"] = "One of " + batch["kind"] + "s that are seen at sea."
    batch["continuation"] = (" " + batch["word"]).where(batch["word"] != "", "")
    del batch["kind"], batch["word"]
    return batch
ray.init(log_to_driver=False)
data = ray.data.read_parquet(source).map_batches(shape, batch_format="pandas")
data.sort("id").repartition(1).write_parquet(prepared)
ray.shutdown()
os.execvp("tinyloop", ["tinyloop", "score", "-i", prepared + "/*.parquet", *job])
"""


def write_records(path: Path, count: int, bad: int) -> None:
    """Records, of which the last `bad` have no word to score."""
    words = ["ship", "sail", "mast", "rope"]
    table = {
        "id": [f"r{i:06d}" for i in range(count)],
        "kind": [words[i // 50 % 4] for i in range(count)],
        "word": ["" if i >= count - bad else f"{words[i % 4]} {i}" for i in range(count)],
    }
    pyarrow.parquet.write_table(pyarrow.table(table), path)


def run_case(head: RayHead, case: str) -> str:
    """One submission. Returns what is wrong, empty if nothing is."""
    folder = head.folder / case
    folder.mkdir()
    long = case in ("stop", "crash")
    write_records(
        folder / "in.parquet", 30_000 if long else 200, 3 if case in ("row-errors", "budget") else 0
    )
    (folder / "code").mkdir()
    (folder / "code" / "pipeline.py").write_text(SHAPE_AND_SCORE)
    output = folder / "out"
    job = ["-o", str(output), "--pool", POOL, "--depth", "1", "--window", "64", "--output-format", "parquet"]
    job += ["--max-errors", "1"] if case == "budget" else []
    job += ["--resume", "--overwrite"] if case == "usage" else []
    words = ["python", "pipeline.py", str(folder / "in.parquet"), str(folder / "prepared"), *job]
    environment = json.dumps({"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "60"}})
    submit = ["ray", "job", "submit", "--address", head.job_server, "--submission-id", case]
    submit += ["--working-dir", str(folder / "code"), "--runtime-env-json", environment, "--", *words]
    head = RayHead(
        head.address, head.job_server, head.environment | {"RAY_AUTH_MODE": mode(head)}, head.folder
    )
    running = head.begin(submit, folder / "log")
    if long:
        wait_for_parts(output, running, folder / "log")
        if case == "stop":
            head.run(["ray", "job", "stop", "--address", head.job_server, case])
        else:
            os.kill(newest_process_of(output), signal.SIGKILL)
    running.wait(DEADLINE_S)
    # Ray's own code says success or failure; the true one is the last line, which our submit reads.
    followed = head.run(["tinyloop", "submit", "--address", head.job_server, "--submission-id", case])
    return verdict(case, followed, output)


def verdict(case: str, followed: subprocess.CompletedProcess[str], output: Path) -> str:
    wanted = CASES[case]
    if followed.returncode != wanted:
        return f"exit code {followed.returncode}, not {wanted}: {followed.stdout[-2000:]}"
    if case == "usage":
        return ""
    summary: dict[str, Any] = json.loads((output / "summary.json").read_bytes())
    states = {0: "complete", 3: "complete", 4: "budget_exceeded", 5: "failed", 130: "interrupted"}
    if (summary["exit_code"], summary["state"]) != (wanted, states[wanted]):
        return f"summary says {summary['state']}, {summary['exit_code']}"
    if wanted in (0, 3):
        rows = pyarrow.parquet.read_table(output / "results.parquet").num_rows
        if rows != summary["results"] or rows + summary["errors"] != 200:
            said = f"{summary['results']} results and {summary['errors']} errors"
            return f"{rows} results of 200 rows, summary says {said}"
    return ""


def mode(head: RayHead) -> str:
    return "token" if (head.folder / "home" / ".ray" / "auth_token").exists() else "disabled"


def wait_for_parts(output: Path, running: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not list((output / "parts").glob("*.jsonl")):
        assert running.poll() is None, log.read_text()[-2000:]
        assert time.monotonic() < deadline_s, log.read_text()[-2000:]
        time.sleep(0.05)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(CASES), help=", ".join(CASES))
    parser.add_argument("--no-token", action="store_true", help="a cluster that asks for none")
    asked = parser.parse_args()
    wrong = 0
    with (
        tempfile.TemporaryDirectory(prefix="tl-") as name,
        ray_head(Path(name), token=not asked.no_token) as head,
    ):
        config = Path(name) / "pool.toml"
        config.write_text(f'model = "{default_model_path()}"\nreplicas = 1\nthreads = 1\nmax_seq_len = 128\n')
        made = head.run(["tinyloop", "up", str(config), "--name", POOL, "--address", head.address])
        assert made.returncode == 0, made.stdout
        for case in asked.cases:
            began_s = time.monotonic()
            trouble = run_case(head, case)
            wrong += bool(trouble)
            print(f"{case}: {trouble or 'as it must be'} ({time.monotonic() - began_s:.0f} s)", flush=True)
        head.run(["tinyloop", "down", POOL, "--address", head.address])
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
