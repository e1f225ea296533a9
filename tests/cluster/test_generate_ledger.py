"""What a client knows of its completions: each id once, in order, and compared when it comes again."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from tinyloop.cluster.generate_items import Defaults, NotGenerated, Prompt, Tokens, columns_of
from tinyloop.cluster.generate_ledger import Event, GenerateLedger, RepeatDiffers
from tinyloop.workers.tokens import End, TokenBundle
from tinyloop.workers.wire import ItemFailure

IDS = np.arange(100, 120, dtype=np.int32)
LOGPROBS = -np.arange(20, dtype=np.float32) / 7
DEPTHS = np.arange(20, dtype=np.int32) % 3 + 1


def bundle(*parts: tuple[int, int, int, End]) -> TokenBundle:
    """(item, first, last, end) each: ids first..last - 1 of the completion IDS."""
    return TokenBundle(
        number=1,
        windows=np.zeros(len(parts), np.int64),
        items=np.array([part[0] for part in parts], np.int32),
        first=np.array([part[1] for part in parts], np.int32),
        ends=np.array([part[3] for part in parts], np.uint8),
        offsets=np.cumsum([0, *(part[2] - part[1] for part in parts)], dtype=np.int64),
        token_ids=np.concatenate([IDS[first:last] for _, first, last, _ in parts]),
        logprobs=np.concatenate([LOGPROBS[first:last] for _, first, last, _ in parts]),
        depths=np.concatenate([DEPTHS[first:last] for _, first, last, _ in parts]),
        failures=tuple(ItemFailure(p[0], "non_finite", "none") for p in parts if p[3] is End.FAILED),
    )


def ledger_of(count: int) -> GenerateLedger:
    ledger = GenerateLedger()
    prompts = [Prompt([i + 1], 20) for i in range(count)]
    ledger.open(columns_of(prompts, Defaults(2, ()), client="c", window=0))
    return ledger


def brief(events: list[tuple[int, Event]]) -> list[tuple[int, int, list[int], str | None]]:
    return [
        (e.prompt, e.first, e.token_ids.tolist(), e.finish_reason) for _, e in events if isinstance(e, Tokens)
    ]


def test_ids_are_handed_on_once_and_in_order() -> None:
    ledger = ledger_of(2)
    assert brief(ledger.accept(bundle((0, 0, 3, End.OPEN), (1, 0, 1, End.OPEN)))) == [
        (0, 0, [100, 101, 102], None),
        (1, 0, [100], None),
    ]
    assert ledger.missing(0).tolist() == [0, 1]
    assert brief(ledger.accept(bundle((0, 3, 5, End.STOP)))) == [(0, 3, [103, 104], "stop")]
    assert brief(ledger.accept(bundle((1, 1, 1, End.LENGTH)))) == [(1, 1, [], "length")]
    assert (ledger.missing(0).tolist(), ledger.open_windows()) == ([], [])
    assert ledger.accept(bundle((0, 3, 5, End.STOP))) == []


def test_what_comes_again_is_compared_and_only_the_rest_is_new() -> None:
    ledger = ledger_of(1)
    ledger.accept(bundle((0, 0, 6, End.OPEN)))
    assert brief(ledger.accept(bundle((0, 0, 4, End.OPEN)))) == []
    assert brief(ledger.accept(bundle((0, 4, 9, End.LENGTH)))) == [(0, 6, [106, 107, 108], "length")]


@pytest.mark.parametrize("name", ["token_ids", "logprobs", "depths"])
def test_another_id_or_bit_is_refused_by_name(name: str) -> None:
    ledger = ledger_of(1)
    ledger.accept(bundle((0, 0, 6, End.OPEN)))
    again = bundle((0, 0, 8, End.OPEN))
    column = getattr(again, name).copy()
    column.view(np.int32)[4] ^= 1
    with pytest.raises(RepeatDiffers, match=f"prompt 0 of window 0 came out differently .* {name} at 4 is"):
        ledger.accept(replace(again, **{name: column}))


def test_lost_ids_and_a_shorter_end_are_noticed() -> None:
    ledger = ledger_of(1)
    ledger.accept(bundle((0, 0, 6, End.OPEN)))
    with pytest.raises(RepeatDiffers, match="ids from 7 on came, and 6 are known"):
        ledger.accept(bundle((0, 7, 8, End.OPEN)))
    with pytest.raises(RepeatDiffers, match="ended after 5 ids, and 6 are known"):
        ledger.accept(bundle((0, 0, 5, End.STOP)))


def test_a_failure_ends_a_completion_with_the_ids_before_it() -> None:
    ledger = ledger_of(2)
    events = ledger.accept(bundle((0, 0, 2, End.FAILED), (1, 0, 0, End.FAILED)))
    assert brief(events) == [(0, 0, [100, 101], None)]
    failed = [event for _, event in events if isinstance(event, NotGenerated)]
    assert [(event.prompt, event.error_class) for event in failed] == [(0, "non_finite"), (1, "non_finite")]
    assert ledger.missing(0).tolist() == []


def test_what_was_given_up_or_cancelled_hands_on_nothing_more() -> None:
    ledger = ledger_of(3)
    ledger.accept(bundle((0, 0, 2, End.OPEN)))
    event = ledger.cancel(0, 0)
    assert isinstance(event, Tokens)
    assert (event.first, event.finish_reason, ledger.cancel(0, 0)) == (2, "cancelled", None)
    given_up = ledger.fail(0, np.array([0, 1], np.int32), "replica_lost", "it died", 3)
    assert given_up == [NotGenerated(1, "replica_lost", "it died", 3)]
    assert ledger.accept(bundle((0, 2, 4, End.OPEN), (1, 0, 3, End.STOP))) == []
    assert ledger.missing(0).tolist() == [2]
    ledger.close(0)
    assert ledger.accept(bundle((2, 0, 4, End.OPEN))) == []


@pytest.mark.parametrize("seed", range(20))
def test_any_number_of_replicas_that_begin_anew_give_each_id_once(seed: int) -> None:
    """Several replicas send the same completion in pieces of their own, each from its start, some dying."""
    random, ledger, found = Random(seed), ledger_of(1), []
    places = [0, 0, 0]
    while ledger.open_windows():
        replica = random.randrange(3)
        first = places[replica]
        last = min(first + random.randrange(5), 20)
        end = End.LENGTH if last == 20 else End.OPEN
        for _, _, ids, _ in brief(ledger.accept(bundle((0, first, last, end)))):
            found += ids
        places[replica] = 0 if random.random() < 0.1 else last
    assert found == IDS.tolist()
