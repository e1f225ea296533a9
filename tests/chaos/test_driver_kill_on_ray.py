"""The whole path once: command line, Ray, shipped model; the driver is killed and resumed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tinyloop.cluster.kinds import Backend
from tinyloop.cluster.pool_backend import choose_model
from tinyloop.cluster.progress import PoolFigures
from tinyloop.cluster.score import run_score
from tinyloop.cluster.settings import PoolRequest, ScoreSettings
from tinyloop.native import load_model

from ..cluster.model_pool import ModelPool
from ..cluster.score_driver import NoDisplay
from ..cluster.test_job import outputs

NUM_ROWS = 90
DEPTH = 1
DEADLINE_S = 60.0


def question(i: int) -> dict[str, object]:
    context = f"Definition: one of {i % 7} things that are often seen at sea.\nWord:"
    return {"id": str(i), "context": context, "choices": [" ship", " desk", f" {i}"], "gold": i % 3}


RUN = "from tinyloop.cluster.guardian import main; main()"
# The same, but the job kills its parent, and so itself, as soon as the first scored rows are in the journal.
RUN_AND_DIE = f"""
import os, signal
from tinyloop.cluster.journal import Journal
append = Journal.append
def append_and_die(self, lines):
    append(self, lines)
    os.kill(os.getppid(), signal.SIGKILL)
    signal.pause()
Journal.append = append_and_die
{RUN}
"""


def drive(code: str, rows: Path, output: Path, replicas: int) -> int:
    """Run the command line in a process of its own. Returns what Popen says of its end."""
    options = ["-i", str(rows), "-o", str(output), "--depth", str(DEPTH), "--resume"]
    options += ["--replicas", str(replicas)]
    # A file and not a pipe: processes of Ray inherit it, and a pipe would end only with the last of them.
    with output.with_suffix(".log").open("ab") as log:
        command = [sys.executable, "-c", code, "score", *options]
        return subprocess.run(command, stdout=log, stderr=log, timeout=DEADLINE_S, check=False).returncode


def in_this_process(rows: Path, output: Path) -> None:
    """The same job without Ray, without prefixes and in one batch."""
    settings = ScoreSettings(inputs=(str(rows),), output=output, depth=DEPTH)
    chosen = choose_model(settings, PoolRequest())

    @contextmanager
    def opened() -> Iterator[Backend]:
        with load_model(chosen.path, chosen.max_seq_len, threads=2) as model:
            identity = {**chosen.choice.identity, "numerics_id": model.numerics_id}
            yield Backend(ModelPool(model), chosen.encoder, DEPTH, identity, PoolFigures)

    run_score(settings, chosen.choice, opened, NoDisplay())


@pytest.mark.chaos
def test_a_job_on_ray_killed_and_resumed_writes_the_bytes_of_one_in_a_single_process(tmp_path: Path) -> None:
    """It goes on with another number of replicas than it began with."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(question(i)) + "\n" for i in range(NUM_ROWS)))
    in_this_process(rows, tmp_path / "expected")

    log = tmp_path / "out.log"
    assert drive(RUN_AND_DIE, rows, tmp_path / "out", 1) == -signal.SIGKILL, log.read_text()
    assert not (tmp_path / "out" / "results.jsonl").exists()
    assert drive(RUN, rows, tmp_path / "out", 2) == 0, log.read_text()
    assert outputs(tmp_path / "out") == outputs(tmp_path / "expected")
    assert json.loads((tmp_path / "out" / "summary.json").read_bytes())["rows_resumed"] > 0
