"""Rows in every format: the same rows give the same results, and nothing in a table is guessed or lost."""

from __future__ import annotations

import base64
import csv
import datetime as dt
import decimal
import gzip
import io
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinyloop.cluster.errors import InfrastructureError, UsageError
from tinyloop.cluster.inputs import expand, read_rows, scan
from tinyloop.cluster.rows import Choices, Continuation, Row, RowFailure, Text
from tinyloop.cluster.sources import csv_table, streams
from tinyloop.cluster.sources.formats import kind_of
from tinyloop.cluster.sources.places import local
from tinyloop.cluster.sources.streams import numbered_lines

# What a table can say too: text, but where a row's own fields are lists or numbers.
ROWS: list[dict[str, Any]] = [
    {"id": "pair", "context": "", "continuation": "a,b", "note": "NA"},
    {"context": 'say "hi"\r\nthere', "continuation": " x\u2028y\u0085z", "note": "null"},
    {"context": "q", "choices": ["NA", "a\nb", "", "\U0001f600"], "gold": 1},
    {"context": "q", "choices": ["NA", "nan", "None"], "gold": 1, "prefix": "p "},
    {"context_ids": [1, 2], "continuation_ids": [3]},
    {"text": "", "note": ""},
    {"text": "\ufeffbyte order mark inside"},
    {"custom_id": "7", "text": "x"},
    {"id": "pair", "text": "the id again"},
    {"context": "no continuation"},
]
FIELDS = ["id", "custom_id", "prefix", "context", "continuation", "choices", "gold", "context_ids"]
FIELDS += ["continuation_ids", "text", "note"]


def as_jsonl(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def as_csv(rows: list[dict[str, Any]], columns: list[str], end: str = "\r\n") -> bytes:
    """Through the csv module, which quotes every cell that is there; an absent one is left bare."""
    out = io.StringIO()
    for row in [dict(zip(columns, columns, strict=True)), *rows]:
        cells: list[str] = []
        for name in columns:
            cell = io.StringIO()
            value = row.get(name)
            if value is not None:
                shown = value if isinstance(value, str) else json.dumps(value)
                csv.writer(cell, quoting=csv.QUOTE_ALL, lineterminator="").writerow([shown])
            cells.append(cell.getvalue())
        out.write(",".join(cells) + end)
    return out.getvalue().encode("utf-8")


def write_parquet(path: Path, rows: list[dict[str, Any]], **options: Any) -> None:
    names = [name for name in FIELDS if any(name in row for row in rows)]
    pq.write_table(pa.table({name: [row.get(name) for row in rows] for name in names}), path, **options)


def read(path: str | Path, **options: Any) -> list[Row | RowFailure]:
    return list(read_rows(scan(expand([str(path)])), **options))


def comparable(row: Row | RowFailure) -> Row | RowFailure:
    """The row without its file's name, and without the nulls that only a table has."""
    row_id = row.id.replace(row.file, "FILE")
    if isinstance(row, RowFailure):
        message = "" if row.error_class == "missing_field" else row.message
        return RowFailure(row.number, row_id, "FILE", row.line, row.error_class, message)
    extra = {name: value for name, value in row.extra.items() if value is not None}
    return Row(row.number, row_id, "FILE", row.line, row.task, extra)


def test_the_same_rows_are_the_same_in_every_format(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(as_jsonl(ROWS))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(as_jsonl(ROWS)))
    (tmp_path / "a.csv").write_bytes(as_csv(ROWS, FIELDS))
    (tmp_path / "b.csv").write_bytes(b"\xef\xbb\xbf" + as_csv(ROWS, FIELDS[::-1], "\n").rstrip(b"\n"))
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(as_csv(ROWS, FIELDS)))
    with pa.CompressedOutputStream(str(tmp_path / "a.jsonl.zst"), "zstd") as stream:
        stream.write(as_jsonl(ROWS))
    write_parquet(tmp_path / "a.parquet", ROWS)
    write_parquet(tmp_path / "b.parquet", ROWS, row_group_size=3, use_dictionary=False)
    expected = [comparable(row) for row in read(tmp_path / "a.jsonl")]
    assert [row.error_class if isinstance(row, RowFailure) else "ok" for row in expected] == [
        "ok", "ok", "empty_continuation", "ok", "ok", "ok", "ok", "ok", "duplicate_id", "missing_field"
    ]  # fmt: skip
    for name in ("a.jsonl.gz", "a.jsonl.zst", "a.csv", "b.csv", "a.csv.gz", "a.parquet", "b.parquet"):
        assert [comparable(row) for row in read(tmp_path / name)] == expected, name
        (file,) = scan(expand([str(tmp_path / name)]))
        assert (file.num_rows, file.label) == (len(ROWS), name)


