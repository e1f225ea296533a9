"""Checks of what is installed: the interpreter, packages, the engine and what it can use. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

from .facts import DriverGpu, Facts, Package, Unknown
from .findings import Finding, Level, unknown

LEAST_PYTHON = (3, 11)
# Ampere: what the CUDA backend is compiled for.
LEAST_CAPABILITY = (8, 0)
HOPPER = (9, 0)
REQUIREMENT = re.compile(r"(?P<sign>>=|<|==)(?P<version>[\d.]+)")


def check_python(facts: Facts) -> Finding:
    """Is the interpreter new enough?"""
    if isinstance(facts.python, Unknown):
        return unknown(facts.python, "")
    if release(facts.python)[:2] < LEAST_PYTHON:
        return Finding(
            Level.FAILURE, f"Python {facts.python}, needed is 3.11 or later", "install a later Python"
        )
    return Finding(Level.OK, f"Python {facts.python}")


def check_packages(facts: Facts) -> Finding:
    """Are the packages that a run needs installed, in versions that fit?"""
    if isinstance(facts.packages, Unknown):
        return unknown(facts.packages, "install the package: pip install .", Level.FAILURE)
    wrong = [package for package in facts.packages if not fits(package)]
    if wrong:
        return Finding(Level.FAILURE, _differences(wrong), "install what fits: pip install --upgrade .")
    ray = next((p.installed for p in facts.packages if p.name == "ray"), "not asked for")
    return Finding(Level.OK, f"{len(facts.packages)} packages fit, Ray {ray}")


def check_oracles(facts: Facts) -> Finding:
    """The tests compare with these; a run needs neither."""
    if isinstance(facts.oracles, Unknown):
        return unknown(facts.oracles, "", Level.NOTE)
    wrong = [package for package in facts.oracles if package.installed and not fits(package)]
    if wrong:
        return Finding(Level.NOTE, _differences(wrong), "for the tests alone: pip install '.[test]'")
    there = [f"{p.name} {p.installed}" for p in facts.oracles if p.installed]
    return Finding(Level.OK, f"{', '.join(there) or 'not installed'}, needed by tests alone")


def _differences(packages: Iterable[Package]) -> str:
    return "; ".join(
        f"{p.name} {p.installed or 'is missing'}, asked for is {p.required or 'any'}" for p in packages
    )


def fits(package: Package) -> bool:
    """Whether a version meets a requirement such as >=5,<6. Raises ValueError for one that is not known."""
    if not package.installed:
        return False
    have = release(package.installed)
    for part in filter(None, package.required.split(",")):
        match = REQUIREMENT.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"cannot read the requirement {package.name}{package.required}")
        other = release(match["version"])
        meets = {">=": have >= other, "<": have < other, "==": have[: len(other)] == other}
        if not meets[match["sign"]]:
            return False
    return True


def release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: (2, 13, 0) of 2.13.0+cpu."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def check_cpu(facts: Facts) -> Finding:
    """Which of the engine's kernels does this processor run?"""
    if isinstance(facts.cpu, Unknown):
        return unknown(facts.cpu, "")
    flags = set(facts.cpu.flags)
    named = f"{facts.cpu.model}, {facts.cpu.cores} cores"
    if not {"avx2", "fma", "f16c"} <= flags:
        return Finding(
            Level.WARNING, f"{named}, no AVX2", "expect a tenth of the speed, or use another machine or a GPU"
        )
    wide = {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= flags
    amx = wide and {"amx_tile", "amx_bf16"} <= flags
    hint = "--numeric bf16 scores faster here" if amx else ""
    return Finding(
        Level.OK, f"{named}, {'AVX-512' if wide else 'AVX2'}{' and AMX' if amx else ''} kernels", hint
    )


def check_model(facts: Facts) -> Finding:
    """Does the engine load the shipped model, and does that agree with itself?"""
    if isinstance(facts.tested, Unknown):
        return Finding(
            Level.FAILURE,
            f"the shipped model did not pass its self-test: {facts.tested.reason}",
            "install again (pip install --force-reinstall .); if it stays, report it with this text",
        )
    return Finding(Level.OK, f"passed in {facts.tested.seconds:.1f} s, {facts.tested.numerics_id}")


def check_cuda(facts: Facts) -> Finding:
    """Can the engine use the GPUs that the driver lists?"""
    if isinstance(facts.gpus, Unknown):
        return unknown(
            facts.gpus, "run nvidia-smi; a driver that hangs needs a restart of the machine", Level.FAILURE
        )
    if not facts.gpus:
        return Finding(Level.OK, "no GPU: replicas run on the CPU")
    if isinstance(facts.build, Unknown):
        return unknown(facts.build, "", Level.FAILURE)
    named = _named_gpus(facts.gpus)
    if facts.build.without_cuda:
        nvcc = facts.nvcc if isinstance(facts.nvcc, str) and facts.nvcc else ""
        first = f"nvcc {nvcc} is here" if nvcc else "install the CUDA toolkit and put nvcc on the path"
        return Finding(
            Level.WARNING,
            f"{named}, but the engine was built without CUDA",
            f"{first}: then CMAKE_ARGS=-DTINYLOOP_CUDA=ON pip install --force-reinstall .",
        )
    old = [gpu for gpu in facts.gpus if gpu.capability < LEAST_CAPABILITY]
    if len(old) == len(facts.gpus):
        return Finding(
            Level.WARNING, f"{named}: capability {_dotted(old[0])}, the engine needs 8.0", "use --device cpu"
        )
    usable = len(facts.gpus) - len(old)
    if len(facts.build.devices) < usable:
        return Finding(
            Level.FAILURE,
            f"{named}: the driver lists {usable} that fit, the engine can use {len(facts.build.devices)}",
            "see CUDA_VISIBLE_DEVICES; update the driver to the CUDA version that the engine was built with",
        )
    return Finding(Level.OK, f"{named}: the engine can use {len(facts.build.devices)}")


def check_cublaslt(facts: Facts) -> Finding:
    """Is the library there that makes Hopper fast?"""
    if isinstance(facts.build, Unknown) or isinstance(facts.gpus, Unknown):
        return Finding(Level.NOTE, "not looked for: the build or the GPUs could not be found out")
    if facts.build.without_cuda or not facts.gpus:
        return Finding(Level.OK, "not needed here")
    if facts.build.cublaslt:
        return Finding(Level.OK, facts.build.cublaslt)
    if all(gpu.capability[0] != HOPPER[0] for gpu in facts.gpus):
        return Finding(Level.OK, "not found, and used on Hopper alone")
    return Finding(
        Level.WARNING,
        "not found: the engine's own kernels do its work, slower and with the same bits",
        "pip install nvidia-cublas, or name the file in TINYLOOP_CUBLASLT",
    )


def _named_gpus(gpus: tuple[DriverGpu, ...]) -> str:
    names = [gpu.name for gpu in gpus]
    counted = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    return f"{counted}, driver {gpus[0].driver}"


def _dotted(gpu: DriverGpu) -> str:
    return ".".join(map(str, gpu.capability))
