"""The command line: options to settings, errors to exit codes.

What a command needs is imported when it runs, so that --help does not wait for Ray or tokenizers.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Annotated, Literal

import typer

from .encoding import POLICIES
from .errors import EXIT_CODE_MEANINGS, ExitCode, JobError, UsageError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Exact batch scoring with looped language models on a pool of replicas.",
)

SCORE_EPILOG = "\n\n".join(
    [
        "What is done to text before it is scored:",
        "\b\n" + "\n".join(f"{name}: {text}" for name, text in POLICIES.items()),
        "Exit codes:",
        "\b\n" + "\n".join(f"{code:3d}  {text}" for code, text in EXIT_CODE_MEANINGS.items()),
    ]
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"tinyloop {version('tinyloop-pool')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of all commands."""


@app.command(epilog=SCORE_EPILOG)
def score(
    input: Annotated[list[str], typer.Option("-i", "--input", help="JSONL file or glob; repeatable.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder of the results.")],
    model: Annotated[Path | None, typer.Option(help="Model file; default: the one that ships here.")] = None,
    replicas: Annotated[
        int | None, typer.Option(min=1, help="Processes that hold the model; default: one.")
    ] = None,
    depth: Annotated[
        int | None, typer.Option(min=1, help="Loops to run; default: what the model was made for.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=0, help="Score the first N rows alone.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on where a job in the folder stopped.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a job in the folder.")] = False,
    max_errors: Annotated[
        str | None, typer.Option(help="Stop with exit code 4 beyond 20, 0.01 or 1% row errors.")
    ] = None,
    fail_fast: Annotated[bool, typer.Option("--fail-fast", help="Stop at the first row error.")] = False,
    max_seq_len: Annotated[
        int | None, typer.Option(min=2, help="Window in tokens; default: 2048 or the model's limit.")
    ] = None,
    kv: Annotated[Literal["fp16"], typer.Option(help="How keys and values are stored.")] = "fp16",
    window: Annotated[str, typer.Option(help="Rows that are sorted together, or 'all'.")] = "65536",
    work_dir: Annotated[
        Path | None, typer.Option(help="Folder of journal and parts; default: the output folder.")
    ] = None,
    pmi: Annotated[bool, typer.Option("--pmi", help="Score choices after the empty context too.")] = False,
    logprobs: Annotated[
        bool, typer.Option("--logprobs", help="Write every token's log-probability.")
    ] = False,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads a replica; default: its share of the cores.")
    ] = None,
    add_bos: Annotated[bool | None, typer.Option(help="Default: as the model's tokenizer does.")] = None,
    prefix_token: Annotated[
        int | None, typer.Option(min=0, help="Token id that an empty context is conditioned on.")
    ] = None,
    target_delimiter: Annotated[str, typer.Option(help="Put before every continuation and choice.")] = "",
    empty_continuation: Annotated[
        Literal["error", "zero"], typer.Option(help="A row error, or log-probability 0.")
    ] = "error",
    invalid_unicode: Annotated[
        Literal["error", "replace"], typer.Option(help="What a lone surrogate does.")
    ] = "error",
    stride: Annotated[
        int | None, typer.Option(min=1, help="Text rows: tokens scored in each further window; default: all.")
    ] = None,
    bos_every_window: Annotated[
        bool, typer.Option("--bos-every-window", help="Text rows: begin every window with the prefix token.")
    ] = False,
) -> None:
    """Log-likelihood, multiple choice and rolling perplexity of JSONL rows.

    A row is one of: context + continuation; context + choices (+ gold); context_ids + continuation_ids;
    text. An
    optional prefix is put before context, an id or custom_id names the row, other fields are carried through.
    """
    # Set before tokenizers starts its threads: it otherwise warns when Ray starts processes.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    from .closing import closing_lines
    from .pool_backend import PoolRequest, choose_model, open_pool
    from .progress import display_for
    from .rolling import RollingPolicy
    from .score import run_score
    from .settings import ErrorBudget, ScoreSettings, parse_window

    settings = ScoreSettings(
        inputs=tuple(input),
        output=output,
        work_dir=work_dir,
        resume=resume,
        overwrite=overwrite,
        limit=limit,
        budget=ErrorBudget.parse(max_errors, fail_fast=fail_fast),
        max_window_rows=parse_window(window),
        replace_surrogates=invalid_unicode == "replace",
        depth=depth,
        add_bos=add_bos,
        prefix_token=prefix_token,
        target_delimiter=target_delimiter,
        empty_continuation=empty_continuation,
        pmi=pmi,
        token_logprobs=logprobs,
        rolling=RollingPolicy(stride, bos_every_window),
    )
    request = PoolRequest(model=model, replicas=replicas, max_seq_len=max_seq_len, kv=kv, threads=threads)
    chosen = choose_model(settings, request)
    for warning in chosen.warnings:
        typer.echo(f"warning: {warning}", err=True)
    summary = run_score(settings, chosen.choice, lambda: open_pool(chosen, request), display_for())
    for line in closing_lines(summary, output):
        typer.echo(line)
    raise typer.Exit(summary["exit_code"])


@app.command()
def convert(
    source: Annotated[str, typer.Argument(help="Hugging Face folder (safetensors) or GGUF file.")],
    destination: Annotated[Path, typer.Argument(help="Model file to write, .tloop.")],
    bits: Annotated[Literal["4", "8", "16"], typer.Option(help="Bits a weight.")] = "4",
    group: Annotated[Literal["32", "64", "128"], typer.Option(help="Weights that share a scale.")] = "64",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the destination.")] = False,
) -> None:
    """Turn a model into one model file; what is not understood is refused."""
    from ..native.convert import convert as convert_model

    try:
        convert_model(Path(source), destination, bits=int(bits), group=int(group), overwrite=overwrite)
    except (ValueError, OSError) as error:
        raise UsageError(f"cannot convert {source!r}: {error}") from error
    typer.echo(f"wrote {destination} ({destination.stat().st_size / 1e6:.1f} MB)")


@app.command()
def inspect(
    model: Annotated[
        Path | None, typer.Argument(help="Model file; default: the one that ships here.")
    ] = None,
) -> None:
    """Say what a model file is: family, dimensions, planes, sizes, checks."""
    from ..native.inspect import describe
    from ..native.models import default_model_path

    path = model or default_model_path()
    try:
        typer.echo(describe(path))
    except (ValueError, OSError) as error:
        raise UsageError(f"cannot read model {str(path)!r}: {error}") from error


def main() -> None:
    """Run the command line and exit with its code."""
    try:
        app()
    except JobError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(int(error.exit_code))
    except KeyboardInterrupt:
        sys.exit(int(ExitCode.INTERRUPTED))
    except Exception:
        # The end of the line: a defect here or in a library must not look like a usage error, and a folder
        # that was
        # begun is resumable whatever happened.
        traceback.print_exc()
        sys.exit(int(ExitCode.INFRASTRUCTURE))
