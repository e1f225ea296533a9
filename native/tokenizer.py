"""The tokenizer that travels inside a model file."""

from __future__ import annotations

from tokenizers import Tokenizer

from .layout import Header
from .records import FormatError


def load_tokenizer(header: Header) -> Tokenizer:
    """The file's own tokenizer.

    Raises: FormatError when the file has none, or one that cannot be read or names ids beyond the vocabulary.
    """
    if not header.tokenizer_json:
        raise FormatError("tokenizer: the model file has none, it can only score token ids")
    try:
        tokenizer = Tokenizer.from_str(header.tokenizer_json.decode("utf-8"))
    except Exception as error:  # the library raises plain Exception for anything it cannot parse
        raise FormatError(f"tokenizer: not readable: {error}") from None
    size, vocab_size = tokenizer.get_vocab_size(with_added_tokens=True), header.descriptor["vocab_size"]
    top = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if not isinstance(vocab_size, int) or top >= vocab_size:
        raise FormatError(f"tokenizer: {size} tokens with ids up to {top}, the model has {vocab_size}")
    return tokenizer
