"""Results and errors as tables: what JSON lines say, and nothing lost."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tinyloop.cluster.errors import ExitCode, InfrastructureError, UsageError
from tinyloop.cluster.outputs.final import read_final, write_final
from tinyloop.cluster.outputs.rows import of_row, to_row, without_nulls
from tinyloop.cluster.outputs.schema import ERRORS, MORE, SCORES
from tinyloop.cluster.report.reading import failure_lines, result_lines
from tinyloop.cluster.settings import ScoreSettings

from .fake_pool import FakePool
from .score_driver import score
from .test_job import make_rows
from .test_sources import FIELDS, ROWS, as_csv, as_jsonl, write_parquet

FORMATS = ["jsonl", "csv", "parquet"]


def run(tmp_path: Path, rows: Path, output: str, **changes: Any) -> dict[str, Any]:
    return score(ScoreSettings(inputs=(str(rows),), output=tmp_path / output, **changes))


def lines_of(tmp_path: Path, output: str, stem: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / output / f"{stem}.jsonl").read_bytes().splitlines()]


def without(line: dict[str, Any]) -> dict[str, Any]:
    """A line without nulls, but for those in `extra`, which is carried as it is."""
    return {
        name: value if name == "extra" else without_nulls(value)
        for name, value in line.items()
        if value is not None
    }


@pytest.mark.parametrize("output_format", ["csv", "parquet"])
def test_a_table_holds_what_the_lines_hold(tmp_path: Path, output_format: str) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(b"".join(make_rows(300)))
    options = {"pmi": True, "token_logprobs": True}
    plain = run(tmp_path, rows, "lines", **options)
    table = run(tmp_path, rows, "table", output_format=output_format, **options)
    for stem, schema in (("results", SCORES), ("errors", ERRORS)):
        expected = [without(line) for line in lines_of(tmp_path, "lines", stem)]
        assert len(expected) > 10
        assert list(read_final(tmp_path / "table", stem, output_format)) == expected  # type: ignore[arg-type]
        # Every field of every kind of row has a column of its own.
        assert all(to_row(json.dumps(line).encode(), schema)[MORE] is None for line in expected)
    assert {k: v for k, v in table.items() if k in ("rows", "groups", "errors_by_class", "exit_code")} == {
        k: v for k, v in plain.items() if k in ("rows", "groups", "errors_by_class", "exit_code")
    }


def test_other_programs_read_the_tables(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(b"".join(make_rows(120)))
    for name in FORMATS:
        run(tmp_path, rows, name, output_format=name, token_logprobs=True)
    lines = lines_of(tmp_path, "jsonl", "results")
    frame = pd.read_parquet(tmp_path / "parquet" / "results.parquet")
    assert frame["id"].tolist() == [line["id"] for line in lines]
    assert frame["logprob"].dropna().tolist() == [v["logprob"] for v in lines if v.get("logprob") is not None]
    choices = [line for line in lines if line["task"] == "choices"]
    found = frame[frame["task"] == "choices"]
    assert [row["acc"] for row in found["pred"]] == [line["pred"]["acc"] for line in choices]
    assert [[c["logprob"] for c in row] for row in found["choices"]] == [
        [c["logprob"] for c in line["choices"]] for line in choices
    ]
    assert [json.loads(text) for text in frame["extra"]] == [line["extra"] for line in lines]
    with (tmp_path / "csv" / "results.csv").open(newline="", encoding="utf-8") as file:
        records = list(csv.DictReader(file))
    assert [record["id"] for record in records] == [line["id"] for line in lines]
    assert [float(r["logprob"]) for r in records if r["logprob"]] == frame["logprob"].dropna().tolist()
    assert [json.loads(r["choices"]) for r in records if r["choices"]] == [c["choices"] for c in choices]


def test_the_schema_does_not_depend_on_the_rows(tmp_path: Path) -> None:
    schemas = []
    for name, content in {"none": b"", "one": b'{"text": "a", "x": {"y": 1}}\n', "bad": b"{\n"}.items():
        (tmp_path / f"{name}.jsonl").write_bytes(content)
        run(tmp_path, tmp_path / f"{name}.jsonl", name, output_format="parquet")
        schemas.append(pq.read_schema(tmp_path / name / "results.parquet"))
    assert schemas[0] == schemas[1] == schemas[2]
    assert schemas[0].names == list(SCORES)


texts = st.text(alphabet=st.characters(codec="utf-8"), max_size=6)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=5,
)
fields = st.dictionaries(st.sampled_from([*SCORES, "other", ""]), values, max_size=6)


@settings(max_examples=25)
@given(lines=st.lists(fields, max_size=4))
def test_whatever_a_line_holds_comes_back_from_every_table(
    lines: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("out")
    encoded = [json.dumps(line).encode() for line in lines]
    expected = [of_row(to_row(line, SCORES), SCORES) for line in encoded]
    for found, line in zip(expected, lines, strict=True):
        # Nulls of lines are the only thing that a table does not say.
        assert {k: v for k, v in found.items() if v is not None} == {
            k: without_nulls(v) if k in SCORES and SCORES[k] != "json" and found.get(k) != v else v
            for k, v in line.items()
            if v is not None
        }
    for output_format in ("csv", "parquet"):
        write_final(folder, "results", output_format, encoded, SCORES)  # type: ignore[arg-type]
        assert list(read_final(folder, "results", output_format)) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("output_format", ["csv", "parquet"])
def test_resuming_a_finished_job_returns_its_summary_and_notices_changes(
    tmp_path: Path, output_format: str
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(b"".join(make_rows(50)))
    options = {"output_format": output_format, "resume": True}
    first = run(tmp_path, rows, "out", **options)
    pool = FakePool()
    again = ScoreSettings(inputs=(str(rows),), output=tmp_path / "out", **options)  # type: ignore[arg-type]
    assert score(again, pool) == first
    assert pool.num_scored == 0
    with pytest.raises(UsageError, match=r"write\.format was"):
        run(tmp_path, rows, "out", resume=True)
    path = tmp_path / "out" / f"errors.{output_format}"
    path.write_bytes(path.read_bytes()[: -8 if output_format == "parquet" else -60])
    with pytest.raises(InfrastructureError, match=r"changed by something else"):
        run(tmp_path, rows, "out", **options)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.parquet"])
def test_results_do_not_depend_on_the_format_of_the_input(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name == "rows.parquet":
        write_parquet(path, ROWS)
    else:
        path.write_bytes(as_jsonl(ROWS) if name == "rows.jsonl" else as_csv(ROWS, FIELDS))
    reference = tmp_path / "reference" / "rows.jsonl"
    reference.parent.mkdir()
    reference.write_bytes(as_jsonl(ROWS))
    run(tmp_path, reference, "expected")
    summary = run(tmp_path, path, "out")
    assert summary["exit_code"] == ExitCode.ROW_ERRORS
    found = (tmp_path / "out" / "results.jsonl").read_text().replace(name, "rows.jsonl")
    # A column of a table is there in every row: what a JSON line leaves out is null.
    found = found.replace(', "extra": {"note": null}', "")
    assert found == (tmp_path / "expected" / "results.jsonl").read_text()


@pytest.mark.parametrize("output_format", ["csv", "parquet"])
def test_no_rows_and_only_bad_rows_make_whole_tables(tmp_path: Path, output_format: str) -> None:
    for name, content, code in (("none", b"", 0), ("bad", b"{\n{\n", 3)):
        rows = tmp_path / f"{name}.jsonl"
        rows.write_bytes(content)
        assert run(tmp_path, rows, name, output_format=output_format)["exit_code"] == code
        assert list(read_final(tmp_path / name, "results", output_format)) == []  # type: ignore[arg-type]
        errors = list(read_final(tmp_path / name, "errors", output_format))  # type: ignore[arg-type]
        assert [error["class"] for error in errors] == ["invalid_json"] * content.count(b"\n")


@pytest.mark.parametrize("name", ["results.csv", "errors.parquet"])
def test_an_input_that_is_an_output_of_any_format_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(UsageError, match="is an output of this job"):
        run(tmp_path, tmp_path / name, ".", overwrite=True)


def test_overwriting_removes_results_of_another_format(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(b"".join(make_rows(20, bad=False)))
    run(tmp_path, rows, "out", output_format="parquet")
    run(tmp_path, rows, "out", output_format="csv", overwrite=True)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"results.csv", "errors.csv", "run.json", "summary.json", "progress.json"} | {
        "report.html",
        "timeline.json",
    }


def test_a_limit_is_of_rows_in_every_format(tmp_path: Path) -> None:
    write_parquet(tmp_path / "rows.parquet", ROWS)
    (tmp_path / "rows.csv").write_bytes(as_csv(ROWS, FIELDS))
    for name in ("rows.parquet", "rows.csv"):
        assert run(tmp_path, tmp_path / name, f"out-{name}", limit=2)["rows"] == 2


def test_what_is_done_to_columns_is_said_in_the_summary(tmp_path: Path) -> None:
    frame = pd.DataFrame({"text": ["a"], "when": [pd.Timestamp("2024-01-01")]})
    frame.to_parquet(tmp_path / "rows.parquet")
    summary = run(tmp_path, tmp_path / "rows.parquet", "out")
    assert any("rows.parquet: column 'when'" in warning for warning in summary["warnings"])
    (entry,) = json.loads((tmp_path / "out" / "run.json").read_bytes())["inputs"]
    assert (entry["format"], entry["rows"], len(entry["notes"])) == ("parquet", 1, 1)


@pytest.mark.parametrize("output_format", ["csv", "parquet"])
def test_a_report_of_tables_sees_the_rows_of_one_of_lines(tmp_path: Path, output_format: str) -> None:
    """Once the job is over, when its parts are gone, and while failed rows keep them."""
    for name, bad in (("whole", False), ("failing", True)):
        rows = tmp_path / f"{name}.jsonl"
        rows.write_bytes(b"".join(make_rows(40, bad=bad)))
        seen = []
        for one in ("jsonl", output_format):
            run(tmp_path, rows, f"{name}-{one}", output_format=one)
            folder = tmp_path / f"{name}-{one}"
            results = [json.loads(line) for line in result_lines(folder).read()]
            failures = [json.loads(line)["id"] for line in failure_lines(folder)]
            seen.append(([(row["id"], row.get("logprob"), row["task"]) for row in results], failures))
        assert seen[0] == seen[1]
        assert len(seen[0][0]) > 20
