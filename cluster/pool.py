"""The pool that a job holds: windows in, scores out, nothing left behind.

Invariant: every submitted item comes back exactly once, whatever dies in between; what cannot go on raises
PoolError.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any
from uuid import uuid4

import msgpack
import numpy as np
import ray

from ..workers.model import ReplicaSettings
from ..workers.status import ModelFacts, Status
from .config import PoolConfig
from .generate_items import Generated, NotGenerated, Prompt
from .generation import GenerationClient, Reach
from .items import Failed, Int32Array, Items, Scored
from .ledger import Ledger
from .pool_status import ModelInfo, PoolStatus, pool_status
from .processes import end_processes
from .router import ROUTER_OPTIONS, Router, check_hello
from .segments import CutRules, cut_window
from .session import cluster_cpus, cluster_gpus, connect
from .supervisor import PoolError, Slot, Supervisor
from .token_stream import TokenStream, gather
from .wire import Delivery, decode_deliveries, encode_window

WINDOWS_IN_FLIGHT = 2
LONGEST_POLL_S = 5.0
REPLY_S = 30.0
ROUTER_BACK_S = 60.0


class ReplicaPool:
    """Replicas of one model on Ray. Not thread-safe. Use `start` and `with`."""

    def __init__(
        self, config: PoolConfig, supervisor: Supervisor, router: Any, *, owns_session: bool
    ) -> None:
        self._config = config
        self._supervisor = supervisor
        self._router = router
        self._owns_session = owns_session
        self._client = uuid4().hex
        self._incarnation, self._router_pid, self._router_host = "", 0, ""
        self._ledger = Ledger()
        self._tokens: dict[int, list[Any]] = {}
        self._collected: deque[Scored | Failed] = deque()
        self._after = 0
        self._closed = False
        self._generation = GenerationClient(self._reach())

    @classmethod
    def start(cls, config: PoolConfig) -> ReplicaPool:
        """Start a pool and wait until every replica has loaded the model and passed its self-test.

        Raises PoolError with phase and sizes if a replica cannot; nothing is left running then.
        """
        owns_session = connect(config.ray_address)
        if owns_session:
            _check_gpus(config)
        cpus = cluster_cpus()
        threads = config.threads or max(cpus // config.replicas, 1)
        settings = ReplicaSettings(
            str(config.model),
            config.factory,
            threads,
            config.prefix_budget_bytes,
            config.load_options(),
            config.generation_batch,
        )
        supervisor = Supervisor(
            settings, _actor_options(config, threads, cpus), config.replicas, config.crash_limit
        )
        router = ray.remote(Router).options(**ROUTER_OPTIONS).remote(config.placement_rules())
        pool = cls(config, supervisor, router, owns_session=owns_session)
        try:
            supervisor.spawn_all()
            supervisor.wait_ready(config.start_timeout_s, allow_mixed=config.allow_mixed)
            pool._meet_router()
            supervisor.watch(pool._attach, pool._detach)
        except BaseException:
            pool.close()
            raise
        return pool

    @property
    def info(self) -> ModelInfo:
        """What the replicas have loaded."""
        facts = self._supervisor.facts
        assert facts is not None
        return ModelInfo(
            facts.digest, facts.numerics_id, facts.descriptor, facts.max_seq_len, self._config.replicas
        )

    def submit(self, window: int, items: Items) -> None:
        """Hand one window in. Blocks while two are in flight. Raises PoolError; ValueError if it is bad."""
        self._check(window, items)
        while self._ledger.windows_in_flight >= WINDOWS_IN_FLIGHT:
            self._receive(LONGEST_POLL_S)
        self._ledger.open(window, items)
        if not len(items):
            return
        # Put by this process, so that the ids outlive the router and every replica.
        self._tokens[window] = [ray.put((items.token_ids, items.offsets, items.n_scored))]
        if not self._send(window, np.arange(len(items), dtype=np.int32), first=True):
            self._recover_router()

    def collect(self, timeout_s: float) -> list[Scored | Failed]:
        """What has finished since the last call; waits up to timeout_s seconds. Raises PoolError."""
        deadline = time.monotonic() + timeout_s
        while not self._collected and self._ledger.windows_in_flight:
            left_s = deadline - time.monotonic()
            if left_s <= 0 and timeout_s > 0:
                break
            self._receive(max(min(left_s, LONGEST_POLL_S), 0.0))
            if timeout_s <= 0:
                break
        collected = list(self._collected)
        self._collected.clear()
        return collected

    def generate(self, prompts: Sequence[Prompt]) -> list[Generated | NotGenerated]:
        """Completions in the order of the prompts; a prompt that fails does so alone.

        Raises ValueError for a prompt that no model could take, before anything is sent; PoolError.
        """
        return gather(self.stream(prompts), len(prompts))

    def stream(self, prompts: Sequence[Prompt]) -> TokenStream:
        """Begin to generate; the stream's events bring ids as they come. Raises as generate()."""
        if self._closed:
            raise PoolError("the pool is closed")
        return TokenStream(self._generation, self._generation.submit(prompts), len(prompts))

    def status(self) -> PoolStatus:
        """A snapshot of the pool. Raises PoolError if the router cannot be reached."""
        answer = self._ask(lambda: self._router.status.remote())
        body: Mapping[str, Any] = msgpack.unpackb(answer)
        return pool_status(self._supervisor.slots, self._supervisor.deaths, self._ledger, body)

    def close(self) -> None:
        """End every process of the pool, and the Ray session if it started that. Twice is harmless."""
        if self._closed or not ray.is_initialized():
            return
        self._closed = True
        statuses: list[Status] = self._supervisor.close(timeout_s=5.0)
        ray.kill(self._router)
        end_processes([*((s.pid, s.host) for s in statuses), (self._router_pid, self._router_host)])
        self._tokens.clear()
        if self._owns_session:
            ray.shutdown()

    def __enter__(self) -> ReplicaPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # The router
    # ----------------------------------------------------------------------------------------------------

    def _attach(self, slot: Slot) -> bool:
        try:
            ray.get(self._attaching(slot), timeout=REPLY_S)
        except (ray.exceptions.RayError, TimeoutError):
            return False
        return True

    def _attaching(self, slot: Slot) -> Any:
        return self._router.attach.remote(slot.index, slot.generation, [slot.actor], slot.status_bytes)

    def _detach(self, slot: Slot) -> tuple[bool, str]:
        call = self._router.detach.remote(slot.index, slot.generation)
        try:
            progressed, reason = ray.get(call, timeout=REPLY_S)
        except (ray.exceptions.RayError, TimeoutError):
            return True, ""
        return progressed, reason

    def _meet_router(self) -> None:
        """Wait for the router and give it every replica. Raises PoolError if it does not come."""
        deadline = time.monotonic() + ROUTER_BACK_S
        while True:
            try:
                self._incarnation, self._router_pid, self._router_host = check_hello(
                    ray.get(self._router.hello.remote(), timeout=REPLY_S)
                )
                up = self._supervisor.up()
                ray.get([self._attaching(slot) for slot in up], timeout=REPLY_S)
            except (ray.exceptions.RayTaskError, ray.exceptions.ActorDiedError) as error:
                raise PoolError(f"the router cannot be used: {error}") from error
            except (ray.exceptions.RayError, TimeoutError) as error:
                if time.monotonic() > deadline:
                    raise PoolError(f"the router did not come back in {ROUTER_BACK_S} s: {error}") from error
                time.sleep(0.05)
            else:
                for slot in up:
                    slot.attached = True
                return

    def _recover_router(self) -> None:
        """The router started anew and knows nothing: give it the replicas and whatever is not finished."""
        self._meet_router()
        self._after = 0
        for window in self._ledger.open_windows():
            self._send(window, self._ledger.missing(window))
        self._generation.resubmit()

    def _reach(self) -> Reach:
        return Reach(
            router=self._router,
            incarnation=lambda: self._incarnation,
            replicas=self._supervisor.up,
            recover=self._recover_router,
            trouble=self._supervisor.trouble,
            facts=self._facts,
            build_overhead_rows=self._config.build_overhead_rows,
        )

    def _facts(self) -> ModelFacts:
        facts = self._supervisor.facts
        assert facts is not None
        return facts

    def _send(self, window: int, chosen: Int32Array, *, first: bool = False) -> bool:
        facts = self._supervisor.facts
        assert facts is not None
        rules = CutRules(facts.digest, int(facts.descriptor["vocab_size"]), self._config.build_overhead_rows)
        head = cut_window(
            self._ledger.items(window), rules, client=self._client, window=window, chosen=chosen
        )
        self._ledger.ideal_rows += head.ideal_rows if first else 0
        call = self._router.submit.remote(self._incarnation, encode_window(head), self._tokens[window])
        try:
            return bool(ray.get(call, timeout=REPLY_S))
        except (
            ray.exceptions.ActorUnavailableError,
            ray.exceptions.ActorDiedError,
            ray.exceptions.GetTimeoutError,
        ):
            return False
        except ray.exceptions.RayError as error:
            raise PoolError(f"window {window} was not taken: {error}") from error

    def _receive(self, timeout_s: float) -> None:
        """One long poll. Raises PoolError when every replica was given up."""
        if trouble := self._supervisor.trouble():
            raise PoolError(trouble)
        answer = self._poll(timeout_s)
        if answer is None:
            self._recover_router()
            return
        deliveries, references = decode_deliveries(answer[0]), deque(answer[1])
        for delivery in deliveries:
            self._after = delivery.number
            if delivery.error_class:
                self._give_up(delivery)
            else:
                self._take(delivery, references.popleft())
        for window in self._ledger.close_finished():
            self._tokens.pop(window, None)

    def _poll(self, timeout_s: float) -> tuple[bytes, list[Any]] | None:
        call = self._router.collect.remote(self._incarnation, self._client, self._after, timeout_s)
        try:
            answer: tuple[bytes, list[Any]] | None = ray.get(call, timeout=timeout_s + REPLY_S)
        except ray.exceptions.GetTimeoutError:
            # It runs and does not answer: a process in that state cannot be trusted to start answering.
            ray.kill(self._router, no_restart=False)
            return None
        except (ray.exceptions.ActorUnavailableError, ray.exceptions.ActorDiedError):
            return None
        except ray.exceptions.RayError as error:
            raise PoolError(str(error)) from error
        return answer

    def _take(self, delivery: Delivery, reference: Any) -> None:
        try:
            message = ray.get(reference, timeout=REPLY_S)
        except (ray.exceptions.RayError, TimeoutError):
            # The scores died with whoever held them. They are computed again, bit for bit.
            missing = self._ledger.missing(delivery.window, delivery.items)
            if len(missing) and not self._send(delivery.window, missing):
                self._recover_router()
            return
        self._collected.extend(self._ledger.accept(delivery, message))

    def _give_up(self, delivery: Delivery) -> None:
        for item in self._ledger.missing(delivery.window, delivery.items).tolist():
            self._collected.append(self._ledger.fail(delivery, item))

    def _ask(self, call: Any) -> Any:
        for _ in range(3):
            try:
                return ray.get(call(), timeout=REPLY_S)
            except (ray.exceptions.RayError, TimeoutError):
                self._recover_router()
        raise PoolError("the router does not answer")

    def _check(self, window: int, items: Items) -> None:
        if self._closed:
            raise PoolError("the pool is closed")
        if window in self._ledger.known:
            raise ValueError(f"window {window} was submitted before")
        lengths = np.diff(items.offsets)
        if len(lengths) != len(items) or (len(items) and items.offsets[-1] != len(items.token_ids)):
            raise ValueError(
                f"window {window}: offsets cover {len(lengths)} items, n_scored has {len(items)}"
            )
        if len(items) and ((items.n_scored < 1) | (items.n_scored >= lengths)).any():
            raise ValueError(f"window {window}: n_scored must be from 1 to the length of the item less 1")
        if items.depth < 1:
            raise ValueError(f"window {window}: depth {items.depth} is less than 1")


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


def _actor_options(config: PoolConfig, threads: int, cpus: int) -> dict[str, Any]:
    """What Ray must set aside for one replica. More replicas than cores share them; none waits for ever."""
    options: dict[str, Any] = {"num_cpus": threads if threads * config.replicas <= cpus else 0}
    if config.device == "cuda":
        options["num_gpus"] = 1
    return options
