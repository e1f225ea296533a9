"""Checks of the machine: memory against a pool's plan, GPUs and who is on them, disks, limits. Pure."""

from __future__ import annotations

from ...workers.gpu_memory import IDLE_MIB, OURS
from .facts import Facts, Planned, Unknown
from .findings import Finding, Level, size_text, unknown

GIB = 1 << 30

# Ray fills its object store in shared memory, and on disk, at a tenth of the speed, where that is short.
LEAST_SHARED_BYTES = 2 * GIB
# Ray stops storing objects when the file system of its folder is fuller than this.
FULLEST_SHARE = 0.95
LEAST_FOLDER_BYTES = 5 * GIB
# Each replica and each client of a node holds tens of connections; Ray itself recommends the larger number.
LEAST_FILES, ENOUGH_FILES = 1024, 65536
# Left to Ray, its object store and the rest of the machine: Ray kills processes above 95 % of the memory.
MOST_MEMORY_SHARE = 0.90
SMALLER = "lower prefix_budget_bytes, max_seq_len or replicas, or change cache_mode: see `tinyloop plan`"


def check_gpu_users(facts: Facts) -> Finding:
    """Is somebody else on the GPUs?"""
    if isinstance(facts.gpu_processes, Unknown) or isinstance(facts.gpus, Unknown):
        return Finding(Level.WARNING, "processes on the GPUs could not be listed", "run nvidia-smi")
    index = {gpu.uuid: gpu.index for gpu in facts.gpus}
    foreign = [p for p in facts.gpu_processes if not p.name.startswith(OURS)]
    if foreign:
        named = "; ".join(
            f"GPU {index.get(p.gpu_uuid, p.gpu_uuid)}: process {p.pid} ({p.name}) with "
            f"{'memory of unknown size' if p.used is None else size_text(p.used)}"
            for p in foreign
        )
        return Finding(
            Level.WARNING, named, "end them, or give the pool other GPUs: one GPU holds one replica"
        )
    known = {p.gpu_uuid for p in facts.gpu_processes}
    hidden = [g for g in facts.gpus if g.used > IDLE_MIB << 20 and g.uuid not in known]
    if hidden:
        named = "; ".join(f"GPU {gpu.index}: {size_text(gpu.used)} are used by nobody seen" for gpu in hidden)
        return Finding(
            Level.WARNING, named, "look outside of this container, or wait for memory that is given back"
        )
    return Finding(
        Level.OK, f"{len(facts.gpu_processes)} replicas and nobody else" if facts.gpus else "no GPU"
    )


def check_shared_memory(facts: Facts) -> Finding:
    """Is there room for Ray's object store?"""
    if isinstance(facts.shared_memory, Unknown):
        return unknown(facts.shared_memory, "mount a tmpfs at /dev/shm")
    space = facts.shared_memory
    if space.free < LEAST_SHARED_BYTES:
        return Finding(
            Level.WARNING,
            f"{size_text(space.free)} of {size_text(space.total)} free in {space.path}, little for Ray",
            "in a container: docker run --shm-size 8g, in Kubernetes an emptyDir of medium Memory",
        )
    return Finding(Level.OK, f"{size_text(space.free)} free in {space.path}")


def check_ray_folder(facts: Facts) -> Finding:
    """Can Ray write its logs and its overflow?"""
    if isinstance(facts.ray_folder, Unknown):
        return unknown(facts.ray_folder, "")
    space = facts.ray_folder
    todo = "free space there, or set RAY_TMPDIR to a larger file system"
    text = f"{size_text(space.free)} free of {size_text(space.total)} at {space.path}"
    if space.free < (1 - FULLEST_SHARE) * space.total:
        return Finding(Level.FAILURE, f"{text}: Ray stores nothing above 95 % in use", todo)
    if space.free < LEAST_FOLDER_BYTES:
        return Finding(Level.WARNING, text, todo)
    return Finding(Level.OK, text)


