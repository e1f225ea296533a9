"""The engine: one looped language model per process. Knows nothing of Ray or of files of requests."""

from .engine import (
    ClosedHandleError,
    ConcurrentUseError,
    InvalidInputError,
    LoadError,
    MismatchError,
    Model,
    OutOfMemoryError,
    PrefixCache,
    RowBudgetError,
    ScoreResult,
    TinyLoopError,
    load_model,
)

__all__ = [
    "ClosedHandleError",
    "ConcurrentUseError",
    "InvalidInputError",
    "LoadError",
    "MismatchError",
    "Model",
    "OutOfMemoryError",
    "PrefixCache",
    "RowBudgetError",
    "ScoreResult",
    "TinyLoopError",
    "load_model",
]
