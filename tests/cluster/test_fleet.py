"""Which replicas a pool has: replaced at once after work, later after none, then never; scaled."""

from __future__ import annotations

from random import Random

import pytest
from tinyloop.cluster.fleet import Fleet, Slot
from tinyloop.cluster.verdicts import verdict, verdict_of_loss
from tinyloop.workers.model import ReplicaSettings
from tinyloop.workers.status import ModelFacts, Status, encode_status

SETTINGS = ReplicaSettings("model", "m:f", 1, 0, {"max_seq_len": 64})
FACTS = {"digest": "d", "numerics_id": "cpu/avx2", "self_test": "t"}


def answer(state: str = "ready", message: str = "", **facts: str) -> bytes:
    known = ModelFacts(max_seq_len=8, descriptor={}, **{**FACTS, **facts})
    phase = "run" if state == "ready" else "load"
    return encode_status(Status(state, phase, message, 7, "h", 0, 0, 0, 0.0, 0.0, 0, 0, 0, 0, 0, known))


@pytest.fixture
def fleet() -> Fleet:
    made = Fleet(2, 4, SETTINGS)
    for slot in made.slots:
        made.begin(slot, 0.0)
        assert made.welcome(slot, answer()) == ""
    return made


def lose(fleet: Fleet, slot: Slot, progressed: bool) -> float:
    """Seconds until the next start of the slot, which then happens."""
    fleet.lost(slot, "why", progressed=progressed, now_s=100.0)
    pause_s = slot.restart_s - 100.0
    if slot.state == "waiting":
        assert slot in fleet.due(slot.restart_s)
        assert slot not in fleet.due(slot.restart_s - 0.01)
        fleet.begin(slot, slot.restart_s)
        fleet.welcome(slot, answer())
    return pause_s


def test_pauses_grow_without_progress_and_end_in_an_error(fleet: Fleet) -> None:
    for slot in fleet.slots:
        assert [lose(fleet, slot, progressed=False) for _ in range(3)] == [0.0, 1.0, 2.0]
        assert fleet.trouble() == ""
        lose(fleet, slot, progressed=False)
        assert slot.state == "given up"
    assert fleet.trouble() == "all 2 replicas were lost; the last: why"


def test_a_replica_that_did_some_work_is_replaced_at_once_however_often(fleet: Fleet) -> None:
    slot = fleet.slots[0]
    for _ in range(20):
        lose(fleet, slot, progressed=False)
        assert lose(fleet, slot, progressed=True) == 0.0
    assert (slot.state, slot.generation, fleet.deaths) == ("up", 41, 40)


@pytest.mark.parametrize(
    ("allow_mixed", "field"), [(False, "numerics_id"), (False, "self_test"), (True, "digest")]
)
def test_a_replica_that_computes_otherwise_is_not_taken(fleet: Fleet, allow_mixed: bool, field: str) -> None:
    fleet.allow_mixed = allow_mixed
    assert f"has {field} other, the pool has {FACTS[field]}" in fleet.welcome(
        fleet.slots[0], answer(**{field: "other"})
    )


def test_mixed_numerics_are_taken_where_they_are_allowed(fleet: Fleet) -> None:
    fleet.allow_mixed = True
    assert fleet.welcome(fleet.slots[0], answer(numerics_id="other")) == ""


def test_a_replacement_that_never_gets_ready_is_late(fleet: Fleet) -> None:
    slot = fleet.slots[1]
    fleet.lost(slot, "died", progressed=True, now_s=50.0)
    fleet.begin(slot, 50.0)
    assert fleet.late(59.9, start_timeout_s=10.0) == []
    assert fleet.late(60.1, start_timeout_s=10.0) == [slot]


def test_fewer_replicas_drain_the_last_slots_and_more_take_the_free_ones(fleet: Fleet) -> None:
    assert fleet.resize(1, 60.0) == []
    assert [(slot.index, slot.state) for slot in fleet.slots] == [(0, "up"), (1, "draining")]
    assert fleet.wanted == 1
    fleet.resize(3, 60.0)
    assert [(s.index, s.state) for s in fleet.slots] == [
        (0, "up"),
        (1, "draining"),
        (2, "waiting"),
        (3, "waiting"),
    ]
    fleet.left(fleet.slots[1])
    assert [slot.index for slot in fleet.due(0.0)] == [2, 3]
    assert [slot.index for slot in fleet.resize(1, 60.0)] == [2, 3]


def test_a_slot_that_comes_back_never_has_a_generation_twice(fleet: Fleet) -> None:
    seen = [(slot.index, slot.generation) for slot in fleet.slots]
    random = Random(3)
    for _ in range(50):
        fleet.resize(random.randint(1, 4), 0.0)
        for slot in list(fleet.slots):
            if slot.state == "waiting":
                fleet.begin(slot, 0.0)
                seen.append((slot.index, slot.generation))
            if slot.state == "draining" or random.random() < 0.3:
                fleet.lost(slot, "died", progressed=True, now_s=0.0)
    assert len(seen) == len(set(seen)) > 50


def test_generations_of_an_earlier_owner_are_not_used_again() -> None:
    fleet = Fleet(1, 4, SETTINGS, generations={0: 6, 1: 2})
    fleet.resize(2, 0.0)
    for slot in fleet.due(0.0):
        fleet.begin(slot, 0.0)
    assert [slot.generation for slot in fleet.slots] == [7, 3]


def test_a_death_while_draining_is_a_leaving(fleet: Fleet) -> None:
    fleet.resize(1, 60.0)
    assert not fleet.lost(fleet.slots[1], "died", progressed=False, now_s=0.0)
    assert [slot.index for slot in fleet.slots] == [0]
    assert fleet.deaths == 0


def test_slots_that_were_given_up_try_again_when_the_pool_is_scaled(fleet: Fleet) -> None:
    slot = fleet.slots[0]
    for _ in range(4):
        lose(fleet, slot, progressed=False)
    assert slot.state == "given up"
    fleet.resize(2, 0.0)
    assert fleet.due(0.0) == [slot]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("LoadError: tensor embed: 12 of 16 bytes", "failed(load)"),
        ("OutOfMemoryError: asked 900 of 800 bytes", "failed(out of memory)"),
    ],
)
def test_a_failed_load_keeps_phase_and_sizes_and_its_verdict(
    fleet: Fleet, message: str, expected: str
) -> None:
    slot = fleet.slots[0]
    trouble = fleet.welcome(slot, answer("unfit", message))
    assert f"could not load model: phase load: {message}" in trouble
    fleet.lost(slot, trouble, progressed=False, now_s=0.0)
    assert (slot.view()["verdict"], slot.view()["trouble"]) == (expected, trouble)


def test_every_state_has_a_verdict() -> None:
    assert verdict("starting", 0, "") == verdict("waiting", 0, "") == "loading"
    assert (verdict("up", 0, "dead"), verdict("up", 2, "")) == ("ready", "busy")
    assert verdict("draining", 1, "") == "draining"
    died = verdict_of_loss("ActorDiedError: The actor died unexpectedly")
    assert verdict("waiting", 0, died) == verdict("given up", 0, died) == "dead"
    assert verdict_of_loss("OutOfMemoryError: Task was killed due to the node running low on memory") == (
        "failed(out of memory)"
    )
