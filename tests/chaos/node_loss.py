"""Several nodes on one host, of which one is killed under a pool: python -m tests.chaos.node_loss FOLDER

A program of its own, since a process can be in one Ray cluster only. Its answer is FOLDER/answer.json.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

TESTS = Path(__file__).parents[1]
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(TESTS / "workers"), *filter(None, [os.environ.get("PYTHONPATH")])]
)
sys.path[:0] = [str(TESTS / room) for room in ("cluster", "workers")]

from collecting import expected, gather, values_of  # noqa: E402
from simulated import shared_prefix_items  # noqa: E402
from tinyloop.cluster.config import PoolConfig  # noqa: E402
from tinyloop.cluster.items import Failed  # noqa: E402
from tinyloop.cluster.pool import ReplicaPool  # noqa: E402

NODES = 2
SEED = 17


def main() -> int:
    folder = Path(sys.argv[1])
    model = folder / "model.json"
    model.write_text(json.dumps({"row_seconds": 3e-4}))
    os.environ.setdefault("RAY_worker_niceness", "0")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    others = [cluster.add_node(num_cpus=1, wait=False) for _ in range(NODES - 1)]
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    try:
        config = PoolConfig(model=model, factory="fake_model:load_model", replicas=NODES, chunk_rows=400)
        with ReplicaPool.start(config) as pool:
            items = shared_prefix_items(48, 8, 64, 16, seed=SEED)
            pool.submit(0, items)
            found: dict[int, bytes | Failed] = {}
            while not found:
                found = dict(value for part in pool.collect(10.0) for value in values_of(part))
            began_s = time.monotonic()
            cluster.remove_node(others[0], allow_graceful=False)
            same = gather(pool, 0, items, found) == expected(items)
            seconds = time.monotonic() - began_s
            status = pool.status()
            answer = {
                "same": same,
                "seconds": seconds,
                "deaths": status.deaths,
                "verdicts": [replica.verdict for replica in status.replicas],
                "mirror_differences": status.mirror_differences,
            }
        # Not printed: processes of Ray print here too.
        (folder / "answer.json").write_text(json.dumps(answer))
    finally:
        ray.shutdown()
        cluster.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
