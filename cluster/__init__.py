"""Many processes: placement, router, pool, batch jobs and the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import PoolConfig
    from .fleet import PoolError
    from .pool import ReplicaPool

__all__ = ["PoolConfig", "PoolError", "ReplicaPool"]


def __getattr__(name: str) -> Any:
    # On demand: placement, scoring rules and the journal live in this package too and do without Ray.
    if name == "PoolConfig":
        from .config import PoolConfig

        return PoolConfig
    if name == "ReplicaPool":
        from .pool import ReplicaPool

        return ReplicaPool
    if name == "PoolError":
        from .fleet import PoolError

        return PoolError
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
