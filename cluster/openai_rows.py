"""Requests in the words of OpenAI's API to rows of a generation job: lines of a batch, and bodies alone.

What is not known, or would change the output in a way that is not done here, is refused with its reason:
nothing is dropped in silence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .completion_rows import read_messages
from .completion_settings import take_settings
from .completion_task import Completion, CompletionSettings, Conversation, Endpoint, PromptIds, PromptText
from .errors import RowError
from .rows import Fields, read_text, shown, take_ids

COMPLETIONS: Endpoint = "/v1/completions"
CHAT: Endpoint = "/v1/chat/completions"
# Fields that say who asks and how it is paid for.
WITHOUT_EFFECT = frozenset(
    {
        "model",
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",
    }
)
# Fields that are taken at the values that ask for nothing.
NOTHING_ASKED: dict[str, Callable[[Any], bool]] = {
    "stream": lambda v: v is False,
    "echo": lambda v: v is False,
    "suffix": lambda v: v == "",
    "presence_penalty": lambda v: _is_zero(v),
    "frequency_penalty": lambda v: _is_zero(v),
    "logit_bias": lambda v: v == {},
    "top_logprobs": lambda v: _is_zero(v),
    "tools": lambda v: v == [],
    "functions": lambda v: v == [],
    "tool_choice": lambda v: v in ("none", "auto"),
    "function_call": lambda v: v in ("none", "auto"),
    "response_format": lambda v: v == {"type": "text"},
    "modalities": lambda v: v == ["text"],
}


def is_batch_line(fields: Fields) -> bool:
    """Whether a row is a line of a batch, and not one of our own."""
    return "body" in fields and not {"prompt", "prompt_ids", "messages"} & set(fields)


def parse_batch_line(
    fields: Fields, defaults: CompletionSettings, *, replace_surrogates: bool = False
) -> tuple[Completion, Fields]:
    """The task of a batch line without its custom_id, and the fields that are carried through.

    Raises: RowError missing_field, wrong_type, invalid_unicode, invalid_setting, or unsupported.
    """
    method, url = fields.pop("method", None), fields.pop("url", None)
    body = fields.pop("body")
    if method != "POST":
        raise RowError("unsupported", f"method is {shown(method)}: POST is needed")
    if url not in (COMPLETIONS, CHAT):
        raise RowError("unsupported", f"url is {shown(url)}: {COMPLETIONS} and {CHAT} are served")
    endpoint = COMPLETIONS if url == COMPLETIONS else CHAT
    return parse_body(endpoint, body, defaults, replace_surrogates=replace_surrogates), fields


def parse_body(
    endpoint: Endpoint, body: object, defaults: CompletionSettings, *, replace_surrogates: bool = False
) -> Completion:
    """One request to an endpoint. What it does not say is as in defaults. Raises: RowError."""
    if not isinstance(body, dict):
        raise RowError("wrong_type", f"body is {shown(body)}: an object is needed")
    fields: Fields = {name: value for name, value in body.items() if value is not None}
    for name in WITHOUT_EFFECT:
        fields.pop(name, None)
    settings = take_settings(fields, defaults)
    prompt: PromptText | PromptIds | Conversation
    if endpoint == CHAT:
        prompt = Conversation(
            read_messages(fields.pop("messages", None), replace_surrogates=replace_surrogates)
        )
    else:
        prompt = _prompt(fields.pop("prompt", None), replace_surrogates)
    logprobs = _logprobs(endpoint, fields.pop("logprobs", False))
    _refuse_others(fields, settings)
    return Completion(prompt, settings, endpoint, logprobs)


def _prompt(value: object, replace_surrogates: bool) -> PromptText | PromptIds:
    if value is None:
        raise RowError("missing_field", "body.prompt is missing: give text or a list of token ids")
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, list) and any(isinstance(one, str | list) for one in value):
        raise RowError(
            "unsupported", f"body.prompt holds {len(value)} prompts: give each a line and a custom_id"
        )
    if isinstance(value, list):
        return PromptIds(take_ids({"body.prompt": value}, "body.prompt"))
    return PromptText(read_text("body.prompt", value, replace_surrogates=replace_surrogates))


def _logprobs(endpoint: Endpoint, value: object) -> bool:
    """Whether log-probabilities of the generated tokens are asked for; those of others are not kept."""
    if value is False:
        return False
    if endpoint == CHAT:
        if value is not True:
            raise RowError("wrong_type", f"body.logprobs is {shown(value)}: true or false is needed")
        return True
    if not _is_zero(value):
        raise RowError(
            "unsupported",
            f"body.logprobs is {shown(value)}: only those of the generated tokens are known, which is 0",
        )
    return True


def _refuse_others(fields: Fields, settings: CompletionSettings) -> None:
    """Raises: RowError unsupported for the first field that is left and asks for something."""
    for name, value in fields.items():
        if name == "best_of":
            if value != settings.n:
                raise RowError("unsupported", f"body.best_of is {shown(value)}: leave it out, or give n")
        elif name not in NOTHING_ASKED:
            raise RowError("unsupported", f"body.{name} is not known here: leave it out")
        elif not NOTHING_ASKED[name](value):
            raise RowError("unsupported", f"body.{name} is {shown(value)}, which is not done: leave it out")


def _is_zero(value: object) -> bool:
    return not isinstance(value, bool) and value == 0
