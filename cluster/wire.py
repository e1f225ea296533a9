"""What a client and the router say to each other, behind the version byte of the commands."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..workers.wire import (
    DIGEST_BYTES,
    OLDEST,
    SCORE,
    VERSION,
    Int32Array,
    WireError,
    array_fields,
    array_from,
    counted,
    kind_of_work,
    listed,
    pack,
    record,
    typed,
    unpack,
)

# Windows to generate are numbered from here, those to score below: of one client no number has two meanings.
FIRST_STREAM = 1 << 62


@dataclass(frozen=True, slots=True)
class WindowHead:
    """A window as the router sees it: keys, lengths and shape, never a token.

    Nodes stand in depth-first order. node_digests: 16 bytes a node; node_lengths int32; node_parents int32,
    -1 for none; node_sources int32 (an item that starts with the node). order int32 [m]: items, depth first;
    rows int32 [m]: what each costs in rows if nothing is shared, which is len - 1 to score it; node_of int32
    [m]: its deepest node or -1, both in that order. ideal_rows: rows if each node is computed once. kind:
    SCORE or GENERATE. weights: None, or int32 [m] where what stands in order are groups of items that are run
    together: how many of each read the node.
    """

    client: str
    window: int
    depth: int
    node_digests: bytes
    node_lengths: Int32Array
    node_parents: Int32Array
    node_sources: Int32Array
    order: Int32Array
    rows: Int32Array
    node_of: Int32Array
    ideal_rows: int
    kind: str = SCORE
    weights: Int32Array | None = None


@dataclass(frozen=True, slots=True)
class Delivery:
    """Items of one window that are finished. error_class is empty when they have scores.

    number: grows by one a delivery; a client names the last one it has, and the router forgets up to there.
    """

    number: int
    window: int
    items: Int32Array
    error_class: str
    message: str
    attempts: int
    rows: int


def encode_window(head: WindowHead) -> bytes:
    """The shape of a window as bytes."""
    nodes = [array_fields(a) for a in (head.node_lengths, head.node_parents, head.node_sources)]
    items = [array_fields(a) for a in (head.order, head.rows, head.node_of)]
    fields = [head.client, head.window, head.depth, head.node_digests, *nodes, *items]
    weights = [] if head.weights is None else [array_fields(head.weights)]
    fields += [head.ideal_rows, head.kind, *weights]
    return pack("window", fields, VERSION if weights else OLDEST)


def decode_window(message: bytes) -> WindowHead:
    """The shape of a window from bytes. Raises WireError."""
    client, window, depth, digests, *arrays, ideal, kind, weights = unpack("window", message, 12, optional=1)
    lengths, parents, sources, order, rows, node_of = arrays
    head = WindowHead(
        client=typed(client, str),
        window=counted(window),
        depth=counted(depth),
        node_digests=typed(digests, bytes),
        node_lengths=array_from(lengths, "<i4"),
        node_parents=array_from(parents, "<i4"),
        node_sources=array_from(sources, "<i4"),
        order=array_from(order, "<i4"),
        rows=array_from(rows, "<i4"),
        node_of=array_from(node_of, "<i4"),
        ideal_rows=counted(ideal),
        kind=kind_of_work(kind),
        weights=None if weights is None else array_from(weights, "<i4"),
    )
    _check_window(head)
    return head


def _check_window(head: WindowHead) -> None:
    num_nodes = len(head.node_lengths)
    if (
        not len(head.node_digests) / DIGEST_BYTES
        == len(head.node_parents)
        == len(head.node_sources)
        == num_nodes
    ):
        raise WireError(f"a window of {num_nodes} nodes has columns of other lengths")
    weights = head.node_of if head.weights is None else head.weights
    if not len(head.order) == len(head.rows) == len(head.node_of) == len(weights):
        raise WireError(f"a window of {len(head.order)} items has columns of other lengths")
    if num_nodes and any(
        parent >= node or parent < -1 for node, parent in enumerate(head.node_parents.tolist())
    ):
        raise WireError("a node of a window stands before its parent")
    if len(head.node_of) and not -1 <= head.node_of.min() <= head.node_of.max() < num_nodes:
        raise WireError(f"an item of a window names a node outside 0..{num_nodes - 1}")


def encode_deliveries(deliveries: list[Delivery]) -> bytes:
    """What a client collects as bytes."""
    fields: list[object] = [
        [d.number, d.window, array_fields(d.items), d.error_class, d.message, d.attempts, d.rows]
        for d in deliveries
    ]
    return pack("deliveries", [fields])


def decode_deliveries(message: bytes) -> list[Delivery]:
    """What a client collects from bytes. Raises WireError."""
    (entries,) = unpack("deliveries", message, 1)
    return [_delivery_from(entry) for entry in listed(entries)]


def _delivery_from(value: object) -> Delivery:
    number, window, items, error_class, message, attempts, rows = record(value, 7)
    return Delivery(
        number=counted(number),
        window=counted(window),
        items=array_from(items, "<i4").astype(np.int32),
        error_class=typed(error_class, str),
        message=typed(message, str),
        attempts=counted(attempts),
        rows=counted(rows),
    )
