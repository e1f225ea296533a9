"""One JSON object to a row of a generation job: a prompt as text, ids or messages, and its settings.

A row is one of: prompt; prompt_ids; messages; or a line of an OpenAI batch (openai_rows.py).
"""

from __future__ import annotations

from typing import Any

from .completion_settings import take_settings
from .completion_task import Completion, CompletionSettings, Conversation, PromptIds, PromptText
from .errors import RowError
from .rows import Fields, read_text, shown, take_ids

KINDS = ("prompt", "prompt_ids", "messages")


def parse_completion(
    fields: Fields, defaults: CompletionSettings, *, replace_surrogates: bool = False
) -> tuple[Completion, Fields]:
    """The task of a row and the fields that are carried through.

    fields: as parse_json gave them, without the id; what is read is removed.
    Raises: RowError missing_field, wrong_type, invalid_unicode or invalid_setting.
    """
    given = [name for name in KINDS if fields.get(name) is not None]
    if not given:
        raise RowError("missing_field", "row has none of prompt, prompt_ids, messages: give one")
    if len(given) > 1:
        raise RowError("wrong_type", f"row has {' and '.join(given)}: give one of them")
    settings = take_settings(fields, defaults)
    prefix = fields.pop("prefix", None)
    if prefix is not None and given != ["prompt"]:
        raise RowError("wrong_type", f"row has {given[0]} and prefix: a prefix is put before a prompt alone")
    value = fields.pop(given[0])
    prompt: PromptText | PromptIds | Conversation
    if given == ["prompt"]:
        start = "" if prefix is None else read_text("prefix", prefix, replace_surrogates=replace_surrogates)
        prompt = PromptText(start + read_text("prompt", value, replace_surrogates=replace_surrogates))
    elif given == ["prompt_ids"]:
        prompt = PromptIds(take_ids({"prompt_ids": value}, "prompt_ids"))
    else:
        prompt = Conversation(read_messages(value, replace_surrogates=replace_surrogates))
    return Completion(prompt, settings), fields


def read_messages(value: object, *, replace_surrogates: bool = False) -> tuple[dict[str, Any], ...]:
    """Messages of a chat; contents that are lists of text parts become one text.

    Raises: RowError wrong_type or invalid_unicode.
    """
    if not isinstance(value, list) or not value:
        raise RowError("wrong_type", f"messages is {shown(value)}: a list of at least one message is needed")
    messages: list[dict[str, Any]] = []
    for i, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RowError(
                "wrong_type", f"messages[{i}] is {shown(message)}: an object with a role is needed"
            )
        content = _content(f"messages[{i}].content", message.get("content"), replace_surrogates)
        messages.append(message if content is None else message | {"content": content})
    return tuple(messages)


def _content(name: str, value: object, replace_surrogates: bool) -> str | None:
    if value is None:
        return None
    if isinstance(value, list):
        if not all(isinstance(part, dict) and part.get("type") == "text" for part in value):
            raise RowError(
                "wrong_type", f"{name} is {shown(value)}: a text, or a list of text parts, is needed"
            )
        texts = (read_text(name, part.get("text"), replace_surrogates=replace_surrogates) for part in value)
        return "".join(texts)
    return read_text(name, value, replace_surrogates=replace_surrogates)
