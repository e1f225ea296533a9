"""Chat templates against transformers' own rendering of them, and what the sandbox keeps out."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from tinyloop.cluster.chat_template import ChatTemplate, ChatTemplateError
from transformers import PreTrainedTokenizerFast

from .tiny_tokenizer import BOS, EOS, tiny_descriptor, tiny_tokenizer

TEMPLATES = {
    "chatml": "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] "
    "+ '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    "blocks": """{{ bos_token }}
{%- set ns = namespace(system='') %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- set ns.system = message.content | trim %}
        {%- continue %}
    {%- endif %}
    {%- if message.role == 'assistant' %}
    {% generation %}
{{ message.content + eos_token }}
    {% endgeneration %}
    {%- else %}
[INST] {{ ns.system ~ message.content }} [/INST]
    {%- endif %}
    {%- if loop.index > 5 %}{% break %}{% endif %}
{%- endfor %}
""",
    "tools": "{% if tools %}{% for tool in tools %}{{ tool | tojson(indent=2) }}{% endfor %}{% endif %}"
    "{% for message in messages %}{{ message | tojson }}{{ dict(a=1) }}{% endfor %}",
    "alternates": "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}{% endfor %}",
}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hello <world> & 'caf\u00e9'"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "name": None},
        {"role": "user", "content": " c \n"},
    ],
    [{"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}],
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "\u00e9 <b>"}}]


@pytest.mark.parametrize("open_answer", [False, True])
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_is_rendered_as_transformers_does(
    name: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, open_answer: bool
) -> None:
    tokenizer = tiny_tokenizer()
    oracle = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS)
    expected = oracle.apply_chat_template(
        messages,
        tools=tools,
        chat_template=TEMPLATES[name],
        add_generation_prompt=open_answer,
        tokenize=False,
    )
    descriptor = tiny_descriptor(tokenizer, bos_id=0, chat_template=TEMPLATES[name])
    template = ChatTemplate.of_model(descriptor, tokenizer)
    assert template is not None
    assert template.render(messages, tools=tools, add_generation_prompt=open_answer) == expected


def test_a_template_may_refuse_a_conversation_in_its_own_words() -> None:
    template = ChatTemplate(TEMPLATES["alternates"])
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        template.render([{"role": "assistant", "content": "a"}])


def test_a_model_without_a_template_has_none_and_one_that_is_given_takes_its_place() -> None:
    tokenizer = tiny_tokenizer()
    assert ChatTemplate.of_model(tiny_descriptor(tokenizer), tokenizer) is None
    given = ChatTemplate.of_model(tiny_descriptor(tokenizer), tokenizer, "{{ eos_token }}!")
    assert given is not None
    assert given.render([]) == "<eos>!"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% for m in messages %}", "cannot be read, line 1"),
        ("{% unknown %}", "cannot be read, line 1"),
    ],
)
def test_a_template_that_is_no_template_is_refused_with_its_line(source: str, words: str) -> None:
    with pytest.raises(ChatTemplateError, match=words):
        ChatTemplate(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__ }}",
        "{{ dict.__init__.__globals__ }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 // 0 }}",
        "{% for i in range(10000000) %}x{% endfor %}",
        "{{ strftime_now('%Y') }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_what_a_template_may_not_or_cannot_do_ends_in_an_error_of_the_conversation(source: str) -> None:
    template = ChatTemplate(source)
    with suppress(ChatTemplateError):
        assert template.render([{"role": "user", "content": "a"}]) == ""