texts = st.text(alphabet=st.sampled_from('ab,"\r\n\u2028\x00 \ufeff\u00e9\U0001f600;\t'), max_size=8)


@given(rows=st.lists(st.lists(st.none() | texts, min_size=3, max_size=3), max_size=5), end=st.booleans())
def test_csv_cells_come_back_and_agree_with_the_csv_module(rows: list[list[str | None]], end: bool) -> None:
    lines = [",".join(csv_table.cell_of(cell) for cell in row) for row in rows]
    content = "\n".join(lines).encode() + (b"\n" if end and rows else b"")
    found = [cells for _, cells in csv_table.split_records(numbered_lines(io.BytesIO(content)))]
    bare_mark = content.startswith(b"\xef\xbb\xbf")  # a mark at the very start belongs to the file
    if not bare_mark:
        assert found == [[None if cell is None else cell.encode() for cell in row] for row in rows]
    theirs = list(csv.reader(io.StringIO(content.decode("utf-8-sig"), newline="")))
    assert [["" if cell is None else cell.decode() for cell in row] for row in found] == theirs  # type: ignore[union-attr]


@given(rows=st.lists(st.lists(texts, min_size=2, max_size=2), min_size=1, max_size=5))
def test_a_csv_file_that_pandas_wrote_is_read(rows: list[list[str]]) -> None:
    buffer = io.StringIO()
    pd.DataFrame(rows, columns=["x", "y"]).to_csv(buffer, index=False, quoting=csv.QUOTE_ALL)
    found = [
        cells for _, cells in csv_table.split_records(numbered_lines(io.BytesIO(buffer.getvalue().encode())))
    ]
    assert found == [[cell.encode() for cell in row] for row in [["x", "y"], *rows]]


def csv_rows(tmp_path: Path, content: bytes) -> list[Row | RowFailure]:
    (tmp_path / "rows.csv").write_bytes(content)
    return read(tmp_path / "rows.csv")


def test_trap_131_a_choice_named_na_stays_and_every_column_is_text(tmp_path: Path) -> None:
    (row,) = csv_rows(tmp_path, b'context,choices,n\nq,"[""NA"", ""null"", ""N/A""]",007\n')
    assert isinstance(row, Row)
    assert row.task == Choices("q", ("NA", "null", "N/A"), None)
    assert row.extra == {"n": "007"}


def test_r13_a_bare_cell_is_absent_and_a_quoted_one_is_empty_text(tmp_path: Path) -> None:
    empty, missing = csv_rows(tmp_path, b'context,continuation,note\n"",x,""\n,x,\n')
    assert isinstance(empty, Row)
    assert (empty.task, empty.extra) == (Continuation("", "x"), {"note": ""})
    assert isinstance(missing, RowFailure)
    assert (missing.error_class, "missing or null" in missing.message) == ("missing_field", True)


@pytest.mark.parametrize(
    ("record", "error_class", "message"),
    [
        (b'a"b,c', "invalid_csv", "cell 1: a quote stands in a bare cell"),
        (b'a,"b"c', "invalid_csv", "cell 2: something stands after the closing quote"),
        (b"a,b,c", "invalid_csv", "record has 3 cells, the header 2"),
        (b"a", "invalid_csv", "record has 1 cells"),
        (b"a,\xff", "invalid_unicode", "column 'choices' is not UTF-8"),
        (b"a,b", "invalid_json", "column 'choices' is not strict JSON"),
        (b"a,5", "wrong_type", "choices is 5"),
        (b'a,"[NaN]"', "invalid_json", "NaN"),
    ],
)
def test_a_bad_record_is_one_row_error(tmp_path: Path, record: bytes, error_class: str, message: str) -> None:
    good = b'q,"[""x""]"\n'
    rows = csv_rows(tmp_path, b"context,choices\n" + good + record + b"\n" + good)
    assert isinstance(rows[1], RowFailure)
    assert (rows[1].error_class, rows[1].line) == (error_class, 2)
    assert message in rows[1].message
    assert [type(row) for row in rows] == [Row, RowFailure, Row]


