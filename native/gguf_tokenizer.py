"""A tokenizer.json from the vocabulary and merges that a GGUF file carries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from .source import ConvertError

Fields = Mapping[str, Any]

_CONTROL, _USER_DEFINED = 3, 4
_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


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
    tokens, merges = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.merges"]
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise ConvertError("tokenizer.ggml.tokens: a token is listed twice")
    pairs = [_pair(merge) for merge in merges]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=name == "llama-bpe"))
    tokenizer.pre_tokenizer = _pre_tokenizer(name)
    tokenizer.decoder = decoders.ByteLevel()
    for token, token_type in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True):
        if token_type in (_CONTROL, _USER_DEFINED):
            special = token_type == _CONTROL
            tokenizer.add_tokens([AddedToken(token, special=special, normalized=False)])
    # llama.cpp adds BOS for this pre-tokenizer unless the file says otherwise.
    add_bos = bool(fields.get("tokenizer.ggml.add_bos_token", name == "llama-bpe"))
    if add_bos:
        bos_id = bos_and_eos(fields)[0]
        if bos_id < 0:
            raise ConvertError("tokenizer.ggml.add_bos_token: true, but there is no bos_token_id")
        bos = tokens[bos_id]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bos_id)]
        )
    return tokenizer.to_str().encode(), add_bos


def bos_and_eos(fields: Fields) -> tuple[int, tuple[int, ...]]:
    """(bos id or -1, ids that end a text or a turn)."""
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    eos_ids = dict.fromkeys(int(fields[key]) for key in keys if key in fields)
    return int(fields.get("tokenizer.ggml.bos_token_id", -1)), tuple(eos_ids)


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
    if name == "llama-bpe":
        split = pre_tokenizers.Split(Regex(_LLAMA3_PATTERN), "isolated")
        plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([split, plain])
    raise ConvertError(f"tokenizer.ggml.pre {name!r}: gpt-2, smollm and llama-bpe can be converted")
