"""One command on one model: drop, build, then score in one call or begin to generate; faults stay alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from .cascading import Cascading
from .effort import GroupedTokens
from .generating import Generating
from .model import Int32Array, Int64Array, Model
from .outbox import Outbox
from .pieces import Piece, finite, flat, gather, item_error_class, take_scores
from .prefix_table import Held, PrefixTable, Refused, Wanted
from .prompts import Prompts
from .wire import GENERATE, Ack, Build, Command, Inventory, ItemFailure, Result


@dataclass(frozen=True, slots=True)
class WindowTokens:
    """Token ids of one window: int32 [total], offsets int64 [n + 1], n_scored int32 [n]. May be read-only."""

    token_ids: Int32Array
    offsets: Int64Array
    n_scored: Int32Array

    def __len__(self) -> int:
        return len(self.n_scored)

    def ids(self, item: int) -> Int32Array:
        """The ids of one item, a view."""
        return self.token_ids[self.offsets[item] : self.offsets[item + 1]]


Window = WindowTokens | GroupedTokens | Prompts


class Executor:
    """Executes commands on a model. Owned by the engine thread."""

    def __init__(
        self,
        model: Model,
        budget_bytes: int,
        outbox: Outbox | None = None,
        generation_batch: int | None = None,
        model_budget_bytes: int | None = None,
    ) -> None:
        """budget_bytes: of prefixes; model_budget_bytes: of all that the model holds, None if not limited."""
        self._model = model
        self.generating = Generating(model, outbox or Outbox(), generation_batch)
        self._vocab_size = int(model.descriptor["vocab_size"])
        self.table = PrefixTable(model, budget_bytes)
        self._cascading = Cascading(model, self.table, self.generating, model_budget_bytes)

    def execute(self, command: Command, window: Window) -> tuple[Ack, Result]:
        """Carry out one command. Returns a refused Ack and no scores if it cannot be, with nothing changed.

        One that generates is carried out when its prefixes are built and its requests have joined the batch;
        their ids come later, by the outbox.

        Raises whatever the engine raises that is neither a refusal nor the fault of an item: the replica is
        then unfit.
        """
        start, rows_before = time.perf_counter(), self._rows()
        try:
            self._check_items(command, window)
            wanted = [self._wanted(build, command.depth, window) for build in command.builds]
            self.table.require(command.prefixes, command.drops, wanted)
            built = self._change(command.drops, wanted)
        except Refused as refusal:
            ack = self._ack(
                command, str(refusal), (), time.perf_counter() - start, self._rows() - rows_before, 0
            )
            return ack, gather([], [])
        sizes = tuple((held.digest, held.size_bytes) for held in built)
        if isinstance(window, Prompts):
            failed, result = self._begin(command, window), gather([], [])
        elif isinstance(window, GroupedTokens):
            result, rows = self._cascading.run(command, window)
            return self._ack(
                command, "", sizes, time.perf_counter() - start, rows, len(result.failures)
            ), result
        else:
            failures: list[ItemFailure] = []
            pieces = self._pieces(command, window, failures)
            self._score(pieces, command.depth, failures)
            scored = [piece for piece in pieces if piece.logprobs is not None and finite(piece, failures)]
            failed, result = len(failures), gather(scored, failures)
        seconds = time.perf_counter() - start
        return self._ack(command, "", sizes, seconds, self._rows() - rows_before, failed), result

    def inventory(self, epoch: int) -> Inventory:
        """Everything held now."""
        return Inventory(epoch, self.table.entries(), self.table.total_bytes)

    @property
    def memory_bytes(self) -> int:
        """Bytes the engine accounts for, prefixes included."""
        return int(self._model.vram_usage_bytes)

    def close(self) -> None:
        """Forget what is generated, free the prefixes, then the model."""
        self.generating.close()
        self._cascading.give_up()
        self.table.close()
        self._model.close()

    def _rows(self) -> int:
        return int(self._model.counters["rows"])

    def _ack(
        self,
        command: Command,
        refused: str,
        built: tuple[tuple[bytes, int], ...],
        seconds: float,
        rows: int,
        failed: int,
    ) -> Ack:
        table, total = self.table.table_digest(), self.table.total_bytes
        return Ack(command.epoch, command.sequence, refused, built, total, table, rows, seconds, failed)

    def _change(self, drops: Sequence[bytes], wanted: Sequence[Wanted]) -> list[Held]:
        """Drop and build; where memory runs short, upgrades and then running completions give up theirs."""
        self._cascading.make_way(drops, wanted)
        for make_room in (self._cascading.give_up, self.generating.make_room):
            try:
                return self.table.change(drops, wanted)
            except Refused as refusal:
                if not str(refusal).startswith("out_of_memory"):
                    raise
                make_room()
        return self.table.change(drops, wanted)

    def _begin(self, command: Command, prompts: Prompts) -> int:
        """Let the items of a command join the batch. Returns how many of them cannot."""
        failed = 0
        for item, prefix_of in zip(command.items.tolist(), command.prefix_of.tolist(), strict=True):
            ids = prompts.ids(item)
            if message := self._outside(ids):
                owner = (prompts.client, prompts.window, item)
                self.generating.refuse(owner, "token_out_of_range", message)
                failed += 1
                continue
            prefix = self.table.matching(command.prefixes[prefix_of], ids) if prefix_of >= 0 else None
            own = ids[prefix.length :] if prefix else ids
            failed += bool(self.generating.add(prompts, item, own, prefix))
        return failed

    def _outside(self, ids: Int32Array) -> str:
        """What is wrong with ids that the vocabulary does not have; empty if it has all of them."""
        bad = ids[(ids < 0) | (ids >= self._vocab_size)]
        return f"token id {bad[0]} is outside the vocabulary of {self._vocab_size}" if len(bad) else ""

    def _check_items(self, command: Command, window: Window) -> None:
        limit = len(window)
        # One that was lost has neither items nor a kind.
        if limit and isinstance(window, Prompts) != (command.kind == GENERATE):
            raise Refused(f"kind: a command to {command.kind} on a window for something else")
        highest = max([build.source for build in command.builds], default=-1)
        highest = max(highest, int(command.items.max())) if len(command.items) else highest
        if highest >= limit:
            raise Refused(f"unknown item: {highest} of a window of {limit} items")

    def _wanted(self, build: Build, depth: int, window: Window) -> Wanted:
        ids = window.ids(build.source)[: build.end]
        if len(ids) < build.end:
            raise Refused(
                f"unbuildable: a prefix of {build.end} ids of item {build.source}, which has {len(ids)}"
            )
        # A copy: a view would pin the whole window in the object store for as long as the prefix is held.
        return Wanted(build.digest, build.parent, depth, ids.copy())

    def _pieces(self, command: Command, window: WindowTokens, failures: list[ItemFailure]) -> list[Piece]:
        pieces = []
        for item, prefix_of in zip(command.items.tolist(), command.prefix_of.tolist(), strict=True):
            ids = window.ids(item)
            if message := self._outside(ids):
                failures.append(ItemFailure(item, "token_out_of_range", message))
                continue
            prefix = self.table.matching(command.prefixes[prefix_of], ids) if prefix_of >= 0 else None
            own = ids[prefix.length :] if prefix else ids
            pieces.append(Piece(item, own, int(window.n_scored[item]), prefix))
        return pieces

    def _score(self, pieces: list[Piece], depth: int, failures: list[ItemFailure]) -> None:
        """Score all in one call; if the engine finds fault, halve until the items at fault stand alone."""
        if not pieces:
            return
        try:
            self._score_packed(pieces, depth)
        except Exception as error:
            # An unknown exception says that the engine is broken, not the item: it must not be answered as an
            # item's.
            kind = item_error_class(error)
            if kind is None:
                raise
            if kind == "out_of_memory" and (self._cascading.give_up() or self.generating.make_room()):
                self._score(pieces, depth, failures)
            elif len(pieces) > 1:
                middle = len(pieces) // 2
                self._score(pieces[:middle], depth, failures)
                self._score(pieces[middle:], depth, failures)
            elif kind != "out_of_memory" or not self._retried(pieces, depth):
                failures.append(ItemFailure(pieces[0].item, kind, str(error)))

    def _retried(self, pieces: list[Piece], depth: int) -> bool:
        try:
            self._score_packed(pieces, depth)
        except Exception as error:
            if item_error_class(error) is None:
                raise
            return False
        return True

    def _score_packed(self, pieces: Sequence[Piece], depth: int) -> None:
        scores = self._model.score(*flat(pieces), prefixes=[piece.prefix for piece in pieces], depth=depth)
        take_scores(pieces, scores.logprobs, scores.greedy, scores.offsets)
