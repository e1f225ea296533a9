"""Shared by the tests of handles, generation and memory: tiny models of every family."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np
from engine_cases import write_calm
from numpy.typing import NDArray
from tinyloop.native import Model, OutOfMemoryError, PrefixCache, load_model

Result = TypeVar("Result")
Ids = NDArray[np.int32]
MODES = ("fp16", "int8", "h_fp16", "h_int8", "h_int4")
ROWS = 256
# One family of each kind of schedule: a gate, a coda, a coda with two states, two stacks and a prefix-LM.
KINDS = ("ouro", "loop_range", "huginn", "hrm_text")
NO_STOP: list[int] = []


@cache
def _folder() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="tinyloop-families-")


@cache
def family_path(family: str) -> Path:
    """The family's tiny model as a file, written once."""
    return write_calm(Path(_folder().name) / f"{family}.tloop", family, bits=8, max_positions=2048)


def load_family(family: str, cache_mode: str = "fp16", **options: Any) -> Model:
    """Loaded for one thread. The hidden modes warn, where they save nothing on so small a model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return load_model(
            family_path(family), **{"max_seq_len": ROWS, "threads": 1, "cache_mode": cache_mode, **options}
        )


def assert_same_bits(found: NDArray[Any], expected: NDArray[Any]) -> None:
    np.testing.assert_array_equal(found, expected, strict=True)


def flat(items: Sequence[tuple[Ids, int]]) -> tuple[Ids, NDArray[np.int64], NDArray[np.int32]]:
    """(ids, n_scored) each, as the calls take them."""
    offsets = np.cumsum([0, *(len(ids) for ids, _ in items)]).astype(np.int64)
    return np.concatenate([ids for ids, _ in items]), offsets, np.array([n for _, n in items], np.int32)


def score_one(
    model: Model,
    ids: Ids,
    n_scored: int,
    depth: int,
    *,
    prefix: PrefixCache | None = None,
    prompt_len: int = 0,
) -> NDArray[np.float32]:
    """Log-probabilities of the last n_scored ids."""
    return model.score(
        *flat([(ids, n_scored)]),
        depth=depth,
        prefixes=[prefix] if prefix is not None else None,
        prompt_lens=np.array([prompt_len], np.int32) if prompt_len else None,
    ).logprobs


def lasting_memory(model: Model) -> int:
    """What is held without the buffers that a call may leave larger for the next one."""
    report = model.memory_report()
    assert sum(report.values()) == model.vram_usage_bytes
    return model.vram_usage_bytes - report["logit_row"] - report["rebuild"]


@contextmanager
def memory_comes_back(model: Model) -> Iterator[None]:
    before = lasting_memory(model)
    yield
    assert lasting_memory(model) == before


def fail_every_allocation(
    model: Model, call: Callable[[], Result], after: Callable[[], None] = lambda: None
) -> tuple[Result, int]:
    """The call with its first allocation failing, then its second and so on, until it meets no failure.

    After each failure no byte more is held than before, and `after` may look around. Returns what the call
    gave in the end, and how often it failed.
    """
    for n in count(1):
        before = lasting_memory(model)
        model._fail_allocation(n)
        try:
            result = call()
        except OutOfMemoryError:
            assert lasting_memory(model) == before
            after()
        else:
            model._fail_allocation(0)
            return result, n - 1
    raise AssertionError
