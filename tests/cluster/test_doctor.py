"""The doctor: each finding from facts alone; probes end in time whatever hangs; the command's exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tinyloop.cluster.config import PoolConfig
from tinyloop.cluster.doctor.facts import (
    Build,
    Cluster,
    Cpu,
    DriverGpu,
    DriverProcess,
    Facts,
    FileLimits,
    Memory,
    Package,
    Planned,
    Port,
    SelfTested,
    Space,
    Unknown,
    UsableGpu,
)
from tinyloop.cluster.doctor.findings import Level
from tinyloop.cluster.doctor.gathering import Probe, ProbeFailed, gather, run_command
from tinyloop.cluster.doctor.probes import probes_of
from tinyloop.cluster.doctor.report import CHECKS, as_json, as_text, check, is_healthy
from tinyloop.cluster.doctor.software import fits
from tinyloop.native import plan
from tinyloop.native.models import default_model_path

GB = 10**9
H200 = DriverGpu(0, "GPU-a", "NVIDIA H200", (9, 0), "580.82.07", 0, 150 * GB)
OURS = DriverProcess("GPU-a", 17, "ray::Replica.run", 20 * GB)

HEALTHY = Facts(
    python="3.12.4",
    packages=(Package("ray", ">=2.50", "2.60.0"), Package("numpy", ">=1.26", "2.4.6")),
    oracles=(Package("torch", "==2.13.0", "2.13.0+cpu"), Package("transformers", "<6,>=5", "")),
    cpu=Cpu("A Processor", 8, ("avx2", "fma", "f16c")),
    memory=Memory(64 * GB, 60 * GB),
    build=Build("", "/somewhere/libcublasLt.so.13", (UsableGpu("cuda:0", "NVIDIA H200", 150 * GB),)),
    tested=SelfTested("cpu/avx2", 0.5),
    shared_memory=Space("/dev/shm", 32 * GB, 32 * GB),
    ray_folder=Space("/tmp", 100 * GB, 50 * GB),
    files=FileLimits(65536, 1048576),
    ports=(Port(6379, "Ray's head", False),),
    cluster=Cluster("10.0.0.1:6379", token=True, version="2.60.0", nodes=2, gpus=1, gpus_here=1),
    gpus=(H200,),
    gpu_processes=(OURS,),
    nvcc="13.0",
    planned=Planned("pool.toml", "cuda", 1, 30 * GB, 80 * GB, None),
)


def test_a_healthy_machine_has_nothing_to_do() -> None:
    findings = check(HEALTHY)
    assert {name: f.level for name, f in findings.items()} == dict.fromkeys(CHECKS, Level.OK)
    assert not [f.todo for f in findings.values() if f.todo]
    assert is_healthy(findings)


# What is changed, the check that finds it, how bad that is, and words of what is found and to do.
SICK: list[tuple[dict[str, Any], str, Level, str]] = [
    ({"python": "3.10.1"}, "python", Level.FAILURE, "3.11"),
    (
        {"packages": (Package("ray", ">=2.50", "2.49.3"),)},
        "packages",
        Level.FAILURE,
        "ray 2.49.3, asked for is >=2.50",
    ),
    ({"packages": (Package("ray", ">=2.50", ""),)}, "packages", Level.FAILURE, "ray is missing"),
    ({"packages": Unknown("no metadata")}, "packages", Level.FAILURE, "no metadata"),
    ({"oracles": (Package("torch", "==2.13.0", "2.12.0"),)}, "oracles", Level.NOTE, "torch 2.12.0"),
    ({"cpu": Cpu("Old", 2, ())}, "processor", Level.WARNING, "no AVX2"),
    (
        {"tested": Unknown("SelfTestError: a prefix hit differs")},
        "model",
        Level.FAILURE,
        "a prefix hit differs",
    ),
    ({"gpus": Unknown("nvidia-smi did not end in 10 s")}, "CUDA", Level.FAILURE, "did not end"),
    ({"build": Build("no CUDA backend", "", ())}, "CUDA", Level.WARNING, "nvcc 13.0 is here"),
    (
        {"build": Build("no CUDA backend", "", ()), "nvcc": ""},
        "CUDA",
        Level.WARNING,
        "install the CUDA toolkit",
    ),
    ({"gpus": (replace(H200, capability=(7, 5)),)}, "CUDA", Level.WARNING, "capability 7.5"),
    ({"build": Build("", "/lib", ())}, "CUDA", Level.FAILURE, "the engine can use 0"),
    ({"build": replace(HEALTHY.build, cublaslt="")}, "cuBLASLt", Level.WARNING, "TINYLOOP_CUBLASLT"),
    (
        {"gpu_processes": (replace(OURS, name="python"),)},
        "GPU users",
        Level.WARNING,
        "GPU 0: process 17 (python) with 20.0 GB",
    ),
    (
        {"gpu_processes": (), "gpus": (replace(H200, used=9 * GB),)},
        "GPU users",
        Level.WARNING,
        "9.0 GB are used by nobody seen",
    ),
    ({"gpu_processes": Unknown("x")}, "GPU users", Level.WARNING, "run nvidia-smi"),
    (
        {"planned": Planned("p", "cuda", 1, 30 * GB, 125 * GB, None)},
        "memory",
        Level.FAILURE,
        "a GPU has 150.0 GB",
    ),
    (
        {"planned": Planned("p", "cuda", 2, 30 * GB, 80 * GB, None)},
        "memory",
        Level.WARNING,
        "1 GPUs here are large enough",
    ),
    ({"planned": Planned("p", "cpu", 2, 4 * GB, 26 * GB, None)}, "memory", Level.FAILURE, "2 x 30.0 GB"),
    (
        {"planned": Planned("p", "cpu", 1, 4 * GB, 40 * GB, None), "memory": Memory(64 * GB, 30 * GB)},
        "memory",
        Level.WARNING,
        "do not fit now",
    ),
    (
        {"planned": Planned("p", "cpu", 1, 4 * GB, 1 * GB, 3 * GB)},
        "memory",
        Level.FAILURE,
        "raise model_budget_bytes",
    ),
    (
        {"planned": Planned("p", "cuda", 1, 0, 1, None, "no CUDA backend")},
        "memory",
        Level.FAILURE,
        "no CUDA backend",
    ),
    ({"gpus": (), "cluster": Cluster("")}, "memory", Level.FAILURE, "no GPU here"),
    (
        {
            "gpus": (),
            "cluster": replace(HEALTHY.cluster, gpus=1),
            "planned": replace(HEALTHY.planned, replicas=2),
        },
        "memory",
        Level.FAILURE,
        "1 in the cluster, 2 are needed",
    ),
    (
        {"gpus": (), "cluster": replace(HEALTHY.cluster, gpus=4)},
        "memory",
        Level.NOTE,
        "no GPU here, 4 in the cluster",
    ),
    ({"shared_memory": Space("/dev/shm", 64 << 20, 64 << 20)}, "shared memory", Level.WARNING, "--shm-size"),
    ({"ray_folder": Space("/tmp", 100 * GB, 4 * GB)}, "Ray's folder", Level.FAILURE, "95 %"),
    ({"ray_folder": Space("/tmp", 20 * GB, 4 * GB)}, "Ray's folder", Level.WARNING, "RAY_TMPDIR"),
    ({"files": FileLimits(1024, 1048576)}, "open files", Level.WARNING, "ulimit -n 65536"),
    ({"files": FileLimits(4096, 4096)}, "open files", Level.NOTE, "limits.conf"),
    (
        {"ports": (Port(6379, "Ray's head", True),), "cluster": Cluster("")},
        "ports",
        Level.WARNING,
        "6379 (Ray's head)",
    ),
    (
        {"cluster": Cluster("h:1", "AuthenticationError: no token", refused=True)},
        "cluster",
        Level.FAILURE,
        "auth_token",
    ),
    ({"cluster": Cluster("h:1", "timed out")}, "cluster", Level.FAILURE, "RAY_ADDRESS"),
    ({"cluster": Cluster("h:1", "no. At length", listens=True)}, "cluster", Level.FAILURE, "another token"),
    ({"cluster": replace(HEALTHY.cluster, token=False)}, "cluster", Level.WARNING, "RAY_AUTH_MODE=token"),
    ({"cluster": replace(HEALTHY.cluster, gpus_here=0)}, "Ray's GPUs", Level.WARNING, "Ray knows 0 GPUs"),
    ({"cluster": replace(HEALTHY.cluster, gpus_here=4)}, "Ray's GPUs", Level.FAILURE, "Ray knows 4 GPUs"),
]


@pytest.mark.parametrize(("changed", "name", "level", "words"), SICK, ids=[f"{s[1]}: {s[3]}" for s in SICK])
def test_what_is_wrong_is_found_by_its_check(
    changed: dict[str, Any], name: str, level: Level, words: str
) -> None:
    finding = check(replace(HEALTHY, **changed))[name]
    assert finding.level is level
    assert words in f"{finding.found} {finding.todo}"
    assert finding.todo or level is not Level.FAILURE, "what stops pools comes with what to do"


def test_every_check_says_what_to_do_about_something() -> None:
    assert {name for _, name, _, _ in SICK} == set(CHECKS)


@pytest.mark.parametrize("name", list(Facts.__dataclass_fields__))
def test_no_check_breaks_on_a_fact_that_is_not_known(name: str) -> None:
    findings = check(replace(HEALTHY, **{name: Unknown("the probe hung")}))
    assert findings.keys() == CHECKS.keys()
    # A machine whose GPUs are all right is not asked for these two.
    asked = name not in ("nvcc", "memory")
    assert any(finding.level is not Level.OK for finding in findings.values()) == asked


@pytest.mark.parametrize(
    ("required", "installed", "expected"),
    [
        (">=2.50", "2.9.1", False),
        (">=2.50", "2.50", True),
        (">=5,<6", "6.0.0", False),
        ("<6,>=5", "5.24.0", True),
        ("==2.13.0", "2.13.0+cpu", True),
        ("==2.13.0", "2.13.1", False),
        ("", "1.0", True),
    ],
)
def test_versions_compare_as_numbers(required: str, installed: str, expected: bool) -> None:
    assert fits(Package("p", required, installed)) is expected


def test_the_text_names_every_check_and_json_carries_the_facts() -> None:
    facts = replace(HEALTHY, tested=Unknown("it crashed"))
    findings = check(facts)
    text = as_text(findings)
    assert all(name in text for name in CHECKS)
    assert text.splitlines()[-1] == f"{len(CHECKS) - 1} ok, 1 failure"
    found = json.loads(json.dumps(as_json(findings, facts)))
    assert found["healthy"] is False
    assert found["checks"]["model"]["level"] == "failure"
    assert found["facts"]["tested"] == {"reason": "it crashed"}
    assert found["facts"]["gpus"][0]["name"] == "NVIDIA H200"


def test_a_probe_that_hangs_is_left_behind_and_costs_no_other() -> None:
    never = threading.Event()
    names = Facts.__dataclass_fields__
    probes: dict[str, Probe] = dict.fromkeys(names, Probe(lambda: "found"))
    probes["cpu"] = Probe(lambda: never.wait(), limit_s=-1.9)  # waited for 0.1 s
    probes["nvcc"] = Probe(lambda: 1 / 0)
    began_s = time.monotonic()
    facts = gather(probes)
    assert time.monotonic() - began_s < 5.0
    assert isinstance(facts.cpu, Unknown)
    assert facts.nvcc == Unknown("ZeroDivisionError: division by zero")
    assert facts.python == "found"
    never.set()


def test_a_command_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    script = f"sleep 300 & echo $! > {note}; wait"
    began_s = time.monotonic()
    with pytest.raises(ProbeFailed, match="sh did not end in 0 s"):
        run_command(["sh", "-c", script], limit_s=0.4)
    assert time.monotonic() - began_s < 5.0
    deadline_s = time.monotonic() + 10.0
    while _runs(int(note.read_text())) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not _runs(int(note.read_text()))


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_a_command_that_fails_says_what_it_said() -> None:
    with pytest.raises(ProbeFailed, match="sh ended with 3 and said: no devices"):
        run_command(["sh", "-c", "echo first; echo no devices >&2; exit 3"])


def smi(folder: Path, body: str) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)


def probes(monkeypatch: pytest.MonkeyPatch, folder: Path) -> dict[str, Probe]:
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return probes_of(PoolConfig(model=default_model_path(), max_seq_len=256), "it", None)


def test_gpus_are_read_as_the_driver_lists_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    smi(
        tmp_path,
        """case "$1" in
        --query-gpu=*) echo "0, GPU-a, NVIDIA H200, 9.0, 580.82.07, 512, 143771" ;;
        *) echo "GPU-a, 17, /opt/a, b/python, 2048"; echo "GPU-a, 18, ray::Replica, [N/A]" ;;
        esac""",
    )
    found = probes(monkeypatch, tmp_path)
    mib = 1 << 20
    assert found["gpus"].find() == (
        DriverGpu(0, "GPU-a", "NVIDIA H200", (9, 0), "580.82.07", 512 * mib, 143771 * mib),
    )
    assert found["gpu_processes"].find() == (
        DriverProcess("GPU-a", 17, "/opt/a,b/python", 2048 * mib),
        DriverProcess("GPU-a", 18, "ray::Replica", None),
    )


def test_a_driver_that_fails_is_not_a_machine_without_gpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    smi(tmp_path, "echo 'NVIDIA-SMI has failed'; exit 9")
    with pytest.raises(ProbeFailed, match="NVIDIA-SMI has failed"):
        probes(monkeypatch, tmp_path)["gpus"].find()


def test_the_planned_memory_is_the_engines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    planned = probes(monkeypatch, tmp_path)["planned"].find()
    threads = len(os.sched_getaffinity(0))
    assert planned.model == plan(default_model_path(), 256, device="cpu", threads=threads).total
    assert planned.prefixes == 1 << 30


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    code = "from tinyloop.cluster.guardian import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, "doctor", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_command_fails_where_the_named_cluster_is_not_there() -> None:
    # Port 9 of this machine: nobody listens there, and no name has to be looked up.
    done = command("--json", RAY_ADDRESS="127.0.0.1:9")
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert found["checks"]["cluster"]["level"] == "failure"
    assert found["checks"]["model"]["level"] == "ok", found["checks"]["model"]
    assert found["facts"]["build"]["without_cuda"] is not None


def test_the_command_names_a_wrong_key_of_a_configuration(tmp_path: Path) -> None:
    path = tmp_path / "pool.toml"
    path.write_text("replica = 2\n")
    done = command(str(path))
    assert done.returncode == 2
    assert "did you mean 'replicas'" in done.stderr
