"""What a replica's state is called where people read it. Pure.

loading, ready, busy, draining, failed(load), failed(out of memory), dead: every slot is one of these.
"""

from __future__ import annotations

LOADING, READY, BUSY, DRAINING = "loading", "ready", "busy", "draining"
FAILED_LOAD, FAILED_MEMORY, DEAD = "failed(load)", "failed(out of memory)", "dead"

# Names of exceptions that mean it: the engine's, Python's, Ray's and what C++ prints.
_MEMORY_SIGNS = ("OutOfMemoryError", "MemoryError", "bad_alloc")
_LOAD_SIGN = "could not load"


def verdict(state: str, in_flight: int, loss: str) -> str:
    """The verdict on a slot: its own state while it has a process, else that on its last death."""
    if state == "up":
        return BUSY if in_flight else READY
    if state == "draining":
        return DRAINING
    return loss or LOADING if state in ("waiting", "given up") else LOADING


def verdict_of_loss(trouble: str) -> str:
    """The verdict on a death from what was said of it, the exception's name included."""
    if any(sign in trouble for sign in _MEMORY_SIGNS):
        return FAILED_MEMORY
    return FAILED_LOAD if _LOAD_SIGN in trouble else DEAD
