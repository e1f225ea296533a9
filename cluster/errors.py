"""What can go wrong in a job, and the exit code that says so.

Two families: a JobError ends the job with its exit code; a RowError ends one row and becomes a line of
errors.jsonl.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of every command."""

    SCORED = 0
    USAGE = 2
    ROW_ERRORS = 3
    BUDGET_EXCEEDED = 4
    INFRASTRUCTURE = 5
    INTERRUPTED = 130


EXIT_CODE_MEANINGS: dict[ExitCode, str] = {
    ExitCode.SCORED: "all rows scored, or completed",
    ExitCode.USAGE: "usage or invalid input, before the start",
    ExitCode.ROW_ERRORS: "finished, with row errors within the budget",
    ExitCode.BUDGET_EXCEEDED: "error budget exceeded (--max-errors, --fail-fast); resumable",
    ExitCode.INFRASTRUCTURE: "infrastructure failure (replicas, Ray, memory, disk); resumable",
    ExitCode.INTERRUPTED: "interrupted by SIGINT or SIGTERM; resumable",
}

# Schedulers know success and failure alone.
EXIT_CODE_NOTE = (
    "Codes 0 and 3 are finished jobs. What takes every code but 0 for a failure, as ray job submit does, "
    "reports a job with row errors as failed: state in summary.json says which it was."
)

# What summary.json and progress.json call a job that ended with one of these.
STATES = {
    ExitCode.INTERRUPTED: "interrupted",
    ExitCode.BUDGET_EXCEEDED: "budget_exceeded",
    ExitCode.INFRASTRUCTURE: "failed",
}

# Classes of errors.jsonl and whose fault they are. A row's own fault is the same on every run and is never
# retried; ours has already been retried by the pool when it gets here.
ROW_FAULTS = frozenset(
    {
        "invalid_json",
        "missing_field",
        "wrong_type",
        "duplicate_id",
        "invalid_unicode",
        "empty_continuation",
        "continuation_too_long",
        "token_out_of_range",
        "gold_out_of_range",
        "non_finite",
        "invalid_setting",
        "invalid_request",
        "prompt_too_long",
        "no_chat_template",
        "chat_template",
        "unsupported",
    }
)
OUR_FAULTS = frozenset({"out_of_memory", "replica_lost", "timeout", "internal"})


class JobError(Exception):
    """Ends a job. exit_code is what the command returns."""

    exit_code = ExitCode.INFRASTRUCTURE


class UsageError(JobError):
    """The job cannot start as asked: arguments, inputs, output folder or model do not fit."""

    exit_code = ExitCode.USAGE


class ErrorBudgetExceeded(JobError):
    """More rows failed than --max-errors allows. The folder can be resumed with a larger budget."""

    exit_code = ExitCode.BUDGET_EXCEEDED


class InfrastructureError(JobError):
    """Replicas or disk failed. The folder can be resumed."""

    exit_code = ExitCode.INFRASTRUCTURE


class Interrupted(JobError):
    """SIGINT or SIGTERM. The folder can be resumed."""

    exit_code = ExitCode.INTERRUPTED


class RowError(Exception):
    """One row cannot be scored. error_class is one of ROW_FAULTS or OUR_FAULTS."""

    def __init__(self, error_class: str, message: str, attempts: int = 0) -> None:
        super().__init__(message)
        self.error_class = error_class
        self.message = message
        self.attempts = attempts
