"""The harness's response cache (--use_cache), kept to one model.

Its keys are the request alone, so the answers of one model would be served as those of another. What they
came from is therefore written into the file itself and held against what asks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .harness_errors import HarnessError

# No hash of a request, which are of 64 hexadecimal digits.
KEY = "tinyloop: what the answers in this file came from"


def refuse_foreign_cache(answers: Any, identity: Mapping[str, Any]) -> None:
    """Raises: HarnessError, after closing it, if a cache holds answers of another model, depth or rule.

    answers: the open SqliteDict. identity: what an answer depends on beside the request; written into a cache
    that is empty.
    """
    mine = json.dumps(identity, sort_keys=True)
    theirs = answers.get(KEY)
    if theirs == mine:
        return
    if theirs is None and not len(answers):
        answers[KEY] = mine
        return
    file = answers.filename
    answers.close()
    if theirs is None:
        reason = "does not say which model its answers came from"
    else:
        old = json.loads(theirs)
        names = sorted(name for name in old.keys() | identity.keys() if old.get(name) != identity.get(name))
        reason = "holds answers of another: " + "; ".join(
            f"{name} was {old.get(name)!r}, is {identity.get(name)!r}" for name in names
        )
    raise HarnessError(f"cannot use the cache {file!r}: it {reason}: give --use_cache another name")
