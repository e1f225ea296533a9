"""A pool that outlives who started it: its router owns the replicas, any processes are its clients."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import msgpack
import ray

from ..workers.status import decode_status
from . import registry
from .config import PoolConfig
from .fleet import PoolError, Slot
from .homes import REPLY_S, in_flight_of, router_options
from .processes import end_processes
from .router import Router
from .session import cluster_cpus
from .spec import PoolSpec, differences

BEAT_S = 2.0
LEASE_S = 15.0
UP_POLL_S = 0.1
SEEN_S = 1.0
LATE_S = 10.0
ANSWER_S = 10.0
FROZEN_S = 20.0
ROUTER_BACK_S = 90.0


class PoolDiffers(PoolError):
    """A pool of that name is up with another configuration."""


class NamedHome:
    """A pool that outlives this process. Its router owns the replicas; this is one of its clients."""

    lease_s = LEASE_S

    def __init__(self, name: str, client: str) -> None:
        """Raises PoolError if there is no such pool or it cannot serve."""
        self.name = name
        self.router = registry.find_router(name)
        spec = registry.read_spec(name)
        if spec is None:
            raise PoolError(f"pool {name!r} is being taken down")
        self.build_overhead_rows = int(spec.config["build_overhead_rows"])
        self.wanted, timeout_s = spec.replicas, float(spec.config["start_timeout_s"])
        # Asked first, since it answers at once: a frozen router is found by that, and not by a call that may
        # wait.
        _status_of(self.router, name)
        answer = _reply(lambda: self.router.facts.remote(timeout_s), name, timeout_s)
        facts = decode_status(answer).facts
        assert facts is not None
        self.facts = facts
        self._client = client
        self._up: list[Slot] = []
        self._seen_s = float("-inf")
        self._left = threading.Event()
        threading.Thread(target=self._beat, name="pool-heartbeat", daemon=True).start()

    def router_process(self) -> tuple[int, str]:
        return registry.router_process(self.name)

    def up(self) -> list[Slot]:
        """Found by their names; the router is asked at most once a second. Raises PoolError."""
        if time.monotonic() > self._seen_s + SEEN_S:
            self._up, self._seen_s = self._find_up(), time.monotonic()
        return self._up

    def settle(self) -> None:
        pass

    def trouble(self) -> str:
        return ""

    def scale(self, num_replicas: int) -> None:
        _reply(lambda: self.router.scale.remote(num_replicas), self.name)
        self.wanted = num_replicas

    def view(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        return named_view(body)

    def close(self, client: str) -> None:
        """Leave the pool; it goes on without this client."""
        self._left.set()
        with suppress(ray.exceptions.RayError, TimeoutError):
            ray.get(self.router.leave.remote(client), timeout=REPLY_S)

    def _find_up(self) -> list[Slot]:
        known = {(slot.index, slot.generation): slot for slot in self._up}
        found = []
        for view in _status_of(self.router, self.name)["slots"]:
            index, generation = view["slot"], view["generation"]
            slot = known.get((index, generation), Slot(index, generation, "up"))
            if slot.actor is None:
                slot.actor = registry.find_replica(self.name, index, generation)
            if view["state"] == "up" and slot.actor is not None:
                found.append(slot)
        return found

    def _beat(self) -> None:
        """A client that computes something else for long is alive all the same."""
        while not self._left.wait(BEAT_S) and ray.is_initialized():
            with suppress(ray.exceptions.RayError):
                self.router.beat.remote(self._client)


def named_view(body: Mapping[str, Any]) -> dict[str, Any]:
    """Slots of a named pool, from its router's status."""
    views = [
        view | {"verdict": "busy"}
        if view["verdict"] == "ready" and in_flight_of(body, view["slot"])
        else view
        for view in body["slots"]
    ]
    return {"slots": views, "deaths": body["deaths"], "wanted": body["wanted"]}


