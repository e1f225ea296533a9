"""The command line: options to settings, errors to exit codes.

What a command needs is imported when it runs, so that --help does not wait for Ray or tokenizers.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from . import options
from .adapters.harness_cli import add_commands as add_harness
from .depth_rule import DepthRequest, beyond, parse_cascade
from .errors import ExitCode, JobError, UsageError
from .generate_cli import add_commands as add_generate
from .job_cli import epilog, output_of, run_on_pool
from .operations_cli import add_commands as add_operations
from .policies import POLICIES
from .pool_cli import add_commands
from .report_cli import add_commands as add_reports
from .rolling import RollingPolicy
from .serve_cli import add_commands as add_serve
from .settings import ErrorBudget, PoolRequest, ScoreSettings, parse_retry, parse_window
from .submit_cli import add_commands as add_submit
from .whole_option import whole

if TYPE_CHECKING:
    from .pool_backend import ChosenModel
    from .score import ScoreKind

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Exact batch scoring with looped language models on a pool of replicas.",
)

add_commands(app)
add_operations(app)
add_submit(app)
add_harness(app)
add_generate(app)
add_reports(app)
add_serve(app)

SCORE_EPILOG = epilog("What is done to text, and how deep it goes:", POLICIES)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"tinyloop {version('tinyloop-pool')}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of all commands."""


@app.command(epilog=SCORE_EPILOG)
def score(
    input: options.Input,
    output: options.Output,
    input_format: options.InputFormat = None,
    output_format: options.OutputFormat = "jsonl",
    model: options.ModelFile = None,
    replicas: options.Replicas = None,
    depth: options.Depth = None,
    cascade: options.Cascade = None,
    margin: options.Margin = None,
    exit_threshold: options.ExitThreshold = None,
    min_depth: options.MinDepth = None,
    agreement_rows: options.AgreementRows = 200,
    limit: options.Limit = None,
    resume: options.Resume = False,
    overwrite: options.Overwrite = False,
    retry_errors: options.RetryErrors = None,
    max_errors: options.MaxErrors = None,
    fail_fast: options.FailFast = False,
    max_seq_len: options.MaxSeqLen = None,
    kv: options.Kv = "fp16",
    numeric: options.Numeric = "fp16",
    device: options.Device = "cpu",
    pool: options.Pool = None,
    window: options.Window = "65536",
    work_dir: options.WorkDir = None,
    pmi: options.Pmi = False,
    logprobs: options.Logprobs = False,
    threads: options.Threads = None,
    add_bos: options.AddBos = None,
    prefix_token: options.PrefixToken = None,
    target_delimiter: options.TargetDelimiter = "",
    empty_continuation: options.EmptyContinuation = "error",
    invalid_unicode: options.InvalidUnicode = "error",
    stride: options.Stride = None,
    bos_every_window: options.BosEveryWindow = False,
) -> None:
    """Log-likelihood, multiple choice and rolling perplexity of rows.

    A row is one of: context + continuation; context + choices (+ gold); context_ids + continuation_ids; text.
    An optional prefix is put before context, id or custom_id names the row, other fields are carried through.
    """
    settings = ScoreSettings(
        inputs=tuple(input),
        **output_of(output, work_dir),
        input_format=input_format,
        output_format=output_format,
        resume=resume or retry_errors is not None,
        overwrite=overwrite,
        retry=parse_retry(retry_errors),
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
        depths=DepthRequest(parse_cascade(cascade), margin, exit_threshold, min_depth, agreement_rows),
    )
    request = PoolRequest(model, replicas, max_seq_len, kv, threads, numeric, device, pool)

    def kind_of(chosen: ChosenModel) -> ScoreKind:
        from .score import ScoreKind

        kind = ScoreKind.of_model(settings, chosen.descriptor)
        if settings.depths.cascade is not None:
            for warning in beyond(kind.effort, int(chosen.descriptor["loops"])):
                typer.echo(f"warning: {warning}", err=True)
        return kind

    raise typer.Exit(run_on_pool(settings, kind_of, request))


