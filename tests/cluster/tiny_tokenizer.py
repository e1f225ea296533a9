"""Small real tokenizers, made here: byte-level BPE with a few merges, with or without a template."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

MERGES = [
    ("h", "e"),
    ("l", "l"),
    ("he", "ll"),
    ("hell", "o"),
    ("\u0120", "w"),
    ("\u0120w", "o"),
    ("l", "d"),
    ("r", "ld"),
    ("A", "n"),
    ("An", "s"),
    ("Ans", "w"),
    ("e", "r"),
    ("Answ", "er"),
]
BOS, EOS = "<bos>", "<eos>"


def tiny_tokenizer(*, template: str | None = None) -> Tokenizer:
    """Byte-level BPE.

    <bos> is 0, <eos> is 1, bytes and merges follow. template: as "<bos> $A" or "$A <eos>".
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([BOS, EOS, *alphabet])}
    merges = []
    for left, right in MERGES:
        if left in vocab and right in vocab:
            merges.append((left, right))
            vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(BOS, special=True), AddedToken(EOS, special=True)])
    if template is not None:
        special = [(token, vocab[token]) for token in (BOS, EOS) if token in template]
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    return tokenizer


def tiny_descriptor(tokenizer: Tokenizer, **changes: object) -> dict[str, object]:
    """The keys of a model's descriptor that encoding looks at."""
    return {
        "vocab_size": tokenizer.get_vocab_size(),
        "bos_id": -1,
        "eos_ids": [1],
        "add_bos": False,
        "loops": 4,
    } | changes
