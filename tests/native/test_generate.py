"""Generation: what comes is what scoring says, whatever shares the batch and however memory runs short."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from engine_cases import ALIGNMENT, ON_GPU, random_ids
from numpy.typing import NDArray
from stateful_cases import (
    KINDS,
    MODES,
    NO_STOP,
    Ids,
    assert_same_bits,
    family_path,
    flat,
    lasting_memory,
    load_family,
    memory_comes_back,
)
from test_sampling import Options, distribution, uniform
from tiny_models import FAMILIES
from tinyloop.native import (
    Completion,
    ConcurrentUseError,
    GenerateRequest,
    InvalidInputError,
    MismatchError,
    Model,
    OutOfMemoryError,
    RowBudgetError,
)
from tinyloop.native.reference import Reference
from tinyloop.native.reference.layers import Layers

# The fp32 mode against float64: the engine's bound for log-probabilities, and for logits by the same token.
FP32_ATOL = 1e-4
BLOCK_TOKENS = 256  # by which a sequence's memory grows


@pytest.fixture(autouse=True)
def one_thread_for_the_oracle() -> Iterator[None]:
    """Its tensors are so small that threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def ouro() -> Iterator[Model]:
    with load_family("ouro") as model:
        yield model


def request(ids: Ids, new: int, **options: Any) -> GenerateRequest:
    return GenerateRequest(ids, new, **{"stop_ids": NO_STOP, **options})


