"""A pool that is one native model in this process."""

from __future__ import annotations

import numpy as np
from tinyloop.cluster.items import Failed, Items, Scored
from tinyloop.native import Model


class ModelPool:
    """Scores a window, in input order and without prefixes, when it is collected."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.waiting: list[tuple[int, Items]] = []

    def submit(self, window: int, items: Items) -> None:
        self.waiting.append((window, items))

    def collect(self, timeout_s: float) -> list[Scored | Failed]:
        window, items = self.waiting.pop(0)
        result = self.model.score(items.token_ids, items.offsets, items.n_scored, depth=items.depth)
        indices = np.arange(len(items), dtype=np.int32)
        return [Scored(window, indices, result.logprobs, result.greedy, result.offsets)]
