"""Rows through a real model against the plainest path of the engine: one text at a time, each token."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
from tinyloop.cluster.encoding import Encoder, EncodingPolicy
from tinyloop.cluster.scoring import score_rows
from tinyloop.cluster.tasks import ChoicesResult, PairResult, TaskOptions, TextResult
from tinyloop.native import Model, load_model
from tinyloop.native.format import read_header
from tinyloop.native.models import default_model_path
from tinyloop.native.tokenizer import load_tokenizer

from .model_pool import ModelPool

WINDOW = 64
DEPTH = 2
# A packed pass and a pass of one text have the same bits by design; the sum is rounded once.
TOLERANCE = 1e-12


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with load_model(default_model_path(), max_seq_len=WINDOW, threads=2) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    header = read_header(default_model_path())
    return Encoder(load_tokenizer(header), EncodingPolicy.of_model(header.descriptor, WINDOW))


def plain_sum(model: Model, ids: list[int], n_scored: int) -> float:
    values = model.score_tokens(np.array(ids, dtype=np.int32), depth=DEPTH)
    return math.fsum(values[len(values) - n_scored :].tolist())


def test_rows_of_every_kind_score_as_their_texts_do(model: Model, encoder: Encoder) -> None:
    text = "The cat sat on the mat, and then it slept. " * 12
    rows = [
        {"context": "The capital of France is", "continuation": " Paris."},
        {"context": "", "choices": ["The cat sleeps.", "The cat sleep."], "gold": 0},
        {"text": text},
    ]
    results = score_rows(ModelPool(model), encoder, rows, depth=DEPTH, options=TaskOptions())
    tokenizer = encoder.tokenizer
    pair, choices, document = results

    assert isinstance(pair, PairResult)
    whole = tokenizer.encode("The capital of France is Paris.").ids
    n = len(whole) - len(tokenizer.encode("The capital of France is").ids)
    assert pair.score.logprob == pytest.approx(plain_sum(model, whole, n), rel=TOLERANCE)

    assert isinstance(choices, ChoicesResult)
    for choice, given in zip(choices.choices, ["The cat sleeps.", "The cat sleep."], strict=True):
        ids = tokenizer.encode(given).ids
        expected = plain_sum(model, [encoder.policy.prefix_id, *ids], len(ids))
        assert choice.score.logprob == pytest.approx(expected, rel=TOLERANCE)
    assert choices.pred["acc"] == 0

    assert isinstance(document, TextResult)
    ids = tokenizer.encode(text).ids
    assert document.n_tokens == len(ids) > 2 * WINDOW
    # The first window from the prefix token, then windows of full context, each token once.
    total = plain_sum(model, [encoder.policy.prefix_id, *ids[:WINDOW]], WINDOW)
    for end in range(2 * WINDOW, len(ids) + WINDOW, WINDOW):
        end, begin = min(end, len(ids)), end - WINDOW
        total += plain_sum(model, ids[end - WINDOW - 1 : end], end - begin)
    assert document.logprob == pytest.approx(total, rel=TOLERANCE)
