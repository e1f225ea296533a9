"""What a job leaves to the kind of its work, scoring or generating: rows to plans, plans to a pool, outcomes
to lines.

The job itself (job.py, running.py) owns windows, journal, order, budget, signals and the final files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from .encoding import Encoder, EncodingPolicy
from .items import ScoringPool
from .progress import PoolFigures
from .prompt_streams import GeneratingPool
from .rows import Fields, Row, RowFailure, Task


class Plan(Protocol):
    """A row that is ready to be sent."""

    @property
    def row(self) -> Row: ...
    @property
    def num_tokens(self) -> int:
        """Ids that are held in memory for it."""


class Sent(Protocol):
    """Plans on their way through a pool."""

    num_tokens: int


class Work(Protocol):
    """A kind of work on a pool that is open. Plans and what was sent are its own: the job hands them on."""

    def plan(self, rows: Sequence[Row]) -> Sequence[Plan | RowFailure]:
        """One plan or failure a row, in order."""

    def submit(self, plans: Sequence[Any]) -> Sent:
        """Send one window. May block while the pool holds too many."""

    def collect(self, timeout_s: float) -> None:
        """Take in what the pool has finished; waits up to timeout_s seconds for something."""

    def take_lines(self, sent: Any) -> list[tuple[int, bytes]]:
        """Rows that left since the last call: number and line, a result's or a failure's."""

    def release(self, sent: Any) -> None:
        """Forget a window whose rows have all left."""

    def figures(self, elapsed_s: float) -> dict[str, Any]:
        """What summary.json says of this run beside rows and the pool's own figures."""

    def close(self) -> None:
        """No window is wanted any more. Twice is harmless."""


class BatchPool(ScoringPool, GeneratingPool, Protocol):
    """A pool that does every kind of work."""


@dataclass(frozen=True, slots=True)
class Backend:
    """What a job runs on.

    identity: what the fingerprint says of the model: digest, tokenizer hash, numerics_id, depth, max_seq_len.
    figures: asked about once a second.
    """

    pool: BatchPool
    encoder: Encoder
    depth: int
    identity: Mapping[str, Any]
    figures: Callable[[], PoolFigures]


OpenBackend = Callable[[], AbstractContextManager[Backend]]


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """The model as far as it is known before a pool is started.

    identity: digest, tokenizer hash, depth, max_seq_len. about: shown in run.json, not compared.
    """

    identity: Mapping[str, Any]
    policy: EncodingPolicy
    about: Mapping[str, Any]


class Kind(Protocol):
    """A kind of work before a pool is open.

    policies: name and sentence of what is done to rows, for run.json. options: a dataclass of what in the
    settings decides a byte of the results, for the fingerprint.
    """

    @property
    def policies(self) -> Mapping[str, str]: ...
    @property
    def options(self) -> Any: ...

    def parse(self, fields: Fields) -> tuple[Task, Fields]:
        """The typed task of a row without its id, and the fields to carry through. Raises RowError."""

    def characters(self, task: Task) -> int:
        """About how much memory a row's text takes."""

    @property
    def error_line(self) -> Callable[[bytes], bytes] | None:
        """A failure's line as it is published; None: as it stands."""

    def begin(self, backend: Backend) -> Work:
        """Work on an open pool."""
