"""Two runs row by row: statistics against brute force, pairs against a dictionary, verdicts by table."""

from __future__ import annotations

import json
import math
import random
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinyloop.cluster import cli
from tinyloop.cluster.compare.comparison import Comparison
from tinyloop.cluster.compare.page import compare_page
from tinyloop.cluster.compare.pairing import Waiting, pairs
from tinyloop.cluster.compare.runs import compare_folders
from tinyloop.cluster.compare.statistics import (
    RESOLUTION,
    Magnitudes,
    Mean,
    mcnemar_exact,
    paired_interval,
)

from .score_driver import score
from .test_job import make_rows, settings

# Sums of some thousand floats against exact fractions.
RTOL = 1e-9


def brute_mcnemar(b: int, c: int) -> float:
    n = b + c
    tail = sum(Fraction(math.comb(n, k), 2**n) for k in range(min(b, c) + 1))
    return float(min(Fraction(1), 2 * tail))


def test_mcnemar_is_the_exact_binomial_test() -> None:
    for b in range(0, 40, 3):
        for c in range(40):
            assert mcnemar_exact(b, c) == pytest.approx(brute_mcnemar(b, c), rel=RTOL), (b, c)
    assert mcnemar_exact(700, 800) == pytest.approx(brute_mcnemar(700, 800), rel=RTOL)
    assert mcnemar_exact(500_000, 500_000) == 1.0
    assert 0 <= mcnemar_exact(0, 1_000_000) < 1e-300


def test_paired_interval_is_that_of_the_mean_of_the_differences() -> None:
    differences = np.array([-1.0] * 7 + [1.0] * 19 + [0.0] * 74)
    half = 1.959964 * differences.std() / math.sqrt(len(differences))
    expected = differences.mean() - half, differences.mean() + half
    assert paired_interval(7, 19, 100) == pytest.approx(expected, rel=RTOL)
    assert paired_interval(0, 0, 0) == (0.0, 0.0)


def test_magnitudes_and_means_agree_with_numpy() -> None:
    rng = np.random.default_rng(2)
    values = np.abs(rng.standard_cauchy(5_000)) * (rng.random(5_000) > 0.3)
    magnitudes, mean = Magnitudes(), Mean()
    for value in values.tolist():
        magnitudes.add(value)
        mean.add(value)
    assert magnitudes.zeros == int((values == 0).sum())
    assert magnitudes.largest == values.max()
    for share in (0.1, 0.5, 0.9, 0.99, 0.999, 1.0):
        true = float(np.quantile(values, share, method="inverted_cdf"))
        assert true <= magnitudes.quantile(share) * (1 + RTOL)
        assert magnitudes.quantile(share) <= true * (1 + 2 * RESOLUTION)
    assert mean.mean == pytest.approx(values.mean(), rel=RTOL)
    assert mean.half_width == pytest.approx(1.959964 * values.std(ddof=1) / math.sqrt(5_000), rel=RTOL)


