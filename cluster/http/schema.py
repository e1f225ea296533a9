"""Bodies of requests: which fields there are, of which types and ranges, and what is done with the others.

A field that would change the answer and is not supported is refused, never ignored. Null is as good as
absent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from .faults import ApiFault, invalid

# Taken and not used: they change nothing of what is answered.
UNUSED = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
# Fields of the API that are refused unless their value asks for nothing.
NEUTRAL: dict[str, Callable[[Any], bool]] = {
    "audio": lambda value: False,
    "frequency_penalty": lambda value: value == 0,
    "function_call": lambda value: value == "none",
    "functions": lambda value: value == [],
    "logit_bias": lambda value: value == {},
    "modalities": lambda value: value == ["text"],
    "moderation": lambda value: False,
    "prediction": lambda value: False,
    "presence_penalty": lambda value: value == 0,
    "reasoning_effort": lambda value: False,
    "response_format": lambda value: value == {"type": "text"},
    "suffix": lambda value: value == "",
    "tool_choice": lambda value: value == "none",
    "tools": lambda value: value == [],
    "verbosity": lambda value: False,
    "web_search_options": lambda value: False,
}
MOST_CHOICES = 128
MOST_PROMPTS = 2048
MOST_STOPS = 16

Whole = Annotated[int, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]
Real = Annotated[float, Field(allow_inf_nan=False)]
Text = Annotated[str, Field(strict=True)]
TokenIds = Annotated[list[Whole], Field(min_length=1)]


class StreamOptions(BaseModel):
    """include_usage: end with an event that holds the counts. include_obfuscation: must be off."""

    model_config = ConfigDict(extra="forbid")

    include_usage: Flag = False
    include_obfuscation: Literal[False] = False


class Sampling(BaseModel):
    """What both kinds of request share. Ours beside the API's: top_k to exit_threshold."""

    model_config = ConfigDict(extra="forbid")

    model: Text
    n: Annotated[Whole, Field(ge=1, le=MOST_CHOICES)] = 1
    stop: Annotated[list[Annotated[Text, Field(min_length=1)]], Field(max_length=MOST_STOPS)] = Field(
        default_factory=list
    )
    temperature: Annotated[Real, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[Real, Field(gt=0, le=1)] = 1.0
    seed: Annotated[Whole, Field(ge=-(2**63), lt=2**64)] | None = None
    stream: Flag = False
    stream_options: StreamOptions | None = None
    top_k: Annotated[Whole, Field(ge=0, lt=2**31)] = 0
    min_p: Annotated[Real, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[Real, Field(gt=0)] = 1.0
    depth: Annotated[Whole, Field(ge=1, le=4096)] | None = None
    min_depth: Annotated[Whole, Field(ge=1, le=4096)] = 1
    exit_threshold: Annotated[Real, Field(gt=0)] | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _one_is_a_list_of_one(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings, however they were given."""
        return tuple(self.stop)

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the counts."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(Sampling):
    """The body of /v1/completions."""

    prompt: (
        Text
        | TokenIds
        | Annotated[list[Text], Field(min_length=1, max_length=MOST_PROMPTS)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MOST_PROMPTS)]
    ) = ""
    max_tokens: Annotated[Whole, Field(ge=0, lt=2**31)] = 16
    echo: Flag = False
    logprobs: Annotated[Whole, Field(ge=0, le=1)] | None = None
    best_of: Whole | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """One or several prompts as a list."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [[number for number in self.prompt if isinstance(number, int)]]
        return [one for one in self.prompt if not isinstance(one, int)]


class TextPart(BaseModel):
    """A piece of a message's content."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text"]
    text: Text


class Message(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(extra="forbid")

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[TextPart] = ""
    name: Text | None = None

    def for_template(self) -> dict[str, Any]:
        """Parts of a content are one text, as templates know it."""
        content = self.content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        named = {} if self.name is None else {"name": self.name}
        return {"role": self.role, "content": text, **named}


class ChatRequest(Sampling):
    """The body of /v1/chat/completions. max_tokens: absent: as many as there is room for."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[Whole, Field(ge=1, lt=2**31)] | None = None
    max_completion_tokens: Annotated[Whole, Field(ge=1, lt=2**31)] | None = None
    logprobs: Flag = False
    top_logprobs: Annotated[Whole, Field(ge=0, le=1)] | None = None


Body = TypeVar("Body", CompletionRequest, ChatRequest)

ADVICE = {
    "prompt": "give a text, texts, token ids, or lists of token ids; no list may be empty",
    "logprobs": "the pool knows the given token and the likeliest one: ask for 0 or 1",
    "top_logprobs": "the pool knows the given token and the likeliest one: ask for 0 or 1",
    "messages": "texts alone are taken, in messages of system, developer, user and assistant",
}


def read_request(kind: type[Body], given: object) -> Body:
    """A body, checked. Raises: ApiFault 400 with the first field at fault, its value and what is taken."""
    if not isinstance(given, dict):
        raise invalid(f"the body is not a JSON object but {type(given).__name__}")
    fields = {name: value for name, value in given.items() if value is not None and name not in UNUSED}
    for name in sorted(fields.keys() & NEUTRAL.keys()):
        if not NEUTRAL[name](fields.pop(name)):
            raise invalid(f"{name} is not supported: leave it out", name, "unsupported_parameter")
    try:
        body = kind.model_validate(fields)
    except ValidationError as error:
        raise _fault(error, kind) from None
    _check_together(body)
    return body


def _fault(error: ValidationError, kind: type[BaseModel]) -> ApiFault:
    first = error.errors(include_url=False, include_context=False)[0]
    name = str(first["loc"][0]) if first["loc"] else None
    place = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden" and len(first["loc"]) == 1:
        known = ", ".join(sorted(kind.model_fields))
        return invalid(f"unknown field {name!r}, known are {known}", name, "unknown_parameter")
    shown = repr(first["input"])
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    advice = f": {ADVICE[name]}" if name in ADVICE else ""
    return invalid(f"{place} is {shown}: {first['msg']}{advice}", name, "invalid_value")


def _check_together(body: CompletionRequest | ChatRequest) -> None:
    """Fields that exclude each other, and what no pool could tell."""
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options are for stream: true", "stream_options")
    if isinstance(body, CompletionRequest):
        if body.best_of not in (None, body.n):
            raise invalid("best_of is not supported: use n, and choose by logprobs", "best_of")
        if not body.max_tokens and not body.echo:
            raise invalid("max_tokens is 0 without echo: there is nothing to answer", "max_tokens")
        wants_top = body.logprobs == 1 and body.max_tokens > 0
        name = "logprobs"
    else:
        if body.max_tokens is not None and body.max_completion_tokens is not None:
            raise invalid("max_tokens and max_completion_tokens are the same: give one", "max_tokens")
        if body.top_logprobs is not None and not body.logprobs:
            raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
        wants_top, name = body.top_logprobs == 1, "top_logprobs"
    if wants_top and not is_likeliest(body):
        raise invalid(
            f"{name} is 1 with temperature {body.temperature:g} and repetition_penalty "
            f"{body.repetition_penalty:g}: which token was likelier than the drawn one is not known: ask "
            "for 0, or for temperature 0 without a penalty",
            name,
        )


def is_likeliest(body: Sampling) -> bool:
    """Whether every generated token is the likeliest one of the model itself."""
    return body.temperature == 0 and body.repetition_penalty == 1
