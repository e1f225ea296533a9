"""What a model will hold in memory, before anything is loaded: by owner, by cache mode, and what would fit.

Every figure comes from the engine's own plan, which a test holds against loaded models to the byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from .cache_size import state_bytes
from .digits import is_digits
from .engine import MAX_DEPTH, MemoryPlan, plan
from .format import read_header

MODES = ("fp16", "int8", "h_fp16", "h_int8", "h_int4")
# Smaller pieces than these leave the CPU's kernels short of rows.
LEAST_CHUNK, LEAST_ROWS = 64, 256
# The other modes, the most faithful first: tests/bench/cache_modes.py measured it.
BY_FAITH = ("h_fp16", "int8", "h_int8", "h_int4")
MAX_BUDGET = 2**63 - 1
POLICY_PAGE = "native/CACHE_MODES.md"


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """As load_model takes them; depth None is the model's own.

    prefix_tokens: length of each prefix that is to be held, None: 512 or what the model's positions allow.
    budget_bytes: of the model and its prefixes together.
    """

    max_seq_len: int | None = None
    prefill_chunk: int = 0
    cache_mode: str = "fp16"
    threads: int | None = None
    depth: int | None = None
    prefix_tokens: int | None = None
    budget_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class ModeRow:
    """One cache mode.

    token_bytes: one more token of a prefix, states aside. prefix_bytes: one prefix as Model.prefix builds it,
    states included where the model has more than one loop. prefixes: how many fit the budget beside the
    model, None without a budget.
    """

    mode: str
    model_bytes: int
    token_bytes: int
    prefix_bytes: int
    prefixes: int | None
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PlanTable:
    """options: with the defaults filled in. owners: bytes right after the load, model_bytes: their sum.
    logit_rows_bytes: on top, from the first sampled token on."""

    path: str
    options: PlanOptions
    owners: dict[str, int]
    model_bytes: int
    logit_rows_bytes: int
    modes: tuple[ModeRow, ...]
    suggestions: tuple[str, ...]

    @property
    def chosen(self) -> ModeRow:
        return next(row for row in self.modes if row.mode == self.options.cache_mode)

    def as_json(self) -> dict[str, object]:
        return {**asdict(self), "policy": POLICY_PAGE}


def plan_table(path: Path, given: PlanOptions) -> PlanTable:
    """Everything that `tinyloop plan` prints.

    Raises: LoadError or FormatError for a file or options that would not load; ValueError for what is asked
    about prefixes and the budget.
    """
    descriptor = read_header(path).descriptor
    loops, positions = int(str(descriptor["loops"])), int(str(descriptor["max_positions"]))
    options = replace(
        given,
        depth=loops if given.depth is None else given.depth,
        max_seq_len=min(2048, positions) if given.max_seq_len is None else given.max_seq_len,
        prefix_tokens=min(512, positions - 1) if given.prefix_tokens is None else given.prefix_tokens,
    )
    n_tokens = _checked_prefix_tokens(options, positions)
    keeps_states = loops > 1
    # The engine's figure counts the states; a prefix of a model of one loop keeps none.
    dead_states = 0 if keeps_states else state_bytes(descriptor, n_tokens)

    def planned(options: PlanOptions) -> MemoryPlan:
        assert options.max_seq_len is not None
        return plan(
            path,
            options.max_seq_len,
            options.prefill_chunk,
            cache_mode=options.cache_mode,
            threads=options.threads,
            depth=options.depth,
            prefix_length=n_tokens,
        )

    def row(mode: str) -> ModeRow:
        found = planned(replace(options, cache_mode=mode))
        prefix_bytes = found.prefix_bytes - dead_states
        prefixes = _prefixes(options.budget_bytes, found.total, prefix_bytes)
        return ModeRow(
            mode, found.total, found.cache_token_bytes, prefix_bytes, prefixes, tuple(found.warnings)
        )

    chosen = planned(options)
    modes = tuple(row(mode) for mode in MODES)
    return PlanTable(
        str(path),
        options,
        chosen.owners,
        chosen.total,
        chosen.logit_rows,
        modes,
        tuple(_suggestions(options, modes, lambda o: planned(o).total)),
    )


def _checked_prefix_tokens(options: PlanOptions, positions: int) -> int:
    tokens = options.prefix_tokens
    if tokens is None or not 1 <= tokens < positions:
        raise ValueError(
            f"cannot plan prefixes of {tokens} tokens: the model has {positions} positions, one of them for "
            f"an item: give 1..{positions - 1}"
        )
    if options.depth is not None and not 1 <= options.depth <= MAX_DEPTH:
        raise ValueError(f"cannot plan for depth {options.depth}: it must be 1..{MAX_DEPTH}")
    if options.budget_bytes is not None and options.budget_bytes < 1:
        raise ValueError(f"cannot plan for a budget of {options.budget_bytes} bytes: it must be positive")
    if options.budget_bytes is not None and options.budget_bytes > MAX_BUDGET:
        raise ValueError(f"cannot plan for a budget of more than {MAX_BUDGET:,} bytes: it must fit 63 bits")
    return tokens


def _prefixes(budget: int | None, model_bytes: int, prefix_bytes: int) -> int | None:
    return None if budget is None else max(0, (budget - model_bytes) // prefix_bytes)


def _suggestions(
    options: PlanOptions, modes: Iterable[ModeRow], total: Callable[[PlanOptions], int]
) -> Iterable[str]:
    """What to change, if not one prefix fits the budget."""
    by_mode = {row.mode: row for row in modes}
    chosen = by_mode[options.cache_mode]
    if options.budget_bytes is None or chosen.prefixes:
        return
    yield _smaller_pools(options, total, options.budget_bytes - chosen.prefix_bytes)
    better = next((by_mode[mode] for mode in BY_FAITH if by_mode[mode].prefixes), None)
    if better:
        yield f"--kv {better.mode} fits as it is, with {better.prefixes} of the prefixes"


def _smaller_pools(options: PlanOptions, total: Callable[[PlanOptions], int], room: int) -> str:
    """The first of ever smaller pools that leaves room for a prefix.

    First fewer rows of scratch, which changes no number and no limit; then fewer rows a pass, though never so
    few that the prefix could not be built in one.
    """
    assert options.max_seq_len is not None
    assert options.prefix_tokens is not None
    needed = 0
    for rows in _halved(options.max_seq_len, max(LEAST_ROWS, options.prefix_tokens)):
        for chunk in _halved(min(rows, options.prefill_chunk or rows), LEAST_CHUNK):
            needed = total(replace(options, max_seq_len=rows, prefill_chunk=chunk))
            if needed <= room:
                return (
                    f"--max-seq-len {rows} --prefill-chunk {chunk} takes {needed:,} bytes and leaves room "
                    "for a prefix"
                )
    return (
        f"the smallest pool takes {needed:,} bytes and one prefix {(options.budget_bytes or 0) - room:,}: "
        "raise --budget, or give fewer --prefix-tokens or another --kv"
    )


def _halved(start: int, least: int) -> Iterable[int]:
    size = start
    yield size
    while size > least:
        size = max(least, size // 2)
        yield size


def render(table: PlanTable) -> str:
    """The table for people, in bytes."""
    options, row = table.options, table.chosen
    owners = [[f"  {owner}", f"{size:,}"] for owner, size in table.owners.items() if size]
    owners.append(["  total", f"{table.model_bytes:,}"])
    owners.append(["  sampling", f"{table.logit_rows_bytes:,}", "  on top, from the first sampled token on"])
    titles = ["  mode", "model", "a token", "a prefix"]
    if options.budget_bytes is not None:
        titles.append(f"prefixes in {options.budget_bytes:,}")
    lines = [
        f"{Path(table.path).name}: max_seq_len {options.max_seq_len}, prefill_chunk "
        f"{options.prefill_chunk or 'whole'}, cache mode {options.cache_mode}, depth {options.depth}, "
        f"{options.threads or 'all'} threads",
        "",
        "the model, bytes by owner",
        *_aligned(owners, (14, 18)),
        "",
        f"cache modes, prefixes of {options.prefix_tokens} tokens at depth {options.depth}",
        *_aligned(
            [titles, *(_mode_cells(r, "*" if r is row else " ") for r in table.modes)], (10, 16, 12, 16, 15)
        ),
    ]
    notes = [f"warning: {text}" for r in table.modes for text in r.warnings]
    notes += [f"suggestion: {text}" for text in table.suggestions]
    return "\n".join([*lines, *([""] if notes else []), *notes, "", f"which mode to use: {POLICY_PAGE}"])


def _mode_cells(row: ModeRow, mark: str) -> list[str]:
    cells = [f"{mark} {row.mode}", f"{row.model_bytes:,}", f"{row.token_bytes:,}", f"{row.prefix_bytes:,}"]
    return cells if row.prefixes is None else [*cells, f"{row.prefixes:,}"]


def _aligned(rows: Sequence[Sequence[str]], least: Sequence[int]) -> Iterable[str]:
    """Columns of at least these widths, two spaces apart at least, the first to the left, the others to the
    right. A cell beyond the columns is a remark."""
    widths = [
        max([width, *(len(row[i]) + 2 for row in rows if i < len(row))]) for i, width in enumerate(least)
    ]
    for first, *others in rows:
        cells = [f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=False)]
        yield f"{first:<{widths[0]}}" + "".join(cells) + "".join(others[len(cells) :])


_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_bytes(text: str) -> int:
    """Read 8000000, 8MB or 8GiB. Raises: ValueError."""
    digits = text.rstrip("kKmMgGiIbB")
    factor = _UNITS.get(text[len(digits) :].upper())
    if factor is None or not is_digits(digits):
        raise ValueError(f"cannot read {text!r} as bytes: give 8000000, 8MB or 8GiB")
    # int() itself refuses thousands of digits, and would not say why it matters here.
    size = int(digits) * factor if len(digits.lstrip("0")) <= len(str(MAX_BUDGET)) else MAX_BUDGET + 1
    if size > MAX_BUDGET:
        shown = text if len(text) <= 40 else f"{text[:40]}..."
        raise ValueError(f"{shown!r} is more than {MAX_BUDGET:,} bytes: give less")
    return size
