"""--dry-run and --config: what a job would do, and options out of a file."""

from __future__ import annotations

from pathlib import Path

import pytest
from tinyloop.cluster import cli
from tinyloop.cluster.dry_run import find_out
from tinyloop.cluster.errors import ExitCode
from tinyloop.cluster.score import ScoreKind
from tinyloop.cluster.segments import CutRules
from tinyloop.cluster.settings import ErrorBudget, ScoreSettings
from tinyloop.cluster.work_estimate import OURO_1_4B, estimate, multiply_adds

from .score_driver import make_encoder, score
from .test_job import make_rows

RULES = CutRules("0" * 64, 10_000)


def test_a_dry_run_counts_what_the_job_then_counts(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(b"".join(make_rows(200)))
    settings = ScoreSettings(inputs=(str(rows),), output=tmp_path / "out", max_window_rows=32)
    report = find_out(ScoreKind(settings), make_encoder(settings), 4, RULES)
    assert not (tmp_path / "out").exists()
    summary = score(settings)
    for name in ("rows", "errors", "errors_by_class", "exit_code"):
        assert report[name] == summary[name]
    expected = {(g["file"], g["task"]): g["rows"] for g in summary["groups"]}
    assert {(g["file"], g["task"]): g["rows"] for g in report["groups"]} == expected
    by_window, whole = report["by_window"], report["whole_file"]
    assert by_window["tokens_ideal"] <= by_window["tokens_to_compute"] <= by_window["tokens_submitted"]
    assert whole["tokens_ideal"] <= by_window["tokens_ideal"]


def test_the_exit_code_is_the_one_of_the_budget(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(b'{"text": "a"}\n{\n')
    for budget, code in ((ErrorBudget(), ExitCode.ROW_ERRORS), (ErrorBudget(0), ExitCode.BUDGET_EXCEEDED)):
        settings = ScoreSettings(inputs=(str(rows),), output=tmp_path / "out", budget=budget)
        assert find_out(ScoreKind(settings), make_encoder(), 4, RULES)["exit_code"] == code


def test_hours_follow_from_multiply_adds_or_from_the_rate() -> None:
    # Known of this shape: 10.9 GFLOP a token with attention.
    assert 2 * multiply_adds(OURO_1_4B, 4) == pytest.approx(10.9e9, rel=0.1)
    options = {"depth": 4, "replicas": 2, "threads": 1}
    measured = estimate(47_000 * 3600, OURO_1_4B, device="cuda", rate=None, **options)  # type: ignore[arg-type]
    assert (measured.hours, "H200" in measured.source) == (pytest.approx(0.5), True)
    given = estimate(3600, OURO_1_4B, device="cpu", rate=1.0, **options)  # type: ignore[arg-type]
    assert (given.hours, given.source) == (pytest.approx(0.5), "--rate")


def test_a_dry_run_refuses_what_a_cascade_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    asked = [
        "score",
        "-i",
        str(rows),
        "-o",
        str(tmp_path / "out"),
        "--dry-run",
        "--cascade",
        "3:4",
        "--margin",
        "1",
    ]
    for line, code, said in (
        ('{"text": "no choices"}', ExitCode.USAGE, "no two choices"),
        ('{"context": "a", "choices": [" b", " c"]}', ExitCode.SCORED, "hours are of full depth"),
    ):
        rows.write_text(line + "\n")
        monkeypatch.setattr("sys.argv", ["tinyloop", *asked])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == code
        assert said in capsys.readouterr().err
