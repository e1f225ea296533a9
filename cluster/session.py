"""The Ray session of a pool: joined if there is one, else its own, quiet and at normal priority."""

from __future__ import annotations

import logging
import os
import re
import socket
import threading
from concurrent.futures import Future
from typing import Any

import ray
from ray._private import worker as ray_worker

from .cluster_token import TokenRefused, advice, is_refusal, refuse_missing_token, use_token
from .fleet import PoolError

CONNECT_S = 5.0
JOIN_S = 30.0
START_ATTEMPTS = 2

_QUIET = {
    # Ray runs workers at niceness 15 otherwise, also on a machine that is ours alone.
    "RAY_worker_niceness": "0",
    # Ray's coming default, which it warns about for as long as the variable is not set.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
_LOGGING: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
_HOST_AND_PORT = re.compile(r"(ray://)?(?P<host>[^/]+):(?P<port>[0-9]{1,5})")


def connect(address: str | None) -> bool:
    """Make sure that Ray runs. address: a cluster, or None for RAY_ADDRESS, or else a session of our own.

    Returns whether this call started a session, which its caller must then end. Raises PoolError.
    """
    if ray.is_initialized():
        return False
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    _silence()
    target = address or os.environ.get("RAY_ADDRESS")
    if target and target != "local":
        _join(target, "RAY_ADDRESS" if not address else "ray_address")
        return False
    _start_session()
    return True


def join(address: str | None) -> None:
    """Make sure that Ray runs, in a cluster that this process does not end: a named pool lives on there.

    address: a cluster, or None for RAY_ADDRESS, or else the one of this machine. Raises PoolError.
    """
    if ray.is_initialized():
        return
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    _silence()
    target = address or os.environ.get("RAY_ADDRESS")
    if target == "local":
        raise PoolError(
            "RAY_ADDRESS is 'local', a session that ends with this process, and a named pool needs a cluster "
            "that stays: start one with `ray start --head` and unset RAY_ADDRESS"
        )
    source = "ray_address" if address else "RAY_ADDRESS" if target else "this machine's cluster"
    _join(target or "auto", source)


def _join(address: str, source: str) -> None:
    """Connect to a cluster. source: the setting that named it."""
    where = f"cannot connect to Ray at {address!r} ({source})"
    todo = f"start Ray there, correct {source}, or unset it for a session of this job's own"
    match = _HOST_AND_PORT.fullmatch(address)
    if match:
        # Asked first, since Ray itself tries an address where nobody listens for minutes.
        try:
            socket.create_connection((match["host"].strip("[]"), int(match["port"])), CONNECT_S).close()
        except (OSError, OverflowError) as error:
            raise PoolError(f"{where}: {error}: {todo}") from error
    use_token()
    if not address.startswith("ray://"):
        refuse_missing_token(address)
    joined: Future[None] = Future()

    def join() -> None:
        try:
            ray.init(address=address, **_LOGGING)
        except BaseException as error:
            joined.set_exception(error)
        else:
            joined.set_result(None)

    # In a thread, since Ray waits without end for a cluster that an old file of its own names, or that is
    # no Ray. Joining starts no process, so none dies with the thread.
    threading.Thread(target=join, name="join-ray", daemon=True).start()
    try:
        joined.result(timeout=JOIN_S)
    except TimeoutError as error:
        raise PoolError(f"{where}: no answer in {JOIN_S:.0f} s: {todo}") from error
    except Exception as error:
        # Ray raises many types here, Exception itself among them.
        if is_refusal(error):
            raise TokenRefused(f"{where}: {advice()}") from error
        raise PoolError(f"{where}: {type(error).__name__}: {error}: {todo}") from error


def _start_session() -> None:
    cpus = len(os.sched_getaffinity(0))
    for attempt in range(1, START_ATTEMPTS + 1):
        try:
            ray.init(address="local", num_cpus=cpus, include_dashboard=False, **_LOGGING)
            return
        except Exception as error:
            # On a machine with much else to do Ray's node may miss Ray's own deadline of 30 s.
            ray.shutdown()
            if attempt == START_ATTEMPTS:
                raise PoolError(
                    f"cannot start Ray with {cpus} CPUs: {type(error).__name__}: {error}: tried {attempt} "
                    "times; free memory and CPU, or look into Ray's own logs"
                ) from error


def _silence() -> None:
    """Keep what Ray says of a dead process off this one's output: the pool says it in a line of its own.

    log_to_driver does not cover these messages, and Ray has no setting that does.
    """
    if hasattr(ray_worker, "print_to_stdstream"):
        ray_worker.print_to_stdstream = lambda *args, **kwargs: None


def cluster_gpus() -> int:
    """GPUs that Ray knows of, in use or not."""
    return int(ray.cluster_resources().get("GPU", 0))


def cluster_cpus() -> int:
    """Whole CPUs of the session."""
    return max(int(ray.cluster_resources().get("CPU", 1)), 1)
