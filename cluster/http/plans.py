"""Requests to what the pool is asked: ids and settings. Pure; the rules are those of `tinyloop generate`."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..completion_plans import CompletionPlan, CompletionPlanner, GenerationModel
from ..completion_task import Completion, CompletionSettings, Conversation, PromptIds, PromptText
from ..completion_text import Vocabulary
from ..encoding import Encoder
from ..errors import RowError
from ..generate_items import Prompt
from ..items import Int32Array
from ..rows import Row, RowFailure, read_text
from .faults import ApiFault, invalid
from .schema import ChatRequest, CompletionRequest, Sampling

FIELD_OF_CLASS = {
    "no_chat_template": "messages",
    "chat_template": "messages",
    "prompt_too_long": "max_tokens",
}
SEED_BITS = 53  # every reader of JSON holds them exactly


@dataclass(frozen=True, slots=True)
class Asked:
    """One prompt. ids: int32 [n]; text: as it was given, None for ids; requests: one a choice."""

    ids: Int32Array
    text: str | None
    requests: tuple[Prompt, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """What one HTTP request asks of the pool.

    n: choices a prompt. depth: loops of what is scored. echo: whether prompts are in the answer; scores:
    whether their log-probabilities are. logprobs: None, or how many likeliest tokens are told beside the
    given one: 0 or 1.
    """

    asked: tuple[Asked, ...]
    n: int
    stops: tuple[str, ...]
    depth: int
    echo: bool
    logprobs: int | None

    @property
    def scores(self) -> bool:
        return self.echo and self.logprobs is not None

    @property
    def num_sequences(self) -> int:
        """What is on its way in the pool at once, in completions and scored texts."""
        return sum(len(one.requests) + self.scores for one in self.asked)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(one.ids) for one in self.asked)


class Planner:
    """Plans requests for one model."""

    def __init__(self, encoder: Encoder, model: GenerationModel) -> None:
        self.encoder = encoder
        self.model = model
        self._planner = CompletionPlanner(encoder, model, long_prompt="error")

    @property
    def vocabulary(self) -> Vocabulary:
        return self._planner.vocabulary

    def completion(self, body: CompletionRequest) -> Plan:
        """Raises: ApiFault 400."""
        settings = replace(_settings(body), max_new_tokens=max(body.max_tokens, 1))
        texts = [_given(number, prompt) for number, prompt in enumerate(body.prompts)]
        plans = (
            self._plan(texts, settings)
            if body.max_tokens
            else [self._whole(text, settings) for text in texts]
        )
        asked = [
            Asked(plan.ids, text.text if isinstance(text, PromptText) else None, plan.requests)
            for plan, text in zip(plans, texts, strict=True)
        ]
        if not body.max_tokens:
            asked = [replace(one, requests=()) for one in asked]
        return Plan(tuple(asked), body.n, body.stops, self._depth(body), body.echo, body.logprobs)

    def chat(self, body: ChatRequest) -> Plan:
        """Raises: ApiFault 400."""
        limit = body.max_tokens or body.max_completion_tokens
        settings = replace(_settings(body), max_new_tokens=limit or 1)
        prompt = Conversation(tuple(message.for_template() for message in body.messages))
        (plan,) = self._plan([prompt], settings)
        room = self.encoder.policy.max_rows - len(plan.ids)
        requests = tuple(replace(one, max_new_tokens=limit or room) for one in plan.requests)
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        return Plan(
            (Asked(plan.ids, None, requests),), body.n, body.stops, self._depth(body), False, logprobs
        )

    def _depth(self, body: Sampling) -> int:
        return self.model.depth if body.depth is None else body.depth

    def _plan(
        self, prompts: Sequence[PromptText | PromptIds | Conversation], settings: CompletionSettings
    ) -> list[CompletionPlan]:
        rows = [Row(i, "", "", 1, Completion(prompt, settings), {}) for i, prompt in enumerate(prompts)]
        found = []
        for plan in self._planner.plan(rows):
            if isinstance(plan, RowFailure):
                raise _refused(plan, len(prompts))
            found.append(plan)
        return found

    def _whole(self, prompt: PromptText | PromptIds, settings: CompletionSettings) -> CompletionPlan:
        """A prompt that is scored alone: its last token is never fed, so it may be one longer."""
        limit = self.encoder.policy.max_rows + 1
        ids = self._opened(prompt)
        if len(ids) > limit:
            raise invalid(
                f"the prompt has {len(ids)} tokens, a text that is scored may have {limit}: shorten it",
                "prompt",
                "context_length_exceeded",
            )
        # Planned without its text, for the rules that settings must obey.
        (plan,) = self._plan([PromptIds((int(ids[0]),))], settings)
        return replace(plan, ids=ids)

    def _opened(self, prompt: PromptText | PromptIds) -> Int32Array:
        policy = self.encoder.policy
        try:
            if isinstance(prompt, PromptIds):
                return self.encoder.check_ids(list(prompt.ids))
            (found,) = self.encoder.encode_texts([prompt.text])
            if isinstance(found, RowError):
                raise found
            ids = found.tolist()
            if policy.add_bos and ids and ids[0] != policy.bos_id:
                ids = [policy.bos_id, *ids]
            return self.encoder.check_ids(ids or [policy.prefix_id])
        except RowError as error:
            raise invalid(error.message, "prompt", error.error_class) from error


def _settings(body: Sampling) -> CompletionSettings:
    drawn = secrets.randbits(SEED_BITS) if body.temperature else 0
    return CompletionSettings(
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        stop=body.stops,
        # The API's seeds are signed.
        seed=drawn if body.seed is None else body.seed % 2**64,
        depth=body.depth,
        exit_threshold=body.exit_threshold,
        min_depth=body.min_depth,
        n=body.n,
    )


def _given(number: int, prompt: str | list[int]) -> PromptText | PromptIds:
    if not isinstance(prompt, str):
        return PromptIds(tuple(prompt))
    try:
        return PromptText(read_text(f"prompt {number}", prompt))
    except RowError as error:
        raise invalid(error.message, "prompt", error.error_class) from error


def _refused(failure: RowFailure, num_prompts: int) -> ApiFault:
    which = f"prompt {failure.number}: " if num_prompts > 1 else ""
    kind = failure.error_class
    code = "context_length_exceeded" if kind == "prompt_too_long" else kind
    message = failure.message.replace("max_new_tokens", "max_tokens")
    return invalid(which + message, FIELD_OF_CLASS.get(kind), code)
