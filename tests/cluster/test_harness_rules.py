"""The rules of text and windows against lm-evaluation-harness itself and its backend's own arithmetic.

Its functions are called where they can be (R1-R3, R10, R29); what lies inside a method of its Hugging Face
backend is written out here (R14).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from lm_eval.api.instance import Instance
from lm_eval.api.metrics import bits_per_byte, weighted_perplexity
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows
from tinyloop.cluster.encoding import Encoder
from tinyloop.cluster.errors import RowError
from tinyloop.cluster.rolling import RollingPolicy, rolling_windows
from tinyloop.cluster.scoring import score_rows
from tinyloop.cluster.summary import GroupTally
from tinyloop.cluster.tasks import TaskOptions

from .fake_pool import FakePool
from .test_encoding import BOS_ID, EOS_ID, make_encoder
from .test_tasks import DEPTH, line_of
from .tiny_tokenizer import BOS, tiny_tokenizer

Pair = tuple[list[int], list[int]]
TEXTS = st.text(alphabet=list("Answerhold \n\u00e9\u00a0"), max_size=14)


class Harness(TemplateLM):
    """The harness's own path from texts to ids; what it would score is kept."""

    def __init__(self, *, bos: bool) -> None:
        super().__init__()
        self._tokenizer = tiny_tokenizer(template=f"{BOS} $A" if bos else None)
        self._bos = bos
        self.pairs: list[Pair] = []

    @property
    def eot_token_id(self) -> int:
        return EOS_ID

    @property
    def prefix_token_id(self) -> int:
        return BOS_ID if self._bos else EOS_ID

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(BOS)
        return list(self._tokenizer.encode(string, add_special_tokens=add_special_tokens).ids)

    def _loglikelihood_tokens(self, requests: list[Any], **kwargs: Any) -> list[tuple[float, bool]]:
        self.pairs += [(context, continuation) for _, context, continuation in requests]
        return [(0.0, False)] * len(requests)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        raise NotImplementedError

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        raise NotImplementedError

    def pair(self, context: str, continuation: str) -> Pair:
        self.loglikelihood(
            [Instance("loglikelihood", {}, (context, continuation), 0)],
            disable_tqdm=True,
        )
        return self.pairs.pop()


HARNESS = {bos: Harness(bos=bos) for bos in (False, True)}
ENCODERS = {bos: make_encoder(bos=bos) for bos in (False, True)}


def ours(encoder: Encoder, context: str, continuation: str) -> Pair:
    encoded = encoder.encode_pair(context, continuation)
    return encoded.ids[: encoded.n_context].tolist(), encoded.ids[encoded.n_context :].tolist()


@settings(max_examples=300, deadline=None)
@given(context=TEXTS, continuation=TEXTS.filter(bool), bos=st.booleans())
def test_r1_r2_r3_r10_pairs_are_the_harnesss_wherever_the_join_is_clean(
    context: str, continuation: str, bos: bool
) -> None:
    # It fails on a context of whitespace alone, which is empty after its move (R11).
    assume(context == "" or context.strip() != "")
    encoded = ENCODERS[bos].encode_pair(context, continuation)
    theirs = HARNESS[bos].pair(context, continuation)
    if encoded.boundary == "clean":
        assert ours(ENCODERS[bos], context, continuation) == theirs
    else:
        # R4: the ids that it would feed are not those of the whole text, or it has nothing to score.
        whole = HARNESS[bos].tok_encode(context + continuation)
        assert theirs[0] + theirs[1] != whole or not theirs[1]


@pytest.mark.parametrize("text", [f"{BOS}hello", f"{BOS}hello wor"])
def test_r9_a_text_that_brings_its_bos_is_encoded_as_the_harness_does(text: str) -> None:
    assert ours(ENCODERS[True], text, " x") == HARNESS[True].pair(text, " x")
    assert HARNESS[True].pair(text, " x")[0].count(BOS_ID) == 1


def test_r4_the_harness_has_nothing_to_score_where_one_token_spans_the_join() -> None:
    context_ids, continuation_ids = HARNESS[False].pair("Ans", "wer")
    assert (len(context_ids), continuation_ids) == (1, [])
    assert ours(ENCODERS[False], "Ans", "wer")[1] == HARNESS[False].tok_encode("wer")


