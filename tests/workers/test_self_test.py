"""The self-test passes at every window that can score something, and finds a model unlike itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fake_model
import numpy as np
import pytest
from fake_model import FakeModel, FakeScores, expected_logprobs
from tinyloop.native import load_model
from tinyloop.native.models import default_model_path
from tinyloop.workers.self_test import SelfTestError, self_test


@pytest.mark.parametrize("max_seq_len", [2, 3, 4, 23, 24, 25])
def test_every_window_that_can_score_something_passes(max_seq_len: int) -> None:
    with load_model(default_model_path(), max_seq_len, threads=1) as model:
        ids = np.arange(1, min(max_seq_len, 24) + 1) * 7919 % model.descriptor["vocab_size"]
        total = float(model.score_tokens(ids.astype(np.int32)).sum(dtype=np.float64))
        assert self_test(model).total == total


class Wrong(FakeModel):
    """Its packed calls give the last item other bits than the plain call."""

    def score(self, *args: Any, prefixes: Sequence[Any] | None = None, **options: Any) -> FakeScores:
        scores = super().score(*args, prefixes=prefixes, **options)
        scores.logprobs[-1] += np.float32(1)
        return scores


class Silent(FakeModel):
    """Gives fewer values than ids are scored, none at all, or one that is no number."""

    direct: Sequence[float] = ()

    def score_tokens(self, *args: Any, **options: Any) -> Any:
        return np.array(self.direct, dtype=np.float32)


@pytest.mark.parametrize("direct", [[], [-1.0] * 22, [-1.0] * 24, [-1.0] * 22 + [np.nan], [-np.inf] * 23])
def test_a_backend_that_returns_no_log_probabilities_takes_no_work(
    tmp_path: Path, direct: list[float]
) -> None:
    (tmp_path / "model.json").write_text(json.dumps({}))
    model = Silent(str(tmp_path / "model.json"))
    model.direct = direct
    with pytest.raises(SelfTestError, match=f"gave {len(direct)} values, expected 23 finite"):
        self_test(model)


def test_the_digest_is_of_every_bit_of_the_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.json").write_text(json.dumps({}))
    first, again = (self_test(FakeModel(str(tmp_path / "model.json"))) for _ in range(2))
    assert first == again

    def nudged(ids: Any, depth: int) -> Any:
        """The least that one float can differ, on every path alike."""
        values = expected_logprobs(ids, depth)
        values[7] = np.nextafter(values[7], np.float32(0))
        return values

    monkeypatch.setattr(fake_model, "expected_logprobs", nudged)
    assert self_test(FakeModel(str(tmp_path / "model.json"))).digest != first.digest


@pytest.mark.parametrize("max_seq_len", [2, 3, 24])
def test_a_model_that_differs_from_itself_is_found(tmp_path: Path, max_seq_len: int) -> None:
    (tmp_path / "model.json").write_text(json.dumps({}))
    model = Wrong(str(tmp_path / "model.json"))
    model.max_seq_len = max_seq_len
    with pytest.raises(SelfTestError, match="differs from the plain scores"):
        self_test(model)
