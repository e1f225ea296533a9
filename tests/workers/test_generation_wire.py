"""Requests and generated ids on the wire: every bit comes back; what cannot be meant is refused by name."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import msgpack
import numpy as np
import pytest
from generation_cases import mixed_items, prompts_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tinyloop.workers.prompts import DTYPES, Prompts, decode_prompts, encode_prompts
from tinyloop.workers.tokens import End, TokenBundle, decode_tokens, encode_tokens
from tinyloop.workers.wire import OLDEST, VERSION, ItemFailure, WireError

REALS = st.floats(allow_nan=False, allow_infinity=False)
ITEMS = st.lists(
    st.tuples(
        st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5),
        st.fixed_dictionaries(
            {
                "max_new_tokens": st.integers(1, 2**31 - 1),
                "depth": st.integers(8, 4096),
                "min_depth": st.integers(1, 8),
                "exit_threshold": st.floats(min_value=0, exclude_min=True, allow_nan=False),
                "temperature": st.floats(0, 1e300),
                "top_k": st.integers(0, 2**63 - 1),
                "top_p": st.floats(0, 1, exclude_min=True),
                "min_p": st.floats(0, 1),
                "repetition_penalty": st.floats(0, 1e300, exclude_min=True),
                "seed": st.integers(0, 2**64 - 1),
                "stop_ids": st.lists(st.integers(-(2**31), 2**31 - 1), max_size=4),
            }
        ),
    ),
    max_size=6,
)
FLOATS = st.floats(width=32)


@st.composite
def bundles(draw: st.DrawFn) -> TokenBundle:
    ends = draw(st.lists(st.sampled_from(End), max_size=5))
    lengths = [draw(st.integers(0, 3)) for _ in ends]
    total, some = sum(lengths), st.integers(0, 2**31 - 1)
    items = [draw(some) for _ in ends]
    failed = [item for item, end in zip(items, ends, strict=True) if end is End.FAILED]
    return TokenBundle(
        number=draw(st.integers(0, 2**63 - 1)),
        windows=np.array([draw(st.integers(0, 2**63 - 1)) for _ in ends], np.int64),
        items=np.array(items, np.int32),
        first=np.array([draw(some) for _ in ends], np.int32),
        ends=np.array(ends, np.uint8),
        offsets=np.cumsum([0, *lengths], dtype=np.int64),
        token_ids=np.array([draw(some) for _ in range(total)], np.int32),
        logprobs=np.array([draw(FLOATS) for _ in range(total)], np.float32),
        depths=np.array([draw(some) for _ in range(total)], np.int32),
        failures=tuple(ItemFailure(item, draw(st.text()), draw(st.text())) for item in failed),
    )


def assert_same(one: Any, other: Any) -> None:
    for entry in fields(one):
        a, b = getattr(one, entry.name), getattr(other, entry.name)
        if isinstance(a, np.ndarray):
            assert (a.dtype, a.tobytes()) == (b.dtype, b.tobytes())
        else:
            assert a == b


@settings(max_examples=150, deadline=None)
@given(items=ITEMS, client=st.text(), window=st.integers(0, 2**63 - 1))
def test_requests_survive_the_wire(items: Any, client: str, window: int) -> None:
    prompts = prompts_of(items, client, window)
    again = decode_prompts(encode_prompts(prompts))
    assert_same(again, prompts)
    for item, (ids, asked) in enumerate(items):
        assert (again.ids(item).tolist(), again.stops(item)) == (ids, asked["stop_ids"])
        assert int(again.seed[item]) == asked["seed"]


@settings(max_examples=150, deadline=None)
@given(bundle=bundles())
def test_generated_ids_survive_the_wire(bundle: TokenBundle) -> None:
    assert_same(decode_tokens(encode_tokens(bundle)), bundle)


PROMPTS = prompts_of(mixed_items(4, 1000, 3))
BUNDLE = TokenBundle(
    3,
    np.array([0, 0], np.int64),
    np.array([4, 5], np.int32),
    np.array([0, 7], np.int32),
    np.array([End.OPEN, End.FAILED], np.uint8),
    np.array([0, 2, 3], np.int64),
    np.array([1, 2, 3], np.int32),
    np.array([-1, -np.inf, np.nan], np.float32),
    np.array([2, 2, 1], np.int32),
    (ItemFailure(5, "non_finite", "no number"),),
)


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("max_new_tokens", 0, "max_new_tokens of prompt 2 is 0: it must be at least 1"),
        ("depth", 4097, "depth of prompt 2 is 4097: it must be 1 to 4096"),
        ("min_depth", 0, "min_depth of prompt 2 is 0"),
        ("min_depth", 9, "min_depth of prompt 2 is 9: it must be 1 to its depth, 3"),
        ("exit_threshold", 0.0, "exit_threshold of prompt 2 is 0.0: it must be above 0"),
        ("exit_threshold", np.nan, "exit_threshold of prompt 2 is nan"),
        ("temperature", -0.5, "temperature of prompt 2 is -0.5"),
        ("temperature", np.inf, "temperature of prompt 2 is inf"),
        ("top_k", -1, "top_k of prompt 2 is -1"),
        ("top_p", 0.0, "top_p of prompt 2 is 0.0"),
        ("top_p", np.nan, "top_p of prompt 2 is nan"),
        ("min_p", 1.5, "min_p of prompt 2 is 1.5"),
        ("repetition_penalty", 0.0, "repetition_penalty of prompt 2 is 0.0"),
    ],
)
def test_a_setting_that_no_model_could_take_is_refused_by_name(name: str, value: float, named: str) -> None:
    column = getattr(PROMPTS, name).copy()
    column[2] = value
    with pytest.raises(WireError, match=named):
        decode_prompts(encode_prompts(replace(PROMPTS, **{name: column})))


@pytest.mark.parametrize("name", DTYPES)
def test_a_column_of_requests_of_another_length_or_type_is_refused(name: str) -> None:
    column = getattr(PROMPTS, name)
    with pytest.raises(WireError, match=f"{name}|token_ids|stop_ids|prompts"):
        decode_prompts(encode_prompts(replace(PROMPTS, **{name: np.append(column, column[:1])})))
    with pytest.raises(WireError, match="expected an array of"):
        decode_prompts(encode_prompts(replace(PROMPTS, **{name: np.zeros(len(column), np.uint16)})))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"ends": np.array([0, 9], np.uint8)}, "end 9 of a completion is none of"),
        ({"ends": np.array([0, 1], np.uint8)}, "0 completions failed and 1 failures are told"),
        ({"first": np.array([0, -1], np.int32)}, "negative"),
        ({"offsets": np.array([0, 3, 2], np.int64)}, "offsets do not cover 3 ids"),
        ({"offsets": np.array([0, 2, 4], np.int64)}, "offsets do not cover 3 ids"),
        ({"depths": np.array([2, 2], np.int32)}, "3 ids have columns of other lengths"),
        ({"windows": np.array([0], np.int64)}, "2 completions have columns of other lengths"),
    ],
)
def test_a_bundle_that_does_not_fit_together_is_refused(changed: dict[str, Any], named: str) -> None:
    with pytest.raises(WireError, match=named):
        decode_tokens(encode_tokens(replace(BUNDLE, **changed)))


@settings(max_examples=200, deadline=None)
@given(position=st.integers(0, 10_000), value=st.integers(0, 255))
def test_a_damaged_byte_is_refused_or_changes_one_value(position: int, value: int) -> None:
    for message, decode in (
        (encode_prompts(PROMPTS), decode_prompts),
        (encode_tokens(BUNDLE), decode_tokens),
    ):
        damaged = bytearray(message)
        damaged[position % len(damaged)] = value
        try:
            decode(bytes(damaged))
        except WireError:
            continue


def test_requests_of_another_version_are_refused() -> None:
    body = msgpack.packb(["prompts", []])
    with pytest.raises(WireError, match=f"version {OLDEST - 1}, this process {VERSION}"):
        decode_prompts(bytes([OLDEST - 1]) + body)
    assert isinstance(PROMPTS, Prompts)
