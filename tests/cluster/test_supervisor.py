"""When a replica is replaced: at once after work, later after none, and in the end never."""

from __future__ import annotations

import time

import pytest
import ray
from tinyloop.cluster.supervisor import Slot, Supervisor
from tinyloop.workers.model import ReplicaSettings
from tinyloop.workers.status import ModelFacts, Status, encode_status


@pytest.fixture
def supervisor() -> Supervisor:
    made = Supervisor(ReplicaSettings("model", "m:f", 1, 0, {}), {}, slots=2, crash_limit=4)
    for slot in made.slots:
        slot.state = "up"
    return made


def lose(supervisor: Supervisor, slot: Slot, progressed: bool) -> float:
    """Seconds until the next start of the slot."""
    supervisor._detach = lambda _: (progressed, "why")
    supervisor._lost(slot, "died")
    pause_s = slot.restart_s - time.monotonic()
    if slot.state == "waiting":
        slot.state = "up"
    return pause_s


def test_pauses_grow_without_progress_and_end_in_an_error(supervisor: Supervisor) -> None:
    for slot in supervisor.slots:
        pauses = [lose(supervisor, slot, progressed=False) for _ in range(3)]
        assert pauses == pytest.approx([0.0, 1.0, 2.0], abs=0.2)
        assert supervisor.trouble() == ""
        lose(supervisor, slot, progressed=False)
        assert slot.state == "given up"
    assert supervisor.trouble() == "all 2 replicas were lost; the last: why"


def test_a_replica_that_did_some_work_is_replaced_at_once_however_often(supervisor: Supervisor) -> None:
    slot = supervisor.slots[0]
    for _ in range(20):
        lose(supervisor, slot, progressed=False)
        assert lose(supervisor, slot, progressed=True) == pytest.approx(0.0, abs=0.2)
    assert slot.state == "up"
    assert supervisor.deaths == 40


@pytest.mark.parametrize(
    ("allow_mixed", "field"), [(False, "numerics_id"), (False, "self_test"), (True, "digest")]
)
def test_a_replica_that_computes_otherwise_is_not_taken(
    supervisor: Supervisor, allow_mixed: bool, field: str
) -> None:
    supervisor._allow_mixed = allow_mixed
    facts = {"digest": "d", "numerics_id": "cpu/avx2", "self_test": "t"}
    answers = []
    for values in (facts, {**facts, field: "other"}):
        known = ModelFacts(max_seq_len=8, descriptor={}, **values)
        status = Status("ready", "run", "", 1, "host", 0, 0, 0, 0.0, 0.0, 0, 0, 0, 0, 0, known)
        answers.append(supervisor._welcome(supervisor.slots[0], encode_status(status)))
    assert answers[0] == ""
    assert f"has {field} other, the pool has {facts[field]}" in answers[1]


def test_a_replacement_that_never_gets_ready_is_given_up(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "wait", lambda *_, **__: ([], []))
    monkeypatch.setattr(ray, "kill", lambda _: None)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 2.0})
    monkeypatch.setattr(ray, "available_resources", lambda: {"CPU": 1.0})
    late, fresh = supervisor.slots
    late.state, late.watch, late.ready, late.started_s = "starting", "w0", "r0", time.monotonic() - 11.0
    fresh.state, fresh.watch, fresh.ready, fresh.started_s = "starting", "w1", "r1", time.monotonic()
    supervisor._start_timeout_s = 10.0
    supervisor._turn()
    assert (late.state, fresh.state) == ("waiting", "starting")
    assert "was not ready in 10.0 s" in late.trouble
