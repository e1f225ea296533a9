"""The configurations that ship: ours by our own model, others by their schema, figures recomputed."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray
import typer
import yaml
from tinyloop.cluster.cli import app
from tinyloop.cluster.config import PoolConfig
from tinyloop.cluster.config_file import read_config
from tinyloop.cluster.errors import UsageError
from tinyloop.cluster.metrics import BY_NAME
from tinyloop.native import plan
from tinyloop.native.cache_size import cache_bytes, state_bytes
from tinyloop.native.descriptor import check_descriptor, expected_tensors
from tinyloop.native.models import default_model_path

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
POOLS = sorted((CONFIGS / "pools").glob("*.toml"))
MANIFESTS = sorted((CONFIGS / "kuberay").glob("*.yaml"))
PREFIX_TOKENS = 1024
GB = 10**9

sys.path.append(str(ROOT / "tests" / "bench"))
from made_models import SHAPES  # noqa: E402

OURO = check_descriptor(SHAPES["ouro-1.4b"])


def by_name(paths: list[Path]) -> Any:
    return pytest.mark.parametrize("path", paths, ids=[path.name for path in paths])


@by_name(POOLS)
def test_a_pool_is_valid_and_its_model_and_prefixes_fit_its_budget(path: Path) -> None:
    config = read_config(path)
    model_bytes = plan(config.model, config.max_seq_len, cache_mode=config.cache_mode).total
    budget = config.model_budget_bytes
    assert budget is None or model_bytes + config.prefix_budget_bytes <= budget
    assert budget is not None or config.device == "cpu", "a GPU's memory has a hard end"


@by_name(POOLS)
def test_a_key_that_is_misspelt_is_named_with_the_right_one(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / path.name
    copy.write_text(path.read_text().replace("replicas =", "replica ="))
    with pytest.raises(UsageError, match="unknown key 'replica': did you mean 'replicas'"):
        read_config(copy)


@by_name(POOLS)
def test_a_key_in_a_comment_is_one_that_there_is(path: Path) -> None:
    commented = re.findall(r"^# (\w+ = \S+)", path.read_text(), re.MULTILINE)
    assert commented
    for line in commented:
        assert tomllib.loads(line).keys() <= PoolConfig.model_fields.keys()


@pytest.mark.parametrize(("name", "tokens"), [("laptop", 1024), ("shared", 512)])
def test_the_figures_of_the_shipped_model_are_those_of_its_plan(name: str, tokens: int) -> None:
    path = CONFIGS / "pools" / f"{name}.toml"
    config = read_config(path)
    # Each thread has scratch of its own: as many as the comment names, whatever this machine has.
    planned = plan(config.model, config.max_seq_len, cache_mode="fp16", prefix_length=tokens, threads=2)
    assert config.model == default_model_path()
    assert planned.prefix_bytes in figures(path.read_text()) <= {planned.total, planned.prefix_bytes}
    assert f"holds {config.prefix_budget_bytes // planned.prefix_bytes} of them" in flat(path)


def prefix_bytes(mode: str) -> int:
    return PREFIX_TOKENS * cache_bytes(OURO, mode) + state_bytes(OURO, PREFIX_TOKENS)


def weights_of(start: str) -> int:
    dims = [d for name, d in expected_tensors(OURO).items() if name.startswith(start) and len(d) == 2]
    return sum(rows * columns for rows, columns in dims)


def figures(text: str) -> set[int]:
    """Numbers of a million or more, as comments write them."""
    return {int(found.replace(",", "")) for found in re.findall(r"\b\d{1,3}(?:,\d{3}){2,}\b", text)}


def flat(path: Path) -> str:
    """The text with comments joined to running text."""
    return re.sub(r"\s*\n#\s*", " ", path.read_text())


def test_the_figures_of_the_made_model_follow_from_its_shape() -> None:
    looped, head = weights_of("layers"), weights_of("head")
    prefixes = {mode: prefix_bytes(mode) for mode in ("fp16", "int8")}
    # A file that made_models.py writes has groups of 128 weights: 4 bits each, a scale and a zero of 2 bytes.
    packed = (looped + head + weights_of("embed")) * (128 * 4 // 8 + 4) // 128
    weights = packed + sum(
        -(-4 * dims[0] // 64) * 64 for dims in expected_tensors(OURO).values() if len(dims) == 1
    )
    model = 888_795_456  # `tinyloop plan --threads 2`; passes of 2,048 rows need what is not weights
    allowed = {looped, head, 2 * (looped + head), weights, model, *prefixes.values()}
    text = flat(CONFIGS / "pools" / "h200.toml")
    assert figures(text) == allowed
    for path in [*POOLS, *MANIFESTS]:
        if path.stem not in ("laptop", "shared"):
            assert figures(path.read_text()) <= allowed, path.name
    held = {mode: 135 * GB // size for mode, size in prefixes.items()}
    assert f"{held['fp16']} of them in this budget" in text
    assert f"and {held['int8']} of them" in text
    eight = flat(CONFIGS / "pools" / "h200-x8.toml")
    assert f"{held['int8']} of them on each GPU and {8 * held['int8']:,} in all" in eight
    assert f"would hold {8 * held['fp16']:,}" in eight
    cluster = flat(CONFIGS / "pools" / "cluster.toml")
    assert f"{held['int8']} on each GPU, {16 * held['int8']:,} in all" in cluster
    assert round((model + 2 * (looped + head)) / GB, 1) == 3.6


def test_the_ray_cluster_file_meets_rays_schema() -> None:
    schema = json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text())
    cluster = yaml.safe_load((CONFIGS / "ray" / "cluster.yaml").read_text())
    jsonschema.validate({k: v for k, v in cluster.items() if k != "min_workers"}, schema)
    assert cluster["min_workers"] == cluster["max_workers"] == len(cluster["provider"]["worker_ips"])
    for start in (*cluster["head_start_ray_commands"][1:], *cluster["worker_start_ray_commands"][1:]):
        assert "RAY_AUTH_MODE=token" in start
        assert "ulimit -n 65536" in start


def cluster_spec(manifest: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = manifest["spec"]
    return spec["rayClusterSpec"] if manifest["kind"] == "RayJob" else spec


def groups(spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield spec["headGroupSpec"]
    yield from spec["workerGroupSpecs"]


@by_name(MANIFESTS)
def test_a_manifest_has_what_kuberay_requires(path: Path) -> None:
    manifest = yaml.safe_load(path.read_text())
    assert manifest["apiVersion"] == "ray.io/v1"
    assert manifest["kind"] in ("RayJob", "RayCluster")
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", manifest["metadata"]["name"])
    spec = cluster_spec(manifest)
    assert re.fullmatch(r"\d+\.\d+\.\d+", spec["rayVersion"])
    assert spec["authOptions"] == {"mode": "token"}
    for group in groups(spec):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        assert group["template"]["spec"]["containers"]
    for group in spec["workerGroupSpecs"]:
        assert group["groupName"]
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


@by_name(MANIFESTS)
def test_a_pod_has_its_resources_and_enough_shared_memory(path: Path) -> None:
    for group in groups(cluster_spec(yaml.safe_load(path.read_text()))):
        pod = group["template"]["spec"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        for container in pod["containers"]:
            assert container["resources"]["limits"] == container["resources"]["requests"]
            mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
            assert set(mounts.values()) <= volumes.keys()
            shared = volumes[mounts["/dev/shm"]]["emptyDir"]
            assert shared["medium"] == "Memory"
            store = int(group["rayStartParams"]["object-store-memory"])
            assert int(shared["sizeLimit"].removesuffix("Gi")) << 30 >= 1.25 * store


def gpus_and_cpus(spec: dict[str, Any]) -> tuple[int, int]:
    """Of all workers."""
    gpus = cpus = 0
    for group in spec["workerGroupSpecs"]:
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        gpus += group["replicas"] * int(limits["nvidia.com/gpu"])
        cpus += group["replicas"] * int(limits["cpu"])
    return gpus, cpus


def test_the_cluster_has_room_for_its_pool() -> None:
    config = read_config(CONFIGS / "pools" / "cluster.toml")
    manifest = yaml.safe_load((CONFIGS / "kuberay" / "raycluster.yaml").read_text())
    gpus, cpus = gpus_and_cpus(cluster_spec(manifest))
    assert gpus == config.replicas
    assert config.threads is not None
    assert cpus >= config.replicas * config.threads


def test_the_jobs_command_is_one_of_ours_and_resumable() -> None:
    manifest = yaml.safe_load((CONFIGS / "kuberay" / "rayjob.yaml").read_text())
    program, command, *arguments = shlex.split(manifest["spec"]["entrypoint"])
    assert (program, command) == ("tinyloop", "score")
    score = typer.main.get_command(app).commands[command]  # type: ignore[attr-defined]
    options = score.make_context(command, arguments).params
    assert options["resume"], "KubeRay may start it twice"
    assert options["replicas"] == gpus_and_cpus(cluster_spec(manifest))[0]
    assert yaml.safe_load(manifest["spec"]["runtimeEnvYAML"])["env_vars"]


def test_the_page_names_every_file_and_no_metric_that_is_not_there() -> None:
    page = (CONFIGS / "README.md").read_text()
    for path in CONFIGS.rglob("*"):
        if path.suffix in (".toml", ".yaml", ".json"):
            assert f"`{path.relative_to(CONFIGS)}`" in page
    for name in re.findall(r"ray_(tinyloop_\w+)", page):
        assert name in BY_NAME


# The schema is Ray's own, and so is how it is written.
@pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`")
def test_the_face_over_http_is_one_that_serve_and_we_take() -> None:
    from ray.serve.schema import ServeDeploySchema
    from tinyloop.cluster.http.deployment import FaceConfig

    given = yaml.safe_load((CONFIGS / "serve" / "http.yaml").read_text())
    (application,) = ServeDeploySchema.model_validate(given).applications
    assert FaceConfig.model_validate(application.args).pool == "shared"
    module, _, name = application.import_path.partition(":")
    assert callable(getattr(importlib.import_module(module), name))
