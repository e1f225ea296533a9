"""Text of ids as they come, against the tokenizer's own decode of all of them and against str.find."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tinyloop.cluster.completion_text import CompletionText, StopStrings, TextPieces, Vocabulary
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from .tiny_tokenizer import tiny_tokenizer

SPECIAL = [AddedToken("<s>", special=True), AddedToken("</s>", special=True)]


def byte_fallback_tokenizer() -> Tokenizer:
    """As Llama 2's: characters that are no token are spelled <0x..>, and a text's first space is lost."""
    words = ["\u2581", "a", "b", "\u2581a", "ab", "\u2581\u2581", "\u00e9", "\ufffd", "\n"]
    tokens = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocab = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def word_tokenizer(decoder: object, words: list[str]) -> Tokenizer:
    vocab = {token: number for number, token in enumerate(["<s>", "</s>", "[UNK]", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocab, unk_token="[UNK]"))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


PIECES = ["a", "##b", "##.", ".", "!", "n't", "'s", "do", "##do", "\u00e9"]
TOKENIZERS = {
    "bytes": tiny_tokenizer(),
    "byte fallback": byte_fallback_tokenizer(),
    "word pieces": word_tokenizer(decoders.WordPiece(cleanup=True), PIECES),
    "metaspace": word_tokenizer(decoders.Metaspace(), ["\u2581a", "b", "\u2581", "\u2581\u2581c", "."]),
    "suffix": word_tokenizer(decoders.BPEDecoder("</w>"), ["a", "b</w>", "c</w>", "</w>", "."]),
}


def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    size = tokenizer.get_vocab_size()
    euro = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "\u20ac\U0001f600".encode()]
    if None in euro:
        spelled = tokenizer.encode("\u20ac\U0001f600", add_special_tokens=False).ids
        euro = spelled if max(spelled) < size else []
    some = st.sampled_from(euro) if euro else st.integers(0, size - 1)
    return st.lists(st.one_of(st.integers(0, size - 1), some), max_size=24)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
@settings(deadline=None)
def test_pieces_joined_are_the_decode_of_all_ids(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(ids_of(tokenizer))
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer).decode(
        ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    pieces = TextPieces(Vocabulary(tokenizer))
    come = [pieces.add(token_id) for token_id in ids]
    rest = pieces.finish()
    assert "".join(come) + rest == tokenizer.decode(ids, skip_special_tokens=True)
    if name != "suffix":  # transformers puts a decoder of its own there
        assert "".join(come) + rest == whole


@given(st.text(max_size=12))
def test_no_piece_ends_in_a_half_character_and_none_waits_for_long(text: str) -> None:
    tokenizer = TOKENIZERS["bytes"]
    pieces, shown = TextPieces(Vocabulary(tokenizer)), ""
    for token_id in tokenizer.encode(text, add_special_tokens=False).ids:
        shown += pieces.add(token_id)
        assert text.startswith(shown)
    assert shown + pieces.finish() == text
    # Only U+FFFD itself cannot be told from a half character before something follows.
    assert shown == text.rstrip("\ufffd")


LETTERS = st.text("ab", max_size=20)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


def cut(text: str, stops: list[str]) -> str:
    """The text up to the first place where any stop string begins, by str.find over the whole."""
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(places, default=len(text))]


@given(text=LETTERS, stops=STOPS, data=st.data())
@example(text="xabc de", stops=["abc d", "bc"], data=None)
@settings(max_examples=500, deadline=None)
def test_r35_a_text_is_cut_where_the_first_stop_string_begins(
    text: str, stops: list[str], data: st.DataObject | None
) -> None:
    borders = [] if data is None else sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    scanner = StopStrings(stops)
    shown_to = 0
    for begin, end in zip([0, *borders], [*borders, len(text)], strict=True):
        scanner.add(text[begin:end])
        shown_to = max(shown_to, scanner.open_from)
        # What was shown is never taken back.
        assert cut(text, stops).startswith(text[:shown_to])
        if scanner.is_certain:
            break
    found = scanner.found
    assert text[: len(text) if found is None else found[0]] == cut(text, stops)


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_r35_a_completion_is_its_decode_cut_at_the_first_stop_string(data: st.DataObject) -> None:
    tokenizer = TOKENIZERS["bytes"]
    text = data.draw(st.text("ab\u20ac \U0001f600", max_size=16))
    stops = data.draw(st.lists(st.text("ab\u20ac ", min_size=1, max_size=4), max_size=3))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    borders = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    completion, shown = CompletionText(Vocabulary(tokenizer), stops), ""
    for begin, end in zip([0, *borders], [*borders, len(ids)], strict=True):
        shown += completion.add(ids[begin:end])
        assert shown == completion.text
        if completion.is_cut:
            break
    shown += completion.finish()
    assert shown == completion.text == cut(text, stops)
    assert completion.is_cut == (len(shown) < len(text))
    # The ids that count are the fewest whose decode holds the stop string where the text was cut.
    enough = [
        count
        for count in range(len(ids) + 1)
        if any(tokenizer.decode(ids[:count]).startswith(stop, len(shown)) for stop in stops)
        and tokenizer.decode(ids[:count]).startswith(shown)
    ]
    assert completion.num_ids == (enough[0] if completion.is_cut else len(ids))


def test_a_stop_string_across_tokens_ends_the_completion_at_the_token_that_completes_it() -> None:
    tokenizer = TOKENIZERS["bytes"]
    completion = CompletionText(Vocabulary(tokenizer), ["lo w"])
    ids = tokenizer.encode("hello world", add_special_tokens=False).ids
    assert len(ids) > 2
    assert completion.add(ids) == "hel"
    assert (completion.is_cut, completion.text) == (True, "hel")
    assert tokenizer.decode(ids[: completion.num_ids]).startswith("hello w")
    assert not tokenizer.decode(ids[: completion.num_ids - 1]).startswith("hello w")


def test_special_tokens_are_not_in_the_text_and_an_empty_stop_string_is_refused() -> None:
    vocabulary = Vocabulary(TOKENIZERS["bytes"])
    assert (vocabulary.special_id("<eos>"), vocabulary.special_id("hello")) == (1, None)
    completion = CompletionText(vocabulary)
    assert completion.add([1, 0]) + completion.finish() == ""
    assert completion.num_ids == 2
    with pytest.raises(ValueError, match="stop string is empty"):
        CompletionText(vocabulary, ["a", ""])
