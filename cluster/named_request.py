"""A job on a pool that is up: what the pool has decided takes the place of options."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path

from .errors import InfrastructureError, UsageError
from .settings import PoolRequest


def of_named_pool(request: PoolRequest) -> PoolRequest:
    """What a named pool was started with, in place of options; the request itself if it names none.

    Raises: UsageError if there is no such pool, or options say what the pool has decided.
    """
    if request.name is None:
        return request
    refuse_decided(request)
    print(f"joining pool {request.name}", file=sys.stderr, flush=True)
    return as_decided(request)


def refuse_decided(request: PoolRequest) -> None:
    """Raises: UsageError if a request for a named pool says what that pool has decided."""
    defaults = PoolRequest(name=request.name, model=request.model)
    names = [field.name for field in fields(PoolRequest)]
    given = [name for name in names if getattr(request, name) != getattr(defaults, name)]
    if given:
        named = ", ".join("--" + name.replace("_", "-") for name in given)
        raise UsageError(f"--pool {request.name} and {named}: the pool has decided that: leave it out")


def as_decided(request: PoolRequest, ray_address: str | None = None) -> PoolRequest:
    """The request with everything as the named pool has it. Raises as of_named_pool."""
    defaults = PoolRequest()
    from .fleet import PoolError
    from .registry import NoSuchPool, find_router, read_spec
    from .session import join
    from .spec import SpecError, check_name

    try:
        name = check_name(str(request.name))
        join(ray_address)
        find_router(name)
        spec = read_spec(name)
    except (NoSuchPool, SpecError) as error:
        raise UsageError(str(error)) from error
    except PoolError as error:
        raise InfrastructureError(str(error)) from error
    if spec is None:
        raise UsageError(f"pool {request.name!r} is being taken down")
    config = spec.config
    return PoolRequest(
        model=request.model or Path(config["model"]),
        replicas=spec.replicas,
        max_seq_len=config["max_seq_len"],
        kv=config["cache_mode"] or defaults.kv,
        threads=spec.threads,
        numeric=config["numeric_mode"] or defaults.numeric,
        device=config["device"],
        name=request.name,
    )
