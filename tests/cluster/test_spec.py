"""A pool's spec: what is stored is what is read, and what differs is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ray import cloudpickle
from tinyloop.cluster.config import PoolConfig
from tinyloop.cluster.config_file import read_config
from tinyloop.cluster.errors import UsageError
from tinyloop.cluster.spec import PoolSpec, SpecError, check_name, decode_spec, differences, encode_spec
from tinyloop.native.format import read_header
from tinyloop.native.models import default_model_path

CONFIG = PoolConfig(model=Path("/m.tloop"), replicas=3, cache_mode="int8", first_ack_s=7.5)


def test_a_spec_is_read_as_it_was_written() -> None:
    spec = PoolSpec.of(CONFIG, cluster_cpus=8).resized(5)
    assert decode_spec(encode_spec(spec)) == spec


@pytest.mark.parametrize(
    ("cpus", "replicas", "threads", "expected"),
    [(8, 2, None, (4, 4)), (2, 2, None, (1, 1)), (2, 4, None, (1, 0)), (8, 2, 6, (6, 0)), (8, 2, 3, (3, 3))],
)
def test_replicas_share_the_cores_and_none_waits_for_ever(
    cpus: int, replicas: int, threads: int | None, expected: tuple[int, int]
) -> None:
    spec = PoolSpec.of(PoolConfig(model=Path("/m"), replicas=replicas, threads=threads), cpus)
    assert (spec.threads, spec.num_cpus) == expected


def test_replicas_that_are_added_set_no_core_aside_twice() -> None:
    spec = PoolSpec.of(PoolConfig(model=Path("/m"), replicas=2), 8).resized(4)
    assert (spec.threads, spec.num_cpus, spec.replicas) == (2, 0, 4)


def test_a_model_goes_to_replicas_as_a_path() -> None:
    """Everything a process of a pool is started with is small, and holds no model, tokenizer or function."""
    path = default_model_path()
    spec = PoolSpec.of(PoolConfig(model=path), cluster_cpus=2)
    sent = cloudpickle.dumps((spec, spec.settings(), spec.actor_options()))
    assert str(path).encode() in sent
    assert len(sent) < 8_000 < path.stat().st_size / 1_000


def test_two_versions_are_both_named() -> None:
    stored = json.loads(encode_spec(PoolSpec.of(CONFIG, 8))) | {"version": 99}
    with pytest.raises(SpecError, match="spec version 99, this is 1"):
        decode_spec(json.dumps(stored).encode())
    with pytest.raises(SpecError, match="cannot be read"):
        decode_spec(b"{}")


def test_what_differs_is_said_and_where_it_runs_is_not_compared() -> None:
    other = CONFIG.model_copy(update={"chunk_rows": 9, "ray_address": "auto", "cache_mode": None})
    assert differences(CONFIG.model_dump(mode="json"), other.model_dump(mode="json")) == [
        "cache_mode: 'int8' there, None asked",
        "chunk_rows: 1000 there, 9 asked",
    ]


@pytest.mark.parametrize("name", ["", "a/b", "-a", "a b", "x" * 64])
def test_a_name_that_is_none_is_refused_with_the_rule(name: str) -> None:
    with pytest.raises(SpecError, match="is no name of a pool: use 1 to 63 letters"):
        check_name(name)
    assert check_name("gpu-8.A_1") == "gpu-8.A_1"


def test_a_file_without_a_model_means_the_shipped_one_within_its_positions(tmp_path: Path) -> None:
    file = tmp_path / "pool.toml"
    file.write_text("replicas = 2")
    config = read_config(file)
    positions = read_header(default_model_path()).descriptor["max_positions"]
    assert (config.model, config.max_seq_len) == (default_model_path(), min(2048, positions))
    file.write_text('model = "m.tloop"')
    assert read_config(file).model == tmp_path / "m.tloop"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("replicas = 0", "replicas is 0: input should be greater than or equal to 1"),
        ("replica = 1", "unknown key 'replica': did you mean 'replicas'"),
        ("replicas = ", "cannot read pool configuration"),
    ],
)
def test_a_bad_file_is_named_with_key_and_rule(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "pool.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=message) as error:
        read_config(file)
    assert str(file) in str(error.value)


def test_the_shipped_configuration_is_valid() -> None:
    files = sorted((Path(__file__).parents[2] / "configs" / "pools").glob("*.toml"))
    assert files
    assert [read_config(file).model for file in files] == [default_model_path()] * len(files)
