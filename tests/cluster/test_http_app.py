"""The HTTP face without Ray: the app and its bridge on a model in this process, asked over ASGI."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from http_server import WINDOW, write_talker
from tinyloop.cluster.completion_plans import GenerationModel
from tinyloop.cluster.encoding import Encoder, EncodingPolicy
from tinyloop.cluster.fleet import PoolError, PoolFull
from tinyloop.cluster.generate_items import Prompt, Tokens
from tinyloop.cluster.http.app import Guard, make_app
from tinyloop.cluster.http.bridge import Bridge
from tinyloop.cluster.http.plans import Planner
from tinyloop.cluster.http.service import Served, Service
from tinyloop.cluster.items import Items, Scored
from tinyloop.native import GenerateRequest, Model, load_model
from tinyloop.native.format import read_header
from tinyloop.native.tokenizer import load_tokenizer

KEY = "sesame-5"
FIELDS = ("depth", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")


class ModelStream:
    """Completions that come an id at a time, one of each prompt at each look."""

    def __init__(self, pool: ModelClient, prompts: Sequence[Prompt]) -> None:
        self._pool = pool
        requests = [
            GenerateRequest(
                np.array(prompt.token_ids, np.int32),
                prompt.max_new_tokens,
                stop_ids=list(prompt.stop_ids or ()),
                **{name: getattr(prompt, name) for name in FIELDS},
            )
            for prompt in prompts
        ]
        self.left = {i: (found, 0) for i, found in enumerate(pool.model.generate(requests))}
        self.cancelled: list[int] = []

    def take(self, timeout_s: float) -> list[Tokens]:
        if self._pool.frozen:
            return []
        events = []
        for prompt, (found, place) in list(self.left.items()):
            ends = place + 1 == len(found.token_ids)
            part = slice(place, place + 1)
            columns = (found.token_ids[part], found.logprobs[part], found.depths[part])
            events.append(Tokens(prompt, place, *columns, found.finish_reason if ends else None))
            self.left[prompt] = found, place + 1
            if ends:
                del self.left[prompt]
        for prompt in self.cancelled:
            if self.left.pop(prompt, None):
                empty = np.zeros(0, np.int32)
                events.append(Tokens(prompt, 0, empty, empty.astype(np.float32), empty, "cancelled"))
        return events

    def cancel(self, prompt: int) -> None:
        self.cancelled.append(prompt)
        self._pool.told.set()

    def close(self) -> None:
        pass


class ModelClient:
    """A pool's client that is a model. frozen: nothing comes; lost: it cannot go on."""

    windows_in_flight = 0

    def __init__(self, model: Model) -> None:
        self.model = model
        self.frozen = self.lost = False
        self.began, self.told = threading.Event(), threading.Event()
        self.closed = 0
        self._scored: list[Scored] = []

    def offer(self, window: int, items: Items) -> None:
        found = self.model.score(items.token_ids, items.offsets, items.n_scored, depth=items.depth)
        every = np.arange(len(items), dtype=np.int32)
        self._scored.append(Scored(window, every, found.logprobs, found.greedy, found.offsets))

    def cancel(self, window: int) -> int:
        return 0

    def stream(self, prompts: Sequence[Prompt], *, room_s: float) -> Any:
        self.began.set()
        return ModelStream(self, prompts)

    def pump(self, timeout_s: float) -> list[Any]:
        if self.lost:
            raise PoolError("it was taken down")
        if self.frozen:
            time.sleep(timeout_s)  # as a pool of which nothing comes
        scored, self._scored = self._scored, []
        return scored

    def status(self) -> None:
        if self.lost:
            raise PoolError("it was taken down")

    def close(self) -> None:
        self.closed += 1


class Failures:
    gone: type[Exception] = PoolError
    full: type[Exception] = PoolFull


