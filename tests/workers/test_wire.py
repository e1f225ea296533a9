"""The wire: what is encoded is decoded; other versions and hostile bytes are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tinyloop.cluster.generate_wire import Settled, decode_settled, encode_settled
from tinyloop.cluster.wire import decode_deliveries, decode_window
from tinyloop.workers import messages, wire
from tinyloop.workers.prompts import decode_prompts
from tinyloop.workers.status import ModelFacts, Status, decode_status, encode_status
from tinyloop.workers.tokens import decode_tokens
from tinyloop.workers.wire import OLDEST, VERSION, WireError

DECODERS: list[Callable[[bytes], Any]] = [
    messages.decode_command,
    messages.decode_ack,
    messages.decode_result,
    messages.decode_inventory,
    decode_status,
    decode_window,
    decode_deliveries,
    decode_prompts,
    decode_tokens,
    decode_settled,
]
KINDS = ["command", "ack", "result", "inventory", "status", "window", "deliveries", "prompts", "tokens"]
KINDS += ["settled"]
A, B = bytes(16), bytes(range(16))

COMMAND = wire.Command(
    epoch=3,
    sequence=4,
    window="client/0/1",
    depth=2,
    drops=(A,),
    builds=(wire.Build(B, b"", 5, 0, 7),),
    prefixes=(B,),
    items=np.array([5, 6], dtype=np.int32),
    prefix_of=np.array([0, -1], dtype=np.int32),
)
RESULT = wire.Result(
    items=np.array([5, 6], dtype=np.int32),
    logprobs=np.array([-1.5, -np.inf, -0.0], dtype=np.float32),
    greedy=np.array([True, False, True]),
    offsets=np.array([0, 1, 3], dtype=np.int64),
    failures=(wire.ItemFailure(7, "non_finite", "log-probability 0 of 1 is nan"),),
)
DEEP_RESULT = replace(RESULT, depths=np.array([2, 4], dtype=np.int32), row_loops=90, full_row_loops=120)
ACK = wire.Ack(3, 4, "", ((B, 4096),), 8192, A, 1000, 0.25, 1)
INVENTORY = wire.Inventory(4, (wire.HeldPrefix(B, b"", 7, 2, 4096),), 4096)
FACTS = ModelFacts(
    "digest", "cpu", "selftest", 2048, {"vocab_size": 8192, "eos_ids": [1, 2], "tied_head": True}
)
STATUS = Status("ready", "run", "", 1, "host", 2, 3, 4, 0.5, 0.25, 100, 2, 50, 60, 0, FACTS, 7)

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.binary(max_size=40)
    | st.text(),
    lambda inner: st.lists(inner, max_size=12) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=30,
)


@pytest.mark.parametrize(
    ("message", "encode", "decode"),
    [
        (COMMAND, messages.encode_command, messages.decode_command),
        (ACK, messages.encode_ack, messages.decode_ack),
        (RESULT, messages.encode_result, messages.decode_result),
        (DEEP_RESULT, messages.encode_result, messages.decode_result),
        (INVENTORY, messages.encode_inventory, messages.decode_inventory),
        (STATUS, encode_status, decode_status),
        (Settled("client", 3, np.array([0, 7], np.int32)), encode_settled, decode_settled),
    ],
    ids=["command", "ack", "result", "deep result", "inventory", "status", "settled"],
)
def test_a_message_survives_the_wire(message: Any, encode: Callable[[Any], bytes], decode: Any) -> None:
    assert encode(decode(encode(message))) == encode(message)


def test_a_command_of_an_unknown_kind_is_refused_by_name() -> None:
    with pytest.raises(WireError, match="'score' or 'generate' as the kind of work, got 'paint'"):
        messages.decode_command(messages.encode_command(replace(COMMAND, kind="paint")))


def test_a_message_carries_the_version_that_its_layout_came_with() -> None:
    """So that replicas and routers of before take whatever they know."""
    assert messages.encode_result(RESULT)[0] == messages.encode_command(COMMAND)[0] == OLDEST
    assert messages.encode_result(DEEP_RESULT)[0] == VERSION
    again = messages.decode_result(messages.encode_result(DEEP_RESULT))
    assert again.depths is not None
    assert (again.depths.tolist(), again.row_loops, again.full_row_loops) == ([2, 4], 90, 120)
    assert messages.decode_result(messages.encode_result(RESULT)).depths is None


def test_depths_are_as_many_as_items() -> None:
    with pytest.raises(WireError, match="1 depths for 2 items"):
        messages.decode_result(messages.encode_result(replace(RESULT, depths=np.zeros(1, np.int32))))


def test_scores_keep_their_bits() -> None:
    again = messages.decode_result(messages.encode_result(RESULT))
    assert again.logprobs.tobytes() == RESULT.logprobs.tobytes()
    assert again.greedy.tolist() == [True, False, True]


def test_results_are_a_few_bytes_a_scored_token_and_item() -> None:
    """Nothing of the size of a vocabulary or of a prompt comes back."""
    items, each = 500, 40
    result = replace(
        RESULT,
        items=np.arange(items, dtype=np.int32),
        logprobs=np.zeros(items * each, dtype=np.float32),
        greedy=np.zeros(items * each, dtype=np.bool_),
        offsets=np.arange(items + 1, dtype=np.int64) * each,
    )
    assert len(messages.encode_result(result)) <= 5 * items * each + 16 * items + 1_000


def test_another_version_is_refused_with_both_named() -> None:
    message = bytes([VERSION + 1]) + messages.encode_ack(ACK)[1:]
    with pytest.raises(WireError, match=rf"version {VERSION + 1}.* {VERSION}:"):
        messages.decode_ack(message)


def test_a_message_of_another_kind_is_refused() -> None:
    with pytest.raises(WireError, match="expected a command message"):
        messages.decode_command(messages.encode_ack(ACK))


@pytest.mark.parametrize("decode", DECODERS)
@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=200))
def test_arbitrary_bytes_are_refused(decode: Callable[[bytes], Any], data: bytes) -> None:
    for message in (data, bytes([VERSION]) + data):
        with pytest.raises(WireError):
            decode(message)


@pytest.mark.parametrize(("decode", "kind"), list(zip(DECODERS, KINDS, strict=True)))
@settings(max_examples=60, deadline=None)
@given(fields=st.lists(values, max_size=17))
def test_well_formed_messages_with_wrong_fields_are_refused_or_valid(
    decode: Callable[[bytes], Any], kind: str, fields: list[Any]
) -> None:
    message = bytes([VERSION]) + msgpack.packb([kind, fields])
    try:
        decode(message)
    except WireError:
        return


@settings(max_examples=200, deadline=None)
@given(position=st.integers(0, 10_000), value=st.integers(0, 255))
def test_a_damaged_byte_is_refused_or_changes_one_value(position: int, value: int) -> None:
    for message, decode in (
        (messages.encode_command(COMMAND), messages.decode_command),
        (messages.encode_result(RESULT), messages.decode_result),
        (encode_status(STATUS), decode_status),
    ):
        damaged = bytearray(message)
        damaged[position % len(damaged)] = value
        try:
            decode(bytes(damaged))
        except WireError:
            continue
