"""Python, Ray Data and the guide on a pool that is up, with the model that ships."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import ray
from harness_tasks import write_tasks
from lm_eval.tasks import TaskManager
from model_pool import ModelPool
from tinyloop.cluster import TextPool, open_pool, registry
from tinyloop.cluster.adapters.ray_data import (
    PoolBatches,
    PoolGenerating,
    PoolProcessorConfig,
    PoolScoring,
    beside,
    build_processor,
)
from tinyloop.cluster.cli import app
from tinyloop.cluster.completion_window import RowCompletion
from tinyloop.cluster.config import PoolConfig
from tinyloop.cluster.errors import InfrastructureError, RowError, UsageError
from tinyloop.cluster.pool import ReplicaPool
from tinyloop.cluster.rows import RowFailure
from tinyloop.cluster.scoring import score_rows
from tinyloop.cluster.tasks import PairResult
from tinyloop.cluster.text_pool import ticket_for
from tinyloop.native import GenerateRequest, Model, load_model
from tinyloop.native.models import default_model_path
from typer.testing import CliRunner

# Ray Data's own: it sets values of its own that it calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

POOL = "shared"
WINDOW = 256
ROOT = Path(__file__).parents[2]
QUESTIONS = [
    {"id": n, "question": f"Ship number {n} is", "answer": f" ship {n + 1}." if n != 5 else ""}
    for n in range(60)
]
FIELDS = [{"context": one["question"], "continuation": one["answer"]} for one in QUESTIONS]


@pytest.fixture(scope="module")
def pool(session: None) -> Iterator[TextPool]:
    config = PoolConfig(model=default_model_path(), replicas=1, threads=1, max_seq_len=WINDOW)
    ReplicaPool.up(config, POOL).close()
    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    with open_pool(POOL, depth=2) as joined:
        yield joined
    registry.reap(POOL)


@pytest.fixture(scope="module")
def alone() -> Iterator[Model]:
    """The same model in this process."""
    with load_model(default_model_path(), max_seq_len=WINDOW, threads=1) as model:
        yield model


@pytest.fixture(scope="module")
def logprobs(pool: TextPool, alone: Model) -> list[float | None]:
    """Of the questions' answers, None where there is nothing to score."""
    results = score_rows(ModelPool(alone), pool.encoder, FIELDS, depth=2)
    return [one.score.logprob if isinstance(one, PairResult) else None for one in results]


# ---- Python --------------------------------------------------------------------------------------


def test_rows_have_the_scores_of_the_model_alone(pool: TextPool, logprobs: list[float | None]) -> None:
    results = pool.score(pd.DataFrame(FIELDS))
    assert results.to_arrow()["logprob"].to_pylist() == logprobs
    assert [failure.error_class for failure in results.failures] == ["empty_continuation"]


def test_prompts_have_the_completions_of_the_model_alone(pool: TextPool, alone: Model) -> None:
    prompts = ["Once upon a time", "The sea is", {"prompt": "A ship", "max_new_tokens": 3}]
    results = pool.generate(prompts, max_new_tokens=12, stop=["e"], depth=1)  # type: ignore[arg-type]
    for prompt, made in zip(prompts, results, strict=True):
        text, most = (prompt, 12) if isinstance(prompt, str) else (str(prompt["prompt"]), 3)
        ids = np.array(pool.encoder.tokenizer.encode(text).ids, dtype=np.int32)
        eos = list(pool.descriptor["eos_ids"])
        (whole,) = alone.generate([GenerateRequest(ids, most, depth=1, stop_ids=eos)])
        expected = pool.encoder.tokenizer.decode(whole.token_ids.tolist())
        assert isinstance(made, RowCompletion)
        assert made.outcomes[0].text == expected.split("e")[0]
    table = results.to_arrow()
    assert table["generated_text"].to_pylist() == results.texts
    assert "stop" in table["finish_reason"].to_pylist()


def test_streams_of_scores_and_completions_may_be_read_in_turn(pool: TextPool) -> None:
    texts = [f"Ship {n}" for n in range(30)]
    scores = pool.stream(({"text": text} for text in texts), window_rows=7)
    some = pool.stream_completions(texts, max_new_tokens=2, window_rows=7)
    others = pool.stream_completions(texts, max_new_tokens=2, window_rows=11)
    for _, one, other in zip(scores, some, others, strict=True):
        assert isinstance(one, RowCompletion)
        assert isinstance(other, RowCompletion)
        assert one.outcomes == other.outcomes
    with pytest.raises(UsageError, match="unknown settings colour"):
        pool.generate(texts, colour="red")
    with pytest.raises(UsageError, match="depth is 0"):
        pool.score([], depth=0)


# ---- Ray Data ------------------------------------------------------------------------------------


