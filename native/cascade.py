"""Cascade scoring: everything at a shallow depth, and deeper only what is not decided there.

An item's numbers are exactly those of a plain run at the depth that it reached. What a cascade may change is
which depth that is: it is a rule about effort, never an approximation of a score.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ._core import InvalidInputError, Model, PrefixCache, ResumeHandle, TinyLoopError
from .arguments import whole_number
from .cache_size import state_bytes
from .flat_items import FlatItems, Prefixes, require

# Gives a prefix of the same ids, `depth` loops deep at least, open until the cascade is done with its items.
Deepen = Callable[[PrefixCache, int], PrefixCache]


@dataclass(frozen=True, slots=True)
class CascadeResult:
    """What a cascade found, and what it cost.

    logprobs: float32 [S], item after item, each at the depth that the item reached; greedy: bool [S], the id
    is the argmax there. offsets: int64 [n + 1], item i's values are [offsets[i], offsets[i + 1]).
    depths: int32 [n], loops that each item ran.
    row_loops: rows of items times the loops they ran, what ran a second time included; full_row_loops: the
    same if all had run the last depth, once. prefix_row_loops: rows of shallow prefixes times the loops added
    to them, on top; those that `deepen` adds are its own to count.
    """

    logprobs: NDArray[np.float32]
    greedy: NDArray[np.bool_]
    offsets: NDArray[np.int64]
    depths: NDArray[np.int32]
    row_loops: int
    full_row_loops: int
    prefix_row_loops: int


def cascade(
    model: Model,
    token_ids: NDArray[np.int32],
    offsets: NDArray[np.int64],
    n_scored: NDArray[np.int32],
    *,
    groups: NDArray[np.int32],
    depths: Sequence[int] | None = None,
    margin: float | None = None,
    exit_threshold: float | None = None,
    prefixes: Prefixes | None = None,
    prompt_lens: NDArray[np.int32] | None = None,
    handle_budget_bytes: int | None = None,
    compared: NDArray[np.bool_] | None = None,
    deepen: Deepen | None = None,
) -> CascadeResult:
    """Score all items at depths[0], then take to the next depth only what is not decided.

    Items of one group are the choices of one row: they stay at one depth, because sums of different depths
    do not compare. A group goes on while its margin, best minus second best summed log-probability, is below
    `margin` (0: never; infinity: always).

    An item alone in its group has no margin; its exit gate decides. Model.score already runs loop by loop
    and lets go of items whose gate is done, so this costs no second run and no handle, only the gate, one dot
    product a scored row and loop. It stops after the first loop, from depths[0] to depths[-1], at which every
    scored id has left with a probability of `exit_threshold` or more (1: never); depths between those two
    are steps for groups alone. Without a margin the gate decides for groups too: at the first loop at which
    that holds for all of their items; those that had left earlier are then scored once more, at that depth.

    Args:
        token_ids, offsets, n_scored, prefixes, prompt_lens: as Model.score.
        groups: int32 [n], equal for the choices of one row; in any order.
        depths: rising. None: the last two loops that the model was made for, so (3, 4) for four. Even at a
            margin of 0 that keeps 93 choices in a hundred where a step to 2 before it keeps 85, and at a
            margin of 1 it keeps 99 and saves a fifth of the loops (CASCADE.md).
        prefixes: a prefix shallower than a step is upgraded for the groups that take it, and one shallower
            than depths[-1] for items that a gate decides; for that it must be upgradable and have no
            shallower parent.
        handle_budget_bytes: what the handles of groups may hold at any time; groups are worked off in slices
            that keep to it. Upgraded prefixes come on top, a slice at a time. None: all groups at once.
        compared: bool [n], whether an item takes part in its group's decision, one of a group at least; the
            others go where it goes. A group with one such item counts as an item alone. None: all do.
        deepen: called for a prefix that is shallower than a step, in place of an upgrade here, also for items
            that a gate decides. It owns what it returns; what it raises ends the call.
    Raises:
        InvalidInputError: an argument or a combination is unusable; a group alone is over the budget; a row
            without choices and no exit_threshold, or a model without a gate; choices and no margin.
        Others as Model.score. Every handle is closed in any case.
    """
    items = FlatItems(token_ids, offsets, n_scored, prefixes, prompt_lens)
    steps = _checked_depths(_last_two(model) if depths is None else depths)
    group, size = _numbered(groups, len(items))
    counts = _checked_compared(compared, len(items))
    alone = np.bincount(group[counts], minlength=len(size))[group] == 1
    if not np.isin(group, group[counts]).all():
        raise InvalidInputError("cannot cascade: a group has no compared item, so nothing decides its depth")
    by_gate_alone = margin is None and exit_threshold is not None
    gated = np.ones(len(items), np.bool_) if by_gate_alone else alone
    n_gated, n_choices = int(gated.sum()), int((~gated).sum())
    _check_rules(
        model, margin, exit_threshold, n_gated=n_gated, n_choices=n_choices, has_choices=not alone.all()
    )
    found = _Found(items)
    if gated.any():
        assert exit_threshold is not None
        with ExitStack() as owner:
            which = np.flatnonzero(gated)
            some, of_slice = items.take(which), (group[which], counts[which])
            deeper = _DeeperPrefixes(some.prefixes, owner, deepen)
            _score_by_gate(model, some, *of_slice, steps, exit_threshold, deeper, found)
    for which in _slices(model, items, group, np.flatnonzero(~gated), handle_budget_bytes):
        assert margin is not None
        of_slice = group[which], counts[which]
        _score_by_margin(model, items.take(which), *of_slice, steps, margin, deepen, found)
    return found.result(steps[-1])


def group_margins(sums: NDArray[np.float64], group: NDArray[np.int64]) -> NDArray[np.float64]:
    """Best minus second best sum of each group: float64 [groups].

    group: number of each sum's group, 0..groups - 1, two sums a group at least.
    """
    order = np.lexsort((-sums, group))
    first = np.flatnonzero(np.diff(group[order], prepend=-1))
    best, second = sums[order[first]], sums[order[first + 1]]
    # Two zero probabilities are equal too, and their difference is no number.
    return np.where(best == second, 0.0, best - np.where(best == second, 0.0, second))


class _Found:
    """The results of all items, filled in as items end."""

    def __init__(self, items: FlatItems) -> None:
        self._items = items
        self._offsets = np.concatenate([[0], np.cumsum(items.n_scored, dtype=np.int64)]).astype(np.int64)
        self._logprobs = np.empty(self._offsets[-1], np.float32)
        self._greedy = np.empty(self._offsets[-1], np.bool_)
        self._depths = np.zeros(len(items), np.int32)
        self.prefix_row_loops = self.repeated_row_loops = 0

    def put(self, place: int, depth: int, logprobs: NDArray[np.float32], greedy: NDArray[np.bool_]) -> None:
        span = slice(self._offsets[place], self._offsets[place + 1])
        self._logprobs[span], self._greedy[span], self._depths[place] = logprobs, greedy, depth

    def result(self, last_depth: int) -> CascadeResult:
        rows = self._items.rows
        return CascadeResult(
            self._logprobs,
            self._greedy,
            self._offsets,
            self._depths,
            int(rows @ self._depths.astype(np.int64)) + self.repeated_row_loops,
            int(rows.sum()) * last_depth,
            self.prefix_row_loops,
        )


def _score_by_gate(
    model: Model,
    items: FlatItems,
    group: NDArray[np.int64],
    counts: NDArray[np.bool_],
    steps: Sequence[int],
    threshold: float,
    deeper: _DeeperPrefixes,
    found: _Found,
) -> None:
    """Let the compared items leave by their gates, then bring the rest of each group to its depth."""
    everyone = np.arange(len(items))
    # Groups of one, by far the most, take one call; a group's depth is known only after it.
    first = np.flatnonzero(counts)
    reached = np.zeros(len(items), np.int32)
    with _named_by(items.places[first]):
        prefixes = deeper.at(steps[-1], first)
    gates = _score_at(
        model, items, first, prefixes, found, steps[-1], min_depth=steps[0], exit_threshold=threshold
    )
    reached[first] = gates
    of_group = np.zeros(group.max() + 1, np.int32)
    np.maximum.at(of_group, group[first], gates)
    late = everyone[reached < of_group[group]]
    found.repeated_row_loops += int(items.rows[late] @ reached[late].astype(np.int64))
    if len(late):
        with _named_by(items.places[late]):
            prefixes = deeper.at(steps[-1], late)
        _score_at(model, items, late, prefixes, found, of_group[group[late]])
    found.prefix_row_loops += deeper.row_loops


def _score_at(
    model: Model,
    items: FlatItems,
    which: NDArray[np.int64],
    prefixes: list[PrefixCache | None] | None,
    found: _Found,
    depth: int | NDArray[np.int32],
    **gate: float,
) -> NDArray[np.int32]:
    """Score some items in one call. Returns the depth that each reached."""
    some = items.take(which)
    with _named_by(some.places):
        result = model.score(
            some.token_ids,
            some.offsets,
            some.n_scored,
            prefixes=prefixes,
            prompt_lens=some.prompt_lens,
            depth=depth,
            **gate,  # type: ignore[arg-type]
        )
    for place, reached, (begin, end) in zip(
        some.places, result.depths, pairwise(result.offsets), strict=True
    ):
        found.put(int(place), int(reached), result.logprobs[begin:end], result.greedy[begin:end])
    return result.depths


def _score_by_margin(
    model: Model,
    items: FlatItems,
    group: NDArray[np.int64],
    counts: NDArray[np.bool_],
    steps: Sequence[int],
    margin: float,
    deepen: Deepen | None,
    found: _Found,
) -> None:
    """One slice of whole groups. Its handles, and the prefixes that it upgrades, are closed at its end."""
    with ExitStack() as handles_and_prefixes:
        with _named_by(items.places):
            handles = model.start_many(
                items.token_ids,
                items.offsets,
                items.n_scored,
                steps[0],
                steps[-1],
                prefixes=items.prefixes,
                prompt_lens=items.prompt_lens,
            )
        for handle in handles:
            handles_and_prefixes.callback(handle.close)
        deeper = _DeeperPrefixes(items.prefixes, handles_and_prefixes, deepen)
        running = np.arange(len(items))
        for depth in steps[1:]:
            _, number = np.unique(group[running], return_inverse=True)
            decide = counts[running]
            sums = np.array([handles[i].logprobs.sum(dtype=np.float64) for i in running[decide]])
            goes_on = group_margins(sums, number[decide])[number] < margin
            _finish(items, handles, running[~goes_on], found)
            running = running[goes_on]
            if not len(running):
                break
            with _named_by(items.places[running]):
                model.upgrade([handles[i] for i in running], depth, prefixes=deeper.at(depth, running))
        _finish(items, handles, running, found)
        found.prefix_row_loops += deeper.row_loops


@contextmanager
def _named_by(places: NDArray[np.int64]) -> Iterator[None]:
    """Lets an error of a call over some of the items name the one it means as the caller numbers them."""
    try:
        yield
    except TinyLoopError as error:
        text = re.sub(r"\b(?:item|handle) ([0-9]+)", lambda m: f"item {places[int(m[1])]}", str(error))
        raise type(error)(text) from error


def _finish(
    items: FlatItems, handles: Sequence[ResumeHandle], which: NDArray[np.int64], found: _Found
) -> None:
    for i in which:
        handle = handles[i]
        found.put(int(items.places[i]), handle.depth, handle.logprobs, handle.greedy)
        handle.close()  # at once: later steps need the memory


class _DeeperPrefixes:
    """The prefixes of a slice, upgraded as far as its items go. `owner` closes what is made here."""

    def __init__(self, prefixes: Prefixes | None, owner: ExitStack, deepen: Deepen | None) -> None:
        self._prefixes = None if prefixes is None else list(prefixes)
        self._owner = owner
        self._deepen = deepen
        self._latest: dict[int, PrefixCache] = {}  # by the identity of the caller's handle
        self.row_loops = 0

    def at(self, depth: int, running: NDArray[np.int64]) -> list[PrefixCache | None] | None:
        """For each running item its prefix, `depth` deep at least. Errors name its place in `running`."""
        if self._prefixes is None:
            return None
        deep: list[PrefixCache | None] = []
        for place, i in enumerate(running):
            try:
                deep.append(self._deep_enough(self._prefixes[i], depth))
            except TinyLoopError as error:
                raise type(error)(f"item {place}: {error}") from error
        return deep

    def _deep_enough(self, given: PrefixCache | None, depth: int) -> PrefixCache | None:
        if given is None:
            return None
        if self._deepen is not None:
            return self._deepen(given, depth)
        prefix = self._latest.get(id(given), given)
        if prefix.depth >= depth:
            return prefix
        upgraded = prefix.upgrade(depth)
        self._owner.callback(upgraded.close)
        self.row_loops += upgraded.own_length * (depth - prefix.depth)
        self._latest[id(given)] = upgraded
        return upgraded


def _slices(
    model: Model,
    items: FlatItems,
    group: NDArray[np.int64],
    which: NDArray[np.int64],
    budget: int | None,
) -> Iterator[NDArray[np.int64]]:
    """Items of whole groups whose handles fit the budget together; groups in order of their first item.

    An upgrade keeps the old states until all of its passes have succeeded, so a handle counts twice.
    Raises: InvalidInputError, before the first slice, if a group alone does not fit.
    """
    if not len(which):
        return
    if budget is None:
        yield which
        return
    needs = np.zeros(group.max() + 1, np.int64)
    descriptor, block = model.descriptor, model.block_bytes
    bytes_each = [2 * state_bytes(descriptor, int(rows), block) for rows in items.rows[which]]
    np.add.at(needs, group[which], bytes_each)
    if needs.max() > budget:
        raise InvalidInputError(
            f"cannot cascade with handle_budget_bytes={budget}: the choices of group {int(needs.argmax())} "
            f"(in order of value) need {needs.max()} bytes together; give at least that"
        )
    order = list(dict.fromkeys(group[which].tolist()))
    of_slice = np.zeros(len(needs), np.int64)
    held = number = 0
    for g in order:
        if held + needs[g] > budget:
            number, held = number + 1, 0
        held += int(needs[g])
        of_slice[g] = number
    for k in range(number + 1):
        yield which[of_slice[group[which]] == k]


def _numbered(groups: NDArray[np.int32], n: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Each item's group as a number from 0 on, and the size of each group."""
    require(groups, "groups", np.int32)
    if len(groups) != n:
        raise InvalidInputError(f"cannot cascade: groups has {len(groups)} entries for {n} items")
    _, number, size = np.unique(groups, return_inverse=True, return_counts=True)
    return number, size


