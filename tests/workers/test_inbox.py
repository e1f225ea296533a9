"""The inbox: every entry is taken once or refused once, and only in order."""

from __future__ import annotations

from random import Random

import pytest
from tinyloop.workers.inbox import Inbox


@pytest.mark.parametrize("seed", range(20))
def test_every_entry_is_taken_or_refused_exactly_once_and_in_order(seed: int) -> None:
    random = Random(seed)
    inbox: Inbox[tuple[int, int, int]] = Inbox(limit=4, gap_s=5.0)
    offered: list[tuple[int, int, int]] = []
    taken: list[tuple[int, int, int]] = []
    refused: list[tuple[int, int, int]] = []
    now_s = 0.0
    for number in range(300):
        now_s += random.random()
        entry = (random.randrange(1 + number // 60), random.randrange(8), number)
        offered.append(entry)
        refused += [e for e, _ in inbox.offer(entry[0], entry[1], entry, now_s)]
        if random.random() < 0.7 and (next_entry := inbox.take()) is not None:
            taken.append(next_entry)
        refused += [e for e, _ in inbox.overdue(now_s)]
    refused += [e for e, _ in inbox.end_epoch("end")]
    assert sorted(taken + refused) == sorted(offered)
    orders = [(epoch, sequence) for epoch, sequence, _ in taken]
    assert orders == sorted(set(orders))
    for epoch in {epoch for epoch, _ in orders}:
        sequences = [s for e, s in orders if e == epoch]
        assert sequences == list(range(len(sequences)))


def test_a_full_inbox_refuses_and_says_how_many_wait() -> None:
    inbox: Inbox[str] = Inbox(limit=2)
    assert inbox.offer(0, 0, "a", 0.0) == []
    assert inbox.offer(0, 1, "b", 0.0) == []
    assert inbox.offer(0, 2, "c", 0.0) == [("c", "overloaded: 2 commands wait")]


def test_a_gap_is_only_a_gap_while_the_missing_entry_has_not_been_taken() -> None:
    inbox: Inbox[str] = Inbox(limit=4, gap_s=5.0)
    inbox.offer(0, 0, "first", 0.0)
    inbox.offer(0, 1, "second", 0.0)
    assert inbox.take() == "first"
    assert inbox.overdue(100.0) == []
    inbox.offer(0, 3, "early", 100.0)
    assert inbox.take() == "second"
    assert inbox.overdue(104.9) == []
    assert inbox.overdue(105.0) == [("early", "gap: 3 arrived and 2 did not in 5.0 s")]
