"""What a caller asks a pool to generate and gets back, and what that may cost. No Ray and no text here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..workers.prompts import DTYPES, RAGGED, SETTINGS, Prompts, fault_of
from .items import Float32Array, Int32Array

# A generated id in rows of a prompt: it is computed among few others, where a prompt's rows share each weight
# that is read. Placement needs the order of magnitude alone.
DECODE_ROWS = 8.0


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request. A completion depends on it alone: not on mates, placement, prefixes or retries.

    token_ids: int32 [n], at least one. max_new_tokens: at least 1. depth: loops; None: the model's own.
    temperature 0 takes the likeliest id; top_k 0, top_p 1 and min_p 0 leave all ids; repetition_penalty 1 is
    none. stop_ids: each ends the completion and is its last id; None: the model's own. seed: 0 to 2^64 - 1,
    decides the draws with the position. exit_threshold, min_depth: a generated id ends its loops where its
    exit probability is that; None: never.
    """

    token_ids: Sequence[int] | Int32Array
    max_new_tokens: int = 128
    depth: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_ids: Sequence[int] | None = None
    seed: int = 0
    exit_threshold: float | None = None
    min_depth: int = 1


@dataclass(frozen=True, slots=True)
class Tokens:
    """The next ids of one completion. prompt: its index; first: how many ids came before.

    token_ids int32, logprobs float32 (natural log, under the model's own distribution), depths int32 (loops
    that the row which predicted each ran). finish_reason: None while more will come, else "stop", "length" or
    "cancelled".
    """

    prompt: int
    first: int
    token_ids: Int32Array
    logprobs: Float32Array
    depths: Int32Array
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class Generated:
    """A whole completion; the fields are those of Tokens."""

    prompt: int
    token_ids: Int32Array
    logprobs: Float32Array
    depths: Int32Array
    finish_reason: str


@dataclass(frozen=True, slots=True)
class NotGenerated:
    """A prompt that has no completion, and why; ids of it that came before are not taken back."""

    prompt: int
    error_class: str
    message: str
    attempts: int


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a prompt leaves to the model."""

    depth: int
    stop_ids: tuple[int, ...]


def columns_of(prompts: Sequence[Prompt], defaults: Defaults, *, client: str, window: int) -> Prompts:
    """Requests as one window. Raises ValueError that names the first value that no model could take."""
    given = [_settings(prompt, defaults) for prompt in prompts]
    columns: dict[str, NDArray[Any]] = {}
    for name in SETTINGS:
        columns[name] = _column(name, [settings[name] for settings in given])
    lists: dict[str, list[Sequence[int] | Int32Array]] = {
        "token_ids": [prompt.token_ids for prompt in prompts],
        "stop_ids": [defaults.stop_ids if p.stop_ids is None else p.stop_ids for p in prompts],
    }
    for name, rows in lists.items():
        columns[name] = _column(name, [value for row in rows for value in row])
        columns[RAGGED[name]] = np.cumsum([0, *(len(row) for row in rows)], dtype=np.int64)
    made = Prompts(client=client, window=window, **columns)
    if fault := fault_of(made):
        raise ValueError(f"cannot generate: {fault}")
    return made


def cost_rows(prompts: Prompts, depth: int) -> Int32Array:
    """int32 [n]: expected cost of each, in rows at `depth` when nothing is shared.

    Seconds are rows x depth x the replica's measured seconds a row: those of the prompt and of the ids to
    come, each at the request's own depth.
    """
    rows = np.diff(prompts.offsets) + DECODE_ROWS * prompts.max_new_tokens.astype(np.float64)
    return np.clip(np.ceil(rows * prompts.depth / depth), 1, 2**30).astype(np.int32)


def _settings(prompt: Prompt, defaults: Defaults) -> dict[str, object]:
    settings = {name: getattr(prompt, name) for name in SETTINGS}
    if prompt.depth is None:
        settings["depth"] = defaults.depth
    if prompt.exit_threshold is None:
        settings["exit_threshold"] = np.inf
    return settings


def _column(name: str, values: list[object]) -> NDArray[Any]:
    """Values as their column's type. Raises ValueError naming one that the type does not hold."""
    dtype = np.dtype(DTYPES[name])
    if dtype.kind == "f":
        return np.array(values, dtype=dtype)
    limits = np.iinfo(dtype)
    for index, value in enumerate(values):
        if not isinstance(value, int | np.integer) or not limits.min <= int(value) <= limits.max:
            raise ValueError(
                f"cannot generate: {name} number {index} is {value!r}: it must be a whole number from "
                f"{limits.min} to {limits.max}"
            )
    return np.array(values, dtype=dtype)
