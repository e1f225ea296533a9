"""A pool without Ray: the router's placement, executors on real models, and every message as bytes."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tinyloop.cluster.costs import PlacementRules, Sizes
from tinyloop.cluster.items import Failed, Items, Scored
from tinyloop.cluster.ledger import Ledger
from tinyloop.cluster.placement import Placement
from tinyloop.cluster.segments import CutRules, cut_window
from tinyloop.cluster.wire import Delivery, decode_window, encode_window
from tinyloop.native import Model
from tinyloop.workers.effort import GroupedTokens, grouped_from, grouped_payload
from tinyloop.workers.executor import Executor, Window, WindowTokens
from tinyloop.workers.messages import decode_command, encode_command, encode_result

BUDGET = 1 << 28


class EnginePool:
    """Scores windows on one executor a model. Replicas in `doomed` die at their second command."""

    def __init__(
        self,
        models: Sequence[Model],
        rules: PlacementRules | None = None,
        *,
        budget_bytes: int = BUDGET,
        doomed: set[int] | None = None,
    ) -> None:
        descriptor = models[0].descriptor
        self.rules = CutRules(models[0].digest, int(descriptor["vocab_size"]))
        self.placement = Placement(rules or PlacementRules(), Sizes(descriptor))
        self.executors = {slot: Executor(model, budget_bytes) for slot, model in enumerate(models)}
        self.doomed = doomed or set()
        self.ledger = Ledger()
        self.windows: dict[str, tuple[int, Window]] = {}
        self.commands = self.row_loops = self.full_row_loops = 0
        self.seen: dict[int, int] = {}
        for slot, executor in self.executors.items():
            self.placement.attach(slot, 1, budget_bytes, executor.inventory(0))

    def submit(self, window: int, items: Items) -> None:
        self.ledger.open(window, items)
        head = decode_window(encode_window(cut_window(items, self.rules, client="c", window=window)))
        self.windows[str(window)] = window, _tokens(items)
        self.placement.add_window(str(window), head)

    def collect(self, timeout_s: float) -> list[Scored | Failed]:
        """One command of every replica that has something to do."""
        found: list[Scored | Failed] = []
        for slot in list(self.executors):
            command = self.placement.next_command(slot, time.monotonic())
            if command is None:
                continue
            self.seen[slot] = self.seen.get(slot, 0) + 1
            if slot in self.doomed and self.seen[slot] == 2:
                del self.executors[slot]
                assert not self.placement.detach(slot)
                continue
            self.commands += 1
            number, tokens = self.windows[command.window]
            ack, result = self.executors[slot].execute(decode_command(encode_command(command)), tokens)
            assert not ack.refused, ack.refused
            finished = self.placement.acknowledge(slot, ack, time.monotonic())
            assert not self.placement.replicas[slot].resyncing
            if finished is not None:
                delivery = Delivery(self.commands, number, finished.items, "", "", 1, finished.rows)
                assert len(self.ledger.missing_of(delivery)) == len(
                    self.ledger.items(number).of_units(finished.items)
                )
                found += self.ledger.accept(delivery, encode_result(result))
                self.row_loops += result.row_loops
                self.full_row_loops += result.full_row_loops
                self.ledger.close_finished()
        return found

    def close(self) -> None:
        """Free what the executors hold; the models stay."""
        for executor in self.executors.values():
            executor._cascading.give_up()
            executor.table.close()


def _tokens(items: Items) -> Window:
    arrays = items.token_ids, items.offsets, items.n_scored
    if items.groups is None:
        return WindowTokens(*arrays)
    groups = items.groups
    window = GroupedTokens(*arrays, groups.offsets, groups.compared, groups.effort)
    return grouped_from(grouped_payload(window))
