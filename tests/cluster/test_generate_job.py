"""The generation job over a fake generator: rows, stops, seeds, lengths, order, errors, kills."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinyloop.cluster.completion_task import CompletionSettings
from tinyloop.cluster.errors import (
    ErrorBudgetExceeded,
    ExitCode,
    InfrastructureError,
    Interrupted,
    UsageError,
)
from tinyloop.cluster.generate_items import Prompt
from tinyloop.cluster.generate_settings import GenerateSettings
from tinyloop.cluster.settings import ErrorBudget

from .fake_generator import FakeGenerator, whole_completion
from .generate_driver import DEPTH, MAX_ROWS, VOCAB, generate, in_child
from .test_job import outputs
from .tiny_tokenizer import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
EOS_ID = 1
NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "exit_threshold", "min_depth")
TEMPLATE = "{% for m in messages %}<bos>{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


def asked(**changes: Any) -> CompletionSettings:
    """What the command line asks for: few tokens, as the fake model's window is small."""
    return CompletionSettings(**{"max_new_tokens": 8} | changes)


def settings(tmp_path: Path, rows: list[Any], output: str = "out", **changes: Any) -> GenerateSettings:
    path = tmp_path / "rows.jsonl"
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    changes = {"defaults": asked()} | changes
    return GenerateSettings(inputs=(str(path),), output=tmp_path / output, **changes)


def results(tmp_path: Path, output: str = "out") -> list[dict[str, Any]]:
    return [json.loads(line) for line in outputs(tmp_path / output)[0].splitlines()]


def errors(tmp_path: Path, output: str = "out") -> dict[str, tuple[str, str]]:
    lines = [json.loads(line) for line in outputs(tmp_path / output)[1].splitlines()]
    return {line["id"]: (line["class"], line["message"]) for line in lines}


def oracle(row: dict[str, Any], seed: int = 0, ids: list[int] | None = None) -> dict[str, Any]:
    """A row's completion by the documented rules: the whole completion, decoded at once, cut by str.find."""
    if ids is None:
        ids = TOKENIZER.encode(row["prompt"], add_special_tokens=False).ids
    stops = row.get("stop", [])
    stops = [stops] if isinstance(stops, str) else stops
    request = Prompt(
        token_ids=np.array(ids, dtype=np.int32),
        max_new_tokens=row.get("max_new_tokens", 8),
        depth=row.get("depth", DEPTH),
        stop_ids=(*row.get("stop_ids", ()), EOS_ID),
        seed=seed,
        **{name: row[name] for name in NAMES if name in row},
    )
    found, logprobs, depths, reason = whole_completion(request, VOCAB)
    last = found[-1] if reason == "stop" else None
    text = TOKENIZER.decode(found if last is None else found[:-1])
    if reason == "stop":
        reason = "eos" if last == EOS_ID else "stop"
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    if places:
        text, reason = text[: min(places)], "stop"
        counts = range(1, len(found) + 1)
        count = next(
            count
            for count in counts
            if any(TOKENIZER.decode(found[:count]).startswith(stop, len(text)) for stop in stops)
        )
        found, logprobs, depths = found[:count], logprobs[:count], depths[:count]
    return {
        "text": text,
        "finish_reason": reason,
        "n_tokens": len(found),
        "depth_sum": sum(depths),
        "depth_mean": sum(depths) / len(found),
        "token_ids": found,
        "token_logprobs": logprobs,
        "token_depths": depths,
    }


def make_rows(n: int, seed: int = 1) -> list[dict[str, Any]]:
    """Rows of all settings; the texts of a fake completion are single bytes and a few words."""
    rng = random.Random(seed)
    rows: list[dict[str, Any]] = []
    for i in range(n):
        row: dict[str, Any] = {"id": f"row-{i}", "note": i}
        row["prompt"] = rng.choice(["hello world", "Answer", "caf\u00e9 x", " \n", "yz " * 5])
        row["max_new_tokens"] = rng.randint(1, 20)
        if rng.random() < 0.4:
            row["stop"] = rng.choice([["h", "w", "A"], "l", ["\u00ef\u00bf", "er", "0"]])
        if rng.random() < 0.3:
            row["stop_ids"] = rng.sample(range(2, VOCAB), 12)
        if rng.random() < 0.4:
            row |= {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "seed": rng.randrange(2**53)}
        if rng.random() < 0.3:
            row |= {"depth": 2, "exit_threshold": 0.5}
        rows.append(row)
    return rows


