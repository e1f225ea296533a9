"""The commands of who looks after pools and machines: top, doctor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .errors import UsageError
from .pool_cli import DEFAULT_NAME, Address, on_ray
from .whole_option import whole

if TYPE_CHECKING:
    from .config import PoolConfig


def add_commands(app: typer.Typer) -> None:
    """Put these commands into the command line."""
    for command in (top, doctor):
        app.command()(command)


def top(
    pool: Annotated[str, typer.Option(help="Name of the pool.")] = DEFAULT_NAME,
    once: Annotated[bool, typer.Option("--once", help="Print once, with the rates of a period.")] = False,
    period: Annotated[int, whole(1, 60, help="Seconds between two looks.")] = 1,
    address: Address = None,
) -> None:
    """Show live what a named pool does: replicas, rates, hit rate, memory, clients. Ctrl-C ends it."""
    from .watching import console_for, show_once, watch

    console = console_for()
    if not once and not console.is_terminal:
        raise UsageError("the live view needs a terminal: use --once in scripts and pipes")
    with on_ray(address, pool):
        from .fleet import PoolError
        from .named_pool import ask_status

        if once:
            show_once(pool, lambda: ask_status(pool), console, period_s=period)
        else:
            watch(pool, lambda: ask_status(pool), console, failure=PoolError, period_s=period)


def doctor(
    config: Annotated[
        Path | None,
        typer.Argument(help="TOML file of a pool that is to fit; default: the shipped model's."),
    ] = None,
    address: Address = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object with all facts.")] = False,
) -> None:
    """Check this machine and say what to do. Exit code 1 if something stops pools, else 0.

    Ends within about a minute whatever hangs, and needs no network beside a Ray cluster that is named.
    """
    from .doctor.gathering import gather
    from .doctor.probes import probes_of
    from .doctor.report import as_json as report_json
    from .doctor.report import as_text, check, is_healthy

    settings, source = _planned_config(config)
    facts = gather(probes_of(settings, source, address or settings.ray_address))
    findings = check(facts)
    typer.echo(json.dumps(report_json(findings, facts)) if as_json else as_text(findings))
    raise typer.Exit(0 if is_healthy(findings) else 1)


def _planned_config(path: Path | None) -> tuple[PoolConfig, str]:
    """The pool whose memory is checked, and what to call it."""
    from ..native.format import read_header
    from ..native.models import default_model_path
    from .config import PoolConfig
    from .config_file import read_config

    if path is not None:
        return read_config(path), str(path)
    model = default_model_path()
    positions = int(str(read_header(model).descriptor["max_positions"]))
    return PoolConfig(model=model, max_seq_len=min(positions, 2048)), "the shipped model"
