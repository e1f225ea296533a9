"""Many processes: placement, router, pool, batch jobs and the command line.

What programs use of it is named here; cluster/ADAPTERS.md shows how.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import PoolConfig
    from .fleet import PoolError
    from .pool import ReplicaPool
    from .text_pool import TextPool, open_pool

__all__ = ["PoolConfig", "PoolError", "ReplicaPool", "TextPool", "open_pool"]

_PLACES = {
    "PoolConfig": "config",
    "PoolError": "fleet",
    "ReplicaPool": "pool",
    "TextPool": "text_pool",
    "open_pool": "text_pool",
}


def __getattr__(name: str) -> Any:
    # On demand: placement, scoring rules and the journal live in this package too and do without Ray.
    if name in _PLACES:
        return getattr(import_module(f".{_PLACES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
