"""What `tinyloop doctor` knows of a machine. Data only; sizes in bytes unless the name says otherwise."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Unknown:
    """In place of a fact that could not be found out, and why."""

    reason: str


@dataclass(frozen=True, slots=True)
class Package:
    """An installed package against what is asked of it. installed: its version, empty if it is not there."""

    name: str
    required: str
    installed: str


@dataclass(frozen=True, slots=True)
class Cpu:
    """cores: those that this process may use. flags: instruction sets, of those that the engine knows."""

    model: str
    cores: int
    flags: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Memory:
    """Of the machine or, where that is less, of this process's control group."""

    total: int
    available: int


@dataclass(frozen=True, slots=True)
class UsableGpu:
    """A GPU that the engine can use."""

    device: str
    name: str
    total: int


@dataclass(frozen=True, slots=True)
class Build:
    """The compiled engine. without_cuda: why it has no CUDA backend, empty if it has one.

    cublaslt: the file, empty if there is none and the engine's own kernels do its work.
    """

    without_cuda: str
    cublaslt: str
    devices: tuple[UsableGpu, ...]


@dataclass(frozen=True, slots=True)
class SelfTested:
    """The shipped model was loaded on the CPU and agrees with itself."""

    numerics_id: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Space:
    """A file system."""

    path: str
    total: int
    free: int


@dataclass(frozen=True, slots=True)
class FileLimits:
    """Most open files of a process: now, and what it may raise that to."""

    soft: int
    hard: int


@dataclass(frozen=True, slots=True)
class Port:
    """A port of Ray's head. taken: somebody listens there."""

    number: int
    use: str
    taken: bool


@dataclass(frozen=True, slots=True)
class Cluster:
    """A Ray cluster that was asked. address: empty if none is named or known here.

    error: why it could not be joined, empty if it was. refused: Ray here has no token for it. listens: the
    address took a connection. token: whether it asks for one. gpus_here: GPUs of this machine that Ray knows,
    None if it is no node.
    """

    address: str
    error: str = ""
    refused: bool = False
    listens: bool = False
    token: bool = False
    version: str = ""
    nodes: int = 0
    gpus: int = 0
    gpus_here: int | None = None


@dataclass(frozen=True, slots=True)
class DriverGpu:
    """A GPU as the driver lists it. capability: of its instruction set, as (9, 0)."""

    index: int
    uuid: str
    name: str
    capability: tuple[int, int]
    driver: str
    used: int
    total: int


@dataclass(frozen=True, slots=True)
class DriverProcess:
    """A process on a GPU. used: None where the driver does not say."""

    gpu_uuid: str
    pid: int
    name: str
    used: int | None


@dataclass(frozen=True, slots=True)
class Planned:
    """What a pool's configuration takes. model: bytes of one loaded replica; prefixes: its budget.

    limit: of both together, None for none. unplanned: why the engine cannot plan it, empty if it can.
    """

    source: str
    device: str
    replicas: int
    model: int
    prefixes: int
    limit: int | None
    unplanned: str = ""

    @property
    def replica_bytes(self) -> int:
        """Most that one replica holds."""
        wanted = self.model + self.prefixes
        return wanted if self.limit is None else min(wanted, self.limit)


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything. gpus: empty without a driver; nvcc: its version, empty if it is not on the path."""

    python: str | Unknown
    packages: tuple[Package, ...] | Unknown
    oracles: tuple[Package, ...] | Unknown
    cpu: Cpu | Unknown
    memory: Memory | Unknown
    build: Build | Unknown
    tested: SelfTested | Unknown
    shared_memory: Space | Unknown
    ray_folder: Space | Unknown
    files: FileLimits | Unknown
    ports: tuple[Port, ...] | Unknown
    cluster: Cluster | Unknown
    gpus: tuple[DriverGpu, ...] | Unknown
    gpu_processes: tuple[DriverProcess, ...] | Unknown
    nvcc: str | Unknown
    planned: Planned | Unknown
