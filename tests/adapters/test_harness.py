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
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from paired_models import PairedModel, paired_model
from tinyloop.cluster.adapters.harness import HarnessModel
from tinyloop.cluster.adapters.harness_errors import HarnessError

# Both compute in float32, in other orders; a sum over a long document adds up to a few hundred of such roundings.
TOLERANCE = 1e-3
# Two candidates nearer than this may be ranked either way by sums that each are off by the tolerance.
MARGIN = 2 * TOLERANCE
# Perplexity is the exponential of a mean over some 10 bytes a word.
RELATIVE = 1e-5


@pytest.fixture(scope="module")
def paired(tmp_path_factory: pytest.TempPathFactory) -> PairedModel:
    return paired_model(tmp_path_factory.mktemp("paired"), adds_bos=True)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def ours(session: None, paired: PairedModel) -> Iterator[HarnessModel]:
    with HarnessModel(model=str(paired.file), replicas=2, threads=1, numeric="fp32") as model:
        yield model


@pytest.fixture(scope="module")
def theirs(paired: PairedModel) -> HFLM:
    torch.set_num_threads(1)
    return HFLM(pretrained=str(paired.folder), dtype="float32", batch_size=4, device="cpu")


def requests_of(*arguments: tuple[Any, ...]) -> list[Any]:
    return [SimpleNamespace(args=one) for one in arguments]


def run(model: Any, tasks: Path) -> dict[str, Any]:
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    results = lm_eval.simple_evaluate(
        model=model, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0, random_seed=None
    )
    assert results is not None
    return dict(results)


def sums(sample: dict[str, Any]) -> list[tuple[float, bool | None]]:
    """Each response of one document as a log-probability and the greedy flag, where it has one."""
    found = sample["filtered_resps"]
    return [tuple(one) if isinstance(one, tuple | list) else (one, None) for one in found]


def nearest(values: Sequence[float]) -> float:
    """How far the two best values are apart."""
    best, second = sorted(values, reverse=True)[:2]
    return best - second
