"""Who owns the replicas that a client's pool stands on. Here: a job itself; also named_pool.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ..workers.status import ModelFacts, Status
from .config import PoolConfig
from .fleet import Fleet, Slot
from .processes import end_processes
from .router import ROUTER_OPTIONS, Router
from .session import cluster_cpus
from .spec import PoolSpec
from .supervisor import Supervisor

REPLY_S = 30.0


class Home(Protocol):
    """The owner of replicas and router, as a client of them needs it."""

    @property
    def router(self) -> Any:
        """The router actor."""

    @property
    def lease_s(self) -> float:
        """Silence after which the router drops a client; 0: never."""

    @property
    def facts(self) -> ModelFacts:
        """What the replicas have loaded."""

    @property
    def wanted(self) -> int:
        """Replicas that it should have."""

    @property
    def build_overhead_rows(self) -> int:
        """How windows are cut for it."""

    def router_process(self) -> tuple[int, str]:
        """Number and host of the router's process, as last known."""

    def up(self) -> list[Slot]:
        """Slots whose replica takes work, each with its actor. May be a second old."""

    def settle(self) -> None:
        """The router has started anew and answers: tell it of the replicas if it cannot know. May fail."""

    def trouble(self) -> str:
        """Why nothing can go on; else empty."""

    def scale(self, num_replicas: int) -> None:
        """Have so many replicas from now on."""

    def view(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Slots, deaths and the number wanted, given the router's own status."""

    def close(self, client: str) -> None:
        """The client is done."""


class OwnHome:
    """Router and replicas are plain children of this process and end with it."""

    lease_s = 0.0

    def __init__(self, config: PoolConfig) -> None:
        spec = self._spec = PoolSpec.of(config, cluster_cpus())
        settings = spec.settings()
        fleet = Fleet(spec.replicas, config.crash_limit, settings)
        self._config = config
        self._process = (0, "")
        self._supervisor = Supervisor(settings, spec.actor_options(), fleet)
        self.router = (
            ray.remote(Router)
            .options(**router_options())
            .remote(config.placement_rules(), "", config.metrics)
        )
        self.build_overhead_rows = config.build_overhead_rows

    def start(self) -> None:
        """Start every replica and wait until all are ready. Raises PoolError."""
        self._supervisor.spawn_all()
        self._supervisor.wait_ready(self._config.start_timeout_s, allow_mixed=self._config.allow_mixed)

    def watch(self) -> None:
        """Replace dead replicas from now on."""
        self._supervisor.watch(self)

    @property
    def wanted(self) -> int:
        return self._supervisor.fleet.wanted

    @property
    def facts(self) -> ModelFacts:
        facts = self._supervisor.facts
        assert facts is not None
        return facts

    def router_process(self) -> tuple[int, str]:
        return self._process

    def up(self) -> list[Slot]:
        return self._supervisor.up()

    def settle(self) -> None:
        up = self._supervisor.up()
        ray.get([self._attaching(slot) for slot in up], timeout=REPLY_S)
        for slot in up:
            slot.attached = True
        self._process = ray.get(self.router.process.remote(), timeout=REPLY_S)

    def trouble(self) -> str:
        return self._supervisor.trouble()

    def scale(self, num_replicas: int) -> None:
        self._spec = self._spec.resized(num_replicas)
        self._supervisor.scale(num_replicas, self._spec.settings(), self._spec.actor_options())

    def view(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        fleet = self._supervisor.fleet
        views = [slot.view(in_flight_of(body, slot.index)) for slot in self._supervisor.slots]
        return {"slots": views, "deaths": fleet.deaths, "wanted": fleet.wanted}

    def close(self, client: str) -> None:
        """End every process of the pool."""
        statuses: list[Status] = self._supervisor.close(timeout_s=5.0)
        ray.kill(self.router)
        end_processes([*((s.pid, s.host) for s in statuses), self._process])

    # As the supervisor's way to the router
    # ----------------------------------------------------------------------------------------------------

    def attach(self, slot: Slot) -> bool:
        try:
            ray.get(self._attaching(slot), timeout=REPLY_S)
        except (ray.exceptions.RayError, TimeoutError):
            return False
        return True

    def detach(self, slot: Slot) -> tuple[bool, str]:
        call = self.router.detach.remote(slot.index, slot.generation)
        try:
            progressed, reason = ray.get(call, timeout=REPLY_S)
        except (ray.exceptions.RayError, TimeoutError):
            return True, ""
        return progressed, reason

    def drain(self, slot: Slot) -> bool:
        try:
            return bool(ray.get(self.router.drain.remote(slot.index, slot.generation), timeout=REPLY_S))
        except (ray.exceptions.RayError, TimeoutError):
            return False

    def _attaching(self, slot: Slot) -> Any:
        return self.router.attach.remote(slot.index, slot.generation, [slot.actor], slot.status_bytes)


def router_options() -> dict[str, Any]:
    """Where a router runs: beside who starts it if it can, so that another node's loss never takes it."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    return {**ROUTER_OPTIONS, "scheduling_strategy": here}


def in_flight_of(body: Mapping[str, Any], slot: int) -> int:
    """Commands and completions on their way on a replica, from the router's status."""
    seen = body["replicas"].get(str(slot), {})
    return int(seen.get("in_flight", 0) + seen.get("generating", 0))
