"""How each fact of a machine is found out.

Nothing here asks the network beyond a Ray cluster that is named or runs on this machine.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

from ..config import PoolConfig
from .facts import (
    Build,
    Cluster,
    Cpu,
    DriverGpu,
    DriverProcess,
    FileLimits,
    Memory,
    Package,
    Planned,
    Port,
    SelfTested,
    Space,
    UsableGpu,
)
from .gathering import LIMIT_S, Probe, ProbeFailed, run_command

DISTRIBUTION = "tinyloop-pool"
ORACLES = ("torch", "transformers")
CPU_FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq", "amx_tile", "amx_bf16")
RAY_PORTS = {6379: "Ray's head", 8265: "Ray's dashboard", 10001: "Ray's clients"}
RAY_FOLDER = "/tmp/ray"

CHILD_LIMIT_S, CLUSTER_LIMIT_S = 60.0, 40.0
CONNECT_S = 1.0

GPU_QUERY = "index,uuid,name,compute_cap,driver_version,memory.used,memory.total"
PROCESS_QUERY = "gpu_uuid,pid,process_name,used_memory"
MIB = 1 << 20


def probes_of(config: PoolConfig, source: str, address: str | None) -> dict[str, Probe]:
    """The probe of each fact. config: the pool whose memory is planned; source: what to call it."""
    return {
        "python": Probe(platform.python_version),
        "packages": Probe(lambda: _packages(lambda name, extra: not extra)),
        "oracles": Probe(lambda: _packages(lambda name, extra: extra and name in ORACLES)),
        "cpu": Probe(_cpu),
        "memory": Probe(_memory),
        "build": Probe(_build, CHILD_LIMIT_S),
        "tested": Probe(lambda: SelfTested(**_child("test")), CHILD_LIMIT_S),
        "shared_memory": Probe(lambda: _space("/dev/shm")),
        "ray_folder": Probe(lambda: _space(os.environ.get("RAY_TMPDIR", RAY_FOLDER))),
        "files": Probe(lambda: FileLimits(*resource.getrlimit(resource.RLIMIT_NOFILE))),
        "ports": Probe(_ports),
        "cluster": Probe(lambda: _cluster(address), CLUSTER_LIMIT_S + 2 * CONNECT_S),
        "gpus": Probe(_gpus, 2 * LIMIT_S),
        "gpu_processes": Probe(_gpu_processes, 2 * LIMIT_S),
        "nvcc": Probe(_nvcc, 2 * LIMIT_S),
        "planned": Probe(lambda: _planned(config, source)),
    }


def _child(*arguments: str, limit_s: float = CHILD_LIMIT_S) -> dict[str, Any]:
    """What a probe in a process of its own has found. Raises ProbeFailed."""
    output = run_command([sys.executable, "-m", "tinyloop.cluster.doctor.child", *arguments], limit_s)
    answer: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    if "failed" in answer:
        raise ProbeFailed(answer["failed"])
    return answer


def _packages(wanted: Callable[[str, bool], bool]) -> tuple[Package, ...]:
    """Requirements of this distribution; wanted: by name, and whether an extra asks for it."""
    found = []
    for requirement in requires(DISTRIBUTION) or ():
        text, _, marker = (part.strip() for part in requirement.partition(";"))
        name = text[: len(text) - len(text.lstrip("abcdefghijklmnopqrstuvwxyz0123456789._-"))]
        if wanted(name, bool(marker)):
            # Behind the name and its extras, as in ray[default]>=2.50.
            required = text[len(name) :].rpartition("]")[2]
            found.append(Package(name, required, _installed(name)))
    return tuple(found)


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _cpu() -> Cpu:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    values = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    has = set(values.get("flags", "").split())
    flags = tuple(flag for flag in CPU_FLAGS if flag in has)
    return Cpu(values.get("model name", platform.machine()), len(os.sched_getaffinity(0)), flags)


def _memory() -> Memory:
    lines = Path("/proc/meminfo").read_text().splitlines()
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    total, available = kib["MemTotal"] * 1024, kib["MemAvailable"] * 1024
    for limit, used in _group_limits():
        total, available = min(total, limit), min(available, max(limit - used, 0))
    return Memory(total, available)


def _group_limits() -> list[tuple[int, int]]:
    """Limit and use of the control group, as a container has it; of either version of control groups."""
    places = (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    )
    found = []
    for limit_name, used_name in places:
        with suppress(OSError, ValueError):
            root = Path("/sys/fs/cgroup")
            found.append((int((root / limit_name).read_text()), int((root / used_name).read_text())))
    return found


def _space(path: str) -> Space:
    """Of the nearest folder that exists."""
    place = Path(path)
    while not place.exists():
        place = place.parent
    usage = shutil.disk_usage(place)
    return Space(str(place), usage.total, usage.free)


def _ports() -> tuple[Port, ...]:
    return tuple(Port(number, use, _listens(number)) for number, use in RAY_PORTS.items())


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), CONNECT_S).close()
    except OSError:
        return False
    return True


def _build() -> Build:
    answer = _child("build")
    found = tuple(UsableGpu(**device) for device in answer["devices"])
    return Build(answer["without_cuda"], answer["cublaslt"], found)


def _cluster(address: str | None) -> Cluster:
    target = address or os.environ.get("RAY_ADDRESS", "")
    if target in ("", "auto"):
        # Ray's own note of the cluster that runs here, or ran.
        note = Path(os.environ.get("RAY_TMPDIR", RAY_FOLDER)) / "ray_current_cluster"
        target = note.read_text().strip() if note.exists() else ""
    if target in ("", "local"):
        return Cluster("")
    try:
        _knock(target)
    except OSError as failure:
        return Cluster(target, error=str(failure))
    try:
        return Cluster(**_child("cluster", target, limit_s=CLUSTER_LIMIT_S), listens=True)
    except ProbeFailed as failure:
        return Cluster(target, error=str(failure), listens=True)


def _knock(address: str) -> None:
    """Ask first whether anybody listens: Ray itself tries for minutes. Raises OSError."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()


