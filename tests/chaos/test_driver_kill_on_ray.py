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
from tinyloop.cluster.completion_task import CompletionSettings
from tinyloop.cluster.generate import GenerateKind
from tinyloop.cluster.generate_settings import GenerateSettings
from tinyloop.cluster.kinds import Backend, Kind
from tinyloop.cluster.pool_backend import choose_model
from tinyloop.cluster.progress import PoolFigures
from tinyloop.cluster.running import run_job
from tinyloop.cluster.score import ScoreKind
from tinyloop.cluster.settings import JobSettings, PoolRequest, ScoreSettings
from tinyloop.native import load_model

from ..cluster.model_pool import ModelPool
from ..cluster.score_driver import NoDisplay
from ..cluster.test_job import outputs

NUM_ROWS = 90
DEPTH = 1
DEADLINE_S = 60.0


PROMPTS = 40
GENERATION = ["--max-new-tokens", "24", "--stop", ". ", "--logprobs"]


def prompt(i: int) -> dict[str, object]:
    """Drawn by a seed of the row's id, but for every third."""
    text = f"Definition: one of {i % 7} things that are often seen at sea.\nWord {i}:"
    return {"id": str(i), "prompt": text, "temperature": 0.0 if i % 3 == 0 else 0.9}


def question(i: int) -> dict[str, object]:
    context = f"Definition: one of {i % 7} things that are often seen at sea.\nWord:"
    return {"id": str(i), "context": context, "choices": [" ship", " desk", f" {i}"], "gold": i % 3}


RUN = "from tinyloop.cluster.guardian import main; main()"
# The same, but the job kills its parent, and so itself, as soon as the first rows are in the journal.
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


def drive(code: str, rows: Path, output: Path, work: list[str], replicas: int) -> int:
    """Run the command line in a process of its own. Returns what Popen says of its end."""
    options = ["-i", str(rows), "-o", str(output), "--depth", str(DEPTH), "--resume"]
    options += ["--replicas", str(replicas)]
    # A file and not a pipe: processes of Ray inherit it, and a pipe would end only with the last of them.
    with output.with_suffix(".log").open("ab") as log:
        command = [sys.executable, "-c", code, *work, *options]
        return subprocess.run(command, stdout=log, stderr=log, timeout=DEADLINE_S, check=False).returncode


def in_this_process(rows: Path, output: Path, work: list[str]) -> None:
    """The same job without Ray, without prefixes and one row or batch after the other."""
    settings: JobSettings = ScoreSettings(inputs=(str(rows),), output=output, depth=DEPTH)
    if work[0] == "generate":
        defaults = CompletionSettings(max_new_tokens=24, stop=(". ",))
        settings = GenerateSettings((str(rows),), output, depth=DEPTH, defaults=defaults, token_logprobs=True)
    chosen = choose_model(settings, PoolRequest())
    kind: Kind
    if isinstance(settings, GenerateSettings):
        kind = GenerateKind.of_model(settings, chosen.descriptor, chosen.encoder, DEPTH)
    else:
        assert isinstance(settings, ScoreSettings)
        kind = ScoreKind(settings)

    @contextmanager
    def opened() -> Iterator[Backend]:
        with load_model(chosen.path, chosen.max_seq_len, threads=2) as model:
            identity = {**chosen.choice.identity, "numerics_id": model.numerics_id}
            yield Backend(ModelPool(model), chosen.encoder, DEPTH, identity, PoolFigures)

    run_job(settings, kind, chosen.choice, opened, NoDisplay())


QUESTIONS = [question(i) for i in range(NUM_ROWS)]


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("work", "lines"),
    [(["score"], QUESTIONS), (["generate", *GENERATION], [prompt(i) for i in range(PROMPTS)])],
    ids=["score", "generate"],
)
def test_a_job_on_ray_killed_and_resumed_writes_the_bytes_of_one_in_a_single_process(
    work: list[str], lines: list[dict[str, object]], tmp_path: Path
) -> None:
    """It goes on with another number of replicas than it began with."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    in_this_process(rows, tmp_path / "expected", work)

    log = tmp_path / "out.log"
    assert drive(RUN_AND_DIE, rows, tmp_path / "out", work, 1) == -signal.SIGKILL, log.read_text()
    assert not (tmp_path / "out" / "results.jsonl").exists()
    assert drive(RUN, rows, tmp_path / "out", work, 2) == 0, log.read_text()
    assert outputs(tmp_path / "out") == outputs(tmp_path / "expected")
    assert json.loads((tmp_path / "out" / "summary.json").read_bytes())["rows_resumed"] > 0
