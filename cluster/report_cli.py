"""The commands that look at a job's folder: report, compare."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from .errors import UsageError
from .whole_option import real

COMPARE_EPILOG = (
    "Exit codes: 0 equal, or nothing was asked for, or within --max-drop; 2 usage; 3 beyond --max-drop or, "
    "with "
    "--strict, not equal. Rows that have no result in B, or no accuracy at all, are not within --max-drop."
)
JobFolder = Annotated[Path, typer.Argument(help="Output folder of a job.")]


def add_commands(app: typer.Typer) -> None:
    """Put these commands into the command line."""
    app.command()(report)
    app.command(epilog=COMPARE_EPILOG)(compare)


def names_a_job(argument: str) -> bool:
    """Whether an argument of status is a job's folder and not the name of a pool."""
    from .job_status import names_a_job as is_folder

    return is_folder(argument)


def show_job(folder: Path, *, as_json: bool) -> None:
    """Print how far the job in a folder is. Raises: UsageError if there is none."""
    from .job_status import job_status, status_lines

    status = job_status(folder)
    if as_json:
        typer.echo(json.dumps(status.as_json()))
    else:
        for line in status_lines(status):
            typer.echo(line)


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


def compare(
    a: Annotated[Path, typer.Argument(help="Output folder of a job: what B is held against.")],
    b: Annotated[Path, typer.Argument(help="Output folder of another.")],
    max_drop: Annotated[
        float | None,
        real(help="How far accuracies of B may be below A's; 0.01 is one in 100."),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Not one row may differ.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="HTML page to write.")] = None,
) -> None:
    """Hold two runs against each other row by row: accuracy, log-probabilities, choices, settings."""
    import time

    from .compare.page import compare_page
    from .compare.runs import compare_folders
    from .compare.text import lines
    from .compare.verdict import BEYOND, objections
    from .durable import write_durably
    from .report.markup import shown

    if max_drop is not None and not 0.0 <= max_drop <= 1.0:
        raise UsageError(f"--max-drop is {max_drop}: give a difference of accuracies from 0 to 1")
    compared = compare_folders(a, b)
    found = objections(compared.rows, max_drop=max_drop, strict=strict)
    content = compared.as_json() | {"objections": found}
    if output is not None:
        write_durably(output, [compare_page(content, found, time.time()).encode()])
    if as_json:
        typer.echo(json.dumps(content))
    else:
        for line in lines(content, found):
            typer.echo(shown(line))
    if found:
        raise typer.Exit(BEYOND)