class Face:
    """A server without a socket."""

    def __init__(
        self, path: Path, client: ModelClient, *, deadline_s: float = 30.0, limit: int = 300
    ) -> None:
        header = read_header(path)
        descriptor = dict(header.descriptor)
        encoder = Encoder(load_tokenizer(header), EncodingPolicy.of_model(descriptor, WINDOW))
        loops = int(str(descriptor["loops"]))
        planner = Planner(encoder, GenerationModel.of(descriptor, loops, encoder))
        self.client = client
        self.bridge = Bridge(lambda: client, Failures, limit)
        self.bridge.start()
        served = Served("m", "print", 1, WINDOW, loops, deadline_s)
        keys = (hashlib.sha256(KEY.encode()).digest(),)
        self.app = make_app(Service(planner, self.bridge, served), Guard(keys, 100_000))

    def ask(self, path: str, body: object = None, key: str = KEY) -> httpx.Response:
        async def one() -> httpx.Response:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                headers = {"authorization": f"Bearer {key}"}
                if body is None:
                    return await client.get(path, headers=headers)
                return await client.post(path, json=body, headers=headers)

        return asyncio.run(one())

    def complete(self, **body: Any) -> dict[str, Any]:
        answer = self.ask("/v1/completions", {"model": "m", "prompt": "hello", "temperature": 0} | body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_talker(tmp_path_factory.mktemp("talker") / "talker.tloop")


@pytest.fixture
def make_face(talker: Path) -> Iterator[Callable[..., Face]]:
    faces: list[Face] = []
    with load_model(talker, max_seq_len=WINDOW, threads=1) as model:

        def make(path: Path = talker, **settings: Any) -> Face:
            faces.append(Face(path, ModelClient(model), **settings))
            return faces[-1]

        yield make
        for face in faces:
            face.bridge.stop()
            assert face.client.closed >= 1
            assert not face.bridge.is_alive


def test_stop_strings_and_log_probabilities_agree(make_face: Callable[..., Face]) -> None:
    face = make_face()
    free = face.complete(max_tokens=40, logprobs=0)["choices"][0]
    assert len(free["logprobs"]["tokens"]) == 40
    stop = free["text"][8:11]
    cut = face.complete(max_tokens=40, logprobs=0, stop=stop)
    choice = cut["choices"][0]
    assert choice["text"] == free["text"][: free["text"].index(stop)]
    # Every generated id up to the one that completed the stop is listed, as usage counts.
    listed = choice["logprobs"]["token_logprobs"]
    assert listed == free["logprobs"]["token_logprobs"][: len(listed)]
    assert len(listed) == cut["usage"]["completion_tokens"] < 40


def test_a_stream_is_events_and_done(make_face: Callable[..., Face]) -> None:
    face = make_face()
    body = {"model": "m", "prompt": "hello", "max_tokens": 30, "seed": 3, "temperature": 1.5, "logprobs": 0}
    whole = face.ask("/v1/completions", body).json()
    answer = face.ask("/v1/completions", body | {"stream": True, "stream_options": {"include_usage": True}})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.text.removesuffix("\n\n").split("\n\n")
    assert events.pop() == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert chunks.pop()["usage"] == whole["usage"]
    parts = [chunk["choices"][0] for chunk in chunks]
    assert "".join(part["text"] for part in parts) == whole["choices"][0]["text"]
    listed = [value for part in parts for value in part["logprobs"]["token_logprobs"]]
    assert listed == whole["choices"][0]["logprobs"]["token_logprobs"]


def test_echo_is_the_prompt_and_its_scores_before_the_completion(make_face: Callable[..., Face]) -> None:
    face = make_face()
    body = {"max_tokens": 5, "echo": True, "logprobs": 1}
    choice = face.complete(**body)["choices"][0]
    plain = face.complete(max_tokens=5)["choices"][0]["text"]
    assert choice["text"] == "hello" + plain
    columns = choice["logprobs"]
    assert columns["token_logprobs"][0] is None
    assert len(columns["tokens"]) == len(columns["text_offset"]) == len(columns["top_logprobs"])
    generated = columns["text_offset"][-5:]
    assert generated[0] == len("hello")
    assert face.complete(prompt=["a"], max_tokens=0, echo=True)["choices"][0]["text"] == "a"
    streamed = face.ask(
        "/v1/completions", {"model": "m", "prompt": "hello", "temperature": 0, "stream": True} | body
    )
    texts = [json.loads(line[6:])["choices"][0]["text"] for line in streamed.text.split("\n\n")[:-2]]
    assert "".join(texts) == choice["text"]


def test_a_model_without_a_template_refuses_conversations(
    make_face: Callable[..., Face], tmp_path: Path
) -> None:
    face = make_face(write_talker(tmp_path / "silent.tloop", template=""))
    answer = face.ask("/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "a"}]})
    assert answer.status_code == 400
    assert "no chat template" in answer.json()["error"]["message"]


def test_a_deadline_is_kept_and_what_is_late_is_cancelled(make_face: Callable[..., Face]) -> None:
    face = make_face(deadline_s=0.2)
    face.client.frozen = True
    answer = face.ask("/v1/completions", {"model": "m", "prompt": "hello"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline")
    assert face.client.told.wait(10)


def test_a_pool_that_is_lost_is_told_and_found_again(make_face: Callable[..., Face]) -> None:
    face = make_face()
    face.client.lost = True
    answer = face.ask("/v1/completions", {"model": "m", "prompt": "hello"})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert "it was taken down" in answer.json()["error"]["message"]
    face.client.lost = False
    deadline = time.monotonic() + 20
    while face.ask("/ready").status_code != 200:
        assert time.monotonic() < deadline
    face.complete(max_tokens=2)


def test_a_client_that_goes_before_its_answer_ends_its_work(make_face: Callable[..., Face]) -> None:
    face = make_face()
    face.client.frozen = True
    body = json.dumps({"model": "m", "prompt": "hello"}).encode()

    async def leave() -> list[dict[str, Any]]:
        bodies, sent = [body], list[dict[str, Any]]()

        async def receive() -> dict[str, Any]:
            if bodies:
                return {"type": "http.request", "body": bodies.pop()}
            assert await asyncio.to_thread(face.client.began.wait, 10)
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "headers": [(b"authorization", f"Bearer {KEY}".encode())],
            "query_string": b"",
        }
        app: Callable[..., Awaitable[None]] = face.app
        await app(scope, receive, send)
        return sent

    assert asyncio.run(leave())[0]["status"] == 499
    assert face.client.told.wait(10)


def test_who_has_no_key_learns_nothing(make_face: Callable[..., Face]) -> None:
    face = make_face()
    for path, body in (("/v1/models", None), ("/v1/completions", {"model": "other"})):
        answer = face.ask(path, body, key="wrong")
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        assert KEY not in answer.text
    assert face.ask("/health", key="").status_code == 200


def test_a_defect_tells_no_inner_details(
    make_face: Callable[..., Face], monkeypatch: pytest.MonkeyPatch
) -> None:
    face = make_face()

    def broken(*_: object) -> None:
        raise KeyError("secret detail")

    monkeypatch.setattr("tinyloop.cluster.http.service.Frame", broken)
    answer = face.ask("/v1/completions", {"model": "m", "prompt": "hello"})
    assert answer.status_code == 500
    assert "secret" not in answer.text