def test_a_quote_that_is_never_closed_is_one_row_error_that_says_where_it_opens(tmp_path: Path) -> None:
    rows = csv_rows(tmp_path, b'text\nfine\n"open\nand on\n')
    assert isinstance(rows[0], Row)
    assert isinstance(rows[1], RowFailure)
    assert "opened in line 3 is never closed" in rows[1].message
    assert len(rows) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a,,c\n", "column 2 has no name"),
        (b"a,b,a\n", "column 'a' stands there twice"),
        (b"\xff\n", "not UTF-8"),
        (b'a"b\n', "a quote stands in a bare cell"),
    ],
)
def test_a_header_that_does_not_name_every_column_is_refused(
    tmp_path: Path, content: bytes, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        csv_rows(tmp_path, content)


def test_blank_records_are_counted_and_an_empty_file_has_no_rows(tmp_path: Path) -> None:
    rows = csv_rows(tmp_path, b"text\n\na\n\r\nb\n\n")
    assert [row.line for row in rows] == [2, 4]
    (file,) = scan(expand([str(tmp_path / "rows.csv")]))
    assert (file.num_rows, file.num_blank) == (2, 3)
    assert csv_rows(tmp_path, b"") == csv_rows(tmp_path, b"text\n") == []


def test_trap_129_a_long_record_is_read_and_one_beyond_the_limit_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = ("x" * 999 + "\n") * 4_000
    (row,) = csv_rows(tmp_path, b'text\n"' + text.encode() + b'"\n')
    assert isinstance(row, Row)
    assert row.task == Text(text)
    pq.write_table(pa.table({"text": [text]}), tmp_path / "long.parquet")
    assert [r.task for r in read(tmp_path / "long.parquet") if isinstance(r, Row)] == [Text(text)]
    monkeypatch.setattr(streams, "MAX_LINE_BYTES", 1_000)
    for long in (b"y" * 5_000, b'"' + b"y\n" * 2_000 + b'"', b'"' + b"y" * 5_000 + b'\nz"'):
        rows = csv_rows(tmp_path, b"text\na\n" + long + b"\nb\n")
        assert [row.error_class if isinstance(row, RowFailure) else "ok" for row in rows] == [
            "ok", "invalid_csv", "ok"
        ]  # fmt: skip


def test_trap_127_a_column_of_nulls_and_then_of_text_is_read(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a"], "u": pa.nulls(1)}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"text": ["b"], "u": ["x"]}), tmp_path / "2.parquet")
    rows = read(tmp_path / "*.parquet")
    assert [row.extra for row in rows if isinstance(row, Row)] == [{"u": None}, {"u": "x"}]
    (tmp_path / "1.jsonl").write_bytes(as_jsonl([{"text": "a", "u": None}, {"text": "a", "u": [None, 1]}]))
    (tmp_path / "2.jsonl").write_bytes(as_jsonl([{"text": "b", "u": "x"}]))
    rows = read(tmp_path / "*.jsonl")
    assert [row.extra["u"] for row in rows if isinstance(row, Row)] == [None, [None, 1], "x"]


def extras(tmp_path: Path, column: pa.Array) -> list[Any]:
    path = tmp_path / "typed.parquet"
    pq.write_table(pa.table({"text": ["x"] * len(column), "c": column}), path)
    rows = read(path)
    return [row.extra["c"] if isinstance(row, Row) else row.error_class for row in rows]


NANOSECOND = 1_700_000_000_123_456_789


@pytest.mark.parametrize(
    ("column", "expected", "note"),
    [
        (pa.array([1, None, 2**63 - 1]), [1, None, 2**63 - 1], ""),
        (pa.array([2**64 - 1], pa.uint64()), [2**64 - 1], ""),
        (pa.array([0.1, -0.0]), [0.1, -0.0], ""),
        (pa.array([0.1], pa.float32()), [0.10000000149011612], ""),
        (pa.array([True, None]), [True, None], ""),
        (pa.array(["a", "b", "a"]).dictionary_encode(), ["a", "b", "a"], ""),
        (pa.array([[{"k": [1, None]}], []]), [[{"k": [1, None]}], []], ""),
        (pa.array([NANOSECOND], pa.timestamp("ns")), ["2023-11-14 22:13:20.123456789"], "ISO 8601"),
        (pa.array([NANOSECOND], pa.timestamp("ns", "UTC")), ["2023-11-14 22:13:20.123456789Z"], "ISO 8601"),
        (pa.array([[dt.date(2024, 2, 29)], None]), [["2024-02-29"], None], "ISO 8601"),
        (pa.array([decimal.Decimal("1.2300")]), ["1.2300"], "all its digits"),
        (pa.array([b"\x00\xff", None]), [base64.b64encode(b"\x00\xff").decode(), None], "base64"),
        (pa.array([{"b": [b"a"]}]), [{"b": ["YQ=="]}], "base64"),
        (pa.array([90], pa.duration("s")), [90], "whole number of s"),
        (pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64())), [[["k", 1]]], "[key, value]"),
        (pa.array([1.0, float("nan"), float("inf")]), [1.0, "wrong_type", "wrong_type"], ""),
        (pa.array([[1.0, float("nan")]]), ["wrong_type"], ""),
    ],
    ids=lambda value: str(value.type) if isinstance(value, pa.Array) else "",
)
def test_parquet_values_are_carried_as_json_says_them_or_as_the_note_says(
    tmp_path: Path, column: pa.Array, expected: list[Any], note: str
) -> None:
    assert json.dumps(extras(tmp_path, column)) == json.dumps(expected)
    (file,) = scan(expand([str(tmp_path / "typed.parquet")]))
    assert note in " ".join(file.notes)
    assert bool(note) == bool(file.notes)


