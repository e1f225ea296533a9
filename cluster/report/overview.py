"""The top of the page: what happened, in words and large figures, and the main numbers of each file. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..progress import counted
from ..summary import METRICS
from .markup import Markup, cut, prose, tag
from .row_fields import number
from .scale import duration, percent, short
from .survey import Survey

METRIC_NAMES = {
    "acc": "acc: whole choice",
    "acc_norm": "acc_norm: per character",
    "acc_bytes": "acc_bytes: per byte",
    "acc_token": "acc_token: per token",
    "acc_pmi": "acc_pmi: against no context",
}
ACCURACY = (
    "Accuracy: how often the best choice is the gold one. acc takes ln p of the whole choice; the others "
    "divide it by "
    "the length first, or compare it with ln p without context, so that long or common choices have no "
    "unfair part. "
    "± is 95 % of chance over which rows were drawn: differences within it are noise."
)
STATE_WORDS = {
    "complete": "complete",
    "running": "running",
    "interrupted": "interrupted",
    "budget_exceeded": "too many errors",
    "failed": "failed",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """How far a job is. None: not known. ran_s: over all runs where that is known."""

    state: str
    reason: str
    rows_total: int | None
    rows_done: int
    errors: int
    ran_s: float | None
    rate_per_s: float | None
    hit_rate: float | None
    ideal_hit_rate: float | None
    replicas: int | None
    replicas_alive: int | None
    deaths: int
    heard_of_s: float | None = None

    @property
    def style(self) -> str:
        """good, warn or bad, for the badge."""
        if self.state == "complete":
            return "warn" if self.errors else "good"
        return "warn" if self.state in ("running", "interrupted") else "bad"


def outcome_of(
    summary: Mapping[str, Any],
    progress: Mapping[str, Any],
    *,
    ran_s: float | None,
    deaths: int,
    now_unix_s: float | None = None,
) -> Outcome:
    """What summary.json says, and progress.json where that is silent."""
    pool = summary.get("pool") or progress.get("pool")
    pool = pool if isinstance(pool, Mapping) else {}
    done = summary.get("rows", summary.get("rows_done", progress.get("rows_done")))
    rate = number(summary.get("rows_per_s")) if summary.get("state") == "complete" else None
    written = number(progress.get("written_unix_s"))
    heard = now_unix_s - written if now_unix_s is not None and written is not None and not summary else None
    elapsed_s = number(summary.get("elapsed_s", progress.get("elapsed_s")))
    return Outcome(
        state=str(summary.get("state", progress.get("state", "unknown"))),
        reason=str(summary.get("reason", "")),
        rows_total=_whole(summary.get("rows", progress.get("rows_total"))),
        rows_done=_whole(done) or 0,
        errors=_whole(summary.get("errors", progress.get("errors"))) or 0,
        ran_s=elapsed_s if ran_s is None else max(ran_s, elapsed_s or 0.0),
        rate_per_s=rate if rate is not None else number(progress.get("rate_per_s")),
        hit_rate=number(pool.get("hit_rate")),
        ideal_hit_rate=number(pool.get("ideal_hit_rate")),
        replicas=_whole(pool.get("replicas")),
        replicas_alive=_whole(pool.get("replicas_alive")),
        deaths=max(deaths, _whole(pool.get("replica_deaths")) or 0),
        heard_of_s=heard,
    )


def headline(name: str, outcome: Outcome, verb: str) -> Markup:
    """Name of the folder, state, one sentence, large figures."""
    word = STATE_WORDS.get(outcome.state, outcome.state)
    return tag(
        "header",
        tag("p", f"TinyLoop {verb} job", class_="kind"),
        tag("h1", cut(name, 80), " ", tag("span", word, class_=f"badge {outcome.style}")),
        tag("p", prose(sentence(outcome)), class_="lead"),
        tag("div", *(_tile(*tile) for tile in _tiles(outcome)), class_="tiles"),
    )


def sentence(outcome: Outcome) -> str:
    """What a newcomer wants to know, in one or two sentences."""
    total = outcome.rows_total
    if outcome.state == "complete":
        if not total:
            return "There was no row to work on: the inputs are empty."
        if not outcome.errors:
            return f"All {total:,} rows have a result; none failed."
        good = total - outcome.errors
        return (
            f"Finished: {good:,} of {total:,} rows have a result, {_rows(outcome.errors)} could not be "
            f"scored and "
            f"{'is' if outcome.errors == 1 else 'are'} listed in errors.jsonl with the reason."
        )
    of = f" of {total:,}" if total is not None else ""
    done = f"{outcome.rows_done:,}{of} rows are done"
    failed = f", {_rows(outcome.errors)} failed" if outcome.errors else ""
    if outcome.state == "running":
        heard = outcome.heard_of_s
        when = (
            "" if heard is None else f" Last heard of {duration(max(heard, 0.0))} before this page was made."
        )
        return f"{done}{failed}.{when} What follows is the state up to then."
    reason = f" Reason: {cut(outcome.reason, 300)}." if outcome.reason else ""
    advice = "" if "--resume" in reason else " Run the same command with --resume to go on."
    return f"Stopped before its end: {done}{failed}.{reason}{advice}"


def groups(summary: Mapping[str, Any], survey: Survey, *, so_far: str) -> Markup:
    """Main numbers per file and task. so_far: said of numbers that are not final, empty if they are."""
    entries = summary.get("groups")
    known = [entry for entry in entries if isinstance(entry, Mapping)] if isinstance(entries, list) else []
    if not known:
        return tag("p", "No row has a result yet, so there are no numbers.", class_="empty")
    note = [tag("p", so_far, class_="empty")] if so_far else []
    has_accuracy = any(number(entry.get("acc")) is not None for entry in known)
    below = [tag("p", ACCURACY, class_="note")] if has_accuracy else []
    return tag("div", *note, *(_group(entry, survey) for entry in known), *below)


def _group(entry: Mapping[str, Any], survey: Survey) -> Markup:
    task, file = str(entry.get("task", "?")), str(entry.get("file", "?"))
    rows = _whole(entry.get("rows")) or 0
    values, note = _choices(entry, survey) if task == "choices" else _others(entry, task)
    cells = [tag("div", tag("b", value), tag("span", name), class_="metric") for name, value in values]
    return tag(
        "div",
        tag("h3", cut(file, 60), " ", tag("span", f"{task}, {_rows(rows)}", class_="aside")),
        tag("div", *cells, class_="metrics"),
        *([tag("p", note, class_="note")] if note else []),
        class_="card group",
    )


def _choices(entry: Mapping[str, Any], survey: Survey) -> tuple[list[tuple[str, str]], str]:
    with_gold = _whole(entry.get("with_gold")) or 0
    shown = [
        (METRIC_NAMES[name], _accuracy(share, with_gold))
        for name in METRICS
        if (share := number(entry.get(name))) is not None
    ]
    if not shown:
        return [
            ("rows ranked", f"{_whole(entry.get('rows')) or 0:,}")
        ], "No row has a gold answer to compare with."
    guessing = survey.guessing.get((str(entry.get("file", "")), "choices"))
    chance = "" if guessing is None else f" Guessing would give {percent(guessing.chance / guessing.rows)}."
    return shown, f"Of {_rows(with_gold)} with gold.{chance}"


def _others(entry: Mapping[str, Any], task: str) -> tuple[list[tuple[str, str]], str]:
    if task == "text":
        shown = [
            (name, f"{value:,.4g}")
            for name, key in (
                ("bits per byte", "bits_per_byte"),
                ("perplexity per token", "token_perplexity"),
                ("perplexity per word", "word_perplexity"),
                ("perplexity per byte", "byte_perplexity"),
            )
            if (value := number(entry.get(key))) is not None
        ]
        if shown:
            return shown, "Lower is better. Sums over all tokens of the file, not means of rows."
        return [("tokens", short(number(entry.get("tokens")) or 0))], (
            "There is no perplexity: no token was scored, or one had probability zero."
        )
    logprob, tokens = number(entry.get("logprob")), number(entry.get("tokens"))
    if task == "continuation" and logprob is not None and tokens:
        rows = number(entry.get("rows")) or 1
        greedy = number(entry.get("greedy")) or 0
        return [
            ("ln p per token", f"{logprob / tokens:.4f}"),
            ("greedy rows", f"{percent(greedy / rows)}"),
            ("tokens scored", short(tokens)),
        ], "Greedy: the model would have written exactly this continuation by itself."
    plain = {
        str(key).replace("_", " "): value
        for key, value in entry.items()
        if key not in ("file", "task") and number(value) is not None
    }
    return [(name, short(number(value) or 0)) for name, value in plain.items()], ""


def _accuracy(share: float, rows: int) -> str:
    if not rows:
        return percent(share)
    # Normal approximation of a binomial share: enough for a reader to see which differences are noise.
    return f"{percent(share)} ± {100 * 1.96 * (share * (1 - share) / rows) ** 0.5:.1f}"


def _tiles(outcome: Outcome) -> list[tuple[str, str, str]]:
    """Name, value and a line below, of each large figure."""
    total = outcome.rows_total
    rows = f"{outcome.rows_done:,}"
    share = "" if not total or outcome.state == "complete" else f"of {total:,}"
    tiles = [("rows", rows, share), ("errors", f"{outcome.errors:,}", "")]
    if outcome.ran_s is not None:
        tiles.append(("time", duration(outcome.ran_s), ""))
    if outcome.rate_per_s is not None:
        tiles.append(("rows a second", short(outcome.rate_per_s), ""))
    if outcome.hit_rate is not None:
        ideal = outcome.ideal_hit_rate
        tiles.append(
            ("hit rate", percent(outcome.hit_rate), "" if ideal is None else f"ideal {percent(ideal)}")
        )
    if outcome.replicas is not None:
        died = f"{outcome.deaths:,} died" if outcome.deaths else ""
        tiles.append(("replicas", f"{outcome.replicas:,}", died))
    return tiles


def _tile(name: str, value: str, below: str) -> Markup:
    return tag("div", tag("b", value), tag("span", name), tag("small", below), class_="tile")


def _rows(count: int) -> str:
    return counted(count, "row")


def _whole(value: Any) -> int | None:
    known = number(value)
    return None if known is None else int(known)
