"""Options of the command line: spelling, type and one line of help each. Data only."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from typer import Option

from .option_file import read_options
from .whole_option import real, whole

Input = Annotated[
    list[str], Option("-i", "--input", help="JSONL, CSV or Parquet: path, URL or glob; repeatable.")
]
InputFormat = Annotated[
    Literal["jsonl", "csv", "parquet"] | None,
    Option("--input-format", help="Of all inputs; default: by the ending of each name."),
]
OutputFormat = Annotated[
    Literal["jsonl", "csv", "parquet"], Option("--output-format", help="Of results and errors.")
]
Output = Annotated[str, Option("-o", "--output", help="Folder of the results; a URL needs --work-dir.")]
ModelFile = Annotated[Path | None, Option("--model", help="Model file; default: the one that ships here.")]
Replicas = Annotated[int | None, whole(1, 1024, help="Processes that hold the model; default: one.")]
Depth = Annotated[int | None, whole(1, help="Loops to run; default: what the model was made for.")]
Cascade = Annotated[
    str | None,
    Option(metavar="A:B[:...]", help="Loops of all rows, then of undecided ones; needs --margin."),
]
Margin = Annotated[float | None, real(help="Cascade: choices that lead by less, in nats, go deeper.")]
ExitThreshold = Annotated[
    float | None, real(help="Stop rows whose exit gates let every token go with that probability.")
]
MinDepth = Annotated[int | None, whole(1, help="Loops before an exit gate is asked; default: 1.")]
AgreementRows = Annotated[
    int, whole(0, help="Rows that are scored at full depth too, to say what less depth cost; 0: none.")
]
Limit = Annotated[int | None, whole(0, help="Score the first N rows alone.")]
LimitRows = Annotated[int | None, whole(0, help="Complete the first N rows alone.")]
Resume = Annotated[bool, Option("--resume", help="Go on where a job in the folder stopped.")]
Overwrite = Annotated[bool, Option("--overwrite", help="Replace a job in the folder.")]
RetryErrors = Annotated[
    str | None,
    Option(metavar="CLASSES", help="Resume, and try rows again that failed so: a,b or 'ours' or 'all'."),
]
DryRun = Annotated[
    bool, Option("--dry-run", help="Say what the job would do, without a pool: rows, tokens, memory, hours.")
]
Rate = Annotated[
    float | None, real(help="--dry-run: tokens/s of a replica, for the hours; default: a documented figure.")
]
AsJson = Annotated[bool, Option("--json", help="--dry-run: print one JSON object.")]
ConfigFile = Annotated[
    Path | None,
    Option(
        "--config",
        help="TOML file of options by their names; the command line wins.",
        is_eager=True,
        callback=read_options,
    ),
]
MaxErrors = Annotated[str | None, Option(help="Stop with exit code 4 beyond 20, 0.01 or 1% row errors.")]
FailFast = Annotated[bool, Option("--fail-fast", help="Stop at the first row error.")]
MaxSeqLen = Annotated[int | None, whole(2, help="Window in tokens; default: 2048 or the model's limit.")]
Kv = Annotated[
    Literal["fp16", "int8", "h_fp16", "h_int8", "h_int4"],
    Option(help="How prefixes are stored: native/CACHE_MODES.md says what each costs."),
]
Numeric = Annotated[
    Literal["fp16", "bf16"],
    Option(help="Arithmetic of products; bf16 is for processors with AMX: native/GUIDE.md says more."),
]
Device = Annotated[Literal["cpu", "cuda"], Option(help="Where replicas run; cuda: each on a GPU of its own.")]
Pool = Annotated[str | None, Option("--pool", help="A pool that is up (tinyloop up); its model is used.")]
Window = Annotated[str, Option(help="Rows that are sorted together, or 'all'.")]
WorkDir = Annotated[Path | None, Option(help="Folder of journal and parts; default: the output folder.")]
Pmi = Annotated[bool, Option("--pmi", help="Score choices after the empty context too.")]
Logprobs = Annotated[bool, Option("--logprobs", help="Write every token's log-probability.")]
Threads = Annotated[int | None, whole(1, help="CPU threads a replica; default: its share of the cores.")]
AddBos = Annotated[bool | None, Option(help="Default: as the model's tokenizer does.")]
PrefixToken = Annotated[int | None, whole(0, help="Token id that an empty context is conditioned on.")]
TargetDelimiter = Annotated[str, Option(help="Put before every continuation and choice.")]
EmptyContinuation = Annotated[Literal["error", "zero"], Option(help="A row error, or log-probability 0.")]
InvalidUnicode = Annotated[Literal["error", "replace"], Option(help="What a lone surrogate does.")]
Stride = Annotated[int | None, whole(1, help="Text rows: tokens scored in each further window.")]
BosEveryWindow = Annotated[
    bool, Option("--bos-every-window", help="Text rows: begin every window with the prefix token.")
]