def test_parquet_columns_that_cannot_be_carried_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table([pa.array(["x"]), pa.array(["y"])], names=["text", "text"]), path)
    with pytest.raises(UsageError, match="two columns 'text'"):
        read(path)
    path.write_bytes(b"PAR1 no table PAR1")
    with pytest.raises(UsageError, match="cannot be read"):
        read(path)


def test_text_in_parquet_that_is_not_utf8_fails_its_row_alone(tmp_path: Path) -> None:
    broken = pa.array([b"a", b"\xff", b"c"]).view(pa.string())
    pq.write_table(pa.table({"text": broken}), tmp_path / "rows.parquet")
    rows = read(tmp_path / "rows.parquet")
    assert [row.error_class if isinstance(row, RowFailure) else "ok" for row in rows] == [
        "ok", "invalid_unicode", "ok"
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["rows.csv", "rows.parquet", "rows.jsonl.gz"])
def test_a_file_of_any_format_that_changes_while_it_is_read_ends_the_job(tmp_path: Path, name: str) -> None:
    def put(text: str) -> None:
        rows = [{"text": text}, {"text": "b"}]
        if name.endswith("parquet"):
            write_parquet(tmp_path / name, rows, compression="none")
        else:
            content = as_csv(rows, ["text"]) if name.endswith("csv") else gzip.compress(as_jsonl(rows))
            (tmp_path / name).write_bytes(content)

    put("a")
    files = scan(expand([str(tmp_path / name)]))
    assert len(list(read_rows(files))) == 2
    put("c")
    with pytest.raises(InfrastructureError, match="changed while the job ran"):
        list(read_rows(files))


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.jsonl.zst"])
def test_a_packed_file_that_was_cut_is_refused(tmp_path: Path, name: str) -> None:
    content = as_jsonl([{"text": str(i)} for i in range(1_000)])
    packed = gzip.compress(content) if name.endswith("gz") else pa.compress(content, "zstd", asbytes=True)
    (tmp_path / name).write_bytes(packed[:-10])
    with pytest.raises(UsageError, match="cannot be"):
        scan(expand([str(tmp_path / name)]))


@pytest.mark.parametrize(
    ("name", "expected"),
    [("a.JSONL", "jsonl"), ("a.csv.gz", "csv"), ("a.b.pq", "parquet"), ("a.json.zst", "jsonl")],
)
def test_the_ending_of_a_name_says_the_format(name: str, expected: str) -> None:
    assert kind_of(name).format == expected


@pytest.mark.parametrize("name", ["rows.txt", "rows", "rows.tsv", "rows.gz", "rows.parquet.gz"])
def test_a_name_that_does_not_say_its_format_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"rename|unpack"):
        kind_of(name)
    if not name.startswith("rows.parquet"):
        assert kind_of(name, "csv").format == "csv"


