"""The engine: one looped language model per process. Knows nothing of Ray or of files of requests."""

from ._core import (
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
)
from .engine import load_model

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