def assert_equal(found: list[Completion], expected: list[Completion]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert_same_bits(one.token_ids, other.token_ids)
        assert_same_bits(one.logprobs, other.logprobs)
        assert_same_bits(one.depths, other.depths)
        assert one.finish_reason == other.finish_reason


def alone(model: Model, requests: list[GenerateRequest]) -> list[Completion]:
    return [model.generate([one])[0] for one in requests]


def assert_is_what_scoring_says(model: Model, ids: Ids, completion: Completion, depth: int) -> None:
    """ids: those of the prefix too. The id of every step has the score of a run from position 0."""
    whole = np.concatenate([ids, completion.token_ids])
    new = len(completion.token_ids)
    prompt = np.array([len(ids)], np.int32) if model.descriptor["prefix_lm"] else None
    scored = model.score(*flat([(whole, new)]), depth=depth, prompt_lens=prompt)
    assert_same_bits(completion.logprobs, scored.logprobs)
    assert_same_bits(completion.depths, np.full(new, depth, np.int32))
    assert completion.token_ids.dtype == np.int32


def assert_is_greedy(model: Model, ids: Ids, completion: Completion, depth: int) -> None:
    whole = np.concatenate([ids, completion.token_ids])
    prompt = np.array([len(ids)], np.int32) if model.descriptor["prefix_lm"] else None
    scored = model.score(*flat([(whole, len(completion.token_ids))]), depth=depth, prompt_lens=prompt)
    assert scored.greedy.all()


# ---- what comes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_completions_are_what_scoring_says(family: str, mode: str) -> None:
    """Greedy and drawn, at each request's own depth, in one batch."""
    prompts = [(random_ids(30), 2), (random_ids(7, seed=1), 3), (random_ids(100, seed=2), 1)]
    with load_family(family, mode, prefill_chunk=48) as model, memory_comes_back(model):
        requests = [request(ids, 20, depth=depth) for ids, depth in prompts]
        requests += [request(ids, 20, depth=depth, temperature=0.9, seed=5) for ids, depth in prompts]
        completions = model.generate(requests)
        for (ids, depth), completion in zip(prompts * 2, completions, strict=True):
            assert_is_what_scoring_says(model, ids, completion, depth)
            assert (len(completion.token_ids), completion.finish_reason) == (20, "length")
        for (ids, depth), completion in zip(prompts, completions[:3], strict=True):
            assert_is_greedy(model, ids, completion, depth)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", [f for f in KINDS if f != "hrm_text"])
def test_a_prefix_changes_nothing(family: str, mode: str) -> None:
    """A chain of prefixes that two requests share; in the hidden modes it is rebuilt once for both."""
    ids = random_ids(150)
    with load_family(family, mode, prefill_chunk=48) as model:
        expected = model.generate([request(ids, 12, depth=2), request(ids[:101], 12, depth=2)])
        with model.prefix(ids[:40], depth=2) as a, model.prefix(ids[40:100], depth=2, parent=a) as b:
            requests = [request(own, 12, depth=2, prefix=b) for own in (ids[100:], ids[100:101])]
            before = lasting_memory(model)
            found = model.generate(requests)
            assert lasting_memory(model) == before
        assert_equal(found, expected)


@pytest.mark.parametrize("mode", MODES)
def test_a_prompt_as_prefix_changes_nothing(mode: str) -> None:
    """Prefix-LM: after a prefix of the whole prompt comes plain text; without, the prompt is all ids."""
    ids = random_ids(60)
    with load_family("hrm_text", mode, prefill_chunk=16) as model, model.prefix(ids, depth=2) as prefix:
        (free,) = model.generate([request(ids, 12, depth=2)])
        (found,) = model.generate([request(free.token_ids[:1], 11, depth=2, prefix=prefix)])
        assert_same_bits(found.token_ids, free.token_ids[1:])
        assert_same_bits(found.logprobs, free.logprobs[1:])


@pytest.mark.parametrize("mode", MODES)
def test_a_deeper_prefix_serves_a_shallower_request(mode: str) -> None:
    ids = random_ids(90)
    with load_family("ouro", mode) as model, model.prefix(ids[:70], depth=4) as prefix:
        for depth in (1, 3):
            expected = model.generate([request(ids, 12, depth=depth)])
            assert_equal(model.generate([request(ids[70:], 12, depth=depth, prefix=prefix)]), expected)


def test_a_handles_rows_as_prefix_change_nothing(ouro: Model) -> None:
    ids = random_ids(50)
    expected = ouro.generate([request(ids, 12, depth=3)])
    with ouro.start(ids, 1) as handle:
        handle.upgrade(3)
        with handle.prefix() as prefix:
            assert_equal(ouro.generate([request(ids[-1:], 12, depth=3, prefix=prefix)]), expected)


def test_stop_ids_end_a_completion_and_are_its_last_id(ouro: Model) -> None:
    ids = random_ids(10)
    free = ouro.generate([request(ids, 30)])[0].token_ids.tolist()
    stop = free[7]
    first = free.index(stop)
    (stopped,) = ouro.generate([request(ids, 30, stop_ids=[60, stop])])
    assert stopped.token_ids.tolist() == free[: first + 1]
    assert stopped.finish_reason == "stop"
    # At the very last place, being stopped is what it is called.
    (last,) = ouro.generate([request(ids, first + 1, stop_ids=[stop])])
    assert (last.finish_reason, len(last.token_ids)) == ("stop", first + 1)


def test_the_models_own_stop_ids_are_the_default(ouro: Model) -> None:
    (eos,) = ouro.descriptor["eos_ids"]
    options = {"temperature": 3.0, "seed": 1}
    ids = random_ids(10)
    free = ouro.generate([request(ids, 200, **options)])[0].token_ids.tolist()
    assert eos in free
    (stopped,) = ouro.generate([GenerateRequest(ids, 200, **options)])
    assert stopped.token_ids.tolist() == free[: free.index(eos) + 1]


# ---- what does not matter ------------------------------------------------------------------------


def mixed_requests() -> list[GenerateRequest]:
    """40 of all kinds: one id to 200, drawn and greedy, any depth, with penalties, with a gate's exit."""
    requests = []
    for i in range(40):
        kind: dict[str, Any] = {"depth": 1 + i % 4}
        if i % 3 == 0:
            kind |= {"temperature": 1.0, "seed": i, "top_k": 20 if i % 2 else 0, "top_p": 0.9}
        if i % 5 == 0:
            kind |= {"repetition_penalty": 1.3}
        if i % 7 == 0:
            kind |= {"depth": 4, "exit_threshold": 0.3, "min_depth": 1}
        requests.append(request(random_ids(1 + (37 * i) % 200, seed=i), 1 + (11 * i) % 30, **kind))
    return requests


@pytest.mark.parametrize("mode", ["fp16", "int8", "h_int4"])
def test_mates_order_and_batch_size_do_not_matter(mode: str) -> None:
    requests = mixed_requests()
    with load_family("ouro", mode) as model:
        expected = alone(model, requests)
        assert_equal(model.generate(requests), expected)
        for max_batch in (1, 3, 17):
            assert_equal(model.generate(requests, max_batch=max_batch), expected)
        order = np.random.default_rng(0).permutation(len(requests))
        shuffled = model.generate([requests[i] for i in order], max_batch=8)
        assert_equal(shuffled, [expected[i] for i in order])


@pytest.mark.parametrize(("rows", "chunk"), [(1, 0), (7, 3), (64, 0), (64, 10)])
@pytest.mark.parametrize("mode", ["fp16", "h_int8"])
def test_rows_of_a_pass_do_not_matter(mode: str, rows: int, chunk: int) -> None:
    """Prompts longer than a pass come in pieces, and more sequences decode than it has rows."""
    requests = mixed_requests()[::2]
    with load_family("ouro", mode) as model:
        expected = model.generate(requests)
    with load_family("ouro", mode, max_seq_len=rows, prefill_chunk=chunk) as small:
        assert_equal(small.generate(requests), expected)


@pytest.mark.parametrize("family", KINDS)
def test_long_completions_cross_the_blocks_of_their_memory(family: str) -> None:
    ids = random_ids(30)
    new = 2 * BLOCK_TOKENS + 20
    with load_family(family, max_seq_len=600, prefill_chunk=64) as model:
        (found,) = model.generate([request(ids, new, depth=2, temperature=0.7)])
        assert_is_what_scoring_says(model, ids, found, 2)
        # The last position that the model has.
        end = 2048 - len(ids) + 1
        with pytest.raises(InvalidInputError, match="position 2049, the model has 2048"):
            model.generate([request(ids, end + 1, depth=1)])


def test_a_completion_may_reach_the_last_position() -> None:
    with load_family("llama") as model:
        tokens = random_ids(2040)
        chain = [model.prefix(tokens[:200])]
        for i in range(200, 2000, 200):
            chain.append(model.prefix(tokens[i : i + 200], parent=chain[-1]))
        (found,) = model.generate([request(tokens[2000:], 9, prefix=chain[-1])])
        assert len(found.token_ids) == 9


# ---- memory that runs short ----------------------------------------------------------------------


def pressed(
    family: str, mode: str, requests: list[GenerateRequest], spare: int
) -> tuple[list[Completion], int]:
    """The completions with `spare` bytes for sequences, and the rows that were computed."""
    with load_family(family, mode) as model:
        needed = model.vram_usage_bytes
    with load_family(family, mode, budget_bytes=needed + spare) as model:
        with memory_comes_back(model):
            completions = model.generate(requests)
        return completions, model.counters["rows"]


def token_bytes(family: str, mode: str, depth: int) -> int:
    """Of a running sequence: whatever the mode, its keys and values are kept hot."""
    with load_family(family, "int8" if mode == "int8" else "fp16") as model:
        prefixes = [model.prefix(random_ids(n), depth=depth, upgradable=False) for n in (64, 128)]
        return (prefixes[1].bytes - prefixes[0].bytes) // 64


@pytest.mark.parametrize(
    ("family", "mode"), [*((family, "fp16") for family in KINDS), ("ouro", "int8"), ("ouro", "h_int4")]
)
def test_a_sequence_that_is_put_back_comes_to_the_same_bits(family: str, mode: str) -> None:
    """Three that start with a block each and need three: room is for the first blocks and little more."""
    prompts = [random_ids(40, seed=i) for i in range(3)]
    requests = [
        request(ids, 2 * BLOCK_TOKENS + 5, depth=2, temperature=0.8 * (i % 2), seed=i)
        for i, ids in enumerate(prompts)
    ]
    with load_family(family, mode) as model:
        expected = model.generate(requests)
        rows = model.counters["rows"]
    spare = 1000 * token_bytes(family, mode, 2) + 16 * 61 * 4
    found, computed = pressed(family, mode, requests, spare)
    assert_equal(found, expected)
    assert computed >= rows + len(prompts[0]) + BLOCK_TOKENS  # one was put back with all it had


@pytest.mark.parametrize("order", [0, 1])
def test_what_exits_early_is_never_put_back(order: int) -> None:
    """Its tokens read planes that a second run would compute otherwise: its bits would depend on memory."""
    exiting = request(random_ids(12, seed=2), 590, exit_threshold=0.3, temperature=1.0)
    plain = request(random_ids(10), 600)
    requests = [exiting, plain] if order else [plain, exiting]
    with load_family("ouro") as model:
        expected = model.generate(requests)
        rows = model.counters["rows"]
    assert len(np.unique(expected[1 - order].depths)) > 1
    found, computed = pressed("ouro", "fp16", requests, 900 * token_bytes("ouro", "fp16", 4) + 16 * 61 * 4)
    assert_equal(found, expected)
    # Either the plain one had to go back, or it could not join before the other was done.
    assert computed > rows or order


@pytest.mark.parametrize("mode", ["h_fp16", "h_int8", "h_int4"])
def test_prefixes_are_rebuilt_one_after_the_other_where_memory_is_for_one(mode: str) -> None:
    ids = [random_ids(200, seed=i) for i in range(3)]
    with load_family("ouro", mode) as model:
        prefixes = [model.prefix(each, upgradable=False) for each in ids]
        requests = [request(random_ids(3), 5 + i, prefix=p) for i, p in enumerate(prefixes)]
        expected = model.generate(requests)
        held = model.vram_usage_bytes
    rebuilt, sequence = (n * token_bytes("ouro", mode, 4) for n in (200, 12))
    for spare, enough in ((rebuilt + sequence, True), (rebuilt, False)):
        with load_family("ouro", mode, budget_bytes=held + spare) as model:
            prefixes = [model.prefix(each, upgradable=False) for each in ids]
            requests = [request(random_ids(3), 5 + i, prefix=p) for i, p in enumerate(prefixes)]
            if enough:
                assert_equal(model.generate(requests), expected)
            else:
                with memory_comes_back(model), pytest.raises(OutOfMemoryError):
                    model.generate(requests)


def test_what_one_sequence_can_have_all_of_them_can() -> None:
    """Also where as many sequences as fit would leave a little too little for the logits."""
    requests = [request(random_ids(10, seed=i), 20, temperature=1.0, seed=i) for i in range(4)]
    with load_family("ouro") as model:
        expected = model.generate(requests)
    # A GPU's logits are read on the host, and its budget is of device memory.
    sequence, logits = 29 * token_bytes("ouro", "fp16", 4), 0 if ON_GPU else 16 * 61 * 4
    for spare in (sequence + logits, 2 * sequence + logits // 2, 3 * sequence + 64, 4 * sequence + logits):
        found, _ = pressed("ouro", "fp16", requests, spare + ALIGNMENT)
        assert_equal(found, expected)
    with pytest.raises(OutOfMemoryError):
        pressed("ouro", "fp16", requests, sequence + logits - ALIGNMENT)


# ---- drawing -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        Options(temperature=1.0),
        Options(temperature=0.6, top_k=9),
        Options(temperature=1.5, top_p=0.8, min_p=0.02),
        Options(temperature=0.0, repetition_penalty=1.8),
        Options(temperature=1.0, repetition_penalty=1.4, top_k=40),
    ],
)
@pytest.mark.parametrize("with_prefix", [False, True])
def test_draws_are_the_plain_samplers_on_the_references_logits(options: Options, with_prefix: bool) -> None:
    """Each id of a completion, given those before it. The key is (seed, its position), prefix included."""
    ids, new, seed = random_ids(25), 40, 2**63 + 17
    chosen = {name: getattr(options, name) for name in Options.__dataclass_fields__}
    with load_family("ouro", numeric_mode="fp32") as model:
        prefix = model.prefix(ids[:15], depth=3) if with_prefix else None
        own = ids[15:] if with_prefix else ids
        (found,) = model.generate([request(own, new, depth=3, seed=seed, prefix=prefix, **chosen)])
    whole = np.concatenate([ids, found.token_ids])
    logits = Reference.load(family_path("ouro")).logits(whole[:-1], 3)
    decided = 0
    for i, token in enumerate(found.token_ids.tolist()):
        position = len(ids) + i
        order, shares = distribution(logits[position - 1].astype(np.float32), options, whole[:position])
        sums = np.cumsum(shares)
        u = uniform(seed, position)
        # Logits of this precision move a share, and so a border, by no more than this.
        if np.abs(sums - u).min() > 20 * FP32_ATOL:
            decided += 1
            assert token == order[int(np.searchsorted(sums, u, side="right"))], f"id {i}"
    assert decided > 0.7 * new


