"""All checks, and their findings as text and as JSON. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from . import clusters, machine, software
from .facts import Facts
from .findings import Finding, Level

CHECKS: dict[str, Callable[[Facts], Finding]] = {
    "python": software.check_python,
    "packages": software.check_packages,
    "oracles": software.check_oracles,
    "processor": software.check_cpu,
    "model": software.check_model,
    "CUDA": software.check_cuda,
    "cuBLASLt": software.check_cublaslt,
    "GPU users": machine.check_gpu_users,
    "memory": machine.check_memory,
    "shared memory": machine.check_shared_memory,
    "Ray's folder": machine.check_ray_folder,
    "open files": machine.check_files,
    "ports": clusters.check_ports,
    "cluster": clusters.check_cluster,
    "Ray's GPUs": clusters.check_ray_gpus,
}


def check(facts: Facts) -> dict[str, Finding]:
    """Every check by its name, in the order in which to read them."""
    return {name: run(facts) for name, run in CHECKS.items()}


def is_healthy(findings: Mapping[str, Finding]) -> bool:
    """Whether nothing was found that stops pools."""
    return all(finding.level is not Level.FAILURE for finding in findings.values())


def as_text(findings: Mapping[str, Finding]) -> str:
    """A line a check, what to do below it, and a last line that counts."""
    width = max(map(len, findings))
    lines = []
    for name, finding in findings.items():
        lines.append(f"{finding.level:<8}{name:<{width}}  {finding.found}")
        if finding.todo:
            lines.append(f"{'':<8}{'':<{width}}  -> {finding.todo}")
    counts = [(level, sum(f.level is level for f in findings.values())) for level in Level]
    lines.append(", ".join(f"{count} {level}" for level, count in counts if count))
    return "\n".join(lines)


def as_json(findings: Mapping[str, Finding], facts: Facts) -> dict[str, Any]:
    """The findings and the facts that they rest on; a fact that is not known is {"reason": why}."""
    return {
        "healthy": is_healthy(findings),
        "checks": {name: asdict(finding) for name, finding in findings.items()},
        "facts": asdict(facts),
    }
