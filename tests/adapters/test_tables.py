"""Rows out of tables and results into tables, without a pool."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from model_pool import ModelPool
from tinyloop.cluster.encoding import Encoder, EncodingPolicy
from tinyloop.cluster.errors import RowError, UsageError
from tinyloop.cluster.row_source import SCORE_FIELDS, mappings_of
from tinyloop.cluster.row_stream import stream_rows
from tinyloop.cluster.rows import RowFailure
from tinyloop.cluster.score_results import ScoreResults, result_schema
from tinyloop.cluster.scoring import Scorer, score_rows
from tinyloop.cluster.tasks import ChoicesResult, PairResult, TaskOptions, TextResult
from tinyloop.native import load_model
from tinyloop.native.format import read_header
from tinyloop.native.models import default_model_path
from tinyloop.native.tokenizer import load_tokenizer

ROWS: list[dict[str, Any]] = [
    {"id": "a", "context": "The sea is", "continuation": " blue."},
    {"id": "b", "context": "2 + 2 =", "choices": [" 4", " 5"], "gold": 1},
    {"id": "c", "text": "A ship came in."},
    {"id": "d", "context_ids": [5, 6, 7], "continuation_ids": [8]},
]


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    header = read_header(default_model_path())
    return Encoder(load_tokenizer(header), EncodingPolicy.of_model(header.descriptor, 64))


@pytest.fixture(scope="module")
def results(encoder: Encoder) -> ScoreResults:
    """All kinds of rows, and one that cannot be scored."""
    options = TaskOptions(pmi=True, token_logprobs=True)
    with load_model(default_model_path(), max_seq_len=64, threads=1) as model:
        rows = [*ROWS, {"id": "e", "context": "x", "continuation": 3}]
        return ScoreResults(score_rows(ModelPool(model), encoder, rows, depth=1, options=options), 1)


def as_frame() -> pd.DataFrame:
    frame = pd.DataFrame(ROWS)
    assert math.isnan(frame["gold"][0])  # pandas has made floats of whole numbers
    return frame


@pytest.mark.parametrize(
    "table",
    [as_frame(), pa.Table.from_pylist(ROWS), pa.RecordBatch.from_pylist(ROWS), iter(ROWS)],
    ids=["pandas", "arrow", "batch", "mappings"],
)
def test_a_table_gives_the_rows_that_it_was_made_of(table: Any) -> None:
    if isinstance(table, pa.Table | pa.RecordBatch):
        # from_pylist takes its columns from the first row alone.
        names = list(dict.fromkeys(name for row in ROWS for name in row))
        table = pa.table({name: [row.get(name) for row in ROWS] for name in names})
    assert [dict(row) for row in mappings_of(table, SCORE_FIELDS)] == ROWS


def test_columns_that_no_row_is_read_from_are_not_looked_at() -> None:
    frame = pd.DataFrame({"text": ["a"], "mixed": [object()]})
    assert list(mappings_of(frame, SCORE_FIELDS)) == [{"text": "a"}]


def test_what_is_no_table_of_rows_is_refused() -> None:
    with pytest.raises(UsageError, match=r"no column of the table is a field of a row: found question"):
        list(mappings_of(pd.DataFrame({"question": ["a"]}), SCORE_FIELDS))
    with pytest.raises(UsageError, match=r"cannot read the DataFrame: .*give every column one type"):
        list(mappings_of(pd.DataFrame({"text": ["a", 3]}), SCORE_FIELDS))
    with pytest.raises(UsageError, match=r"rows are one dict: give a list of mappings"):
        mappings_of(ROWS[0], SCORE_FIELDS)  # type: ignore[arg-type]


def test_a_table_of_results_has_every_number_of_them(results: ScoreResults) -> None:
    table = results.to_arrow()
    assert table.schema.names == ["row_id", *result_schema().names]
    assert not set(table.schema.names) & set(SCORE_FIELDS)
    pair, question, text, ids, failure = table.to_pylist()
    one, two, three, four, five = results
    assert isinstance(one, PairResult)
    assert (pair["logprob"], pair["is_greedy"]) == (one.score.logprob, one.score.is_greedy)
    assert np.float32(pair["token_logprobs"]).tolist() == list(one.score.token_logprobs)
    assert isinstance(two, ChoicesResult)
    assert question["pred"] == two.pred
    assert question["correct"] == {name: best == 1 for name, best in two.pred.items()}
    for found, choice in zip(question["choice_scores"], two.choices, strict=True):
        assert found["logprob"] == choice.score.logprob
        assert found["logprob_per_byte"] == choice.by_metric["acc_bytes"]
        assert found["pmi"] == choice.by_metric["acc_pmi"]
    assert isinstance(three, TextResult)
    assert (text["logprob"], text["n_tokens"], text["n_words"]) == (three.logprob, three.n_tokens, 4)
    assert isinstance(four, PairResult)
    assert (ids["n_context"], ids["n_continuation"], ids["task"]) == (3, 1, "continuation")
    assert isinstance(five, RowFailure)
    assert (failure["row_id"], failure["error_class"]) == ("e", "wrong_type")
    assert failure["logprob"] is None
    assert [row["error"] for row in table.to_pylist()[:4]] == [None] * 4


def test_a_frame_of_results_stands_beside_the_frame_of_rows(results: ScoreResults) -> None:
    index = pd.Index([7, 3, 9, 1, 5])
    frame = ScoreResults(results, 1, index).to_pandas()
    assert frame.index.tolist() == index.tolist()
    rows = pd.DataFrame({"context": list("vwxyz")}, index=index)
    assert rows.join(frame)["row_id"].tolist() == list("abcde")


def test_failures_are_listed_and_can_be_raised(results: ScoreResults) -> None:
    assert [failure.id for failure in results.failures] == ["e"]
    with pytest.raises(RowError, match=r"1 of 5 rows failed; row e: continuation is 3: text is needed"):
        results.raise_failures()
    ScoreResults(results[:4], 1).raise_failures()


# ---- streams -------------------------------------------------------------------------------------


class CountingPool(ModelPool):
    """Says what was given up."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.cancelled: list[int] = []

    def cancel(self, window: int) -> int:
        self.cancelled.append(window)
        self.waiting = [one for one in self.waiting if one[0] != window]
        return 0


