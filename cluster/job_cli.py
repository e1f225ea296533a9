"""What the commands of all kinds of jobs share: the end of their --help, and running one on a pool."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import typer

from .errors import EXIT_CODE_MEANINGS, EXIT_CODE_NOTE
from .settings import JobSettings, PoolRequest

if TYPE_CHECKING:
    from .kinds import Backend, Kind
    from .pool_backend import ChosenModel


def epilog(title: str, policies: Mapping[str, str]) -> str:
    """Every policy and every exit code, as they end a command's --help."""
    return "\n\n".join(
        [
            title,
            "\b\n" + "\n".join(f"{name}: {text}" for name, text in policies.items()),
            "Exit codes:",
            "\b\n" + "\n".join(f"{code:3d}  {text}" for code, text in EXIT_CODE_MEANINGS.items()),
            EXIT_CODE_NOTE,
        ]
    )


def run_on_pool(settings: JobSettings, kind_of: Callable[[ChosenModel], Kind], request: PoolRequest) -> int:
    """Run the job on a pool of its own or a named one; print what it came to. Returns the exit code.

    kind_of: the kind of work with a model that was found fit; raises UsageError if it does not fit the job.
    """
    # Set before tokenizers starts its threads: it otherwise warns when Ray starts processes.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    from .closing import closing_lines
    from .guardian import announce
    from .named_request import of_named_pool
    from .pool_backend import choose_model, open_pool
    from .progress import display_for
    from .running import run_job

    request = of_named_pool(request)
    chosen = choose_model(settings, request)
    kind = kind_of(chosen)
    for warning in chosen.warnings:
        typer.echo(f"warning: {warning}", err=True)

    def opened() -> AbstractContextManager[Backend]:
        # By now the folders are this job's and locked.
        announce(settings.output, settings.work_dir or settings.output)
        return open_pool(chosen, request)

    summary = run_job(settings, kind, chosen.choice, opened, display_for())
    for line in closing_lines(summary, settings.output):
        typer.echo(line)
    return int(summary["exit_code"])
