"""The official client against a real server: every answer is the pool's own, whole or as a stream."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from http_server import WINDOW, Server, command, free_port, named_pool, write_talker
from tiny_tokenizer import tiny_tokenizer
from tinyloop.cluster.named_pool import ask_status
from tinyloop.native import GenerateRequest, Model, load_model

NAME, KEY = "talkers", "sesame-5"
TOKENIZER = tiny_tokenizer()
DEADLINE_S = 30.0


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_talker(tmp_path_factory.mktemp("talker") / "talker.tloop")


@pytest.fixture(scope="module")
def model(talker: Path) -> Iterator[Model]:
    """The oracle: the same file in this process, asked by ids."""
    with load_model(talker, max_seq_len=WINDOW, threads=1) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def server(session: None, talker: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    (folder / "keys").write_text(f"another\n{KEY}\n")
    with named_pool(NAME, talker):
        limits = ("--max-queue", "600", "--max-body-bytes", "100000")
        keys = ("--api-key-file", str(folder / "keys"))
        server = Server(free_port(), folder / "log", "--pool", NAME, *keys, *limits)
        try:
            server.wait_until_ready()
            yield server
            assert server.stop() == 0, server.log.read_text()
            assert KEY not in server.log.read_text()
        finally:
            server.process.kill()


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=DEADLINE_S)


def ids_of(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False).ids)


def alone(model: Model, ids: list[int], max_new_tokens: int, **settings: Any) -> tuple[str, Any]:
    """Text and completion of one request on the model in this process."""
    (found,) = model.generate([GenerateRequest(np.array(ids, np.int32), max_new_tokens, **settings)])
    return TOKENIZER.decode(found.token_ids.tolist(), skip_special_tokens=True), found


def raw(server: Server, path: str, body: object, key: str = KEY) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(f"{server.url}{path}", content=content, headers={"authorization": f"Bearer {key}"})


def test_completions_are_the_models_own_for_every_kind_of_prompt(client: openai.OpenAI, model: Model) -> None:
    texts = ["hello world", "Answer: "]
    whole = client.completions.create(model=NAME, prompt=texts, max_tokens=12, temperature=0, logprobs=1)
    by_ids = client.completions.create(
        model=NAME, prompt=[ids_of(text) for text in texts], max_tokens=12, temperature=0
    )
    assert [choice.index for choice in whole.choices] == [0, 1]
    for text, one, other in zip(texts, whole.choices, by_ids.choices, strict=True):
        expected, found = alone(model, ids_of(text), 12)
        assert one.text == other.text == expected
        assert one.finish_reason == found.finish_reason
        assert one.logprobs is not None
        # Bit for bit: the JSON of a float32 reads back as the same number.
        assert one.logprobs.token_logprobs == found.logprobs.tolist()
        assert one.logprobs.top_logprobs is not None
        tops = [max(top.values()) for top in one.logprobs.top_logprobs]
        assert tops == found.logprobs.tolist()
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == sum(len(ids_of(text)) for text in texts)
    assert whole.usage.completion_tokens == 24


def test_settings_reach_the_engine(client: openai.OpenAI, model: Model) -> None:
    settings = {"temperature": 1.5, "top_p": 0.9, "seed": 77}
    ours = {"top_k": 40, "min_p": 0.01, "repetition_penalty": 1.2, "depth": 2}
    answer = client.completions.create(model=NAME, prompt="hello", max_tokens=20, extra_body=ours, **settings)
    assert answer.choices[0].text == alone(model, ids_of("hello"), 20, **settings, **ours)[0]
    gated = client.completions.create(
        model=NAME, prompt="hello", max_tokens=20, temperature=0, extra_body={"exit_threshold": 0.4}
    )
    assert gated.choices[0].text == alone(model, ids_of("hello"), 20, exit_threshold=0.4)[0]


def test_an_echoed_prompt_has_the_scores_of_the_engine_bit_for_bit(
    client: openai.OpenAI, model: Model
) -> None:
    texts = ["hello world, hello", "Answer", "h\u00e9 \u2603"]
    answer = client.completions.create(
        model=NAME, prompt=texts, max_tokens=0, echo=True, logprobs=1, temperature=0
    )
    for text, choice in zip(texts, answer.choices, strict=True):
        ids = ids_of(text)
        offsets = np.array([0, len(ids)], np.int64)
        scored = model.score(np.array(ids, np.int32), offsets, np.array([len(ids) - 1], np.int32))
        assert (choice.text, choice.finish_reason) == (text, "length")
        logprobs = choice.logprobs
        assert logprobs is not None
        assert logprobs.token_logprobs == [None, *scored.logprobs.tolist()]
        assert logprobs.text_offset is not None
        assert logprobs.text_offset == sorted(logprobs.text_offset)
        # What is likeliest at each place, by the engine's own next id.
        for place in range(1, len(ids)):
            top = logprobs.top_logprobs[place]  # type: ignore[index]
            best = alone(model, ids[:place], 1, stop_ids=[])[1].logprobs.tolist()[0]
            assert max(top.values()) == best
            assert (top[logprobs.tokens[place]] == best) == bool(scored.greedy[place - 1])  # type: ignore[index]
    assert answer.choices[2].logprobs.tokens[-1].startswith("bytes:\\x")  # type: ignore[union-attr, index]


def test_an_evaluation_harness_finds_the_continuation_and_one_token_after_it(client: openai.OpenAI) -> None:
    """As lm-eval's local-completions asks and reads: ids, echo, one token more, [n_context:-1]."""
    context, continuation = ids_of("hello"), ids_of(" world")
    ids = context + continuation
    harness = {"max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0, "seed": 1234}
    answer = client.completions.create(model=NAME, prompt=[ids], **harness)  # type: ignore[call-overload]
    scored = client.completions.create(
        model=NAME, prompt=[ids], max_tokens=0, echo=True, logprobs=0, temperature=0
    )
    columns = answer.choices[0].logprobs
    assert len(columns.token_logprobs) == len(ids) + 1
    assert columns.token_logprobs[:-1] == scored.choices[0].logprobs.token_logprobs  # type: ignore[union-attr]
    assert scored.choices[0].logprobs.top_logprobs is None  # type: ignore[union-attr]
    assert all(isinstance(top, dict) for top in columns.top_logprobs[len(context) :])


def test_a_stream_is_the_whole_answer_in_whole_characters(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": NAME,
        "prompt": ["hello", "A"],
        "max_tokens": 60,
        "temperature": 2,
        "seed": 5,
        "n": 2,
        "logprobs": 0,
    }
    whole = client.completions.create(**asked)
    texts, tokens, reasons = [""] * 4, [[] for _ in range(4)], [None] * 4
    usage = None
    with client.completions.create(**asked, stream=True, stream_options={"include_usage": True}) as stream:
        for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.text
                tokens[choice.index] += choice.logprobs.token_logprobs
                reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.text for choice in whole.choices]
    assert tokens == [choice.logprobs.token_logprobs for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert usage == whole.usage
    # Choices of a prompt differ, and each is what its number says whatever else was asked.
    assert len(set(texts)) == 4


def test_stop_strings_end_a_text_across_tokens(client: openai.OpenAI) -> None:
    free = client.completions.create(model=NAME, prompt="hello", max_tokens=40, temperature=0).choices[0]
    stop = free.text[10:14]
    expected = free.text[: free.text.index(stop)]
    asked: dict[str, Any] = {"model": NAME, "prompt": "hello", "max_tokens": 40, "temperature": 0}
    cut = client.completions.create(**asked, stop=[stop, "never there"]).choices[0]
    assert (cut.text, cut.finish_reason) == (expected, "stop")
    with client.completions.create(**asked, stop=stop, stream=True) as stream:
        assert "".join(chunk.choices[0].text for chunk in stream) == expected


def test_chat_goes_through_the_models_template(client: openai.OpenAI, model: Model) -> None:
    messages: Any = [{"role": "system", "content": "be"}, {"role": "user", "content": "hello"}]
    prompt = ids_of("<bos>system: be\nuser: hello\nassistant:")
    expected, found = alone(model, prompt, 15)
    asked: dict[str, Any] = {"model": NAME, "messages": messages, "temperature": 0}
    answer = client.chat.completions.create(**asked, max_completion_tokens=15, logprobs=True, top_logprobs=1)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", expected)
    assert choice.logprobs is not None
    assert [entry.logprob for entry in choice.logprobs.content or []] == found.logprobs.tolist()
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt)
    with client.chat.completions.create(**asked, max_tokens=15, stream=True) as stream:
        parts = [chunk.choices[0] for chunk in stream]
    assert parts[0].delta.role == "assistant"
    assert "".join(part.delta.content or "" for part in parts) == expected
    assert parts[-1].finish_reason == found.finish_reason
    two = client.chat.completions.create(
        model=NAME, messages=messages, n=2, seed=1, max_tokens=15, temperature=1.5
    )
    assert len({choice.message.content for choice in two.choices}) == 2
    # Without a limit: as much as there is room for.
    rest = client.chat.completions.create(**asked)
    assert rest.usage is not None
    assert rest.usage.total_tokens == WINDOW or rest.choices[0].finish_reason == "stop"


