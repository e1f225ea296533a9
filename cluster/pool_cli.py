"""The commands of named pools: up, status, scale, down."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from .errors import InfrastructureError, UsageError
from .report_cli import names_a_job, show_job
from .whole_option import whole

DEFAULT_NAME = "default"
SCALE_POLL_S = 0.2

Name = Annotated[str, typer.Argument(help="Name of the pool.")]
Address = Annotated[
    str | None, typer.Option(help="Ray cluster; default: RAY_ADDRESS, else the one of this machine.")
]


def add_commands(app: typer.Typer) -> None:
    """Put the commands of named pools into the command line."""
    for command in (up, status, scale, down):
        app.command()(command)


def up(
    config: Annotated[Path, typer.Argument(help="TOML file with the keys of a pool.")],
    name: Annotated[str, typer.Option(help="Name of the pool.")] = DEFAULT_NAME,
    address: Address = None,
) -> None:
    """Start a pool that stays: jobs and scripts use it by name, whatever dies is replaced."""
    from .config_file import read_config

    settings = read_config(config)
    with on_ray(address or settings.ray_address, name):
        from .named_pool import ask_status, raise_pool
        from .pool_view import pool_line

        fresh = raise_pool(settings, name)
        typer.echo(pool_line(name, ask_status(name)))
        if not fresh:
            typer.echo(f"pool {name} was up already, with the same configuration")


def status(
    name: Annotated[
        str | None,
        typer.Argument(help="Name of a pool, or the output folder of a job; default: all pools."),
    ] = None,
    address: Address = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, or one a pool.")] = False,
) -> None:
    """Say what a pool's replicas and clients do, which pools there are, or how far a job is.

    An argument with a slash, and one that is a folder with a job in it, is a job's folder.
    """
    if name is not None and names_a_job(name):
        show_job(Path(name), as_json=as_json)
        return
    with on_ray(address, name or DEFAULT_NAME):
        from .named_pool import ask_status
        from .pool_view import pool_line, pool_lines
        from .registry import pool_names

        names = [name] if name is not None else pool_names()
        if not names:
            typer.echo("no pool is up on this cluster")
        for each in names:
            body = ask_status(each)
            if as_json:
                typer.echo(json.dumps({"pool": each, **body}))
            else:
                for line in pool_lines(each, body) if name is not None else [pool_line(each, body)]:
                    typer.echo(line)


def scale(
    replicas: Annotated[int, whole(1, 1024, help="Replicas to have from now on.")],
    name: Name = DEFAULT_NAME,
    wait: Annotated[bool, typer.Option(help="Wait until it is so.")] = True,
    address: Address = None,
) -> None:
    """Give a running pool more or fewer replicas; those that leave finish what they have begun."""
    with on_ray(address, name):
        from .named_pool import ask_scale, ask_status
        from .pool_view import pool_line

        timeout_s = ask_scale(name, replicas)
        if wait:
            _wait_for(name, replicas, timeout_s)
        typer.echo(pool_line(name, ask_status(name)))


def down(name: Name = DEFAULT_NAME, address: Address = None) -> None:
    """End a pool and every process of it, also one whose router is dead."""
    with on_ray(address, name):
        from .registry import reap

        typer.echo(f"pool {name} is down: {reap(name)} processes ended")


def _wait_for(name: str, replicas: int, timeout_s: float) -> None:
    from .named_pool import ask_status

    deadline_s = time.monotonic() + timeout_s
    while True:
        body = ask_status(name)
        if [slot["state"] for slot in body["slots"]] == ["up"] * replicas:
            return
        failed = [slot for slot in body["slots"] if slot["state"] == "given up"]
        if failed or time.monotonic() > deadline_s:
            reason = failed[0]["trouble"] if failed else f"not so after {timeout_s} s"
            raise InfrastructureError(f"pool {name!r} does not have {replicas} replicas: {reason}")
        time.sleep(SCALE_POLL_S)


@contextmanager
def on_ray(address: str | None, name: str) -> Iterator[Any]:
    """Join the cluster; what fails in there ends the command with the right exit code."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    from .fleet import PoolError
    from .named_pool import PoolDiffers
    from .registry import NoSuchPool
    from .session import join
    from .spec import SpecError, check_name

    try:
        check_name(name)
        join(address)
        yield
    except (NoSuchPool, PoolDiffers, SpecError) as error:
        raise UsageError(str(error)) from error
    except PoolError as error:
        raise InfrastructureError(str(error)) from error
