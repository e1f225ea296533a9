"""One request from its body to its answer, whole or as a stream of events. No HTTP and no Ray here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from typing import Any, TypeVar
from uuid import uuid4

from ..generate_items import NotGenerated, Prompt
from ..items import Failed
from .answers import DONE, ChatShape, CompletionShape, Frame, event, usage
from .bridge import Bridge, Completions
from .choices import Choice, Delta, Entry
from .faults import ApiFault, of_item
from .plans import Asked, Plan, Planner
from .schema import ChatRequest, CompletionRequest
from .tickets import Scores
from .tokens import TokenTexts

Value = TypeVar("Value")
Body = CompletionRequest | ChatRequest


@dataclass(frozen=True, slots=True)
class Served:
    """What a server says of itself. fingerprint: of weights and arithmetic; created: seconds since 1970."""

    name: str
    fingerprint: str
    created: int
    max_seq_len: int
    loops: int
    deadline_s: float

    def model(self) -> dict[str, Any]:
        """As /v1/models lists it."""
        about = {"max_model_len": self.max_seq_len, "loops": self.loops, "fingerprint": self.fingerprint}
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "tinyloop",
            **about,
        }


class Service:
    """Answers requests for one model with one bridge to its pool."""

    def __init__(self, planner: Planner, bridge: Bridge, served: Served) -> None:
        self.served = served
        self.bridge = bridge
        self._planner = planner
        self._texts = TokenTexts(planner.vocabulary)

    async def whole(self, body: Body) -> dict[str, Any]:
        """The answer as one object. Raises ApiFault."""
        answer = await self._begin(body)
        async with aclosing(answer.deltas()) as deltas:
            async for index, delta in deltas:
                answer.keep(index, delta)
        return answer.whole()

    async def stream(self, body: Body) -> AsyncIterator[bytes]:
        """The answer as server-sent events; the first comes with the first text. Raises ApiFault."""
        answer = await self._begin(body)
        opened: set[int] = set()
        async with aclosing(answer.deltas()) as deltas:
            async for index, delta in deltas:
                if index not in opened:
                    opened.add(index)
                    for part in answer.shape.opening(index):
                        yield answer.chunk([part])
                for part in answer.shape.step(index, delta):
                    yield answer.chunk([part])
        if body.wants_usage:
            yield event(answer.frame.around(answer.shape.chunk, [], usage=answer.usage()))
        yield DONE

    async def _begin(self, body: Body) -> _Answer:
        served = self.served
        if body.model != served.name:
            raise ApiFault(
                404,
                f"there is no model {body.model!r} here: the one that is served is {served.name!r}",
                param="model",
                code="model_not_found",
            )
        # Encoding long prompts takes a while, and others are answered meanwhile.
        frame_id, shape = _identity(body), self._shape(body)
        if isinstance(body, ChatRequest):
            plan = await asyncio.to_thread(self._planner.chat, body)
        else:
            plan = await asyncio.to_thread(self._planner.completion, body)
        frame = Frame(frame_id, int(time.time()), served.name, served.fingerprint)
        return _Answer(self, plan, frame, shape, tells_usage=body.wants_usage)

    def _shape(self, body: Body) -> CompletionShape | ChatShape:
        if isinstance(body, ChatRequest):
            return ChatShape(self._texts, logprobs=body.logprobs)
        return CompletionShape(self._texts, logprobs=body.logprobs is not None)

    @property
    def texts(self) -> TokenTexts:
        return self._texts


class _Answer:
    """The work of one request, and what has come of it."""

    def __init__(
        self,
        service: Service,
        plan: Plan,
        frame: Frame,
        shape: CompletionShape | ChatShape,
        *,
        tells_usage: bool,
    ) -> None:
        self.frame = frame
        self.shape = shape
        self._bridge = service.bridge
        self._texts = service.texts
        self._plan = plan
        self._tells_usage = tells_usage
        self._deadline_s = service.served.deadline_s
        self._until_s = time.monotonic() + self._deadline_s
        self._choices: list[Choice] = []
        self._kept: list[list[Delta]] = [[] for _ in range(len(plan.asked) * plan.n)]

    def keep(self, index: int, delta: Delta) -> None:
        """Note what came, for the whole answer."""
        self._kept[index].append(delta)

    def whole(self) -> dict[str, Any]:
        choices = [self.shape.choice(index, deltas) for index, deltas in enumerate(self._kept)]
        return self.frame.around(self.shape.whole, choices, usage=self.usage())

    def chunk(self, choices: list[dict[str, Any]]) -> bytes:
        more = {"usage": None} if self._tells_usage else {}
        return event(self.frame.around(self.shape.chunk, choices, **more))

    def usage(self) -> dict[str, int]:
        return usage(self._plan.prompt_tokens, sum(choice.num_tokens for choice in self._choices))

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """What comes, by choice. Leaving it early cancels the rest. Raises ApiFault."""
        plan = self._plan
        prompts = [request for one in plan.asked for request in one.requests]
        async with AsyncExitStack() as stack:
            # Generation goes on while the prompts are scored.
            completions = (
                await stack.enter_async_context(self._bridge.generating(prompts)) if prompts else None
            )
            bases = [0] * len(plan.asked)
            if plan.echo:
                echoes = await self._echoes()
                bases = [len(echo.text) for echo in echoes]
                for index in range(len(self._kept)):
                    yield index, echoes[index // plan.n]
            if completions is not None:
                for index in range(len(prompts)):
                    self._choices.append(self._choice(bases[index // plan.n]))
                async for index, delta in self._generated(completions):
                    yield index, delta

    def _choice(self, base: int) -> Choice:
        tells_top = self._plan.logprobs == 1
        return Choice(self._texts.vocabulary, self._plan.stops, tells_top=tells_top, base=base)

    async def _generated(self, completions: Completions) -> AsyncIterator[tuple[int, Delta]]:
        left = len(self._choices)
        while left:
            for came in await self._in_time(completions.take()):
                choice = self._choices[came.prompt]
                if isinstance(came, NotGenerated):
                    raise of_item(came.error_class, came.message)
                if choice.finish_reason is not None:
                    continue  # it was cut already, and this came before the pool heard of that
                delta = choice.take(came)
                if choice.finish_reason is not None:
                    left -= 1
                    if came.finish_reason is None:
                        completions.cancel(came.prompt)
                yield came.prompt, delta

    # Echoed prompts
    # ----------------------------------------------------------------------------------------------------

    async def _echoes(self) -> list[Delta]:
        plan, found = self._plan, []
        scores: list[Scores | None] = [None] * len(plan.asked)
        if plan.scores:
            scores = await self._scored()
        tops = await self._tops(scores) if plan.logprobs == 1 else {}
        for number, (one, scored) in enumerate(zip(plan.asked, scores, strict=True)):
            text = self._texts.vocabulary.decode(one.ids.tolist()) if one.text is None else one.text
            entries = self._entries(number, one, scored, tops) if plan.scores else ()
            found.append(Delta(text, entries, None if one.requests else "length"))
        return found

    async def _scored(self) -> list[Scores | None]:
        """The scores of each prompt, None for one of a single token. Raises ApiFault."""
        asked = self._plan.asked
        long = [number for number, one in enumerate(asked) if len(one.ids) > 1]
        texts = [asked[number].ids for number in long]
        results = await self._in_time(self._bridge.score(texts, self._plan.depth))
        found: list[Scores | None] = [None] * len(asked)
        for number, result in zip(long, results, strict=True):
            if isinstance(result, Failed):
                raise of_item(result.error_class, result.message)
            found[number] = result
        return found

    def _entries(
        self, number: int, one: Asked, scored: Scores | None, tops: dict[tuple[int, int], tuple[int, float]]
    ) -> tuple[Entry, ...]:
        ids = one.ids.tolist()
        logprobs: list[float | None] = [None]
        logprobs += [] if scored is None else scored.logprobs.tolist()
        begins = [0, *self._texts.ends(ids)]
        return tuple(
            Entry(token_id, logprobs[place], begins[place], tops.get((number, place)))
            for place, token_id in enumerate(ids)
        )

    async def _tops(self, scores: Sequence[Scores | None]) -> dict[tuple[int, int], tuple[int, float]]:
        """The likeliest token at each scored place; where it is not the given one, the pool is asked."""
        found: dict[tuple[int, int], tuple[int, float]] = {}
        places: list[tuple[int, int]] = []
        for number, scored in enumerate(scores):
            if scored is None:
                continue
            ids, logprobs = self._plan.asked[number].ids.tolist(), scored.logprobs.tolist()
            for place, is_top in enumerate(scored.greedy.tolist(), 1):
                if is_top:
                    found[number, place] = (ids[place], logprobs[place - 1])
                else:
                    places.append((number, place))
        if places:
            found |= dict(zip(places, await self._likeliest(places), strict=True))
        return found

    async def _likeliest(self, places: Sequence[tuple[int, int]]) -> list[tuple[int, float]]:
        prompts = [self._probe(number, place) for number, place in places]
        found: dict[int, tuple[int, float]] = {}
        async with self._bridge.generating(prompts) as completions:
            while len(found) < len(prompts):
                for came in await self._in_time(completions.take()):
                    if isinstance(came, NotGenerated):
                        raise of_item(came.error_class, came.message)
                    if len(came.token_ids):
                        found[came.prompt] = int(came.token_ids[0]), float(came.logprobs[0])
        return [found[index] for index in range(len(prompts))]

    def _probe(self, number: int, place: int) -> Prompt:
        before = self._plan.asked[number].ids[:place]
        return Prompt(before, max_new_tokens=1, depth=self._plan.depth, stop_ids=())

    async def _in_time(self, work: Awaitable[Value]) -> Value:
        try:
            return await asyncio.wait_for(work, max(self._until_s - time.monotonic(), 0))
        except TimeoutError:
            raise ApiFault(
                504,
                f"not finished within {self._deadline_s:g} s: ask for less at a time, or raise --deadline",
                code="deadline",
            ) from None


def _identity(body: Body) -> str:
    return ("chatcmpl-" if isinstance(body, ChatRequest) else "cmpl-") + uuid4().hex
