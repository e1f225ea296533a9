"""Rules R1-R17 of text to ids, on a small real BPE; expectations are written out or its own."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tinyloop.cluster.encoding import Encoder, EncodingPolicy
from tinyloop.cluster.errors import RowError, UsageError
from tokenizers import Tokenizer, normalizers

from .tiny_tokenizer import BOS, EOS, tiny_descriptor, tiny_tokenizer

BOS_ID, EOS_ID = 0, 1
LONG = 10_000


def make_encoder(
    max_rows: int = LONG,
    *,
    template: str | None = None,
    bos: bool = False,
    **options: object,
) -> Encoder:
    """An encoder whose model has EOS, and BOS too if bos."""
    tokenizer = tiny_tokenizer(template=template)
    changes: dict[str, object] = {"bos_id": BOS_ID, "add_bos": True} if bos else {}
    return Encoder(
        tokenizer,
        EncodingPolicy.of_model(tiny_descriptor(tokenizer, **changes), max_rows, **options),  # type: ignore[arg-type]
    )


def ids_of(text: str) -> list[int]:
    return list(tiny_tokenizer().encode(text, add_special_tokens=False).ids)


def parts(encoder: Encoder, context: str, continuation: str) -> tuple[list[int], list[int]]:
    encoded = encoder.encode_pair(context, continuation)
    return encoded.ids[: encoded.n_context].tolist(), encoded.ids[encoded.n_context :].tolist()


def error_class(encoder: Encoder, context: str, continuation: str) -> str:
    with pytest.raises(RowError) as caught:
        encoder.encode_pair(context, continuation)
    return caught.value.error_class


def test_r1_scored_ids_are_the_last_ones_and_all_but_the_last_are_fed() -> None:
    encoded = make_encoder().encode_pair("hello", " world")
    assert encoded.ids.tolist() == ids_of("hello world")
    assert encoded.n_context + encoded.n_continuation == len(encoded.ids)
    assert encoded.ids.dtype == "int32"


@pytest.mark.parametrize("space", [" ", "\n", "\t \n", "\u00a0", "\u2003"])
def test_r2_trailing_whitespace_of_the_context_moves_right_and_is_scored(space: str) -> None:
    encoder = make_encoder()
    assert parts(encoder, "hello" + space, "world") == parts(encoder, "hello", space + "world")
    assert parts(encoder, "hello" + space, "world")[0] == ids_of("hello")


def test_r3_continuation_is_encoded_jointly_not_alone() -> None:
    tokenizer = tiny_tokenizer()
    # A pre-tokenizer that puts a space before every text, as SentencePiece does: alone, "w" would become "
    # w".
    tokenizer.pre_tokenizer = type(tokenizer.pre_tokenizer)(add_prefix_space=True, use_regex=False)
    encoder = Encoder(tokenizer, EncodingPolicy.of_model(tiny_descriptor(tokenizer), LONG))
    alone = list(tokenizer.encode("wx").ids)
    context, continuation = parts(encoder, "hello", "wx")
    assert context + continuation == list(tokenizer.encode("hellowx").ids)
    assert continuation != alone


@pytest.mark.parametrize(
    ("context", "continuation"), [("Ans", "wer"), ("Ans", "werld"), ("hello wor", "ld"), ("h", "ello")]
)
def test_r4_a_token_across_the_join_is_flagged_and_the_continuation_encoded_alone(
    context: str, continuation: str
) -> None:
    encoded = make_encoder().encode_pair(context, continuation)
    assert ids_of(context + continuation)[: len(ids_of(context))] != ids_of(context)
    assert encoded.boundary == "merged"
    assert encoded.ids.tolist() == ids_of(context) + ids_of(continuation)


def test_r4_a_clean_join_is_not_flagged() -> None:
    assert make_encoder().encode_pair("Ans", " wer").boundary == "clean"


def test_r5_the_delimiter_stands_before_the_continuation_and_none_is_added_by_default() -> None:
    assert parts(make_encoder(), "hello", "world")[1] == ids_of("world")
    delimited = make_encoder(target_delimiter=" ")
    assert parts(delimited, "hello", "world") == parts(make_encoder(), "hello", " world")
    assert parts(delimited, "hello\n", "world") == parts(make_encoder(), "hello", "\n world")


@pytest.mark.parametrize("context", ["caf\u00e9", "\U0001f600", "a\u2028b"])
def test_r7_characters_of_several_tokens_are_split_by_ids_not_by_text(context: str) -> None:
    context_ids, continuation_ids = parts(make_encoder(), context, "\u00e9x")
    assert context_ids == ids_of(context)
    assert tiny_tokenizer().decode(context_ids + continuation_ids) == context + "\u00e9x"


def test_r8_unicode_forms_stay_apart() -> None:
    encoder = make_encoder()
    composed, decomposed = "\u00e9", "e\u0301"
    assert parts(encoder, "x", composed)[1] != parts(encoder, "x", decomposed)[1]
    assert parts(encoder, "  x", " y")[0] == ids_of("  x")


@pytest.mark.parametrize("template", [None, f"{BOS} $A"])
def test_r9_one_bos_whatever_template_or_text_say(template: str | None) -> None:
    encoder = make_encoder(template=template, bos=True)
    assert parts(encoder, "hello", " world")[0] == [BOS_ID, *ids_of("hello")]
    assert parts(encoder, f"{BOS}hello", " world")[0] == [BOS_ID, *ids_of("hello")]
    assert BOS_ID not in parts(encoder, "hello", " world")[1]


def test_r9_bos_policy_can_be_set_and_needs_a_bos() -> None:
    without = make_encoder(bos=True, add_bos=False)
    assert parts(without, "hello", " world")[0] == ids_of("hello")
    with pytest.raises(UsageError, match="no bos_id"):
        make_encoder(add_bos=True)


@pytest.mark.parametrize("template", [f"$A {EOS}", f"{BOS} $A {EOS}", f"{EOS} $A"])
def test_r9_a_tokenizer_that_adds_eos_is_refused(template: str) -> None:
    with pytest.raises(UsageError, match="only one BOS"):
        make_encoder(template=template, bos=True)


def prepending(text: str) -> Tokenizer:
    tokenizer = tiny_tokenizer()
    tokenizer.normalizer = normalizers.Prepend(text)
    return tokenizer


def test_a_tokenizer_that_adds_bos_unasked_is_refused() -> None:
    tokenizer = prepending("A")
    bos_id = tokenizer.token_to_id("A")
    assert tokenizer.encode("x", add_special_tokens=False).ids[0] == bos_id
    with pytest.raises(UsageError, match="asked for none"):
        Encoder(tokenizer, EncodingPolicy.of_model(tiny_descriptor(tokenizer, bos_id=bos_id), LONG))


def test_a_tokenizer_that_puts_a_plain_space_in_front_is_taken() -> None:
    tokenizer = prepending(" ")
    encoder = Encoder(tokenizer, EncodingPolicy.of_model(tiny_descriptor(tokenizer, bos_id=BOS_ID), LONG))
    assert parts(encoder, "hello", " world") == (ids_of(" hello"), ids_of(" world"))


def test_r9_padding_and_truncation_of_the_tokenizer_file_are_switched_off() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=64)
    encoder = Encoder(tokenizer, EncodingPolicy.of_model(tiny_descriptor(tokenizer), LONG))
    assert parts(encoder, "hello hello", " world") == (ids_of("hello hello"), ids_of(" world"))


def test_r10_an_empty_context_is_the_prefix_token() -> None:
    assert parts(make_encoder(), "", "world") == ([EOS_ID], ids_of("world"))
    assert parts(make_encoder(bos=True), "", "world") == ([BOS_ID], ids_of("world"))
    assert parts(make_encoder(prefix_token=7), "", "world") == ([7], ids_of("world"))


def test_r10_a_continuation_that_begins_with_the_prefix_token_uses_it_as_context() -> None:
    assert parts(make_encoder(), "", f"{EOS}world") == ([EOS_ID], ids_of("world"))
    assert error_class(make_encoder(), "", EOS) == "empty_continuation"


def test_r10_a_model_without_any_prefix_token_is_refused() -> None:
    tokenizer = tiny_tokenizer()
    with pytest.raises(UsageError, match="--prefix-token"):
        EncodingPolicy.of_model(tiny_descriptor(tokenizer, eos_ids=[]), LONG)


def test_r11_a_context_of_whitespace_is_empty_after_the_move() -> None:
    assert parts(make_encoder(), " \n", "world") == ([EOS_ID], ids_of(" \nworld"))


@pytest.mark.parametrize("context", ["", "hello", "hello "])
def test_r12_an_empty_continuation_is_a_row_error_or_zero_tokens(context: str) -> None:
    assert error_class(make_encoder(), context, "") == "empty_continuation"
    encoded = make_encoder(empty_continuation="zero").encode_pair(context, "")
    assert encoded.n_continuation == 0
    assert encoded.n_context >= 1


@pytest.mark.parametrize("total", [5, 6, 7, 8])
def test_r14_the_last_window_plus_one_tokens_are_kept(total: int) -> None:
    window = 6
    context, continuation = "x" * (total - 2), "yz"
    encoded = make_encoder(window).encode_pair(context, continuation)
    whole = ids_of(context + continuation)
    assert encoded.ids.tolist() == whole[-(window + 1) :]
    assert encoded.n_truncated == max(0, total - window - 1)
    assert encoded.n_continuation == 2


def test_r15_a_continuation_of_exactly_the_window_is_scored() -> None:
    encoded = make_encoder(4).encode_pair("abc", "defg")
    assert (encoded.n_context, encoded.n_continuation, encoded.n_truncated) == (1, 4, 2)


def test_r16_truncation_moves_no_boundary_and_flags_a_lost_bos() -> None:
    encoded = make_encoder(3).encode_pair("abc", "de")
    assert encoded.ids.tolist() == ids_of("bcde")
    assert (encoded.n_context, encoded.n_continuation) == (2, 2)
    with_bos = make_encoder(3, bos=True).encode_pair("abc", "de")
    assert with_bos.ids.tolist() == ids_of("bcde")
    assert with_bos.bos_truncated
    just = make_encoder(4, bos=True).encode_pair("abc", "de")
    assert (just.ids.tolist(), just.n_truncated, just.bos_truncated) == (ids_of("abcde"), 1, True)
    assert not make_encoder(5, bos=True).encode_pair("abc", "de").bos_truncated


def test_r17_a_continuation_beyond_the_window_is_a_row_error() -> None:
    assert error_class(make_encoder(3), "abc", "defg") == "continuation_too_long"
    assert error_class(make_encoder(3), "", "defg") == "continuation_too_long"


def test_r42_ids_are_taken_as_they_are_and_held_against_the_vocabulary() -> None:
    encoder = make_encoder(bos=True)
    encoded = encoder.join_ids([5, 6], [7])
    assert (encoded.ids.tolist(), encoded.n_context, encoded.n_continuation) == ([5, 6, 7], 2, 1)
    assert encoder.join_ids([], [7]).ids.tolist() == [BOS_ID, 7]
    for bad in (-1, encoder.policy.vocab_size, 2**40):
        with pytest.raises(RowError) as caught:
            encoder.join_ids([5], [bad])
        assert caught.value.error_class == "token_out_of_range"
    with pytest.raises(RowError) as caught:
        encoder.join_ids([5], [])
    assert caught.value.error_class == "empty_continuation"


TEXTS = st.text(alphabet=list("Answerhold \n\u00e9"), max_size=12)


@settings(max_examples=150, deadline=None)
@given(pairs=st.lists(st.tuples(TEXTS, TEXTS.filter(bool)), max_size=8), window=st.integers(8, 40))
def test_encoding_many_pairs_equals_one_at_a_time_and_loses_no_text(
    pairs: list[tuple[str, str]], window: int
) -> None:
    encoder = make_encoder(window)
    together = encoder.encode_pairs(pairs)
    for (context, continuation), encoded in zip(pairs, together, strict=True):
        (alone,) = encoder.encode_pairs([(context, continuation)])
        if isinstance(encoded, RowError):
            assert isinstance(alone, RowError)
            continue
        assert not isinstance(alone, RowError)
        assert encoded.ids.tolist() == alone.ids.tolist()
        assert 1 <= encoded.n_continuation <= len(encoded.ids) - 1
        assert len(encoded.ids) <= window + 1
        text = tiny_tokenizer().decode(encoded.ids.tolist(), skip_special_tokens=True)
        assert (context + continuation).endswith(text) or encoded.n_truncated
