"""The face of a native model that a worker needs, so that it can be proven on a model made for tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]


class Prefix(Protocol):
    """A prefilled prefix. length counts the parent's ids too, own_length and bytes are its own."""

    @property
    def length(self) -> int: ...
    @property
    def own_length(self) -> int: ...
    @property
    def depth(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    def upgrade(self, depth: int, parent: Any = None) -> Prefix: ...
    def close(self) -> None: ...


class Scores(Protocol):
    """logprobs f32 and greedy bool, item i at offsets[i]:offsets[i + 1]."""

    @property
    def logprobs(self) -> NDArray[np.float32]: ...
    @property
    def greedy(self) -> NDArray[np.bool_]: ...
    @property
    def offsets(self) -> Int64Array: ...


class Step(Protocol):
    """What came: an id of a request an entry, in order; then who finished and how, and who failed and why."""

    @property
    def keys(self) -> Int64Array: ...
    @property
    def token_ids(self) -> Int32Array: ...
    @property
    def logprobs(self) -> NDArray[np.float32]: ...
    @property
    def depths(self) -> Int32Array: ...
    @property
    def finished(self) -> Sequence[tuple[int, str]]: ...
    @property
    def failed(self) -> Sequence[tuple[int, Exception]]: ...


class Batch(Protocol):
    """Completions that run together, step by step."""

    @property
    def running(self) -> int: ...
    def add(self, token_ids: Int32Array, max_new_tokens: int, **settings: Any) -> int: ...
    def cancel(self, key: int) -> bool: ...
    def step(self, seconds: float = 0.0) -> Step: ...
    def put_back(self) -> None: ...
    def close(self) -> None: ...


class Model(Protocol):
    """One loaded model. Not thread-safe: only the thread that made it may call it."""

    @property
    def descriptor(self) -> Mapping[str, Any]: ...
    @property
    def digest(self) -> str: ...
    @property
    def numerics_id(self) -> str: ...
    @property
    def max_seq_len(self) -> int: ...
    @property
    def block_bytes(self) -> int: ...
    @property
    def vram_usage_bytes(self) -> int: ...
    @property
    def counters(self) -> Mapping[str, int]: ...
    def score_tokens(self, token_ids: Int32Array, depth: int | None = None) -> NDArray[np.float32]: ...
    def score(
        self,
        token_ids: Int32Array,
        offsets: Int64Array,
        n_scored: Int32Array,
        *,
        prefixes: Sequence[Any] | None = None,
        depth: int | None = None,
    ) -> Scores: ...
    def prefix(self, token_ids: Int32Array, depth: int | None = None, parent: Any = None) -> Prefix: ...
    def generation(self, max_batch: int | None = None) -> Batch: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """What one replica loads. prefix_budget_bytes: most bytes of prefixes it may hold.

    generation_batch: most completions that run together; None: the engine's own.
    factory: "module:function" with the signature of tinyloop.native.load_model.
    """

    model: str
    factory: str
    threads: int
    prefix_budget_bytes: int
    load_options: Mapping[str, Any]
    generation_batch: int | None = None

    def load(self) -> Model:
        """Load the model on the calling thread. Raises what the engine raises."""
        module, _, function = self.factory.partition(":")
        make = cast("Callable[..., Model]", getattr(import_module(module), function))
        return make(self.model, threads=self.threads, **self.load_options)


def is_a(error: BaseException, name: str) -> bool:
    """Whether an exception has the engine's class of that name: a worker is not tied to one engine."""
    return any(base.__name__ == name for base in type(error).__mro__)