def test_seeds_decide_and_nothing_else(ouro: Model) -> None:
    ids = random_ids(10)
    one, two, other = ouro.generate([request(ids, 30, temperature=1.0, seed=s) for s in (4, 4, 5)])
    assert_same_bits(one.token_ids, two.token_ids)
    assert not np.array_equal(one.token_ids, other.token_ids)
    greedy = ouro.generate([request(ids, 30, seed=s) for s in (4, 5)])
    assert_same_bits(greedy[0].token_ids, greedy[1].token_ids)


# ---- early exit ----------------------------------------------------------------------------------


class SlowDecoder(Layers):
    """One token at a time in float64, with a list of keys and values for each (loop, layer)."""

    def __init__(self, reference: Reference) -> None:
        super().__init__(reference.descriptor, reference.weights, "fp16")
        self.reference = reference
        self.planes: dict[tuple[int, str], list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self.loop = self.position = 0

    def _attention(self, name: str, h: torch.Tensor, hidden_keys: torch.Tensor) -> torch.Tensor:
        query, key, value, _ = self._products(name, h)
        angles = self.position * self.weights["rope.inv_freq"][None]
        query, key = self._rotate(self._heads(query), angles), self._rotate(self._heads(key), angles)
        plane = self.planes.setdefault((self.loop, name), [])
        plane.append((key, self._heads(value)))
        keys, values = (torch.cat(parts, dim=1) for parts in zip(*plane, strict=True))
        scores = torch.softmax(query @ keys.transpose(1, 2) / self.head_dim**0.5, dim=-1)
        return (scores @ values).transpose(0, 1).reshape(1, -1) @ self.weights[f"{name}.o"].T

    def step(self, token: int, depth: int, threshold: float, min_depth: int) -> tuple[torch.Tensor, int]:
        """The state after the loops that the token runs, and their number; its deeper planes are copied."""
        w = self.weights
        state, alive = w["embed"][token][None] * float(self.reference.descriptor["embed_scale"]), 1.0
        for self.loop in range(depth):
            for layer in range(int(self.reference.descriptor["n_layers"])):
                state = self.run(layer, state, torch.zeros(1, 1, dtype=torch.bool))
            state = self.norm(state, "final_norm")
            alive *= 1 - float(torch.sigmoid(state @ w["exit_gate.weight"] + w["exit_gate.bias"]))
            if self.loop + 1 >= min_depth and 1 - alive >= threshold:
                break
        ran = self.loop + 1
        for loop, layer in itertools.product(
            range(ran, depth), range(int(self.reference.descriptor["n_layers"]))
        ):
            name = f"layers.{layer}"
            self.planes.setdefault((loop, name), []).append(self.planes[ran - 1, name][-1])
        self.position += 1
        return state, ran


def slow_completion(
    ids: Ids, new: int, depth: int, threshold: float, min_depth: int
) -> tuple[list[int], list[int], list[float]]:
    """The rule word by word: a prompt at full depth, each decoded token until its gate lets it go."""
    decoder = SlowDecoder(Reference.load(family_path("ouro")))
    tokens, depths, logprobs = ids.tolist(), [], []
    for i, token in enumerate(tokens):
        never = i < len(ids)
        state, ran = decoder.step(token, depth, 2.0 if never else threshold, min_depth)
        if i < len(ids) - 1:
            continue
        logs = torch.log_softmax(state @ decoder.reference.head.T, dim=-1)[0]
        tokens.append(int(logs.argmax()))
        depths.append(ran)
        logprobs.append(float(logs.max()))
        if len(depths) == new:
            break
    return tokens[len(ids) :], depths, logprobs


@pytest.mark.parametrize(("threshold", "min_depth"), [(0.2, 1), (0.35, 1), (0.2, 3), (0.999, 1)])
@torch.no_grad()
def test_early_exit_is_the_slow_statement_of_its_rule(threshold: float, min_depth: int) -> None:
    ids, new = random_ids(8), 40
    with load_family("ouro", numeric_mode="fp32") as model:
        (found,) = model.generate([request(ids, new, exit_threshold=threshold, min_depth=min_depth)])
    tokens, depths, logprobs = slow_completion(ids, new, 4, threshold, min_depth)
    assert found.depths.tolist() == depths
    assert found.token_ids.tolist() == tokens
    assert np.abs(found.logprobs - logprobs).max() <= FP32_ATOL
    assert depths[0] == 4  # the prompt's last row
    assert min(depths[1:]) >= min_depth
    if threshold == 0.2 and min_depth == 1:
        assert len(set(depths)) >= 3


@pytest.mark.parametrize("mode", ["fp16", "int8", "h_int4"])
@pytest.mark.parametrize("threshold", [1.0, 7.5, float("inf")])
def test_a_threshold_of_one_is_a_fixed_depth(mode: str, threshold: float) -> None:
    ids = random_ids(20)
    with load_family("ouro", mode) as model:
        fixed, exiting = (
            model.generate([request(ids, 40, depth=3, **options)])
            for options in ({}, {"exit_threshold": threshold})
        )
    assert_equal(exiting, fixed)


@pytest.mark.parametrize("mode", ["fp16", "int8", "h_int4"])
def test_depths_respond_to_the_threshold(mode: str) -> None:
    ids = random_ids(20)
    means = []
    with load_family("ouro", mode) as model:
        for threshold in (1e-9, 0.2, 0.4, 1.0):
            (found,) = model.generate([request(ids, 80, exit_threshold=threshold)])
            means.append(found.depths[1:].mean())
            assert found.depths[0] == 4
    assert means[0] == 1.0
    assert means[-1] == 4.0
    assert means == sorted(means)
    assert len(set(means)) == 4


# ---- on_token ------------------------------------------------------------------------------------


def test_tokens_are_told_as_they_come(ouro: Model) -> None:
    requests = mixed_requests()[:12]
    told: list[tuple[int, int, float]] = []
    completions = ouro.generate(requests, on_token=lambda *token: told.append(token), max_batch=5)
    for i, completion in enumerate(completions):
        mine = [(token, logprob) for of, token, logprob in told if of == i]
        assert mine == list(zip(completion.token_ids.tolist(), completion.logprobs.tolist(), strict=True))
    assert len(told) == sum(len(completion.token_ids) for completion in completions)
    # One batch, not one request after the other.
    assert [of for of, _, _ in told] != sorted(of for of, _, _ in told)


class Enough(Exception):
    pass


@pytest.mark.parametrize("at", [1, 2, 30])
def test_what_on_token_raises_ends_the_call_and_nothing_else(at: int) -> None:
    with load_family("ouro", "h_fp16") as model, model.prefix(random_ids(90)) as prefix:
        requests = [request(random_ids(5), 20, prefix=prefix), request(random_ids(9), 20, temperature=1.0)]
        expected = model.generate(requests)
        before = lasting_memory(model)
        seen = itertools.count(1)

        def stop(*_: object) -> None:
            if next(seen) == at:
                raise Enough(f"token {at}")

        with pytest.raises(Enough, match=f"token {at}"):
            model.generate(requests, on_token=stop)
        assert next(seen) == at + 1
        assert lasting_memory(model) == before
        assert_equal(model.generate(requests), expected)


def test_the_model_is_in_use_while_on_token_runs(ouro: Model) -> None:
    ids = random_ids(10)
    handle, prefix = ouro.start(ids, 1), ouro.prefix(ids, depth=2)
    expected = ouro.generate([request(ids, 3)])
    refused = []

    def call_the_model(*_: object) -> None:
        for call in (
            lambda: ouro.score_tokens(ids),
            lambda: ouro.prefix(ids),
            lambda: ouro.generate([request(ids, 1)]),
            lambda: handle.upgrade(2),
            lambda: prefix.upgrade(3),
            lambda: ouro.start(ids, 1),
        ):
            with pytest.raises(ConcurrentUseError, match="another one runs"):
                call()
            refused.append(call)
        assert ouro.vram_usage_bytes > 0  # what is no forward may be asked
        assert handle.depth == 1

    assert_equal(ouro.generate([request(ids, 3)], on_token=call_the_model), expected)
    assert len(refused) == 6 * 3


def test_a_model_or_prefix_that_on_token_closes_lasts_for_the_call() -> None:
    model = load_family("ouro", "h_int8")
    prefix = model.prefix(random_ids(90))
    expected = model.generate([request(random_ids(5), 20, prefix=prefix)])

    def close(*_: object) -> None:
        prefix.close()
        model.close()

    assert_equal(model.generate([request(random_ids(5), 20, prefix=prefix)], on_token=close), expected)
    assert model.closed


@pytest.mark.parametrize("family", ["ouro", "hrm_text"])
@pytest.mark.parametrize("rows", [5, 8])
def test_sequences_take_turns_where_a_pass_has_rows_for_few_of_them(rows: int, family: str) -> None:
    """None runs to its end before all have begun, and nobody gets three tokens between two of another."""
    n, new = 12, 40
    requests = [request(random_ids(1 + i % 5, seed=i), new, depth=1) for i in range(n)]
    told: list[int] = []
    with load_family(family, max_seq_len=rows) as model:
        found = model.generate(requests, on_token=lambda index, *_: told.append(index))
        assert_equal(found, alone(model, requests))
    begun = max(told.index(i) for i in range(n))
    ended = min(len(told) - 1 - told[::-1].index(i) for i in range(n))
    assert begun < ended
    together = told[begun:ended]
    assert len(together) > 4 * n, "the case is too short to tell"
    for i in range(n):
        places = [at for at, index in enumerate(together) if index == i]
        assert len(places) > 2
        for first, last in pairwise(places):
            between = together[first + 1 : last]
            assert all(between.count(other) <= 2 for other in range(n))


def test_a_long_prompt_does_not_hold_up_those_that_decode_beside_it() -> None:
    """While rows are left for it: it takes those that they leave."""
    told: list[int] = []
    with load_family("ouro", max_seq_len=8) as model:
        requests = [request(random_ids(2), 30, depth=1), request(random_ids(100, seed=1), 2, depth=1)]
        model.generate(requests, on_token=lambda index, *_: told.append(index))
    assert told.index(1) in range(13, 17)  # 100 rows at 6, then 7 a step


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "options", "named"),
    [
        ([], {}, "request 1: it has no ids"),
        ([5, 61], {}, "token id 61 at index 1"),
        ([5], {"stop_ids": [61]}, "request 1's stop ids: token id 61"),
        ([5], {"max_new_tokens": 0}, "max_new_tokens is 0"),
        ([5], {"max_new_tokens": 2049}, "position 2049, the model has 2048"),
        ([5], {"depth": 0}, "depth 0"),
        ([5], {"min_depth": 0}, "min_depth is 0, it must be 1..4"),
        ([5], {"min_depth": 3, "depth": 2}, "min_depth is 3, it must be 1..2"),
        ([5], {"exit_threshold": 0.0}, "it must be above 0"),
        ([5], {"exit_threshold": float("nan")}, "it must be above 0"),
    ],
)
def test_a_request_out_of_range_is_named_and_generates_nothing(
    ouro: Model, ids: list[int], options: dict[str, Any], named: str
) -> None:
    bad = GenerateRequest(np.array(ids, np.int32), **{"max_new_tokens": 1, **options})
    rows = ouro.counters["rows"]
    with pytest.raises(InvalidInputError, match=named):
        ouro.generate([request(random_ids(3), 2), bad])
    assert ouro.counters["rows"] == rows


