"""A conversation to the text that a model expects, by the template that came with the model.

Templates are Jinja programs out of model files: they run in Jinja's sandbox, see plain JSON values alone and
cannot ask what time it is, so that the same conversation is the same text at every run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class ChatTemplateError(ValueError):
    """A template that cannot be read, or a conversation that it does not take."""


class ChatTemplate:
    """A model's chat template. Holds nothing between conversations."""

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "") -> None:
        """Compile a template. Raises: ChatTemplateError that names the line."""
        self.source = source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        try:
            self._template = _environment().from_string(source)
        except TemplateError as error:
            line = getattr(error, "lineno", None)
            where = "" if line is None else f", line {line}"
            raise ChatTemplateError(f"chat template cannot be read{where}: {error}") from error

    @classmethod
    def of_model(
        cls, descriptor: Mapping[str, Any], tokenizer: Tokenizer, source: str = ""
    ) -> ChatTemplate | None:
        """The template in a model's descriptor, or `source` in its place; None if there is neither.

        Raises: ChatTemplateError.
        """
        source = source or str(descriptor.get("chat_template", ""))
        if not source:
            return None
        bos_id, eos_ids = int(descriptor["bos_id"]), list(descriptor["eos_ids"])
        return cls(
            source,
            bos_token=(tokenizer.id_to_token(bos_id) or "") if bos_id >= 0 else "",
            eos_token=(tokenizer.id_to_token(int(eos_ids[0])) or "") if eos_ids else "",
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The text of a conversation, up to where the model's answer begins.

        messages: of JSON values; each has a role. add_generation_prompt: open the answer.
        Special tokens are spelled out in the text, BOS too where the template puts one: add none to it.
        Raises: ChatTemplateError with the template's own words if it refuses the conversation.
        """
        # What is null is as good as absent; templates would otherwise print it.
        given = [{key: value for key, value in one.items() if value is not None} for one in messages]
        try:
            return self._template.render(
                messages=given,
                tools=None if tools is None else list(tools),
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._tokens,
            )
        except RecursionError:
            raise ChatTemplateError("chat template does not come to an end") from None
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            # A template is a program: whatever stops it, stops it for this conversation.
            raise ChatTemplateError(f"chat template refuses the messages: {error}") from error


class _AnswerBlock(Extension):
    """{% generation %} marks an answer for training; here what is inside is text like any other."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own spelling)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _AnswerBlock]
    )
    # strftime_now is not given: templates that know what to do without it take a date of their own.
    environment.globals |= {"raise_exception": _refuse, "dict": _dict}
    environment.filters["tojson"] = _to_json
    return environment


def _refuse(message: object) -> None:
    raise TemplateError(str(message))


def _dict(*pairs: Any, **values: Any) -> dict[Any, Any]:
    return dict(*pairs, **values)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As models were trained: no escapes for HTML, which Jinja's own filter would add."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
