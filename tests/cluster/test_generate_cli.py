"""The command line of generation: options reach the job, what fits no row or model is refused at once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from tinyloop.cluster import pool_backend
from tinyloop.cluster.completion_policies import POLICIES
from tinyloop.cluster.errors import EXIT_CODE_MEANINGS
from tinyloop.cluster.kinds import Backend, ModelChoice
from tinyloop.cluster.pool_backend import ChosenModel
from tinyloop.cluster.progress import PoolFigures
from tinyloop.cluster.settings import JobSettings, PoolRequest

from .fake_generator import FakeGenerator
from .generate_driver import DEPTH, MAX_ROWS, VOCAB
from .score_driver import make_encoder
from .test_cli import run
from .test_generate_job import TEMPLATE, oracle
from .tiny_tokenizer import tiny_descriptor, tiny_tokenizer


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> FakeGenerator:
    """The command line over the fake generator and the tiny tokenizer."""
    fake = FakeGenerator(VOCAB)

    def choose(settings: JobSettings, request: PoolRequest) -> ChosenModel:
        encoder = make_encoder()
        depth = settings.depth or DEPTH
        identity = {"digest": "f" * 64, "depth": depth}
        choice = ModelChoice(identity, encoder.policy, {"model": {"name": "tiny"}})
        descriptor = tiny_descriptor(tiny_tokenizer(), exit_gate=True)
        return ChosenModel(Path("fake.tloop"), depth, MAX_ROWS, encoder, choice, (), descriptor)

    def open_fake(chosen: ChosenModel, request: PoolRequest) -> AbstractContextManager[Backend]:
        @contextmanager
        def opened() -> Iterator[Backend]:
            identity = {**chosen.choice.identity, "numerics_id": "fake"}
            yield Backend(fake, chosen.encoder, chosen.depth, identity, lambda: PoolFigures(1, 1))

        return opened()

    monkeypatch.setattr(pool_backend, "choose_model", choose)
    monkeypatch.setattr(pool_backend, "open_pool", open_fake)
    return fake


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    chat = {"id": "chat", "messages": [{"role": "user", "content": "hello"}]}
    path.write_text(json.dumps({"id": "text", "prompt": "hello"}) + "\n" + json.dumps(chat) + "\n")
    return path


def test_options_reach_the_job_and_the_end_is_told(
    pool: FakeGenerator,
    rows: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text(TEMPLATE)
    options = (
        "--max-new-tokens 5 --temperature 0.5 --top-k 7 --top-p 0.9 --min-p 0.1 --repetition-penalty 1.5 "
        f"--stop zz --stop yy --stop-id 9 --stop-id 8 --seed 4 --exit-threshold 0.25 --min-depth 2 --n 2 "
        f"--depth 2 --logprobs --chat-template {template}"
    ).split()
    output = tmp_path / "out"
    assert run(monkeypatch, "generate", "-i", str(rows), "-o", str(output), *options) == 0
    lines = [json.loads(line) for line in (output / "results.jsonl").read_text().splitlines()]
    row = {
        "prompt": "hello",
        "max_new_tokens": 5,
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.5,
        "stop": ["zz", "yy"],
        "stop_ids": [9, 8],
        "exit_threshold": 0.25,
        "min_depth": 2,
        "depth": 2,
    }
    assert [len(line["completions"]) for line in lines] == [2, 2]
    for completion in lines[0]["completions"]:
        assert completion["token_ids"] == oracle(row, completion["seed"])["token_ids"]
    printed = capsys.readouterr().out
    assert "2 rows: 2 completed, 0 errors" in printed
    assert "generated tokens/s" in printed
    assert "rows.jsonl [completion]" in printed
    record = json.loads((output / "run.json").read_text())
    assert {name: text.split(" [here: ")[0] for name, text in record["policies"].items()} == POLICIES
    assert record["fingerprint"]["task.seed"] == 4


def test_openai_style_calls_the_model_by_its_name(
    pool: FakeGenerator, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["-i", str(rows), "-o", str(tmp_path / "out"), "--max-new-tokens", "5"]
    assert run(monkeypatch, "generate", *arguments, "--result-style", "openai") == 3
    line = json.loads((tmp_path / "out" / "results.jsonl").read_text())
    assert (line["custom_id"], line["response"]["body"]["model"]) == ("text", "tiny")
    error = json.loads((tmp_path / "out" / "errors.jsonl").read_text())
    assert (error["custom_id"], error["error"]["code"]) == ("chat", "no_chat_template")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--temperature", "nan"], "is no number"),
        (["--top-p", "0"], "top_p is 0.0"),
        (["--stop", ""], "holds an empty text"),
        (["--max-new-tokens", str(MAX_ROWS)], "no prompt fits"),
        (["--min-depth", "9"], "min_depth is 9"),
        (["--chat-template", "missing.jinja"], "missing.jinja"),
        (["--n", "1000"], "n is 1000"),
        (["--stop-id", "100000"], "token id 100000"),
    ],
)
def test_what_fits_no_row_is_refused_before_the_start(
    pool: FakeGenerator,
    rows: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    words: str,
) -> None:
    arguments = ["-i", str(rows), "-o", str(tmp_path / "out"), "--max-new-tokens", "5", *options]
    assert run(monkeypatch, "generate", *arguments) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_help_states_every_policy_and_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert run(monkeypatch, "generate", "--help") == 0
    words = " ".join(capsys.readouterr().out.split())
    for name, text in POLICIES.items():
        assert f"{name}: {text}" in words
    for text in EXIT_CODE_MEANINGS.values():
        assert text in words
