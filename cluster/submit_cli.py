"""tinyloop submit: a job on a Ray cluster through its job server, with the exit code that the job had."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .errors import EXIT_CODE_NOTE, ExitCode, UsageError
from .interrupts import SIGNALS

if TYPE_CHECKING:
    from .following import Wishes
    from .job_server import RayJobServer
    from .submission import Command
    from .submitted import JobView

EPILOG = "\n\n".join(
    [
        "The exit code is the job's own, as tinyloop score --help lists them.",
        EXIT_CODE_NOTE,
        "Ctrl-C stops the job in order, a second one leaves it to that. SIGTERM leaves at once, and the job "
        "goes on.",
    ]
)


def add_commands(app: typer.Typer) -> None:
    """Put submit into the command line."""
    app.command(epilog=EPILOG)(submit)


def submit(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- score|generate ARGS", help="The job, as it would be run here."),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            help="Job server (http://host:8265) or Ray address; default: RAY_ADDRESS, else this machine's."
        ),
    ] = None,
    working_dir: Annotated[
        Path | None, typer.Option(help="Folder of small files that the job reads: a copy is sent.")
    ] = None,
    runtime_env: Annotated[
        str | None, typer.Option(help="Ray runtime environment: a JSON object, or a YAML or JSON file.")
    ] = None,
    wait: Annotated[bool, typer.Option(help="Follow the job and return its exit code.")] = True,
    submission_id: Annotated[
        str | None,
        typer.Option(
            help="Run this once: a job of this id is followed, never run again, also if it is over."
        ),
    ] = None,
) -> None:
    """Run a job on a Ray cluster: its log here, its exit code the job's own.

    Without --submission-id the id is made from the command: while such a job runs, the same command follows
    it; after its end the command starts another.
    """
    from .job_server import RayJobServer

    if not command:
        if submission_id is None:
            raise UsageError(
                "nothing to submit: write it after --: tinyloop submit -- score -i FILE -o FOLDER"
            )
        server = RayJobServer(address)
        if server.look(submission_id) is None:
            raise UsageError(f"the cluster at {server.address} knows no job {submission_id!r}")
        job = submission_id
    else:
        job, server = _submitted(read_command(command), address, working_dir, runtime_env, submission_id)
    if not wait:
        _note(f"follow it with: tinyloop submit --submission-id {job}")
        typer.echo(job)
        return
    raise typer.Exit(int(_follow(server, job)))


def read_command(words: Sequence[str]) -> Command:
    """The job's command line, read by the parser that will read it on the cluster.

    Raises: UsageError if it is no job; the parser's own errors.
    """
    from .cli import app
    from .submission import KINDS, Command

    commands: dict[str, Any] = getattr(typer.main.get_command(app), "commands", {})
    kinds = [kind for kind in KINDS if kind in commands]
    if words[0] not in kinds:
        raise UsageError(f"cannot submit {words[0]!r}: give one of {', '.join(kinds)} after --")
    given = commands[words[0]].make_context(f"tinyloop {words[0]}", list(words[1:])).params
    inputs = [("-i", str(path)) for path in given["input"]]
    inputs += [("--model", str(given["model"]))] if given.get("model") else []
    outputs = [("-o", str(given["output"]))]
    outputs += [("--work-dir", str(given["work_dir"]))] if given.get("work_dir") else []
    return Command(words[0], tuple(words[1:]), tuple(inputs), tuple(outputs))


def _submitted(
    command: Command,
    address: str | None,
    working_dir: Path | None,
    runtime_env: str | None,
    submission_id: str | None,
) -> tuple[str, RayJobServer]:
    """Submit the command, or find the job that it has become already. Returns its id and its server."""
    from . import submission as plan
    from .job_server import RayJobServer, files_to_upload, upload_limit_bytes

    folder = None if working_dir is None else working_dir.resolve()
    if folder is not None and not folder.is_dir():
        raise UsageError(f"--working-dir {str(working_dir)!r} is not a folder")
    plan.refuse_paths(command, folder)
    environment = plan.complete_runtime_env(plan.read_runtime_env(runtime_env), folder)
    entrypoint = command.entrypoint(environment)
    if folder is not None:
        files = files_to_upload(folder, environment["excludes"])
        if warning := plan.refuse_size(folder, files, upload_limit_bytes()):
            _note(f"warning: {warning}")
    server = RayJobServer(address)
    if unchecked := plan.unchecked_paths(command):
        _note(unchecked)
    if submission_id is not None:
        return _submit_once(server, submission_id, entrypoint, environment), server
    return _submit_or_join(server, plan.id_of(entrypoint, environment), entrypoint, environment), server


def _submit_once(server: RayJobServer, job: str, entrypoint: str, environment: dict[str, Any]) -> str:
    """Whoever submits it, however often: it runs once."""
    found = server.look(job)
    if found is None and server.submit(job, entrypoint, environment):
        _note(f"submitted job {job} to {server.address}")
        return job
    found = found or server.look(job)
    if found is not None and found.entrypoint != entrypoint:
        raise UsageError(
            f"job {job!r} is another one ({found.entrypoint}): leave the command out to follow it, or use "
            "another id"
        )
    _note(f"job {job} was submitted before: following it")
    return job


def _submit_or_join(server: RayJobServer, base: str, entrypoint: str, environment: dict[str, Any]) -> str:
    """A job of this command that runs is followed; one that is over leaves its place to the next number."""
    number = 1
    while True:
        job = base if number == 1 else f"{base}-{number}"
        found: JobView | None = server.look(job)
        if found is None and server.submit(job, entrypoint, environment):
            _note(f"submitted job {job} to {server.address}")
            return job
        if found is not None and found.is_over:
            number += 1
        elif found is not None:
            _note(f"this command runs already, as job {job}: following it")
            return job


def _follow(server: RayJobServer, job: str) -> ExitCode:
    """Print the job's log until it is over. Returns its exit code."""
    from .following import Follower
    from .submitted import outcome

    with _signals_held() as wait:
        follower = Follower(server, job, echo=_echo, note=_note, wait=wait)
        view = follower.run()
    code, sentence = outcome(view, follower.printed)
    _note(f"job {job} ended with exit code {int(code)}: {sentence}")
    return code


@contextmanager
def _signals_held() -> Iterator[Any]:
    """Signals wait until they are asked for: none can come in the middle of a request."""
    from .following import Wishes

    wishes = Wishes()

    def wait(seconds: float) -> Wishes:
        received = signal.sigtimedwait(SIGNALS, seconds)
        if received is not None:
            wishes.leave = wishes.leave or wishes.stop or received.si_signo == signal.SIGTERM
            wishes.stop = True
        return wishes

    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield wait
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _echo(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _note(text: str) -> None:
    typer.echo(text, err=True)