def expected_lines(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [oracle(row, seed=row.get("seed", 0)) for row in rows]


def test_completions_are_the_requests_own_cut_at_their_stops_in_input_order(tmp_path: Path) -> None:
    rows = make_rows(120)
    summary = generate(settings(tmp_path, rows, token_logprobs=True))
    found = results(tmp_path)
    assert [line["id"] for line in found] == [row["id"] for row in rows]
    expected = expected_lines(rows)
    for row, line, right in zip(rows, found, expected, strict=True):
        assert {name: line[name] for name in right} == right
        assert line["extra"] == {"note": row["note"]}
        assert (line["task"], line["n_truncated"]) == ("completion", 0)
    (group,) = summary["groups"]
    reasons = {right["finish_reason"] for right in expected}
    assert reasons == {"stop", "eos", "length"}
    assert group["finish_reasons"] == {
        reason: sum(right["finish_reason"] == reason for right in expected) for reason in sorted(reasons)
    }
    assert group["tokens_out"] == sum(right["n_tokens"] for right in expected)
    assert group["depth_sum"] == sum(right["depth_sum"] for right in expected)
    assert group["tokens_in"] == sum(line["n_prompt"] for line in found)
    assert summary["exit_code"] == ExitCode.SCORED


def test_output_does_not_depend_on_windows_or_on_how_ids_come(tmp_path: Path) -> None:
    rows = make_rows(60)
    generate(settings(tmp_path, rows, "a"))
    other = FakeGenerator(VOCAB, seed=5, prompts_a_take=3, ids_a_take=50)
    generate(settings(tmp_path, rows, "b", max_window_rows=7), other)
    one = FakeGenerator(VOCAB, seed=6, prompts_a_take=100, ids_a_take=1)
    generate(settings(tmp_path, rows, "c", max_window_rows=None), one)
    assert outputs(tmp_path / "a") == outputs(tmp_path / "b") == outputs(tmp_path / "c")


def test_a_stop_string_ends_generation_early_and_every_stream_is_closed(tmp_path: Path) -> None:
    # The fake completes this prompt with 40 ids; the text of the first of them is a stop string.
    row = {"id": "a", "prompt": "hello", "max_new_tokens": 40}
    text = oracle(row)["text"]
    pool = FakeGenerator(VOCAB, ids_a_take=1)
    generate(settings(tmp_path, [row | {"stop": text[2:4]}]), pool)
    (line,) = results(tmp_path)
    assert (line["text"], line["finish_reason"]) == (text[: text.find(text[2:4])], "stop")
    assert pool.cancelled == 1
    assert pool.num_ids < 40
    assert all(stream.closed for stream in pool.streams)


def derived(text: str) -> int:
    """The seed as cluster/GENERATE.md says it is made."""
    digest = hashlib.blake2b(text.encode(), digest_size=8, person=b"generate").digest()
    return int.from_bytes(digest, "little") >> 11


def test_r37_seeds_are_the_rows_own_or_made_of_the_jobs_and_the_rows_id(tmp_path: Path) -> None:
    drawn = {"prompt": "hello", "temperature": 1.0, "max_new_tokens": 6}
    rows = [
        {"id": "given", **drawn, "seed": 2**64 - 1},
        {"id": "made", **drawn},
        {"id": "three", **drawn, "n": 3},
        {"id": "greedy", "prompt": "hello", "max_new_tokens": 6, "seed": 4, "n": 2},
    ]
    generate(settings(tmp_path, rows, seed=9, token_logprobs=True))
    given, made, three, greedy = results(tmp_path)
    assert given["seed"] == 2**64 - 1
    assert made["seed"] == derived("9/made") < 2**53
    first = derived("9/three")
    assert [one["seed"] for one in three["completions"]] == [
        first,
        derived(f"{first}#1"),
        derived(f"{first}#2"),
    ]
    for line, seed in [(given, 2**64 - 1), (made, made["seed"])]:
        assert line["token_ids"] == oracle(drawn, seed)["token_ids"]
    for one in three["completions"]:
        assert one["token_ids"] == oracle(drawn, one["seed"])["token_ids"]
    assert greedy["completions"][0] == greedy["completions"][1]
    assert "seed" not in greedy["completions"][0]


def test_equal_requests_are_generated_once_and_drawn_ones_only_with_equal_seeds(tmp_path: Path) -> None:
    greedy = {"prompt": "hello", "max_new_tokens": 5}
    drawn = greedy | {"temperature": 1.0}
    rows = [greedy, greedy, greedy | {"seed": 3}, drawn, drawn, drawn | {"seed": 3}, drawn | {"seed": 3}]
    rows.append(greedy | {"stop": "a"})
    pool = FakeGenerator(VOCAB)
    generate(settings(tmp_path, [row | {"id": i} for i, row in enumerate(rows)]), pool)
    assert len(pool.prompts) == 1 + 2 + 1 + 1
    texts = [line["text"] for line in results(tmp_path)]
    assert texts[0] == texts[1] == texts[2]
    assert texts[5] == texts[6] != texts[3] != texts[4]


def test_settings_of_the_job_are_those_of_rows_that_do_not_say(tmp_path: Path) -> None:
    defaults = CompletionSettings(max_new_tokens=4, stop=("e",), depth=None)
    rows = [
        {"id": "job", "prompt": "hello"},
        {"id": "row", "prompt": "hello", "max_tokens": 9, "until": ["q"], "depth": 1},
        {"id": "null", "prompt": "hello", "max_tokens": None, "stop": None},
    ]
    generate(settings(tmp_path, rows, defaults=defaults, depth=2, token_logprobs=True))
    job, row, null = results(tmp_path)
    assert (
        job["token_ids"]
        == oracle({"prompt": "hello", "max_new_tokens": 4, "stop": "e", "depth": 2})["token_ids"]
    )
    assert (
        row["token_ids"]
        == oracle({"prompt": "hello", "max_new_tokens": 9, "stop": "q", "depth": 1})["token_ids"]
    )
    assert (job["depth"], row["depth"], null["text"]) == (2, 1, job["text"])


def test_prompts_as_ids_with_a_prefix_empty_and_as_messages(tmp_path: Path) -> None:
    rows = [
        {"id": "ids", "prompt_ids": [5, 6, 7]},
        {"id": "prefix", "prefix": "hello ", "prompt": "world"},
        {"id": "empty", "prompt": ""},
        {"id": "chat", "messages": [{"role": "user", "content": "hello"}]},
        {"id": "parts", "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]},
        {"id": "spelled", "prompt": "<bos>hello"},
    ]
    generate(
        settings(tmp_path, rows, token_logprobs=True, defaults=asked()),
        bos_id=0,
        add_bos=True,
        chat_template=TEMPLATE,
    )

    def ids(text: str) -> list[int]:
        return list(TOKENIZER.encode(text, add_special_tokens=False).ids)

    prompts = [
        [5, 6, 7],
        [0, *ids("hello world")],
        [0],
        ids("<bos>user: hello\nassistant:"),  # the template's own BOS, and no other
        ids("<bos>user: hello\nassistant:"),
        [0, *ids("hello")],
    ]
    for line, prompt in zip(results(tmp_path), prompts, strict=True):
        assert (line["n_prompt"], line["token_ids"]) == (len(prompt), oracle({}, ids=prompt)["token_ids"])


def test_r19_a_prompt_has_room_for_the_window_less_what_is_to_come(tmp_path: Path) -> None:
    words = "xyz" * 20
    ids = TOKENIZER.encode(words, add_special_tokens=False).ids
    assert len(ids) > MAX_ROWS
    rows = [
        {"id": "cut", "prompt": words, "max_new_tokens": 8},
        {"id": "just", "prompt_ids": list(ids[: MAX_ROWS - 8]), "max_new_tokens": 8},
        {"id": "none", "prompt": "x", "max_new_tokens": MAX_ROWS},
        {"id": "one", "prompt": words, "max_new_tokens": MAX_ROWS - 1},
    ]
    summary = generate(settings(tmp_path, rows, token_logprobs=True))
    cut, just, one = results(tmp_path)
    assert (cut["n_prompt"], cut["n_truncated"]) == (MAX_ROWS - 8, len(ids) - MAX_ROWS + 8)
    assert cut["token_ids"] == oracle({}, ids=ids[-(MAX_ROWS - 8) :])["token_ids"]
    assert (just["n_prompt"], just["n_truncated"]) == (MAX_ROWS - 8, 0)
    assert (one["n_prompt"], one["n_truncated"]) == (1, len(ids) - 1)
    assert errors(tmp_path)["none"][0] == "prompt_too_long"
    assert summary["groups"][0]["truncated_rows"] == 2
    assert any("lost tokens at the left: 2" in warning for warning in summary["warnings"])
    strict = settings(tmp_path, rows[:2], "strict", long_prompt="error")
    generate(strict)
    assert errors(tmp_path, "strict")["cut"][0] == "prompt_too_long"
    with pytest.raises(UsageError, match="no prompt fits"):
        generate(settings(tmp_path, rows, "no", defaults=CompletionSettings(max_new_tokens=MAX_ROWS)))
    assert not (tmp_path / "no").exists()


BAD_ROWS = [
    ({}, "missing_field"),
    ({"prompt": None}, "missing_field"),
    ({"prompt": 5}, "wrong_type"),
    ({"prompt": "a", "prompt_ids": [1]}, "wrong_type"),
    ({"prompt_ids": [1], "prefix": "a"}, "wrong_type"),
    ({"prompt_ids": [True]}, "wrong_type"),
    ({"prompt_ids": [100_000]}, "token_out_of_range"),
    ({"prompt_ids": [-1]}, "token_out_of_range"),
    ({"prompt": "a", "stop_ids": [100_000]}, "token_out_of_range"),
    ({"prompt": "a", "stop_ids": 5}, "wrong_type"),
    ({"prompt": "a", "stop": ""}, "invalid_setting"),
    ({"prompt": "a", "stop": ["b", 5]}, "wrong_type"),
    ({"prompt": "a", "temperature": -0.1}, "invalid_setting"),
    ({"prompt": "a", "temperature": "hot"}, "wrong_type"),
    ({"prompt": "a", "temperature": True}, "wrong_type"),
    ({"prompt": "a", "top_p": 0}, "invalid_setting"),
    ({"prompt": "a", "top_p": 1.5}, "invalid_setting"),
    ({"prompt": "a", "top_k": -1}, "invalid_setting"),
    ({"prompt": "a", "min_p": 2}, "invalid_setting"),
    ({"prompt": "a", "repetition_penalty": 0}, "invalid_setting"),
    ({"prompt": "a", "max_new_tokens": 0}, "invalid_setting"),
    ({"prompt": "a", "max_new_tokens": 1.0}, "wrong_type"),
    ({"prompt": "a", "max_new_tokens": 5, "max_tokens": 5}, "wrong_type"),
    ({"prompt": "a", "seed": -1}, "invalid_setting"),
    ({"prompt": "a", "seed": 2**64}, "invalid_setting"),
    ({"prompt": "a", "depth": 0}, "invalid_setting"),
    ({"prompt": "a", "min_depth": DEPTH + 1}, "invalid_setting"),
    ({"prompt": "a", "n": 0}, "invalid_setting"),
    ({"prompt": "a", "n": 1000}, "invalid_setting"),
    ({"prompt": "a\ud800"}, "invalid_unicode"),
    ({"messages": []}, "wrong_type"),
    ({"messages": [{"content": "a"}]}, "wrong_type"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "wrong_type"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "invalid_unicode"),
    ({"messages": [{"role": "user", "content": "a"}]}, "no_chat_template"),
]


def test_each_bad_row_is_one_line_of_errors_and_the_job_goes_on(tmp_path: Path) -> None:
    rows: list[Any] = []
    for i, (bad, _) in enumerate(BAD_ROWS):
        rows += [{"id": f"good-{i}", "prompt": "hello"}, {"id": f"bad-{i}"} | bad]
    summary = generate(settings(tmp_path, rows))
    assert summary["exit_code"] == ExitCode.ROW_ERRORS
    assert [line["id"] for line in results(tmp_path)] == [f"good-{i}" for i in range(len(BAD_ROWS))]
    found = {name: error_class for name, (error_class, _) in errors(tmp_path).items()}
    assert found == {f"bad-{i}": name for i, (_, name) in enumerate(BAD_ROWS)}


def test_what_a_model_cannot_do_is_refused_row_by_row_or_before_the_start(tmp_path: Path) -> None:
    rows = [
        {"id": "gate", "prompt": "a", "exit_threshold": 0.5},
        {"id": "never", "prompt": "a", "exit_threshold": 1.5},
        {"id": "chat", "messages": [{"role": "user", "content": "a"}]},
        {"id": "fine", "prompt": "a"},
    ]
    broken = "{{ raise_exception('no user here') }}"
    generate(settings(tmp_path, rows), exit_gate=False, chat_template=broken)
    assert [line["id"] for line in results(tmp_path)] == ["never", "fine"]
    assert "no exit gate" in errors(tmp_path)["gate"][1]
    assert errors(tmp_path)["chat"] == ("chat_template", "chat template refuses the messages: no user here")
    generate(settings(tmp_path, rows, "unreadable"), exit_gate=False, chat_template="{% for %}")
    assert errors(tmp_path, "unreadable")["chat"][0] == "no_chat_template"
    with pytest.raises(UsageError, match="no exit gate"):
        generate(settings(tmp_path, rows, "no", defaults=asked(exit_threshold=0.5)), exit_gate=False)
    with pytest.raises(UsageError, match="cannot be read, line 1"):
        generate(settings(tmp_path, rows, "no", chat_template="{% for %}"))
    with pytest.raises(UsageError, match="depth is 3"):
        generate(settings(tmp_path, rows, "no"), loops=1)


def test_our_own_failures_are_tried_again_on_resume_and_row_faults_are_not(tmp_path: Path) -> None:
    rows = make_rows(30)
    failing = FakeGenerator(VOCAB, fail=lambda prompt: "replica_lost" if prompt % 5 == 0 else None)
    job = settings(tmp_path, rows, budget=ErrorBudget(max_count=0))
    with pytest.raises(ErrorBudgetExceeded):
        generate(job, failing)
    assert generate(settings(tmp_path, rows, resume=True))["errors"] == 0
    generate(settings(tmp_path, rows, "whole"))
    assert outputs(tmp_path / "out") == outputs(tmp_path / "whole")


def test_one_failed_completion_fails_its_row(tmp_path: Path) -> None:
    rows = [{"id": "a", "prompt": "hello", "temperature": 1.0, "n": 3}]
    generate(settings(tmp_path, rows), FakeGenerator(VOCAB, fail=lambda p: "timeout" if p == 1 else None))
    assert errors(tmp_path)["a"] == ("timeout", "made to fail")


def test_a_pool_that_cancels_what_nobody_cancelled_ends_the_job(tmp_path: Path) -> None:
    class Cancels(FakeGenerator):
        def stream(self, prompts: Any) -> Any:
            stream = super().stream(prompts)
            stream._whole = [
                (ids, logprobs, depths, "cancelled") for ids, logprobs, depths, _ in stream._whole
            ]
            return stream

    with pytest.raises(InfrastructureError, match="cancelled by the pool"):
        generate(settings(tmp_path, make_rows(3)), Cancels(VOCAB))


def test_a_job_with_other_settings_is_not_resumed(tmp_path: Path) -> None:
    rows = make_rows(10)
    job = settings(tmp_path, rows, defaults=asked(stop=("a", "b")))
    generate(job)
    assert generate(settings(tmp_path, rows, defaults=job.defaults, resume=True))["state"] == "complete"
    for changes in (
        {"defaults": asked(stop=("a",))},
        {"defaults": job.defaults, "seed": 1},
        {"defaults": job.defaults, "depth": 1},
        {"defaults": job.defaults, "token_logprobs": True},
        {"defaults": job.defaults, "chat_template": TEMPLATE},
        {"defaults": job.defaults, "long_prompt": "error"},
    ):
        with pytest.raises(UsageError, match="cannot resume"):
            generate(settings(tmp_path, rows, resume=True, **changes))


def test_an_interrupted_job_is_resumed_to_the_same_bytes(tmp_path: Path) -> None:
    rows = make_rows(40)
    generate(settings(tmp_path, rows, "whole"))

    def interrupt_at(wanted: int) -> Callable[[int], None]:
        return lambda count: os.kill(os.getpid(), signal.SIGINT) if count == wanted else None

    for wanted in (3, 9, 12):
        pool = FakeGenerator(VOCAB, on_collect=interrupt_at(wanted))
        with pytest.raises(Interrupted):
            generate(settings(tmp_path, rows, resume=True, max_window_rows=16), pool)
        assert all(stream.closed for stream in pool.streams)
    summary = generate(settings(tmp_path, rows, resume=True, max_window_rows=16))
    assert summary["rows_resumed"] > 0
    assert outputs(tmp_path / "out") == outputs(tmp_path / "whole")


@pytest.mark.parametrize("first", [1, 2, 3])
def test_a_job_killed_at_any_write_is_resumed_to_the_same_bytes(tmp_path: Path, first: int) -> None:
    # Every third write of a job, from the first, the second or the third on.
    rows = make_rows(24)
    job = settings(tmp_path, rows, "whole", max_window_rows=8)
    generate(job)
    expected, killed = outputs(tmp_path / "whole"), 0
    for write in range(first, 1_000, 3):
        name = f"out-{write}"
        again = settings(tmp_path, rows, name, max_window_rows=8, resume=True)
        if in_child(again, write=write) != -signal.SIGKILL:
            break
        killed += 1
        assert in_child(again) == ExitCode.SCORED
        assert outputs(tmp_path / name) == expected
    assert killed > 3
