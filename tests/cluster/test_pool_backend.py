"""What a job asks of a model file and of a pool, before any pool is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tinyloop.cluster.errors import ExitCode, InfrastructureError, UsageError
from tinyloop.cluster.pool_backend import JobPool, choose_model
from tinyloop.cluster.settings import PoolRequest, ScoreSettings
from tinyloop.native.format import read_header
from tinyloop.native.models import default_model_path


def settings(**changes: Any) -> ScoreSettings:
    return ScoreSettings(inputs=(), output=Path("out"), **changes)


def test_the_model_that_ships_is_chosen_with_its_own_depth_and_window() -> None:
    chosen = choose_model(settings(), PoolRequest())
    header = read_header(default_model_path())
    assert chosen.path == default_model_path()
    assert (chosen.depth, chosen.max_seq_len) == (
        header.descriptor["loops"],
        header.descriptor["max_positions"],
    )
    assert chosen.choice.identity["digest"] == header.digest
    assert chosen.encoder.policy.max_rows == chosen.max_seq_len
    assert chosen.warnings == ()


def test_a_depth_beyond_the_trained_one_is_warned_of() -> None:
    assert "beyond" in choose_model(settings(depth=9), PoolRequest()).warnings[0]


@pytest.mark.parametrize(
    ("changes", "request_changes", "message"),
    [
        ({}, {"max_seq_len": 100_000}, "positions"),
        ({}, {"model": Path("missing.tloop")}, "missing"),
        ({"prefix_token": 10**6}, {}, "--prefix-token"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(
    changes: dict[str, Any], request_changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        choose_model(settings(**changes), PoolRequest(**request_changes))


def test_every_setting_that_changes_a_number_is_in_the_identity() -> None:
    plain = choose_model(settings(), PoolRequest()).choice.identity
    for changed in (
        choose_model(settings(depth=2), PoolRequest()),
        choose_model(settings(), PoolRequest(max_seq_len=64)),
    ):
        assert changed.choice.identity != plain
    assert choose_model(settings(), PoolRequest(replicas=3, threads=1)).choice.identity == plain


class Broken:
    """A pool whose replicas are lost."""

    def submit(self, window: int, items: Any) -> None:
        raise TimeoutError("all replicas were lost")

    def collect(self, timeout_s: float) -> list[Any]:
        raise TimeoutError("all replicas were lost")


def test_a_pool_that_is_lost_ends_a_job_as_resumable() -> None:
    pool = JobPool(Broken(), TimeoutError)
    for call in (lambda: pool.submit(0, None), lambda: pool.collect(0.0)):  # type: ignore[arg-type]
        with pytest.raises(InfrastructureError, match=r"all replicas were lost.*--resume") as caught:
            call()
        assert caught.value.exit_code == ExitCode.INFRASTRUCTURE
