"""The face as a deployment of Ray Serve: each Serve replica holds one bridge, so one client of the pool."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from starlette.types import ASGIApp

from ..completion_plans import GenerationModel
from ..fleet import PoolError, PoolFull
from ..named_request import of_named_pool
from ..pool import ReplicaPool
from ..pool_backend import ChosenModel, choose_model
from ..settings import JobSettings, PoolRequest
from .app import Guard, make_app
from .bridge import Bridge
from .plans import Planner
from .service import Served, Service

MIB = 1 << 20


class FaceConfig(BaseModel):
    """What is served and within which limits; the arguments of a Serve configuration file.

    pool: name of a pool that is up. model: a copy of its model file, where that lies elsewhere here.
    served_model_name: as clients call it; the pool's name by default. api_key_file: one key a line, read by
    whoever deploys; api_key_hashes: SHA-256 of keys in hex. replicas: processes that answer. deadline_s:
    seconds that a request may take. max_queue: completions and texts that one of the processes has on their
    way; max_body_bytes: of a request. drain_s: seconds that requests have to end when the server does.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    pool: str
    model: Path | None = None
    served_model_name: str | None = None
    api_key_file: Path | None = None
    api_key_hashes: tuple[str, ...] = ()
    replicas: Annotated[int, Field(ge=1, le=256)] = 1
    deadline_s: Annotated[float, Field(gt=0)] = 600.0
    max_queue: Annotated[int, Field(ge=1)] = 4096
    max_body_bytes: Annotated[int, Field(ge=1024)] = 16 * MIB
    drain_s: Annotated[float, Field(gt=0)] = 20.0


class KeyFileError(ValueError):
    """A file of keys that cannot be used."""


def with_hashed_keys(config: FaceConfig) -> FaceConfig:
    """Read the file of keys; only their hashes go on from here. Raises: KeyFileError."""
    if config.api_key_file is None:
        return config
    try:
        keys = [line.strip() for line in config.api_key_file.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise KeyFileError(f"cannot read the keys in {str(config.api_key_file)!r}: {error}") from error
    if not keys:
        raise KeyFileError(
            f"there is no key in {str(config.api_key_file)!r}: put one a line, or leave it out"
        )
    hashes = tuple(hashlib.sha256(key.encode()).hexdigest() for key in keys)
    return config.model_copy(update={"api_key_file": None, "api_key_hashes": config.api_key_hashes + hashes})


class _PoolFailures:
    gone: type[Exception] = PoolError
    full: type[Exception] = PoolFull


def _chosen(config: FaceConfig) -> ChosenModel:
    """The pool's model as this process reads it. Raises: UsageError, InfrastructureError."""
    request = of_named_pool(PoolRequest(name=config.pool, model=config.model))
    return choose_model(JobSettings(inputs=(), output=Path()), request)


def _connector(config: FaceConfig, chosen: ChosenModel) -> Any:
    def connect() -> ReplicaPool:
        pool = ReplicaPool.connect(config.pool)
        expected = (chosen.choice.identity["digest"], chosen.max_seq_len)
        if (pool.info.digest, pool.info.max_seq_len) != expected:
            found = pool.info.digest[:12], pool.info.max_seq_len
            pool.close()
            raise PoolError(
                f"pool {config.pool!r} now holds model {found[0]} with a window of {found[1]}, this server "
                f"is for {expected[0][:12]} with {expected[1]}: start the server again"
            )
        return pool

    return connect


@serve.ingress()
class Face:
    """One Serve replica."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """config: a FaceConfig with hashed keys, as JSON. Raises what stops it, which Serve then tells."""
        self._config = FaceConfig.model_validate(config)
        chosen = _chosen(self._config)
        self._bridge = Bridge(_connector(self._config, chosen), _PoolFailures, self._config.max_queue)
        self._bridge.start()
        model = GenerationModel.of(chosen.descriptor, chosen.depth, chosen.encoder)
        identity = chosen.choice.identity
        served = Served(
            name=self._config.served_model_name or self._config.pool,
            fingerprint=f"tinyloop-{identity['digest'][:16]}",
            created=int(time.time()),
            max_seq_len=chosen.max_seq_len,
            loops=model.loops,
            deadline_s=self._config.deadline_s,
        )
        self._service = Service(Planner(chosen.encoder, model), self._bridge, served)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        keys = tuple(bytes.fromhex(key) for key in self._config.api_key_hashes)
        return make_app(self._service, Guard(keys, self._config.max_body_bytes))

    def check_health(self) -> None:
        """Serve replaces a replica whose bridge has ended."""
        if not self._bridge.is_alive:
            raise RuntimeError("the bridge to the pool has ended")

    async def __del__(self) -> None:
        await asyncio.to_thread(self._bridge.stop)


def build(arguments: Mapping[str, Any]) -> serve.Application:
    """The application of a Serve configuration file: import_path tinyloop.cluster.http.deployment:build."""
    return application(with_hashed_keys(FaceConfig.model_validate(dict(arguments))))


def application(config: FaceConfig) -> serve.Application:
    """config: with hashed keys."""
    deployment = serve.deployment(
        Face,
        name="tinyloop-http",
        num_replicas=config.replicas,
        # Ours is the answer to too much, so Serve lets more through than the bridge takes.
        max_ongoing_requests=config.max_queue + 1024,
        graceful_shutdown_timeout_s=config.drain_s,
        graceful_shutdown_wait_loop_s=0.2,
        # The pool may have every CPU of the cluster; this waits for it most of the time.
        ray_actor_options={"num_cpus": 0},
    )
    return deployment.bind(config.model_dump(mode="json"))
