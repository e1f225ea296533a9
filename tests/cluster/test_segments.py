"""The cut of a window, against a dictionary of every prefix."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tinyloop.cluster.items import Items
from tinyloop.cluster.keys import at_depth, depth_of, prefix_digest
from tinyloop.cluster.segments import CutRules, cut_window
from tinyloop.cluster.wire import WindowHead, decode_window, encode_window

RULES = CutRules(model_digest="model", vocab_size=8, build_overhead_rows=0)

item_lists = st.lists(
    st.lists(st.integers(0, 2), min_size=2, max_size=9).flatmap(
        lambda ids: st.tuples(st.just(ids), st.integers(1, len(ids) - 1))
    ),
    min_size=1,
    max_size=12,
)


def items_of(rows: list[tuple[list[int], int]], depth: int = 2) -> Items:
    offsets = np.cumsum([0, *(len(ids) for ids, _ in rows)])
    return Items(
        token_ids=np.array([token for ids, _ in rows for token in ids], dtype=np.int32),
        offsets=offsets.astype(np.int64),
        n_scored=np.array([scored for _, scored in rows], dtype=np.int32),
        depth=depth,
    )


def ids_of(items: Items, index: int) -> tuple[int, ...]:
    return tuple(items.token_ids[items.offsets[index] : items.offsets[index + 1]].tolist())


def node_ids(items: Items, head: WindowHead, node: int) -> tuple[int, ...]:
    return ids_of(items, int(head.node_sources[node]))[: head.node_lengths[node]]


@settings(max_examples=150, deadline=None)
@given(item_lists)
def test_nodes_are_the_places_where_usable_prefixes_part(rows: list[tuple[list[int], int]]) -> None:
    items = items_of(rows)
    head = cut_window(items, RULES, client="c", window=0)
    usable = [tuple(ids[: max(len(ids) - scored - 1, 0)]) for ids, scored in rows]
    expected = set()
    for length in range(1, 10):
        for prefix in {u[:length] for u in usable if len(u) >= length}:
            longer = [u[length : length + 1] for u in usable if u[:length] == prefix and len(u) >= length]
            if len(longer) > 1 and (len(set(longer)) > 1 or () in longer):
                expected.add(prefix)
    nodes = [node_ids(items, head, node) for node in range(len(head.node_lengths))]
    assert sorted(nodes) == sorted(expected)
    assert nodes == sorted(nodes)
    for position, item in enumerate(head.order.tolist()):
        serving = [prefix for prefix in expected if usable[item][: len(prefix)] == prefix]
        node = head.node_of[position]
        assert (nodes[node] if node >= 0 else ()) == max(serving, key=len, default=())


@settings(max_examples=100, deadline=None)
@given(item_lists)
def test_ideal_rows_count_each_usable_prefix_once(rows: list[tuple[list[int], int]]) -> None:
    items = items_of(rows)
    head = cut_window(items, RULES, client="c", window=0)
    once = {tuple(ids[:k]) for ids, scored in rows for k in range(1, max(len(ids) - scored - 1, 0) + 1)}
    shared = {
        p for p in once if sum(tuple(ids[: len(p)]) == p and len(p) < len(ids) - s for ids, s in rows) > 1
    }
    rows_after = sum(
        len(ids)
        - 1
        - max((len(p) for p in shared if tuple(ids[: len(p)]) == p and len(p) < len(ids) - s), default=0)
        for ids, s in rows
    )
    assert head.ideal_rows == len(shared) + rows_after


def test_a_prefix_that_saves_less_than_its_build_is_not_made() -> None:
    rows = [([1, 2, 3, 4, tail, 5], 1) for tail in (1, 2)]
    cheap = CutRules("model", 8, build_overhead_rows=3)
    dear = CutRules("model", 8, build_overhead_rows=4)
    assert cut_window(items_of(rows), cheap, client="c", window=0).node_lengths.tolist() == [4]
    assert cut_window(items_of(rows), dear, client="c", window=0).node_lengths.tolist() == []


def test_an_item_with_an_id_outside_the_vocabulary_shares_nothing() -> None:
    rows = [([1, 1, 1, 1, 1, 2], 1), ([1, 1, 1, 99, 1, 2], 1), ([1, 1, 1, 1, 3, 2], 1)]
    head = cut_window(items_of(rows), RULES, client="c", window=0)
    assert head.node_of[head.order.tolist().index(1)] == -1
    assert head.node_lengths.tolist() == [4]


def test_the_depth_and_the_model_are_part_of_a_key() -> None:
    ids = np.array([1, 2, 3], dtype=np.int32)
    keys = {prefix_digest(ids, depth, model) for depth in (1, 2) for model in ("a", "b")}
    assert len(keys) == 4
    assert {len(key) for key in keys} == {16}
    deep, shallow = prefix_digest(ids, 4, "a"), prefix_digest(ids, 2, "a")
    assert at_depth(shallow, 4) == deep
    assert (depth_of(deep), depth_of(shallow)) == (4, 2)
    assert at_depth(prefix_digest(ids, 2, "b"), 4) != deep


def test_a_subset_of_the_items_keeps_their_indices() -> None:
    rows = [([1, 2, 3, 4, tail, 5], 1) for tail in (1, 2, 3, 4)]
    chosen = np.array([3, 1], dtype=np.int32)
    head = cut_window(items_of(rows), RULES, client="c", window=0, chosen=chosen)
    assert sorted(head.order.tolist()) == [1, 3]
    assert head.node_sources.tolist() in ([1], [3])


def test_a_window_survives_the_wire() -> None:
    rows = [([1, 2, 3, 4, tail, 5], 1) for tail in (1, 2, 3, 4)]
    head = cut_window(items_of(rows), RULES, client="c", window=3)
    again = decode_window(encode_window(head))
    assert encode_window(again) == encode_window(head)
    assert (again.client, again.window, again.ideal_rows) == ("c", 3, head.ideal_rows)


def test_neighbours_are_compared_in_blocks_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(5)
    rows = [(random.integers(0, 2, random.integers(2, 12)).tolist(), 1) for _ in range(60)]
    whole = encode_window(cut_window(items_of(rows), RULES, client="c", window=0))
    for block in (1, 2, 7, 50):
        monkeypatch.setattr("tinyloop.cluster.segments.BLOCK_IDS", block)
        assert encode_window(cut_window(items_of(rows), RULES, client="c", window=0)) == whole
