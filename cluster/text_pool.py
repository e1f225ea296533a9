"""A pool that takes texts: rows in, typed results out, in order. The face of a pool for Python programs.

with open_pool(replicas=2) as pool:
    results = pool.score([{"context": "2 + 2 =", "choices": [" 4", " 5"], "gold": 0}])
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from .completing import Completer, completion_kind
from .completion_plans import LongPrompt
from .completion_results import CompletionResults
from .completion_window import RowCompletion
from .encoding import EmptyContinuation, Encoder
from .errors import InfrastructureError, UsageError
from .named_request import as_decided, refuse_decided
from .pool_backend import enter_pool, read_model
from .rolling import RollingPolicy
from .row_source import COMPLETION_FIELDS, SCORE_FIELDS, RowSource, index_of, mappings_of
from .row_stream import stream_rows
from .rows import RowFailure
from .score_results import ScoreResults
from .scoring import Scorer
from .settings import PoolRequest
from .tasks import RowResult, TaskOptions
from .window import Window

if TYPE_CHECKING:
    from .pool import ReplicaPool

WINDOW_ROWS = 2_048
# Completions take long, and all of a window are in the pool's memory.
PROMPT_WINDOW_ROWS = 512


def open_pool(
    name: str | None = None,
    *,
    model: str | Path | None = None,
    replicas: int | None = None,
    depth: int | None = None,
    max_seq_len: int | None = None,
    kv: str = "fp16",
    numeric: str = "fp16",
    device: Literal["cpu", "cuda"] = "cpu",
    threads: int | None = None,
    add_bos: bool | None = None,
    prefix_token: int | None = None,
    target_delimiter: str = "",
    empty_continuation: EmptyContinuation = "error",
    ray_address: str | None = None,
) -> TextPool:
    """Join the pool of that name, or start one that ends with its `with` block or `close`.

    model: a .tloop file; None: a named pool's own, else the one that ships. replicas, max_seq_len to threads:
    of a pool that is started, refused beside a name. depth: loops where a call names none; None: the model's.
    add_bos to empty_continuation: what is done to text, as `tinyloop score --help` says.
    Raises: UsageError if it cannot be as asked, InfrastructureError if the pool cannot start or be reached.
    """
    path = None if model is None else Path(model)
    request = PoolRequest(path, replicas, max_seq_len, kv, threads, numeric, device, name)
    if name is not None:
        refuse_decided(request)
        request = as_decided(request, ray_address)
    chosen = read_model(
        request,
        depth=depth,
        add_bos=add_bos,
        prefix_token=prefix_token,
        target_delimiter=target_delimiter,
        empty_continuation=empty_continuation,
    )
    return TextPool(enter_pool(chosen, request, ray_address), chosen.encoder, chosen.depth)


@dataclass(frozen=True, slots=True)
class PoolTicket:
    """A named pool and what its clients need, for other processes: nothing is read where it is used."""

    name: str
    digest: str
    encoder: Encoder
    depth: int

    def open(self) -> TextPool:
        """Join the pool. Raises: InfrastructureError if that fails or it holds another model by now."""
        from .fleet import PoolError
        from .pool import ReplicaPool

        try:
            pool = ReplicaPool.connect(self.name)
        except PoolError as error:
            raise InfrastructureError(f"cannot join pool {self.name!r}: {error}") from error
        info, max_rows = pool.info, self.encoder.policy.max_rows
        if (info.digest, info.max_seq_len) != (self.digest, max_rows):
            pool.close()
            raise InfrastructureError(
                f"pool {self.name!r} holds model {info.digest[:12]} with a window of {info.max_seq_len}, "
                f"this is for {self.digest[:12]} with {max_rows}: was the pool started anew?"
            )
        return TextPool(pool, self.encoder, self.depth)


def ticket_for(
    name: str,
    *,
    model: str | Path | None = None,
    depth: int | None = None,
    ray_address: str | None = None,
    **encoding: Any,
) -> PoolTicket:
    """A ticket for a pool that is up; the model file is read here, for its tokenizer. Raises as open_pool."""
    request = as_decided(PoolRequest(None if model is None else Path(model), name=name), ray_address)
    chosen = read_model(request, depth=depth, **encoding)
    return PoolTicket(name, str(chosen.choice.identity["digest"]), chosen.encoder, chosen.depth)


class TextPool:
    """A pool and what turns texts into its ids. Not thread-safe; streams may be read in turn. Use `with`.

    replicas: the pool of ids below, for status, scaling and requests by ids. depth: loops where a call names
    none.
    """

    def __init__(self, replicas: ReplicaPool, encoder: Encoder, depth: int) -> None:
        self.replicas = replicas
        self.encoder = encoder
        self.depth = depth
        self._in_flight: dict[int, Window] = {}
        self._flights: list[Any] = []

    @property
    def descriptor(self) -> dict[str, Any]:
        """What the model's file says of it: loops, vocab_size, eos_ids, chat_template and so on."""
        return dict(self.replicas.info.descriptor)

    def score(
        self,
        rows: RowSource,
        *,
        depth: int | None = None,
        pmi: bool = False,
        token_logprobs: bool = False,
        rolling: RollingPolicy | None = None,
    ) -> ScoreResults:
        """Score rows and wait for all; one result or failure a row, in order.

        rows: mappings with the fields of a JSONL row, a pandas DataFrame or a pyarrow Table, whose nulls are
        absent fields. A row that cannot be scored is a RowFailure in its place.
        Raises: PoolError, UsageError for a depth that is none or rows that cannot be read.
        """
        options = TaskOptions(pmi, token_logprobs, rolling or RollingPolicy())
        outcomes = list(self._outcomes(rows, self._checked(depth), options, WINDOW_ROWS))
        return ScoreResults(outcomes, self._checked(depth), index_of(rows))

    def stream(
        self,
        rows: RowSource,
        *,
        depth: int | None = None,
        pmi: bool = False,
        token_logprobs: bool = False,
        rolling: RollingPolicy | None = None,
        window_rows: int = WINDOW_ROWS,
    ) -> Generator[RowResult | RowFailure, None, None]:
        """As score, one by one and in order, for more rows than memory holds.

        Two windows of window_rows are in memory; nothing more is read while nobody takes results. Leaving
        early drops what is on its way. More rows a window share more prefixes.
        """
        options = TaskOptions(pmi, token_logprobs, rolling or RollingPolicy())
        return self._outcomes(rows, self._checked(depth), options, window_rows)

    def generate(
        self,
        prompts: Iterable[str] | RowSource,
        *,
        seed: int = 0,
        long_prompt: LongPrompt = "truncate",
        chat_template: str = "",
        **settings: Any,
    ) -> CompletionResults:
        """Complete prompts and wait for all; one result or failure a prompt, in order.

        prompts: texts, or rows with prompt, messages or prompt_ids and settings of their own, as mappings or
        a table. settings: those of `tinyloop generate`, of rows that do not say: max_new_tokens, temperature,
        stop and so on. seed: with a row's id, by default its number here, decides what is drawn.
        Raises: PoolError, UsageError for settings that are unknown, out of range or do not fit the model.
        """
        outcomes = self.stream_completions(
            prompts, seed=seed, long_prompt=long_prompt, chat_template=chat_template, **settings
        )
        return CompletionResults(outcomes, index_of(prompts))

    def stream_completions(
        self,
        prompts: Iterable[str] | RowSource,
        *,
        seed: int = 0,
        long_prompt: LongPrompt = "truncate",
        chat_template: str = "",
        window_rows: int = PROMPT_WINDOW_ROWS,
        **settings: Any,
    ) -> Generator[RowCompletion | RowFailure, None, None]:
        """As generate, one by one and in order, with two windows of window_rows in memory."""
        kind = completion_kind(
            self.encoder,
            self.descriptor,
            self.depth,
            settings=settings,
            seed=seed,
            long_prompt=long_prompt,
            chat_template=chat_template,
        )
        completer = Completer(self.replicas, kind, self._flights)
        rows = (
            {"prompt": one} if isinstance(one, str) else one
            for one in mappings_of(prompts, COMPLETION_FIELDS)
        )
        return stream_rows(completer, rows, window_rows=_checked_window(window_rows))

    def close(self) -> None:
        """End a pool that was started, leave one that was joined. Twice is harmless."""
        self.replicas.close()

    def __enter__(self) -> TextPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _outcomes(
        self, rows: RowSource, depth: int, options: TaskOptions, window_rows: int
    ) -> Generator[RowResult | RowFailure, None, None]:
        scorer = Scorer(self.replicas, self.encoder, depth, options, self._in_flight)
        return stream_rows(scorer, mappings_of(rows, SCORE_FIELDS), window_rows=_checked_window(window_rows))

    def _checked(self, depth: int | None) -> int:
        if depth is not None and depth < 1:
            raise UsageError(f"depth is {depth}: give at least 1, or None for {self.depth}")
        return self.depth if depth is None else depth


def _checked_window(window_rows: int) -> int:
    if window_rows < 1:
        raise UsageError(f"window_rows is {window_rows}: give at least 1")
    return window_rows
