"""Commands whose items go as deep as a rule says: by groups, within what memory is left, exactly.

A group ends at the depth of the rule with the bits of a plain run at that depth, whatever it ran beside and
however little memory there was: where upgrades do not fit, it is scored anew at each depth.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ..native.cache_size import state_bytes
from .deep_prefixes import DeepPrefixes, NoRoomError
from .effort import Effort, GroupedTokens
from .generating import Generating
from .model import Model
from .pieces import Piece, finite, flat, gather, item_error_class, take_scores
from .prefix_table import Held, PrefixTable, Wanted
from .wire import Command, ItemFailure, Result

if TYPE_CHECKING:
    from ..native import Model as NativeModel

TILE_TOKENS = 64  # engines give out cache memory in tiles of so many tokens


@dataclass(slots=True)
class _Group:
    """One group ready for the engine. held: the prefix of its compared pieces.

    whole: all ids of each piece, those of the prefix too. gated: an exit gate decides, as there is no margin.
    bare: it must do without prefix and handles.
    """

    pieces: list[Piece]
    compared: list[bool]
    whole: list[np.ndarray[Any, np.dtype[np.int32]]]
    held: Held | None
    gated: bool
    bare: bool = False


class Cascading:
    """Runs windows of groups on one model. Owned by the engine thread."""

    def __init__(
        self, model: Model, table: PrefixTable, generating: Generating, model_budget_bytes: int | None
    ) -> None:
        self._model, self._table, self._generating = model, table, generating
        self._model_budget_bytes = model_budget_bytes
        self._vocab_size = int(model.descriptor["vocab_size"])
        self._deep = DeepPrefixes(model, table)
        self._token_bytes = 0.0  # the most that a token of a prefix has taken yet, a loop
        self._row_loops = 0

    def make_way(self, drops: Sequence[bytes], wanted: Sequence[Wanted]) -> None:
        """The router's prefixes come first: upgrades of dropped ones go, and all if a build needs room."""
        self._deep.forget(set(drops))
        tokens = sum((len(prefix.token_ids) + TILE_TOKENS) * prefix.depth for prefix in wanted)
        coming = tokens * self._token_bytes
        if wanted and (not self._token_bytes or self._table.free_bytes - self._deep.total_bytes < coming):
            self._deep.clear()

    def give_up(self) -> bool:
        """Close all upgrades. Returns whether there were any."""
        return self._deep.clear()

    def run(self, command: Command, window: GroupedTokens) -> tuple[Result, int]:
        """Score the groups that a command names, whose builds are done. Returns scores and rows computed.

        Rows are counted once, however deep they went. Raises what says that the engine is broken.
        """
        effort = window.effort
        failures: list[ItemFailure] = []
        groups = self._groups(command, window, failures)
        built = self._note_builds(command)
        self._row_loops, deep_before = built * command.depth, self._deep.row_loops
        for some in self._slices(groups, effort):
            self._deep.begin_turn(self._room())
            self._score(some, effort, failures)
        pieces = [piece for group in groups for piece in group.pieces]
        scored = [piece for piece in pieces if piece.logprobs is not None and finite(piece, failures)]
        rows = built + sum(len(piece.token_ids) - 1 for piece in pieces)
        plain = gather(scored, failures)
        result = Result(
            plain.items,
            plain.logprobs,
            plain.greedy,
            plain.offsets,
            plain.failures,
            depths=np.array([piece.depth for piece in scored], dtype=np.int32),
            row_loops=self._row_loops + self._deep.row_loops - deep_before,
            full_row_loops=rows * effort.depths[-1],
        )
        return result, rows

    def _note_builds(self, command: Command) -> int:
        """Rows that the command's prefixes took; remembers what a token of them takes."""
        for build in command.builds:
            held = self._table.held(build.digest)
            per_loop = held.size_bytes / max(held.handle.own_length * held.depth, 1)
            self._token_bytes = max(self._token_bytes, per_loop)
        return sum(build.end - build.begin for build in command.builds)

    def _groups(self, command: Command, window: GroupedTokens, failures: list[ItemFailure]) -> list[_Group]:
        found = []
        for number, prefix_of in zip(command.items.tolist(), command.prefix_of.tolist(), strict=True):
            items = range(int(window.group_offsets[number]), int(window.group_offsets[number + 1]))
            if faults := self._outside(window, items):
                failures += faults
                continue
            held = self._table.held(command.prefixes[prefix_of]) if prefix_of >= 0 else None
            found.append(self._group(window, items, held))
        return found

    def _outside(self, window: GroupedTokens, items: range) -> list[ItemFailure]:
        """A failure of each item of a group if one has an id that the vocabulary does not have."""
        for item in items:
            ids = window.item_ids(item)
            bad = ids[(ids < 0) | (ids >= self._vocab_size)]
            if len(bad):
                message = f"token id {bad[0]} is outside the vocabulary of {self._vocab_size}"
                return [ItemFailure(i, "token_out_of_range", message) for i in items]
        return []

    def _group(self, window: GroupedTokens, items: range, held: Held | None) -> _Group:
        compared = window.compared[items.start : items.stop].tolist()
        gated = window.effort.margin is None or sum(compared) == 1
        # Layers after the loops keep planes for one depth alone, and a gate's depth is not known before.
        if held is not None and gated and self._model.descriptor.get("n_coda", 0):
            held = None
        pieces, whole, is_shared = [], [], False
        for item, is_compared in zip(items, compared, strict=True):
            ids, n_scored = window.item_ids(item), int(window.n_scored[item])
            prefix = self._table.matching(held.digest, ids) if held is not None and is_compared else None
            is_shared = is_shared or prefix is not None
            own = ids[prefix.length :] if prefix else ids
            pieces.append(Piece(item, own, n_scored, prefix))
            whole.append(ids)
        return _Group(pieces, compared, whole, held if is_shared else None, gated)

    def _room(self) -> int:
        """Bytes for the handles of a slice, and as many for upgraded prefixes: half of what is free each."""
        free = self._table.free_bytes
        if self._model_budget_bytes is not None:
            left = self._model_budget_bytes - int(self._model.vram_usage_bytes) + self._deep.total_bytes
            free = min(free, max(left, 0))
        return free // 2

    def _slices(self, groups: Sequence[_Group], effort: Effort) -> Iterator[list[_Group]]:
        """Neighbouring groups whose handles and deeper prefixes fit together; those that never do, alone."""
        some: list[_Group] = []
        handles = deep = 0
        seen: set[bytes] = set()
        for group in groups:
            room = self._room()
            own, below = self._handle_bytes(group), self._chain_bytes(group, effort, seen)
            if some and (handles + own > room or deep + sum(below.values()) > room):
                yield some
                some, handles, deep, seen = [], 0, 0, set()
                below = self._chain_bytes(group, effort, seen)
            if own > room or sum(below.values()) > room:
                group.bare = True
                yield [group]
                continue
            some.append(group)
            handles += own
            deep += sum(below.values())
            seen.update(below)
        if some:
            yield some

    def _handle_bytes(self, group: _Group) -> int:
        """What resume handles of a group take at most: an upgrade keeps the old states until it is done."""
        if group.gated:
            return 0
        model = self._model
        rows = [len(piece.token_ids) - 1 for piece in group.pieces]
        return sum(2 * state_bytes(model.descriptor, count, model.block_bytes) for count in rows)

    def _chain_bytes(self, group: _Group, effort: Effort, seen: set[bytes]) -> dict[bytes, int]:
        """What upgrades of a group's prefix and its ancestors may take, each that was not seen before."""
        depths = effort.depths if not group.gated else effort.depths[-1:]
        found: dict[bytes, int] = {}
        held = group.held
        while held is not None:
            if held.digest not in seen:
                found[held.digest] = self._deep.most_bytes(held, depths)
            held = self._table.held(held.parent) if held.parent else None
        return found

    def _score(self, groups: list[_Group], effort: Effort, failures: list[ItemFailure]) -> None:
        """Score all in one cascade; if that cannot be, halve until the groups at fault stand alone."""
        try:
            if groups[0].bare:
                self._score_bare(groups[0], effort)
            else:
                self._cascade(groups, effort)
        except NoRoomError:
            # An estimate was too low: fewer groups use fewer upgrades at a time.
            self._apart(groups, effort, failures)
        except Exception as error:
            # An unknown exception says that the engine is broken, not the item.
            kind = item_error_class(error)
            if kind is None:
                raise
            if kind == "out_of_memory" and (self.give_up() or self._generating.make_room()):
                self._score(groups, effort, failures)
            elif len(groups) > 1 or (kind == "out_of_memory" and not groups[0].bare):
                self._apart(groups, effort, failures)
            else:
                failures += [ItemFailure(piece.item, kind, str(error)) for piece in groups[0].pieces]

    def _apart(self, groups: list[_Group], effort: Effort, failures: list[ItemFailure]) -> None:
        if len(groups) == 1:
            groups[0].bare = True
            self._score(groups, effort, failures)
            return
        middle = len(groups) // 2
        for half in (groups[:middle], groups[middle:]):
            self._deep.begin_turn(self._room())
            self._score(half, effort, failures)

    def _cascade(self, groups: Sequence[_Group], effort: Effort) -> None:
        # Loaded by whoever has a model, and by then it is.
        from ..native.cascade import cascade

        pieces = [piece for group in groups for piece in group.pieces]
        held_of = {id(group.held.handle): group.held for group in groups if group.held is not None}
        numbers = [[number] * len(group.pieces) for number, group in enumerate(groups)]
        result = cascade(
            cast("NativeModel", self._model),
            *flat(pieces),
            groups=np.concatenate(numbers).astype(np.int32),
            compared=np.array([flag for group in groups for flag in group.compared], dtype=np.bool_),
            depths=effort.depths,
            margin=effort.margin,
            exit_threshold=effort.exit_threshold,
            prefixes=cast("Any", [piece.prefix for piece in pieces]),
            deepen=cast("Any", lambda prefix, depth: self._deep.at(held_of[id(prefix)], depth)),
        )
        self._row_loops += result.row_loops
        take_scores(pieces, result.logprobs, result.greedy, result.offsets)
        for piece, depth in zip(pieces, result.depths.tolist(), strict=True):
            piece.depth = depth

    def _score_bare(self, group: _Group, effort: Effort) -> None:
        """A group without prefix and handles: gates need none, and for a margin each depth is a run anew."""
        for piece, ids in zip(group.pieces, group.whole, strict=True):
            piece.token_ids, piece.prefix = ids, None
        if group.gated:
            self._cascade([group], effort)
            return
        from ..native.cascade import group_margins

        assert effort.margin is not None
        pieces = group.pieces
        for depth in effort.depths:
            scores = self._model.score(*flat(pieces), depth=depth)
            take_scores(pieces, scores.logprobs, scores.greedy, scores.offsets)
            self._row_loops += depth * sum(len(piece.token_ids) - 1 for piece in pieces)
            sums = [
                float(cast("Any", piece.logprobs).sum(dtype=np.float64))
                for piece, is_compared in zip(pieces, group.compared, strict=True)
                if is_compared
            ]
            for piece in pieces:
                piece.depth = depth
            if not group_margins(np.array(sums), np.zeros(len(sums), np.int64))[0] < effort.margin:
                return
