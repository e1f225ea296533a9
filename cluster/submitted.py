"""What became of a job on a cluster: Ray's word for it, our own last line in its log, and the exit code."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .errors import EXIT_CODE_MEANINGS, ExitCode

# Ray knows success and failure alone, and of a stopped job nothing: the job's last line says the truth.
LAST_LINE = "tinyloop: exit code "
_LAST_LINE = re.compile(rf"^{LAST_LINE}(\d+)\b", re.MULTILINE)
OVER = ("SUCCEEDED", "FAILED", "STOPPED")
NOT_FOUND = 127
NO_MODULE = re.compile(r"No module named '?tinyloop")


@dataclass(frozen=True, slots=True)
class JobView:
    """A job as Ray's job server sees it. exit_code: of its command, None while it runs or if stopped."""

    status: str
    exit_code: int | None
    message: str
    entrypoint: str

    @property
    def is_over(self) -> bool:
        return self.status in OVER


def last_line(code: ExitCode) -> str:
    """What a job prints at its very end where Ray runs it."""
    return f"{LAST_LINE}{int(code)} ({EXIT_CODE_MEANINGS[code]})"


def outcome(view: JobView, log: str) -> tuple[ExitCode, str]:
    """The exit code of a job that is over, and a sentence about it where its own log does not say all."""
    said = _LAST_LINE.findall(log)
    if said and int(said[-1]) in set(ExitCode):
        code = ExitCode(int(said[-1]))
        return code, EXIT_CODE_MEANINGS[code]
    if view.exit_code == NOT_FOUND or NO_MODULE.search(log):
        return ExitCode.USAGE, (
            "the cluster does not have tinyloop: install it in the image or environment that Ray runs in on "
            'the head node, or bring a wheel along: --runtime-env \'{"pip": ["/path/on/the/node/'
            "tinyloop_pool-...whl\"]}'"
        )
    if view.status == "STOPPED":
        return ExitCode.INTERRUPTED, "stopped before it could say how far it was: run again with --resume"
    if view.exit_code in set(ExitCode):
        code = ExitCode(view.exit_code)
        return code, EXIT_CODE_MEANINGS[code]
    reason = view.message.strip().splitlines()[0] if view.message.strip() else "without a reason from Ray"
    return ExitCode.INFRASTRUCTURE, f"Ray says {view.status}: {reason}: run again with --resume"
