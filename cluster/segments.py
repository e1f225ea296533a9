"""The cut of one window into shared prefixes: a node where sorted items part, if it pays.

Pure NumPy, no Ray. Invariant: a node serves an item only if the item still computes the row before each id it
scores, so a shared prefix never changes which rows are scored.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, pairwise
from sys import byteorder

import numpy as np
from numpy.typing import NDArray

from .items import Int32Array, Items
from .keys import prefix_digest
from .wire import WindowHead

PREFIX_END = bytes(4)
BLOCK_IDS = 1 << 20  # neighbours are compared so many ids at a time: 40 MB of scratch, whatever the window


@dataclass(frozen=True, slots=True)
class CutRules:
    """What decides the cut.

    model_digest: identity of the model, part of every key. vocab_size: an item with an id outside it shares
    nothing.
    build_overhead_rows: what building one prefix costs beside its own rows, in rows; a node that saves less
    is not made.
    """

    model_digest: str
    vocab_size: int
    build_overhead_rows: int = 8


@dataclass(frozen=True, slots=True)
class _Trie:
    """Nodes in depth-first order over the sorted items: [low, high) is the run of items below each node."""

    lengths: list[int]
    parents: list[int]
    lows: list[int]
    highs: list[int]
    node_of: Int32Array


def cut_window(
    items: Items, rules: CutRules, *, client: str, window: int, chosen: Int32Array | None = None
) -> WindowHead:
    """The shape of a window: its shared prefixes as nodes and its items, or groups, in depth-first order.

    chosen: int32 indices of the items, or groups, still wanted; all by default.
    """
    units = _units(items, _usable_lengths(items, rules.vocab_size))
    wanted = np.arange(len(units.usable), dtype=np.int32) if chosen is None else chosen.astype(np.int32)
    order = _prefix_order(units.items, units.usable, wanted)
    trie = _trie_of(units, order)
    rows, weights = units.rows[order], units.weights[order]
    ideal_rows = _rows_computed(trie, rows, weights)
    kept = _worth_building(trie, weights, rules.build_overhead_rows)
    return WindowHead(
        client=client,
        window=window,
        depth=items.depth,
        node_digests=b"".join(_digests(units.items, order, kept, rules.model_digest)),
        node_lengths=np.array(kept.lengths, dtype=np.int32),
        node_parents=np.array(kept.parents, dtype=np.int32),
        node_sources=order[kept.lows] if kept.lows else np.empty(0, dtype=np.int32),
        order=order,
        rows=rows,
        node_of=kept.node_of,
        ideal_rows=ideal_rows,
        weights=weights if items.groups is not None else None,
    )


@dataclass(frozen=True, slots=True)
class _Units:
    """What is placed: items, or groups of them as their first items.

    usable: int32, longest prefix that others may share; of a group, one that all of its compared items have.
    rows: int32, of each if nothing is shared. weights: int32, how many of its items read a prefix.
    """

    items: Items
    usable: Int32Array
    rows: Int32Array
    weights: Int32Array


def _units(items: Items, usable: Int32Array) -> _Units:
    rows = np.diff(items.offsets) - 1
    if items.groups is None or not len(items):
        return _Units(items, usable, rows.astype(np.int32), np.ones(len(items), dtype=np.int32))
    firsts, compared = items.groups.offsets[:-1], items.groups.compared
    far = np.iinfo(np.int32).max
    # Compared items stand together at the beginning of a group, so neighbours tell what all of them share.
    everything = np.arange(len(items), dtype=np.int32)
    shared = np.array([far, *_shared_lengths(items, usable, everything)], dtype=np.int32)
    shared[firsts] = far
    common = np.where(compared, np.minimum(usable, shared), far)
    bounds = zip(items.offsets[firsts].tolist(), items.offsets[firsts + 1].tolist(), strict=True)
    ids = [items.token_ids[begin:end] for begin, end in bounds]
    return _Units(
        Items(
            np.concatenate(ids),
            np.cumsum([0, *map(len, ids)], dtype=np.int64),
            items.n_scored[firsts],
            items.depth,
        ),
        np.minimum.reduceat(common, firsts).astype(np.int32),
        np.add.reduceat(rows, firsts).astype(np.int32),
        np.add.reduceat(compared.astype(np.int32), firsts).astype(np.int32),
    )


def _trie_of(units: _Units, order: Int32Array) -> _Trie:
    """The trie over an order of units; what several items of one group read is shared there too."""
    if units.weights.max(initial=1) == 1:
        return _trie(_shared_lengths(units.items, units.usable, order), len(order))
    # Such a group stands for two neighbours that share all they can.
    places = np.repeat(np.arange(len(order)), 1 + (units.weights[order] > 1))
    trie = _trie(_shared_lengths(units.items, units.usable, order[places]), len(places))
    lows, highs = places[trie.lows].tolist(), [int(places[high - 1]) + 1 for high in trie.highs]
    node_of = trie.node_of[np.searchsorted(places, np.arange(len(order)))]
    return _Trie(trie.lengths, trie.parents, lows, highs, node_of)


def _usable_lengths(items: Items, vocab_size: int) -> Int32Array:
    """int32 [n]: longest prefix that others may share; 0 for an item with an id outside the vocabulary."""
    lengths = np.diff(items.offsets)
    usable = np.maximum(lengths - items.n_scored - 1, 0)
    bad = np.flatnonzero((items.token_ids < 0) | (items.token_ids >= vocab_size))
    usable[np.searchsorted(items.offsets, bad, side="right") - 1] = 0
    return usable.astype(np.int32)


def _prefix_order(items: Items, usable: Int32Array, wanted: Int32Array) -> Int32Array:
    """The wanted items sorted by usable prefix, then by the rest: a depth-first walk of the tree."""
    # One key an item, so that a comparison is one memcmp: ids from 1 on, and 0 where the usable prefix ends,
    # so that a prefix stands before what extends it.
    shifted = items.token_ids.astype(np.uint32) + np.uint32(1)
    keys = (shifted.byteswap() if byteorder == "little" else shifted).tobytes()
    starts = items.offsets[:-1]
    begins, middles, ends = 4 * starts, 4 * (starts + usable), 4 * items.offsets[1:]
    bounds = np.stack([begins, middles, ends], axis=1).tolist()

    def key(index: int) -> bytes:
        begin, middle, end = bounds[index]
        return keys[begin:middle] + PREFIX_END + keys[middle:end]

    return np.array(sorted(wanted.tolist(), key=key), dtype=np.int32)


def _shared_lengths(items: Items, usable: Int32Array, order: Int32Array) -> list[int]:
    """For each neighbouring pair of the order, how many usable ids both start with."""
    starts, limits = items.offsets[order], usable[order].astype(np.int64)
    pair_limits = np.minimum(limits[:-1], limits[1:])
    blocks = np.searchsorted(np.cumsum(pair_limits), np.arange(BLOCK_IDS, pair_limits.sum(), BLOCK_IDS))
    borders = [0, *np.unique(blocks).tolist(), len(pair_limits)]
    shared = [
        _first_differences(items.token_ids, starts[begin : end + 1], pair_limits[begin:end])
        for begin, end in pairwise(borders)
    ]
    return list(chain.from_iterable(part.tolist() for part in shared))


def _first_differences(
    token_ids: Int32Array, starts: NDArray[np.int64], limits: NDArray[np.int64]
) -> NDArray[np.int64]:
    """int64 [pairs]: where ids at starts[i] and starts[i + 1] first differ; limits[i] if they do not."""
    ends = np.cumsum(limits)
    within = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - limits, limits)
    left, right = np.repeat(starts[:-1], limits) + within, np.repeat(starts[1:], limits) + within
    different = np.flatnonzero(token_ids[left] != token_ids[right])
    pairs, firsts = np.unique(np.searchsorted(ends, different, side="right"), return_index=True)
    shared = limits.copy()
    shared[pairs] = within[different[firsts]]
    return shared


def _trie(shared: Iterable[int], num_items: int) -> _Trie:
    """Every place where sorted items part, from what neighbours share: the usual walk with a stack."""
    closed: list[tuple[int, int, int]] = []  # (low, length, high)
    open_nodes: list[tuple[int, int]] = []  # (low, length), lengths strictly rising
    for right, length in enumerate([*shared, 0], start=1):
        low = right - 1
        while open_nodes and open_nodes[-1][1] > length:
            low, long = open_nodes.pop()
            closed.append((low, long, right))
        if length and (not open_nodes or open_nodes[-1][1] < length):
            open_nodes.append((low, length))
    closed.sort(key=lambda node: (node[0], node[1]))
    lows, lengths, highs = ([node[k] for node in closed] for k in range(3))
    return _Trie(lengths, _parents(lows, highs), lows, highs, _deepest(lows, highs, num_items))


def _parents(lows: list[int], highs: list[int]) -> list[int]:
    parents: list[int] = []
    path: list[int] = []
    for node, low in enumerate(lows):
        while path and highs[path[-1]] <= low:
            path.pop()
        parents.append(path[-1] if path else -1)
        path.append(node)
    return parents


def _deepest(lows: list[int], highs: list[int], num_items: int) -> Int32Array:
    # Depth-first order: a later node is deeper than the earlier ones it overlaps, so the last write is the
    # deepest.
    node_of = np.full(num_items, -1, dtype=np.int32)
    for node, (low, high) in enumerate(zip(lows, highs, strict=True)):
        node_of[low:high] = node
    return node_of


def _rows_computed(trie: _Trie, rows: Int32Array, weights: Int32Array) -> int:
    """Rows when each node is computed once and each item only what follows its deepest node."""
    lengths = np.array([*trie.lengths, 0], dtype=np.int64)
    parents = np.array(trie.parents, dtype=np.int64)
    own = lengths[:-1] - lengths[parents] if len(parents) else np.zeros(0, dtype=np.int64)
    return int(own.sum() + rows.sum(dtype=np.int64) - (lengths[trie.node_of] * weights).sum())


def _worth_building(trie: _Trie, weights: Int32Array, overhead_rows: int) -> _Trie:
    """The nodes whose (uses - 1) x own rows, after the nearest kept ancestor, exceed one build's overhead."""
    uses = np.zeros(len(trie.lengths) + 1, dtype=np.int64)
    np.add.at(uses, np.array(trie.parents, dtype=np.int64), 1)
    has_node = trie.node_of >= 0
    direct = np.bincount(trie.node_of[has_node], weights[has_node], minlength=len(trie.lengths))
    uses[: len(trie.lengths)] += direct.astype(np.int64)
    kept_as: list[int] = []  # of each node, the kept node that stands for it
    kept: list[int] = []
    for node, length in enumerate(trie.lengths):
        above = kept_as[trie.parents[node]] if trie.parents[node] >= 0 else -1
        own = length - (trie.lengths[kept[above]] if above >= 0 else 0)
        if (int(uses[node]) - 1) * own > overhead_rows:
            kept.append(node)
            kept_as.append(len(kept) - 1)
        else:
            kept_as.append(above)
    lows, highs = [trie.lows[node] for node in kept], [trie.highs[node] for node in kept]
    lengths = [trie.lengths[node] for node in kept]
    return _Trie(lengths, _parents(lows, highs), lows, highs, _deepest(lows, highs, len(trie.node_of)))


def _digests(items: Items, order: Int32Array, trie: _Trie, model_digest: str) -> list[bytes]:
    starts = items.offsets[order].tolist()
    return [
        prefix_digest(items.token_ids[starts[low] : starts[low] + length], items.depth, model_digest)
        for low, length in zip(trie.lows, trie.lengths, strict=True)
    ]
