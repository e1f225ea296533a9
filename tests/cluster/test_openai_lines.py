"""Lines of an OpenAI batch in and out: the official client's types say what a response must be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from openai.types import Completion as CompletionResponse
from openai.types.chat import ChatCompletion
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsNonStreaming as CompletionParams
from tinyloop.cluster.completion_task import CompletionSettings
from tinyloop.cluster.errors import ExitCode, RowError
from tinyloop.cluster.openai_rows import CHAT, COMPLETIONS, parse_body

from .fake_generator import FakeGenerator
from .generate_driver import VOCAB, generate
from .test_generate_job import TEMPLATE, TOKENIZER, oracle, settings
from .test_job import outputs

# Who asks, and how it is paid for: nothing of a completion depends on it.
WITHOUT_EFFECT = (
    "model",
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "parallel_tool_calls",
)
MESSAGES = [{"role": "user", "content": "hello"}]


def line(custom_id: str, url: str = COMPLETIONS, method: str = "POST", **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": method, "url": url, "body": {"model": "any", **body}}


def read(tmp_path: Path, output: str = "out") -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    results, errors = outputs(tmp_path / output)
    return [json.loads(one) for one in results.splitlines()], [json.loads(one) for one in errors.splitlines()]


ROWS = [
    line("plain", prompt="hello", max_tokens=6),
    line("ids", prompt=[5, 6, 7], max_tokens=6, logprobs=0),
    line("one of a list", prompt=["hello"], max_tokens=6, n=2, temperature=1.0, seed=3),
    line("stopped", prompt="hello", max_tokens=20, stop=["h", "w", "\u00e9"], echo=False, best_of=1),
    line("chat", CHAT, messages=MESSAGES, max_completion_tokens=6, logprobs=True, top_logprobs=0),
    line("nulls", CHAT, messages=MESSAGES, max_tokens=6, tools=None, stream=False, logit_bias={}),
    {"id": "native", "prompt": "hello", "max_new_tokens": 6, "note": "kept"},
    {"id": "native chat", "messages": MESSAGES, "max_new_tokens": 6},
]


def test_responses_are_what_the_official_client_reads(tmp_path: Path) -> None:
    summary = generate(
        settings(tmp_path, ROWS, result_style="openai"), chat_template=TEMPLATE, bos_id=0, add_bos=False
    )
    assert summary["exit_code"] == ExitCode.SCORED
    found, _ = read(tmp_path)
    assert [one["custom_id"] for one in found] == [row.get("custom_id") or row["id"] for row in ROWS]
    assert len({one["id"] for one in found}) == len(found)
    for one in found:
        assert (one["error"], one["response"]["status_code"]) == (None, 200)
    bodies = {one["custom_id"]: one["response"]["body"] for one in found}
    for name, body in bodies.items():
        is_chat = name in ("chat", "nulls", "native chat")
        kind = ChatCompletion if is_chat else CompletionResponse
        response = kind.model_validate(body, strict=True)
        usage = response.usage
        assert usage is not None
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    chat_ids = TOKENIZER.encode("<bos>user: hello\nassistant:", add_special_tokens=False).ids
    plain = oracle({"prompt": "hello", "max_new_tokens": 6})
    assert bodies["plain"]["choices"][0]["text"] == plain["text"] == bodies["native"]["choices"][0]["text"]
    assert bodies["plain"]["usage"]["completion_tokens"] == plain["n_tokens"]
    assert bodies["native"]["tinyloop"]["extra"] == {"note": "kept"}
    chat = oracle({"max_new_tokens": 6}, ids=chat_ids)
    for name in ("chat", "nulls", "native chat"):
        assert bodies[name]["choices"][0]["message"]["content"] == chat["text"]
    stopped = oracle({"prompt": "hello", "max_new_tokens": 20, "stop": ["h", "w", "\u00e9"]})
    assert stopped["finish_reason"] == "stop"
    assert bodies["stopped"]["choices"][0]["text"] == stopped["text"]
    assert bodies["stopped"]["choices"][0]["finish_reason"] == "stop"
    assert [choice["index"] for choice in bodies["one of a list"]["choices"]] == [0, 1]
    drawn = oracle({"prompt": "hello", "max_new_tokens": 6, "temperature": 1.0}, seed=3)
    assert bodies["one of a list"]["choices"][0]["text"] == drawn["text"]


def test_log_probabilities_are_those_of_the_generated_tokens(tmp_path: Path) -> None:
    generate(settings(tmp_path, ROWS, result_style="openai"), chat_template=TEMPLATE, bos_id=0)
    found, _ = read(tmp_path)
    bodies = {one["custom_id"]: one["response"]["body"] for one in found}
    ids = oracle({"max_new_tokens": 6}, ids=[5, 6, 7])
    logprobs = bodies["ids"]["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == ids["token_logprobs"]
    assert logprobs["tokens"] == [TOKENIZER.decode([i], skip_special_tokens=False) for i in ids["token_ids"]]
    text = bodies["ids"]["choices"][0]["text"]
    assert len(logprobs["text_offset"]) == len(ids["token_ids"])
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    assert all(0 <= place <= len(text) for place in logprobs["text_offset"])
    content = bodies["chat"]["choices"][0]["logprobs"]["content"]
    for entry in content:
        assert entry["bytes"] is None or bytes(entry["bytes"]).decode() == entry["token"]
    assert bodies["plain"]["choices"][0]["logprobs"] is None
    # In our own style the same rows have them too.
    generate(settings(tmp_path, ROWS, "native"), chat_template=TEMPLATE, bos_id=0)
    native = {one["id"]: one for one in read(tmp_path, "native")[0]}
    assert native["ids"]["token_logprobs"] == ids["token_logprobs"]
    assert "token_logprobs" not in native["plain"]


REFUSED = [
    (line("a", "/v1/embeddings", input="x"), "unsupported", "/v1/embeddings"),
    (line("a", "", prompt="x"), "unsupported", "url is"),
    (line("a", method="GET", prompt="x"), "unsupported", "method"),
    ({"custom_id": "a", "method": "POST", "url": COMPLETIONS, "body": "x"}, "wrong_type", "body is"),
    (line("a", prompt="x", stream=True), "unsupported", "body.stream"),
    (line("a", prompt="x", echo=True), "unsupported", "body.echo"),
    (line("a", prompt="x", suffix="y"), "unsupported", "body.suffix"),
    (line("a", prompt="x", logprobs=5), "unsupported", "body.logprobs"),
    (line("a", prompt="x", best_of=4), "unsupported", "body.best_of"),
    (line("a", prompt="x", presence_penalty=0.5), "unsupported", "body.presence_penalty"),
    (line("a", prompt="x", frequency_penalty=-1), "unsupported", "body.frequency_penalty"),
    (line("a", prompt="x", logit_bias={"5": 1}), "unsupported", "body.logit_bias"),
    (line("a", prompt=["x", "y"]), "unsupported", "2 prompts"),
    (line("a", prompt=[[1], [2]]), "unsupported", "2 prompts"),
    (line("a"), "missing_field", "body.prompt"),
    (line("a", prompt="x", guided_json={}), "unsupported", "body.guided_json is not known"),
    (line("a", prompt="x", temperature=-1), "invalid_setting", "temperature"),
    (line("a", CHAT, prompt="x"), "wrong_type", "messages"),
    (line("a", CHAT, messages=MESSAGES, tools=[{}]), "unsupported", "body.tools"),
    (line("a", CHAT, messages=MESSAGES, logprobs=True, top_logprobs=2), "unsupported", "body.top_logprobs"),
    (line("a", CHAT, messages=MESSAGES, logprobs=1), "wrong_type", "body.logprobs"),
    (
        line("a", CHAT, messages=MESSAGES, response_format={"type": "json_object"}),
        "unsupported",
        "body.response_format",
    ),
]


def test_what_is_not_done_is_a_row_error_with_its_reason(tmp_path: Path) -> None:
    rows = [row | {"custom_id": str(i)} for i, (row, _, _) in enumerate(REFUSED)]
    summary = generate(settings(tmp_path, [*rows, ROWS[0]], result_style="openai"), chat_template=TEMPLATE)
    found, errors = read(tmp_path)
    assert [one["custom_id"] for one in found] == ["plain"]
    assert [one["custom_id"] for one in errors] == [row["custom_id"] for row in rows]
    for one, (_, error_class, words) in zip(errors, REFUSED, strict=True):
        assert one["error"]["code"] == error_class == one["response"]["body"]["error"]["code"]
        assert words in one["error"]["message"]
        assert one["response"]["status_code"] == 400
    assert sum(summary["errors_by_class"].values()) == len(REFUSED) == summary["errors"]


def test_our_own_failures_are_answers_of_a_server_that_failed(tmp_path: Path) -> None:
    pool = FakeGenerator(VOCAB, fail=lambda prompt: "replica_lost" if prompt == 0 else None)
    generate(settings(tmp_path, ROWS[:2], result_style="openai"), pool)
    _, (error,) = read(tmp_path)
    assert (error["response"]["status_code"], error["error"]["code"]) == (500, "replica_lost")
    assert error["response"]["body"]["error"]["tinyloop"]["attempts"] == 3


@pytest.mark.parametrize(("endpoint", "params"), [(COMPLETIONS, CompletionParams), (CHAT, ChatParams)])
def test_every_field_of_the_api_is_taken_or_refused_by_name(endpoint: Any, params: Any) -> None:
    assert len(params.__annotations__) > 15
    prompt = {"prompt": "x"} if endpoint == COMPLETIONS else {"messages": MESSAGES}
    for name in params.__annotations__:
        if name in prompt:
            continue
        strange = prompt | {name: {"strange": 1}}
        if name in WITHOUT_EFFECT:
            parse_body(endpoint, strange, CompletionSettings())
        else:
            with pytest.raises(RowError, match=name):
                parse_body(endpoint, strange, CompletionSettings())
        parse_body(endpoint, prompt | {name: None}, CompletionSettings())


def test_the_same_bytes_come_out_however_the_ids_came(tmp_path: Path) -> None:
    for name, pool in (("a", FakeGenerator(VOCAB)), ("b", FakeGenerator(VOCAB, seed=3, ids_a_take=50))):
        generate(settings(tmp_path, ROWS, name, result_style="openai"), pool, chat_template=TEMPLATE)
    assert outputs(tmp_path / "a") == outputs(tmp_path / "b")
