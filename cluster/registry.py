"""Named pools as Ray knows them: a namespace each, a spec and the last generations in Ray's own store.

The spec outlives every actor, so a router that starts anew owns the pool again, and a pool whose router is
dead can still be taken down by the names of its actors.
"""

from __future__ import annotations

import time
from typing import Any

import ray
from ray.experimental import internal_kv

from .fleet import PoolError
from .processes import end_processes
from .spec import PoolSpec, decode_spec, encode_spec

STORE = b"tinyloop"
ROUTER = "router"
REPLICA = "replica"
REAP_S = 30.0
ANSWER_S = 1.0


class NoSuchPool(PoolError):
    """No pool of that name is up on this cluster."""


def namespace_of(name: str) -> str:
    """Where the actors of a pool are named."""
    return f"tinyloop-{name}"


def naming(name: str, slot: int, generation: int) -> dict[str, Any]:
    """Options of a replica that outlives who started it; its generation is noted first."""
    _put(f"generation/{name}/{slot}", str(generation).encode())
    return detached(name, f"{REPLICA}/{slot}/{generation}")


def detached(name: str, actor: str) -> dict[str, Any]:
    """Options of an actor that outlives who started it."""
    return {"name": actor, "namespace": namespace_of(name), "lifetime": "detached"}


def read_spec(name: str) -> PoolSpec | None:
    """The spec of a pool, None if there is none of that name. Raises SpecError."""
    message = internal_kv._internal_kv_get(f"spec/{name}".encode(), namespace=STORE)
    return None if message is None else decode_spec(message)


def claim(name: str, spec: PoolSpec) -> bool:
    """Note the spec of a new pool. False if the name is taken; the first of two at once has it."""
    taken = internal_kv._internal_kv_put(
        f"spec/{name}".encode(), encode_spec(spec), overwrite=False, namespace=STORE
    )
    return not taken


def write_spec(name: str, spec: PoolSpec) -> None:
    """Change the spec of a pool."""
    _put(f"spec/{name}", encode_spec(spec))


def pool_names() -> list[str]:
    """Names of the pools of this cluster, whatever state they are in."""
    keys = internal_kv._internal_kv_list(b"spec/", namespace=STORE)
    return sorted(key.decode().removeprefix("spec/") for key in keys)


def generations(name: str) -> dict[int, int]:
    """The last generation of every slot that a pool ever had."""
    start = f"generation/{name}/"
    keys = internal_kv._internal_kv_list(start.encode(), namespace=STORE)
    found = {}
    for key in keys:
        value = internal_kv._internal_kv_get(key, namespace=STORE)
        found[int(key.decode().removeprefix(start))] = int(value or b"0")
    return found


def find_router(name: str) -> Any:
    """The router of a pool. Raises NoSuchPool, with the pools there are, or PoolError if it has no router."""
    try:
        return ray.get_actor(ROUTER, namespace=namespace_of(name))
    except ValueError:
        if read_spec(name) is not None:
            raise PoolError(
                f"pool {name!r} has no router any more: `tinyloop up` with its configuration starts one that "
                f"takes its replicas over, `tinyloop down {name}` ends them"
            ) from None
        others = ", ".join(pool_names())
        there = f"there are: {others}" if others else "there is none"
        raise NoSuchPool(
            f"there is no pool {name!r} on this cluster ({there}): "
            f"start it with: tinyloop up CONFIG --name {name}"
        ) from None


def find_replicas(name: str) -> dict[int, tuple[int, Any]]:
    """The replicas of a pool by slot: the latest generation and its actor. Older ones are ended."""
    found: dict[int, tuple[int, Any]] = {}
    for actor_name in _names_in(name):
        kind, _, place = actor_name.partition("/")
        if kind != REPLICA:
            continue
        slot, generation = map(int, place.split("/"))
        actor = _actor(name, actor_name)
        if actor is None:
            continue
        older = found.get(slot)
        if older is not None and older[0] > generation:
            ray.kill(actor)
            continue
        if older is not None:
            ray.kill(older[1])
        found[slot] = generation, actor
    return found


def find_replica(name: str, slot: int, generation: int) -> Any:
    """The actor of one replica, None if it has ended."""
    return _actor(name, f"{REPLICA}/{slot}/{generation}")


def end(actor: Any) -> None:
    """End an actor for good."""
    ray.kill(actor)


def reap(name: str) -> int:
    """End every actor of a pool by name, its router first, and forget it. Returns how many there were.

    Raises NoSuchPool if there is nothing of it, PoolError if some do not go.
    """
    if not _names_in(name) and read_spec(name) is None:
        find_router(name)
    processes: list[tuple[int, str]] = []
    ended = 0
    deadline_s = time.monotonic() + REAP_S
    # The router first, since it replaces replicas; again, since it may just have started one.
    while names := sorted(_names_in(name), key=lambda actor: actor != ROUTER):
        if time.monotonic() > deadline_s:
            raise PoolError(f"actors of pool {name!r} did not end in {REAP_S:.0f} s: {', '.join(names)}")
        for actor_name in names:
            actor = _actor(name, actor_name)
            if actor is not None:
                processes += _process_of(actor, actor_name)
                ray.kill(actor)
                ended += 1
        time.sleep(0.05)
    end_processes(processes)
    internal_kv._internal_kv_del(f"spec/{name}".encode(), namespace=STORE)
    internal_kv._internal_kv_del(f"generation/{name}/".encode(), del_by_prefix=True, namespace=STORE)
    return ended


def _process_of(actor: Any, actor_name: str) -> list[tuple[int, str]]:
    """Process and host of an actor that answers; Ray itself insists on the end of one that does not."""
    from ..workers.status import decode_status

    try:
        if actor_name == ROUTER:
            return [ray.get(actor.process.remote(), timeout=ANSWER_S)]
        status = decode_status(ray.get(actor.health.remote(), timeout=ANSWER_S))
    except (ray.exceptions.RayError, TimeoutError):
        return []
    return [(status.pid, status.host)]


def _names_in(name: str) -> list[str]:
    namespace = namespace_of(name)
    return [
        entry["name"]
        for entry in ray.util.list_named_actors(all_namespaces=True)
        if entry["namespace"] == namespace
    ]


def _actor(name: str, actor_name: str) -> Any:
    try:
        return ray.get_actor(actor_name, namespace=namespace_of(name))
    except ValueError:
        return None  # it ended since it was listed


def _put(key: str, value: bytes) -> None:
    internal_kv._internal_kv_put(key.encode(), value, overwrite=True, namespace=STORE)
