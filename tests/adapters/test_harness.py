"""lm-evaluation-harness with our adapter against its own `hf` backend, on the same weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lm_eval
import pytest
import torch
from click.testing import Result
from harness_tasks import TASKS, write_tasks
from lm_eval.api.model import CacheHook, CachingLM
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from paired_models import BOS, EOS, WINDOW, PairedModel, paired_model
from tinyloop.cluster import registry
from tinyloop.cluster.adapters.harness import HarnessModel
from tinyloop.cluster.adapters.harness_errors import HarnessError
from tinyloop.cluster.adapters.harness_generation import Seeds, conversation_text
from tinyloop.cluster.chat_template import ChatTemplate
from tinyloop.cluster.cli import app
from tinyloop.cluster.config import PoolConfig
from tinyloop.cluster.errors import UsageError
from tinyloop.cluster.pool import ReplicaPool
from tinyloop.cluster.tasks import PairResult
from typer.testing import CliRunner

# Both compute in float32, in other orders; a long document adds up some hundreds of such roundings.
TOLERANCE = 1e-3
# Two candidates nearer than this may be ranked either way by sums that are each off by the tolerance.
MARGIN = 2 * TOLERANCE
# Two logits nearer than this may be ranked either way.
LOGIT_MARGIN = 1e-3
POOL = "harness"

Request = SimpleNamespace


@pytest.fixture(scope="module")
def paired(tmp_path_factory: pytest.TempPathFactory) -> PairedModel:
    return paired_model(tmp_path_factory.mktemp("paired"), adds_bos=True)


@pytest.fixture(scope="module")
def ours(session: None, paired: PairedModel) -> Iterator[HarnessModel]:
    config = PoolConfig(model=paired.file, replicas=2, threads=1, numeric_mode="fp32", max_seq_len=WINDOW)
    ReplicaPool.up(config, POOL).close()
    with HarnessModel(pool=POOL) as model:
        yield model
    registry.reap(POOL)


@pytest.fixture(scope="module")
def theirs(paired: PairedModel) -> HFLM:
    torch.set_num_threads(1)
    return HFLM(pretrained=str(paired.folder), dtype="float32", batch_size=4, device="cpu")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def runs(ours: HarnessModel, theirs: HFLM, tasks: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """All tasks by our adapter and by theirs."""
    return evaluated(ours, tasks), evaluated(theirs, tasks)


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


def test_answers_are_the_same_texts(runs: tuple[dict[str, Any], dict[str, Any]], theirs: HFLM) -> None:
    own, other = runs
    task, clear, stopped = "tiny_answers", 0, 0
    for mine, reference in zip(own["samples"][task], other["samples"][task], strict=True):
        (text,), (expected,) = mine["filtered_resps"], reference["filtered_resps"]
        margin = smallest_margin(theirs, mine["arguments"][0][0], expected)
        if margin > LOGIT_MARGIN:
            clear += 1
            assert text == expected
        stopped += len(theirs.tok_encode(expected)) < 20
    assert clear == len(own["samples"][task])
    assert 2 <= stopped < clear  # stop strings are met, and not everywhere
    assert own["results"][task]["exact_match,none"] == other["results"][task]["exact_match,none"]


def smallest_margin(model: HFLM, context: str, text: str) -> float:
    """Of the two likeliest ids, wherever the oracle chose one."""
    prompt = model.tok_encode(context)[-(model.max_length - 24) :]
    ids = prompt + model.tok_encode(text, add_special_tokens=False)
    with torch.no_grad():
        logits = model.model(torch.tensor([ids])).logits[0, len(prompt) - 1 :]
    best = logits.topk(2).values
    return float((best[:, 0] - best[:, 1]).min())


def test_odd_pairs_have_the_same_log_probabilities(ours: HarnessModel, theirs: HFLM) -> None:
    """Whitespace before the join, no context, a context with BOS, tokens that span the join."""
    pairs = [
        ("The keeper ", "counted"),
        ("The keeper\n\n", "counted"),
        ("", "The ships"),
        ("", f"{BOS}The ships"),
        (f"{BOS}The", " ships"),
        (" \n", "ships"),
        ("The lighth", "ouse counted"),
        ("the shi", "ps passed before"),
        ("Nobody asked " * 40, "him to stop"),
    ]
    merged = ours._counts["merged_boundaries"]
    found = ours.loglikelihood(requests_of(*pairs), disable_tqdm=True)
    # One by one: theirs mixes up pairs of the same ids that are split at different places.
    expected = [theirs.loglikelihood(requests_of(pair), disable_tqdm=True)[0] for pair in pairs]
    for pair, mine, reference in zip(pairs, found, expected, strict=True):
        assert mine[0] == pytest.approx(reference[0], abs=TOLERANCE), pair
        assert mine[1] == reference[1]
    assert ours._counts["merged_boundaries"] - merged == 2


def test_what_the_harness_cannot_split_is_scored_by_our_rule_and_counted(
    ours: HarnessModel, theirs: HFLM
) -> None:
    """One token spans the join and is all there is of the continuation: theirs ends the run."""
    pair = ("the shi", "ps")
    before = ours._counts["own_splits"]
    ((found, _),) = ours.loglikelihood(requests_of(pair), disable_tqdm=True)
    assert ours._counts["own_splits"] - before == 1
    with pytest.raises(AssertionError):
        theirs.loglikelihood(requests_of(pair), disable_tqdm=True)
    (result,) = ours._pool.score([{"context": pair[0], "continuation": pair[1]}])
    assert isinstance(result, PairResult)
    assert (found, result.encoded.boundary) == (result.score.logprob, "merged")


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
    ours.set_cache_hook(CacheHook(None))


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


# ---- generation ----------------------------------------------------------------------------------


def test_drawn_completions_differ_by_repeat_and_depend_on_nothing_else(ours: HarnessModel) -> None:
    drawn = {"do_sample": True, "temperature": 1.0, "top_p": 0.9, "max_gen_toks": 8, "until": []}
    asked = [("The keeper", drawn), ("The keeper", drawn), ("Some ships", drawn)]
    before, ours._seeds = ours._seeds, Seeds(1)
    texts = ours.generate_until(requests_of(*asked), disable_tqdm=True)
    assert texts[0] != texts[1]
    ours._seeds = Seeds(1)
    again = ours.generate_until(requests_of(asked[2], asked[0], asked[1]), disable_tqdm=True)
    assert again == [texts[2], texts[0], texts[1]]
    ours._seeds = Seeds(2)
    assert ours.generate_until(requests_of(asked[0]), disable_tqdm=True) != texts[:1]
    ours._seeds = before


@pytest.mark.parametrize(
    ("gen_kwargs", "words"),
    [
        ({"beam_size": 3}, r"generation_kwargs has beam_size: known are top_p"),
        ({"num_beams": 3}, r"asks for beams: one beam alone"),
        ({"do_sample": True}, r"has do_sample and no temperature above 0"),
        ({"max_gen_toks": 128}, r"request 0 'a' cannot be completed: prompt_too_long: max_new_tokens is 128"),
        ({"max_gen_toks": 4, "temperature": 1.0, "top_p": 2}, r"request 0 'a' cannot.*top_p is 2"),
    ],
)
def test_generation_that_cannot_be_had_is_named(
    ours: HarnessModel, gen_kwargs: dict[str, Any], words: str
) -> None:
    with pytest.raises(HarnessError, match=words):
        ours.generate_until(requests_of(("a", gen_kwargs)), disable_tqdm=True)


def test_a_cache_that_would_serve_one_drawn_text_for_all_is_refused(
    ours: HarnessModel, tmp_path: Path
) -> None:
    cached = CachingLM(ours, str(tmp_path / "drawn.db"))
    with pytest.raises(HarnessError, match="add do_sample: true"):
        cached.generate_until(requests_of(("a", {"temperature": 1.0, "max_gen_toks": 4})))
    drawn = {"do_sample": True, "temperature": 1.0, "max_gen_toks": 4}
    assert len(cached.generate_until(requests_of(("a", drawn)))) == 1
    ours.set_cache_hook(CacheHook(None))


def test_conversations_are_the_same_texts(ours: HarnessModel, theirs: HFLM) -> None:
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How many ships? "}]
    begun = [*asked, {"role": "assistant", "content": "The answer is"}]
    assert ours.apply_chat_template(asked) == theirs.apply_chat_template(asked)
    assert ours.apply_chat_template(begun, False) == theirs.apply_chat_template(begun, False)
    assert ours.apply_chat_template(begun, False).endswith("The answer is")
    assert ours.chat_template(True) == theirs.chat_template(True)
    with pytest.raises(HarnessError, match="no chat template 'tools'"):
        ours.chat_template("tools")


def test_a_system_message_that_the_template_refuses_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{{ m.content }}|{% endfor %}"
    )
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    assert conversation_text(ChatTemplate(source), messages, add_generation_prompt=True) == "b|"
    assert "the system message is left out" in caplog.text
    with pytest.raises(HarnessError, match="leave --apply_chat_template out"):
        conversation_text(None, messages, add_generation_prompt=True)


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


# ---- the command ---------------------------------------------------------------------------------


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tasks: Path) -> Callable[..., Result]:
    """The command, without the thousands of tasks that come with the harness."""
    monkeypatch.setattr("sys.argv", ["tinyloop"])
    monkeypatch.setattr("lm_eval.tasks.TaskManager", partial(TaskManager, include_defaults=False))

    def run(model_args: str, *more: str) -> Result:
        arguments = ["lm-eval", "run", "--model", "tinyloop", "--model_args", model_args]
        arguments += ["--include_path", str(tasks), "--tasks", "tiny_choices", *more]
        return CliRunner().invoke(app, arguments, catch_exceptions=False)

    return run


def test_the_command_runs_the_harness_on_a_named_pool(
    runs: tuple[dict[str, Any], dict[str, Any]], command: Callable[..., Result], tmp_path: Path
) -> None:
    output = str(tmp_path / "results.json")
    result = command(f"pool={POOL},depth=1", "--limit", "6", "--output_path", output, "--log_samples")
    assert result.exit_code == 0, result.output
    assert "|tiny_choices|" in result.output
    (written,) = tmp_path.glob("results*.json")
    found = json.loads(written.read_text())
    assert found["config"]["tinyloop"]["digest"] == runs[0]["config"]["tinyloop"]["digest"]
    (samples,) = tmp_path.glob("samples_tiny_choices*.jsonl")
    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    whole = runs[0]["samples"]["tiny_choices"]
    assert [line["acc"] for line in lines] == [sample["acc"] for sample in whole[:6]]


def test_the_command_says_what_is_wrong_as_any_other(command: Callable[..., Result]) -> None:
    with pytest.raises(UsageError, match="unknown key 'depht': did you mean depth"):
        command("depht=1")
