"""--dry-run: a job's options without its pool."""

from __future__ import annotations

import json
import os
from dataclasses import asdict

import typer

from .errors import UsageError
from .folder import JobFolder, refuse_inputs
from .inputs import read_rows, scan
from .score import ScoreKind
from .settings import PoolRequest, ScoreSettings
from .sources.places import expand


def dry_run(settings: ScoreSettings, request: PoolRequest, *, rate: float | None, as_json: bool) -> int:
    """Print what the job would do. Returns the exit code that its row errors would give.

    Nothing is written. Raises: UsageError for what the job would refuse before its start.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    from ..native.plan_table import PlanOptions, plan_table
    from .costs import PlacementRules
    from .dry_run import find_out, lines_of
    from .pool_backend import choose_model
    from .segments import CutRules
    from .work_estimate import estimate

    if request.name is not None:
        raise UsageError("--dry-run uses no pool: leave --pool out and name its model with --model")
    chosen = choose_model(settings, request)
    _refuse_folder(settings)
    for warning in chosen.warnings:
        typer.echo(f"warning: {warning}", err=True)
    vocab_size = int(chosen.descriptor["vocab_size"])
    overhead_rows = PlacementRules().build_overhead_rows
    rules = CutRules(str(chosen.choice.identity["digest"]), vocab_size, overhead_rows)
    kind = ScoreKind.of_model(settings, chosen.descriptor)
    files = scan(expand(settings.inputs), settings.input_format)
    kind.check(lambda: read_rows(files, limit=settings.limit, parse=kind.parse, columns=kind.columns))
    if kind.effort is not None:
        typer.echo("warning: how deep rows will go is not known before: hours are of full depth", err=True)
    report = find_out(ScoreKind(settings), chosen.encoder, chosen.depth, rules)
    table = plan_table(
        chosen.path,
        PlanOptions(chosen.max_seq_len, 0, request.kv, request.threads, chosen.depth),
    )
    report["memory"] = {
        "model_bytes": table.model_bytes,
        "prefix_bytes": table.chosen.prefix_bytes,
        "prefix_tokens": table.options.prefix_tokens,
        "owners": table.owners,
        "planned_for": "cpu",
    }
    replicas = request.replicas or 1
    report["estimate"] = asdict(
        estimate(
            report["by_window"]["tokens_to_compute"],
            chosen.descriptor,
            depth=chosen.depth,
            device=request.device,
            replicas=replicas,
            threads=request.threads or max(1, (os.cpu_count() or 1) // replicas),
            rate=rate,
        )
    )
    typer.echo(json.dumps(report) if as_json else "\n".join(lines_of(report)))
    return int(report["exit_code"])


def _refuse_folder(settings: ScoreSettings) -> None:
    """What the job's start would refuse, without creating a folder."""
    refuse_inputs(expand(settings.inputs), settings.output, settings.work_dir)
    if settings.output.exists() and (settings.work_dir is None or settings.work_dir.exists()):
        JobFolder.open(
            settings.output, settings.work_dir, resume=settings.resume, overwrite=settings.overwrite
        ).close()
