"""Requests of the cases as prompts of a pool, and their completions by an oracle and as a pool gives them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from fake_model import expected_completion
from generation_cases import PLAIN, Found, Item
from tinyloop.cluster.generate_items import Generated, NotGenerated, Prompt


def prompt_of(item: Item) -> Prompt:
    ids, settings = item
    return Prompt(np.array(ids, np.int32), **{"stop_ids": [], "depth": 2, "max_new_tokens": 8, **settings})


def fake_alone(items: Sequence[Item]) -> list[Found]:
    found = []
    for ids, settings in items:
        row = PLAIN | settings
        found.append(expected_completion(np.array(ids, np.int32), row.pop("max_new_tokens"), **row))
    return found


def as_found(completion: Any) -> Found:
    columns = (completion.token_ids, completion.logprobs, completion.depths)
    return (*(column.tolist() for column in columns), completion.finish_reason)  # type: ignore[return-value]


def completions(results: Sequence[Generated | NotGenerated]) -> list[Found]:
    for result in results:
        assert isinstance(result, Generated), result
    return [as_found(result) for result in results]