def _checked_compared(compared: NDArray[np.bool_] | None, n: int) -> NDArray[np.bool_]:
    if compared is None:
        return np.ones(n, np.bool_)
    require(compared, "compared", np.bool_)
    if len(compared) != n:
        raise InvalidInputError(f"cannot cascade: compared has {len(compared)} entries for {n} items")
    return compared


def _last_two(model: Model) -> tuple[int, ...]:
    loops = int(model.descriptor["loops"])
    return (loops - 1, loops) if loops > 1 else (1,)


def _checked_depths(depths: Sequence[int]) -> tuple[int, ...]:
    steps = tuple(whole_number("depths", depth) for depth in depths)
    if not steps or steps[0] < 1 or any(a >= b for a, b in pairwise(steps)):
        raise InvalidInputError(f"cannot cascade over depths={steps}: give rising depths of 1 or more")
    return steps


def _check_rules(
    model: Model,
    margin: float | None,
    threshold: float | None,
    *,
    n_gated: int,
    n_choices: int,
    has_choices: bool,
) -> None:
    """Each kind of item needs its rule; a rule that no item needs is checked all the same."""
    if margin is not None and not margin >= 0:
        raise InvalidInputError(f"cannot cascade with margin={margin}: it must be 0 or more")
    if threshold is not None and not threshold > 0:
        raise InvalidInputError(f"cannot cascade with exit_threshold={threshold}: it must be above 0")
    if n_choices and margin is None:
        raise InvalidInputError(
            f"cannot cascade {n_choices} items that are choices of rows without a margin: give margin, "
            f"{math.inf} for all depths"
        )
    if not n_gated:
        return
    lacking = "a margin" if margin is None and has_choices else "choices"
    if not model.descriptor["exit_gate"]:
        raise InvalidInputError(
            f"cannot cascade {n_gated} items without {lacking}: the exit gate would decide, and the model "
            "has none; score them at a fixed depth"
        )
    if threshold is None:
        raise InvalidInputError(
            f"cannot cascade {n_gated} items without choices by a margin: give exit_threshold, or put the "
            "choices of one row into one group"
        )