def test_many_at_once_are_each_their_solo_answer(server: Server, client: openai.OpenAI) -> None:
    def ask(number: int) -> tuple[Any, ...]:
        if number % 4 == 0:
            scored = client.completions.create(
                model=NAME, prompt=f"hello {number}", max_tokens=0, echo=True, logprobs=0
            )
            return tuple(scored.choices[0].logprobs.token_logprobs)  # type: ignore[union-attr, arg-type]
        answer = client.completions.create(
            model=NAME, prompt=f"hello {number}", max_tokens=20, temperature=1, seed=number
        )
        return answer.choices[0].text, answer.choices[0].finish_reason

    solo = [ask(number) for number in range(32)]
    with ThreadPoolExecutor(32) as threads:
        assert list(threads.map(ask, range(32))) == solo

    async def streamed() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as many:

            async def one(number: int) -> str:
                asked: Any = {"model": NAME, "prompt": f"hello {number}", "max_tokens": 20, "seed": number}
                stream = await many.completions.create(**asked, temperature=1, stream=True)
                return "".join([chunk.choices[0].text async for chunk in stream])

            return await asyncio.gather(*map(one, [n for n in range(32) if n % 4]))

    assert asyncio.run(streamed()) == [solo[n][0] for n in range(32) if n % 4]


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_leaves_ends_its_generation(server: Server, streams: bool) -> None:
    body = {"model": NAME, "prompt": "hello", "max_tokens": 200, "n": 128, "temperature": 2}
    headers = {"authorization": f"Bearer {KEY}"}
    before = counters()
    if streams:
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json={**body, "stream": True}, headers=headers
        ) as answer:
            next(answer.iter_bytes())
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=0.3)
    deadline = time.monotonic() + DEADLINE_S
    while any(client["streams"] for client in ask_status(NAME)["clients"]):
        assert time.monotonic() < deadline, ask_status(NAME)
    # Far less was generated than was asked for.
    assert counters() - before < 200 * 128 * 0.9


