"""From settings to a finished folder: checks first, then the pool, then the job, then the summary.

Whatever can be refused is refused before a pool is started. The last file written is summary.json; its
state is the truth.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from .encoding import EncodingPolicy
from .errors import STATES, ErrorBudgetExceeded, ExitCode, UsageError
from .fingerprint import Fingerprint, fingerprint, refuse_differences
from .finished import finished_summary
from .folder import JobFolder, refuse_inputs
from .inputs import InputFile, expand, read_rows, scan
from .interrupts import Interrupts
from .job import Job
from .kinds import Backend, Kind, ModelChoice, OpenBackend
from .planning import total_rows
from .policies import in_force
from .progress import Display, PoolFigures, Progress, counted
from .progress_file import own_process, progress_content
from .publication import Publication
from .report.writing import write_report
from .retrying import announce_retry, count_of
from .settings import JobSettings
from .sources.extras import need
from .sources.formats import Format
from .summary import Tally
from .timeline import Timeline


def run_job(
    settings: JobSettings,
    kind: Kind,
    model: ModelChoice,
    open_backend: OpenBackend,
    display: Display,
) -> dict[str, Any]:
    """Run or resume a job. Returns its summary, which also lies in the folder.

    open_backend: starts the pool; its identity holds model.identity and what only a running pool knows.
    Raises: UsageError before anything is written or removed; anything else that ends a job under way after a
    summary whose state says why.
    """
    interrupts = Interrupts()
    interrupts.install()
    places = expand(settings.inputs)
    if settings.retry and settings.overwrite:
        raise UsageError("--retry-errors and --overwrite exclude each other: one keeps rows, the other none")
    if settings.output_format == "parquet":
        need("pyarrow.parquet", "files", "--output-format parquet")
    refuse_inputs(places, settings.output, settings.work_dir)
    folder = JobFolder.open(
        settings.output, settings.work_dir, resume=settings.resume, overwrite=settings.overwrite
    )
    publication = None if settings.publish_to is None else Publication(settings.publish_to)
    try:
        if publication is not None:
            publication.refuse(folder, places, resume=settings.resume, overwrite=settings.overwrite)
        files = scan(places, settings.input_format)
        expected = _fingerprint(settings, kind, model.policy, files, model.identity)
        old = None if settings.overwrite else folder.read_fingerprint()
        if settings.retry and old is None:
            raise UsageError(f"there is no job in {str(settings.output)!r} whose rows could be tried again")
        if old is not None:
            refuse_differences({key: value for key, value in old.items() if key in expected}, expected)
            summary = finished_summary(folder, settings.output_format)
            if summary is not None and not count_of(summary, settings.retry):
                # Everything is already done, and needs no pool.
                if publication is not None and not publication.holds(folder.output):
                    publication.put_results(folder.output)
                    publication.put_summary(folder.output)
                _refuse_errors(summary["errors"], settings.budget.allowed(total_rows(settings, files)))
                folder.remove_work(keep_parts=_keeps_parts(settings, summary))
                return summary
            if settings.retry:
                is_finished = summary is not None
                announce_retry(folder, settings.retry, settings.output_format, is_finished=is_finished)
        kind.check(lambda: read_rows(files, limit=settings.limit, parse=kind.parse, columns=kind.columns))
        return _run(settings, kind, model, files, folder, publication, old, open_backend, display, interrupts)
    finally:
        folder.close()
        interrupts.restore()


def _run(
    settings: JobSettings,
    kind: Kind,
    model: ModelChoice,
    files: list[InputFile],
    folder: JobFolder,
    publication: Publication | None,
    old: Fingerprint | None,
    open_backend: OpenBackend,
    display: Display,
    interrupts: Interrupts,
) -> dict[str, Any]:
    with interrupts.entered(open_backend()) as backend:
        current = _fingerprint(settings, kind, model.policy, files, backend.identity)
        if old is not None:
            refuse_differences(old, current)
        if settings.overwrite:
            folder.clear()
        folder.write_fingerprint(current)
        if publication is not None:
            publication.mark(folder)
        folder.forget_summary()
        progress = _progress(total_rows(settings, files), model, folder, backend, display)
        try:
            return _carry_out(
                settings, kind, model, files, folder, publication, current, backend, progress, interrupts
            )
        except Exception as error:
            _write_stopped(folder, progress, error)
            raise
        finally:
            progress.close()


def _progress(
    rows_total: int, model: ModelChoice, folder: JobFolder, backend: Backend, display: Display
) -> Progress:
    process = own_process()
    return Progress(
        rows_total,
        display,
        lambda snapshot: folder.write_output(
            "progress.json", progress_content(snapshot, time.time(), process)
        ),
        backend.figures,
        timeline=Timeline(command=model.about.get("command", ()), earlier=folder.read_timeline()),
        write_timeline=lambda content: folder.write_output("timeline.json", content),
    )


def _carry_out(
    settings: JobSettings,
    kind: Kind,
    model: ModelChoice,
    files: list[InputFile],
    folder: JobFolder,
    publication: Publication | None,
    current: Fingerprint,
    backend: Backend,
    progress: Progress,
    interrupts: Interrupts,
) -> dict[str, Any]:
    started_s = time.monotonic()
    job = Job(settings, kind, files, folder, backend, progress, interrupts)
    job.run()
    elapsed_s = time.monotonic() - started_s
    tally = job.publish()
    figures = backend.figures()  # of this work alone, and not of what is measured once it is done
    concluded = kind.conclude(
        backend,
        job.result_lines(),
        lambda: read_rows(files, limit=settings.limit, parse=kind.parse, columns=kind.columns),
        interrupts.check,
    )
    summary = _summary(tally, files, job, progress, figures, elapsed_s, settings.output_format)
    summary |= concluded
    policies = in_force(kind.policies, current)
    run = {"fingerprint": current, "policies": policies, "inputs": [f.about for f in files]}
    folder.write_output("run.json", run | dict(model.about))
    progress.tell("complete", force=True)
    write_report(folder.output, summary)
    if publication is not None:
        publication.put_results(folder.output)
    folder.write_output("summary.json", summary)
    if publication is not None:
        publication.put_summary(folder.output)
    folder.remove_work(keep_parts=_keeps_parts(settings, summary))
    return summary


def _keeps_parts(settings: JobSettings, summary: Mapping[str, Any]) -> bool:
    """Lines of a table cannot be taken from it to the byte: who has failed rows may want the others again."""
    return settings.output_format != "jsonl" and bool(summary["errors"])


def _fingerprint(
    settings: JobSettings,
    kind: Kind,
    policy: EncodingPolicy,
    files: list[InputFile],
    identity: Mapping[str, Any],
) -> Fingerprint:
    return fingerprint(identity, policy, kind.options, files, settings.reading) | {
        "write.format": settings.output_format
    }


def _summary(
    tally: Tally,
    files: list[InputFile],
    job: Job,
    progress: Progress,
    figures: PoolFigures,
    elapsed_s: float,
    output_format: Format,
) -> dict[str, Any]:
    exit_code = ExitCode.ROW_ERRORS if tally.failures else ExitCode.SCORED
    rows = tally.report()
    rows["warnings"] += [f"{file.label}: {note}" for file in files for note in file.notes]
    return {
        "state": "complete",
        "exit_code": int(exit_code),
        "output_format": output_format,
        **rows,
        "blank_lines": sum(file.num_blank for file in files),
        "rows_resumed": job.rows_resumed,
        "elapsed_s": round(elapsed_s, 3),
        "rows_per_s": round((progress.rows_done - job.rows_resumed) / elapsed_s, 3)
        if elapsed_s > 0
        else None,
        "tokens_submitted": job.num_tokens,
        **job.figures(elapsed_s),
        "pool": {
            "replicas": figures.replicas,
            "replicas_alive": figures.replicas_alive,
            "hit_rate": figures.hit_rate,
            "ideal_hit_rate": figures.ideal_hit_rate,
            **(figures.detail or {}),
        },
    }


def _refuse_errors(num_errors: int, allowed: int) -> None:
    if num_errors > allowed:
        raise ErrorBudgetExceeded(
            f"the job in this folder is finished: {counted(num_errors, 'row')} failed, {allowed} are "
            "allowed: repair the input and use --overwrite, or use a larger --max-errors"
        )


def _write_stopped(folder: JobFolder, progress: Progress, error: Exception) -> None:
    """Say in the folder why the job stopped. A disk that is full cannot be told so."""
    exit_code = getattr(error, "exit_code", ExitCode.INFRASTRUCTURE)
    state = STATES.get(exit_code, "failed")
    summary = {
        "state": state,
        "exit_code": int(exit_code),
        "reason": str(error) or type(error).__name__,
        "rows_done": progress.rows_done,
        "errors": progress.errors,
    }
    # The error that ended the job is the news: nothing here may take its place.
    with suppress(Exception):
        progress.tell(state, force=True)
    write_report(folder.output, summary)
    with suppress(Exception):
        folder.write_output("summary.json", summary)
