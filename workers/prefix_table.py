"""The prefixes one replica holds: built and dropped as told, refused if too large, never evicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .model import Int32Array, Model, Prefix, is_a
from .wire import DIGEST_BYTES, HeldPrefix


class Refused(Exception):
    """A command that cannot be carried out; nothing was changed."""


@dataclass(frozen=True, slots=True)
class Held:
    """A prefix with its whole token ids, kept so that every hit can be checked."""

    digest: bytes
    parent: bytes
    depth: int
    token_ids: Int32Array
    handle: Prefix
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """A prefix to build: its whole token ids, of which those after the parent's are computed."""

    digest: bytes
    parent: bytes
    depth: int
    token_ids: Int32Array


class PrefixTable:
    """Held prefixes of one model under a byte budget. Owned by the engine thread."""

    def __init__(self, model: Model, budget_bytes: int) -> None:
        self._model = model
        self._budget_bytes = budget_bytes
        self._held: dict[bytes, Held] = {}
        self.total_bytes = 0
        self.mismatches = 0

    def __len__(self) -> int:
        return len(self._held)

    def change(self, drops: Sequence[bytes], wanted: Sequence[Wanted]) -> list[Held]:
        """Drop, then build, all or nothing. Returns what was built.

        Raises Refused, with the table as before, if a drop or a parent is not held or the result does not
        fit.
        """
        self._check(drops, wanted)
        dropped = [self._remove(digest) for digest in drops]
        built: list[Held] = []
        try:
            for prefix in wanted:
                built.append(self._build(prefix))
        except Refused:
            self._restore(dropped, built)
            raise
        return built

    @property
    def free_bytes(self) -> int:
        """What is left of the budget."""
        return max(self._budget_bytes - self.total_bytes, 0)

    def held(self, digest: bytes) -> Held:
        """A prefix that is held."""
        return self._held[digest]

    def matching(self, digest: bytes, token_ids: Int32Array) -> Prefix | None:
        """The handle of a held prefix if the ids really start with it; else None, counted."""
        held = self._held[digest]
        length = len(held.token_ids)
        if len(token_ids) > length and np.array_equal(held.token_ids, token_ids[:length]):
            return held.handle
        self.mismatches += 1
        return None

    def require(self, digests: Sequence[bytes], drops: Sequence[bytes], wanted: Sequence[Wanted]) -> None:
        """Raises Refused unless each digest will be held once those drops and builds are done."""
        coming = (self._held.keys() - set(drops)) | {prefix.digest for prefix in wanted}
        missing = [digest for digest in digests if digest not in coming]
        if missing:
            raise Refused(f"missing: prefix {missing[0].hex()} of an item is not held")

    def entries(self) -> tuple[HeldPrefix, ...]:
        """What is held, parents before children."""
        ordered = sorted(self._held.values(), key=lambda held: len(held.token_ids))
        return tuple(HeldPrefix(h.digest, h.parent, len(h.token_ids), h.depth, h.size_bytes) for h in ordered)

    def table_digest(self) -> bytes:
        """Exclusive or of the digests held: equal tables give equal bytes in any order."""
        table = 0
        for digest in self._held:
            table ^= int.from_bytes(digest, "little")
        return table.to_bytes(DIGEST_BYTES, "little")

    def close(self) -> None:
        """Free every prefix."""
        for digest in list(self._held):
            self._remove(digest)

    def _check(self, drops: Sequence[bytes], wanted: Sequence[Wanted]) -> None:
        coming = set(self._held)
        for digest in drops:
            if digest not in coming:
                raise Refused(f"missing: prefix {digest.hex()} to drop is not held")
            coming.discard(digest)
        for prefix in wanted:
            if prefix.digest in coming:
                raise Refused(f"repeated: prefix {prefix.digest.hex()} is held already")
            if prefix.parent and prefix.parent not in coming:
                raise Refused(f"missing: parent {prefix.parent.hex()} of a build is not held")
            coming.add(prefix.digest)

    def _build(self, wanted: Wanted) -> Held:
        parent = self._held[wanted.parent] if wanted.parent else None
        known = len(parent.token_ids) if parent else 0
        if parent and not np.array_equal(parent.token_ids, wanted.token_ids[:known]):
            raise Refused(f"mismatch: prefix {wanted.digest.hex()} does not start with its parent")
        try:
            handle = self._model.prefix(
                wanted.token_ids[known:], depth=wanted.depth, parent=parent.handle if parent else None
            )
        except Exception as error:
            # Only what leaves the engine as it was may be a refusal; the rest makes the replica unfit.
            if is_a(error, "OutOfMemoryError") or isinstance(error, MemoryError):
                raise Refused(
                    f"out_of_memory: a prefix of {len(wanted.token_ids)} tokens: {error}"
                ) from error
            if is_a(error, "InvalidInputError") or is_a(error, "RowBudgetError"):
                raise Refused(f"unbuildable: a prefix of {len(wanted.token_ids)} tokens: {error}") from error
            raise
        held = Held(wanted.digest, wanted.parent, wanted.depth, wanted.token_ids, handle, int(handle.bytes))
        self._add(held)
        if self.total_bytes > self._budget_bytes:
            self._remove(held.digest)
            raise Refused(
                f"budget: a prefix of {len(wanted.token_ids)} tokens takes {held.size_bytes} bytes, "
                f"{self.total_bytes} of {self._budget_bytes} are in use"
            )
        return held

    def _restore(self, dropped: list[Held], built: list[Held]) -> None:
        """Undo a half-done change. What was dropped fitted before, so it fits again."""
        for held in reversed(built):
            self._remove(held.digest)
        for held in sorted(dropped, key=lambda held: len(held.token_ids)):
            self._build(Wanted(held.digest, held.parent, held.depth, held.token_ids))

    def _add(self, held: Held) -> None:
        self._held[held.digest] = held
        self.total_bytes += held.size_bytes

    def _remove(self, digest: bytes) -> Held:
        held = self._held.pop(digest)
        held.handle.close()
        self.total_bytes -= held.size_bytes
        return held
