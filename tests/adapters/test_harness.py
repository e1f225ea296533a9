"""lm-evaluation-harness with our adapter against its own `hf` backend, on the same weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lm_eval
import pytest
import torch
from harness_tasks import TASKS, write_tasks
from lm_eval.api.model import CachingLM
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from paired_models import BOS, EOS, PairedModel, paired_model
from tinyloop.cluster.adapters.harness import HarnessModel
from tinyloop.cluster.adapters.harness_errors import HarnessError

# Both compute in float32, in other orders; a long document adds up some hundreds of such roundings.
TOLERANCE = 1e-3
# Two candidates nearer than this may be ranked either way by sums that are each off by the tolerance.
MARGIN = 2 * TOLERANCE
# Two logits nearer than this may be ranked either way.
LOGIT_MARGIN = 1e-3

Request = SimpleNamespace


@pytest.fixture(scope="module")
def paired(tmp_path_factory: pytest.TempPathFactory) -> PairedModel:
    return paired_model(tmp_path_factory.mktemp("paired"), adds_bos=True)


@pytest.fixture(scope="module")
def ours(session: None, paired: PairedModel) -> Iterator[HarnessModel]:
    with HarnessModel(model=str(paired.file), replicas=2, threads=1, numeric="fp32") as model:
        yield model


@pytest.fixture(scope="module")
def theirs(paired: PairedModel) -> HFLM:
    torch.set_num_threads(1)
    return HFLM(pretrained=str(paired.folder), dtype="float32", batch_size=4, device="cpu")


@pytest.fixture(scope="module")
def runs(
    ours: HarnessModel, theirs: HFLM, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], dict[str, Any]]:
    """All tasks by our adapter and by theirs."""
    folder = write_tasks(tmp_path_factory.mktemp("tasks"))
    return evaluated(ours, folder), evaluated(theirs, folder)


def evaluated(model: Any, folder: Path) -> dict[str, Any]:
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    results = lm_eval.simple_evaluate(model=model, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0)
    assert results is not None
    return dict(results)


def requests_of(*arguments: tuple[Any, ...]) -> list[Request]:
    return [SimpleNamespace(args=one) for one in arguments]


def nearest(values: Sequence[float]) -> float:
    """How far the two best values are apart."""
    best, second = sorted(values, reverse=True)[:2]
    return best - second


@pytest.mark.parametrize("task", ["tiny_choices", "tiny_few_shots"])
def test_choices_have_the_same_log_probabilities_and_metrics(
    runs: tuple[dict[str, Any], dict[str, Any]], task: str
) -> None:
    own, other = runs
    clear = 0
    samples = list(zip(own["samples"][task], other["samples"][task], strict=True))
    for mine, reference in samples:
        assert mine["arguments"] == reference["arguments"]
        sums = []
        for (value, greedy), (expected, expected_greedy) in zip(
            mine["filtered_resps"], reference["filtered_resps"], strict=True
        ):
            assert value == pytest.approx(expected, abs=TOLERANCE)
            assert greedy == expected_greedy
            sums.append(expected)
        n = len(mine["doc"]["choices"])
        lengths = [len(choice) for choice in mine["doc"]["choices"]]
        by_metric = {
            "acc": sums[:n],
            "acc_norm": [total / length for total, length in zip(sums, lengths, strict=False)],
            "acc_mutual_info": [one - alone for one, alone in zip(sums[:n], sums[n:], strict=True)],
        }
        for metric, values in by_metric.items():
            if nearest(values) > MARGIN:
                clear += 1
                assert mine[metric] == reference[metric]
    # Nearly all are: a metric over them is the same number, which need not be looked at with a tolerance.
    assert clear == 3 * len(samples)
    for metric in ("acc,none", "acc_norm,none", "acc_mutual_info,none"):
        assert own["results"][task][metric] == other["results"][task][metric]


def test_some_contexts_are_cut_and_counted(
    runs: tuple[dict[str, Any], dict[str, Any]], ours: HarnessModel
) -> None:
    """Else the tasks would not show that both cut alike."""
    info = runs[0]["config"]["tinyloop"]
    assert 0 < info["truncated"] < 320
    assert info["own_splits"] == 0
    assert info["split"].startswith("lm-evaluation-harness's own")
    assert (info["depth"], info["add_bos"], info["max_length"]) == (1, True, ours.max_length)


def test_documents_have_the_same_perplexity(runs: tuple[dict[str, Any], dict[str, Any]]) -> None:
    own, other = runs
    task = "tiny_documents"
    for mine, reference in zip(own["samples"][task], other["samples"][task], strict=True):
        (value,), (expected,) = mine["filtered_resps"], reference["filtered_resps"]
        # A document of several windows is a sum over as many hundred tokens.
        assert value == pytest.approx(expected, abs=TOLERANCE)
    for metric in ("word_perplexity,none", "byte_perplexity,none", "bits_per_byte,none"):
        # Exponentials of means: an error of the mean is a relative one of these.
        assert own["results"][task][metric] == pytest.approx(other["results"][task][metric], rel=1e-5)


# ---- texts and ids -------------------------------------------------------------------------------

TEXTS = ["salt", " salt", "salt ", "\u00e9t\u00e9\n\n", f"{BOS}salt", f"salt{EOS} ships", "\U0001f6a2", ""]


def test_texts_have_the_same_ids(ours: HarnessModel, theirs: HFLM) -> None:
    for text in TEXTS:
        assert ours.tok_encode(text) == theirs.tok_encode(text), text
        assert ours.tok_encode(text, add_special_tokens=False) == theirs.tok_encode(
            text, add_special_tokens=False
        )
    assert ours.prefix_token_id == theirs.prefix_token_id
    assert ours.eot_token_id == theirs.eot_token_id
    assert ours.max_length == theirs.max_length


def test_odd_pairs_have_the_same_log_probabilities(ours: HarnessModel, theirs: HFLM) -> None:
    """Whitespace before the join, no context, a context with BOS, tokens that span the join."""
    pairs = [
        ("The keeper ", "counted"),
        ("The keeper\n\n", "counted"),
        ("", "The ships"),
        ("", f"{BOS}The ships"),
        (f"{BOS}The", " ships"),
        ("The lighth", "ouse counted"),
        ("shi", "ps passed before"),
        ("Nobody asked " * 40, "him to stop"),
    ]
    merged = ours._counts["merged_boundaries"]
    found = ours.loglikelihood(requests_of(*pairs), disable_tqdm=True)
    expected = theirs.loglikelihood(requests_of(*pairs), disable_tqdm=True)
    for pair, mine, reference in zip(pairs, found, expected, strict=True):
        assert mine[0] == pytest.approx(reference[0], abs=TOLERANCE), pair
        assert mine[1] == reference[1]
    assert ours._counts["merged_boundaries"] - merged == 2


def test_what_the_harness_cannot_split_is_scored_by_our_rule_and_counted(
    ours: HarnessModel, theirs: HFLM
) -> None:
    """One token spans the whole continuation; a context is whitespace: theirs ends the run."""
    pairs = [("shi", "ps"), (" \n", "ships")]
    before = ours._counts["own_splits"]
    found = ours.loglikelihood(requests_of(*pairs), disable_tqdm=True)
    assert ours._counts["own_splits"] - before == 2
    for pair in pairs[:1]:
        with pytest.raises(AssertionError):
            theirs.loglikelihood(requests_of(pair), disable_tqdm=True)
    rows = [{"context": context, "continuation": text} for context, text in pairs]
    results = ours._pool.score(rows)
    assert [value for value, _ in found] == [one.score.logprob for one in results]  # type: ignore[union-attr]
    assert results[0].encoded.boundary == "merged"  # type: ignore[union-attr]


def test_requests_that_cannot_be_scored_are_named(ours: HarnessModel) -> None:
    with pytest.raises(HarnessError, match=r"request 1 'b' \+ '' cannot be scored: empty_continuation"):
        ours.loglikelihood(requests_of(("a", " b"), ("b", "")), disable_tqdm=True)
    long = "ship " * 300
    with pytest.raises(HarnessError, match=r"request 0 'a' \+ 'ship .*continuation_too_long.*takes 128"):
        ours.loglikelihood(requests_of(("a", long)), disable_tqdm=True)
    with pytest.raises(HarnessError, match=r"cannot encode .*ud835"):
        ours.loglikelihood(requests_of(("a", "\ud835")), disable_tqdm=True)
    # It goes on as if nothing had been.
    assert len(ours.loglikelihood(requests_of(("a", " b")), disable_tqdm=True)) == 1


# ---- caches --------------------------------------------------------------------------------------


def test_a_response_cache_serves_the_model_that_filled_it_alone(
    ours: HarnessModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = requests_of(("The", " keeper"), ("The", " ships"))
    file = str(tmp_path / "answers.db")
    first = CachingLM(ours, file).loglikelihood(requests)
    monkeypatch.setattr(ours, "loglikelihood", None)  # whatever is asked of it now fails
    assert CachingLM(ours, file).loglikelihood(requests) == first
    monkeypatch.setattr(ours._pool, "depth", 3)
    with pytest.raises(HarnessError, match=r"answers\.db.*depth was 1, is 3: give --use_cache another name"):
        CachingLM(ours, file)
    monkeypatch.undo()
    other = str(tmp_path / "other.db")
    CachingLM(Foreign(), other).dbdict["some request"] = (-1.0, True)
    with pytest.raises(HarnessError, match="does not say which model"):
        CachingLM(ours, other)
    ours.set_cache_hook(lm_eval.api.model.CacheHook(None))


class Foreign:
    """A model that knows nothing of what is written into caches."""

    def set_cache_hook(self, hook: Any) -> None:
        pass


def test_prompts_are_cached_under_a_name_with_model_and_depth(
    ours: HarnessModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = ours.tokenizer_name
    assert ours._pool.replicas.info.digest in name
    monkeypatch.setattr(ours._pool, "depth", 2)
    assert ours.tokenizer_name != name


# ---- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"depht": 2}, r"unknown key 'depht': did you mean depth"),
        ({"replicas": "two"}, r"replicas=two: give a whole number"),
        ({"depth": True}, r"depth=True: give a whole number"),
        ({"max_length": 64, "max_seq_len": 64}, r"gives max_seq_len twice"),
        ({"device": "cuda:0"}, r"device 'cuda:0': give cpu, or cuda"),
        ({"add_bos_token": "maybe"}, r"add_bos_token=maybe: give true or false"),
        ({"model": "/nowhere/at/all"}, r"cannot use model '/nowhere/at/all'"),
        ({"model": "MODEL", "depth": 2}, r"depth is 2, the model is not a looped one"),
    ],
)
def test_settings_that_are_wrong_are_named(settings: dict[str, Any], words: str, paired: PairedModel) -> None:
    if settings.get("model") == "MODEL":
        settings = settings | {"model": str(paired.file)}
    with pytest.raises(HarnessError, match=words):
        HarnessModel(**settings)


def test_a_launcher_of_several_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(HarnessError, match="start one and give --model_args replicas=N"):
        HarnessModel()
