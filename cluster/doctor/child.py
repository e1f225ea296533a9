"""Probes that may hang or crash: each runs in a process of its own and prints one line of JSON.

`python -m tinyloop.cluster.doctor.child build | test | cluster ADDRESS`. Whoever started it ends it in time.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CUBLASLT_NAMES = ("libcublasLt.so.13", "libcublasLt.so.12")


def probe_build() -> dict[str, Any]:
    """What the compiled engine can use."""
    from ...native import LoadError, devices, plan
    from ...native.models import default_model_path

    try:
        # A GPU need not be there for a plan, but the build must have its backend.
        plan(default_model_path(), 256, device="cuda")
        without_cuda = ""
    except LoadError as error:
        without_cuda = str(error)
    found = [{"device": d.device, "name": d.name, "total": d.total_bytes} for d in devices()]
    return {"without_cuda": without_cuda, "cublaslt": _cublaslt(), "devices": found}


def _cublaslt() -> str:
    """Where the engine finds it, in its own order: the variable, the wheel, the loader's path."""
    from ...native.devices import wheel_folder

    named = os.environ.get("TINYLOOP_CUBLASLT")
    if named:
        return named if _opens(named) else ""
    folder = wheel_folder()
    files = sorted(map(str, Path(folder).glob("nvidia/*/lib/libcublasLt.so.*"))) if folder else []
    return next((name for name in (*files, *CUBLASLT_NAMES) if _opens(name)), "")


def _opens(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def probe_test() -> dict[str, Any]:
    """The shipped model on the CPU, by the test that replicas must pass. Raises what that raises."""
    from ...native import load_model
    from ...native.models import default_model_path
    from ...workers.self_test import self_test

    began_s = time.monotonic()
    model: Any = load_model(default_model_path(), max_seq_len=64, device="cpu")
    self_test(model)
    numerics_id = model.numerics_id
    model.close()
    return {"numerics_id": numerics_id, "seconds": time.monotonic() - began_s}


def probe_cluster(address: str) -> dict[str, Any]:
    """Join a Ray cluster as every command does, and leave it."""
    import ray

    from ..cluster_token import TokenRefused
    from ..fleet import PoolError
    from ..session import join

    try:
        join(address)
    except TokenRefused as error:
        return {"address": address, "error": str(error), "refused": True}
    except PoolError as error:
        reason = error.__cause__ or error
        return {"address": address, "error": f"{type(reason).__name__}: {reason}"}
    here = ray.get_runtime_context().get_node_id()
    nodes = [node for node in ray.nodes() if node["Alive"]]
    gpus_here = next((int(n["Resources"].get("GPU", 0)) for n in nodes if n["NodeID"] == here), None)
    return {
        "address": address,
        "token": _asks_for_tokens(),
        "version": ray.__version__,
        "nodes": len(nodes),
        "gpus": int(ray.cluster_resources().get("GPU", 0)),
        "gpus_here": gpus_here,
    }


def _asks_for_tokens() -> bool:
    try:
        from ray._private.authentication.authentication_utils import is_token_auth_enabled
    except ImportError:  # an older Ray knows no tokens
        return False
    return bool(is_token_auth_enabled())


PROBES: dict[str, Callable[..., dict[str, Any]]] = {
    "build": probe_build,
    "test": probe_test,
    "cluster": probe_cluster,
}


def main() -> None:
    """Run the named probe; what it raises is printed as an error, so that its parent can say so."""
    try:
        answer = PROBES[sys.argv[1]](*sys.argv[2:])
    except Exception as error:
        # Whatever is wrong with the machine is what the parent wants to know.
        answer = {"failed": f"{type(error).__name__}: {error}"}
    # On a line of its own: libraries print to standard output too.
    print("\n" + json.dumps(answer), flush=True)
    os._exit(0)  # Ray's own shutdown may wait for a cluster that does not answer


if __name__ == "__main__":
    main()
