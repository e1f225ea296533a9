"""A tokenizer.json from the vocabulary and merges that a GGUF file carries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from .source import ConvertError, reading

Fields = Mapping[str, Any]

_CONTROL, _USER_DEFINED = 3, 4
# How runs of text are split; all that differs is how many digits may stand together.
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_DIGITS = {"llama-bpe": "{1,3}", "qwen2": ""}


def tokenizer_json(fields: Fields) -> tuple[bytes, bool]:
    """(tokenizer.json, whether it adds BOS by itself) of a byte-level BPE vocabulary.

    Raises: ConvertError for another kind of vocabulary, or a pre-tokenizer whose splitting is not known
    here: a near
        miss would give other token ids without a sign.
    """
    kind = fields.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ConvertError(f"tokenizer.ggml.model {kind!r}: only 'gpt2' (byte-level BPE) can be converted")
    if fields.get("tokenizer.ggml.add_eos_token"):
        raise ConvertError("tokenizer.ggml.add_eos_token: true; only false can be converted")
    name = fields.get("tokenizer.ggml.pre")
    tokens, merges = _texts(fields, "tokenizer.ggml.tokens"), _texts(fields, "tokenizer.ggml.merges")
    token_types = fields.get("tokenizer.ggml.token_type")
    if not isinstance(token_types, list) or len(token_types) != len(tokens):
        raise ConvertError(f"tokenizer.ggml.token_type: expected one number for each of {len(tokens)} tokens")
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise ConvertError("tokenizer.ggml.tokens: a token is listed twice")
    pairs = [_pair(merge) for merge in merges]
    with reading("tokenizer.ggml.merges"):
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=name == "llama-bpe"))
    tokenizer.pre_tokenizer = _pre_tokenizer(name)
    if name == "qwen2":  # which the file does not say, but its tokenizer does
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    for token, token_type in zip(tokens, token_types, strict=True):
        if token_type in (_CONTROL, _USER_DEFINED):
            special = token_type == _CONTROL
            tokenizer.add_tokens([AddedToken(token, special=special, normalized=False)])
    # llama.cpp adds BOS for this pre-tokenizer unless the file says otherwise.
    add_bos = bool(fields.get("tokenizer.ggml.add_bos_token", name == "llama-bpe"))
    if add_bos:
        bos_id = bos_and_eos(fields)[0]
        if not 0 <= bos_id < len(tokens):
            raise ConvertError(
                f"tokenizer.ggml.add_bos_token: true, but bos_token_id {bos_id} is none of the "
                f"{len(tokens)} tokens"
            )
        bos = tokens[bos_id]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bos_id)]
        )
    return tokenizer.to_str().encode(), add_bos


def bos_and_eos(fields: Fields) -> tuple[int, tuple[int, ...]]:
    """(bos id or -1, ids that end a text or a turn)."""
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    eos_ids = dict.fromkeys(_id(fields, key) for key in keys if key in fields)
    key = "tokenizer.ggml.bos_token_id"
    return _id(fields, key) if key in fields else -1, tuple(eos_ids)


def _id(fields: Fields, key: str) -> int:
    value = fields[key]
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConvertError(f"{key}: expected an integer, found {value!r:.60}")
    return value


def _texts(fields: Fields, key: str) -> list[str]:
    value = fields.get(key)
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise ConvertError(f"{key}: expected a list of texts, found {value!r:.60}")
    return value


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if not (left and right):
        raise ConvertError(f"tokenizer.ggml.merges: {merge!r} is not two tokens")
    return left, right


def _pre_tokenizer(name: object) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name == "gpt-2":
        return byte_level
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    if isinstance(name, str) and name in _DIGITS:
        split = pre_tokenizers.Split(Regex(_PATTERN.replace("DIGITS", _DIGITS[name])), "isolated")
        plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([split, plain])
    raise ConvertError(f"tokenizer.ggml.pre {name!r}: gpt-2, smollm, llama-bpe and qwen2 can be converted")