def test_a_jsonl_or_csv_file_is_read_without_pyarrow(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(as_jsonl(ROWS))
    (tmp_path / "a.csv").write_bytes(as_csv(ROWS, FIELDS))
    (tmp_path / "a.parquet").write_bytes(b"")
    code = (
        "import sys\n"
        "for name in ('pyarrow', 'fsspec'): sys.modules[name] = None\n"
        "from tinyloop.cluster.inputs import expand, read_rows, scan\n"
        "print(len(list(read_rows(scan(expand(sys.argv[1:3]))))))\n"
        "try: scan(expand(sys.argv[3:4]))\n"
        "except Exception as error: print(error)\n"
        "try: expand(['s3://bucket/a.jsonl'])\n"
        "except Exception as error: print(error)\n"
    )
    paths = [str(tmp_path / name) for name in ("a.jsonl", "a.csv", "a.parquet")]
    done = subprocess.run([sys.executable, "-c", code, *paths], capture_output=True, text=True, check=True)
    count, files, cloud = done.stdout.splitlines()
    assert count == str(2 * len(ROWS))
    assert "tinyloop-pool[files]" in files
    assert "tinyloop-pool[cloud]" in cloud


# As JSONL, but in stores that are not the local disk.


def test_files_in_a_store_are_read_as_local_ones_are(tmp_path: Path) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    write_parquet(tmp_path / "a.parquet", ROWS)
    contents = {
        "a.jsonl": as_jsonl(ROWS),
        "deep/b.csv": as_csv(ROWS, FIELDS),
        "c.parquet": (tmp_path / "a.parquet").read_bytes(),
    }
    for name, content in contents.items():
        memory.pipe(f"/rows-test/{name}", content)
    (tmp_path / "a.jsonl").write_bytes(as_jsonl(ROWS))
    expected = [comparable(row) for row in read(tmp_path / "a.jsonl")]
    for name in contents:
        assert [comparable(row) for row in read(f"memory://rows-test/{name}")] == expected, name
    found = expand(["memory://rows-test/**/*.*"])
    assert [place.spelled for place in found] == [
        "memory://rows-test/a.jsonl", "memory://rows-test/c.parquet", "memory://rows-test/deep/b.csv"
    ]  # fmt: skip
    assert [place.name for place in expand(["memory://rows-test/[a-b].*"])] == ["a.jsonl"]
    for wrong in ("memory://rows-test/none.jsonl", "memory://rows-test/*.none", "memory://rows-test/deep"):
        with pytest.raises(UsageError, match="matches no file"):
            expand([wrong])
    with pytest.raises(UsageError, match="same file"):
        expand(["memory://rows-test/a.jsonl", "memory://rows-test/*.jsonl"])
    files = scan(expand(["memory://rows-test/c.parquet"]))
    memory.pipe("/rows-test/c.parquet", contents["c.parquet"].replace(b"byte order", b"bytf order"))
    with pytest.raises(InfrastructureError, match="changed while the job ran"):
        list(read_rows(files))


def test_a_file_url_is_a_local_path(tmp_path: Path) -> None:
    path = tmp_path / "with space.jsonl"
    path.write_bytes(as_jsonl(ROWS))
    assert expand([path.as_uri()]) == [local(str(path))]
    with pytest.raises(UsageError, match="names the machine"):
        expand([f"file://elsewhere{path}"])


def test_an_unknown_store_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="nosuch://"):
        expand(["nosuch://a/b.jsonl"])


def test_memory_stays_flat_over_a_parquet_file_of_200_mb_in_one_row_group(tmp_path: Path) -> None:
    path = tmp_path / "large.parquet"
    rng = random.Random(7)
    block = [rng.randbytes(500).hex() for _ in range(5_000)]
    schema = pa.schema([("text", pa.string()), ("n", pa.int64())])
    with pq.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
        texts = [text for _ in range(40) for text in block]
        writer.write_table(pa.table({"text": texts, "n": range(len(texts))}, schema), row_group_size=10**9)
    del texts
    size = path.stat().st_size
    assert size > 200e6
    code = (
        "import resource, sys\n"
        "from tinyloop.cluster.inputs import expand, read_rows, scan\n"
        "import pyarrow.parquet\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "rows = sum(row.extra['n'] == k for k, row in enumerate(read_rows(scan(expand(sys.argv[1:])))))\n"
        "print(rows, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    rows, growth_kib = map(int, done.stdout.split())
    assert rows == 200_000
    # The cache of blocks (32 MB), a batch as Arrow and as Python, and the index of ids; not the 200 MB.
    assert growth_kib < 90 * 1024, f"{growth_kib} KiB"
