"""Rules of scores, flags and batches through rows and the real engine, against the reference in float64."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tinyloop.cluster.encoding import Encoder, EncodingPolicy
from tinyloop.cluster.items import Items, Scored
from tinyloop.cluster.records import result_line
from tinyloop.cluster.rolling import RollingPolicy
from tinyloop.cluster.rows import RowFailure
from tinyloop.cluster.scoring import score_rows
from tinyloop.cluster.tasks import ChoicesResult, PairResult, TaskOptions, TextResult
from tinyloop.native import GenerateRequest, Model, load_model
from tinyloop.native.format import read_header
from tinyloop.native.models import default_model_path
from tinyloop.native.reference import Reference
from tinyloop.native.tokenizer import load_tokenizer

from .model_pool import ModelPool

WINDOW = 48
DEPTH = 2
# Of one token in the FP32 mode, where only the rounding of FP32 differs from the reference in float64.
FP32_TOKEN = 1e-4
OPTIONS = TaskOptions(token_logprobs=True)


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with load_model(default_model_path(), max_seq_len=WINDOW + 1, threads=2, numeric_mode="fp32") as loaded:
        yield loaded


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    header = read_header(default_model_path())
    return Encoder(load_tokenizer(header), EncodingPolicy.of_model(header.descriptor, WINDOW))


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference.load(default_model_path())


class PrefixPool(ModelPool):
    """Every item on a prefix of its own, as long as a prefix of it may be."""

    def collect(self, timeout_s: float) -> list[Any]:
        window, items = self.waiting.pop(0)
        own: list[NDArray[np.int32]] = []
        prefixes = []
        for i in range(len(items)):
            ids = items.token_ids[items.offsets[i] : items.offsets[i + 1]]
            # The row of the last context id predicts the first scored one: it is never part of a prefix.
            shared = len(ids) - int(items.n_scored[i]) - 1
            prefixes.append(self.model.prefix(ids[:shared], depth=items.depth) if shared else None)
            own.append(ids[shared:])
        offsets = np.cumsum([0, *map(len, own)], dtype=np.int64)
        result = self.model.score(
            np.concatenate(own), offsets, items.n_scored, prefixes=prefixes, depth=items.depth
        )
        indices = np.arange(len(items), dtype=np.int32)
        return [Scored(window, indices, result.logprobs, result.greedy, result.offsets)]


def scored(model: Model, encoder: Encoder, *rows: dict[str, Any], pool: ModelPool | None = None) -> list[Any]:
    results = score_rows(pool or ModelPool(model), encoder, rows, depth=DEPTH, options=OPTIONS)
    assert not [result for result in results if isinstance(result, RowFailure)]
    return results


def log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    top = logits.max(axis=-1, keepdims=True)
    return np.asarray(logits - top - np.log(np.exp(logits - top).sum(axis=-1, keepdims=True)))


def test_r1_r21_a_continuation_has_the_log_softmax_of_the_last_rows_but_one(
    model: Model, encoder: Encoder, reference: Reference
) -> None:
    context, continuation = "The capital of France is", " Paris, and that of Italy is Rome."
    (result,) = scored(model, encoder, {"context": context, "continuation": continuation})
    assert isinstance(result, PairResult)
    whole = list(encoder.tokenizer.encode(context + continuation).ids)
    n = len(whole) - len(encoder.tokenizer.encode(context).ids)
    # Everything but the last id is fed; rows [fed - n, fed) predict the n scored ids.
    rows = log_softmax(reference.logits(np.array(whole[:-1], dtype=np.int32), DEPTH))[-n:]
    expected = [float(row[i]) for row, i in zip(rows, whole[-n:], strict=True)]
    assert result.score.token_logprobs == pytest.approx(expected, abs=FP32_TOKEN)
    assert result.score.logprob == math.fsum(result.score.token_logprobs)
    assert result.score.is_greedy is bool((rows.argmax(-1) == whole[-n:]).all())


def test_r20_the_flag_is_true_of_what_greedy_decoding_gives_and_of_nothing_else(
    model: Model, encoder: Encoder
) -> None:
    prompts = [encoder.tokenizer.encode(text).ids for text in ("The cat", "Once upon a time", "In the year")]
    completions = model.generate(
        [
            GenerateRequest(np.array(ids, dtype=np.int32), 8, depth=DEPTH, temperature=0.0, stop_ids=[])
            for ids in prompts
        ]
    )
    rows: list[dict[str, Any]] = []
    for ids, completion in zip(prompts, completions, strict=True):
        own = completion.token_ids.tolist()
        assert len(own) == 8
        rows.append({"context_ids": ids, "continuation_ids": own})
        for place in range(8):
            other = [*own[:place], (own[place] + 1) % 1000, *own[place + 1 :]]
            rows.append({"context_ids": ids, "continuation_ids": other})
    flags = [result.score.is_greedy for result in scored(model, encoder, *rows)]
    assert flags == [True, *[False] * 8] * 3


def test_r30_a_document_of_a_whole_window_is_one_pair_after_the_prefix_token(
    model: Model, encoder: Encoder
) -> None:
    text = "The cat sat on the mat, and then it slept. " * 8
    ids = encoder.tokenizer.encode(text).ids
    for n, windows in ((WINDOW - 1, 1), (WINDOW, 1), (WINDOW + 1, 2)):
        part = encoder.tokenizer.decode(ids[:n])
        assert list(encoder.tokenizer.encode(part).ids) == list(ids[:n])
        (document,) = scored(model, encoder, {"text": part})
        assert isinstance(document, TextResult)
        assert (document.n_tokens, document.n_windows) == (n, windows)
        if windows == 1:
            (pair,) = scored(model, encoder, {"context": "", "continuation": part})
            assert pair.score.token_logprobs == document.token_logprobs


def test_the_same_ids_with_another_split_have_the_same_tokens(model: Model, encoder: Encoder) -> None:
    ids = list(encoder.tokenizer.encode("The capital of France is Paris, and it is large.").ids)
    splits = range(1, len(ids))
    rows = [{"context_ids": ids[:k], "continuation_ids": ids[k:]} for k in splits]
    for pool in (ModelPool(model), PrefixPool(model)):
        results = scored(model, encoder, *rows, pool=pool)
        longest = results[0].score.token_logprobs
        for k, result in zip(splits, results, strict=True):
            assert result.score.token_logprobs == longest[k - 1 :]


def mixed_rows() -> list[dict[str, Any]]:
    context = "The old house stood at the end of the road, and nobody had lived in it for years"
    rows: list[dict[str, Any]] = [
        {"context": context[:n], "continuation": end} for n in (3, 20, 80) for end in (" a", " and so on")
    ]
    rows += [{"context": context, "choices": [" because", " until then", "."], "gold": 1}]
    rows += [{"text": context * n} for n in (1, 4)]
    rows += [{"context": "", "continuation": "It"}, {"context_ids": [5, 6], "continuation_ids": [7]}]
    return rows


def test_r43_cached_uncached_alone_and_permuted_are_the_same_bits(model: Model, encoder: Encoder) -> None:
    rows = mixed_rows()
    order = random.Random(4).sample(range(len(rows)), len(rows))

    def lines(results: Sequence[Any]) -> list[bytes]:
        # A result's line but for its id and number, which differ by design.
        return [result_line(r, DEPTH, token_logprobs=True).split(b'"task"')[1] for r in results]

    plain = lines(scored(model, encoder, *rows))
    permuted = lines(scored(model, encoder, *(rows[i] for i in order)))
    assert [plain[i] for i in order] == permuted
    assert plain == [lines(scored(model, encoder, row))[0] for row in rows]
    assert plain == lines(scored(model, encoder, *rows, pool=PrefixPool(model)))


def test_choices_of_one_token_each_are_scored_by_one_number_each(model: Model, encoder: Encoder) -> None:
    """A prompt counted with BOS against logits without it gave every choice a sum of nothing, which is 0."""
    choices = [" A", " B", " C", " D"]
    (result,) = scored(model, encoder, {"context": "Answer:", "choices": choices})
    assert isinstance(result, ChoicesResult)
    for choice in result.choices:
        assert len(choice.score.token_logprobs) == choice.encoded.n_continuation > 0
        assert choice.score.logprob < 0
    assert len({choice.score.logprob for choice in result.choices}) == len(choices)


def test_a_document_with_bos_in_every_window_is_that_of_windows_that_begin_with_it(
    model: Model, encoder: Encoder, reference: Reference
) -> None:
    text = "The cat sat on the mat, and then it slept. " * 8
    options = TaskOptions(token_logprobs=True, rolling=RollingPolicy(bos_every_window=True))
    (document,) = score_rows(ModelPool(model), encoder, [{"text": text}], depth=DEPTH, options=options)
    assert isinstance(document, TextResult)
    ids, prefix = list(encoder.tokenizer.encode(text).ids), encoder.policy.prefix_id
    expected: list[float] = []
    while len(expected) < len(ids):
        done = len(expected)
        end = min(len(ids), done + (WINDOW - 1 if done else WINDOW))
        fed = [prefix, *ids[max(0, end - WINDOW) : end]]
        rows = log_softmax(reference.logits(np.array(fed[:-1], dtype=np.int32), DEPTH))
        picked = [float(row[i]) for row, i in zip(rows, fed[1:], strict=True)]
        expected += picked[len(picked) - (end - done) :]
    assert document.token_logprobs == pytest.approx(expected, abs=FP32_TOKEN)


def test_items_reach_the_engine_as_they_were_split(encoder: Encoder) -> None:
    """What is scored is what was encoded: ids and counts, not texts, go to a replica."""

    class Echo:
        items: Items | None = None

        def submit(self, window: int, items: Items) -> None:
            self.window, self.items = window, items

        def collect(self, timeout_s: float) -> list[Any]:
            assert self.items is not None
            total = int(self.items.n_scored.sum())
            offsets = np.concatenate([[0], np.cumsum(self.items.n_scored)]).astype(np.int64)
            # The position of each scored id in place of its log-probability.
            ends = np.diff(self.items.offsets)
            places = [np.arange(end - n, end) for end, n in zip(ends, self.items.n_scored, strict=True)]
            return [
                Scored(
                    self.window,
                    np.arange(len(self.items), dtype=np.int32),
                    -np.concatenate(places).astype(np.float32),
                    np.zeros(total, dtype=np.bool_),
                    offsets,
                )
            ]

    long = "The cat sat on the mat, and then it slept. " * 8
    (result,) = score_rows(
        Echo(), encoder, [{"context": long, "continuation": " It woke."}], depth=DEPTH, options=OPTIONS
    )
    assert isinstance(result, PairResult)
    assert result.encoded.n_truncated > 0
    first = result.encoded.n_context
    assert [-value for value in result.score.token_logprobs] == list(range(first, WINDOW + 1))
