"""A model for tests with the native face: each log-probability is a pure function of all ids up to it, the
depth and nothing else, so any mix-up of prefixes, items or depths changes numbers.

The model file is JSON: {"vocab": 1000, "bytes_per_token": 100, "memory_bytes": 10**9, "row_seconds": 0.0,
"token_seconds": 0.0, "exit_on": id, "nan_on": id, "oom_on": id, "break_on": id, "stop_on": id,
"marker": path, "fail_load": text, "numerics": "fake"}. exit_on ends the process; stop_on freezes it, once for
each marker file. disturb: a folder; a file in it named exception-N, oom-N or hang-N is taken away by one
call, and happens to it. log: a file in which every call notes its process and when it began, in seconds of
the monotonic clock. work: a file in which every call of score and prefix notes the rows that it computes.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


class LoadError(RuntimeError):
    """As the engine's."""


class OutOfMemoryError(RuntimeError):
    """As the engine's."""


class InvalidInputError(ValueError):
    """As the engine's."""


@dataclass
class FakeScores:
    logprobs: NDArray[np.float32]
    greedy: NDArray[np.bool_]
    offsets: NDArray[np.int64]


class FakePrefix:
    def __init__(self, model: FakeModel, ids: NDArray[np.int32], depth: int, own_length: int) -> None:
        self.ids, self.depth, self.own_length, self.length = ids, depth, own_length, len(ids)
        self.bytes = own_length * depth * int(model.config["bytes_per_token"])
        self.closed = False
        self._model = model

    def close(self) -> None:
        if not self.closed:
            self._model.used_bytes -= self.bytes
            self.closed = True


def expected_logprobs(ids: NDArray[np.int32], depth: int) -> NDArray[np.float32]:
    """float32 [n - 1]: log-probability of each of ids[1:], a hash of all ids up to it."""
    powers = np.cumprod(np.full(len(ids), 6364136223846793005, dtype=np.uint64))
    mixed = np.cumsum((ids.astype(np.int64).astype(np.uint64) + np.uint64(7)) * powers, dtype=np.uint64)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9 + 2 * depth)
    mixed ^= mixed >> np.uint64(32)
    values: NDArray[np.float32] = -(mixed % np.uint64(100_003)).astype(np.float32) / np.float32(10_000)
    return values[1:]


def expected_completion(
    ids: NDArray[np.int32],
    max_new_tokens: int,
    *,
    depth: int | None = None,
    stop_ids: Sequence[int] = (),
    seed: int = 0,
    vocab: int = 1000,
    **settings: Any,
) -> tuple[list[int], list[float], list[int], str]:
    """Ids, log-probabilities, depths and reason: each id is a hash of all before it and of every setting."""
    loops = depth or 2
    key = repr(sorted(settings.items())).encode()
    found: tuple[list[int], list[float], list[int], str] = ([], [], [], "length")
    text = ids.astype("<i4").tobytes()
    while len(found[0]) < max_new_tokens:
        position = len(text) // 4
        code = sha256(text + key + f"/{loops}/{seed}/{position}".encode()).digest()
        token = int.from_bytes(code[:4], "little") % vocab
        found[0].append(token)
        found[1].append(float(np.float32(-int.from_bytes(code[4:6], "little") / 1024)))
        found[2].append(1 + code[6] % loops if settings.get("exit_threshold", np.inf) < 1 else loops)
        text += token.to_bytes(4, "little")
        if token in stop_ids:
            return (*found[:3], "stop")
    return found


@dataclass
class FakeStep:
    keys: NDArray[np.int64]
    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    depths: NDArray[np.int32]
    finished: list[tuple[int, str]]
    failed: list[tuple[int, Exception]]


