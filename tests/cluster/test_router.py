"""The router without Ray's processes: replicas are futures that the test resolves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest
import ray
from simulated import RULES, SimulatedReplica, shared_prefix_items
from tinyloop.cluster.clients import MAX_STREAMS, MAX_WINDOWS
from tinyloop.cluster.costs import PlacementRules
from tinyloop.cluster.generate_items import Defaults, Prompt, columns_of
from tinyloop.cluster.generate_wire import Settled, encode_settled
from tinyloop.cluster.generation import head_of
from tinyloop.cluster.items import Items
from tinyloop.cluster.router import FULL, TAKEN, UNKNOWN, Router, check_hello
from tinyloop.cluster.segments import cut_window
from tinyloop.cluster.wire import FIRST_STREAM, Delivery, decode_deliveries, encode_window
from tinyloop.workers.messages import decode_command, encode_ack, encode_inventory
from tinyloop.workers.outbox import Owner
from tinyloop.workers.status import Status, encode_status
from tinyloop.workers.wire import VERSION, WireError

READY = Status("ready", "run", "", 1, "host", 0, 0, 0, 0.0, 0.0, 0, 0, 0, 1 << 30, 0)
ITEMS = shared_prefix_items(groups=8, each=8, shared=64, own=16)


class Method:
    """A method of an actor: `remote` answers with what the function returns."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.remote = call

    def options(self, **options: Any) -> Method:
        return self


class Actor:
    """A replica whose commands wait until the test answers them."""

    def __init__(self) -> None:
        self.simulated = SimulatedReplica()
        self.death: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.sent: list[tuple[bytes, asyncio.Future[bytes]]] = []
        self.answers_health = True
        self.run = Method(self._run)
        self.inventory = Method(self._inventory)
        self.until_death = Method(lambda: self.death)
        self.health = Method(self._health)
        self.cancelled: list[Owner] = []
        self.forgotten: list[str] = []
        self.cancel = Method(self.cancelled.extend)
        self.forget = Method(self.forgotten.append)

    def _run(self, command: bytes, tokens: list[Any]) -> list[Any]:
        acknowledgement: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.sent.append((command, acknowledgement))
        return [acknowledgement, f"result of {len(self.sent)}"]

    async def _inventory(self, cancel_all: bool = False) -> bytes:
        return encode_inventory(self.simulated.inventory())

    async def _health(self) -> bytes:
        if not self.answers_health:
            await asyncio.Event().wait()
        return encode_status(READY)

    def answer(self) -> None:
        command, acknowledgement = self.sent.pop(0)
        acknowledgement.set_result(encode_ack(self.simulated.run(decode_command(command), ITEMS)))

    def refuse(self, reason: str) -> None:
        command, acknowledgement = self.sent.pop(0)
        ack = self.simulated._ack(decode_command(command), reason, (), 0, 0.0)
        acknowledgement.set_result(encode_ack(ack))


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[Actor]:
    actors: list[Actor] = []
    monkeypatch.setattr(ray, "kill", actors.append)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return actors


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 20))


async def attached(rules: PlacementRules, *actors: Actor) -> tuple[Router, str]:
    router = Router(rules)
    for slot, actor in enumerate(actors):
        await router.attach(slot, 1, [actor], encode_status(READY))
    return router, check_hello(await router.hello("me", "a test", 0.0))[0]


async def submit(router: Router, incarnation: str, items: Items = ITEMS, window: int = 0) -> str:
    head = cut_window(items, RULES, client="me", window=window)
    return await router.submit(incarnation, encode_window(head), ["tokens"])


async def collect(router: Router, incarnation: str, after: int) -> list[Delivery]:
    answer = await router.collect(incarnation, "me", after, 5.0)
    assert answer is not None
    return decode_deliveries(answer[0])


def test_two_commands_are_ahead_and_deliveries_are_kept_until_acknowledged(killed: list[Actor]) -> None:
    async def scenario() -> None:
        actor = Actor()
        router, name = await attached(PlacementRules(chunk_rows=100, chunk_items=4), actor)
        assert await submit(router, name) == TAKEN
        assert len(actor.sent) == 2
        actor.answer()
        first = await collect(router, name, after=0)
        assert [d.number for d in await collect(router, name, after=0)] == [d.number for d in first] == [1]
        assert len(actor.sent) == 2
        actor.answer()
        assert [d.number for d in await collect(router, name, after=1)] == [2]
        found = [*first[0].items]
        after = 1
        while len(found) < len(ITEMS):
            for delivery in await collect(router, name, after):
                found += [*delivery.items]
                after = delivery.number
            if actor.sent:
                actor.answer()
        assert sorted(found) == list(range(len(ITEMS)))

    run(scenario())


