"""The command line: options reach the job, errors reach the shell as exit codes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest
from tinyloop.cluster import cli, pool_backend
from tinyloop.cluster.closing import closing_lines
from tinyloop.cluster.errors import EXIT_CODE_MEANINGS, EXIT_CODE_NOTE
from tinyloop.cluster.kinds import Backend, ModelChoice
from tinyloop.cluster.policies import POLICIES
from tinyloop.cluster.pool_backend import ChosenModel
from tinyloop.cluster.progress import (
    LINE_INTERVAL_S,
    LineDisplay,
    PoolFigures,
    Progress,
    Snapshot,
    clock,
    describe,
)
from tinyloop.cluster.settings import ErrorBudget, PoolRequest, ScoreSettings, UsageError, parse_window
from tinyloop.cluster.summary import GroupTally
from tinyloop.cluster.whole_option import Real, Whole
from tinyloop.native.format import read_header
from tinyloop.native.models import default_model_path

from .fake_pool import FakePool
from .score_driver import MAX_ROWS, make_encoder


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> FakePool:
    """The command line over the fake pool and the tiny tokenizer."""
    fake = FakePool()

    def choose(settings: ScoreSettings, request: PoolRequest) -> ChosenModel:
        encoder = make_encoder(settings)
        depth = settings.depth or 4
        choice = ModelChoice({"digest": "fake", "depth": depth}, encoder.policy, {"request": str(request)})
        return ChosenModel(Path("fake.tloop"), depth, MAX_ROWS, encoder, choice, ("a warning",))

    def open_fake(chosen: ChosenModel, request: PoolRequest) -> AbstractContextManager[Backend]:
        @contextmanager
        def opened() -> Iterator[Backend]:
            identity = {**chosen.choice.identity, "numerics_id": "fake"}
            yield Backend(
                fake, chosen.encoder, chosen.depth, identity, lambda: PoolFigures(2, 2, 0.251, 0.254)
            )

        return opened()

    monkeypatch.setattr(pool_backend, "choose_model", choose)
    monkeypatch.setattr(pool_backend, "open_pool", open_fake)
    return fake


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["tinyloop", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    lines = [
        {"context": "hello", "choices": [" world", " x"], "gold": 0},
        {"context": "hello", "continuation": " world"},
        {"text": "hello world"},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.usefixtures("pool")
def test_score_prints_accuracy_speed_hit_rate_and_place(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "score", "-i", str(rows), "-o", str(tmp_path / "out")) == 0
    printed = capsys.readouterr()
    assert re.search(r"rows.jsonl \[choices\]: acc [01]\.0000", printed.out)
    assert "rows.jsonl [text]" in printed.out
    assert "25.1 % of prompt tokens (ideal 25.4 %)" in printed.out
    assert "rows/s" in printed.out
    assert str(tmp_path / "out" / "results.jsonl") in printed.out
    assert "a warning" in printed.err


@pytest.mark.usefixtures("pool")
def test_options_decide_what_is_written(rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--pmi", "--logprobs", "--depth", "2", "--limit", "2", "--target-delimiter", "_"]
    output = tmp_path / "out"
    assert run(monkeypatch, "score", "-i", str(rows), "-o", str(output), *options) == 0
    choices, continuation = (
        json.loads(line) for line in (output / "results.jsonl").read_bytes().splitlines()
    )
    assert choices["depth"] == 2
    assert "acc_pmi" in choices["pred"]
    assert len(continuation["token_logprobs"]) == continuation["n_continuation"] > 1
    fingerprint = json.loads((output / "run.json").read_bytes())["fingerprint"]
    assert (fingerprint["encoding.target_delimiter"], fingerprint["read.limit"]) == ("_", 2)


@pytest.mark.usefixtures("pool")
def test_each_way_to_end_has_its_exit_code(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    score = ["score", "-i", str(rows), "-o"]
    assert run(monkeypatch, *score, str(tmp_path / "a")) == 0
    assert run(monkeypatch, *score, str(tmp_path / "a")) == 2
    assert "--resume" in capsys.readouterr().err
    assert run(monkeypatch, *score, str(tmp_path / "a"), "--resume") == 0
    assert run(monkeypatch, *score, str(tmp_path / "a"), "--resume", "--depth", "1") == 2
    assert "model.depth" in capsys.readouterr().err
    with rows.open("a") as file:
        file.write("{\n")
    assert run(monkeypatch, *score, str(tmp_path / "b")) == 3
    assert run(monkeypatch, *score, str(tmp_path / "c"), "--fail-fast") == 4
    assert run(monkeypatch, *score, str(tmp_path / "d"), "--max-errors", "0") == 4


@pytest.mark.usefixtures("pool")
def test_a_defect_is_shown_and_not_taken_for_a_usage_error(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(pool_backend, "choose_model", broken)
    assert run(monkeypatch, "score", "-i", str(rows), "-o", str(tmp_path / "out")) == 5
    assert "a defect" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["score"],
        ["score", "-i", "nothing.jsonl", "-o", "out"],
        ["score", "-i", "rows.jsonl", "-o", "out", "--no-such-flag"],
        ["score", "-i", "rows.jsonl", "-o", "out", "--depth", "0"],
        ["score", "-i", "rows.jsonl", "-o", "out", "--max-errors", "many"],
        ["score", "-i", "rows.jsonl", "-o", "out", "--window", "0"],
        ["score", "-i", "rows.jsonl", "-o", "out", "--kv", "int1"],
        ["score", "-i", "rows.jsonl", "-o", "out", "--numeric", "fp32"],
        ["score", "-i", "rows.jsonl", "-o", "out", "--device", "tpu"],
        ["score", "-i", "rows.jsonl", "-o", "out", "--resume", "--overwrite"],
        ["score", "-i", "rows.jsonl", "-o", "out", "--replicas", "5000"],
        ["score", "-i", "rows.jsonl", "-o", "rows.jsonl"],
        ["no-such-command"],
    ],
)
@pytest.mark.usefixtures("pool")
def test_usage_errors_exit_with_2_and_leave_nothing(
    arguments: list[str], rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(rows.parent)
    assert run(monkeypatch, *arguments) == 2
    assert [path.name for path in rows.parent.iterdir() if path.name != "out"] == ["rows.jsonl"]
    assert not list(rows.parent.glob("out/*"))


def test_a_file_that_is_no_model_is_a_usage_error(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["score", "-i", str(rows), "-o", str(tmp_path / "out"), "--model", str(rows)]
    assert run(monkeypatch, *arguments) == 2
    assert "cannot use model" in capsys.readouterr().err


def test_help_names_every_policy_and_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "score", "--help") == 0
    printed = capsys.readouterr().out
    for text in (*POLICIES.values(), *EXIT_CODE_MEANINGS.values()):
        assert text in printed
    assert EXIT_CODE_NOTE in " ".join(printed.split())
    assert "1024" in printed


def test_a_perplexity_beyond_the_range_of_a_float_is_left_out() -> None:
    tally = GroupTally()
    tally.add({"task": "text", "n_tokens": 1, "n_bytes": 1_000, "n_words": 1, "logprob": -800.0})
    group = {"file": "a", "task": "text", **tally.report("text")}
    assert group["token_perplexity"] is None
    summary = {"groups": [group], "rows": 1, "results": 1, "errors": 0, "rows_resumed": 0, "warnings": []}
    summary |= {"rows_per_s": None, "elapsed_s": 1.0, "pool": {"hit_rate": None}}
    assert next(closing_lines(summary, Path())) == "a [text]: 1 row"


@pytest.mark.usefixtures("pool")
def test_one_is_not_counted_as_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        '{"context": "a", "choices": ["b", "b"], "gold": 0}\n',
        '{"text": "a"}\n',
        '{"text": ""}\n',
        '{"context": "a", "continuation": "b"}\n',
        "{\n",
    ]
    for i, line in enumerate(lines):
        rows = tmp_path / f"{i}.jsonl"
        rows.write_text(line)
        run(monkeypatch, "score", "-i", str(rows), "-o", str(tmp_path / f"out-{i}"))
        run(monkeypatch, "score", "-i", str(rows), "-o", str(tmp_path / f"stop-{i}"), "--fail-fast")
    printed = capsys.readouterr()
    assert not re.search(r"(?<![\d.,])1 (rows|errors|parts|documents)\b(?!/s)", printed.out + printed.err)
    assert "1 row: 0 scored, 1 error" in printed.out
    assert "1 row failed" in printed.err


def test_version_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--version") == 0
    assert re.fullmatch(r"tinyloop \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_help_does_not_wait_for_slow_imports() -> None:
    slow = {"ray", "torch", "tokenizers"}
    code = f"import sys; import tinyloop.cluster.cli; print(sorted({slow} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("text", "rows", "allowed"),
    [("20", 1_000, 20), ("0", 1_000, 0), ("0.01", 1_000, 10), ("1%", 1_000, 10), (None, 1_000, 1_000)],
)
def test_max_errors_is_a_count_or_a_share(text: str | None, rows: int, allowed: int) -> None:
    assert ErrorBudget.parse(text, fail_fast=False).allowed(rows) == allowed


@pytest.mark.parametrize("text", ["-1", "x", "1.5", "200%", ""])
def test_max_errors_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        ErrorBudget.parse(text, fail_fast=False)


FOREIGN = ("٣", "\uff13", "1_0", " 3", "3\n")  # int() reads every one


IN_TEXT = {"window", "max_errors", "budget", "loop_layers"}  # numbers with something beside them


def number_options() -> Iterator[tuple[str, str, Any]]:
    """Command, option and what Typer knows of it, for every option that takes a number."""
    for command in cli.app.registered_commands:
        assert command.callback is not None
        for name, kind in get_type_hints(command.callback, include_extras=True).items():
            declared, *how = get_args(kind) if get_origin(kind) is Annotated else (kind,)
            if name in IN_TEXT or {int, float} & {declared, *get_args(declared)}:
                yield command.callback.__name__, name, how[0]


def test_every_number_of_the_command_line_has_the_one_reader() -> None:
    found = list(number_options())
    assert {name for _, name, _ in found} > IN_TEXT
    assert len(found) > 14
    for command, name, how in found:
        assert name in IN_TEXT or isinstance(how.parser, Whole | Real), f"{command} {name}"


def test_numbers_out_of_range_are_told_the_range(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    score = ["score", "-i", "rows.jsonl", "-o", "out"]
    for option, value, named in (
        ("--depth", "0", "0 is not in the range x>=1"),
        ("--replicas", "1025", "1025 is not in the range 1<=x<=1024"),
        ("--limit", "-1", "-1 is not in the range x>=0"),
        ("--limit", "9" * 30, "30 digits"),
        ("--depth", "x", "'x' is no whole number"),
    ):
        assert run(monkeypatch, *score, option, value) == 2
        assert named in (error := capsys.readouterr().err)
        assert option in error


@pytest.mark.parametrize("text", FOREIGN)
def test_numbers_in_other_digits_are_usage_errors(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {
        "score": ["-i", "rows.jsonl", "-o", str(tmp_path / "out")],
        "generate": ["-i", "rows.jsonl", "-o", str(tmp_path / "out")],
        "convert": [str(tmp_path), str(tmp_path / "m.tloop")],
        "plan": [],
        "scale": [],
        "top": ["--once"],
        "compare": [str(tmp_path), str(tmp_path)],
        "serve": [],
    }
    for command, name, _ in number_options():
        option = f"--{name.replace('_', '-')}"
        value = f"{text}:4" if option == "--loop-layers" else text
        extra = ["--loops", "3"] if option == "--loop-layers" else []
        assert run(monkeypatch, command, *before[command], option, value, *extra) == 2, option
        assert "Traceback" not in capsys.readouterr().err


def test_window_is_a_number_or_all() -> None:
    assert (parse_window("all"), parse_window("7")) == (None, 7)


class Times:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Shown:
    """A display that remembers."""

    def __init__(self) -> None:
        self.snapshots: list[Snapshot] = []

    def show(self, snapshot: Snapshot) -> None:
        self.snapshots.append(snapshot)

    def close(self) -> None:
        pass


def test_progress_counts_the_rate_of_this_run_alone() -> None:
    times, shown = Times(), Shown()
    files: list[Snapshot] = []
    progress = Progress(1_000, shown, files.append, lambda: PoolFigures(2, 1, 0.5), times)
    progress.begin_at(400, 3)
    times.now += 10
    progress.advance(200, 1)
    snapshot = progress.tell()
    assert (snapshot.rows_done, snapshot.errors, snapshot.rate_per_s, snapshot.eta_s) == (600, 4, 20.0, 20.0)
    assert describe(snapshot) == (
        "600/1,000 rows (60 %), 20.0 rows/s, ETA 0:20, hit rate 50.0 %, replicas 1/2, errors 4"
    )
    times.now += 30
    assert progress.tell().idle_s == 30
    assert files[-1].rows_done == 600
    progress.tell()
    assert len(files) == 2


def test_a_plain_line_is_printed_every_half_minute(capsys: pytest.CaptureFixture[str]) -> None:
    times = Times()
    display = LineDisplay(sys.stdout, times)
    snapshot = Snapshot("running", 1, 2, 0, 1.0, 1.0, 1.0, 0.0, PoolFigures())
    for _ in range(100):
        times.now += LINE_INTERVAL_S / 10
        display.show(snapshot)
    assert len(capsys.readouterr().out.splitlines()) == 10


@pytest.mark.parametrize(("seconds", "text"), [(None, "-"), (5, "0:05"), (65.4, "1:05"), (3_661, "1:01:01")])
def test_clock_reads_as_minutes_and_hours(seconds: float | None, text: str) -> None:
    assert clock(seconds) == text


def test_inspect_describes_the_model_that_ships(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "inspect") == 0
    printed = capsys.readouterr().out
    assert read_header(default_model_path()).digest in printed


def test_plan_counts_the_model_that_ships_in_text_and_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--budget", "500MB", "--kv", "h_int8", "--prefix-tokens", "512", "--depth", "2"]
    assert run(monkeypatch, "plan", *options, "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert [row["mode"] for row in record["modes"]] == ["fp16", "int8", "h_fp16", "h_int8", "h_int4"]
    # 6 layers x 2 loops, 512 wide: codes, and an FP16 scale for each 128.
    assert record["modes"][3]["token_bytes"] == 12 * (512 + 4 * 2)
    assert run(monkeypatch, "plan", *options) == 0
    assert f"{record['model_bytes']:,}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--budget", "12x"], "'12x' as bytes"),
        (["--budget", str(2**63)], "more than 9,223,372,036,854,775,807 bytes"),
        (["--max-seq-len", "5000"], "1..2048"),
        (["--prefill-chunk", "4000"], "prefill_chunk=4000"),
        (["--prefix-tokens", "2048"], "1..2047"),
        (["--depth", "9999"], "1..4096"),
    ],
)
def test_plan_names_what_cannot_be_planned(
    options: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "plan", *options) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [["inspect", "rows.jsonl"], ["plan", "rows.jsonl"], ["convert", "no-such-folder", "new.tloop"]],
)
def test_what_is_no_model_is_refused_by_name(
    command: list[str], rows: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(rows.parent)
    assert run(monkeypatch, *command) == 2
    assert command[1] in capsys.readouterr().err
    assert not (rows.parent / "new.tloop").exists()


@pytest.mark.parametrize(
    "options",
    [
        ["--loops", "3"],
        ["--loop-layers", "1:2"],
        ["--loop-layers", "1", "--loops", "3"],
        ["--loop-layers", "a:2", "--loops", "3"],
        ["--loop-layers", "1:-2", "--loops", "3"],
    ],
)
def test_a_layer_range_needs_both_its_options(
    options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "convert", "no-such-folder", "new.tloop", *options) == 2
    assert "--loop-layers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("layers", "wrong"),
    [
        ("-1:3", "'-1' is no layer number"),
        ("+1:3", "'+1' is no layer number"),
        ("a:b", "'a' is no layer number"),
        ("\u0661:\u0663", "'\u0661' is no layer number"),
        ("1: 3", "' 3' is no layer number"),
        ("1:2:3", "it has 2 colons"),
        ("3", "it has 0 colons"),
        (":3", "no layer number before the colon"),
        ("1:", "no layer number after the colon"),
        (f"1:{'9' * 5000}", "after the colon has 5000 digits"),
    ],
)
def test_a_layer_range_that_cannot_be_read_is_explained(
    layers: str, wrong: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [f"--loop-layers={layers}", "--loops", "3"]
    assert run(monkeypatch, "convert", "no-such-folder", "new.tloop", *options) == 2
    printed = capsys.readouterr().err
    assert f"--loop-layers {layers!r}: " in printed
    assert wrong in printed
    assert "missing" not in printed


def test_a_destination_without_a_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    destination = tmp_path / "none" / "new.tloop"
    assert run(monkeypatch, "convert", str(tmp_path), str(destination)) == 2
    printed = capsys.readouterr().err
    assert f"write {destination}: the folder {destination.parent} does not exist" in printed


@pytest.mark.timeout(20)
@pytest.mark.parametrize("command", ["plan", "inspect"])
def test_what_would_be_waited_for_is_refused(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path, kind in ((tmp_path / "fifo", "a FIFO"), (Path("/dev/zero"), "a device")):
        assert run(monkeypatch, command, str(path)) == 2
        assert f"'{path}' is {kind}, not a regular file" in capsys.readouterr().err
