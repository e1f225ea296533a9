"""The Ray session of a pool: joined if there is one, else its own, quiet and at normal priority."""

from __future__ import annotations

import logging
import os

import ray

_QUIET = {
    # Ray runs workers at niceness 15 otherwise, also on a machine that is ours alone.
    "RAY_worker_niceness": "0",
    # Ray's coming default, which it warns about for as long as the variable is not set.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def connect(address: str | None) -> bool:
    """Make sure that Ray runs. address: a cluster, or None for RAY_ADDRESS, or else a session of our own.

    Returns whether this call started a session, which its caller must then end.
    """
    if ray.is_initialized():
        return False
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    target = address or os.environ.get("RAY_ADDRESS")
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    if target:
        ray.init(address=target, **quiet)
        return False
    ray.init(address="local", num_cpus=len(os.sched_getaffinity(0)), include_dashboard=False, **quiet)
    return True


def cluster_cpus() -> int:
    """Whole CPUs of the session."""
    return max(int(ray.cluster_resources().get("CPU", 1)), 1)
