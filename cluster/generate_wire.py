"""What a client tells the router of what was generated for it, behind the version byte of the commands."""

from __future__ import annotations

from dataclasses import dataclass

from ..workers.wire import Int32Array, WireError, array_fields, array_from, counted, pack, typed, unpack


@dataclass(frozen=True, slots=True)
class Settled:
    """Items of one window, int32 [m], that their client needs nothing more of: it has all, or gave up."""

    client: str
    window: int
    items: Int32Array


def encode_settled(settled: Settled) -> bytes:
    """Settled items as bytes."""
    return pack("settled", [settled.client, settled.window, array_fields(settled.items)])


def decode_settled(message: bytes) -> Settled:
    """Settled items from bytes. Raises WireError."""
    client, window, items = unpack("settled", message, 3)
    settled = Settled(typed(client, str), counted(window), array_from(items, "<i4"))
    if len(settled.items) and settled.items.min() < 0:
        raise WireError(f"settled item {settled.items.min()} of window {window} is negative")
    return settled