def raise_pool(config: PoolConfig, name: str) -> bool:
    """Start a named pool and wait until every replica is ready. False if the same one is up already.

    Raises PoolDiffers if a pool of that name has another configuration, naming what differs; PoolError if a
    replica cannot load; nothing is left running then.
    """
    spec = PoolSpec.of(config, cluster_cpus())
    fresh = registry.claim(name, spec)
    if not fresh:
        running = registry.read_spec(name)
        if running is not None and (found := differences(running.config, spec.config)):
            raise PoolDiffers(
                f"pool {name!r} is up with another configuration: {'; '.join(found)}: take it down first "
                f"(tinyloop down {name}), or use another name"
            )
    options = {**router_options(), **registry.detached(name, registry.ROUTER), "get_if_exists": True}
    router = ray.remote(Router).options(**options).remote(config.placement_rules(), name, config.metrics)
    try:
        _wait_until_up(router, name, config.start_timeout_s)
    except BaseException:
        if fresh:
            registry.reap(name)
        raise
    return fresh


def ask_status(name: str) -> dict[str, Any]:
    """The status of a pool by name, from its router. Raises NoSuchPool, PoolError."""
    return _status_of(registry.find_router(name), name)


def ask_scale(name: str, num_replicas: int) -> float:
    """Tell a pool how many replicas to have from now on. Returns how many seconds one may take to get ready.

    Raises PoolError.
    """
    router, spec = registry.find_router(name), registry.read_spec(name)
    if spec is None:
        raise PoolError(f"pool {name!r} is being taken down")
    _reply(lambda: router.scale.remote(num_replicas), name)
    return float(spec.config["start_timeout_s"])


def _status_of(router: Any, name: str) -> dict[str, Any]:
    body: dict[str, Any] = msgpack.unpackb(_reply(router.status.remote, name))
    return {**body, **named_view(body)}


def _reply(call: Callable[[], Any], name: str, timeout_s: float = 0.0) -> Any:
    """An answer of the router, that of its successor if it is on its way back. Raises PoolError.

    timeout_s: how long it may take on top of what any answer may.
    """
    began_s, restarted = time.monotonic(), False
    while True:
        try:
            return ray.get(call(), timeout=timeout_s + ANSWER_S)
        except ray.exceptions.RayTaskError as error:
            raise PoolError(f"pool {name!r} cannot be used: {error.cause}") from error
        except (ray.exceptions.ActorUnavailableError, ray.exceptions.GetTimeoutError) as error:
            silent_s = time.monotonic() - began_s - timeout_s
            if silent_s > ROUTER_BACK_S:
                raise PoolError(_silent(name, error)) from error
            if silent_s > FROZEN_S and not restarted:
                _restart_router(name)
                restarted = True
            time.sleep(UP_POLL_S)
        except ray.exceptions.RayError as error:
            raise PoolError(_silent(name, error)) from error


def _restart_router(name: str) -> None:
    """It does not answer for longer than a new one needs to start: its process is frozen."""
    ray.kill(registry.find_router(name), no_restart=False)
    end_processes([registry.router_process(name)])


def _silent(name: str, error: Exception) -> str:
    return (
        f"the router of pool {name!r} does not answer: {str(error).splitlines()[0]}: take the pool down: "
        f"tinyloop down {name}"
    )


def _wait_until_up(router: Any, name: str, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while True:
        slots = _status_of(router, name)["slots"]
        if slots and all(slot["state"] == "up" for slot in slots):
            return
        failed = next((slot for slot in slots if slot["verdict"].startswith("failed")), None)
        late = next((slot["trouble"] for slot in slots if slot["trouble"]), "")
        over_s = time.monotonic() - deadline_s
        # The router finds a late replica at the same moment, and says then what it waited for.
        if failed is not None or over_s > LATE_S or (late and over_s > 0):
            states = ", ".join(f"{slot['slot']} {slot['verdict']}" for slot in slots)
            reason = failed["trouble"] if failed is not None else late or f"not ready in {timeout_s} s"
            raise PoolError(f"pool {name!r} did not come up: {reason} (replicas: {states})")
        time.sleep(UP_POLL_S)