def counters() -> int:
    return int(ask_status(NAME)["counters"]["generated_tokens"])


def test_errors_have_the_shape_and_status_of_the_api(client: openai.OpenAI, server: Server) -> None:
    def create(**changes: Any) -> Any:
        return client.completions.create(**{"model": NAME, "prompt": "hello", "max_tokens": 2} | changes)

    with pytest.raises(openai.NotFoundError, match="no model 'other'"):
        create(model="other")
    with pytest.raises(openai.BadRequestError, match="unknown field 'top_q'") as caught:
        create(extra_body={"top_q": 1})
    assert (caught.value.param, caught.value.code) == ("top_q", "unknown_parameter")
    with pytest.raises(openai.BadRequestError, match=r"400 tokens, 254 are left") as caught:
        create(prompt=[[5] * 400])
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="400 tokens, a text that is scored may have 257"):
        create(prompt=[[5] * 400], max_tokens=0, echo=True)
    with pytest.raises(openai.BadRequestError, match="id 9999 is outside"):
        create(prompt=[9999])
    with pytest.raises(openai.BadRequestError, match="the most: send fewer"):
        create(prompt=["a"] * 5, n=128)
    with pytest.raises(openai.BadRequestError, match="tools is not supported"):
        client.chat.completions.create(
            model=NAME,
            messages=[{"role": "user", "content": "a"}],
            tools=[{"type": "function", "function": {"name": "f"}}],
        )
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    assert raw(server, "/v1/completions", b"{").status_code == 400
    assert (
        raw(server, "/v1/completions", b'{"model": NaN}').json()["error"]["type"] == "invalid_request_error"
    )
    assert raw(server, "/v1/completions", b" " * 200_000).status_code == 413
    assert raw(server, "/v1/embeddings", {}).status_code == 404
    assert raw(server, "/health", {}).status_code == 405
    assert raw(server, "/v1/completions", {"model": NAME, "prompt": "\ud800"}).status_code == 400


