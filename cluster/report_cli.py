"""The commands that look at a job's folder: report, compare."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

JobFolder = Annotated[Path, typer.Argument(help="Output folder of a job.")]


def add_commands(app: typer.Typer) -> None:
    """Put these commands into the command line."""
    for command in (report,):
        app.command()(command)


def report(
    folder: JobFolder,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Page to write; default: report.html in the folder.")
    ] = None,
) -> None:
    """Make one self-contained HTML page about a job: finished, stopped or still running."""
    from .durable import write_durably
    from .report.writing import REPORT_NAME, make_report

    page = make_report(folder)
    path = output or folder / REPORT_NAME
    write_durably(path, [page.encode()])
    typer.echo(f"wrote {path} ({len(page.encode()) / 1e3:.0f} kB)")
