"""Makes report.html from a folder. What fails here never fails a job."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from ..durable import write_durably
from ..summary import Tally
from .page import Facts, job_page
from .reading import FULL_BYTES, QUICK_BYTES, JobFiles, Lines, failure_lines, read_folder, result_lines
from .story import read_story
from .survey import Survey, survey_failures

REPORT_NAME = "report.html"


def write_report(folder: Path, summary: dict[str, Any]) -> None:
    """Write report.html at the end of a job, whose summary is about to be written."""
    try:
        page = make_report(folder, summary=summary, quick=summary.get("state") != "complete")
        write_durably(folder / REPORT_NAME, [page.encode()])
    except Exception as error:
        # The results are what the job is for: a page that cannot be made, whatever the reason, is only said.
        print(
            f"note: {REPORT_NAME} could not be made ({type(error).__name__}: {error}): results are not "
            f"affected; "
            f"try again with: tinyloop report {folder}",
            file=sys.stderr,
        )


def make_report(folder: Path, *, summary: dict[str, Any] | None = None, quick: bool = False) -> str:
    """The page as text. summary: instead of the one in the folder. quick: read less, for a job that must
    stop.

    Raises: UsageError if no job began in the folder.
    """
    files = read_folder(folder)
    if summary is not None:
        files.summary = summary
    limit = QUICK_BYTES if quick else FULL_BYTES
    lines = result_lines(folder, limit)
    is_final = files.summary.get("state") == "complete"
    survey, groups = _survey(lines, tally=not is_final)
    story, no_story = read_story(files.timeline)
    return job_page(
        Facts(
            name=folder.resolve().name,
            summary=files.summary,
            progress=files.progress,
            run=files.run,
            fingerprint=files.fingerprint,
            survey=survey,
            failures=survey_failures(failure_lines(folder, limit)),
            story=story,
            no_story=no_story,
            made_unix_s=time.time(),
            damaged=files.damaged,
            sampling=_sampling(lines, survey),
            so_far=_so_far(files, lines, survey),
            groups=groups,
        )
    )


def _survey(lines: Lines, *, tally: bool) -> tuple[Survey, dict[str, Any]]:
    """One pass over the rows. tally: count the main numbers too, since no summary has them."""
    survey, counted = Survey(), Tally()
    for line in lines.read():
        row = survey.add_line(line)
        if row is not None and tally:
            try:
                counted.add(row)
            except (LookupError, TypeError, ValueError):
                survey.unreadable += 1
    return survey, counted.report() if tally and survey.rows else {}


def _sampling(lines: Lines, survey: Survey) -> list[str]:
    said = []
    if lines.is_sampled:
        said.append(
            f"pictures of scores are drawn from {survey.rows:,} rows in evenly spaced pieces of "
            f"{lines.source}, which "
            f"has {lines.size_bytes / 1e9:.2f} GB; counts and main numbers of a finished job are of all rows"
        )
    if survey.unreadable:
        said.append(f"lines of results that could not be read and are left out: {survey.unreadable:,}")
    return said


def _so_far(files: JobFiles, lines: Lines, survey: Survey) -> str:
    if files.summary.get("state") == "complete" or not survey.rows:
        return ""
    of = "a sample of " if lines.is_sampled else "the "
    return f"Not final: from {of}{survey.rows:,} rows that have a result so far ({lines.source})."