def fed_and_scored(context: list[int], continuation: list[int], window: int) -> Pair:
    """What its Hugging Face backend gives the model, and the ids whose rows of logits it takes."""
    fed = (context + continuation)[-(window + 1) :][:-1]
    rows = range(len(fed))[len(fed) - len(continuation) :]
    return fed, [(context + continuation)[-(window + 1) :][row + 1] for row in rows]


@settings(max_examples=200, deadline=None)
@given(
    context=st.lists(st.integers(2, 50), min_size=1, max_size=20),
    continuation=st.lists(st.integers(2, 50), min_size=1, max_size=20),
    window=st.integers(2, 24),
)
def test_r14_r16_r17_truncation_is_that_of_its_hugging_face_backend(
    context: list[int], continuation: list[int], window: int
) -> None:
    encoder = make_encoder(window)
    if len(continuation) > window:
        with pytest.raises(RowError, match="score it as a text row"):
            encoder.join_ids(context, continuation)
        return
    encoded = encoder.join_ids(context, continuation)
    ids = encoded.ids.tolist()
    assert (ids[:-1], ids[encoded.n_context :]) == fed_and_scored(context, continuation, window)
    assert encoded.n_context + encoded.n_truncated == len(context)


@settings(max_examples=300, deadline=None)
@given(tokens=st.integers(0, 120), window=st.integers(2, 24), context=st.integers(1, 24))
def test_r29_windows_are_those_of_its_own_function(tokens: int, window: int, context: int) -> None:
    assume(context <= window)
    ids = list(range(100, 100 + tokens))
    theirs = list(get_rolling_token_windows(ids, EOS_ID, window, context))
    got = []
    for part in rolling_windows(tokens, window, RollingPolicy(stride=window - context + 1)):
        fed = [EOS_ID] * part.with_prefix + ids[part.begin : part.end]
        got.append((fed[:-1], fed[len(fed) - part.n_scored :]))
    assert got == theirs


def documents() -> Iterator[str]:
    yield from ("hello world", " \u00e9 b ", "a\n\tb  c", "hello " * 20)


def test_r32_perplexities_are_those_of_its_metrics() -> None:
    group, items = GroupTally(), []
    rows = [{"text": text} for text in documents()]
    for text, result in zip(
        documents(), score_rows(FakePool(), make_encoder(8), rows, depth=DEPTH), strict=True
    ):
        line: Any = line_of(result)
        group.add(line)
        items.append((line["logprob"], len(re.split(r"\s+", text)), len(text.encode("utf-8"))))
    report = group.report("text")
    assert report["word_perplexity"] == pytest.approx(weighted_perplexity([(p, w) for p, w, _ in items]))
    assert report["byte_perplexity"] == pytest.approx(weighted_perplexity([(p, b) for p, _, b in items]))
    assert report["bits_per_byte"] == pytest.approx(bits_per_byte([(p, b) for p, _, b in items]))


@pytest.mark.parametrize("gold", [0, 1, 2])
def test_r25_accuracies_are_those_of_its_arithmetic(gold: int) -> None:
    choices = ["\u00e9\u00e9", "abcd", "hello world hello"]
    row = {"context": "q ", "choices": choices, "gold": gold}
    (result,) = score_rows(FakePool(), make_encoder(), [row], depth=DEPTH, options=TaskOptions(pmi=True))
    line: Any = line_of(result)
    sums = np.array([choice["logprob"] for choice in line["choices"]])
    alone = np.array([choice["logprob_unconditional"] for choice in line["choices"]])
    characters = np.array([float(len(choice)) for choice in choices])
    n_bytes = np.array([float(len(choice.encode("utf-8"))) for choice in choices])
    expected = {
        "acc": np.argmax(sums) == gold,
        "acc_norm": np.argmax(sums / characters) == gold,
        "acc_bytes": np.argmax(sums / n_bytes) == gold,
        "acc_pmi": np.argmax(sums - alone) == gold,
    }
    assert {name: line["correct"][name] for name in expected} == expected
    assert not any(math.isnan(value) for value in sums)
