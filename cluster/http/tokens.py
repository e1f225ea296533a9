"""Single tokens as a client sees them: their text, bytes, and where in the whole text they begin."""

from __future__ import annotations

import json
from collections.abc import Iterable

from ..completion_text import TextPieces, Vocabulary


def _byte_of_character() -> dict[str, int]:
    """Byte-level tokenizers spell each byte as one printable character, those that print as themselves."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_of_character()
WORD_BEGIN = "\u2581"


class TokenTexts:
    """The texts of a model's tokens."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        decoder = json.dumps(json.loads(vocabulary.tokenizer.to_str())["decoder"])
        self._byte_level = "ByteLevel" in decoder
        added = vocabulary.tokenizer.get_added_tokens_decoder()
        self._as_spelled = frozenset(added)

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes that the token stands for; a special token, for its own name."""
        token = self.vocabulary.tokenizer.id_to_token(token_id)
        if token is None:  # an id of the model beyond its tokenizer's
            return f"<|id {token_id}|>".encode()
        if token_id in self._as_spelled:
            return str(token).encode()
        if token_id in self.vocabulary.byte_ids:
            return bytes([int(token[3:5], 16)])
        if self._byte_level:
            return bytes(BYTE_OF_CHARACTER[character] for character in token)
        return str(token).replace(WORD_BEGIN, " ").encode()

    def text_of(self, token_id: int) -> str:
        """Its text; `bytes:` and their codes if it is part of a character, as the API writes it."""
        found = self.bytes_of(token_id)
        try:
            return found.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)

    def ends(self, token_ids: Iterable[int]) -> list[int]:
        """How many characters of the whole text are certain after each token."""
        pieces, length, ends = TextPieces(self.vocabulary), 0, []
        for token_id in token_ids:
            length += len(pieces.add(token_id))
            ends.append(length)
        return ends
