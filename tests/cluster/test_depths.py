"""Rows that go as deep as a rule says: exact at their depth, the same in any order, company and pool."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinyloop.cluster.agreement import sampled
from tinyloop.cluster.costs import PlacementRules
from tinyloop.cluster.depth_rule import DepthRequest, beyond, parse_cascade
from tinyloop.cluster.encoding import Encoder, EncodingPolicy
from tinyloop.cluster.errors import UsageError
from tinyloop.cluster.items import Groups
from tinyloop.cluster.kinds import Backend, ModelChoice
from tinyloop.cluster.progress import PoolFigures
from tinyloop.cluster.score import run_score
from tinyloop.cluster.scoring import score_rows
from tinyloop.cluster.segments import CutRules, cut_window
from tinyloop.cluster.settings import ScoreSettings
from tinyloop.cluster.tasks import ChoicesResult, PairResult, TaskOptions, TextResult
from tinyloop.native import Model, load_model
from tinyloop.native.format import read_header
from tinyloop.native.models import default_model_path
from tinyloop.native.tokenizer import load_tokenizer
from tinyloop.workers.effort import Effort

from .engine_pool import EnginePool
from .score_driver import NoDisplay
from .simulated import ragged_items

WINDOW = 96
CASCADE = Effort((1, 2, 4), 1.0, 0.35)
GATE = Effort((1, 4), None, 0.35)
SMALL = PlacementRules(chunk_rows=60, chunk_items=3, stream_items=0)
LOOPED = {"exit_gate": True, "loops": 4}


@pytest.fixture(scope="module")
def models() -> Iterator[list[Model]]:
    pair = [load_model(default_model_path(), max_seq_len=WINDOW, threads=1) for _ in range(2)]
    yield pair
    for model in pair:
        model.close()


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    header = read_header(default_model_path())
    return Encoder(load_tokenizer(header), EncodingPolicy.of_model(header.descriptor, WINDOW))


@pytest.fixture(scope="module")
def plain_runs() -> dict[str, Any]:
    """Filled in by whoever needs them first: they take a while."""
    return {}


def make_rows() -> list[dict[str, Any]]:
    shots = "Definition: a large cat.\nWord: tiger\nDefinition: frozen water.\nWord: ice\n"
    words = ["life", "native", "substance", "organism", "hammer", "river", "music", "captain"]
    rows: list[dict[str, Any]] = []
    for k in range(14):
        context = f"{shots if k % 3 else ''}Definition: the thing number {k} of a {words[k % 8]}.\nWord:"
        choices = [f" {words[(k + j) % 8]}" for j in range(2 + k % 3)]
        rows.append({"id": f"q{k}", "context": context, "choices": choices, "gold": k % 2})
    rows.append(rows[0] | {"id": "again"})
    rows.append({"id": "twins", "context": "A", "choices": [" b", " b"]})
    rows.append({"id": "one", "context": "The sky is", "choices": [" blue."]})
    rows.append({"id": "pair", "context": "The sky is", "continuation": " blue."})
    rows.append({"id": "text", "text": "The cat sat on the mat, and then it slept. " * 10})
    return rows


def fingerprint_of(result: Any) -> Any:
    """Every number of a result."""
    if isinstance(result, ChoicesResult):
        scores = [
            (c.score.token_logprobs, c.unconditional and c.unconditional.token_logprobs)
            for c in result.choices
        ]
        return result.row.id, result.depth, scores, result.pred
    if isinstance(result, PairResult):
        return result.row.id, result.depth, result.score.token_logprobs
    assert isinstance(result, TextResult)
    return result.row.id, result.depths, result.token_logprobs


def scored(
    models: list[Model],
    encoder: Encoder,
    rows: list[dict[str, Any]],
    effort: Effort,
    *,
    pmi: bool = False,
    **pool: Any,
) -> dict[str, Any]:
    made = EnginePool(models, pool.pop("rules", SMALL), **pool)
    options = TaskOptions(token_logprobs=True, pmi=pmi)
    found = score_rows(made, encoder, rows, depth=4, options=options, cascade=effort)
    made.close()
    return {result.row.id: result for result in found}


def at_depth(
    models: list[Model], encoder: Encoder, rows: list[dict[str, Any]], depth: int, pmi: bool
) -> dict[str, Any]:
    """Plain runs, one row a window, without company or prefixes of others."""
    found = {}
    for row in rows:
        made = EnginePool(models[:1])
        options = TaskOptions(token_logprobs=True, pmi=pmi)
        (result,) = score_rows(made, encoder, [row], depth=depth, options=options)
        made.close()
        found[result.row.id] = result
    return found


@pytest.mark.parametrize(("effort", "pmi"), [(CASCADE, False), (CASCADE, True), (GATE, False)])
def test_each_row_has_the_numbers_of_a_plain_run_at_its_depth(
    models: list[Model], encoder: Encoder, plain_runs: dict[str, Any], effort: Effort, pmi: bool
) -> None:
    rows = make_rows()
    results = scored(models[:1], encoder, rows, effort, pmi=pmi)
    key = f"pmi={pmi}"
    if key not in plain_runs:
        plain_runs[key] = {depth: at_depth(models, encoder, rows, depth, pmi) for depth in (1, 2, 3, 4)}
    plain = plain_runs[key]
    for name, result in results.items():
        if isinstance(result, TextResult):
            begin = 0
            for count, depth in result.depths:
                expected = plain[depth][name].token_logprobs[begin : begin + count]
                assert result.token_logprobs[begin : begin + count] == expected
                begin += count
            assert begin == result.n_tokens
        else:
            assert fingerprint_of(result) == fingerprint_of(plain[result.depth][name])
    if effort.margin is not None:
        check_margins(results, plain, effort)
    assert len({result.depth for result in results.values()}) > 1, "the case is too easy"
    assert results["again"].depth == results["q0"].depth


def check_margins(results: dict[str, Any], plain: dict[int, dict[str, Any]], effort: Effort) -> None:
    assert effort.margin is not None
    for name, result in results.items():
        if not isinstance(result, ChoicesResult) or len(result.choices) < 2:
            continue
        for depth in effort.depths:
            sums = sorted(choice.score.logprob for choice in plain[depth][name].choices)
            if sums[-1] - sums[-2] >= effort.margin:
                break
        assert result.depth == depth, name
    assert results["twins"].depth == effort.depths[-1]


@pytest.mark.parametrize("effort", [CASCADE, GATE])
def test_neither_order_nor_pool_nor_deaths_change_a_result(
    models: list[Model], encoder: Encoder, effort: Effort
) -> None:
    rows = make_rows()
    shuffled = random.Random(3).sample(rows, len(rows))
    runs = [
        scored(models[:1], encoder, rows, effort),
        scored(models[:1], encoder, shuffled, effort, rules=PlacementRules()),
        scored(models, encoder, rows, effort),
        scored(models, encoder, shuffled, effort, doomed={0}),
        scored(models[:1], encoder, rows, effort, budget_bytes=0),
        scored(models[:1], encoder, rows, effort, budget_bytes=3 << 20),
    ]
    prints = [{name: fingerprint_of(result) for name, result in run.items()} for run in runs]
    assert all(other == prints[0] for other in prints[1:])


def test_a_row_without_choices_needs_a_gate(models: list[Model], encoder: Encoder) -> None:
    with pytest.raises(UsageError, match=r"row 'pair'.*no margin to cascade by: give --exit-threshold"):
        scored(models[:1], encoder, make_rows()[-2:], Effort((1, 4), 1.0))


def test_groups_share_what_all_compared_items_have() -> None:
    """Positions are groups; what the compared items of one share is built for it alone."""
    head, tail = list(range(1, 13)), list(range(20, 32))
    rows = [
        [*head, *tail, 40, 41], [*head, *tail, 42, 43], [7, 44],
        [*head, 50, 51, 52, 53], [*head, 50, 54, 55, 56], [7, 57],
        [60, 61, 62],
    ]  # fmt: skip
    scored_ids = [1, 1, 1, 1, 1, 1, 1]
    items = replace(
        ragged_items([np.array(row) for row in rows], scored_ids, depth=1),
        groups=Groups(
            np.array([0, 3, 6, 7]),
            np.array([True, True, False, True, True, False, True]),
            Effort((1, 2), 1.0),
        ),
    )
    cut = cut_window(items, CutRules("model", 1000), client="c", window=0)
    assert cut.weights is not None
    assert sorted(cut.order.tolist()) == [0, 1, 2]
    place = {group: position for position, group in enumerate(cut.order.tolist())}
    lengths = [
        int(cut.node_lengths[cut.node_of[place[g]]]) if cut.node_of[place[g]] >= 0 else 0 for g in range(3)
    ]
    assert lengths == [24, 12, 0]
    assert [int(cut.weights[place[g]]) for g in range(3)] == [2, 2, 1]
    assert [int(cut.rows[place[g]]) for g in range(3)] == [25 + 25 + 1, 15 + 15 + 1, 2]
    # 12 of both and 12 more of the first; then what each item has of its own.
    assert cut.ideal_rows == 12 + 12 + (1 + 1 + 1) + 1 + (2 + 2 + 1) + 2
    assert items.of_units(np.array([0, 2], np.int32)).tolist() == [0, 1, 2, 6]
    assert items.units_of(np.array([1, 2, 6], np.int32)).tolist() == [0, 2]


@pytest.mark.parametrize(
    ("text", "depths"),
    [("2:4", (2, 4)), ("1:2:4", (1, 2, 4)), ("4", None), ("4:2", None), ("a:b", None), ("0:2", None)],
)
def test_cascades_are_rising_depths(text: str, depths: tuple[int, ...] | None) -> None:
    if depths is not None:
        assert parse_cascade(text) == depths
        return
    with pytest.raises(UsageError, match=f"--cascade is '{text}'"):
        parse_cascade(text)


@pytest.mark.parametrize(
    ("request_", "depth", "model", "message"),
    [
        (DepthRequest(margin=1.0), None, LOOPED, "--margin is of a cascade"),
        (DepthRequest((2, 4)), None, LOOPED, "--cascade needs --margin"),
        (DepthRequest((2, 4), 1.0), 3, LOOPED, "--cascade and --depth exclude"),
        (DepthRequest((2, 4), 1.0, 0.5, 2), None, LOOPED, "--cascade and --min-depth exclude"),
        (DepthRequest((2, 4), -1.0), None, LOOPED, "--margin is -1"),
        (DepthRequest(min_depth=2), None, LOOPED, "--min-depth is of an exit gate"),
        (DepthRequest(exit_threshold=1.0), None, LOOPED, "--exit-threshold is 1"),
        (DepthRequest(exit_threshold=0.5, min_depth=5), None, LOOPED, "--min-depth is 5, the depth is 4"),
        (DepthRequest(exit_threshold=0.5), None, LOOPED | {"exit_gate": False}, "the model has no exit gate"),
        (DepthRequest((1, 2), 1.0), None, LOOPED | {"loops": 1}, "looped models"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(
    request_: DepthRequest, depth: int | None, model: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        request_.effort(depth, model)


def test_a_depth_beyond_the_trained_one_is_warned_of() -> None:
    assert beyond(Effort((2, 4), 1.0), 4) == ()
    assert "depth 6 is beyond the 4 loops" in beyond(Effort((2, 6), 1.0), 4)[0]
    assert DepthRequest().effort(3, LOOPED) is None
    assert DepthRequest(exit_threshold=0.5).effort(6, LOOPED) == Effort((1, 6), None, 0.5)


def job(
    tmp_path: Path, models: list[Model], encoder: Encoder, rows: list[dict[str, Any]], **changes: Any
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A score job over an EnginePool. Returns its summary and its results."""
    source, output = tmp_path / "rows.jsonl", tmp_path / changes.pop("output", "out")
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = ScoreSettings(inputs=(str(source),), output=output, **changes)
    identity = {"digest": models[0].digest, "depth": settings.depth or 4, "max_seq_len": WINDOW}

    @contextmanager
    def open_backend() -> Iterator[Backend]:
        pool = EnginePool(models, SMALL)
        yield Backend(
            pool=pool,  # type: ignore[arg-type]
            encoder=encoder,
            depth=settings.depth or 4,
            identity=identity,
            figures=lambda: PoolFigures(1, 1, None, None),
        )
        pool.close()

    effort = settings.depths.effort(settings.depth, models[0].descriptor)
    choice = ModelChoice(identity, encoder.policy, {})
    summary = run_score(settings, choice, open_backend, NoDisplay(), effort)
    return summary, [json.loads(line) for line in (output / "results.jsonl").read_text().splitlines()]


