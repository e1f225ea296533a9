"""Text to token ids: one encoder for every task, with every policy named.

Invariant: the ids handed on are exactly the ids that are scored; what was moved, merged or cut is flagged
on the row. Nothing here knows of rows, files or pools.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from .errors import RowError, UsageError
from .items import Int32Array

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Boundary = Literal["clean", "merged"]
EmptyContinuation = Literal["error", "zero"]

# Printed by `tinyloop score --help` and written to run.json: what is done to text before it is scored.
POLICIES: dict[str, str] = {
    "score": "sum of ln p(token) over the continuation's tokens, given everything before each",
    "whitespace": "trailing whitespace of the context moves to the front of the continuation and is scored",
    "boundary": "context and continuation are encoded together and split after the context's own tokens",
    "merged boundary": "if a token spans the join, the continuation is encoded alone: the row says 'merged'",
    "delimiter": "--target-delimiter is put before every continuation and choice; none by default",
    "normalisation": "none: no Unicode form is changed, nothing is stripped",
    "bos": "as the model's own tokenizer does unless --add-bos or --no-add-bos; never two, never scored",
    "eos": "never added; a tokenizer that adds one is refused",
    "empty context": "conditioned on --prefix-token, else BOS, else EOS; a text's own counts",
    "empty continuation": "row error, or --empty-continuation zero: 0 tokens, log-probability 0",
    "truncation": "context tokens are dropped from the left to window + 1 in all; a lost BOS is flagged",
    "long continuation": "never cut: more tokens than the window is a row error",
    "token ids": "context_ids and continuation_ids are taken as they are: no BOS, no whitespace move",
    "special tokens": "a special token spelled out in the text is that token",
}


@dataclass(frozen=True, slots=True)
class EncodingPolicy:
    """Everything that decides which ids a text becomes, but for the tokenizer itself.

    max_rows: L, the model's window in rows; at most L + 1 ids are kept, of which L are fed.
    prefix_id: what an empty context is conditioned on.
    bos_id: -1 if the model has none; then add_bos is false.
    """

    vocab_size: int
    max_rows: int
    prefix_id: int
    bos_id: int = -1
    add_bos: bool = False
    target_delimiter: str = ""
    empty_continuation: EmptyContinuation = "error"

    @classmethod
    def of_model(
        cls,
        descriptor: Mapping[str, Any],
        max_rows: int,
        *,
        add_bos: bool | None = None,
        prefix_token: int | None = None,
        target_delimiter: str = "",
        empty_continuation: EmptyContinuation = "error",
    ) -> EncodingPolicy:
        """The policy for one model; what is None is taken from the model's descriptor.

        Raises: UsageError if BOS is asked for and the model has none, or if no prefix token can be found.
        """
        bos_id, eos_ids = int(descriptor["bos_id"]), list(descriptor["eos_ids"])
        wants_bos = bool(descriptor["add_bos"]) if add_bos is None else add_bos
        if wants_bos and bos_id < 0:
            raise UsageError("cannot add BOS: the model's descriptor has no bos_id: leave --add-bos out")
        candidates = [] if prefix_token is None else [prefix_token]
        candidates += [bos_id] if bos_id >= 0 else []
        candidates += eos_ids[:1]
        vocab_size = int(descriptor["vocab_size"])
        if not candidates or not 0 <= candidates[0] < vocab_size:
            raise UsageError(
                f"no token to condition an empty context on: found {candidates[:1]} for a vocabulary of "
                f"{vocab_size}: give --prefix-token ID"
            )
        return cls(
            vocab_size=vocab_size,
            max_rows=max_rows,
            prefix_id=int(candidates[0]),
            bos_id=bos_id,
            add_bos=wants_bos,
            target_delimiter=target_delimiter,
            empty_continuation=empty_continuation,
        )


@dataclass(frozen=True, slots=True)
class Encoded:
    """One context and continuation as ids.

    ids: int32 [n_context + n_continuation], at most max_rows + 1; the last n_continuation are scored.
    n_context: context ids that are left; n_truncated: context ids that were dropped before them.
    """

    ids: Int32Array
    n_context: int
    n_continuation: int
    n_truncated: int = 0
    boundary: Boundary = "clean"
    bos_truncated: bool = False


class Encoder:
    """Encodes for one model. Not thread-safe only in so far as its tokenizer is not."""

    def __init__(self, tokenizer: Tokenizer, policy: EncodingPolicy) -> None:
        """Take over the tokenizer: its padding and truncation are switched off.

        Raises: UsageError if the tokenizer adds anything but one BOS at the front.
        """
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self.tokenizer = tokenizer
        self.policy = policy
        self._refuse_added_tokens()

    def encode_pair(self, context: str, continuation: str) -> Encoded:
        """Encode one pair. Raises: RowError, as encode_pairs returns it."""
        (encoded,) = self.encode_pairs([(context, continuation)])
        if isinstance(encoded, RowError):
            raise encoded
        return encoded

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[Encoded | RowError]:
        """Encode many pairs at once, one result a pair, in order.

        A pair that cannot be scored gives a RowError of class empty_continuation, continuation_too_long or
        token_out_of_range in its place.
        """
        moved = [self._move_whitespace(context, continuation) for context, continuation in pairs]
        wholes = [context + continuation for context, continuation in moved]
        # Choices of a question share their context, many questions their choices: each distinct text once.
        texts = list(dict.fromkeys([*(context for context, _ in moved), *wholes]))
        ids = dict(zip(texts, self._encode_texts(texts), strict=True))
        results: list[Encoded | RowError] = []
        for (_, bare), (context, continuation), whole in zip(pairs, moved, wholes, strict=True):
            try:
                results.append(self._split(bare, ids[context], ids[whole], continuation))
            except RowError as error:
                results.append(error)
        return results

    def join_ids(self, context_ids: Sequence[int], continuation_ids: Sequence[int]) -> Encoded:
        """A pair given as ids.

        Raises: RowError for an empty or too long continuation or an id out of range.
        """
        if not continuation_ids and self.policy.empty_continuation == "error":
            raise RowError("empty_continuation", "continuation_ids is empty: give at least one id")
        if not context_ids:
            return self._after_prefix(list(continuation_ids))
        return self._finish(list(context_ids), list(continuation_ids), "clean")

    def encode_texts(self, texts: Sequence[str]) -> list[Int32Array | RowError]:
        """Whole documents, without special tokens: int32 [n] each, or RowError token_out_of_range."""
        results: list[Int32Array | RowError] = []
        for ids in self._encode_texts(list(texts)):
            try:
                results.append(self.check_ids(ids))
            except RowError as error:
                results.append(error)
        return results

    def _encode_texts(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        return [
            encoding.ids for encoding in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        ]

    def _move_whitespace(self, context: str, continuation: str) -> tuple[str, str]:
        """Trailing whitespace of the context goes in front of the continuation (and of its delimiter)."""
        kept = context.rstrip()
        return kept, context[len(kept) :] + self.policy.target_delimiter + continuation

    def _split(self, bare: str, context: list[int], whole: list[int], continuation: str) -> Encoded:
        """Cut the joint encoding after the context's own ids, or encode the continuation alone."""
        if not bare:
            if self.policy.empty_continuation == "error":
                raise RowError(
                    "empty_continuation", "continuation is empty: give text or use --empty-continuation zero"
                )
            return (
                self._after_prefix([]) if not context else self._finish(self._with_bos(context), [], "clean")
            )
        if not context:
            return self._after_prefix(whole)
        n = len(context)
        if len(whole) > n and whole[:n] == context:
            return self._finish(self._with_bos(context), whole[n:], "clean")
        (alone,) = self._encode_texts([continuation])
        if not alone:
            raise RowError(
                "empty_continuation", "continuation has no tokens: the tokenizer drops all of its text"
            )
        return self._finish(self._with_bos(context), alone, "merged")

    def _with_bos(self, context: list[int]) -> list[int]:
        """Never two: a chat template may have put BOS into the text itself."""
        policy = self.policy
        return [policy.bos_id, *context] if policy.add_bos and context[0] != policy.bos_id else context

    def _after_prefix(self, continuation: list[int]) -> Encoded:
        """The empty context: the prefix token, or the text's own first token where that is it."""
        prefix = self.policy.prefix_id
        if continuation and continuation[0] == prefix:
            continuation = continuation[1:]
            if not continuation and self.policy.empty_continuation == "error":
                raise RowError(
                    "empty_continuation",
                    f"continuation is the prefix token {prefix} alone, which is the context: nothing is "
                    "left to score",
                )
        return self._finish([prefix], continuation, "clean")

    def _finish(self, context: list[int], continuation: list[int], boundary: Boundary) -> Encoded:
        """Truncate from the left, after the split, so that only context is ever dropped."""
        limit = self.policy.max_rows
        if len(continuation) > limit:
            raise RowError(
                "continuation_too_long",
                f"continuation has {len(continuation)} tokens, the window takes {limit}: score it as a text "
                "row, which is cut into windows, or raise --max-seq-len",
            )
        n_truncated = max(0, len(context) + len(continuation) - (limit + 1))
        ids = self.check_ids(context[n_truncated:] + continuation)
        return Encoded(
            ids=ids,
            n_context=len(context) - n_truncated,
            n_continuation=len(continuation),
            n_truncated=n_truncated,
            boundary=boundary,
            bos_truncated=n_truncated > 0 and context[0] == self.policy.bos_id,
        )

    def check_ids(self, ids: list[int]) -> Int32Array:
        """int32 [n], every id in [0, vocab)."""
        vocab_size = self.policy.vocab_size
        if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
            bad = next(i for i in ids if not 0 <= i < vocab_size)
            raise RowError(
                "token_out_of_range",
                f"token id {bad} is outside [0, {vocab_size}): use the tokenizer of this model",
            )
        return np.array(ids, dtype=np.int32)

    def _refuse_added_tokens(self) -> None:
        """An EOS after the context would break the split; anything else that is added is not understood."""
        probe = "a"
        bare = list(self.tokenizer.encode(probe, add_special_tokens=False).ids)
        full = list(self.tokenizer.encode(probe, add_special_tokens=True).ids)
        if full not in (bare, [self.policy.bos_id, *bare]):
            raise UsageError(
                f"the tokenizer turns {probe!r} into {full}, without special tokens into {bare}; only one "
                f"BOS ({self.policy.bos_id}) in front is understood: remove its template's other tokens "
                "(EOS breaks the split between context and continuation)"
            )