def check_files(facts: Facts) -> Finding:
    """May a process open enough files?"""
    if isinstance(facts.files, Unknown):
        return unknown(facts.files, "")
    soft, hard = facts.files.soft, facts.files.hard
    if 0 <= soft < ENOUGH_FILES:
        raised = hard if 0 <= hard < ENOUGH_FILES else ENOUGH_FILES
        todo = f"before Ray starts: ulimit -n {raised}" if raised > soft else "raise nofile in limits.conf"
        level = Level.WARNING if soft <= LEAST_FILES else Level.NOTE
        return Finding(level, f"ulimit -n is {soft}, a node with many replicas or clients needs more", todo)
    return Finding(Level.OK, "ulimit -n is " + (f"{soft:,}" if soft >= 0 else "unlimited"))


def check_memory(facts: Facts) -> Finding:
    """Does a pool fit, by the engine's own plan?"""
    planned = facts.planned
    if isinstance(planned, Unknown):
        return unknown(planned, "see `tinyloop plan`", Level.FAILURE)
    if planned.device == "cuda" and not facts.gpus and (elsewhere := _gpus_elsewhere(facts, planned)):
        return elsewhere
    if planned.unplanned:
        cudaless = not isinstance(facts.build, Unknown) and facts.build.without_cuda
        install = "install with nvcc on the path, or use device cpu"
        todo = install if planned.device == "cuda" and cudaless else "correct the configuration"
        return Finding(Level.FAILURE, f"{planned.source}: {planned.unplanned}", todo)
    if planned.model > planned.replica_bytes:
        return Finding(
            Level.FAILURE, f"{_need(planned)}: more than model_budget_bytes", "raise model_budget_bytes"
        )
    return _memory_on_gpus(facts, planned) if planned.device == "cuda" else _memory_here(facts, planned)


def _gpus_elsewhere(facts: Facts, planned: Planned) -> Finding | None:
    """For a machine without GPUs in a cluster that has some, such as its head."""
    if isinstance(facts.cluster, Unknown) or not facts.cluster.gpus:
        return None
    there = f"{planned.source}: no GPU here, {facts.cluster.gpus} in the cluster"
    if facts.cluster.gpus < planned.replicas:
        return Finding(
            Level.FAILURE, f"{there}, {planned.replicas} are needed", "lower replicas, or add machines"
        )
    return Finding(
        Level.NOTE, there, "run this on one of its machines too, to hold the plan against its memory"
    )


def _need(planned: Planned) -> str:
    return (
        f"{planned.source}: {planned.replicas} x {size_text(planned.replica_bytes)} "
        f"(model {size_text(planned.model)}, prefixes {size_text(planned.prefixes)})"
    )


def _memory_here(facts: Facts, planned: Planned) -> Finding:
    if isinstance(facts.memory, Unknown):
        return unknown(facts.memory, "")
    need, memory = planned.replicas * planned.replica_bytes, facts.memory
    room = f"{size_text(memory.available)} of {size_text(memory.total)} are available"
    if need > MOST_MEMORY_SHARE * memory.total:
        return Finding(Level.FAILURE, f"{_need(planned)} do not fit: {room}", SMALLER)
    if need > memory.available:
        return Finding(
            Level.WARNING, f"{_need(planned)} do not fit now: {room}", "end what uses it, or " + SMALLER
        )
    return Finding(Level.OK, f"{_need(planned)} fit: {room}")


def _memory_on_gpus(facts: Facts, planned: Planned) -> Finding:
    if isinstance(facts.gpus, Unknown):
        return unknown(facts.gpus, "run nvidia-smi", Level.FAILURE)
    if not facts.gpus:
        return Finding(
            Level.FAILURE,
            f"{_need(planned)}: there is no GPU here",
            "check a machine with GPUs, or use device cpu",
        )
    need = planned.replica_bytes + (IDLE_MIB << 20)
    fit = [gpu for gpu in facts.gpus if gpu.total >= need]
    if not fit:
        largest = max(gpu.total for gpu in facts.gpus)
        return Finding(
            Level.FAILURE,
            f"{_need(planned)} and 1 GiB of the driver: a GPU has {size_text(largest)}",
            SMALLER,
        )
    if len(fit) < planned.replicas:
        return Finding(
            Level.WARNING,
            f"{_need(planned)}: {len(fit)} GPUs here are large enough",
            "the others must come from other nodes, or lower replicas",
        )
    return Finding(Level.OK, f"{_need(planned)} fit {len(fit)} GPUs of {size_text(fit[0].total)}")
