"""Placement of what is generated, without Ray or a model: nothing lost, nothing twice, no drop in use."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from simulated import BYTES_PER_TOKEN, DESCRIPTOR, RULES, SimulatedReplica, ragged_items
from tinyloop.cluster.costs import PlacementRules, Sizes
from tinyloop.cluster.generate_items import Defaults, Prompt, columns_of, cost_rows
from tinyloop.cluster.generation import head_of
from tinyloop.cluster.items import Items
from tinyloop.cluster.placement import ALONE_AT, GIVEN_UP_AT, Placement
from tinyloop.cluster.segments import cut_window
from tinyloop.workers.outbox import Owner
from tinyloop.workers.prompts import Prompts
from tinyloop.workers.wire import GENERATE, Ack, Command

GENERATE_ITEMS = 10


def prompts_of(groups: int, each: int, shared: int, own: int, window: int = 0, client: str = "c") -> Prompts:
    """`each` prompts of every group start with the same ids."""
    random = np.random.default_rng(groups + window)
    starts = random.integers(1, 1000, (groups, shared), dtype=np.int32)
    tails = random.integers(1, 1000, (groups, each, own), dtype=np.int32)
    prompts = [
        Prompt(np.concatenate([starts[g], tails[g, i]]).tolist(), max_new_tokens=20)
        for i in range(each)
        for g in range(groups)
    ]
    return columns_of(prompts, Defaults(1, ()), client=client, window=window)


class Farm:
    """Placement and simulated replicas. What one generates is what its commands asked for."""

    def __init__(self, replicas: int, budget_bytes: int = 1 << 30) -> None:
        self.placement = Placement(PlacementRules(generate_items=GENERATE_ITEMS), Sizes(DESCRIPTOR))
        self.budget_bytes = budget_bytes
        self.replicas: dict[int, SimulatedReplica] = {}
        self.generating: dict[int, set[Owner]] = {}
        self.sent: dict[int, list[Command]] = {}
        self.windows: dict[str, Prompts | Items] = {}
        self.held_by: dict[Owner, bytes] = {}
        self.given_up: list[tuple[str, int]] = []
        self.generations = 0
        self.seen: list[Owner] = []
        for slot in range(replicas):
            self.attach(slot)

    def attach(self, slot: int) -> None:
        self.generations += 1
        replica = self.replicas[slot] = SimulatedReplica(self.budget_bytes)
        self.generating[slot], self.sent[slot] = set(), []
        self.placement.attach(slot, self.generations, self.budget_bytes, replica.inventory())

    def submit(self, key: str, prompts: Prompts) -> None:
        self.windows[key] = prompts
        chosen = np.arange(len(prompts), dtype=np.int32)
        self.placement.add_window(key, head_of(prompts, chosen, RULES))

    def score(self, key: str, items: Items) -> None:
        self.windows[key] = items
        self.placement.add_window(key, cut_window(items, RULES, client="c", window=len(self.windows)))

    def dispatch(self) -> None:
        for slot in self.replicas:
            while (command := self.placement.next_command(slot, 0.0)) is not None:
                self.sent[slot].append(command)

    def answer(self, slot: int) -> bool:
        """The replica carries out its oldest command."""
        if not self.sent[slot]:
            return False
        command, replica = self.sent[slot].pop(0), self.replicas[slot]
        source = self.windows[command.window]
        held = {entry.digest for entry in replica.table.entries()}
        for owner in self.generating[slot]:
            used = self.held_by.get(owner, b"")
            assert not used or used in held - set(command.drops), "a prefix in use was dropped"
        ack = replica.run(command, as_items(source))
        assert ack.refused == ""
        self._join(slot, command, source, ack)
        self.placement.acknowledge(slot, ack, 0.0)
        self.tell()
        return True

    def _join(self, slot: int, command: Command, source: Prompts | Items, ack: Ack) -> None:
        if not isinstance(source, Prompts):
            assert command.kind != GENERATE
            return
        assert command.kind == GENERATE
        for item, prefix in zip(command.items.tolist(), command.prefix_of.tolist(), strict=True):
            owner = (source.client, source.window, item)
            self.generating[slot].add(owner)
            self.held_by[owner] = command.prefixes[prefix] if prefix >= 0 else b""
        assert ack.rows >= 0

    def tell(self) -> None:
        for slot, owner in self.placement.cancels:
            if slot in self.generating:
                self.generating[slot].discard(owner)
        self.placement.cancels.clear()

    def settle(self, owner: Owner) -> None:
        client, window, item = owner
        for key, prompts in self.windows.items():
            if isinstance(prompts, Prompts) and (prompts.client, prompts.window) == (client, window):
                self.placement.settle(key, np.array([item], dtype=np.int32))
        self.seen.append(owner)
        self.tell()

    def kill(self, slot: int) -> None:
        del self.replicas[slot], self.generating[slot], self.sent[slot]
        for finished in self.placement.detach(slot):
            self.given_up += [(finished.window, item) for item in finished.items.tolist()]

    @property
    def everything(self) -> list[Owner]:
        return [owner for owners in self.generating.values() for owner in owners]


def as_items(source: Prompts | Items) -> Items:
    if isinstance(source, Items):
        return source
    return Items(source.token_ids, source.offsets, np.full(len(source), 0, np.int32), int(source.depth.max()))


def finish(farm: Farm, wanted: set[Owner]) -> None:
    """Let replicas work and the client settle until all is done."""
    for _ in range(10_000):
        farm.dispatch()
        answers = [farm.answer(slot) for slot in list(farm.replicas)]
        for owner in farm.everything:
            farm.settle(owner)
        if wanted <= set(farm.seen) and not farm.placement.plans:
            return
        assert any(answers) or farm.everything or farm.placement.queued_items == 0, "it stands still"
    raise AssertionError("it does not end")


def owners_of(prompts: Prompts) -> set[Owner]:
    return {(prompts.client, prompts.window, item) for item in range(len(prompts))}


def test_a_client_gets_no_more_to_a_replica_than_it_may_have_there() -> None:
    farm, one, two = Farm(2), prompts_of(4, 20, 30, 5), prompts_of(3, 20, 30, 5, window=1, client="d")
    farm.submit("c/0/1", one)
    farm.submit("d/1/2", two)
    for _ in range(30):
        farm.dispatch()
        for slot in farm.replicas:
            farm.answer(slot)
    for owners in farm.generating.values():
        clients = [client for client, _, _ in owners]
        assert clients.count("c") == clients.count("d") == GENERATE_ITEMS
    # The one that settles gets more; the one that does not waits alone.
    for owner in [owner for owner in farm.everything if owner[0] == "d"]:
        farm.settle(owner)
    farm.dispatch()
    assert {farm.windows[c.window].client for sent in farm.sent.values() for c in sent} == {"d"}  # type: ignore[union-attr]
    finish(farm, owners_of(one) | owners_of(two))
    assert sorted(farm.seen) == sorted(owners_of(one) | owners_of(two))


def test_scores_go_on_while_generation_waits_for_its_client() -> None:
    farm, prompts = Farm(1), prompts_of(2, 20, 30, 5)
    farm.submit("c/0/1", prompts)
    for _ in range(10):
        farm.dispatch()
        farm.answer(0)
    assert len(farm.generating[0]) == GENERATE_ITEMS
    farm.score("c/9/2", ragged_items([np.arange(1, 40)] * 6, [5] * 6))
    for _ in range(10):
        farm.dispatch()
        farm.answer(0)
    assert "c/9/2" not in farm.placement.plans
    assert len(farm.generating[0]) == GENERATE_ITEMS


def test_prefixes_of_running_completions_stay_whatever_the_budget_is() -> None:
    """Room for two of six prefixes; `answer` looks at every drop."""
    prompts = prompts_of(6, 12, 40, 5)
    farm = Farm(1, budget_bytes=2 * 64 * BYTES_PER_TOKEN * 100 // 95 + 64)
    farm.submit("c/0/1", prompts)
    finish(farm, owners_of(prompts))
    assert farm.placement.counters.evictions >= 4
    assert farm.placement.counters.mirror_differences == 0


def test_a_settled_item_is_withdrawn_wherever_it_is() -> None:
    """In a run, on its way, in a batch; twice is harmless; what is left is done."""
    farm, prompts = Farm(1), prompts_of(1, 40, 30, 5)
    farm.submit("c/0/1", prompts)
    farm.dispatch()
    on_its_way = ("c", 0, int(farm.sent[0][0].items[0]))
    farm.settle(on_its_way)
    while farm.answer(0):
        pass
    assert on_its_way not in farm.generating[0], "it was told when the command was answered"
    running = next(iter(farm.generating[0]))
    farm.settle(running)
    assert running not in farm.generating[0]
    queued = next(iter(owners_of(prompts) - farm.generating[0] - {on_its_way, running}))
    farm.settle(queued)
    farm.settle(queued)
    before = len(farm.seen)
    finish(farm, owners_of(prompts))
    later = farm.seen[before:]
    assert not {on_its_way, running, queued} & set(later)
    assert len(later) == len(set(later)) == 37


def test_what_was_settled_does_not_come_back_by_a_death() -> None:
    farm, prompts = Farm(2), prompts_of(1, 30, 30, 5)
    farm.submit("c/0/1", prompts)
    farm.dispatch()
    sent = [("c", 0, int(c.items[0])) for commands in farm.sent.values() for c in commands]
    for owner in sent:
        farm.settle(owner)
    farm.kill(0)
    before = len(farm.seen)
    finish(farm, owners_of(prompts))
    assert not set(sent) & set(farm.seen[before:])


def test_an_item_settled_on_its_way_is_not_given_up_when_its_replica_dies() -> None:
    farm, prompts = Farm(1), prompts_of(1, 2, 30, 5)
    farm.submit("c/0/1", prompts)
    for _ in range(2):
        farm.dispatch()
        while farm.answer(0):
            pass
        farm.kill(0)
        farm.attach(0)
    farm.dispatch()
    (command,) = farm.sent[0]
    farm.settle(("c", 0, int(command.items[0])))
    farm.kill(0)
    farm.attach(0)
    assert not farm.given_up
    assert farm.placement.queued_items == 1
    finish(farm, owners_of(prompts))


def test_what_dies_with_its_replica_every_time_runs_alone_and_is_given_up() -> None:
    farm, prompts = Farm(1), prompts_of(1, 5, 30, 5)
    farm.submit("c/0/1", prompts)
    for death in range(ALONE_AT + (GIVEN_UP_AT - ALONE_AT) * len(prompts)):
        farm.dispatch()
        while farm.answer(0):
            pass
        assert len(farm.generating[0]) == (5 if death < ALONE_AT else 1)
        assert farm.placement.next_command(0, 0.0) is None
        farm.kill(0)
        farm.attach(0)
    assert sorted(farm.given_up) == [("c/0/1", item) for item in range(5)]
    assert not farm.placement.plans
    farm.placement.settle("c/0/1", np.arange(5, dtype=np.int32))


@pytest.mark.parametrize("seed", range(12))
def test_random_deaths_settles_and_scores_lose_and_double_nothing(seed: int) -> None:
    random = Random(seed)
    farm = Farm(3, budget_bytes=64 * BYTES_PER_TOKEN * random.choice([2, 5, 1000]))
    windows = [prompts_of(random.randrange(1, 6), 15, 40, 5, window=w) for w in range(3)]
    text = ragged_items([np.arange(1, 40 + i) for i in range(20)], [5] * 20)
    wanted = set().union(*map(owners_of, windows))
    events = 0
    while not wanted <= set(farm.seen) or farm.placement.plans:
        events += 1
        assert events < 20_000, f"seed {seed}: it does not end"
        if events in (1, 5, 9):
            farm.submit(f"c/{events // 4}/{events}", windows[events // 4])
        if events == 7:
            farm.score("c/9/7", text)
        farm.dispatch()
        slot = random.choice(list(farm.replicas))
        if random.random() < 0.02 and events < 2000:
            farm.kill(slot)
            farm.attach(slot)
        elif random.random() < 0.6:
            farm.answer(slot)
        elif running := farm.everything:
            farm.settle(random.choice(running))
        if random.random() < 0.02:
            farm.settle(random.choice(sorted(wanted)))  # cancelled, wherever it is
        for window, item in farm.given_up:
            prompts = farm.windows[window]
            assert isinstance(prompts, Prompts)
            farm.seen.append((prompts.client, prompts.window, item))
        farm.given_up.clear()
        alive = sum(1 for work in farm.placement.replicas.values() for _ in work.generating)
        assert alive == sum(map(len, farm.generating.values())), f"seed {seed}"
    while any(farm.answer(slot) for slot in list(farm.replicas)):
        pass  # commands whose items were all settled on the way
    assert farm.placement.queued_items == 0
    assert farm.placement.counters.mirror_differences == 0
    assert not farm.everything
    assert not farm.placement.places
    assert not farm.placement.settled_early


def test_the_expected_cost_is_that_of_the_prompt_and_the_ids_at_the_requests_own_depth() -> None:
    prompts = columns_of(
        [Prompt([1] * 100, 50, depth=4), Prompt([1] * 100, 50, depth=1), Prompt([1], 1, depth=4)],
        Defaults(2, ()),
        client="c",
        window=0,
    )
    assert cost_rows(prompts, 4).tolist() == [100 + 8 * 50, 125, 9]


def test_a_cancelled_window_leaves_nothing_behind_wherever_its_items_are() -> None:
    """In a batch, on their way and waiting; another window of the client goes on."""
    farm, prompts, other = Farm(2), prompts_of(2, 40, 30, 5), prompts_of(2, 4, 30, 5, window=1)
    farm.submit("c/0/1", prompts)
    farm.dispatch()
    farm.answer(0)
    farm.submit("c/1/2", other)
    assert farm.generating[0]
    assert farm.sent[1]
    assert sorted(farm.placement.cancel("c/0/1").tolist()) == list(range(80))
    farm.tell()
    assert not farm.everything
    finish(farm, owners_of(other))
    assert farm.placement.counters.cancelled == 80
    assert not farm.placement.settled_early
    assert sorted(farm.seen) == sorted(owners_of(other))


def test_a_replica_that_leaves_has_time_for_what_it_generates_and_nothing_is_blamed_on_it() -> None:
    farm, prompts = Farm(2), prompts_of(1, 12, 30, 5)
    farm.submit("c/0/1", prompts)
    farm.dispatch()
    for slot in farm.replicas:
        while farm.answer(slot):
            pass
    farm.placement.drain(0)
    running = farm.generating[0].copy()
    assert running
    assert not farm.placement.is_drained(0)
    for owner in list(running)[1:]:
        farm.settle(owner)
    assert not farm.placement.is_drained(0)
    # Its time is over: the last one goes to the other replica, as often as it takes.
    del farm.replicas[0], farm.generating[0], farm.sent[0]
    assert farm.placement.detach(0, died=False) == []
    assert farm.placement.counters.deaths == 0
    assert not farm.placement._deaths
    finish(farm, owners_of(prompts))


def test_what_a_client_has_generated_is_charged_to_it_in_seconds() -> None:
    """Two clients have scores waiting; one generates beside that, and the other gets the commands then."""
    farm = Farm(1)
    farm.submit("c/0/1", prompts_of(1, 2, 30, 5))
    farm.dispatch()
    while farm.answer(0):
        pass
    for client in "cd":
        items = ragged_items([np.arange(1, 40)] * 4000, [5] * 4000)
        farm.windows[f"{client}/9/2"] = items
        head = cut_window(items, RULES, client=client, window=9)
        farm.placement.add_window(f"{client}/9/2", head, stream=False)
    for _ in range(6):
        farm.dispatch()
        farm.answer(0)
    farm.placement.generated(0, 100, 1000.0)
    assert farm.placement.counters.generated_tokens == 100
    while farm.answer(0):
        pass
    asked = set()
    for _ in range(6):
        farm.dispatch()
        asked |= {command.window for command in farm.sent[0]}
        farm.answer(0)
    assert asked == {"d/9/2"}
