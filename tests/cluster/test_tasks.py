"""Rules R20-R34: what a scored row says.

Expected values are computed here from the fake log-probabilities.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinyloop.cluster.closing import _group
from tinyloop.cluster.records import result_line
from tinyloop.cluster.rolling import RollingPolicy, rolling_windows
from tinyloop.cluster.rows import RowFailure
from tinyloop.cluster.scoring import score_rows
from tinyloop.cluster.settings import ScoreSettings
from tinyloop.cluster.summary import GroupTally
from tinyloop.cluster.tasks import ChoicesResult, PairResult, RowResult, TaskOptions, TextResult

from .fake_pool import FakePool, fake_scores
from .score_driver import make_encoder
from .tiny_tokenizer import tiny_tokenizer

DEPTH = 3
EOS_ID = 1


def score(
    *rows: dict[str, object], pool: FakePool | None = None, max_rows: int = 48, **options: object
) -> list[object]:
    encoder = make_encoder(max_rows=max_rows)
    return list(
        score_rows(pool or FakePool(), encoder, rows, depth=DEPTH, options=TaskOptions(**options))  # type: ignore[arg-type]
    )


def line_of(result: object, **options: bool) -> dict[str, object]:
    assert isinstance(result, RowResult)
    return dict(json.loads(result_line(result, DEPTH, **options)))


def ids_of(text: str) -> list[int]:
    return list(tiny_tokenizer().encode(text, add_special_tokens=False).ids)


def expected(context: str, continuation: str) -> list[np.float32]:
    ids = np.array(
        ids_of(context + continuation) if context else [EOS_ID, *ids_of(continuation)], dtype=np.int32
    )
    return fake_scores(ids, len(ids) - (len(ids_of(context)) if context else 1), DEPTH)


def fixed(values: dict[str, float]) -> FakePool:
    """A pool that gives every token of an item the value of the text that the item ends with."""

    def override(ids: np.ndarray, scores: list[np.float32]) -> list[np.float32] | str:
        text = tiny_tokenizer().decode(ids[len(ids) - len(scores) :].tolist())
        return [np.float32(values[text])] * len(scores)

    return FakePool(override=override)


def question(*choices: str, gold: int | None = None) -> dict[str, object]:
    return {"context": "q", "choices": list(choices)} | ({} if gold is None else {"gold": gold})


def ranked(result: object) -> ChoicesResult:
    assert isinstance(result, ChoicesResult), result
    return result


def test_r4_r18_what_was_cut_or_merged_is_on_the_row_and_in_the_totals() -> None:
    group = GroupTally()
    rows = [
        {"context": "x" * 30, "continuation": "yz"},
        {"context": "hello wor", "continuation": "ld"},
        {"context": "hello", "continuation": " world"},
    ]
    lines = [line_of(result) for result in score(*rows, max_rows=16)]
    for line in lines:
        group.add(line)
    assert [line["n_truncated"] for line in lines] == [30 + 2 - 17, 0, 0]
    assert [line["boundary"] for line in lines] == ["clean", "merged", "clean"]
    assert [(line["n_context"], line["n_continuation"]) for line in lines[:2]] == [
        (15, 2),
        (len(ids_of("hello wor")), len(ids_of("ld"))),
    ]
    report = group.report("continuation")
    assert (report["truncated_rows"], report["truncated_tokens"], report["merged_boundaries"]) == (1, 15, 1)
    assert group.notes()["rows that lost context tokens at the left"] == 1
    assert group.notes()["parts with a token across context and continuation"] == 1


def test_r12_an_empty_continuation_scores_nothing_where_that_is_asked_for() -> None:
    pool, settings = FakePool(), ScoreSettings(inputs=(), output=Path(), empty_continuation="zero")
    rows = [{"context": context, "continuation": ""} for context in ("", "hello", "hello \n")]
    for result in score_rows(pool, make_encoder(settings), rows, depth=DEPTH):
        line = line_of(result)
        assert (line["logprob"], line["is_greedy"], line["n_continuation"]) == (0.0, True, 0)
    assert pool.num_scored == 0


def test_r20_greedy_only_if_every_token_is_the_argmax() -> None:
    high, low = {"xy": -1.0}, {"xy": -9.0}
    for values, greedy in ((high, True), (low, False)):
        (result,) = score({"context": "q", "continuation": "xy"}, pool=fixed(values))
        assert isinstance(result, PairResult)
        assert result.score.is_greedy is greedy
    mixed = FakePool(override=lambda ids, scores: [np.float32(-1.0), *[np.float32(-9.0)] * (len(scores) - 1)])
    (result,) = score({"context": "q", "continuation": "xy"}, pool=mixed)
    assert isinstance(result, PairResult)
    assert not result.score.is_greedy


def test_r21_the_sum_is_the_exactly_rounded_sum_of_fp32_values() -> None:
    (result,) = score({"context": "hello", "continuation": " world, hello world"}, token_logprobs=True)
    assert isinstance(result, PairResult)
    values = expected("hello", " world, hello world")
    assert result.score.logprob == math.fsum(float(value) for value in values)
    assert list(result.score.token_logprobs) == [float(value) for value in values]
    assert line_of(result, token_logprobs=True)["token_logprobs"] == [float(value) for value in values]


def test_r22_ties_go_to_the_first_and_are_flagged() -> None:
    (result,) = score(question("xx", "yy", "zz"), pool=fixed({"xx": -3.0, "yy": -1.0, "zz": -1.0}))
    assert ranked(result).pred["acc"] == 1
    assert line_of(result)["tie"] is True
    (result,) = score(question("x", "y"), pool=fixed({"x": -3.0, "y": -1.0}))
    assert line_of(result)["tie"] is False


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_r23_nan_and_plus_infinity_fail_the_row(value: float) -> None:
    results = score(
        question("x", "y"), {"context": "q", "continuation": "y"}, pool=fixed({"x": -1.0, "y": value})
    )
    for result in results:
        assert isinstance(result, RowFailure)
        assert result.error_class == "non_finite"


def test_r23_minus_infinity_is_null_with_a_reason_and_ranks_last() -> None:
    results = score(
        question("x", "y", gold=1),
        {"context": "q", "continuation": "x"},
        pool=fixed({"x": -math.inf, "y": -5.0}),
    )
    assert ranked(results[0]).pred == {"acc": 1, "acc_norm": 1, "acc_bytes": 1, "acc_token": 1}
    line = line_of(results[1])
    assert line["logprob"] is None
    assert line["logprob_reason"] == "neg_inf"


def test_r23_no_line_ever_holds_what_json_has_not() -> None:
    (result,) = score({"context": "q", "continuation": "x", "note": math.nan})
    assert isinstance(result, PairResult)
    with pytest.raises(ValueError, match="JSON"):
        result_line(result, DEPTH)


def test_r25_every_normalisation_of_every_choice() -> None:
    choices = ["\u00e9", "ab", "hello"]
    (result,) = score(question(*choices, gold=2), pmi=True)
    line = line_of(result)
    got = line["choices"]
    assert isinstance(got, list)
    totals = [math.fsum(map(float, expected("q", choice))) for choice in choices]
    alone = [math.fsum(map(float, expected("", choice))) for choice in choices]
    columns = {
        "logprob": totals,
        "logprob_per_character": [t / len(c) for t, c in zip(totals, choices, strict=True)],
        "logprob_per_byte": [t / len(c.encode()) for t, c in zip(totals, choices, strict=True)],
        "logprob_per_token": [t / len(ids_of(c)) for t, c in zip(totals, choices, strict=True)],
        "logprob_unconditional": alone,
        "pmi": [t - a for t, a in zip(totals, alone, strict=True)],
    }
    for name, values in columns.items():
        assert [choice[name] for choice in got] == values, name
    names = ["acc", "acc_norm", "acc_bytes", "acc_token", "acc_pmi"]
    used = [columns[c] for c in list(columns) if c != "logprob_unconditional"]
    assert line["pred"] == {n: int(np.argmax(v)) for n, v in zip(names, used, strict=True)}
    assert line["correct"] == {n: int(np.argmax(v)) == 2 for n, v in zip(names, used, strict=True)}


def test_r25_lengths_are_those_of_the_bare_choice() -> None:
    encoder = make_encoder()
    rows = [{"context": "q ", "choices": ["ab"]}]
    (result,) = score_rows(FakePool(), encoder, rows, depth=DEPTH)
    (choice,) = ranked(result).choices
    assert (choice.n_characters, choice.n_bytes, choice.encoded.n_continuation) == (2, 2, 3)


def test_r25_pmi_of_zero_probabilities_ranks_nothing() -> None:
    (result,) = score(question("x", "y"), pool=fixed({"x": -math.inf, "y": -1.0}), pmi=True)
    assert ranked(result).pred["acc_pmi"] is None
    assert ranked(result).pred["acc"] == 1


def test_r25_an_undefined_pmi_is_counted_and_not_taken_for_a_wrong_answer() -> None:
    rows = [question("x", "y", gold=1), question("a", "b", gold=0)]
    pool = fixed({"x": -math.inf, "y": -1.0, "a": -1.0, "b": -2.0})
    group = GroupTally()
    for result in score(*rows, pool=pool, pmi=True):
        group.add(line_of(result))
    report = group.report("choices")
    # A pool that gives a text the same value with and without context: every defined PMI ties at 0.
    assert (report["acc_pmi"], report["undefined"], report["with_gold"]) == (1.0, {"acc_pmi": 1}, 2)
    assert report["acc"] == 1.0
    group = GroupTally()
    group.add(line_of(score(rows[0], pool=pool, pmi=True)[0]))
    assert group.report("choices")["acc_pmi"] is None


def test_r23_a_sum_with_a_zero_probability_is_no_number() -> None:
    rows = [{"context": "q", "continuation": text} for text in ("x", "y")]
    group = GroupTally()
    for result in score(*rows, pool=fixed({"x": -math.inf, "y": -1.0})):
        group.add(line_of(result))
    report = group.report("continuation")
    assert (report["logprob"], report["zero_probability"], report["tokens"]) == (None, 1, 2)
    summary = {"file": "rows.jsonl", "task": "continuation", **report}
    assert "1 row of zero probability" in _group(summary)


def test_r26_equal_choices_tie_and_are_counted() -> None:
    (result,) = score(question("x", "x", gold=0))
    assert ranked(result).has_duplicates
    group = GroupTally()
    group.add(line_of(result))
    assert (group.ties, group.duplicate_choices) == (1, 1)


def test_r26_a_choice_without_a_token_fails_the_row_whatever_the_policy() -> None:
    encoder = make_encoder()
    rows = [{"context": "", "choices": ["x", "<eos>"]}]
    (result,) = score_rows(FakePool(), encoder, rows, depth=DEPTH)
    assert isinstance(result, RowFailure)
    assert result.error_class == "empty_continuation"


def test_r27_one_failed_choice_fails_the_question_alone() -> None:
    pool = FakePool(override=lambda ids, scores: "replica_lost" if ids[-1] == ids_of("y")[0] else scores)
    first, second = score(question("x", "y"), question("x", "z"), pool=pool)
    assert isinstance(first, RowFailure)
    assert (first.error_class, first.attempts) == ("replica_lost", 3)
    assert isinstance(second, ChoicesResult)


GOLDEN = {
    # tokens, context: [(input, predicted)] with P for the prefix token, window 4
    (0, 1): [],
    (1, 1): [("P", "0")],
    (4, 1): [("P 0 1 2", "0 1 2 3")],
    (5, 1): [("P 0 1 2", "0 1 2 3"), ("0 1 2 3", "4")],
    (8, 1): [("P 0 1 2", "0 1 2 3"), ("3 4 5 6", "4 5 6 7")],
    (10, 1): [("P 0 1 2", "0 1 2 3"), ("3 4 5 6", "4 5 6 7"), ("5 6 7 8", "8 9")],
    (10, 3): [("P 0 1 2", "0 1 2 3"), ("1 2 3 4", "4 5"), ("3 4 5 6", "6 7"), ("5 6 7 8", "8 9")],
}


@pytest.mark.parametrize(("tokens", "context"), GOLDEN)
def test_r29_windows_are_the_golden_ones(tokens: int, context: int) -> None:
    got = []
    for window in rolling_windows(tokens, 4, RollingPolicy(stride=4 - context + 1)):
        ids = ["P"] * window.with_prefix + [str(i) for i in range(window.begin, window.end)]
        got.append((" ".join(ids[:-1]), " ".join(ids[-window.n_scored :])))
    assert got == GOLDEN[tokens, context]


@given(
    tokens=st.integers(0, 200),
    max_rows=st.integers(2, 40),
    stride=st.none() | st.integers(1, 50),
    bos=st.booleans(),
)
def test_r31_every_token_is_scored_once_with_something_before_it(
    tokens: int, max_rows: int, stride: int | None, bos: bool
) -> None:
    scored: list[int] = []
    for window in rolling_windows(tokens, max_rows, RollingPolicy(stride, bos)):
        ids = [-1] * window.with_prefix + list(range(window.begin, window.end))
        assert window.begin >= 0
        assert window.n_scored < len(ids) <= max_rows + 1
        scored += ids[-window.n_scored :]
    assert scored == list(range(tokens))


def test_r31_each_further_window_scores_stride_tokens() -> None:
    windows = rolling_windows(100, 16, RollingPolicy(stride=5))
    assert [window.n_scored for window in windows[1:-1]] == [5] * (len(windows) - 2)


def document(text: str, **options: object) -> TextResult:
    (result,) = score({"text": text}, max_rows=8, **options)
    assert isinstance(result, TextResult)
    return result


def test_r29_a_document_is_the_sum_of_its_windows() -> None:
    text = "hello world, " * 9
    result = document(text, token_logprobs=True)
    ids = ids_of(text)
    expected_values: list[float] = []
    for window in rolling_windows(len(ids), 8, RollingPolicy()):
        own = [EOS_ID] * window.with_prefix + ids[window.begin : window.end]
        expected_values += map(float, fake_scores(np.array(own, dtype=np.int32), window.n_scored, DEPTH))
    assert result.n_tokens == len(ids) == len(result.token_logprobs)
    assert list(result.token_logprobs) == expected_values
    assert result.logprob == pytest.approx(math.fsum(expected_values), rel=1e-15)


def test_r32_aggregates_are_ratios_of_sums() -> None:
    group = GroupTally()
    results = [document("hello world"), document(" \u00e9 b "), document("")]
    for result in results:
        group.add(line_of(result))
    report = group.report("text")
    total = sum(result.logprob for result in results)
    n_bytes = 11 + len(" \u00e9 b ".encode())
    assert report["bits_per_byte"] == pytest.approx(-total / n_bytes / math.log(2))
    assert report["byte_perplexity"] == pytest.approx(math.exp(-total / n_bytes))
    assert report["word_perplexity"] == pytest.approx(math.exp(-total / (2 + 4)))
    assert report["token_perplexity"] == pytest.approx(math.exp(-total / sum(r.n_tokens for r in results)))
    means = [-r.logprob / r.n_bytes / math.log(2) for r in results[:2]]
    assert report["bits_per_byte_mean_over_documents"] == pytest.approx(sum(means) / 2)


@pytest.mark.parametrize(("text", "words"), [("", 1), (" a b ", 4), ("a", 1), ("a\n\tb", 2)])
def test_r32_words_are_counted_between_whitespace_runs(text: str, words: int) -> None:
    assert document(text).n_words == words


def test_r33_an_empty_document_has_no_tokens_and_no_part_in_the_means() -> None:
    result = document("")
    assert (result.n_tokens, result.logprob, result.n_windows) == (0, 0.0, 0)
    group = GroupTally()
    group.add(line_of(result))
    assert (group.empty_documents, group.words, group.report("text")["bits_per_byte"]) == (1, 0, None)


def test_r34_the_prefix_token_in_every_window_is_an_option_that_changes_the_number() -> None:
    text = "hello world, " * 9
    plain, every = document(text), document(text, rolling=RollingPolicy(bos_every_window=True))
    assert every.n_tokens == plain.n_tokens
    assert every.logprob != plain.logprob


def test_a_document_that_spells_out_the_prefix_token_does_not_have_it_twice() -> None:
    assert document("<eos>hello").logprob == document("hello").logprob


def test_r38_equal_items_are_scored_once_and_reach_every_row() -> None:
    pool = FakePool()
    rows = [{"context": "q", "continuation": "xy"}] * 5 + [question("xy", "z")]
    results = score(*rows, pool=pool)
    assert pool.num_scored == 2
    values = {line_of(result)["logprob"] for result in results[:5]}
    assert values == {ranked(results[5]).choices[0].score.logprob}


def test_r42_ids_out_of_range_fail_their_row_alone() -> None:
    bad, good = score(
        {"context_ids": [5], "continuation_ids": [99_999]}, {"context_ids": [5], "continuation_ids": [6]}
    )
    assert isinstance(bad, RowFailure)
    assert bad.error_class == "token_out_of_range"
    assert isinstance(good, PairResult)


def test_r43_order_and_mates_of_rows_change_no_score() -> None:
    rows: list[dict[str, object]] = [{"context": "hello" * i, "continuation": " world"} for i in range(6)]
    rows += [question("a", "bb"), {"text": "hello world"}]
    together = [line_of(result) for result in score(*rows, pool=FakePool(seed=1))]
    backwards = [line_of(result) for result in score(*reversed(rows), pool=FakePool(seed=2))][::-1]
    alone = [line_of(score(row)[0]) for row in rows]
    for lines in (together, backwards, alone):
        for line in lines:
            del line["id"], line["line"]
    assert together == backwards == alone
