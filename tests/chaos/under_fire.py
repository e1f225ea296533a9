"""Jobs under fire: one job on a named pool while replicas, router and driver are killed at random moments,
then held against an undisturbed run, byte by byte.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from tinyloop.cluster.config import PoolConfig
from tinyloop.cluster.fleet import PoolError
from tinyloop.cluster.named_pool import ask_status

from ..cluster.test_job import make_rows, outputs
from .chaos_job import undisturbed

REPOSITORY = Path(__file__).parents[2]
ROUND_S = 240.0
# What is done to whom. The first three are kills.
KINDS = ("replica", "router", "driver", "stop_replica", "stop_router", "exception", "oom", "hang")


@dataclass
class Fire:
    """One job and what is done to it. plan: kinds, in order. pause_s: mean time between two of them."""

    name: str
    config: PoolConfig
    folder: Path
    seed: int
    plan: list[str]
    num_rows: int
    pause_s: float
    done: Counter[str] = field(default_factory=Counter)
    driver: subprocess.Popen[bytes] | None = None
    log: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.folder.mkdir(parents=True)
        self.rows, self.output = self.folder / "rows.jsonl", self.folder / "out"
        self.rows.write_bytes(b"".join(make_rows(self.num_rows, seed=self.seed)))

    def run(self) -> None:
        """Run the job to its end under the plan. Raises AssertionError if it does not end, or differs."""
        undisturbed(self.rows, self.folder / "undisturbed")
        deadline_s = time.monotonic() + ROUND_S
        self.start_driver()
        try:
            self._until_the_end(deadline_s)
        finally:
            self.end_driver()
        results, errors = outputs(self.output)
        expected_results, expected_errors = outputs(self.folder / "undisturbed")
        assert results == expected_results, self.story("results.jsonl differs")
        assert errors == expected_errors, self.story("errors.jsonl differs")

    def _until_the_end(self, deadline_s: float) -> None:
        next_s = time.monotonic() + self._pause()
        while True:
            assert time.monotonic() < deadline_s, self.story(f"not finished after {ROUND_S} s")
            assert self.driver is not None
            code = self.driver.poll()
            if code == 3:  # with row errors: make_rows makes some bad ones
                return
            if code is not None:
                assert code == -signal.SIGKILL, self.story(f"the driver ended with {code}")
                self.start_driver()
            if self.plan and time.monotonic() > next_s and self._strike(self.plan[0]):
                self.done[self.plan.pop(0)] += 1
                next_s = time.monotonic() + self._pause()
            time.sleep(0.02)

    def start_driver(self) -> None:
        arguments = {
            "pool": self.name,
            "address": ray.get_runtime_context().gcs_address,
            "rows": str(self.rows),
            "output": str(self.output),
        }
        command = [sys.executable, "-m", "tests.chaos.chaos_job", json.dumps(arguments)]
        with (self.folder / "driver.log").open("ab") as log:
            self.driver = subprocess.Popen(command, cwd=REPOSITORY, stdout=log, stderr=log)

    def end_driver(self) -> None:
        if self.driver is not None and self.driver.poll() is None:
            self.driver.kill()
            self.driver.wait()

    def story(self, what: str) -> str:
        log = (self.folder / "driver.log").read_text()[-2000:]
        return f"seed {self.seed}: {what}; done to it: {', '.join(self.log)}; the driver said: {log}"

    def _pause(self) -> float:
        return self.random.uniform(0.1, 2.0 * self.pause_s)

    def _strike(self, kind: str) -> bool:
        """Do one thing. Returns whether it could be done now."""
        if kind in ("exception", "oom", "hang"):
            (self.folder.parent / "disturb" / f"{kind}-{len(self.log)}").touch()
            self.log.append(kind)
            return True
        victim = self._victim(kind.removeprefix("stop_"))
        if victim is None:
            return False
        number = signal.SIGSTOP if kind.startswith("stop_") else signal.SIGKILL
        with suppress(ProcessLookupError):
            os.kill(victim, number)
            self.log.append(f"{kind} {victim}")
            return True
        return False

    def _victim(self, who: str) -> int | None:
        """A process that runs and takes part in the job at this moment."""
        try:
            body = ask_status(self.name)
        except PoolError:
            return None  # the router is on its way back
        if who == "router":
            return int(body["pid"])
        if who == "replica":
            pids = [slot["pid"] for slot in body["slots"] if slot["state"] == "up"]
            return self.random.choice(pids) if pids else None
        assert self.driver is not None
        at_work = any(
            f" {self.driver.pid}@" in client["label"] and client["windows"] for client in body["clients"]
        )
        return self.driver.pid if at_work and self.driver.poll() is None else None


def fire_config(folder: Path, replicas: int, row_seconds: float) -> PoolConfig:
    """A pool of fake models that can be disturbed by files in folder/disturb."""
    (folder / "disturb").mkdir(parents=True, exist_ok=True)
    model = folder / "model.json"
    model.write_text(json.dumps({"row_seconds": row_seconds, "disturb": str(folder / "disturb")}))
    return PoolConfig(
        model=model,
        factory="fake_model:load_model",
        replicas=replicas,
        threads=1,
        chunk_rows=200,
        chunk_items=16,
        hang_floor_s=1.0,
        first_ack_s=10.0,
        crash_limit=50,
    )


def wait_until(holds: Callable[[], Any], what: str, timeout_s: float = 30.0) -> None:
    """Poll. Raises AssertionError with `what` when it takes too long."""
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.05)