@pytest.mark.parametrize(
    ("option", "value"), [("temperature", -1.0), ("top_p", 0.0), ("min_p", 2.0), ("repetition_penalty", 0.0)]
)
def test_sampling_out_of_range_is_refused_when_the_request_is_made(option: str, value: float) -> None:
    with pytest.raises(InvalidInputError, match=f"{option}={value:g}"):
        request(random_ids(3), 2, **{option: value})


def test_other_mistakes_of_a_call_are_named(ouro: Model) -> None:
    ids = random_ids(10)
    with pytest.raises(InvalidInputError, match="max_batch=0"):
        ouro.generate([request(ids, 2)], max_batch=0)
    with ouro.prefix(ids, depth=2) as prefix, pytest.raises(MismatchError, match="at depth 4"):
        ouro.generate([request(ids, 2, prefix=prefix)])
    with load_family("llama") as plain:
        with pytest.raises(InvalidInputError, match="the model has no exit gate"):
            plain.generate([request(ids, 2, exit_threshold=0.5)])
        assert len(plain.generate([request(ids, 2, exit_threshold=1.0)])[0].token_ids) == 2
    with load_family("hrm_text", max_seq_len=32) as whole, pytest.raises(RowBudgetError, match="33 new rows"):
        whole.generate([request(random_ids(33), 2)])
    assert ouro.generate([]) == []


def test_prompts_as_long_as_a_pass_decode_beside_others() -> None:
    """Prefix-LM prompts run whole: one waits until a pass has room for it, and all come to an end."""
    requests = [request(random_ids(n, seed=n), 10, depth=1) for n in (32, 1, 31, 32, 2, 30)]
    with load_family("hrm_text", max_seq_len=32) as model:
        expected: list[Completion] = alone(model, requests)
        assert_equal(model.generate(requests), expected)


def test_logprobs_are_those_of_the_model_and_not_of_the_sampler(ouro: Model) -> None:
    ids = random_ids(10)
    options = {"temperature": 0.01, "top_k": 1, "repetition_penalty": 5.0}
    (found,) = ouro.generate([request(ids, 10, depth=2, **options)])
    assert_is_what_scoring_says(ouro, ids, found, 2)
    below: NDArray[np.bool_] = found.logprobs < 0
    assert below.all()