def test_a_stream_reads_two_windows_ahead_and_gives_up_what_nobody_wants(encoder: Encoder) -> None:
    read = 0

    def rows() -> Any:
        nonlocal read
        for number in range(1000):
            read += 1
            yield {"text": f"ship {number}"} if number % 7 else {"text": number}

    with load_model(default_model_path(), max_seq_len=64, threads=1) as model:
        pool = CountingPool(model)
        stream = stream_rows(Scorer(pool, encoder, 1), rows(), window_rows=10)
        assert read == 0
        taken = [next(stream) for _ in range(25)]
        assert read == 40  # the third window is being taken, the fourth is on its way
        stream.close()
    assert len(pool.cancelled) == 1
    for number, outcome in enumerate(taken):
        assert isinstance(outcome, TextResult if number % 7 else RowFailure)
        assert (outcome.row if isinstance(outcome, TextResult) else outcome).number == number


def test_streams_of_one_pool_may_be_read_in_turn(encoder: Encoder) -> None:
    with load_model(default_model_path(), max_seq_len=64, threads=1) as model:
        pool, shared = ModelPool(model), {}  # type: ignore[var-annotated]
        rows = [{"text": f"ship {number}"} for number in range(40)]
        one, two = (
            stream_rows(Scorer(pool, encoder, depth, None, shared), rows, window_rows=8) for depth in (1, 2)
        )
        pairs = list(zip(one, two, strict=True))
        for depth, column in zip((1, 2), zip(*pairs, strict=True), strict=True):
            alone = score_rows(ModelPool(model), encoder, rows, depth=depth)
            assert [one.logprob for one in column] == [other.logprob for other in alone]  # type: ignore[union-attr]
        assert shared == {}