def questions(blocks: int = 4) -> Any:
    return ray.data.from_items(QUESTIONS, override_num_blocks=blocks)


def test_a_processor_gives_each_row_the_score_of_the_model_alone(
    pool: TextPool, logprobs: list[float | None]
) -> None:
    config = PoolProcessorConfig(
        POOL, depth=2, work=PoolScoring(on_error="column"), batch_size=8, concurrency=2
    )
    process = build_processor(
        config,
        preprocess=lambda row: {"context": row["question"], "continuation": row["answer"]},
        postprocess=lambda row: {name: row[name] for name in ("id", "question", "logprob", "error_class")},
    )
    rows = process(questions()).take_all()
    assert [row["id"] for row in rows] == list(range(60))
    assert [row["question"] for row in rows] == [one["question"] for one in QUESTIONS]
    assert [row["logprob"] for row in rows] == logprobs
    assert [row["id"] for row in rows if row["error_class"] is not None] == [5]


def test_a_batch_is_scored_or_its_error_raised(pool: TextPool, logprobs: list[float | None]) -> None:
    ticket = ticket_for(POOL, depth=2)
    table = pa.Table.from_pylist(FIELDS)
    scored = PoolBatches(ticket, PoolScoring(on_error="column", prefix="scored_"))(table.to_pandas())
    assert scored["scored_logprob"].to_pylist() == logprobs
    assert scored.column_names[:2] == table.column_names
    with pytest.raises(RowError, match=r"1 of 60 rows failed; row row:5: continuation is empty"):
        PoolBatches(ticket)(table)
    with pytest.raises(UsageError, match="a batch is a dict: give map_batches batch_format='pyarrow'"):
        PoolBatches(ticket)({"context": ["a"]})
    with pytest.raises(UsageError, match="on_error is 'ignore': give 'raise' or 'column'"):
        PoolBatches(ticket, PoolScoring(on_error="ignore"))  # type: ignore[arg-type]


def test_prompts_of_a_dataset_are_completed(pool: TextPool) -> None:
    ticket = ticket_for(POOL, depth=1)
    drawn = PoolGenerating(settings={"max_new_tokens": 6, "temperature": 1.0})
    table = pa.table({"id": ["a", "b", "c", "d"], "prompt": ["The sea"] * 4})
    whole = PoolBatches(ticket, drawn)(table)
    assert len(set(whole["generated_text"].to_pylist())) > 1
    # Of another batch the same rows have the same texts.
    part = PoolBatches(ticket, drawn)(table.slice(2))
    assert part["generated_text"].to_pylist() == whole["generated_text"].to_pylist()[2:]
    with pytest.raises(UsageError, match="no id, custom_id or seed: add one"):
        PoolBatches(ticket, drawn)(table.select(["prompt"]))


def test_columns_of_rows_and_results_are_never_mixed_up() -> None:
    with pytest.raises(UsageError, match=r"named as results are: logprob: give a prefix"):
        beside(pa.table({"logprob": [1.0]}), pa.table({"logprob": [2.0]}), "")


def test_a_ticket_is_for_one_model(pool: TextPool) -> None:
    ticket = ticket_for(POOL)
    other = type(ticket)(ticket.name, "0" * 64, ticket.encoder, ticket.depth)
    with pytest.raises(InfrastructureError, match=r"this is for 000000000000.*was the pool started anew"):
        other.open()
    with pytest.raises(UsageError, match="no pool 'nowhere'"):
        ticket_for("nowhere")


# ---- the guide -----------------------------------------------------------------------------------


def test_every_example_of_the_guide_runs(
    pool: TextPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    guide = (ROOT / "cluster" / "ADAPTERS.md").read_text()
    examples = re.findall(r"^```python\n(.*?)^```", guide, re.MULTILINE | re.DOTALL)
    assert len(examples) == 4
    namespace: dict[str, Any] = {}
    for example in examples:
        exec(compile(example, "ADAPTERS.md", "exec"), namespace)
    printed = capsys.readouterr().out
    assert "continuation is empty" in printed
    assert isinstance(namespace["results"][0], object)
    assert not [one for one in namespace["results"] if isinstance(one, RowFailure)]

    (commands,) = re.findall(r"^```sh\n(.*?)^```", guide, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["tinyloop"])
    monkeypatch.setattr("lm_eval.tasks.TaskManager", partial(TaskManager, include_defaults=False))
    Path("tasks").mkdir()
    written = write_tasks(Path("tasks")) / "tiny_choices.yaml"
    written.write_text(written.read_text().replace("task: tiny_choices", "task: my_task"))
    for command in commands.splitlines():
        program, *arguments = command.split()
        assert program == "tinyloop"
        result = CliRunner().invoke(app, arguments, catch_exceptions=False)
        assert "|my_task|" in result.output
