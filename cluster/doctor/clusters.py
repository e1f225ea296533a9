"""Checks of Ray: ports, the cluster that is named or runs here, its token, the GPUs that it knows. Pure."""

from __future__ import annotations

from .facts import Facts, Unknown
from .findings import Finding, Level, unknown

TOKEN = "put its token (on its head: ray get-auth-token) into ~/.ray/auth_token or RAY_AUTH_TOKEN"


def check_ports(facts: Facts) -> Finding:
    """Could a head of Ray start here, if there is none?"""
    if isinstance(facts.ports, Unknown):
        return unknown(facts.ports, "")
    taken = [f"{port.number} ({port.use})" for port in facts.ports if port.taken]
    if not taken:
        return Finding(Level.OK, "the ports of a head are free")
    cluster = facts.cluster
    if not isinstance(cluster, Unknown) and cluster.address and (cluster.listens or not cluster.error):
        return Finding(Level.OK, f"in use beside a running cluster: {', '.join(taken)}")
    return Finding(
        Level.WARNING,
        f"taken, though no cluster answers: {', '.join(taken)}",
        "before `ray start --head`: end what listens there, or give other ports (--port, --dashboard-port)",
    )


def check_cluster(facts: Facts) -> Finding:
    """Can the cluster that is named or runs here be joined, with its token?"""
    if isinstance(facts.cluster, Unknown):
        return unknown(facts.cluster, "unset RAY_ADDRESS, or start Ray there")
    cluster = facts.cluster
    if not cluster.address:
        return Finding(Level.OK, "none named or running: jobs start a session of their own")
    reason = cluster.error.partition(". ")[0]  # Ray explains at length; the facts have all of it
    if cluster.refused:
        return Finding(Level.FAILURE, f"{cluster.address} refuses this process: {reason}", TOKEN)
    if cluster.error and cluster.listens:
        return Finding(
            Level.FAILURE,
            f"{cluster.address} listens and cannot be joined: {reason}",
            f"most often this process has another token than the cluster, or none: {TOKEN}",
        )
    if cluster.error:
        return Finding(
            Level.FAILURE,
            f"{cluster.address} cannot be reached: {reason}",
            "start it (ray start --head), or correct or unset RAY_ADDRESS; `ray stop` clears a dead one",
        )
    about = f"{cluster.address}: {cluster.nodes} nodes, {cluster.gpus} GPUs, Ray {cluster.version}"
    if not cluster.token:
        return Finding(
            Level.WARNING,
            f"{about}, without a token: whoever reaches it may run anything",
            "start it with RAY_AUTH_MODE=token, after `ray get-auth-token --generate`",
        )
    return Finding(Level.OK, f"{about}, with a token")


def check_ray_gpus(facts: Facts) -> Finding:
    """Does Ray know the GPUs of this machine?"""
    if isinstance(facts.cluster, Unknown) or isinstance(facts.gpus, Unknown):
        return Finding(Level.NOTE, "not compared: Ray or the driver does not answer")
    if facts.cluster.gpus_here is None:
        return Finding(Level.OK, "not compared: this machine is no node of a cluster")
    known, there = facts.cluster.gpus_here, len(facts.gpus)
    if known == there:
        return Finding(Level.OK, f"Ray and the driver both list {there}")
    return Finding(
        Level.WARNING if known < there else Level.FAILURE,
        f"Ray knows {known} GPUs of this machine, the driver {there}",
        "see CUDA_VISIBLE_DEVICES and --num-gpus of `ray start`; start Ray again after a change of drivers",
    )
