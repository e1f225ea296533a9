"""Every family in every cache mode against the reference in float64, and wrong models that must not pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinyloop.native.reference.layers as reference_layers
import tinyloop.native.reference.stored as reference_stored
import torch
from engine_cases import parts, random_ids, score_items, write_calm
from numpy.typing import NDArray
from test_engine_parity import FP16_MAX, FP16_RMS, FP32_MAX
from tiny_models import FAMILIES
from tinyloop.native import LoadError, load_model
from tinyloop.native.descriptor import integer
from tinyloop.native.records import Value
from tinyloop.native.reference import Reference

# Hidden states take more room than keys and values on models this small.
pytestmark = pytest.mark.filterwarnings("ignore:cache_mode:UserWarning")

Float64Array = NDArray[np.float64]
EXACT_MODES = ("fp16", "h_fp16")  # the reference has nothing to round in these
QUANTIZED_MODES = ("int8", "h_int8", "h_int4")
MODES = (*EXACT_MODES, *QUANTIZED_MODES)
DEPTH = 4
LENGTH = 130  # more than two key tiles, and one row into a third
# A value that lies on the border of two codes may fall to either side in float32 and in float64, and such a
# tie moves all later rows. On short texts most rows come before the first: their median must agree to
# FP32_MAX, taken where every mode quantizes already.
SHORT, TEXTS, SHORT_DEPTH = 14, 5, 2
QUANTIZED_ROWS = slice(reference_stored.SINK_TOKENS, None)
# On a long text few codes of thousands move. What quantization itself moves is the measure: a cache that is
# not quantized is 1 of it away, one quantized by another rule about sqrt(2).
TIES = 0.25
# FP16 rounding is itself a part of a code, and each loop quantizes what the last one made of it: beyond two
# loops both sides have gone as far apart as any two roundings would.
HALF_DEPTH = 2
# Grouped scales: hidden states of 200 are groups of 128 and 72, or three of 64 and one of 8.
WIDE: dict[str, Any] = {"hidden_size": 200}


def rms(x: Float64Array) -> float:
    return float(np.sqrt(np.mean(x**2)))


class Zoo:
    """Tiny models as files, and what the reference says of them: each computed once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.known: dict[tuple[object, ...], Float64Array] = {}

    def path(self, family: str, bits: int, wide: bool = False) -> Path:
        file = self.folder / f"{family}-{bits}-{wide}.tloop"
        if not file.exists():
            write_calm(file, family, bits=bits, seed=bits, **(WIDE if wide else {}))
        return file

    def expected(self, path: Path, mode: str, seed: int, length: int, prompt_len: int = 0) -> Float64Array:
        """float64 [DEPTH, length - 1]."""
        key = (path, mode, seed, length, prompt_len)
        if key not in self.known:
            reference = Reference.load(path, cache_mode=mode)
            self.known[key] = reference.logprobs_by_depth(random_ids(length, seed), DEPTH, prompt_len)
        return self.known[key]


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return Zoo(tmp_path_factory.mktemp("zoo"))


def engine_rows(
    path: Path,
    mode: str,
    numbers: Any,
    texts: list[NDArray[np.int32]],
    prompt_len: int = 0,
    prefill_chunk: int = 0,
) -> list[Float64Array]:
    """For each text float64 [DEPTH, n - 1], every depth a call of its own."""
    prompts = np.full(len(texts), prompt_len, np.int32)
    items = [(ids, len(ids) - 1) for ids in texts]
    with load_model(
        path,
        256,
        prefill_chunk,
        numeric_mode=numbers,
        cache_mode=mode,
        threads=1,
    ) as model:
        by_depth = [
            parts(score_items(model, items, depth=depth, prompt_lens=prompts))
            for depth in range(1, DEPTH + 1)
        ]
    return [np.stack(rows).astype(np.float64) for rows in zip(*by_depth, strict=True)]