@app.command()
def convert(
    source: Annotated[str, typer.Argument(help="Hugging Face folder (safetensors) or GGUF file.")],
    destination: Annotated[Path, typer.Argument(help="Model file to write, .tloop.")],
    bits: Annotated[Literal["4", "8", "16"], typer.Option(help="Bits a weight.")] = "4",
    group: Annotated[Literal["32", "64", "128"], typer.Option(help="Weights that share a scale.")] = "64",
    loop_layers: Annotated[
        str | None,
        typer.Option(metavar="A:B", help="Loop layers A to B - 1 of a model that runs each layer once."),
    ] = None,
    loops: Annotated[int | None, whole(1, help="Loops of --loop-layers.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the destination.")] = False,
) -> None:
    """Turn a model into one model file; what is not understood is refused."""
    from ..native.convert import convert as convert_model

    loop_range = _loop_range(loop_layers, loops)
    try:
        convert_model(
            Path(source),
            destination,
            bits=int(bits),
            group=int(group),
            overwrite=overwrite,
            loop_range=loop_range,
        )
    except (ValueError, OSError) as error:
        raise UsageError(f"cannot convert {source!r}: {error}") from error
    typer.echo(f"wrote {destination} ({destination.stat().st_size / 1e6:.1f} MB)")


def _loop_range(layers: str | None, loops: int | None) -> tuple[int, int, int] | None:
    """Read --loop-layers and --loops. Raises: UsageError unless both are given and readable, or neither."""
    from ..native.loop_range import parse_range

    if layers is None and loops is None:
        return None
    if layers is None or loops is None:
        missing = "--loop-layers" if layers is None else "--loops"
        raise UsageError(f"{missing} is missing: give --loop-layers and --loops together, as 4:12 and 3")
    try:
        return *parse_range(layers), loops
    except ValueError as error:
        raise UsageError(f"--loop-layers {layers!r}: {error}") from None


@app.command()
def inspect(
    model: Annotated[
        Path | None, typer.Argument(help="Model file; default: the one that ships here.")
    ] = None,
) -> None:
    """Say what a model file is: family, dimensions, planes, sizes, checks."""
    from ..native.inspect import describe
    from ..native.models import default_model_path
    from .pool_backend import foreign_model

    path = model or default_model_path()
    try:
        typer.echo(describe(path))
    except (ValueError, OSError) as error:
        raise UsageError(f"cannot read model {str(path)!r}: {foreign_model(path) or error}") from error


@app.command()
def plan(
    model: Annotated[
        Path | None, typer.Argument(help="Model file; default: the one that ships here.")
    ] = None,
    max_seq_len: Annotated[
        int | None, whole(1, help="Rows of a pass; default: 2048 or the model's limit.")
    ] = None,
    prefill_chunk: Annotated[int, whole(0, help="Rows of the scratch; 0: all.")] = 0,
    kv: options.Kv = "fp16",
    depth: options.Depth = None,
    prefix_tokens: Annotated[
        int | None, whole(1, help="Length of the prefixes to hold; default: 512.")
    ] = None,
    budget: Annotated[
        str | None, typer.Option(metavar="BYTES", help="Of model and prefixes, as 8000000, 8MB or 8GiB.")
    ] = None,
    threads: options.Threads = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what a model and its prefixes will take in memory, from the file's header alone."""
    from ..native import TinyLoopError
    from ..native.models import default_model_path
    from ..native.plan_table import PlanOptions, parse_bytes, plan_table, render
    from .pool_backend import foreign_model

    path = model or default_model_path()
    try:
        budget_bytes = None if budget is None else parse_bytes(budget)
        asked = PlanOptions(max_seq_len, prefill_chunk, kv, threads, depth, prefix_tokens, budget_bytes)
        table = plan_table(path, asked)
    except (ValueError, OSError, TinyLoopError) as error:
        raise UsageError(f"cannot plan model {str(path)!r}: {foreign_model(path) or error}") from error
    typer.echo(json.dumps(table.as_json()) if as_json else render(table))


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
        # that was begun is resumable whatever happened.
        traceback.print_exc()
        sys.exit(int(ExitCode.INFRASTRUCTURE))
