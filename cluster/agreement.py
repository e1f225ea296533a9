"""What going less deep cost: some finished rows are scored once more, at full depth, and compared.

The rows are those with the smallest id hashes, so that every run of a job takes the same ones.
"""

from __future__ import annotations

import heapq
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .errors import InfrastructureError
from .rows import Row, RowFailure
from .scoring import Scorer
from .summary import id_code
from .tasks import ChoicesResult, RowResult, TextResult

COLLECT_TIMEOUT_S = 0.2


def sampled(results: Iterable[bytes], count: int) -> dict[str, dict[str, Any]]:
    """The results of `count` rows, by id; of all if there are fewer. Memory: those results."""
    kept: list[tuple[int, int, dict[str, Any]]] = []
    for number, line in enumerate(results):
        result = json.loads(line)
        entry = (-id_code(result["id"]), -number, result)
        if len(kept) < count:
            heapq.heappush(kept, entry)
        elif count and entry > kept[0]:
            heapq.heapreplace(kept, entry)
    return {result["id"]: result for _, _, result in kept}


def measure(
    scorer: Scorer,
    results: Iterable[bytes],
    rows: Iterable[Row | RowFailure],
    count: int,
    after_step: Callable[[], None],
) -> dict[str, Any]:
    """Score rows sampled from lines of results with `scorer`, which has the full depth, and compare.

    after_step: called while it waits; what it raises ends it. Raises: InfrastructureError, and what the pool
    raises.
    """
    began_s = time.monotonic()
    before = sampled(results, count)
    plans, again = scorer.plan([row for row in rows if isinstance(row, Row) and row.id in before]), []
    window = scorer.submit([plan for plan in plans if not isinstance(plan, RowFailure)])
    while not window.is_done:
        again += window.take_finished()
        after_step()
        if not window.is_done:
            scorer.collect(COLLECT_TIMEOUT_S)
    scorer.release(window)
    scored = [outcome for outcome in again if not isinstance(outcome, RowFailure)]
    if len(plans) < len(before):
        raise InfrastructureError(
            f"{len(before) - len(plans)} rows that were scored are not in the input any more: start again "
            "with --overwrite"
        )
    return {
        "full_depth": scorer.depth,
        "rows": len(scored),
        "failed": len(before) - len(scored),
        **compare([(before[outcome.row.id], outcome) for outcome in scored]),
        "tokens_submitted": window.num_tokens,
        "elapsed_s": round(time.monotonic() - began_s, 3),
    }


def compare(pairs: list[tuple[Mapping[str, Any], RowResult]]) -> dict[str, Any]:
    """Results as written against the same rows at full depth. None where there is nothing to compare."""
    same = ranked = with_gold = correct = correct_full = 0
    differences: list[float] = []
    for written, full in pairs:
        if isinstance(full, ChoicesResult):
            pred = written["pred"]["acc"]
            ranked += 1
            same += pred == full.pred["acc"]
            if full.gold is not None:
                with_gold += 1
                correct += pred == full.gold
                correct_full += full.pred["acc"] == full.gold
            scores = zip(written["choices"], full.choices, strict=True)
            logprobs = [(one["logprob"], choice.score.logprob) for one, choice in scores]
        else:
            value = full.logprob if isinstance(full, TextResult) else full.score.logprob
            logprobs = [(written["logprob"], value)]
        # null is a zero probability, which has no distance to anything.
        differences += [abs(a - b) for a, b in logprobs if a is not None and math.isfinite(b)]
    gold: dict[str, Any] = {"with_gold": with_gold}
    if with_gold:
        gold |= {
            "accuracy": correct / with_gold,
            "accuracy_full_depth": correct_full / with_gold,
            "accuracy_difference": (correct - correct_full) / with_gold,
        }
    return {
        "rows_with_choices": ranked,
        "same_choice": same / ranked if ranked else None,
        **gold,
        "mean_abs_logprob_difference": math.fsum(differences) / len(differences) if differences else None,
    }
