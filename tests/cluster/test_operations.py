"""What operators see of a pool that runs: the live view, and the metrics that Ray gives to Prometheus."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from collecting import expected, gather
from prometheus_client.parser import text_string_to_metric_families
from simulated import shared_prefix_items
from tinyloop.cluster import registry
from tinyloop.cluster.cli import app
from tinyloop.cluster.config import PoolConfig
from tinyloop.cluster.items import Items
from tinyloop.cluster.metrics import BY_NAME, METRICS, Metric, samples
from tinyloop.cluster.named_pool import ask_status
from tinyloop.cluster.pool import ReplicaPool
from typer.testing import CliRunner

from .recorded_statuses import RUNNING

NAME, RECORDED = "watched", "recorded"
EXPORT_DEADLINE_S = 60.0
ITEMS = 96

# Kind, help and sets of tag values with the value, by exported name.
Exported = dict[str, tuple[str, str, set[tuple[str, ...]]]]


@pytest.fixture(scope="module")
def pool(session: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A named pool of one replica that has scored ITEMS items. Tests only look at it."""
    path = tmp_path_factory.mktemp("watched") / "model.json"
    path.write_text(json.dumps({}))
    config = PoolConfig(model=path, factory="fake_model:load_model", replicas=1)
    items: Items = shared_prefix_items(12, ITEMS // 12, 64, 16, seed=0)
    with ReplicaPool.up(config, NAME) as client:
        client.submit(0, items)
        assert gather(client, 0, items) == expected(items)
    yield NAME
    registry.reap(NAME)


@ray.remote(num_cpus=0)
class ExportingActor:
    """As the router: makes the exporter in its own process."""

    def __init__(self) -> None:
        from tinyloop.cluster.ray_metrics import ray_exporter

        self._exporter = ray_exporter(RECORDED)

    def export(self, body: dict[str, Any]) -> None:
        self._exporter.export(lambda: body)


def exported(pool: str) -> Exported:
    """What Ray gives Prometheus of a pool."""
    node = ray.nodes()[0]
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    with urllib.request.urlopen(url, timeout=10) as answer:
        content: bytes = answer.read()
    found: Exported = {}
    for family in text_string_to_metric_families(content.decode()):
        for sample in family.samples:
            if "tinyloop_" in sample.name and sample.labels["pool"] == pool:
                values = found.setdefault(sample.name, (family.type, family.documentation, set()))[2]
                tags = BY_NAME[sample.name.removeprefix("ray_")].tags
                values.add((*(sample.labels[tag] for tag in tags), str(sample.value)))
    return found


def of_table(metric: Metric, pool: str, body: dict[str, Any]) -> tuple[str, str, set[tuple[str, ...]]]:
    values = {
        (*(value for _, value in sample.tags), str(sample.value))
        for sample in samples(pool, body)
        # Ray has no counter of 0: its series begins with the first event.
        if sample.metric is metric and (sample.value or metric.kind == "gauge")
    }
    return metric.kind, metric.help, values


def test_a_running_router_has_a_value_for_the_whole_table(pool: str) -> None:
    body = ask_status(pool)
    found = {sample.metric.name: sample.value for sample in samples(pool, body)}
    missing = {metric.name for metric in METRICS} - set(found)
    assert missing == {"tinyloop_replica_deaths_total"}, "nothing has died"
    assert found["tinyloop_items_total"] == ITEMS
    assert found["tinyloop_replica_needed_tokens_total"] == found["tinyloop_needed_tokens_total"] > 0
    assert found["tinyloop_replica_computed_tokens_total"] == found["tinyloop_computed_tokens_total"]
    assert found["tinyloop_replica_memory_bytes"] >= found["tinyloop_replica_prefix_bytes"] > 0


def test_top_prints_a_running_pool_once(pool: str) -> None:
    result = CliRunner().invoke(app, ["top", "--pool", pool, "--once"])
    assert result.exit_code == 0, result.output
    assert f"pool {pool}: 1 of 1 replicas up, 0 deaths, {ITEMS} items done, 0 queued" in result.output
    assert "no room for" not in result.output
    assert "\x1b" not in result.output


def test_ray_exports_the_table_and_nothing_else(pool: str) -> None:
    expected_names = {m.name for m in METRICS if of_table(m, RECORDED, RUNNING)[2]}
    assert set(BY_NAME) - expected_names == {"tinyloop_mirror_differences_total"}, "it is 0, as it should be"
    wanted = {
        BY_NAME[name].exported_name: of_table(BY_NAME[name], RECORDED, RUNNING) for name in expected_names
    }
    items = BY_NAME["tinyloop_items_total"]
    of_router = of_table(items, pool, ask_status(pool))
    actor = ExportingActor.remote()
    deadline_s = time.monotonic() + EXPORT_DEADLINE_S
    # Ray forgets a gauge once it has given it away, so the exporter sets it again in its own time.
    while (found := exported(RECORDED)) != wanted or exported(pool).get(items.exported_name) != of_router:
        assert time.monotonic() < deadline_s, (found, exported(pool))
        ray.get(actor.export.remote(RUNNING))
        time.sleep(0.1)
    ray.kill(actor)
