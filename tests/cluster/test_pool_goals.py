"""The pool's goals, bounded: the whole measurement is tests/bench/pool_goals.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..bench.pool_goals import death_to_redispatch_s, router_restart_s

REDISPATCH_S = 0.1
# A new Python process has to start, which other work on the machine stretches: the goal, without any, is 2 s.
# What is lost of the prefixes is not stretched: it is nothing, or this never returns.
ROUTER_S = 8.0


@pytest.mark.chaos
@pytest.mark.usefixtures("session")
def test_work_of_a_dead_replica_begins_elsewhere_within_the_goal(tmp_path: Path) -> None:
    # The least of a few: other work on the machine only ever adds to it.
    assert min(death_to_redispatch_s(tmp_path, 2)) <= REDISPATCH_S


@pytest.mark.chaos
@pytest.mark.usefixtures("session")
def test_a_killed_router_knows_every_prefix_again_soon(tmp_path: Path) -> None:
    assert min(router_restart_s(tmp_path, 1)) <= ROUTER_S
