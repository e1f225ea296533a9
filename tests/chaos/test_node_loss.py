"""A node that dies takes its replica along and nothing else: its work moves, and the pool says so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.chaos
def test_work_of_a_node_that_dies_moves_to_the_others(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.chaos.node_loss", str(tmp_path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    answer = json.loads((tmp_path / "answer.json").read_text())
    assert answer["same"]
    assert (answer["deaths"], answer["mirror_differences"]) == (1, 0)
    assert sorted(set(answer["verdicts"]) & {"loading", "dead"}) in (["loading"], ["dead"])
    # Ray says that a node has gone after 2 to 16 s.
    assert answer["seconds"] < 60.0
