"""Bodies of the HTTP face: what is taken, and that nothing which changes an answer is ignored."""

from __future__ import annotations

from typing import Any

import pytest
from tinyloop.cluster.http.faults import ApiFault
from tinyloop.cluster.http.schema import ChatRequest, CompletionRequest, read_request

TEXT = {"model": "m", "prompt": "a"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_the_four_kinds_of_prompt(prompt: Any, prompts: list[Any]) -> None:
    assert read_request(CompletionRequest, {"model": "m", "prompt": prompt}).prompts == prompts


def test_defaults_are_those_of_the_api_and_null_is_absent() -> None:
    body = read_request(
        CompletionRequest, {**TEXT, "max_tokens": None, "stop": None, "user": "me", "tools": None}
    )
    assert (body.max_tokens, body.temperature, body.n, body.stops) == (16, 1.0, 1, ())
    assert (
        read_request(ChatRequest, {**CHAT, "frequency_penalty": 0, "tool_choice": "none"}).max_tokens is None
    )


def test_parts_of_a_content_are_one_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = read_request(ChatRequest, {**CHAT, "messages": [{"role": "user", "content": parts}]})
    assert [message.for_template() for message in body.messages] == [{"role": "user", "content": "ab"}]


@pytest.mark.parametrize(
    ("changes", "param", "words"),
    [
        ({"logprobs": 2}, "logprobs", "ask for 0 or 1"),
        ({"logprobs": True}, "logprobs", "valid integer"),
        ({"logprobs": 1}, "logprobs", "ask for 0, or for temperature 0"),
        ({"max_tokens": 0}, "max_tokens", "without echo"),
        ({"max_tokens": "5"}, "max_tokens", "valid integer"),
        ({"best_of": 2}, "best_of", "use n"),
        ({"suffix": "b"}, "suffix", "not supported"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "not supported"),
        ({"presence_penalty": 0.5}, "presence_penalty", "not supported"),
        ({"stop": ""}, "stop", "at least 1 character"),
        ({"stop": ["a", ""]}, "stop", "at least 1 character"),
        ({"temperature": 2.5}, "temperature", "less than or equal to 2"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"seed": 2**64}, "seed", "less than"),
        ({"top_q": 1}, "top_q", "unknown field 'top_q'"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
        ({"prompt": []}, "prompt", "prompt"),
        ({"prompt": [[]]}, "prompt", "prompt"),
        ({"prompt": ["a", 1]}, "prompt", "prompt"),
    ],
)
def test_what_a_completion_cannot_have(changes: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(ApiFault) as caught:
        read_request(CompletionRequest, TEXT | changes)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert words in caught.value.message
    assert caught.value.body["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": []}]}, "messages"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 5}, "top_logprobs"),
        ({"max_tokens": 1, "max_completion_tokens": 1}, "max_tokens"),
        ({"echo": True}, "echo"),
    ],
)
def test_what_a_conversation_cannot_have(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiFault) as caught:
        read_request(ChatRequest, CHAT | changes)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize("body", [None, [], "a", 5])
def test_a_body_is_an_object(body: object) -> None:
    with pytest.raises(ApiFault, match="not a JSON object"):
        read_request(CompletionRequest, body)
