"""Every figure of placement in seconds: measured rates, sizes in bytes, and the one rule that weighs them.
Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .plan import BETA

FIRST_GUESS_S = (
    1e-4  # a row at depth 1 before anything was measured; only the first chunk of a pool is sized by it
)
SMOOTHING = 0.3
BLOCK_TOKENS = (
    64  # engines give out cache memory in blocks; a short prefix must not spoil the estimate of a long one
)


@dataclass(frozen=True, slots=True)
class PlacementRules:
    """How work is cut and when a replica is given up. pool_budget_bytes 0: only replicas' own limits.

    answering_factor: how much longer than a silent one a late replica gets that still answers.
    generate_items: most items of one client that a replica has to generate: an engine's batch, and enough
    beside it to fill the places of those that end until the next command comes.
    """

    chunk_seconds: float = 0.5
    chunk_items: int = 64
    chunk_rows: int = 1000
    commands_ahead: int = 2
    pool_budget_bytes: int = 0
    build_overhead_rows: int = 8
    hang_floor_s: float = 5.0
    hang_factor: float = 5.0
    first_ack_s: float = 60.0
    answering_factor: float = 12.0
    refusal_limit: int = 20
    generate_items: int = 96


def placement_cost(backlog_s: float, miss_s: float, regret_s: float) -> float:
    """The one rule, in seconds: waiting, plus BETA x prefixes to build, plus what room for them costs others.

    There is no threshold, so affinity is weighed and never thrown away.
    """
    return backlog_s + BETA * miss_s + regret_s


class Rates:
    """Seconds a row on one replica, in proportion to depth; corrected by every acknowledgement."""

    def __init__(self, guess_s: float | None = None) -> None:
        self.row_s = guess_s if guess_s is not None else FIRST_GUESS_S
        self.measured = guess_s is not None

    def seconds(self, rows: float, depth: int) -> float:
        """Estimated seconds for that many rows."""
        return rows * depth * self.row_s

    def correct(self, rows: int, depth: int, seconds: float) -> None:
        """Learn from one command."""
        if rows <= 0 or seconds <= 0.0:
            return
        seen = seconds / (rows * depth)
        self.row_s = self.row_s + SMOOTHING * (seen - self.row_s) if self.measured else seen
        self.measured = True


class Sizes:
    """Bytes of a prefix: tokens x depth x bytes a token, scaled by what replicas have measured."""

    def __init__(self, descriptor: Mapping[str, Any]) -> None:
        heads = int(descriptor.get("n_kv_heads", 1)) * int(descriptor.get("head_dim", 64))
        # Keys and values as FP16, one plane a layer and loop; the FP32 states that an upgrade needs come once
        # a token.
        self._plane_bytes = 4 * heads * int(descriptor.get("n_layers", 1))
        self._state_bytes = 4 * int(descriptor.get("hidden_size", 0))
        self._scale = 1.0

    def estimate(self, tokens: int, depth: int) -> int:
        """Expected own bytes of a prefix."""
        return int(self._scale * self._formula(tokens, depth)) + 1

    def correct(self, tokens: int, depth: int, size_bytes: int) -> None:
        """Learn from one measured prefix: up at once, down slowly: too low costs a refusal."""
        seen = size_bytes / self._formula(tokens, depth)
        self._scale = seen if seen > self._scale else self._scale + 0.05 * (seen - self._scale)

    def _formula(self, tokens: int, depth: int) -> float:
        whole_blocks = -(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS
        return float(max(whole_blocks * (depth * self._plane_bytes + self._state_bytes), 1))