def test_the_queue_is_bounded(client: openai.OpenAI) -> None:
    def ask(_: int) -> int:
        try:
            client.completions.create(model=NAME, prompt="hello", n=100, max_tokens=60, temperature=2)
        except openai.RateLimitError as error:
            return error.status_code
        return 200

    with ThreadPoolExecutor(12) as threads:
        found = list(threads.map(ask, range(12)))
    assert set(found) == {200, 429}


def test_what_the_server_says_of_itself(client: openai.OpenAI, server: Server) -> None:
    (listed,) = client.models.list().data
    assert listed.id == client.models.retrieve(NAME).id == NAME
    assert listed.model_dump()["max_model_len"] == WINDOW
    for path in ("/health", "/ready"):
        assert httpx.get(f"{server.url}{path}").status_code == 200


def test_what_cannot_be_served_is_told_at_once(server: Server, tmp_path: Path) -> None:
    def refusal(*arguments: str) -> str:
        done = subprocess.run(command(*arguments), capture_output=True, text=True, timeout=90)
        assert done.returncode == 2, done
        return done.stderr

    assert "there is no pool 'nobody'" in refusal("--pool", "nobody")
    assert "no key in" in refusal("--pool", NAME, "--api-key-file", str(empty(tmp_path)))
    assert "Ray Serve runs on this cluster already" in refusal("--pool", NAME)


def empty(folder: Path) -> Path:
    path = folder / "keys"
    path.write_text("\n")
    return path


def test_the_examples_of_the_guide_run(client: openai.OpenAI, server: Server) -> None:
    page = (Path(__file__).parents[2] / "cluster" / "HTTP.md").read_text()
    page = page.replace("http://127.0.0.1:8000", server.url).replace('"shared"', f'"{NAME}"')
    page = page.replace('api_key="none"', f'api_key="{KEY}"').replace(
        "curl -s", f"curl -s -H 'authorization: Bearer {KEY}'"
    )
    (asked,) = [block for block in blocks(page, "sh") if "curl" in block]
    done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout)
    whole = client.completions.create(model=NAME, prompt="The river", max_tokens=8, temperature=0)
    assert answer["choices"][0]["text"] == whole.choices[0].text
    (program,) = blocks(page, "python")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    scored = json.loads(done.stdout.splitlines()[0].replace("None", "null"))
    assert len(scored) == len(ids_of("The river"))


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)
