"""What a job is asked to do. Plain values: the command line fills it, the job reads it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from .depth_rule import DepthRequest
from .encoding import EmptyContinuation
from .errors import OUR_FAULTS, ROW_FAULTS, UsageError
from .rolling import RollingPolicy
from .sources.formats import Format
from .tasks import TaskOptions

FIRST_WINDOW_ROWS = 2_048
MAX_WINDOW_ROWS = 65_536


@dataclass(frozen=True, slots=True)
class ErrorBudget:
    """How many rows may fail. None: any number."""

    max_count: int | None = None
    max_fraction: float | None = None

    @classmethod
    def parse(cls, text: str | None, *, fail_fast: bool) -> ErrorBudget:
        """Read --max-errors: a count ("20"), a fraction ("0.01") or a percentage ("1%").

        Raises: UsageError for anything else, or together with fail_fast.
        """
        if fail_fast:
            if text is not None:
                raise UsageError(
                    "--fail-fast and --max-errors exclude each other: --fail-fast is --max-errors 0"
                )
            return cls(max_count=0)
        if text is None:
            return cls()
        from ..native.digits import parse_real, parse_whole  # --help does not wait for the engine

        try:
            if text.endswith("%"):
                return cls(max_fraction=_fraction(parse_real(text[:-1]) / 100))
            if "." in text:
                return cls(max_fraction=_fraction(parse_real(text)))
            count = parse_whole(text)
            if count < 0:
                raise ValueError
            return cls(max_count=count)
        except ValueError:
            raise UsageError(
                f"--max-errors is {text!r}: give a count (20), a fraction (0.01) or 1%"
            ) from None

    def allowed(self, num_rows: int) -> int:
        """Failures that are within the budget of a job of num_rows rows."""
        if self.max_count is not None:
            return self.max_count
        return num_rows if self.max_fraction is None else int(self.max_fraction * num_rows)


def _fraction(value: float) -> float:
    if not 0.0 <= value <= 1.0:
        raise ValueError
    return value


@dataclass(frozen=True, slots=True)
class JobSettings:
    """What every kind of job is asked. None means the model's or the program's default.

    output: local folder of the final files; publish_to: URL of the folder that they then go to.
    """

    inputs: tuple[str, ...]
    output: Path
    input_format: Format | None = None
    output_format: Format = "jsonl"
    publish_to: str | None = None
    work_dir: Path | None = None
    resume: bool = False
    overwrite: bool = False
    retry: frozenset[str] = frozenset()
    limit: int | None = None
    budget: ErrorBudget = field(default_factory=ErrorBudget)
    max_window_rows: int | None = MAX_WINDOW_ROWS
    replace_surrogates: bool = False
    depth: int | None = None
    add_bos: bool | None = None
    prefix_token: int | None = None

    @property
    def reading(self) -> dict[str, Any]:
        """Settings of reading that decide a byte of the results."""
        return {"limit": self.limit, "replace_surrogates": self.replace_surrogates}

    @property
    def encoding(self) -> dict[str, Any]:
        """Settings of encoding, as EncodingPolicy.of_model takes them."""
        return {"add_bos": self.add_bos, "prefix_token": self.prefix_token}


@dataclass(frozen=True, slots=True)
class ScoreSettings(JobSettings):
    """One score job."""

    target_delimiter: str = ""
    empty_continuation: EmptyContinuation = "error"
    pmi: bool = False
    token_logprobs: bool = False
    rolling: RollingPolicy = field(default_factory=RollingPolicy)
    depths: DepthRequest = field(default_factory=DepthRequest)

    @property
    def task_options(self) -> TaskOptions:
        return TaskOptions(self.pmi, self.token_logprobs, self.rolling)

    @property
    def encoding(self) -> dict[str, Any]:
        return {
            "add_bos": self.add_bos,
            "prefix_token": self.prefix_token,
            "target_delimiter": self.target_delimiter,
            "empty_continuation": self.empty_continuation,
        }


@dataclass(frozen=True, slots=True)
class PoolRequest:
    """What the command line says of the pool. None: the default. name: of a pool that is up already."""

    model: Path | None = None
    replicas: int | None = None
    max_seq_len: int | None = None
    kv: str = "fp16"
    threads: int | None = None
    numeric: str = "fp16"
    device: Literal["cpu", "cuda"] = "cpu"
    name: str | None = None


def parse_window(text: str) -> int | None:
    """Read --window: a number of rows, or None for 'all'. Raises: UsageError for anything else."""
    if text == "all":
        return None
    from ..native.digits import parse_whole

    try:
        rows = parse_whole(text)
    except ValueError:
        rows = 0
    if rows < 1:
        raise UsageError(f"--window is {text!r}: give a number of rows or 'all'")
    return rows


def parse_retry(text: str | None) -> frozenset[str]:
    """Read --retry-errors: classes of errors, none by default. Raises: UsageError for an unknown one."""
    if text is None:
        return frozenset()
    if text == "all":
        return ROW_FAULTS | OUR_FAULTS
    names = [OUR_FAULTS if name == "ours" else frozenset({name}) for name in text.split(",")]
    classes = frozenset().union(*names)
    unknown = sorted(classes - ROW_FAULTS - OUR_FAULTS)
    if unknown:
        raise UsageError(
            f"--retry-errors has {unknown[0]!r}: give 'ours', 'all' or classes with commas between: "
            f"{', '.join(sorted(ROW_FAULTS | OUR_FAULTS))}"
        )
    return classes
