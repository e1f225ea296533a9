"""How deep the items of a window go where that is not one fixed number, and their way to a replica.

A window of groups is a tuple of arrays in the object store: three as of a window at a fixed depth, then the
groups, what is compared, and the rule. Nothing in it is a class, so no version of one is tied to another.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .wire import Int32Array, Int64Array, WireError

MOST_DEPTH = 4096


@dataclass(frozen=True, slots=True)
class Effort:
    """The rule that decides how deep a group goes.

    depths: rising; everything runs the first. margin: a group of choices goes on to the next one while its
    best summed log-probability leads by less than so many nats. exit_threshold: what has no margin stops
    after the first loop, from depths[0] to depths[-1], at which its gates have let every scored id go with
    that probability. None: there is no such rule.
    """

    depths: tuple[int, ...]
    margin: float | None = None
    exit_threshold: float | None = None

    def fault(self) -> str:
        """What is wrong with it; empty if nothing is."""
        depths, margin, threshold = self.depths, self.margin, self.exit_threshold
        if not depths or depths[0] < 1 or depths[-1] > MOST_DEPTH or any(a >= b for a, b in pairwise(depths)):
            return f"depths {list(depths)} do not rise within 1 to {MOST_DEPTH}"
        if margin is None and threshold is None:
            return "there is neither a margin nor an exit threshold"
        if margin is not None and not margin >= 0:
            return f"the margin is {margin}: it must be 0 or more"
        if threshold is not None and not threshold > 0:
            return f"the exit threshold is {threshold}: it must be above 0"
        return ""

    @property
    def build_depth(self) -> int:
        """Loops that shared prefixes are built with: where a gate alone decides, those of the last depth."""
        return self.depths[0] if self.margin is not None else self.depths[-1]


@dataclass(frozen=True, slots=True)
class GroupedTokens:
    """Token ids of one window whose items belong to groups, such as the choices of one row.

    token_ids int32 [total], offsets int64 [n + 1], n_scored int32 [n], as of WindowTokens. group_offsets
    int64 [g + 1]: items of group k are [group_offsets[k], group_offsets[k + 1]). compared bool [n]: whether
    an item takes part in the decision of its group: some at its beginning, at least the first. A prefix that
    a command names for a group serves its compared items, and no other.
    """

    token_ids: Int32Array
    offsets: Int64Array
    n_scored: Int32Array
    group_offsets: Int64Array
    compared: NDArray[np.bool_]
    effort: Effort

    def __len__(self) -> int:
        """Groups: what a command names."""
        return len(self.group_offsets) - 1

    def ids(self, group: int) -> Int32Array:
        """The ids of the first item of a group, a view."""
        return self.item_ids(int(self.group_offsets[group]))

    def item_ids(self, item: int) -> Int32Array:
        """The ids of one item, a view."""
        return self.token_ids[self.offsets[item] : self.offsets[item + 1]]


def grouped_payload(window: GroupedTokens) -> tuple[Any, ...]:
    """A window of groups as a client puts it into the object store."""
    effort = window.effort
    rules = [math.nan if rule is None else rule for rule in (effort.margin, effort.exit_threshold)]
    arrays = (window.token_ids, window.offsets, window.n_scored, window.group_offsets, window.compared)
    return (*arrays, np.array(effort.depths, np.int32), np.array(rules, np.float64))


def grouped_from(payload: tuple[Any, ...]) -> GroupedTokens:
    """A window of groups from the object store. Raises WireError that says what is wrong with it."""
    if len(payload) != 7:
        raise WireError(f"a window of groups has 7 arrays, found {len(payload)}")
    token_ids, offsets, n_scored, group_offsets, compared, depths, rules = payload
    margin, threshold = (None if math.isnan(rule) else float(rule) for rule in rules.tolist())
    effort = Effort(tuple(depths.tolist()), margin, threshold)
    # Views: what comes from the object store has a dtype equal to the engine's, but not the same object.
    window = GroupedTokens(
        token_ids.view(np.int32),
        offsets.view(np.int64),
        n_scored.view(np.int32),
        group_offsets.view(np.int64),
        compared.view(np.bool_),
        effort,
    )
    if fault := effort.fault() or fault_of_groups(window.group_offsets, window.compared, len(n_scored)):
        raise WireError(fault)
    return window


def fault_of_groups(group_offsets: Int64Array, compared: NDArray[np.bool_], n: int) -> str:
    """What is wrong with the groups of n items; empty if nothing is."""
    if not len(group_offsets) or group_offsets[0] != 0 or group_offsets[-1] != n or len(compared) != n:
        return f"groups do not cover {n} items"
    if (np.diff(group_offsets) < 1).any():
        return "a group has no item"
    starts_group = np.zeros(n, np.bool_)
    starts_group[group_offsets[:-1]] = True
    if not compared[starts_group].all() or (compared[1:] & ~compared[:-1] & ~starts_group[1:]).any():
        return "an item that is not compared stands before one of its group that is"
    return ""
