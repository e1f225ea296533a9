"""Rules R13 and R38-R42 of reading rows."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from tinyloop.cluster.errors import InfrastructureError, UsageError
from tinyloop.cluster.inputs import IdIndex, expand, read_rows, scan
from tinyloop.cluster.rows import Choices, Continuation, Row, RowFailure, Text, TokenContinuation, parse_task
from tinyloop.cluster.sources import streams

PAIR = {"context": "a", "continuation": "b"}


def read(tmp_path: Path, content: bytes | list[object], **options: object) -> list[Row | RowFailure]:
    path = tmp_path / "rows.jsonl"
    if isinstance(content, list):
        content = b"".join(json.dumps(row).encode() + b"\n" for row in content)
    path.write_bytes(content)
    return list(read_rows(scan(expand([str(path)])), **options))  # type: ignore[arg-type]


def classes(rows: list[Row | RowFailure]) -> list[str]:
    return [row.error_class if isinstance(row, RowFailure) else "ok" for row in rows]


def task_of(row: Row | RowFailure) -> object:
    assert isinstance(row, Row), row
    return row.task


def test_rows_of_every_kind_are_typed_and_keep_other_fields(tmp_path: Path) -> None:
    rows = read(
        tmp_path,
        [
            {**PAIR, "id": "x", "meta": {"a": [1, None]}, "score": 1.5},
            {"context": "q", "choices": ["a", "b"], "gold": 1, "prefix": "p "},
            {"context_ids": [1, 2], "continuation_ids": [3]},
            {"text": ""},
        ],
    )
    assert [task_of(row) for row in rows] == [
        Continuation("a", "b"),
        Choices("p q", ("a", "b"), 1),
        TokenContinuation((1, 2), (3,)),
        Text(""),
    ]
    assert isinstance(rows[0], Row)
    assert (rows[0].id, rows[0].extra) == ("x", {"meta": {"a": [1, None]}, "score": 1.5})


@pytest.mark.parametrize(
    "row",
    [
        {"context": "a"},
        {"context": "a", "continuation": None},
        {"continuation": "a"},
        {"context": None, "continuation": "a"},
        {"choices": ["a"]},
        {"text": None},
        {"continuation_ids": [1]},
        {},
    ],
)
def test_r13_missing_and_null_are_errors(tmp_path: Path, row: dict[str, object]) -> None:
    assert classes(read(tmp_path, [row])) == ["missing_field"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"null", "a JSON null"),
        (b'"x"', "a JSON string"),
        (b"[1]", "a JSON array"),
        (b"1.5", "a JSON number"),
        (b"1", "a JSON number"),
        (b"false", "a JSON boolean"),
        (b'{"continuation_ids": [1]}', "context_ids is missing or null: give a list of integers"),
        (b'{"context_ids": [1]}', "continuation_ids is missing or null: give a list of integers"),
        (
            b'{"context": "a", "choices": null}',
            "choices is missing or null: give a list of at least",
        ),
        (b'{"context": "a", "continuation": null}', "continuation is missing or null: give text"),
        (b'{"text": null}', "text is missing or null: give text, which may be empty"),
    ],
)
def test_a_message_says_what_was_found_and_what_to_give(tmp_path: Path, line: bytes, message: str) -> None:
    (row,) = read(tmp_path, line + b"\n")
    assert isinstance(row, RowFailure)
    assert message in row.message


def test_r13_empty_is_not_missing(tmp_path: Path) -> None:
    assert classes(read(tmp_path, [{"context": "", "continuation": "a"}, {"text": ""}])) == ["ok", "ok"]


@pytest.mark.parametrize(
    "row",
    [
        [1],
        "text",
        {"context": 1, "continuation": "a"},
        {"context": "a", "continuation": ["b"]},
        {"context": "a", "choices": "b"},
        {"context": "a", "choices": []},
        {"context": "a", "choices": ["b", 1]},
        {"context": "a", "choices": ["b"], "gold": "0"},
        {"context": "a", "choices": ["b"], "gold": True},
        {"context": "a", "choices": ["b"], "continuation": "c"},
        {"text": "a", "context": "b"},
        {**PAIR, "id": 1.5},
        {**PAIR, "id": ""},
        {**PAIR, "id": True},
        {**PAIR, "prefix": 1},
        {"context_ids": [1, True], "continuation_ids": [1]},
        {"context_ids": "1", "continuation_ids": [1]},
        {"context_ids": [1], "continuation_ids": [1], "continuation": "x"},
    ],
)
def test_wrong_types_are_row_errors(tmp_path: Path, row: object) -> None:
    assert classes(read(tmp_path, [row])) == ["wrong_type"]


@pytest.mark.parametrize("gold", [-1, 2])
def test_r28_gold_out_of_range_is_a_row_error(tmp_path: Path, gold: int) -> None:
    assert classes(read(tmp_path, [{"context": "a", "choices": ["b", "c"], "gold": gold}])) == [
        "gold_out_of_range"
    ]


def test_r26_an_empty_choice_is_a_row_error(tmp_path: Path) -> None:
    assert classes(read(tmp_path, [{"context": "a", "choices": ["b", ""]}])) == ["empty_continuation"]


def test_r38_every_line_that_is_not_blank_is_one_row_or_one_failure(tmp_path: Path) -> None:
    content = b'{"text": "a"}\n\n  \n{bad\n{"text": "b"}\r\n\t\n{"text": "c"}'
    rows = read(tmp_path, content)
    assert classes(rows) == ["ok", "invalid_json", "ok", "ok"]
    assert [row.number for row in rows] == [0, 1, 2, 3]
    assert [row.line for row in rows] == [1, 4, 5, 7]
    (file,) = scan(expand([str(tmp_path / "rows.jsonl")]))
    assert (file.num_rows, file.num_blank) == (4, 3)


def test_r39_custom_id_then_id_then_file_line_and_content(tmp_path: Path) -> None:
    rows = read(
        tmp_path, [{**PAIR, "custom_id": "c", "id": "i"}, {**PAIR, "id": 7}, PAIR, {**PAIR, "id": None}]
    )
    assert [row.id for row in rows[:2]] == ["c", "7"]
    assert rows[2].id.startswith("rows.jsonl:3:")
    assert rows[3].id.startswith("rows.jsonl:4:")
    assert isinstance(rows[0], Row)
    assert rows[0].extra == {"id": "i"}


def test_r39_the_first_use_of_an_id_wins(tmp_path: Path) -> None:
    rows = read(
        tmp_path, [{**PAIR, "id": "x"}, {**PAIR, "id": "y"}, {**PAIR, "id": "x"}, {**PAIR, "custom_id": "y"}]
    )
    assert classes(rows) == ["ok", "ok", "duplicate_id", "duplicate_id"]


def test_r39_the_index_of_ids_agrees_with_a_set_and_stays_small() -> None:
    index = IdIndex(run_size=8)
    seen: set[str] = set()
    for i in range(3_000):
        row_id = str((i * 7919) % 1_000)
        assert index.add(row_id) == (row_id not in seen)
        seen.add(row_id)
    assert sum(run.nbytes for run in index._runs) <= 8 * len(seen)


def test_r40_only_line_feeds_end_lines(tmp_path: Path) -> None:
    text = "a\u2028b\u2029c\u0085d\x0be"
    content = json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n" + b'{"text": "x"}\n'
    rows = read(tmp_path, content)
    assert [task_of(row) for row in rows] == [Text(text), Text("x")]


def test_r40_byte_order_mark_and_crlf_are_accepted(tmp_path: Path) -> None:
    rows = read(tmp_path, b'\xef\xbb\xbf{"text": "a"}\r\n{"text": "b"}\r\n')
    assert [task_of(row) for row in rows] == [Text("a"), Text("b")]
    assert read(tmp_path, b"\xef\xbb\xbf\n") == []


@pytest.mark.parametrize(
    "line",
    [
        b'{"text": "a", "text": "b"}',
        b'{"text": "a", "x": {"k": 1, "k": 2}}',
        b'{"text": "a", "x": NaN}',
        b'{"text": "a", "x": -Infinity}',
        b'{"text": "a", "x": 1e999}',
        b'{"text": "a"} {"text": "b"}',
        b'{"text": "a"',
        b"[" * 100_000,
        b'{"text": "a", "x": ' + b"[" * 300 + b"]" * 300 + b"}",
        b'{"text": "a", "x": ' + b"1" * 5_000 + b"}",
    ],
)
def test_r40_json_is_read_strictly_and_the_line_is_named(tmp_path: Path, line: bytes) -> None:
    rows = read(tmp_path, b'{"text": "first"}\n' + line + b"\n")
    assert classes(rows) == ["ok", "invalid_json"]
    assert (rows[1].file, rows[1].line) == ("rows.jsonl", 2)


def test_a_field_that_is_null_in_one_file_and_text_in_the_next_stays_what_it_is(tmp_path: Path) -> None:
    values: list[object] = [None, "x", 5, [None, 1], {"a": None}]
    paths = []
    for i, value in enumerate(values):
        paths.append(str(tmp_path / f"{i}.jsonl"))
        Path(paths[-1]).write_text(json.dumps({**PAIR, "u": value}) + "\n")
    rows = list(read_rows(scan(expand(paths))))
    assert [row.extra["u"] for row in rows if isinstance(row, Row)] == values


@pytest.mark.parametrize(
    "line", [b"[null,1]", b"null", b"1", b'"text"', b'{"context_ids": [null], "continuation_ids": [1]}']
)
def test_what_is_no_object_or_no_id_is_a_row_error(tmp_path: Path, line: bytes) -> None:
    assert classes(read(tmp_path, line + b'\n{"text": "a"}\n')) == ["wrong_type", "ok"]


def test_trap_131_text_that_looks_like_a_missing_value_is_text(tmp_path: Path) -> None:
    choices = ("NA", "null", "N/A", "nan", "None", " ")
    (row,) = read(tmp_path, [{"context": "NA", "choices": choices, "gold": 0, "note": "NaN"}])
    assert task_of(row) == Choices("NA", choices, 0)
    assert isinstance(row, Row)
    assert row.extra == {"note": "NaN"}


def test_a_line_of_100_mb_is_one_row(tmp_path: Path) -> None:
    size = 100 << 20
    path = tmp_path / "rows.jsonl"
    with path.open("wb") as file:
        file.write(b'{"text": "a"}\n{"text": "')
        file.write(b"x" * size)
        file.write(b'"}\n{"text": "b"}\n')
    first, long, last = read_rows(scan(expand([str(path)])))
    assert (task_of(first), task_of(last)) == (Text("a"), Text("b"))
    assert len(task_of(long).text) == size  # type: ignore[attr-defined]


def test_r40_a_long_line_is_read_and_one_beyond_the_limit_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long_text = "x" * (3 << 20)
    assert task_of(read(tmp_path, [{"text": long_text}])[0]) == Text(long_text)
    monkeypatch.setattr(streams, "MAX_LINE_BYTES", 1_000)
    content = b'{"text": "a"}\n{"text": "' + b"x" * 5_000 + b'"}\n{"text": "b"}\n'
    rows = read(tmp_path, content)
    assert classes(rows) == ["ok", "invalid_json", "ok"]
    assert [row.line for row in rows] == [1, 2, 3]


@pytest.mark.parametrize(
    "line",
    [
        b'{"text": "a\\ud800b"}',
        b'{"context": "a", "continuation": "\\udc00"}',
        b'{"context": "a", "choices": ["x", "\\ud835"]}',
        b'{"id": "\\ud800", "text": "x"}',
        b'{"text": "\xff"}',
    ],
)
def test_r41_lone_surrogates_and_bad_utf8_are_row_errors(tmp_path: Path, line: bytes) -> None:
    assert classes(read(tmp_path, line + b"\n")) == ["invalid_unicode"]


def test_r41_surrogates_can_be_replaced_and_pairs_are_characters(tmp_path: Path) -> None:
    content = b'{"text": "a\\ud800bc"}\n{"text": "\\ud83d\\ude00"}\n'
    rows = read(tmp_path, content, parse=partial(parse_task, replace_surrogates=True))
    assert [task_of(row) for row in rows] == [Text("a\ufffdbc"), Text("\U0001f600")]


def test_several_inputs_and_globs_are_read_in_order(tmp_path: Path) -> None:
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.jsonl").write_text(f'{{"text": "{folder}"}}\n')
    (tmp_path / "b.jsonl").write_text('{"text": "b"}\n')
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    paths = expand(
        [str(tmp_path / "y" / "same.jsonl"), str(tmp_path / "*.jsonl"), str(tmp_path / "x" / "same.jsonl")]
    )
    rows = list(read_rows(scan(paths)))
    assert [task_of(row) for row in rows] == [Text("y"), Text("a"), Text("b"), Text("x")]
    assert [row.number for row in rows] == [0, 1, 2, 3]
    # Equal base names are told apart by their paths, so that ids without an id field stay unique.
    assert len({row.id for row in rows}) == 4


@pytest.mark.parametrize(
    "patterns", [["nothing-*.jsonl"], ["missing.jsonl"], ["."], ["a.jsonl", "./a.jsonl"]]
)
def test_inputs_that_cannot_be_meant_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patterns: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(UsageError):
        expand(patterns)


def test_limit_takes_the_first_rows(tmp_path: Path) -> None:
    assert [row.number for row in read(tmp_path, [PAIR] * 5, limit=3)] == [0, 1, 2]


def test_a_file_that_changes_while_it_is_read_ends_the_job(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n{"text": "b"}\n')
    files = scan(expand([str(path)]))
    path.write_text('{"text": "a"}\n{"text": "c"}\n')
    with pytest.raises(InfrastructureError, match="changed while the job ran"):
        list(read_rows(files))
