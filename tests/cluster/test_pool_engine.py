"""The pool with the real engine and the model that ships: its bits are those of one model in one process."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
from collecting import MakePool, gather, values_of
from simulated import ids_of, shared_prefix_items
from tinyloop.cluster.items import Failed, Items
from tinyloop.native import load_model
from tinyloop.native.models import default_model_path

ENGINE = {"model_path": default_model_path(), "factory": "tinyloop.native:load_model", "max_seq_len": 256}


def scored_alone(items: Items) -> dict[int, bytes]:
    """Each item by itself, whole, without any prefix or neighbour."""
    with load_model(default_model_path(), max_seq_len=256) as model:
        alone = (model.score_tokens(ids_of(items, item), depth=items.depth) for item in range(len(items)))
        return {i: np.asarray(s)[-int(items.n_scored[i]) :].tobytes() for i, s in enumerate(alone)}


@pytest.mark.chaos
def test_two_replicas_one_of_which_is_killed_give_the_bits_of_one_model(make_pool: MakePool) -> None:
    items = shared_prefix_items(groups=6, each=4, shared=40, own=8, depth=2)
    pool = make_pool(2, threads=1, chunk_rows=60, chunk_items=4, **ENGINE)
    pool.submit(0, items)
    found: dict[int, bytes | Failed] = {}
    while not found:
        found = {item: value for part in pool.collect(60.0) for item, value in values_of(part)}
    os.kill(pool.status().replicas[0].pid, signal.SIGKILL)
    found |= gather(pool, 0, items, found, until=120.0)
    assert found == scored_alone(items)
    assert pool.status().mirror_differences == 0


def test_a_token_outside_the_vocabulary_fails_its_item_alone(make_pool: MakePool) -> None:
    items = shared_prefix_items(groups=1, each=4, shared=12, own=6, depth=1)
    items.token_ids[int(items.offsets[2]) + 13] = 1_000_000
    pool = make_pool(1, threads=1, **ENGINE)
    pool.submit(0, items)
    found = gather(pool, 0, items)
    failed = found.pop(2)
    assert isinstance(failed, Failed)
    assert failed.error_class == "token_out_of_range"
    items.token_ids[int(items.offsets[2]) + 13] = 1
    assert found == {item: bits for item, bits in scored_alone(items).items() if item != 2}
