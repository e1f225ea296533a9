"""generation_kwargs of the harness as settings of a prompt, and conversations as its prompts."""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval.models.utils import normalize_gen_kwargs

from ..chat_template import ChatTemplate, ChatTemplateError
from .harness_errors import HarnessError, shown

log = logging.getLogger(__name__)

SAMPLING = ("top_p", "top_k", "min_p")
KNOWN = (*SAMPLING, "temperature", "repetition_penalty", "do_sample", "until", "max_gen_toks", "num_beams")


def settings_of(gen_kwargs: Mapping[str, Any], eos: str, default_new_tokens: int) -> dict[str, Any]:
    """Settings under the names that a row of `tinyloop generate` has for them.

    eos: the end token's text, which ends a completion however it is spelled. Raises: HarnessError for what is
    not known here, or asks for sampling and for none.
    """
    given = normalize_gen_kwargs(dict(gen_kwargs), default_new_tokens)
    if unknown := sorted(set(given) - set(KNOWN)):
        raise HarnessError(
            f"generation_kwargs has {', '.join(unknown)}: known are {', '.join(KNOWN)}: leave it out, or "
            "set it with --gen_kwargs"
        )
    if given.pop("num_beams", 1) != 1:
        raise HarnessError("generation_kwargs asks for beams: one beam alone is generated here")
    temperature = float(given.get("temperature", 0.0))
    if given["do_sample"] and temperature == 0:
        raise HarnessError("generation_kwargs has do_sample and no temperature above 0: give one, or neither")
    settings: dict[str, Any] = {"max_new_tokens": given["max_gen_toks"], "temperature": temperature}
    if given["do_sample"]:
        settings |= {name: given[name] for name in SAMPLING if given.get(name) is not None}
    if given.get("repetition_penalty") is not None:
        settings["repetition_penalty"] = given["repetition_penalty"]
    # The harness takes an empty stop string for none.
    settings["stop"] = [stop for stop in dict.fromkeys([*given["until"], eos]) if stop]
    return settings


def refuse_lying_cache(gen_kwargs: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """The harness's response cache knows a drawn completion by do_sample alone.

    Raises: HarnessError for one that it would serve for all repeats.
    """
    if settings["temperature"] > 0 and not gen_kwargs.get("do_sample", False):
        raise HarnessError(
            "generation_kwargs has a temperature without do_sample, and --use_cache would then serve one "
            "drawn completion for all: add do_sample: true"
        )


class Seeds:
    """Seeds of drawn completions, by what is asked: order and mates change none, and repeats differ."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._asked: Counter[bytes] = Counter()

    def of(self, context: str, gen_kwargs: Mapping[str, Any]) -> int:
        """The seed of the next completion of this request, 53 bits."""
        request = json.dumps([self._seed, context, gen_kwargs], sort_keys=True, default=str)
        key = hashlib.sha256(request.encode("utf-8", "surrogatepass")).digest()
        number, self._asked[key] = self._asked[key], self._asked[key] + 1
        drawn = hashlib.sha256(key + number.to_bytes(8, "little")).digest()
        return int.from_bytes(drawn[:8], "little") >> 11


def conversation_text(
    template: ChatTemplate | None, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool
) -> str:
    """A conversation by the model's template; without add_generation_prompt the last message is left open.

    A system message that the template refuses is left out, as the harness does, with a warning.
    Raises: HarnessError.
    """
    if template is None:
        raise HarnessError("the model has no chat template: leave --apply_chat_template out")
    try:
        text = template.render(messages, add_generation_prompt=add_generation_prompt)
    except ChatTemplateError as error:
        rest = [message for message in messages if message["role"] != "system"]
        if len(rest) == len(messages):
            raise HarnessError(str(error)) from error
        log.warning("the %s: the system message is left out", error)
        return conversation_text(template, rest, add_generation_prompt=add_generation_prompt)
    return text if add_generation_prompt else _opened(text, str(messages[-1]["content"]))


def _opened(text: str, last: str) -> str:
    """A text up to the end of its last message, of which a template may strip the ends."""
    bare = last.strip()
    begin = text.rfind(bare)
    if begin < 0:
        raise HarnessError(f"the chat template does not show the last message {shown(last)}: it cannot go on")
    whole = text.startswith(last, begin)
    return text[: begin + len(last if whole else bare)]
