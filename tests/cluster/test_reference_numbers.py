"""The figures that the demo's page publishes are what the shipped model gives."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tinyloop.cluster.encoding import Encoder, EncodingPolicy
from tinyloop.cluster.records import result_line
from tinyloop.cluster.rows import RowFailure
from tinyloop.cluster.scoring import score_rows
from tinyloop.cluster.summary import GroupTally
from tinyloop.native import Model, load_model
from tinyloop.native.format import read_header
from tinyloop.native.models import default_model_path
from tinyloop.native.tokenizer import load_tokenizer

from .model_pool import ModelPool

DEMO = Path(__file__).parents[2] / "configs" / "demo"
# Other processors round other sums otherwise: two of 335 answers may turn, and the fourth digit of a mean.
TOLERANCES = {"acc": 0.01, "bits_per_byte": 5e-4}
# The cheapest depth of each file, and the trained one where that is cheap too.
CHECKED = [("minimal-pairs", 1), ("definitions", 1), ("rolling", 1), ("rolling", 4)]


def published() -> dict[tuple[str, int], tuple[str, float]]:
    found: dict[tuple[str, int], tuple[str, float]] = {}
    text = (DEMO / "README.md").read_text()
    for name, figure, *values in re.findall(
        r"\| `([a-z-]+)\.jsonl` \| (\w+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", text
    ):
        found |= {(name, d): (figure, float(value)) for d, value in zip((1, 2, 4), values, strict=True)}
    return found


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with load_model(default_model_path(), max_seq_len=512, threads=2) as loaded:
        yield loaded


def test_every_file_of_the_demo_has_its_figures() -> None:
    assert {name for name, _ in published()} == {path.stem for path in DEMO.glob("*.jsonl")}


@pytest.mark.parametrize(("name", "depth"), CHECKED)
def test_a_published_figure_is_what_comes_out(model: Model, name: str, depth: int) -> None:
    header = read_header(default_model_path())
    encoder = Encoder(load_tokenizer(header), EncodingPolicy.of_model(header.descriptor, model.max_seq_len))
    rows = [json.loads(line) for line in (DEMO / f"{name}.jsonl").read_text().splitlines()]
    group, task = GroupTally(), ""
    for result in score_rows(ModelPool(model), encoder, rows, depth=depth):
        assert not isinstance(result, RowFailure)
        line = json.loads(result_line(result, depth))
        task = line["task"]
        group.add(line)
    figure, value = published()[name, depth]
    assert group.report(task)[figure] == pytest.approx(value, abs=TOLERANCES[figure])
