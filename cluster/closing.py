"""The lines that a finished job prints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .progress import clock, counted
from .summary import METRICS


def closing_lines(summary: dict[str, Any], output: Path) -> Iterator[str]:
    """Accuracy by file and task, speed, hit rate against the ideal, errors by class, where results are."""
    for group in summary["groups"]:
        yield f"{group['file']} [{group['task']}]: {_group(group)}"
    yield _speed(summary)
    pool = summary["pool"]
    if pool["hit_rate"] is not None:
        ideal = pool["ideal_hit_rate"]
        against = "" if ideal is None else f" (ideal {100 * ideal:.1f} %)"
        yield f"prefix hit rate {100 * pool['hit_rate']:.1f} % of prompt tokens{against}"
    if summary["errors"]:
        classes = ", ".join(f"{name} {count:,}" for name, count in summary["errors_by_class"].items())
        yield f"errors: {counted(summary['errors'], 'row')} ({classes})"
    yield from (f"note: {warning}" for warning in summary["warnings"])
    yield f"results in {output / 'results.jsonl'}, errors in errors.jsonl, figures in summary.json"


def _group(group: dict[str, Any]) -> str:
    rows = counted(group["rows"], "row")
    if group["task"] == "choices" and group["with_gold"]:
        shown = ", ".join(f"{metric} {group[metric]:.4f}" for metric in METRICS if metric in group)
        return f"{shown} on {counted(group['with_gold'], 'row')}"
    if group["task"] == "text" and None not in (group["bits_per_byte"], group["token_perplexity"]):
        return (
            f"{group['bits_per_byte']:.4f} bits per byte, {group['token_perplexity']:.3f} per token, "
            f"on {rows}"
        )
    if group["task"] == "completion":
        ends = ", ".join(f"{count:,} {reason}" for reason, count in group["finish_reasons"].items())
        depth = group["depth_mean"]
        loops = "" if depth is None else f", {depth:.2f} loops a token"
        return f"{group['tokens_out']:,} tokens from {group['tokens_in']:,} ({ends}){loops}, on {rows}"
    if group["task"] == "continuation":
        mean = group["logprob"] / group["tokens"] if group["tokens"] else 0.0
        return f"mean log-probability {mean:.4f} a token, {group['greedy']:,} greedy, on {rows}"
    return rows


def _speed(summary: dict[str, Any]) -> str:
    generated = summary.get("tokens_generated")
    done = "scored" if generated is None else "completed"
    errors = counted(summary["errors"], "error")
    rows = f"{counted(summary['rows'], 'row')}: {summary['results']:,} {done}, {errors}"
    resumed = f", {summary['rows_resumed']:,} of them by earlier runs" if summary["rows_resumed"] else ""
    rate = "" if summary["rows_per_s"] is None else f", {summary['rows_per_s']:,.1f} rows/s"
    if generated and summary["tokens_generated_per_s"] is not None:
        rate += f", {summary['tokens_generated_per_s']:,.0f} generated tokens/s"
    return f"{rows}{resumed}, in {clock(summary['elapsed_s'])}{rate}"
