"""What a replica says about itself, at any moment, also while a forward runs or after a load that failed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any

from .wire import WireError, pack, typed, unpack


class State(StrEnum):
    """LOADING -> READY -> DRAINING -> CLOSED; UNFIT from any of them, for good."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    CLOSED = "closed"
    UNFIT = "unfit"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the pool must know of a loaded model before it trusts the replica with work."""

    digest: str
    numerics_id: str
    self_test: str
    max_seq_len: int
    descriptor: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Status:
    """A snapshot. phase and message: what failed, if unfit. generating: completions on their way.

    step_age_s: how long the running command has run, 0 if none. beat_age_s: since the thread's loop turned.
    """

    state: str
    phase: str
    message: str
    pid: int
    host: str
    epoch: int
    queued: int
    commands: int
    step_age_s: float
    beat_age_s: float
    memory_bytes: int
    prefixes: int
    prefix_bytes: int
    prefix_budget_bytes: int
    mismatches: int
    facts: ModelFacts | None = field(default=None)
    generating: int = 0


_PLAIN = [entry for entry in fields(Status) if entry.name != "facts"]


def encode_status(status: Status) -> bytes:
    """A status as bytes."""
    values = [getattr(status, entry.name) for entry in _PLAIN]
    return pack("status", [*values, asdict(status.facts) if status.facts else None])


def decode_status(message: bytes) -> Status:
    """A status from bytes. Raises WireError."""
    *values, facts = unpack("status", message, len(fields(Status)))
    kinds: dict[str, type] = {"str": str, "int": int, "float": float}
    known: dict[str, Any] = {
        entry.name: typed(value, kinds[str(entry.type)]) for value, entry in zip(values, _PLAIN, strict=True)
    }
    return Status(**known, facts=None if facts is None else _facts_from(facts))


def _facts_from(value: object) -> ModelFacts:
    facts = typed(value, dict)
    if facts.keys() != {entry.name for entry in fields(ModelFacts)}:
        raise WireError(f"model facts have fields {sorted(map(str, facts))}")
    return ModelFacts(
        digest=typed(facts["digest"], str),
        numerics_id=typed(facts["numerics_id"], str),
        self_test=typed(facts["self_test"], str),
        max_seq_len=typed(facts["max_seq_len"], int),
        descriptor=typed(facts["descriptor"], dict),
    )