@pytest.mark.parametrize("memory_bytes", [10**9, 3_000])
def test_rows_are_paired_by_id_whatever_the_order(memory_bytes: int) -> None:
    rng = random.Random(3)
    names = [f"row-{i}" for i in range(200)] + ['quote " and \\', "\ud800", "é"]
    sides: list[list[bytes]] = []
    for side in range(2):
        chosen = [name for name in names if rng.random() < 0.8]
        rng.shuffle(chosen)
        sides.append([json.dumps({"id": name, "side": side}).encode() + b"\n" for name in chosen])
    by_id = [{json.loads(line)["id"]: line for line in lines} for lines in sides]
    with Waiting(memory_bytes) as waiting:
        found = list(pairs(iter(sides[0]), iter(sides[1]), waiting))
        assert waiting.is_on_disk == (memory_bytes < 10**6)
    expected = [(by_id[0].get(name), by_id[1].get(name)) for name in by_id[0].keys() | by_id[1].keys()]
    assert sorted(found, key=str) == sorted(expected, key=str)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three jobs over the fake pool: base, the same again, and one of another depth."""
    folder = tmp_path_factory.mktemp("runs")
    lines = make_rows(400)
    score(settings(folder, lines, "base"))
    score(settings(folder, lines, "again"))
    score(settings(folder, lines, "shallow", depth=1))
    score(settings(folder, lines, "few", limit=150))
    return folder


def rows_of(folder: Path) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in map(json.loads, (folder / "results.jsonl").read_bytes().splitlines())}


def test_two_runs_of_one_job_are_equal(runs: Path) -> None:
    compared = compare_folders(runs / "base", runs / "again").as_json()
    assert compared["identical_lines"] == compared["pairs"] == len(rows_of(runs / "base"))
    assert compared["settings"] == {}
    assert compared["logprob_difference"]["largest"] == 0
    assert compared["changed_rows"] == []


def test_differences_are_those_of_the_files(runs: Path) -> None:
    compared = compare_folders(runs / "base", runs / "shallow").as_json()
    a, b = rows_of(runs / "base"), rows_of(runs / "shallow")
    assert compared["pairs"] == len(a)
    choices = [(a[row_id], b[row_id]) for row_id in a if a[row_id]["task"] == "choices"]
    (group,) = [group for group in compared["groups"] if group["task"] == "choices"]
    for metric, values in group["accuracy"].items():
        rights = [(x["correct"][metric], y["correct"][metric]) for x, y in choices]
        assert values["a"] == pytest.approx(np.mean([x for x, _ in rights]), rel=RTOL)
        assert values["b"] == pytest.approx(np.mean([y for _, y in rights]), rel=RTOL)
        only_a, only_b = rights.count((True, False)), rights.count((False, True))
        assert (values["only_a_right"], values["only_b_right"]) == (only_a, only_b)
        assert values["mcnemar_p"] == pytest.approx(brute_mcnemar(only_a, only_b), rel=RTOL)
    changed = [x["id"] for x, y in choices if x["pred"]["acc"] != y["pred"]["acc"]]
    assert compared["changed_choice"] == len(changed)
    assert [row["id"] for row in compared["changed_rows"]] == changed[:50]
    sizes = [
        abs(p["logprob"] - q["logprob"])
        for row_id in a
        for p, q in zip(
            a[row_id].get("choices", [a[row_id]]), b[row_id].get("choices", [b[row_id]]), strict=True
        )
    ]
    assert compared["logprob_difference"]["largest"] == max(sizes)
    assert compared["logprob_difference"]["mean_size"] == pytest.approx(np.mean(sizes), rel=RTOL)
    assert compared["depth"]["a"] == {"mean": 4.0, "rows": {"4": len(a)}}
    assert set(compared["settings"]) == {"model.depth"}


def test_rows_of_one_run_alone_are_counted_and_named(runs: Path) -> None:
    compared = compare_folders(runs / "base", runs / "few").as_json()
    missing = [row_id for row_id in rows_of(runs / "base") if row_id not in rows_of(runs / "few")]
    assert compared["only_a"] == len(missing)
    assert compared["only_a_ids"] == missing[:20]
    assert (compared["only_b"], compared["failed_in_b"]) == (0, 0)


def test_a_row_that_failed_in_the_other_run_is_said(runs: Path, tmp_path: Path) -> None:
    row_id, line = next(iter(rows_of(runs / "base").items()))
    damaged = tmp_path / "out"
    damaged.mkdir()
    for path in (runs / "base").iterdir():
        (damaged / path.name).write_bytes(path.read_bytes())
    kept = (damaged / "results.jsonl").read_bytes().splitlines(True)[1:]
    (damaged / "results.jsonl").write_bytes(b"".join(kept))
    failure = {"class": "non_finite", "id": row_id, "file": line["file"], "line": 1, "message": "NaN"}
    (damaged / "errors.jsonl").write_text(json.dumps(failure) + "\n")
    compared = compare_folders(runs / "base", damaged).as_json()
    assert (compared["only_a"], compared["failed_in_b"], compared["only_b"]) == (1, 1, 0)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["tinyloop", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.parametrize(
    ("other", "options", "code"),
    [
        ("again", ["--strict"], 0),
        ("again", ["--max-drop", "0"], 0),
        ("shallow", [], 0),
        ("shallow", ["--strict"], 3),
        ("shallow", ["--max-drop", "1"], 0),
        ("few", ["--max-drop", "1"], 3),
        ("nowhere", [], 2),
        ("again", ["--max-drop", "2"], 2),
    ],
)
def test_the_exit_code_says_whether_it_is_within(
    runs: Path, monkeypatch: pytest.MonkeyPatch, other: str, options: list[str], code: int
) -> None:
    assert run(monkeypatch, "compare", str(runs / "base"), str(runs / other), *options) == code


def test_a_drop_beyond_the_limit_is_objected_to_in_one_direction_alone() -> None:
    from tinyloop.cluster.compare.verdict import objections

    def row(k: int, right: bool) -> bytes:
        return json.dumps(
            {"id": str(k), "file": "f", "task": "choices", "choices": [], "correct": {"acc": right}}
        ).encode()

    worse, better = Comparison(), Comparison()
    for k in range(10):
        worse.add(row(k, True), row(k, k > 1))
        better.add(row(k, k > 1), row(k, True))
    assert objections(worse, max_drop=0.2, strict=False) == []
    assert len(objections(worse, max_drop=0.19, strict=False)) == 1
    assert objections(better, max_drop=0.0, strict=False) == []
    assert len(objections(Comparison(), max_drop=1.0, strict=False)) == 1


def test_the_page_and_the_text_hold_the_same_figures(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "compare.html"
    assert run(monkeypatch, "compare", str(runs / "base"), str(runs / "shallow"), "-o", str(page)) == 0
    printed = capsys.readouterr().out
    assert "McNemar p = " in printed
    assert run(monkeypatch, "compare", str(runs / "base"), str(runs / "shallow"), "--json") == 0
    content = json.loads(capsys.readouterr().out)
    assert content["objections"] == []
    assert f"{content['changed_choice']:,}" in page.read_text()
    assert compare_page(content, [], 0.0).count("<figure") >= 3
