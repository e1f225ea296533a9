"""What the supervisor does to actors: late ones are ended, leaving ones drained first."""

from __future__ import annotations

import time
from typing import Any

import pytest
import ray
from tinyloop.cluster.fleet import Fleet, Slot
from tinyloop.cluster.supervisor import Supervisor
from tinyloop.workers.model import ReplicaSettings

SETTINGS = ReplicaSettings("model", "m:f", 1, 0, {})


class FakeRouter:
    """Counts what it is told; says that a slot is empty when the test does."""

    def __init__(self) -> None:
        self.detached: list[int] = []
        self.empty = False

    def attach(self, slot: Slot) -> bool:
        return True

    def detach(self, slot: Slot) -> tuple[bool, str]:
        self.detached.append(slot.index)
        return False, ""

    def drain(self, slot: Slot) -> bool:
        return self.empty


class Drain:
    @staticmethod
    def remote() -> str:
        return "drained"


class Actor:
    drain = Drain


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    killed: list[Any] = []
    monkeypatch.setattr(ray, "wait", lambda *_, **__: ([], []))
    monkeypatch.setattr(ray, "kill", killed.append)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 2.0})
    monkeypatch.setattr(ray, "available_resources", lambda: {"CPU": 1.0})
    return killed


@pytest.fixture
def supervisor(killed: list[Any]) -> Supervisor:
    made = Supervisor(SETTINGS, {}, Fleet(2, 4, SETTINGS))
    made.limit(10.0, allow_mixed=False)
    made._router = FakeRouter()
    for slot in made.slots:
        slot.state, slot.actor = "up", Actor()
        slot.watch, slot.ready = f"w{slot.index}", f"r{slot.index}"
    return made


def test_a_replacement_that_never_gets_ready_is_given_up(supervisor: Supervisor, killed: list[Any]) -> None:
    late, fresh = supervisor.slots
    late.state, late.started_s = "starting", time.monotonic() - 11.0
    fresh.state, fresh.started_s = "starting", time.monotonic()
    supervisor._turn()
    assert (late.state, fresh.state) == ("waiting", "starting")
    assert killed == [late.actor]
    assert "was not ready in 10.0 s" in late.trouble


def test_a_leaving_replica_is_ended_when_it_has_nothing_left(
    supervisor: Supervisor, killed: list[Any]
) -> None:
    router = supervisor._router
    assert isinstance(router, FakeRouter)
    leaving = supervisor.slots[1]
    supervisor.scale(1, SETTINGS, {})
    supervisor._turn()
    assert (leaving.state, killed) == ("draining", [])
    router.empty = True
    supervisor._turn()
    assert killed == [leaving.actor]
    assert [slot.index for slot in supervisor.slots] == [0]


def test_a_replica_that_does_not_finish_is_ended_at_its_deadline(
    supervisor: Supervisor, killed: list[Any]
) -> None:
    supervisor.scale(1, SETTINGS, {})
    leaving = supervisor.slots[1]
    leaving.drain_until_s = time.monotonic() - 1.0
    supervisor._turn()
    assert killed == [leaving.actor]
    router = supervisor._router
    assert isinstance(router, FakeRouter)
    assert router.detached == [1]


def test_one_that_still_loads_is_ended_at_once(supervisor: Supervisor, killed: list[Any]) -> None:
    supervisor.slots[1].state = "starting"
    loading = supervisor.slots[1].actor
    supervisor.scale(1, SETTINGS, {})
    assert killed == [loading]
    assert len(supervisor.slots) == 1
