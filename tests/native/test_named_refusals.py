"""A call with several items that refuses one of them says which one, and changes nothing."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_cases import random_ids, write_calm, write_overflowing
from stateful_cases import Ids, flat, load_family
from tinyloop.native import GenerateRequest, LoadError, Model, PrefixCache, TinyLoopError, cascade, load_model

BAD = 1  # the place of the bad one among three
ROWS = 32


@dataclass
class Item:
    """One item of any call; each call reads what it knows of."""

    ids: Ids = field(default_factory=lambda: random_ids(8))
    n_scored: int = 3
    depth: int = 2
    prompt_len: int = 0
    prefix: PrefixCache | None = None
    request: dict[str, Any] = field(default_factory=dict)


Call = Callable[[Model, Sequence[Item]], object]


def test_the_cpu_has_no_faster_class_of_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_calm(tmp_path / "m.tloop", "llama", bits=4, seed=0)
    with pytest.raises(LoadError, match=r"deterministic='0'.*at no cost"):
        load_model(path, ROWS, device="cpu", deterministic=False)
    monkeypatch.setenv("TINYLOOP_DETERMINISTIC", "0")
    with pytest.raises(LoadError, match="deterministic='0'"):
        load_model(path, ROWS, device="cpu")
    load_model(path, ROWS, device="cpu", deterministic=True).close()
    with pytest.raises(TypeError, match="deterministic is 0"):
        load_model(path, ROWS, deterministic=0)  # type: ignore[arg-type]


def score(model: Model, items: Sequence[Item], **options: Any) -> object:
    return model.score(
        *flat([(item.ids, item.n_scored) for item in items]),
        depth=np.array([item.depth for item in items], np.int32),
        prefixes=[item.prefix for item in items],
        prompt_lens=np.array([item.prompt_len for item in items], np.int32),
        **options,
    )


def start(model: Model, items: Sequence[Item]) -> object:
    return model.start_many(
        *flat([(item.ids, item.n_scored) for item in items]),
        2,
        prefixes=[item.prefix for item in items],
        prompt_lens=np.array([item.prompt_len for item in items], np.int32),
    )


def generate(model: Model, items: Sequence[Item]) -> object:
    def request(item: Item) -> GenerateRequest:
        options = {"max_new_tokens": 2, "depth": item.depth, "prefix": item.prefix, **item.request}
        return GenerateRequest(item.ids, **options)

    return model.generate([request(item) for item in items])


def cascade_over(groups: Sequence[int]) -> Call:
    """The bad one stands elsewhere in the calls that a cascade makes: apart, or in a slice of its own."""

    def run(model: Model, items: Sequence[Item]) -> object:
        return cascade(
            model,
            *flat([(item.ids, item.n_scored) for item in items]),
            groups=np.array(groups, np.int32),
            depths=(2, 3),
            margin=np.inf,
            exit_threshold=0.5,
            prefixes=[item.prefix for item in items],
            prompt_lens=np.array([item.prompt_len for item in items], np.int32),
        )

    return run


alone, choices = cascade_over([0, 1, 0]), cascade_over([0, 1, 1])
SEVERAL = (alone, choices)


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with load_family("ouro", max_seq_len=ROWS) as loaded:
        yield loaded


def refusal(model: Model, call: Call, bad: Item) -> str:
    items = [Item(), Item(), Item()]
    items[BAD] = bad
    gc.collect()  # what an error of an earlier case keeps alive
    rows, held = model.counters["rows"], model.vram_usage_bytes
    with pytest.raises(TinyLoopError) as caught:
        call(model, items)
    assert model.vram_usage_bytes == held
    # A cascade is several calls: those before the refused one have run.
    assert model.counters["rows"] == rows or call in SEVERAL
    return str(caught.value)


def of_closed_prefix(model: Model) -> Item:
    prefix = model.prefix(random_ids(4))
    prefix.close()
    return Item(prefix=prefix)


def of_closed_model(model: Model) -> Item:
    with load_family("ouro") as gone:
        return Item(prefix=gone.prefix(random_ids(4)))


BAD_ITEMS: dict[str, Callable[[Model], Item]] = {
    "a token id 61": lambda model: Item(np.array([1, 2, 3, 61, 4], np.int32)),
    "n_scored 0": lambda model: Item(n_scored=0),
    "n_scored 9": lambda model: Item(n_scored=9),
    "n_scored 8": lambda model: Item(n_scored=8),
    "40 rows": lambda model: Item(random_ids(41)),
    "depth 0": lambda model: Item(depth=0),
    "depth 5000": lambda model: Item(depth=5000),
    "prompt_len 2": lambda model: Item(prompt_len=2),
    "a prefix of depth 1": lambda model: Item(prefix=model.prefix(random_ids(4), depth=1)),
    "a shallow prefix": lambda model: Item(prefix=model.prefix(random_ids(4), depth=1, upgradable=False)),
    "a closed prefix": of_closed_prefix,
    "a closed model": of_closed_model,
    "no ids": lambda model: Item(np.empty(0, np.int32)),
    "no new ids": lambda model: Item(request={"max_new_tokens": 0}),
    "min_depth 3": lambda model: Item(request={"min_depth": 3}),
    "exit_threshold 0": lambda model: Item(request={"exit_threshold": 0.0}),
    "stop id 61": lambda model: Item(request={"stop_ids": [61]}),
    "too many new ids": lambda model: Item(request={"max_new_tokens": 10_000}),
}
SLICED = ("a token id 61", "a closed prefix", "a closed model", "a shallow prefix", "prompt_len 2", "40 rows")
COMMON = ("a token id 61", "a closed prefix", "a closed model", "a prefix of depth 1")
SCORED = (*COMMON, "n_scored 0", "n_scored 9", "n_scored 8", "40 rows")
CALLS: dict[str, tuple[str, Call, tuple[str, ...]]] = {
    "score": ("item", score, (*SCORED, "depth 0", "depth 5000", "prompt_len 2")),
    "cascade, alone": ("item", alone, (*SLICED, "n_scored 0", "n_scored 8")),
    "cascade, choices": ("item", choices, SLICED),
    "start_many": ("item", start, (*SCORED, "prompt_len 2")),
    "generate": (
        "request",
        generate,
        (
            *COMMON,
            *("depth 0", "depth 5000", "no ids", "no new ids", "min_depth 3", "exit_threshold 0"),
            *("stop id 61", "too many new ids"),
        ),
    ),
}


@pytest.mark.parametrize(
    ("call", "mistake"), [(call, mistake) for call, (_, _, mistakes) in CALLS.items() for mistake in mistakes]
)
def test_a_refused_item_is_named(model: Model, call: str, mistake: str) -> None:
    kind, run, _ = CALLS[call]
    message = refusal(model, run, BAD_ITEMS[mistake](model))
    assert f"{kind} {BAD}" in message, message


@pytest.mark.parametrize("threshold", [None, 0.5])
def test_an_item_less_deep_than_min_depth_is_named_with_both(model: Model, threshold: float | None) -> None:
    def call(model: Model, items: Sequence[Item]) -> object:
        return score(model, items, min_depth=2, exit_threshold=threshold)

    message = refusal(model, call, Item(depth=1))
    assert message.startswith(f"cannot run item {BAD} at depth 1 with min_depth=2: ")


def test_an_item_that_cannot_be_scored_by_depth_is_named() -> None:
    with load_family("loop_range", max_seq_len=ROWS) as model:
        bad = Item(prefix=model.prefix(random_ids(4), depth=2))
        message = refusal(model, lambda m, items: score(m, items, by_depth=True), bad)
    assert f"item {BAD} by depth on a prefix" in message


def test_a_handle_that_cannot_go_deeper_is_named(model: Model) -> None:
    good = [model.start(random_ids(8), 1, 4) for _ in range(2)]
    prefix = model.prefix(random_ids(4), depth=4)
    shallow = model.prefix(random_ids(4), depth=1, upgradable=False)
    closed = model.start(random_ids(8), 1, 4)
    closed.close()
    gone = model.prefix(random_ids(4), depth=4)
    gone.close()
    with load_family("ouro") as other:
        orphan = other.start(random_ids(8), 1, 4)
    handles = {
        "was started with max_depth=1": (model.start(random_ids(8), 1, 1), None),
        "from depth 2 to 2": (model.start(random_ids(8), 2, 4), None),
        "built at depth 1": (model.start(random_ids(8), 1, 4, shallow), None),
        "its token ids are not those": (model.start(random_ids(8), 1, 4), prefix),
        "it was closed": (closed, None),
        "its model was closed": (orphan, None),
        "prefix of handle 1: it was closed": (model.start(random_ids(8), 1, 4), gone),
    }
    for named, (handle, on) in handles.items():
        with pytest.raises(TinyLoopError, match=named) as caught:
            model.upgrade([good[0], handle, good[1]], 2, prefixes=[None, on, None])
        assert f"handle {BAD}" in str(caught.value)
        assert [g.depth for g in good] == [1, 1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_whose_logits_are_no_numbers_is_named(tmp_path: Path, temperature: float) -> None:
    """An id that overflows stands in one request alone; the others must not be blamed."""
    path, huge = write_overflowing(tmp_path / "m.tloop")
    ids = [random_ids(5, vocab=huge) for _ in range(3)]
    ids[BAD][2] = huge
    with load_model(path, max_seq_len=ROWS) as model, pytest.raises(TinyLoopError, match=f"request {BAD}:"):
        model.generate([GenerateRequest(some, 2, temperature=temperature) for some in ids])
