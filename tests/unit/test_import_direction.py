"""The sources import one way: cluster -> workers -> native, with Ray and torch only where they belong."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("native", "workers", "cluster")
BELOW = {"native": {"native"}, "workers": {"workers", "native"}, "cluster": {"cluster", "workers", "native"}}
RAY_FILES = {
    "workers/replica.py",
    "cluster/dispatch.py",
    "cluster/supervisor.py",
    "cluster/registry.py",
    "cluster/homes.py",
    "cluster/named_pool.py",
    "cluster/client.py",
    "cluster/pool.py",
    "cluster/session.py",
    "cluster/cluster_token.py",
    "cluster/job_server.py",
    "cluster/generation.py",
    "cluster/generation_desk.py",
    "cluster/doctor/child.py",
    "cluster/ray_metrics.py",
    "cluster/adapters/ray_data.py",
    "cluster/cli.py",
    "cluster/serve_cli.py",
    "cluster/http/deployment.py",
    "cluster/http/serving.py",
}
# Training and the reference are tools of development; the converter reads foreign weights.
TORCH_ROOMS = ("native/reference/", "native/train.py", "native/convert.py")

SOURCES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))


def imports_of(path: Path) -> list[tuple[str, int]]:
    """Every imported module as a dotted path from the root of the sources, with its line."""
    package = path.relative_to(ROOT).parent.parts
    found: list[tuple[str, int]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            names = [node.module] if node.module else [alias.name for alias in node.names]
            found += [(".".join((*base, name)), node.lineno) for name in names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append((node.module, node.lineno))
    return [(name.removeprefix("tinyloop."), line) for name, line in found]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_source_imports_only_what_its_room_may(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    for module, line in imports_of(path):
        top = module.split(".")[0]
        where = f"{name}:{line} imports {module}"
        assert top not in ROOMS or top in BELOW[name.split("/")[0]], where
        assert top != "tests", where
        assert top != "ray" or name in RAY_FILES, where
        assert top != "torch" or name.startswith(TORCH_ROOMS), where


def test_the_rule_sees_relative_imports() -> None:
    source = ROOT / "workers" / "replica.py"
    assert "ray" in {module for module, _ in imports_of(source)}
    assert "workers.engine_thread" in {module for module, _ in imports_of(source)}
    assert "workers.wire" in {module for module, _ in imports_of(ROOT / "cluster" / "keys.py")}


def test_placement_is_imported_without_ray_and_the_pool_by_its_short_name() -> None:
    lines = (
        "import sys",
        "import tinyloop.cluster.placement, tinyloop.workers.engine_thread",
        "assert 'ray' not in sys.modules",
        "from tinyloop.cluster import PoolConfig, PoolError, ReplicaPool",
        "assert ReplicaPool.__module__ == 'tinyloop.cluster.pool'",
    )
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True, timeout=60)
