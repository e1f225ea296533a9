"""The client's ledger: nothing lost, nothing twice."""

from __future__ import annotations

import numpy as np
from simulated import ragged_items
from tinyloop.cluster.items import Scored
from tinyloop.cluster.ledger import Ledger
from tinyloop.cluster.wire import Delivery
from tinyloop.workers.messages import encode_result
from tinyloop.workers.wire import ItemFailure, Result


def result(items: list[int], failures: tuple[ItemFailure, ...] = ()) -> bytes:
    """Item i has i + 1 scores, all equal to -i."""
    logprobs = np.concatenate([np.full(i + 1, -i) for i in items]) if items else np.empty(0)
    offsets = np.cumsum([0, *(i + 1 for i in items)], dtype=np.int64)
    chosen = np.array(items, dtype=np.int32)
    return encode_result(Result(chosen, logprobs.astype(np.float32), logprobs > -1, offsets, failures))


def delivery(items: list[int]) -> Delivery:
    return Delivery(1, 0, np.array(items, dtype=np.int32), "", "", 1, rows=7)


def test_the_first_result_of_an_item_wins_and_later_ones_are_dropped() -> None:
    ledger = Ledger()
    ledger.open(0, ragged_items([np.arange(8)] * 5, [1] * 5))
    assert len(ledger.accept(delivery([0, 2]), result([0, 2]))) == 1
    (second,) = ledger.accept(delivery([2, 0, 3]), result([2, 0, 3]))
    assert isinstance(second, Scored)
    assert second.items.tolist() == [3]
    assert second.logprobs.tolist() == [-3.0] * 4
    assert second.offsets.tolist() == [0, 4]
    assert ledger.missing(0).tolist() == [1, 4]
    assert ledger.close_finished() == []


def test_a_window_is_closed_when_scored_failed_and_given_up_items_make_it_whole() -> None:
    ledger = Ledger()
    ledger.open(0, ragged_items([np.arange(8)] * 3, [1] * 3))
    failure = ItemFailure(1, "non_finite", "text")
    assert len(ledger.accept(delivery([0, 1]), result([0], (failure,)))) == 2
    assert ledger.accept(delivery([0, 1]), result([0], (failure,))) == []
    ledger.fail(delivery([2]), 2)
    assert ledger.close_finished() == [0]
    assert ledger.windows_in_flight == 0
    assert ledger.accept(delivery([0]), result([0])) == []
    assert (ledger.total_rows, ledger.computed_rows) == (7, 14)
