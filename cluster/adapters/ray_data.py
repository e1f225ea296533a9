"""Ray Data: rows of a dataset scored or completed by a pool that is up.

Each Data worker is one more client of the pool, which holds the model; a worker has the tokenizer alone. A
client sends a batch at a time and waits while the pool is full, and clients share the pool equally.

A task that Data runs again is one more request: a batch's results are those of its rows, whenever and however
often they are computed, and what a worker that died had on its way is dropped by the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pyarrow
from ray.data import ActorPoolStrategy, Dataset

from ..completion_results import CompletionResults
from ..errors import UsageError
from ..rolling import RollingPolicy
from ..row_source import index_of
from ..rows import RowFailure
from ..score_results import ScoreResults
from ..text_pool import PoolTicket, TextPool, ticket_for

OnError = Literal["raise", "column"]
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PoolScoring:
    """Score each row.

    on_error: "raise" ends the task at the first row that cannot be scored; "column" says why in the columns
    error and error_class, which are null in every other row. prefix: before each name of a result's column.
    """

    on_error: OnError = "raise"
    prefix: str = ""
    pmi: bool = False
    token_logprobs: bool = False
    rolling: RollingPolicy = field(default_factory=RollingPolicy)


@dataclass(frozen=True, slots=True)
class PoolGenerating:
    """Complete each row's prompt. settings: as TextPool.generate's; on_error, prefix: as PoolScoring's."""

    on_error: OnError = "raise"
    prefix: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    chat_template: str = ""


class PoolBatches:
    """For Dataset.map_batches: adds the columns of `result_schema` or `completion_schema` to each batch.

    dataset.map_batches(PoolBatches, fn_constructor_args=["shared"], batch_format="pyarrow", concurrency=2)
    """

    def __init__(self, pool: str | PoolTicket, work: PoolScoring | PoolGenerating | None = None) -> None:
        """pool: its name; or a ticket, with which the worker's machine needs no copy of the model file.

        Raises: UsageError, InfrastructureError as open_pool.
        """
        self._work = work or PoolScoring()
        if self._work.on_error not in ("raise", "column"):
            raise UsageError(f"on_error is {self._work.on_error!r}: give 'raise' or 'column'")
        ticket = ticket_for(pool) if isinstance(pool, str) else pool
        self._pool: TextPool = ticket.open()

    def __call__(self, batch: Any) -> pyarrow.Table:
        """batch: pyarrow or pandas, with the fields of a row as columns. Rows and their order are kept.

        Raises: RowError for a row's own fault where errors are raised; PoolError, UsageError.
        """
        if index_of(batch) is not None:
            batch = pyarrow.Table.from_pandas(batch, preserve_index=False)
        if not isinstance(batch, pyarrow.Table):
            raise UsageError(f"a batch is a {type(batch).__name__}: give map_batches batch_format='pyarrow'")
        results = self._results(batch)
        if self._work.on_error == "raise":
            results.raise_failures()
        return beside(batch, results.table(), self._work.prefix)

    def _results(self, batch: pyarrow.Table) -> ScoreResults | CompletionResults:
        work = self._work
        if isinstance(work, PoolScoring):
            return self._pool.score(
                batch, pmi=work.pmi, token_logprobs=work.token_logprobs, rolling=work.rolling
            )
        made = self._pool.generate(
            batch, seed=work.seed, chat_template=work.chat_template, **dict(work.settings)
        )
        _refuse_numbered(made, batch.column_names)
        return made


def _refuse_numbered(completions: CompletionResults, columns: list[str]) -> None:
    """Raises: UsageError where a row's number within its batch would have decided what was drawn."""
    if {"id", "custom_id", "seed"} & set(columns):
        return
    for one in completions:
        if not isinstance(one, RowFailure) and any(request.temperature > 0 for request in one.plan.requests):
            raise UsageError(
                "rows are drawn and have no id, custom_id or seed: add one, of which seeds are made"
            )


def beside(rows: pyarrow.Table, results: pyarrow.Table, prefix: str) -> pyarrow.Table:
    """Rows and results as one table. Raises: UsageError if a column of each has the same name."""
    names = [prefix + name for name in results.column_names]
    if twice := sorted(set(names) & set(rows.column_names)):
        raise UsageError(f"the rows have columns named as results are: {', '.join(twice)}: give a prefix")
    for name, column in zip(names, results.columns, strict=True):
        rows = rows.append_column(name, column)
    return rows


@dataclass(frozen=True, slots=True)
class PoolProcessorConfig:
    """A processor on a pool that is up.

    model: a copy of the pool's model file on this machine, the only one where it is read; None: the path that
    the pool was started with. depth, encoding: as open_pool's. concurrency: clients of the pool, or their
    least and greatest number. num_cpus: that Ray sets aside for each; a client mostly waits.
    """

    pool: str
    model: str | Path | None = None
    depth: int | None = None
    encoding: Mapping[str, Any] = field(default_factory=dict)
    work: PoolScoring | PoolGenerating = field(default_factory=PoolScoring)
    batch_size: int = 256
    concurrency: int | tuple[int, int] = 1
    num_cpus: float = 0.0


def build_processor(
    config: PoolProcessorConfig,
    preprocess: Callable[[Row], Row] | None = None,
    postprocess: Callable[[Row], Row] | None = None,
) -> Callable[[Dataset], Dataset]:
    """A function from dataset to dataset, in the style of ray.data.llm; nothing runs until that is consumed.

    preprocess: a row to the fields that are scored; the row's other columns are kept. postprocess: a row with
    results to the row that comes out.
    Raises: UsageError, InfrastructureError if there is no such pool or the settings do not fit it.
    """
    ticket = ticket_for(config.pool, model=config.model, depth=config.depth, **config.encoding)
    least, most = config.concurrency if isinstance(config.concurrency, tuple) else (config.concurrency,) * 2

    def process(dataset: Dataset) -> Dataset:
        if preprocess is not None:
            dataset = dataset.map(lambda row: {**row, **preprocess(row)})
        dataset = dataset.map_batches(
            PoolBatches,
            fn_constructor_args=[ticket, config.work],
            batch_format="pyarrow",
            batch_size=config.batch_size,
            compute=ActorPoolStrategy(min_size=least, max_size=most),
            num_cpus=config.num_cpus,
        )
        return dataset if postprocess is None else dataset.map(postprocess)

    return process
