"""What a row of a generation job asks for. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

# How a row was written, and so how its result may be asked for: our own fields, or a line of an OpenAI batch.
Endpoint = Literal["", "/v1/completions", "/v1/chat/completions"]


@dataclass(frozen=True, slots=True)
class PromptText:
    """Go on after a text."""

    text: str


@dataclass(frozen=True, slots=True)
class PromptIds:
    """Go on after token ids, taken as they are."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Conversation:
    """Answer messages, JSON objects that each have a role; the model's chat template makes a text of them."""

    messages: tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True)
class CompletionSettings:
    """How one prompt is completed; cluster/generate_items.py says what each value does.

    stop: texts that each end the completion and are not in it. stop_ids: the same for ids, beside the model's
    own. seed: None: made of the job's seed and the row's id. depth: None: the job's. n: completions of the
    prompt, each with a seed of its own.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    seed: int | None = None
    depth: int | None = None
    exit_threshold: float | None = None
    min_depth: int = 1
    n: int = 1


@dataclass(frozen=True, slots=True)
class Completion:
    """Generate after a prompt. logprobs: whether the row itself asks for those of every token."""

    prompt: PromptText | PromptIds | Conversation
    settings: CompletionSettings
    endpoint: Endpoint = ""
    logprobs: bool = False
