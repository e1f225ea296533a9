"""The command that generates: options to settings.

What it needs is imported when it runs, so that --help does not wait for Ray or tokenizers.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Option

from . import options
from .completion_policies import POLICIES
from .errors import RowError, UsageError
from .job_cli import epilog, output_of, run_on_pool
from .settings import ErrorBudget, PoolRequest, parse_retry, parse_window
from .whole_option import real, whole

if TYPE_CHECKING:
    from .generate import GenerateKind
    from .pool_backend import ChosenModel

GENERATE_EPILOG = epilog("What is done before and after generation:", POLICIES)


def add_commands(app: typer.Typer) -> None:
    """Add `generate` to the command line."""
    app.command(epilog=GENERATE_EPILOG)(generate)


def generate(
    input: options.Input,
    output: options.Output,
    input_format: options.InputFormat = None,
    output_format: options.OutputFormat = "jsonl",
    model: options.ModelFile = None,
    replicas: options.Replicas = None,
    depth: options.Depth = None,
    limit: options.LimitRows = None,
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
    threads: options.Threads = None,
    add_bos: options.AddBos = None,
    prefix_token: options.PrefixToken = None,
    invalid_unicode: options.InvalidUnicode = "error",
    logprobs: options.Logprobs = False,
    max_new_tokens: Annotated[int | None, whole(1, help="Tokens of a completion; default: 128.")] = None,
    temperature: Annotated[float | None, real(help="0, the default: the likeliest token.")] = None,
    top_k: Annotated[int | None, whole(0, help="Draw among so many; 0: all.")] = None,
    top_p: Annotated[float | None, real(help="Draw among the likeliest of this mass; 1: all.")] = None,
    min_p: Annotated[float | None, real(help="Least probability against the likeliest; 0: all.")] = None,
    repetition_penalty: Annotated[float | None, real(help="Above 1: tokens seen are less likely.")] = None,
    stop: Annotated[list[str] | None, Option(help="Text that ends a completion; repeatable.")] = None,
    stop_id: Annotated[list[int] | None, whole(0, help="Token id that ends one; repeatable.")] = None,
    seed: Annotated[int, whole(0, help="What rows without a seed draw theirs from.")] = 0,
    exit_threshold: Annotated[
        float | None, real(help="Leave the loops where the model's gate is this sure.")
    ] = None,
    min_depth: Annotated[int | None, whole(1, help="Loops before the gate is asked; default: 1.")] = None,
    n: Annotated[int | None, whole(1, help="Completions of each prompt; default: 1.")] = None,
    long_prompt: Annotated[
        Literal["truncate", "error"], Option(help="Drop tokens at the left, or a row error.")
    ] = "truncate",
    chat_template: Annotated[
        Path | None, Option(help="Jinja file in place of the model's own chat template.")
    ] = None,
    result_style: Annotated[
        Literal["native", "openai"], Option(help="Lines of both files as an OpenAI batch has them.")
    ] = "native",
    config: options.ConfigFile = None,
) -> None:
    """Completions of rows.

    A row is one of: prompt; prompt_ids; messages; a line of an OpenAI batch. It may set max_new_tokens
    (max_tokens), temperature, top_k, top_p, min_p, repetition_penalty, stop (until), stop_ids, seed, depth,
    exit_threshold, min_depth and n; id or custom_id names it, an optional prefix is put before prompt, other
    fields are carried through.
    """
    from .completion_settings import take_settings
    from .completion_task import CompletionSettings
    from .generate_settings import GenerateSettings

    asked: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "stop": stop or None,
        "stop_ids": stop_id or None,
        "exit_threshold": exit_threshold,
        "min_depth": min_depth,
        "n": n,
    }
    try:
        defaults = take_settings(asked, CompletionSettings())
    except RowError as error:
        raise UsageError(f"cannot generate as asked: {error.message}") from error
    if result_style == "openai" and output_format != "jsonl":
        raise UsageError(
            f"--result-style openai writes JSON lines, and --output-format is {output_format}: leave one out"
        )
    settings = GenerateSettings(
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
        defaults=defaults,
        seed=seed,
        long_prompt=long_prompt,
        token_logprobs=logprobs,
        chat_template="" if chat_template is None else _read(chat_template),
        result_style=result_style,
    )
    request = PoolRequest(model, replicas, max_seq_len, kv, threads, numeric, device, pool)

    def kind_of(chosen: ChosenModel) -> GenerateKind:
        from .generate import GenerateKind

        about, digest = chosen.choice.about["model"], chosen.choice.identity["digest"]
        name = about.get("name") or f"sha256:{digest[:12]}"
        return GenerateKind.of_model(settings, chosen.descriptor, chosen.encoder, chosen.depth, name)

    raise typer.Exit(run_on_pool(settings, kind_of, request))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--chat-template {str(path)!r} cannot be read: {error}") from error