def test_a_job_says_how_deep_rows_went_what_it_saved_and_what_that_cost(
    tmp_path: Path, models: list[Model], encoder: Encoder
) -> None:
    rows = make_rows()
    depths = DepthRequest((1, 2, 4), 1.0, 0.35, agreement_rows=12)
    summary, results = job(tmp_path, models[:1], encoder, rows, depths=depths, token_logprobs=True)
    full, at_full = job(tmp_path, models[:1], encoder, rows, output="full", depth=4)
    assert "loops" not in full
    assert "agreement" not in full
    by_depth: dict[str, int] = {}
    for result in results:
        by_depth[str(result["depth"])] = by_depth.get(str(result["depth"]), 0) + 1
    assert summary["depth"]["rows_by_depth"] == dict(sorted(by_depth.items()))
    means = [result.get("depth_mean", result["depth"]) for result in results]
    assert summary["depth"]["mean"] == pytest.approx(sum(means) / len(means), rel=1e-12)
    assert full["depth"] == {"mean": 4.0, "rows_by_depth": {"4": len(rows)}}
    loops = summary["loops"]
    assert loops["saved"] == round(1 - loops["row_loops"] / loops["row_loops_at_full_depth"], 6)

    text = results[-1]
    assert len(text["token_depths"]) == len(text["token_logprobs"]) == text["n_tokens"]
    assert max(text["token_depths"]) == text["depth"]
    assert text["depth_mean"] == pytest.approx(sum(text["token_depths"]) / text["n_tokens"], rel=1e-12)

    checked = summary["agreement"]
    ids = set(sampled((tmp_path / "out" / "results.jsonl").read_bytes().splitlines(), 12))
    pairs = [(a, b) for a, b in zip(results, at_full, strict=True) if a["id"] in ids]
    ranked = [(a["pred"]["acc"], b["pred"]["acc"]) for a, b in pairs if a["task"] == "choices"]
    assert (checked["rows"], checked["failed"], checked["full_depth"]) == (12, 0, 4)
    assert checked["same_choice"] == sum(a == b for a, b in ranked) / len(ranked)
    distances = []
    for a, b in pairs:
        both = zip(a["choices"], b["choices"], strict=True) if a["task"] == "choices" else [(a, b)]
        distances += [abs(x["logprob"] - y["logprob"]) for x, y in both]
    assert checked["mean_abs_logprob_difference"] == pytest.approx(sum(distances) / len(distances), rel=1e-9)
    again = [(a["correct"]["acc"], b["correct"]["acc"]) for a, b in pairs if "gold" in a]
    assert checked["with_gold"] == len(again) > 0
    assert checked["accuracy_difference"] == pytest.approx(
        sum(a for a, _ in again) / len(again) - sum(b for _, b in again) / len(again), abs=1e-12
    )


