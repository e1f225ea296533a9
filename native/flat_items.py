"""Items as flat arrays: token ids one after the other, and how many of each item's last ids are scored."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ._core import InvalidInputError, PrefixCache

Prefixes = Sequence[PrefixCache | None]


class FlatItems:
    """Flat arrays of items, and their places in the whole batch."""

    def __init__(
        self,
        token_ids: NDArray[np.int32],
        offsets: NDArray[np.int64],
        n_scored: NDArray[np.int32],
        prefixes: Prefixes | None,
        prompt_lens: NDArray[np.int32] | None = None,
        places: NDArray[np.int64] | None = None,
    ) -> None:
        require(token_ids, "token_ids", np.int32)
        require(offsets, "offsets", np.int64)
        require(n_scored, "n_scored", np.int32)
        n = len(n_scored)
        if len(offsets) != n + 1 or offsets[0] != 0 or offsets[-1] != len(token_ids):
            raise InvalidInputError(
                f"cannot cascade: offsets has {len(offsets)} entries for {n} items and {len(token_ids)} ids; "
                "it must run from 0 to the number of ids, with one entry more than items"
            )
        if prefixes is not None and len(prefixes) != n:
            raise InvalidInputError(f"cannot cascade: there are {len(prefixes)} prefixes for {n} items")
        if prompt_lens is not None:
            require(prompt_lens, "prompt_lens", np.int32)
            if len(prompt_lens) != n:
                raise InvalidInputError(
                    f"cannot cascade: prompt_lens has {len(prompt_lens)} entries for {n} items"
                )
        self.lengths = np.diff(offsets)
        wrong = np.flatnonzero((n_scored < 1) | (n_scored >= self.lengths))
        if len(wrong):
            i = int(wrong[0])
            raise InvalidInputError(
                f"cannot cascade: item {i} has {self.lengths[i]} ids and n_scored={n_scored[i]}; it must be "
                "at least 1 and leave one id before the scored ones"
            )
        self.token_ids, self.offsets, self.n_scored = token_ids, offsets, n_scored
        self.prefixes, self.prompt_lens = prefixes, prompt_lens
        self.places = np.arange(n) if places is None else places

    def __len__(self) -> int:
        return len(self.n_scored)

    @property
    def rows(self) -> NDArray[np.int64]:
        """Rows that each item computes in a loop."""
        return self.lengths - 1

    def take(self, which: NDArray[np.int64]) -> FlatItems:
        ids = [self.token_ids[self.offsets[i] : self.offsets[i + 1]] for i in which]
        prefixes = self.prefixes and [self.prefixes[i] for i in which]
        return FlatItems(
            np.concatenate(ids),
            np.concatenate([[0], np.cumsum(self.lengths[which])]).astype(np.int64),
            self.n_scored[which],
            prefixes,
            None if self.prompt_lens is None else self.prompt_lens[which],
            self.places[which],
        )


def require(array: object, name: str, dtype: type[np.generic]) -> None:
    """Hold an argument against the type that the engine takes. Raises: TypeError with what was found."""
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
        found = f"{array.dtype} with {array.ndim} axes" if isinstance(array, np.ndarray) else f"{type(array)}"
        raise TypeError(f"{name} must be a numpy array of {np.dtype(dtype)} with one axis, found {found}")
