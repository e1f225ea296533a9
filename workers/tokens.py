"""What was generated, on its way from a replica to the client, many requests in one message."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from .wire import (
    Int32Array,
    Int64Array,
    ItemFailure,
    WireError,
    array_fields,
    array_from,
    counted,
    listed,
    pack,
    record,
    typed,
    unpack,
)


class End(IntEnum):
    """Whether and how a completion has ended."""

    OPEN = 0
    STOP = 1
    LENGTH = 2
    FAILED = 3


@dataclass(frozen=True, slots=True)
class TokenBundle:
    """The next ids of some completions of one client. number: grows by one a bundle; 0: there is none.

    windows int64 [m] and items int32 [m]: whose ids. first int32 [m]: how many ids came before. ends uint8
    [m]: see End; an ended completion has first[i] plus its ids here, and no more will come. Ids of entry i at
    offsets[i] to [i + 1] (int64 [m + 1]) of token_ids int32, logprobs float32 (nats) and depths int32 (loops
    that the predicting row ran). failures: of the failed ones, in their order.
    """

    number: int
    windows: Int64Array
    items: Int32Array
    first: Int32Array
    ends: NDArray[np.uint8]
    offsets: Int64Array
    token_ids: Int32Array
    logprobs: NDArray[np.float32]
    depths: Int32Array
    failures: tuple[ItemFailure, ...]

    def __len__(self) -> int:
        return len(self.items)


_DTYPES = {
    "windows": "<i8",
    "items": "<i4",
    "first": "<i4",
    "ends": "|u1",
    "offsets": "<i8",
    "token_ids": "<i4",
    "logprobs": "<f4",
    "depths": "<i4",
}


def encode_tokens(bundle: TokenBundle) -> bytes:
    """A bundle as bytes."""
    columns = [array_fields(getattr(bundle, name)) for name in _DTYPES]
    failures = [[f.item, f.error_class, f.message] for f in bundle.failures]
    return pack("tokens", [bundle.number, *columns, failures])


def decode_tokens(message: bytes) -> TokenBundle:
    """A bundle from bytes. Raises WireError."""
    number, *columns, failures = unpack("tokens", message, len(_DTYPES) + 2)
    arrays = {
        name: array_from(value, dtype) for (name, dtype), value in zip(_DTYPES.items(), columns, strict=True)
    }
    records = [record(failure, 3) for failure in listed(failures)]
    bundle = TokenBundle(
        number=counted(number),
        **arrays,
        failures=tuple(
            ItemFailure(counted(i), typed(kind, str), typed(text, str)) for i, kind, text in records
        ),
    )
    _check(bundle)
    return bundle


def _check(bundle: TokenBundle) -> None:
    num, total = len(bundle), len(bundle.token_ids)
    if not len(bundle.windows) == len(bundle.first) == len(bundle.ends) == num:
        raise WireError(f"tokens of {num} completions have columns of other lengths")
    if not len(bundle.logprobs) == len(bundle.depths) == total:
        raise WireError(f"{total} ids have columns of other lengths")
    offsets = bundle.offsets
    if len(offsets) != num + 1 or offsets[0] != 0 or offsets[-1] != total or (np.diff(offsets) < 0).any():
        raise WireError(f"offsets do not cover {total} ids of {num} completions in order")
    if num and (bundle.items.min() < 0 or bundle.windows.min() < 0 or bundle.first.min() < 0):
        raise WireError("an item, a window or a place of tokens is negative")
    if num and bundle.ends.max() > max(End):
        raise WireError(f"end {bundle.ends.max()} of a completion is none of {[int(end) for end in End]}")
    failed = bundle.items[bundle.ends == End.FAILED].tolist()
    if failed != [failure.item for failure in bundle.failures]:
        raise WireError(f"{len(failed)} completions failed and {len(bundle.failures)} failures are told")
