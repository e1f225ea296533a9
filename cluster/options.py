"""Options of the command line: spelling, type and one line of help each. Data only."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from typer import Option

from .whole_option import whole

Input = Annotated[list[str], Option("-i", "--input", help="JSONL file or glob; repeatable.")]
Output = Annotated[Path, Option("-o", "--output", help="Folder of the results.")]
ModelFile = Annotated[Path | None, Option("--model", help="Model file; default: the one that ships here.")]
Replicas = Annotated[int | None, whole(1, 1024, help="Processes that hold the model; default: one.")]
Depth = Annotated[int | None, whole(1, help="Loops to run; default: what the model was made for.")]
Limit = Annotated[int | None, whole(0, help="Score the first N rows alone.")]
LimitRows = Annotated[int | None, whole(0, help="Complete the first N rows alone.")]
Resume = Annotated[bool, Option("--resume", help="Go on where a job in the folder stopped.")]
Overwrite = Annotated[bool, Option("--overwrite", help="Replace a job in the folder.")]
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