def test_every_depth_option_is_in_the_fingerprint(
    tmp_path: Path, models: list[Model], encoder: Encoder
) -> None:
    rows = make_rows()[:4]
    requests = [
        DepthRequest((2, 4), 1.0, agreement_rows=0),
        DepthRequest((3, 4), 1.0, agreement_rows=0),
        DepthRequest((2, 4), 2.0, agreement_rows=0),
        DepthRequest((2, 4), 1.0, 0.5, agreement_rows=0),
        DepthRequest(exit_threshold=0.5, agreement_rows=0),
    ]
    for number, (first, second) in enumerate(pairwise([*requests, requests[0]])):
        output = f"out{number}"
        job(tmp_path, models[:1], encoder, rows, output=output, depths=first)
        with pytest.raises(UsageError, match=r"task\.effort"):
            job(tmp_path, models[:1], encoder, rows, output=output, depths=second, resume=True)
    other = replace(requests[0], agreement_rows=3)
    summary, _ = job(tmp_path, models[:1], encoder, rows, output="out0", depths=other, resume=True)
    assert summary["state"] == "complete"


def test_a_job_with_a_row_that_cannot_cascade_is_refused_before_it_starts(
    tmp_path: Path, models: list[Model], encoder: Encoder
) -> None:
    with pytest.raises(UsageError, match="no two choices"):
        job(tmp_path, models[:1], encoder, make_rows(), depths=DepthRequest((2, 4), 1.0))
    assert not (tmp_path / "out" / "run.json").exists()
    summary, _ = job(tmp_path, models[:1], encoder, make_rows()[:16], depths=DepthRequest((2, 4), 1.0))
    assert summary["results"] == 16


@pytest.mark.parametrize("count", [0, 1, 5, 50])
def test_the_sample_is_of_the_smallest_hashes(count: int) -> None:
    from tinyloop.cluster.summary import id_code

    names = [f"row-{k}" for k in range(20)]
    lines = [json.dumps({"id": name}).encode() for name in names]
    assert set(sampled(lines, count)) == set(sorted(names, key=id_code)[:count])
