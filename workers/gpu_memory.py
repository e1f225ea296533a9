"""Whether a GPU is free for one more model, decided on what nvidia-smi says; the driver is not opened.

A replica that takes the place of a dead one must find its memory given back, and one GPU holds one
replica: what else is on it is named, since it costs speed and memory that nobody planned for.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

# Memory of a dead process is given back within seconds; one that keeps it for so long will not go by itself.
LEAVING_S = 60.0
# In a container the processes of others cannot be seen, only the memory they take.
UNSEEN_S = 20.0
POLL_S = 0.5
QUERY_S = 10.0
# What the driver itself takes, with and without a display.
IDLE_MIB = 1024
OURS = "ray::Replica"

GPU_QUERY = ("--query-gpu=index,uuid,memory.used,memory.total", "--format=csv,noheader,nounits")
PROCESS_QUERY = (
    "--query-compute-apps=gpu_uuid,pid,process_name,used_memory",
    "--format=csv,noheader,nounits",
)

Query = Callable[[Sequence[str]], str]


class GpuTaken(RuntimeError):
    """The GPU is not free for this replica; the message names who holds it."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU of this machine and its memory in MiB."""

    index: int
    uuid: str
    used_mib: int
    total_mib: int


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process on a GPU. used_mib: None where the driver does not say."""

    gpu_uuid: str
    pid: int
    name: str
    used_mib: int | None

    def __str__(self) -> str:
        used = "memory of unknown size" if self.used_mib is None else f"{self.used_mib:,} MiB"
        return f"process {self.pid} ({self.name}) with {used}"


@dataclass(frozen=True, slots=True)
class Answer:
    """What to do: start (now, with what is to be said), wait or refuse (with the reason)."""

    action: str
    message: str = ""


def parse_gpus(output: str) -> list[Gpu]:
    """GPUs from the output of GPU_QUERY. Raises ValueError for another output."""
    rows = [[field.strip() for field in line.split(",")] for line in output.splitlines() if line.strip()]
    return [Gpu(int(index), uuid, int(used), int(total)) for index, uuid, used, total in rows]


def parse_processes(output: str) -> list[GpuProcess]:
    """Processes from the output of PROCESS_QUERY. A name may have commas. Raises ValueError."""
    found = []
    for line in filter(str.strip, output.splitlines()):
        uuid, pid, *name, used = (field.strip() for field in line.split(","))
        found.append(GpuProcess(uuid, int(pid), ",".join(name), int(used) if used.isdecimal() else None))
    return found


def own_gpu(gpus: Sequence[Gpu], visible: str | None) -> Gpu | None:
    """The GPU that a process with this CUDA_VISIBLE_DEVICES uses first; None for one that is not listed."""
    name = (visible or "0").split(",")[0].strip()
    return next((gpu for gpu in gpus if name in (str(gpu.index), gpu.uuid)), None)


def decide(
    gpu: Gpu, processes: Sequence[GpuProcess], own_pid: int, need_bytes: int | None, waited_s: float
) -> Answer:
    """Whether a model may be loaded now. need_bytes: most that it may take, None if that is not limited."""
    others = [p for p in processes if p.gpu_uuid == gpu.uuid and p.pid != own_pid]
    leaving = [process for process in others if process.name.startswith(OURS)]
    named = f"GPU {gpu.index} ({gpu.used_mib:,} of {gpu.total_mib:,} MiB used) is held by"
    if leaving:
        who = f"{named} {', '.join(map(str, leaving))}, a replica that should be gone"
        if waited_s < LEAVING_S:
            return Answer("wait", who)
        return Answer("refuse", f"{who}, after {LEAVING_S:.0f} s: end it")
    if others:
        who = f"{named} {', '.join(map(str, others))}, not of this pool"
        free_bytes = (gpu.total_mib - gpu.used_mib) << 20
        if need_bytes is not None and free_bytes < need_bytes:
            return Answer("refuse", f"{who}; {free_bytes:,} bytes are free, {need_bytes:,} needed: end it")
        return Answer("start", who)
    if gpu.used_mib > IDLE_MIB:
        who = f"{named} no process that can be seen from here"
        return Answer("wait" if waited_s < UNSEEN_S else "start", who)
    return Answer("start")


def wait_until_free(
    need_bytes: int | None,
    *,
    query: Query | None = None,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
    environment: Mapping[str, str] = os.environ,
) -> str:
    """Wait until this process's GPU is free for a model. Returns what is to be said of it, mostly nothing.

    Raises GpuTaken. A machine whose nvidia-smi does not answer is not checked, and that is said.
    """
    ask = query or _nvidia_smi
    began_s = clock()
    while True:
        try:
            gpu = own_gpu(parse_gpus(ask(GPU_QUERY)), environment.get("CUDA_VISIBLE_DEVICES"))
            processes = parse_processes(ask(PROCESS_QUERY))
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            return f"the GPU's memory was not checked: nvidia-smi: {type(error).__name__}: {error}"
        if gpu is None:
            return "the GPU's memory was not checked: nvidia-smi does not list this process's device"
        answer = decide(gpu, processes, os.getpid(), need_bytes, clock() - began_s)
        if answer.action == "start":
            return answer.message
        if answer.action == "refuse":
            raise GpuTaken(answer.message)
        pause(POLL_S)


def _nvidia_smi(arguments: Sequence[str]) -> str:
    done = subprocess.run(
        ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=QUERY_S, check=True
    )
    return done.stdout
