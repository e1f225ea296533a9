"""What a job asks of a model file and of a pool, before any pool is started."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_models import write_tiny
from tinyloop.cluster.errors import ExitCode, InfrastructureError, UsageError
from tinyloop.cluster.fleet import Fleet, PoolError
from tinyloop.cluster.pool import ReplicaPool
from tinyloop.cluster.pool_backend import JobPool, choose_model, open_pool
from tinyloop.cluster.settings import PoolRequest, ScoreSettings
from tinyloop.native.format import read_header
from tinyloop.native.models import default_model_path
from tinyloop.workers.engine_thread import EngineThread
from tinyloop.workers.model import ReplicaSettings
from tinyloop.workers.status import encode_status


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


def test_a_gpu_has_no_bf16_mode() -> None:
    with pytest.raises(UsageError, match="--numeric bf16 is a mode of the CPU"):
        choose_model(settings(), PoolRequest(device="cuda", numeric="bf16"))


def test_every_setting_that_changes_a_number_is_in_the_identity() -> None:
    plain = choose_model(settings(), PoolRequest()).choice.identity
    for changed in (
        choose_model(settings(depth=2), PoolRequest()),
        choose_model(settings(), PoolRequest(max_seq_len=64)),
        choose_model(settings(), PoolRequest(numeric="bf16")),
        choose_model(settings(), PoolRequest(device="cuda")),
    ):
        assert changed.choice.identity != plain
    assert choose_model(settings(), PoolRequest(replicas=3, threads=1)).choice.identity == plain


@pytest.mark.parametrize(
    ("changes", "message"), [({"replicas": 5_000}, "replicas is 5000"), ({"threads": 0}, "threads is 0")]
)
def test_a_pool_that_cannot_be_made_is_refused_in_one_line(changes: dict[str, Any], message: str) -> None:
    request = PoolRequest(**changes)
    with (
        pytest.raises(UsageError, match=message) as caught,
        open_pool(choose_model(settings(), request), request),
    ):
        pass
    assert "\n" not in str(caught.value)
    assert "pydantic" not in str(caught.value)


@pytest.mark.parametrize("content", [None, b"GGUF" + bytes(60), b"\x02\0\0\0\0\0\0\0{}" + bytes(60)])
def test_a_foreign_model_is_sent_to_convert(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "model"
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(UsageError, match="tinyloop convert"):
        choose_model(settings(), PoolRequest(model=path))


def start_failure(path: Path, **load_options: Any) -> str:
    """What the supervisor says of a replica that loads this file, without Ray."""
    replica = ReplicaSettings(str(path), "tinyloop.native:load_model", 1, 0, load_options)
    thread = EngineThread(replica)
    thread.loaded.result(60)
    fleet = Fleet(1, 1, replica)
    trouble = fleet.welcome(fleet.slots[0], encode_status(thread.status()))
    assert thread.close(10)
    return trouble


def test_weights_that_are_damaged_are_refused_and_not_called_resumable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.tloop"
    content = bytearray(default_model_path().read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    trouble = start_failure(path, max_seq_len=16)

    def start(config: Any) -> None:
        raise PoolError(trouble)

    monkeypatch.setattr(ReplicaPool, "start", start)
    request = PoolRequest(model=path)
    chosen = choose_model(settings(), request)
    with pytest.raises(UsageError, match=r"model\.tloop.*crc32"), open_pool(chosen, request):
        pass
    trouble = "replica 0 was not ready in 120 s"
    with pytest.raises(InfrastructureError, match="not ready"), open_pool(chosen, request):
        pass


class OtherPool:
    """A pool that holds another model or window than the job was checked for."""

    def __init__(self, digest: str, max_seq_len: int) -> None:
        self.info = SimpleNamespace(digest=digest, max_seq_len=max_seq_len, numerics_id="cpu")

    def __enter__(self) -> OtherPool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Nothing runs."""


@pytest.mark.parametrize(("digest", "shorter"), [(None, 1), ("0" * 64, 0)])
def test_a_pool_with_another_window_or_model_than_was_planned_for_is_refused(
    monkeypatch: pytest.MonkeyPatch, digest: str | None, shorter: int
) -> None:
    chosen = choose_model(settings(), PoolRequest())
    known = str(chosen.choice.identity["digest"])
    pool = OtherPool(digest or known, chosen.max_seq_len - shorter)
    monkeypatch.setattr(ReplicaPool, "start", lambda config: pool)
    with pytest.raises(InfrastructureError, match=f"window of {pool.info.max_seq_len}, the job is for"):
        open_pool(chosen, PoolRequest()).__enter__()
    monkeypatch.setattr(ReplicaPool, "start", lambda config: OtherPool(known, chosen.max_seq_len))
    with open_pool(chosen, PoolRequest()) as backend:
        assert backend.encoder.policy.max_rows == chosen.max_seq_len


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


def test_a_model_whose_prompts_cannot_be_shared_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.tloop"
    write_tiny(path, "hrm_text", bits=16)
    with pytest.raises(UsageError, match="both directions"):
        choose_model(settings(), PoolRequest(path))