def _smi(query: str, kind: str) -> list[list[str]] | None:
    """Rows of nvidia-smi, None where there is none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    output = run_command([program, f"--query-{kind}={query}", "--format=csv,noheader,nounits"])
    return [[cell.strip() for cell in line.split(",")] for line in output.splitlines() if line.strip()]


def _gpus() -> tuple[DriverGpu, ...]:
    rows = _smi(GPU_QUERY, "gpu") or []
    return tuple(
        DriverGpu(int(index), uuid, name, _capability(cap), driver, int(used) * MIB, int(total) * MIB)
        for index, uuid, name, cap, driver, used, total in rows
    )


def _capability(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    return int(major), int(minor)


def _gpu_processes() -> tuple[DriverProcess, ...]:
    found = []
    for uuid, pid, *name, used in _smi(PROCESS_QUERY, "compute-apps") or []:
        size = int(used) * MIB if used.isdecimal() else None
        found.append(DriverProcess(uuid, int(pid), ",".join(name), size))
    return tuple(found)


def _nvcc() -> str:
    program = shutil.which("nvcc")
    if program is None:
        return ""
    line = next((s for s in run_command([program, "--version"]).splitlines() if "release" in s), "")
    return line.partition("release")[2].split(",")[0].strip() or "of an unknown version"


def _planned(config: PoolConfig, source: str) -> Planned:
    from ...native import TinyLoopError, plan

    limits = config.prefix_budget_bytes, config.model_budget_bytes
    try:
        total = plan(
            config.model,
            config.max_seq_len,
            config.prefill_chunk,
            device=config.device,
            cache_mode=config.cache_mode,
            fp16_cache=config.fp16_cache,
            threads=config.threads or max(len(os.sched_getaffinity(0)) // config.replicas, 1),
        ).total
    except (TinyLoopError, OSError, ValueError) as error:
        return Planned(source, config.device, config.replicas, 0, *limits, unplanned=str(error))
    return Planned(source, config.device, config.replicas, total, *limits)
