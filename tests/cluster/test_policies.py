"""Every policy is said in --help, in run.json and in the report, in the same words and with its settings."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from tinyloop.cluster import cli
from tinyloop.cluster.completion_policies import POLICIES as COMPLETION_POLICIES
from tinyloop.cluster.depth_rule import DepthRequest
from tinyloop.cluster.fingerprint import fingerprint
from tinyloop.cluster.generate_settings import GenerateSettings
from tinyloop.cluster.policies import DECIDED_BY, POLICIES, in_force
from tinyloop.cluster.pool_backend import choose_model
from tinyloop.cluster.rolling import RollingPolicy
from tinyloop.cluster.score import ScoreKind
from tinyloop.cluster.settings import PoolRequest, ScoreSettings
from tinyloop.native.format import read_header
from tinyloop.native.models import default_model_path
from typer.testing import CliRunner

from .generate_driver import generate
from .score_driver import score

# Keys of the fingerprint that are no policy: which model, which inputs, which version of our own lines.
NO_POLICY = re.compile(r"format_version|write\.format|inputs\..*|model\..*|encoding\.vocab_size")
# Options that change no line of the results: where things are, how much runs at once, when to stop.
NO_RESULT = {
    "input", "output", "model", "replicas", "resume", "overwrite", "max-errors", "fail-fast", "device",
    "pool", "window", "work-dir", "threads", "help", "config", "input-format", "output-format",
    "retry-errors",
    "dry-run", "rate", "json",
}  # fmt: skip
# Options that make another model of one: run.json has them among the keys of the model.
OF_THE_MODEL = {"kv", "numeric"}


@pytest.fixture(scope="module")
def printed() -> str:
    result = CliRunner().invoke(cli.app, ["score", "--help"])
    assert result.exit_code == 0, result.output
    return result.output


def test_help_says_every_policy_by_its_name(printed: str) -> None:
    for name, text in POLICIES.items():
        assert f"{name}: {text}" in printed


def run_json(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "hello"}\n')
    score(ScoreSettings(inputs=(str(path),), output=tmp_path / "out", **changes))
    run: dict[str, Any] = json.loads((tmp_path / "out" / "run.json").read_bytes())
    return run


def test_run_json_says_every_policy_in_the_words_of_help(tmp_path: Path, printed: str) -> None:
    policies = run_json(tmp_path)["policies"]
    assert list(policies) == list(POLICIES)
    for name, text in policies.items():
        sentence, _, decision = text.partition(" [here: ")
        assert f"{name}: {sentence}" in printed
        assert bool(decision) == (name in DECIDED_BY)


class _Words(HTMLParser):
    """The text of a page, tags and their attributes left out."""

    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_the_report_says_every_policy_as_the_record_does(tmp_path: Path) -> None:
    policies = run_json(tmp_path, target_delimiter="<&>", pmi=True)["policies"]
    page = _Words()
    page.feed((tmp_path / "out" / "report.html").read_text())
    assert {*policies, *policies.values()} <= set(page.words)


CHANGED = {
    "delimiter": ({"target_delimiter": " "}, 'target delimiter " "'),
    "bos": ({}, "add bos false, bos id -1"),
    "empty context": ({"prefix_token": 7}, "prefix id 7"),
    "empty continuation": ({"empty_continuation": "zero"}, 'empty continuation "zero"'),
    "log-probabilities": ({"token_logprobs": True}, "token logprobs true"),
    "pmi": ({"pmi": True}, "pmi true"),
    "rolling": ({"rolling": RollingPolicy(stride=3)}, "stride strided:3"),
    "bos in windows": ({"rolling": RollingPolicy(bos_every_window=True)}, "bos every window true"),
    "input": ({"limit": 1}, "limit the first 1 rows"),
    "invalid unicode": ({"replace_surrogates": True}, "replace surrogates replace"),
    "depth": ({"depth": 2}, "depth 2"),
    "cascade": ({}, "effort fixed depth"),
    "margin": ({}, "effort fixed depth"),
    "exit gate": ({}, "effort fixed depth"),
    "window": ({}, "max rows 48"),
    "truncation": ({}, "max rows 48"),
    "determinism": ({}, 'numerics id "fake"'),
}


@pytest.mark.parametrize("name", sorted(DECIDED_BY.keys() & POLICIES.keys()))
def test_run_json_says_what_the_settings_made_of_a_policy(tmp_path: Path, name: str) -> None:
    changes, shown = CHANGED[name]
    assert run_json(tmp_path, **changes)["policies"][name] == f"{POLICIES[name]} [here: {shown}]"


def test_windows_have_a_name_that_the_record_of_a_job_gives(tmp_path: Path) -> None:
    assert run_json(tmp_path)["policies"]["rolling"].endswith("[here: stride disjoint]")


def test_whatever_decides_a_number_is_a_policy_and_every_policy_is_decided_by_what_there_is() -> None:
    keys: set[str] = set()
    for request in (DepthRequest(), DepthRequest(cascade=(2, 4), margin=0.5)):
        settings = ScoreSettings(inputs=(), output=Path("out"), depths=request)
        chosen = choose_model(settings, PoolRequest())
        identity = {**chosen.choice.identity, "numerics_id": "cpu"}
        options = ScoreKind.of_model(settings, read_header(default_model_path()).descriptor).options
        keys |= fingerprint(identity, chosen.encoder.policy, options, [], settings.reading).keys()
    decided = {key for name in POLICIES for key in DECIDED_BY.get(name, ())}
    assert decided <= keys
    assert {key for key in keys if not NO_POLICY.fullmatch(key)} <= decided
    assert DECIDED_BY.keys() <= POLICIES.keys() | COMPLETION_POLICIES.keys()


def generated(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "hello"}\n')
    generate(GenerateSettings(inputs=(str(path),), output=tmp_path / "out", **changes), max_rows=200)
    run: dict[str, Any] = json.loads((tmp_path / "out" / "run.json").read_bytes())
    return run


def test_a_generation_job_says_its_policies_in_help_and_record(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli.app, ["generate", "--help"])
    run = generated(tmp_path, seed=5, long_prompt="error")
    assert list(run["policies"]) == list(COMPLETION_POLICIES)
    for name, text in run["policies"].items():
        sentence, _, decision = text.partition(" [here: ")
        assert f"{name}: {sentence}" in result.output
        assert bool(decision) == (name in DECIDED_BY)
    assert run["policies"]["seed"].endswith(" [here: seed 5]")
    assert run["policies"]["long prompt"].endswith('[here: long prompt "error"]')
    assert "max new tokens 128, temperature 0.0, " in run["policies"]["settings"]


def test_whatever_decides_a_completion_is_a_policy(tmp_path: Path) -> None:
    flat = generated(tmp_path)["fingerprint"]
    decided = {key for name in COMPLETION_POLICIES for key in DECIDED_BY.get(name, ())}
    # Of scoring alone, though every policy of encoding has them.
    unused = {"encoding.target_delimiter", "encoding.empty_continuation", "task.kind"}
    keys = {re.sub(r"^task\.defaults\..*", "task.defaults.*", key) for key in flat.keys() - unused}
    assert {key for key in keys if not NO_POLICY.fullmatch(key)} <= decided


def test_options_and_policies_name_each_other(printed: str) -> None:
    options = set(re.findall(r"(?m)^ +(?:-\w, )?--([a-z-]+)", printed))
    assert {"input", "pmi", "stride"} <= options
    said = {name for text in POLICIES.values() for name in re.findall(r"--([a-z-]+)", text)}
    assert said <= options | {"no-add-bos"}
    assert options - NO_RESULT - OF_THE_MODEL <= said


def test_a_policy_without_a_setting_has_its_sentence_alone() -> None:
    assert in_force({"eos": "never"}, {"encoding.bos_id": 3}) == {"eos": "never"}
    assert in_force({"bos": "once"}, {"encoding.bos_id": 3}) == {"bos": "once [here: bos id 3]"}