def test_a_death_moves_its_work_to_the_other_replica(killed: list[Actor]) -> None:
    async def scenario() -> None:
        dying, other = Actor(), Actor()
        router, name = await attached(PlacementRules(chunk_rows=50, chunk_items=4), dying, other)
        await submit(router, name)
        assert len(dying.sent) == 2
        dying.death.set_exception(ray.exceptions.ActorDiedError())
        after, found = 0, []
        while len(found) < len(ITEMS):
            other.answer()
            for delivery in await collect(router, name, after):
                found += [*delivery.items]
                after = delivery.number
        assert sorted(found) == list(range(len(ITEMS)))
        assert killed == [dying]
        assert await router.detach(0, 1) == (False, "ActorDiedError")

    run(scenario())


@pytest.mark.parametrize("answers", [True, False])
def test_a_late_replica_is_given_up_only_if_it_does_not_answer(
    killed: list[Actor], monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    monkeypatch.setattr("tinyloop.cluster.dispatch.PROBE_S", 0.05)
    monkeypatch.setattr("tinyloop.cluster.router.HEARTBEAT_S", 0.01)

    async def scenario() -> None:
        actor = Actor()
        router, name = await attached(PlacementRules(first_ack_s=0.02, answering_factor=1000.0), actor)
        actor.answers_health = answers
        await submit(router, name)
        while not killed and not router._dispatch.placement.replicas[0].spared:
            await asyncio.sleep(0.01)
        assert killed == ([] if answers else [actor])

    run(scenario())


def test_a_client_of_an_earlier_incarnation_is_told_so(killed: list[Actor]) -> None:
    async def scenario() -> None:
        router, _ = await attached(PlacementRules(), Actor())
        assert await submit(router, "an earlier one") == UNKNOWN
        assert await router.collect("an earlier one", "me", 0, 5.0) is None

    run(scenario())


def test_another_wire_version_is_refused_on_both_sides(killed: list[Actor]) -> None:
    async def scenario() -> None:
        router, _ = await attached(PlacementRules())
        other = bytes([VERSION + 1]) + encode_status(READY)[1:]
        with pytest.raises(WireError, match=rf"version {VERSION + 1}, this process {VERSION}"):
            await router.attach(0, 1, [Actor()], other)

    run(scenario())
    with pytest.raises(WireError, match=rf"version {VERSION + 1}, this process {VERSION}"):
        check_hello((VERSION + 1, "name", 1, "host"))


def test_a_replica_that_cannot_be_understood_is_given_up(killed: list[Actor]) -> None:
    async def scenario() -> None:
        actor = Actor()
        router, name = await attached(PlacementRules(), actor)
        await submit(router, name)
        actor.sent.pop(0)[1].set_result(bytes([VERSION]) + b" no acknowledgement")
        while not killed:
            await asyncio.sleep(0)
        assert "is not valid msgpack" in (await router.detach(0, 1))[1]

    run(scenario())


def test_a_defect_in_the_router_reaches_the_client_as_an_error(
    killed: list[Actor], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        actor = Actor()
        router, name = await attached(PlacementRules(), actor)
        await submit(router, name)
        monkeypatch.setattr(router._dispatch.placement, "acknowledge", lambda *_: {}["defect"])
        actor.answer()
        with pytest.raises(RuntimeError, match="router failed: KeyError: 'defect'"):
            await router.collect(name, "me", 0, 5.0)

    run(scenario())


def test_a_client_that_fetches_nothing_is_kept_waiting(killed: list[Actor]) -> None:
    async def scenario() -> None:
        router, name = await attached(PlacementRules(), Actor())
        answers = [await submit(router, name, window=window) for window in range(MAX_WINDOWS + 1)]
        assert answers == [TAKEN] * MAX_WINDOWS + [FULL]
        # A part of a window that it has is no new one.
        assert await submit(router, name, window=1) == TAKEN

    run(scenario())


def test_a_full_pool_takes_one_window_and_then_none_of_anybody(
    killed: list[Actor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinyloop.cluster.router.MAX_QUEUED_ITEMS", len(ITEMS) - 1)

    async def scenario() -> None:
        router, name = await attached(PlacementRules(), Actor())
        assert await submit(router, name) == TAKEN
        assert await submit(router, name, window=1) == FULL
        await router.cancel("me", 0)
        assert await submit(router, name, window=1) == TAKEN

    run(scenario())


def test_a_silent_client_is_dropped_and_one_that_beats_is_not(
    killed: list[Actor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinyloop.cluster.router.HEARTBEAT_S", 0.01)

    async def scenario() -> None:
        actor = Actor()
        router, name = await attached(PlacementRules(), actor)
        await router.hello("me", "a test", 0.2)
        await router.hello("other", "lives", 0.2)
        router._clients._clients["me"].lease_s = 0.2
        await submit(router, name)
        while await router.beat("other") and router._dispatch.placement.queued_items:
            await asyncio.sleep(0.01)
        assert await router.beat("other")
        assert not await router.beat("me")
        assert actor.forgotten == ["me"]
        assert router._broken == ""
        assert await router.collect(name, "me", 0, 5.0) is None
        assert await submit(router, name) == UNKNOWN

    run(scenario())


def to_generate(window: int, num_prompts: int) -> bytes:
    prompts = [Prompt([1, 2, 3 + i], max_new_tokens=2) for i in range(num_prompts)]
    columns = columns_of(prompts, Defaults(1, ()), client="me", window=FIRST_STREAM + window)
    return encode_window(head_of(columns, np.arange(num_prompts, dtype=np.int32), RULES))


def test_prompts_end_when_their_client_has_all_of_them_or_leaves(killed: list[Actor]) -> None:
    async def scenario() -> None:
        actor = Actor()
        router, name = await attached(PlacementRules(), actor)
        for window in range(2):
            assert await router.submit(name, to_generate(window, 3), ["prompts"]) == TAKEN
        actor.answer()
        actor.answer()
        while len(router._dispatch.placement.replicas[0].generating) < 6:
            await asyncio.sleep(0)
        assert router._status()["replicas"]["0"]["generating"] == 6
        items = np.arange(3, dtype=np.int32)
        assert await router.settle(name, encode_settled(Settled("me", FIRST_STREAM, items[:2])))
        assert [client["streams"] for client in router._status()["clients"]] == [2]
        assert await router.settle(name, encode_settled(Settled("me", FIRST_STREAM, items)))
        assert [client["streams"] for client in router._status()["clients"]] == [1]
        assert actor.cancelled == [("me", FIRST_STREAM, item) for item in range(3)]
        assert not await router.settle("an earlier one", encode_settled(Settled("me", FIRST_STREAM, items)))
        await router.leave("me")
        assert sorted(actor.cancelled[3:]) == [("me", FIRST_STREAM + 1, item) for item in range(3)]
        assert actor.forgotten == ["me"]
        assert router._dispatch.placement.queued_items == 0

    run(scenario())


def test_streams_do_not_take_the_room_of_windows_and_have_their_own(killed: list[Actor]) -> None:
    async def scenario() -> None:
        router, name = await attached(PlacementRules(), Actor())
        answers = [await router.submit(name, to_generate(w, 1), ["prompts"]) for w in range(MAX_STREAMS + 1)]
        assert answers == [TAKEN] * MAX_STREAMS + [FULL]
        assert await submit(router, name) == TAKEN

    run(scenario())


def test_a_draining_replica_finishes_two_commands_and_the_other_does_the_rest(killed: list[Actor]) -> None:
    async def scenario() -> None:
        leaving, staying = Actor(), Actor()
        router, name = await attached(PlacementRules(chunk_rows=50, chunk_items=4), leaving, staying)
        await submit(router, name)
        assert not await router.drain(0, 1)
        assert len(leaving.sent) == 2
        after, found = 0, []
        while leaving.sent or staying.sent:
            (leaving if leaving.sent else staying).answer()
            for delivery in await collect(router, name, after):
                found += [*delivery.items]
                after = delivery.number
            assert await router.drain(0, 1) == (not leaving.sent)
        assert sorted(found) == list(range(len(ITEMS)))
        assert killed == []
        assert router._dispatch.placement.counters.deaths == 0
        assert await router.detach(0, 1) == (True, "")

    run(scenario())


def test_a_cancelled_window_is_not_delivered_and_its_commands_disturb_nobody(killed: list[Actor]) -> None:
    async def scenario() -> None:
        actor = Actor()
        router, name = await attached(PlacementRules(chunk_rows=100, chunk_items=4), actor)
        await submit(router, name)
        await router.cancel("me", 0)
        while actor.sent:
            actor.answer()
            await asyncio.sleep(0)
        answer = await router.collect(name, "me", 0, 0.01)
        assert answer is not None
        assert decode_deliveries(answer[0]) == []
        assert router._dispatch.placement.counters.mirror_differences == 0
        assert list(router._clients._parts) == []

    run(scenario())


def test_a_window_whose_ids_are_lost_fails_and_its_replica_lives(killed: list[Actor]) -> None:
    async def scenario() -> None:
        actor = Actor()
        router, name = await attached(PlacementRules(chunk_rows=100, chunk_items=4), actor)
        await submit(router, name)
        actor.refuse("unknown item: 3 of a window of 0 items")
        (delivery,) = await collect(router, name, 0)
        assert sorted(delivery.items) == list(range(len(ITEMS)))
        assert delivery.error_class == "internal"
        assert "could not be fetched" in delivery.message
        assert killed == []

    run(scenario())
