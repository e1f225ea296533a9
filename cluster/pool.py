"""The pool that a user holds: of one job and gone with it, or named, long-lived and shared by many."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any
from uuid import uuid4

import msgpack
import ray

from .client import PoolClient
from .config import PoolConfig
from .fleet import PoolError
from .homes import Home, OwnHome
from .named_pool import NamedHome, raise_pool
from .pool_status import ModelInfo, PoolStatus, pool_status
from .session import cluster_gpus, connect, join

MOST_REPLICAS = 1024


class ReplicaPool(PoolClient):
    """Replicas of one model on Ray. Not thread-safe. Use `start` or `connect`, and `with`."""

    def __init__(self, home: Home, client: str, *, owns_session: bool = False) -> None:
        super().__init__(home, client)
        self._owns_session = owns_session

    @classmethod
    def start(cls, config: PoolConfig) -> ReplicaPool:
        """Start a pool of this process's own and wait until every replica has passed its self-test.

        Raises PoolError with phase and sizes if a replica cannot; nothing is left running then.
        """
        owns_session = connect(config.ray_address)
        if owns_session:
            _check_gpus(config)
        home = OwnHome(config)
        pool = cls(home, uuid4().hex, owns_session=owns_session)
        try:
            home.start()
            pool._meet_router()
            home.watch()
        except BaseException:
            pool.close()
            raise
        return pool

    @classmethod
    def up(cls, config: PoolConfig, name: str) -> ReplicaPool:
        """Start a named pool that outlives this process, or join it if it is up. See `raise_pool`."""
        join(config.ray_address)
        raise_pool(config, name)
        return cls.connect(name)

    @classmethod
    def connect(cls, name: str, ray_address: str | None = None) -> ReplicaPool:
        """Become a client of a named pool. Closing it leaves the pool up. Raises PoolError."""
        join(ray_address)
        client = uuid4().hex
        pool = cls(NamedHome(name, client), client)
        try:
            pool._meet_router()
        except BaseException:
            pool.close()
            raise
        return pool

    @property
    def info(self) -> ModelInfo:
        """What the replicas have loaded."""
        facts = self._home.facts
        return ModelInfo(
            facts.digest, facts.numerics_id, facts.descriptor, facts.max_seq_len, self._home.wanted
        )

    def scale(self, num_replicas: int) -> None:
        """Have so many replicas from now on. Returns at once; new ones take work when they have loaded.

        Those that leave finish what they have begun. Raises PoolError, ValueError below 1.
        """
        if not 1 <= num_replicas <= MOST_REPLICAS:
            raise ValueError(f"cannot have {num_replicas} replicas: ask for 1 to {MOST_REPLICAS}")
        self._home.scale(num_replicas)

    def status(self) -> PoolStatus:
        """A snapshot of the pool. Raises PoolError if the router cannot be reached."""
        answer = self._ask(lambda: self._router.status.remote())
        body: Mapping[str, Any] = msgpack.unpackb(answer)
        return pool_status({**body, **self._home.view(body)}, self._ledger)

    def close(self) -> None:
        """End every process of a pool of its own, and the Ray session if it started that; leave a named one.

        Twice is harmless.
        """
        if self._closed or not ray.is_initialized():
            return
        self._closed = True
        self._home.close(self._client)
        self._tokens.clear()
        if self._owns_session:
            ray.shutdown()

    def __enter__(self) -> ReplicaPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _check_gpus(config: PoolConfig) -> None:
    """A session of our own gets no GPU later: an actor would wait for it in vain."""
    gpus = cluster_gpus() if config.device == "cuda" else config.replicas
    if gpus >= config.replicas:
        return
    ray.shutdown()
    raise PoolError(
        f"cannot start {config.replicas} replicas with device cuda: each needs a GPU of its own and this "
        f"machine has {gpus}; lower replicas, or use device cpu"
    )