def check_exact(
    zoo: Zoo, family: str, bits: int, mode: str, prompt_len: int = 0, prefill_chunk: int = 0
) -> None:
    path, texts = zoo.path(family, bits), [random_ids(LENGTH)]
    expected = zoo.expected(path, "fp16", 0, LENGTH, prompt_len)
    (full,) = engine_rows(path, mode, "fp32", texts, prompt_len, prefill_chunk)
    assert np.abs(full - expected).max() <= FP32_MAX
    (half,) = engine_rows(path, mode, "fp16", texts, prompt_len, prefill_chunk)
    for at, error in enumerate(half - expected):
        # The limits hold for what a model was made for; each loop beyond that adds its own rounding.
        beyond = max(1.0, (at + 1) / integer(FAMILIES[family], "loops"))
        assert np.abs(error).max() <= FP16_MAX * beyond
        assert rms(error) <= FP16_RMS * beyond


def check_quantized(
    zoo: Zoo,
    family: str,
    bits: int,
    mode: str,
    prompt_len: int = 0,
    prefill_chunk: int = 0,
    wide: bool = False,
) -> None:
    path, chunk = zoo.path(family, bits, wide), prefill_chunk
    prompt = min(prompt_len, SHORT // 2)
    texts = [random_ids(SHORT, seed) for seed in range(TEXTS)]
    expected = np.stack([zoo.expected(path, mode, seed, SHORT, prompt) for seed in range(TEXTS)])
    error = np.abs(np.stack(engine_rows(path, mode, "fp32", texts, prompt, chunk)) - expected)
    assert (np.median(error[:, :SHORT_DEPTH, QUANTIZED_ROWS], axis=(0, 2)) <= FP32_MAX).all()

    with_cache = zoo.expected(path, mode, 0, LENGTH, prompt_len)
    without = zoo.expected(path, "fp16", 0, LENGTH, prompt_len)
    (full,) = engine_rows(path, mode, "fp32", [random_ids(LENGTH)], prompt_len, chunk)
    (half,) = engine_rows(path, mode, "fp16", [random_ids(LENGTH)], prompt_len, chunk)
    for at in range(DEPTH):
        moved = rms(with_cache[at] - without[at])
        assert rms(full[at] - with_cache[at]) <= TIES * moved + FP32_MAX
        if at < HALF_DEPTH:
            # This cache's numbers: no further from them than they are from those without a cache, and
            # nearer to them than to those, which values stored as they are, or by another rule, are not.
            off = rms(half[at] - with_cache[at])
            assert off <= moved + FP16_RMS
            assert off < rms(half[at] - without[at])


@pytest.mark.parametrize(
    ("mode", "bits"), [(mode, bits) for mode in MODES for bits in (4, 16) if (mode, bits) != ("int8", 16)]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_in_every_cache_mode(zoo: Zoo, family: str, mode: str, bits: int) -> None:
    """Weights matter to a cache only where keys and values are rebuilt with them."""
    (check_exact if mode in EXACT_MODES else check_quantized)(zoo, family, bits, mode)


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize(
    ("family", "mode"),
    [("qwen3", "h_int8"), ("olmo2", "int8"), ("ouro", "fp16"), ("huginn", "h_fp16"), ("hrm_text", "h_int4")],
)
def test_other_weights(zoo: Zoo, family: str, mode: str, bits: int) -> None:
    (check_exact if mode in EXACT_MODES else check_quantized)(zoo, family, bits, mode)


@pytest.mark.parametrize("mode", ["h_int8", "h_int4"])
@pytest.mark.parametrize("family", ["ouro", "olmo2", "huginn"])
def test_hidden_states_of_several_groups(zoo: Zoo, family: str, mode: str) -> None:
    check_quantized(zoo, family, 8, mode, wide=True)


# Chunks smaller than the prompt: its last rows must be stored before its first ones attend.
@pytest.mark.parametrize("prefill_chunk", [0, 16])
@pytest.mark.parametrize("mode", MODES)
def test_a_prompt_that_sees_itself_both_ways(zoo: Zoo, mode: str, prefill_chunk: int) -> None:
    check = check_exact if mode in EXACT_MODES else check_quantized
    check(zoo, "hrm_text", 8, mode, prompt_len=100, prefill_chunk=prefill_chunk)


@pytest.mark.parametrize("prompt_len", [1, 64, LENGTH - 1])
def test_prompts_of_other_lengths(zoo: Zoo, prompt_len: int) -> None:
    check_exact(zoo, "hrm_text", 8, "fp16", prompt_len=prompt_len, prefill_chunk=48)


# ---- what the loops start from -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "state_init", "seed"),
    [
        ("huginn", None, 7),
        ("huginn", "normal", 2**64 - 1),
        ("huginn", "zero", 0),
        ("huginn_zero", "zero", 3),
        ("retrofit", "normal", 1),
    ],
)
def test_first_states_are_the_references(zoo: Zoo, family: str, state_init: Any, seed: int) -> None:
    path, ids = zoo.path(family, 8), random_ids(LENGTH)
    expected = Reference.load(path, state_init=state_init, state_seed=seed).logprobs(ids, 2)
    with load_model(
        path,
        256,
        numeric_mode="fp32",
        state_init=state_init,
        state_seed=seed,
    ) as model:
        assert np.abs(model.score_tokens(ids, depth=2) - expected).max() <= FP32_MAX


def test_a_seed_is_another_model_and_says_so(zoo: Zoo) -> None:
    ids = random_ids(LENGTH)
    found, names = [], set()
    choices: tuple[dict[str, Any], ...] = (
        {"state_seed": 0},
        {"state_seed": 1},
        {"state_seed": 2**40},
        {"state_init": "zero"},
    )
    for options in choices:
        with load_model(zoo.path("huginn", 8), 256, **options) as model:
            found.append(model.score_tokens(ids, depth=2).astype(np.float64))
            names.add(model.numerics_id)
    assert len(names) == len(found)
    assert all(rms(a - b) > 10 * FP16_RMS for i, a in enumerate(found) for b in found[:i])


@pytest.mark.parametrize(
    ("family", "state_init"), [("llama", "zero"), ("hrm_text", "normal"), ("huginn_zero", "normal")]
)
def test_a_first_state_that_a_model_does_not_have_is_refused(zoo: Zoo, family: str, state_init: Any) -> None:
    with pytest.raises(LoadError, match=f"state_init='{state_init}'"):
        load_model(zoo.path(family, 8), 256, state_init=state_init)


# ---- wrong models --------------------------------------------------------------------------------

# What a mistake costs at least: ten times what the FP16 mode may be off, a hundred times the FP32 mode's.
FAULT_RMS = 10 * FP16_RMS
Fault = Callable[[Reference], None]


def saying(**overrides: Value) -> Fault:
    """The reference of a descriptor that says otherwise."""

    def wrong(reference: Reference) -> None:
        reference.descriptor = reference._layers.descriptor = {**reference.descriptor, **overrides}

    return wrong


def norms_moved(placement: str, suffix: str, to: str) -> Fault:
    """The same norm weights at other places of a block."""

    def wrong(reference: Reference) -> None:
        saying(norm_placement=placement)(reference)
        for name in [name for name in reference.weights if name.endswith(suffix) and "norm_" in name]:
            reference.weights[name.removesuffix(suffix) + to] = reference.weights[name]

    return wrong


def one_plane_for_all_loops(reference: Reference) -> None:
    """The first loop's keys and values serve every loop."""
    layers, first = reference._layers, dict[str, tuple[torch.Tensor, torch.Tensor]]()
    products = layers._products

    def shared(
        name: str, h: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        query, key, value, gate = products(name, h)
        return query, *first.setdefault(name, (key, value)), gate

    layers._products = shared  # type: ignore[method-assign]


def heads_in_turn(reference: Reference) -> None:
    """Query head i reads key-value head i modulo their number, instead of the one of its group."""
    layers = reference._layers
    order = torch.arange(layers.n_q).view(layers.n_kv, -1).T.flatten()
    for name, weight in reference.weights.items():
        if name.endswith(".qkv"):
            q = layers.n_q * layers.head_dim
            weight[:q] = weight[:q].view(layers.n_q, layers.head_dim, -1)[order].reshape(q, -1)
        if name.endswith(".o"):
            weight[:] = weight.view(-1, layers.n_q, layers.head_dim)[:, order].reshape(weight.shape)


FAULTS: list[tuple[str, str, Fault]] = [
    ("llama", "pairs are rotated", saying(rope_style="pair")),
    ("llama", "norms act on branches", norms_moved("branch", "_in", "_out")),
    ("llama", "heads in turn", heads_in_turn),
    ("qwen2", "no bias", saying(attn_bias=False)),
    ("qwen3", "no head norms", saying(qk_norm="none")),
    ("olmo2", "norms before branches", norms_moved("pre", "_out", "_in")),
    ("olmo2", "no full norm", saying(qk_norm="none")),
    ("ouro", "one plane", one_plane_for_all_loops),
    ("ouro", "norms after sums", saying(norm_placement="sum")),
    ("ouro", "no loop norm", saying(loop_norm=False)),
    ("nanbeige", "one plane", one_plane_for_all_loops),
    ("nanbeige", "no loop norm", saying(loop_norm=False)),
    ("loop_range", "one plane", one_plane_for_all_loops),
    ("loop_range", "the coda loops too", saying(n_coda=0)),
    ("loop_range", "a norm ends each loop", saying(exit_norm=True)),
    ("huginn", "one plane", one_plane_for_all_loops),
    ("huginn", "norms on branches", saying(norm_placement="sandwich")),
    ("huginn", "halves are rotated", saying(rope_style="half")),
    ("huginn", "nothing injected", saying(inject="none")),
    ("huginn", "no exit norm", saying(exit_norm=False)),
    ("huginn", "embedding not scaled", saying(embed_scale=1.0)),
    ("huginn", "another seed", lambda reference: setattr(reference, "state_seed", 1)),
    ("retrofit", "an exit norm", saying(exit_norm=True)),
    ("retrofit_olmo", "norms before branches", norms_moved("pre", "_out", "_in")),
    ("hrm_text", "one plane", one_plane_for_all_loops),
    ("hrm_text", "too few low cycles", saying(low_cycles=2)),
    ("hrm_text", "stacks cut elsewhere", saying(n_low=2)),
    ("hrm_text", "no gate", saying(attn_gate=False)),
    ("hrm_text", "embedding not scaled", saying(embed_scale=1.0)),
]


@pytest.mark.parametrize(
    ("family", "fault"),
    [pytest.param(family, fault, id=f"{family}: {name}") for family, name, fault in FAULTS],
)
def test_a_wrong_model_is_far_away(zoo: Zoo, family: str, fault: Fault) -> None:
    path, ids = zoo.path(family, 16), random_ids(LENGTH)
    depth = 2
    wrong = Reference.load(path)
    fault(wrong)
    (full,) = engine_rows(path, "fp16", "fp32", [ids])
    assert rms(full[depth - 1] - wrong.logprobs(ids, depth)) > FAULT_RMS


def one_scale_for_all_heads(x: torch.Tensor, mode: str) -> torch.Tensor:
    flat = x.transpose(0, 1).flatten(1)
    return reference_stored._int8(flat, flat.shape[1]).view(x.shape[1], -1, x.shape[2]).transpose(0, 1)


@pytest.mark.parametrize(
    ("mode", "module", "name", "value"),
    [
        ("int8", reference_layers, "stored_keys_or_values", one_scale_for_all_heads),
        ("h_int8", reference_stored, "INT8_HIDDEN_GROUP", 64),
        ("h_int4", reference_stored, "INT4_HIDDEN_GROUP", 128),
        ("h_int4", reference_stored, "SINK_TOKENS", 0),
        ("h_int4", reference_stored, "SINK_TOKENS", 9),
    ],
)
def test_a_cache_quantized_by_another_rule_is_noticed(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch, mode: str, module: object, name: str, value: object
) -> None:
    path, ids = zoo.path("ouro", 8, True), random_ids(LENGTH)
    plain = Reference.load(path).logprobs(ids, 1)
    monkeypatch.setattr(module, name, value)
    wrong = Reference.load(path, cache_mode=mode).logprobs(ids, 1)
    (full,) = engine_rows(path, mode, "fp32", [ids])
    assert rms(full[0] - wrong) > TIES * rms(wrong - plain) + FP32_MAX