class FakeBatch:
    """One id of every request a step, which takes token_seconds."""

    def __init__(self, model: FakeModel) -> None:
        self._model = model
        self._done: dict[int, int] = {}
        self._whole: dict[int, tuple[list[int], list[float], list[int], str]] = {}
        self._next = 0

    @property
    def running(self) -> int:
        return len(self._done)

    def add(
        self, token_ids: NDArray[np.int32], max_new_tokens: int, *, prefix: FakePrefix | None, **settings: Any
    ) -> int:
        if not len(token_ids):
            raise InvalidInputError("it has no ids; at least one must follow the prefix")
        self._model._enter(token_ids)
        if prefix:
            assert not prefix.closed
            assert prefix.depth >= settings["depth"]
        ids = np.concatenate([prefix.ids, token_ids]) if prefix else token_ids
        if len(ids) + max_new_tokens > FakeModel.max_seq_len:
            raise InvalidInputError(f"it could reach position {len(ids) + max_new_tokens}")
        self._model.counters["rows"] += len(token_ids)
        key, self._next = self._next, self._next + 1
        vocab = int(self._model.config["vocab"])
        self._whole[key] = expected_completion(ids, max_new_tokens, vocab=vocab, **settings)
        self._done[key] = 0
        return key

    def cancel(self, key: int) -> bool:
        self._whole.pop(key, None)
        return self._done.pop(key, None) is not None

    def step(self, seconds: float = 0.0) -> FakeStep:
        self._model._enter(np.zeros(1, dtype=np.int32))
        began, came = time.monotonic(), []
        finished: list[tuple[int, str]] = []
        failed: list[tuple[int, Exception]] = []
        while self._done:
            time.sleep(self._model.config["token_seconds"])
            for key, done in list(self._done.items()):
                ids, logprobs, depths, reason = self._whole[key]
                if ids[done] == self._model.config.get("nan_on"):
                    failed.append((key, RuntimeError("no logit of its next token is a number")))
                    self.cancel(key)
                    continue
                self._model._enter(np.array(ids[done : done + 1], dtype=np.int32))
                came.append((key, ids[done], logprobs[done], depths[done]))
                self._done[key] = done + 1
                if done + 1 == len(ids):
                    finished.append((key, reason))
                    self.cancel(key)
            if time.monotonic() - began >= seconds:
                break
        columns = [list(column) for column in zip(*came, strict=True)] or [[], [], [], []]
        return FakeStep(
            np.array(columns[0], np.int64),
            np.array(columns[1], np.int32),
            np.array(columns[2], np.float32),
            np.array(columns[3], np.int32),
            finished,
            failed,
        )

    def put_back(self) -> None:
        self._model._enter(np.zeros(1, dtype=np.int32))

    def close(self) -> None:
        self._done.clear()


