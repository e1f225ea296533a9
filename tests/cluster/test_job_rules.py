"""Traps of jobs: what resuming may mix, lose or do twice, and what a job says of itself."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from tinyloop.cluster.errors import Interrupted, UsageError
from tinyloop.cluster.kinds import Backend, ModelChoice
from tinyloop.cluster.progress import PoolFigures, Snapshot
from tinyloop.cluster.rolling import RollingPolicy
from tinyloop.cluster.score import run_score
from tinyloop.cluster.settings import ErrorBudget, ScoreSettings

from .fake_pool import FakePool
from .score_driver import make_encoder, run_in_child, score
from .test_job import interrupt_at, make_rows, outputs, settings, write

# Another value of every setting that decides a byte of the results. A new setting must be put here or below.
DECIDING: dict[str, Any] = {
    "limit": 30,
    "replace_surrogates": True,
    "depth": 2,
    "prefix_token": 7,
    "target_delimiter": " ",
    "empty_continuation": "zero",
    "pmi": True,
    "token_logprobs": True,
    "rolling": RollingPolicy(stride=2),
}
# What the fingerprint calls a setting, where that is another word.
KEYS = {"prefix_token": "prefix_id"}
# Settings that may differ between a run and its resumption.
FREE: dict[str, Any] = {
    "budget": ErrorBudget(max_count=500),
    "max_window_rows": 7,
}
# What names the job or asks for the resumption.
OF_THE_JOB = {"inputs", "output", "work_dir", "resume", "overwrite", "retry", "publish_to"}
# What needs a model with BOS, a model that loops, or files of other formats: tried where those are.
ELSEWHERE = {"add_bos", "depths", "input_format", "output_format"}


def test_every_setting_is_known_to_decide_results_or_not_to() -> None:
    names = {field.name for field in fields(ScoreSettings)}
    assert names == DECIDING.keys() | FREE.keys() | OF_THE_JOB | ELSEWHERE


@pytest.mark.parametrize("name", DECIDING)
def test_a_setting_that_changes_results_is_not_resumed_with_another_value(tmp_path: Path, name: str) -> None:
    lines = [*make_rows(60), b'{"text": "\\ud800"}\n', b'{"context": "a", "continuation": ""}\n']
    lines += [json.dumps({"text": "hello world " * 30}).encode() + b"\n"]
    changed = {name: DECIDING[name]}
    score(settings(tmp_path, lines, "plain"))
    score(settings(tmp_path, lines, "changed", **changed))
    assert outputs(tmp_path / "plain") != outputs(tmp_path / "changed")
    with pytest.raises(Interrupted):
        score(settings(tmp_path, lines), interrupt_at(2))
    with pytest.raises(UsageError, match=KEYS.get(name, name)):
        score(settings(tmp_path, lines, resume=True, **changed))
    score(settings(tmp_path, lines, resume=True))
    assert outputs(tmp_path / "out") == outputs(tmp_path / "plain")


@pytest.mark.parametrize("name", FREE)
def test_a_setting_that_changes_no_result_may_differ_when_a_job_goes_on(tmp_path: Path, name: str) -> None:
    lines = make_rows(60)
    score(settings(tmp_path, lines, "plain"))
    with pytest.raises(Interrupted):
        score(settings(tmp_path, lines), interrupt_at(2))
    score(settings(tmp_path, lines, resume=True, **{name: FREE[name]}))
    assert outputs(tmp_path / "out") == outputs(tmp_path / "plain")


@pytest.mark.chaos
@pytest.mark.parametrize("collects", [2, 6])
def test_a_killed_job_loses_at_most_what_one_collect_had_brought(tmp_path: Path, collects: int) -> None:
    """Every row here is one item; a kill comes before the n-th collect delivers anything."""
    lines = [b'{"context_ids": [%d], "continuation_ids": [4, 5]}\n' % (i + 2) for i in range(250)]
    path = write(tmp_path / "rows.jsonl", lines)
    arguments = {"inputs": [path], "output": str(tmp_path / "out")}
    assert run_in_child(arguments | {"kill_at_collect": collects}) == -signal.SIGKILL
    pool = FakePool()
    summary = score(settings(tmp_path, lines, resume=True), pool)
    delivered = (collects - 1) * pool.items_per_collect
    assert summary["rows_resumed"] == delivered
    assert pool.num_scored == len(lines) - delivered


def test_rows_of_many_megabytes_come_back_whole_from_a_journal(tmp_path: Path) -> None:
    big = "e" * (6 << 20)
    rows = [
        {"id": str(i), "context_ids": [i + 2], "continuation_ids": [4], "note": big[i:]} for i in range(3)
    ]
    rows += [{"id": str(i), "context_ids": [i + 2], "continuation_ids": [4]} for i in range(3, 40)]
    lines = [json.dumps(row).encode() + b"\n" for row in rows]
    with pytest.raises(Interrupted):
        score(settings(tmp_path, lines), interrupt_at(3))
    pool = FakePool()
    score(settings(tmp_path, lines, resume=True), pool)
    assert pool.num_scored < len(rows)
    results = [json.loads(line) for line in outputs(tmp_path / "out")[0].splitlines()]
    assert [len(result["extra"]["note"]) for result in results[:3]] == [len(big) - i for i in range(3)]
    assert [result["id"] for result in results] == [row["id"] for row in rows]


def test_each_file_of_documents_has_its_figures_and_its_mean_over_documents(tmp_path: Path) -> None:
    texts = {"a": ["hello world", "x"], "b": ["caf\u00e9", ""]}
    for name, documents in texts.items():
        lines = [json.dumps({"text": text}).encode() + b"\n" for text in documents]
        write(tmp_path / f"{name}.jsonl", lines)
    summary = score(ScoreSettings(inputs=(str(tmp_path / "*.jsonl"),), output=tmp_path / "out"))
    results = [json.loads(line) for line in outputs(tmp_path / "out")[0].splitlines()]
    for group, name in zip(summary["groups"], texts, strict=True):
        own = [result for result in results if result["file"] == f"{name}.jsonl" and result["n_tokens"]]
        bits = [-result["logprob"] / math.log(2) for result in own]
        sizes = [result["n_bytes"] for result in own]
        assert group["file"] == f"{name}.jsonl"
        assert group["bits_per_byte"] == pytest.approx(sum(bits) / sum(sizes))
        mean = sum(b / n for b, n in zip(bits, sizes, strict=True)) / len(own)
        assert group["bits_per_byte_mean_over_documents"] == pytest.approx(mean)
        assert group["empty_documents"] == 2 - len(own)


class Kept:
    """Keeps what a person would be shown."""

    def __init__(self) -> None:
        self.snapshots: list[Snapshot] = []

    def show(self, snapshot: Snapshot) -> None:
        self.snapshots.append(snapshot)

    def close(self) -> None:
        pass


def test_progress_is_in_rows_of_a_total_that_is_known_from_the_start(tmp_path: Path) -> None:
    job = settings(tmp_path, make_rows(300), max_window_rows=40)
    encoder, shown = make_encoder(job), Kept()

    @contextmanager
    def opened() -> Iterator[Backend]:
        yield Backend(FakePool(), encoder, 4, {"depth": 4}, PoolFigures)

    run_score(job, ModelChoice({"depth": 4}, encoder.policy, {}), opened, shown)
    done = [snapshot.rows_done for snapshot in shown.snapshots]
    assert {snapshot.rows_total for snapshot in shown.snapshots} == {300}
    assert done == sorted(done)
    assert len(set(done)) > 5
    assert (done[-1], shown.snapshots[-1].state) == (300, "complete")


def test_the_summary_is_written_before_the_pool_is_taken_down(tmp_path: Path) -> None:
    job = settings(tmp_path, make_rows(30))
    encoder, states = make_encoder(job), []

    @contextmanager
    def opened() -> Iterator[Backend]:
        yield Backend(FakePool(), encoder, 4, {"depth": 4}, PoolFigures)
        states.append(json.loads((tmp_path / "out" / "summary.json").read_bytes())["state"])
        raise OSError("a library crashed at its end")

    with pytest.raises(OSError, match="at its end"):
        run_score(job, ModelChoice({"depth": 4}, encoder.policy, {}), opened, Kept())
    assert states == ["complete"]
    assert json.loads((tmp_path / "out" / "summary.json").read_bytes())["state"] == "complete"
    assert len(outputs(tmp_path / "out")[0].splitlines()) > 20


def test_what_a_job_writes_has_a_temporary_name_until_it_is_whole(tmp_path: Path) -> None:
    """A file under its final name was complete when it got that name."""
    seen: dict[str, str] = {}
    rename = os.replace

    def watched(source: Any, target: Any) -> None:
        seen[Path(target).name] = Path(source).name
        rename(source, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", watched)
        score(settings(tmp_path, make_rows(40)))
    finals = {"results.jsonl", "errors.jsonl", "summary.json", "run.json", "progress.json"}
    assert finals <= seen.keys()
    assert all(source == f"{target}.tmp" for target, source in seen.items())
