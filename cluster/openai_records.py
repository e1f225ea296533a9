"""Completions and failures in the words of OpenAI's API: bodies of responses, and lines of a batch's files.

Nothing in a line comes from a clock or a random number, so that a resumed job writes the same bytes: ids are
hashes of the row's, and `created` is 0. What OpenAI has no field for stands under `tinyloop`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from .completion_records import completion_fields
from .completion_task import Completion, Conversation
from .completion_text import UNFINISHED, TextPieces, Vocabulary
from .completion_window import CompletionOutcome, RowCompletion
from .errors import ROW_FAULTS
from .openai_rows import CHAT, COMPLETIONS
from .records import dump, finite_or_none

# They know one word for the end of a text and for a stop string.
FINISH_REASONS = {"eos": "stop", "stop": "stop", "length": "length"}


def batch_line(
    result: RowCompletion, vocabulary: Vocabulary, model: str, *, token_logprobs: bool = False
) -> bytes:
    """One line of results.jsonl, with its line feed. model: what the response calls it."""
    row = result.plan.row
    assert isinstance(row.task, Completion)
    with_logprobs = token_logprobs or row.task.logprobs
    own = completion_fields(result, with_text=False)
    name = own.pop("id")
    body = response_body(
        result.outcomes,
        vocabulary,
        model,
        chat=_is_chat(row.task),
        n_prompt=len(result.plan.ids),
        name=name,
        with_logprobs=with_logprobs,
    )
    return _line(name, 200, body | {"tinyloop": own}, None)


def batch_error_line(failure: bytes) -> bytes:
    """A line of errors.jsonl, with its line feed, from a failure's own line."""
    fields = json.loads(failure)
    name, error_class, message = fields.pop("id"), fields.pop("class"), fields.pop("message")
    error = error_body(error_class, message)["error"]
    body = {"error": error | {"tinyloop": fields}}
    return _line(name, status_of(error_class), body, {"code": error_class, "message": message})


def native_view(line: dict[str, Any]) -> dict[str, Any]:
    """A line of either file as it would stand there in our own words, as far as it is counted."""
    if "custom_id" not in line:
        return line
    if line["error"] is not None:
        own = {"class": line["error"]["code"], "message": line["error"]["message"]}
        return own | {"id": line["custom_id"], **line["response"]["body"]["error"]["tinyloop"]}
    return {"id": line["custom_id"], **line["response"]["body"]["tinyloop"]}


def status_of(error_class: str) -> int:
    """400 for what the row is to blame for, 500 for what we are."""
    return 400 if error_class in ROW_FAULTS else 500


def error_body(error_class: str, message: str) -> dict[str, Any]:
    """The body of a response to a request that failed."""
    kind = "invalid_request_error" if status_of(error_class) == 400 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": error_class}}


def response_body(
    outcomes: Sequence[CompletionOutcome],
    vocabulary: Vocabulary,
    model: str,
    *,
    chat: bool,
    n_prompt: int,
    name: str,
    with_logprobs: bool,
    created: int = 0,
) -> dict[str, Any]:
    """The body of a response, without streaming. name: what its id is a hash of. created: UNIX seconds."""
    choices: list[dict[str, Any]] = []
    for index, outcome in enumerate(outcomes):
        text: dict[str, Any] = {"text": outcome.text}
        if chat:
            text = {"message": {"role": "assistant", "content": outcome.text, "refusal": None}}
        logprobs = logprobs_field(outcome, vocabulary, chat=chat) if with_logprobs else None
        reason = FINISH_REASONS[outcome.finish_reason]
        choices.append({"index": index, **text, "logprobs": logprobs, "finish_reason": reason})
    n_tokens = sum(len(outcome.token_ids) for outcome in outcomes)
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{_code(name)}",
        "object": "chat.completion" if chat else "text_completion",
        "created": created,
        "model": model,
        "choices": choices,
        "usage": {
            "prompt_tokens": n_prompt,
            "completion_tokens": n_tokens,
            "total_tokens": n_prompt + n_tokens,
        },
    }


def logprobs_field(outcome: CompletionOutcome, vocabulary: Vocabulary, *, chat: bool) -> dict[str, Any]:
    """Log-probabilities of a completion's tokens; those of other tokens are not known.

    A token that is not whole characters is spelled with U+FFFD, and its bytes are null.
    """
    texts = [
        vocabulary.tokenizer.decode([token_id], skip_special_tokens=False) for token_id in outcome.token_ids
    ]
    values = [finite_or_none(value) for value in outcome.logprobs]
    if chat:
        content = [
            {
                "token": text,
                "logprob": value,
                "bytes": None if UNFINISHED in text else list(text.encode()),
                "top_logprobs": [],
            }
            for text, value in zip(texts, values, strict=True)
        ]
        return {"content": content, "refusal": None}
    return {
        "tokens": texts,
        "token_logprobs": values,
        "top_logprobs": None,
        "text_offset": _offsets(outcome, vocabulary),
    }


def _offsets(outcome: CompletionOutcome, vocabulary: Vocabulary) -> list[int]:
    """Where in the completion's text each token begins, in characters, at most at its end."""
    pieces, place, offsets = TextPieces(vocabulary), 0, []
    for token_id in outcome.token_ids:
        offsets.append(min(place, len(outcome.text)))
        place += len(pieces.add(token_id))
    return offsets


def _is_chat(task: Completion) -> bool:
    if task.endpoint in (CHAT, COMPLETIONS):
        return task.endpoint == CHAT
    return isinstance(task.prompt, Conversation)


def _line(name: str, status: int, body: dict[str, Any], error: dict[str, Any] | None) -> bytes:
    response = {"status_code": status, "request_id": f"req_{_code(name)}", "body": body}
    return dump({"id": f"batch_req_{_code(name)}", "custom_id": name, "response": response, "error": error})


def _code(name: str) -> str:
    return hashlib.blake2b(name.encode("utf-8"), digest_size=12, person=b"response").hexdigest()