class FakeModel:
    max_seq_len = 2048

    def __init__(self, path: str) -> None:
        text = Path(path).read_text()
        defaults = {
            "vocab": 1000,
            "bytes_per_token": 100,
            "memory_bytes": 10**9,
            "row_seconds": 0.0,
            "token_seconds": 0.0,
            "numerics": "fake",
        }
        self.config: dict[str, Any] = {**defaults, **json.loads(text)}
        if "fail_load" in self.config:
            raise LoadError(self.config["fail_load"])
        self.digest = sha256(text.encode()).hexdigest()
        self.numerics_id = str(self.config["numerics"])
        self.descriptor = {
            "vocab_size": self.config["vocab"],
            "loops": 2,
            "n_layers": 1,
            "n_kv_heads": 1,
            "head_dim": 8,
        }
        self.descriptor["hidden_size"] = 4
        self.counters = {"rows": 0, "head_rows": 0, "passes": 0}
        self.used_bytes = 0
        self.closed = False
        self._owner = threading.get_ident()

    @property
    def vram_usage_bytes(self) -> int:
        return 1000 + self.used_bytes

    def score_tokens(
        self, token_ids: NDArray[np.int32], depth: int | None = None, prompt_len: int = 0
    ) -> Any:
        self._enter(token_ids)
        self.counters["rows"] += len(token_ids) - 1
        return expected_logprobs(token_ids, depth or 2)

    def score(
        self,
        token_ids: NDArray[np.int32],
        offsets: NDArray[np.int64],
        n_scored: NDArray[np.int32],
        *,
        prefixes: Sequence[FakePrefix | None] | None = None,
        depth: int | None = None,
    ) -> FakeScores:
        self._enter(token_ids)
        parts: list[NDArray[np.float32]] = []
        for index, scored in enumerate(n_scored.tolist()):
            own = token_ids[offsets[index] : offsets[index + 1]]
            prefix = prefixes[index] if prefixes else None
            assert 1 <= scored <= len(own) - 1
            if prefix:
                assert not prefix.closed
                assert prefix.depth == (depth or 2)
            ids = np.concatenate([prefix.ids, own]) if prefix else own
            values = expected_logprobs(ids, depth or 2)[-scored:].copy()
            if self.config.get("nan_on") in own.tolist():
                values[-1] = np.nan
            parts.append(values)
            self.counters["rows"] += len(own) - 1
        self._note_work(len(token_ids) - len(n_scored))
        joined = np.concatenate(parts)
        ends = np.cumsum([0, *(len(part) for part in parts)], dtype=np.int64)
        return FakeScores(joined, joined > np.float32(-1), ends)

    def prefix(
        self, token_ids: NDArray[np.int32], depth: int | None = None, parent: FakePrefix | None = None
    ) -> FakePrefix:
        self._enter(token_ids)
        ids = np.concatenate([parent.ids, token_ids]) if parent else token_ids
        made = FakePrefix(self, ids.copy(), depth or 2, len(token_ids))
        if self.used_bytes + made.bytes > self.config["memory_bytes"]:
            made.closed = True
            raise OutOfMemoryError(
                f"asked {made.bytes}, used {self.used_bytes} of {self.config['memory_bytes']}"
            )
        self.used_bytes += made.bytes
        self.counters["rows"] += len(token_ids)
        self._note_work(len(token_ids))
        return made

    def generation(self, max_batch: int | None = None) -> FakeBatch:
        assert max_batch is None or max_batch >= 1
        return FakeBatch(self)

    def close(self) -> None:
        self.closed = True

    def _note_work(self, rows: int) -> None:
        if "work" in self.config:
            with open(self.config["work"], "a") as work:
                work.write(f"{rows}\n")

    def _enter(self, token_ids: NDArray[np.int32]) -> None:
        assert threading.get_ident() == self._owner, "a model is used by the thread that made it"
        assert not self.closed
        if "log" in self.config:
            with open(self.config["log"], "a") as log:
                log.write(f"{os.getpid()} {time.monotonic()}\n")
        if "disturb" in self.config:
            _happen(Path(self.config["disturb"]))
        ids = set(token_ids.tolist())
        if min(ids) < 0 or max(ids) >= self.config["vocab"]:
            raise InvalidInputError("token out of range")
        if self.config.get("exit_on") in ids:
            os._exit(3)
        if self.config.get("oom_on") in ids:
            raise OutOfMemoryError("no memory for this item")
        if self.config.get("break_on") in ids:
            raise RuntimeError("device lost")
        if self.config.get("stop_on") in ids and _first_time(Path(self.config["marker"])):
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.config["row_seconds"]:
            time.sleep(self.config["row_seconds"] * len(token_ids))


def _happen(folder: Path) -> None:
    for name in os.listdir(folder):
        try:
            (folder / name).unlink()
        except FileNotFoundError:
            continue  # it happens to another
        if name.startswith("exception"):
            raise RuntimeError("device lost")
        if name.startswith("oom"):
            raise OutOfMemoryError("no memory at this moment")
        time.sleep(3600)


def _first_time(marker: Path) -> bool:
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def load_model(path: str, *, threads: int, **options: Any) -> FakeModel:
    return FakeModel(path)
