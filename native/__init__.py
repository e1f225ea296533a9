"""The engine: one looped language model per process. Knows nothing of Ray or of files of requests."""

from ._core import (
    ClosedHandleError,
    Completion,
    ConcurrentUseError,
    DeviceError,
    GenerateRequest,
    Generation,
    GenerationStep,
    InvalidInputError,
    LoadError,
    MismatchError,
    Model,
    OutOfMemoryError,
    PrefixCache,
    PrefixPool,
    ResumeHandle,
    RowBudgetError,
    ScoreResult,
    TinyLoopError,
)
from .cascade import CascadeResult, cascade
from .devices import Device, devices
from .engine import MemoryPlan, load_model, plan

__all__ = [
    "CascadeResult",
    "ClosedHandleError",
    "Completion",
    "ConcurrentUseError",
    "Device",
    "DeviceError",
    "GenerateRequest",
    "Generation",
    "GenerationStep",
    "InvalidInputError",
    "LoadError",
    "MemoryPlan",
    "MismatchError",
    "Model",
    "OutOfMemoryError",
    "PrefixCache",
    "PrefixPool",
    "ResumeHandle",
    "RowBudgetError",
    "ScoreResult",
    "TinyLoopError",
    "cascade",
    "devices",
    "load_model",
    "plan",
]
