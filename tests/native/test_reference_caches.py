"""The reference with quantized caches and seeded states, against the definitions written out in scalars."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tinyloop.native.reference import Reference
from tinyloop.native.reference.state import normal_state
from tinyloop.native.reference.stored import stored_hidden, stored_keys_or_values

from .oracles import LoopedLlamaOracle
from .source_folders import NANBEIGE_CONFIG, looped_llama_tensors
from .tiny_models import FAMILIES, random_tensors, tiny_descriptor

IDS = np.random.default_rng(5).integers(0, 61, 40).astype(np.int32)


def _int8(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """One group, value after value."""
    scale = np.float32(np.float16(np.max(np.abs(values)) / np.float32(127)))
    if scale == 0:
        return np.zeros_like(values)
    codes = [max(-127.0, min(127.0, float(np.rint(value / scale)))) for value in values]
    return np.array([np.float32(code) * scale for code in codes], np.float32)


def _int4(values: NDArray[np.float32]) -> NDArray[np.float32]:
    least = np.float32(np.float16(values.min()))
    scale = np.float32(np.float16((values.max() - values.min()) / np.float32(15)))
    if scale == 0:
        return np.full_like(values, least)
    codes = [max(0.0, min(15.0, float(np.rint((value - least) / scale)))) for value in values]
    return np.array([np.float32(code) * scale + least for code in codes], np.float32)


def _by_groups(rows: torch.Tensor, group: int, kind: str) -> torch.Tensor:
    values = rows.float().numpy()
    out = np.empty_like(values)
    for i, row in enumerate(values):
        for begin in range(0, len(row), group):
            piece = slice(begin, begin + group)
            out[i, piece] = _int8(row[piece]) if kind == "int8" else _int4(row[piece])
    return torch.from_numpy(out).to(rows.dtype)


def _quantized_hidden(h: torch.Tensor, mode: str) -> torch.Tensor:
    if mode == "h_int4":
        return torch.cat((h[:8], _by_groups(h[8:], 64, "int4")))
    return _by_groups(h, 128, "int8") if mode == "h_int8" else h


def _awkward(width: int) -> torch.Tensor:
    """Rows of every size, among them a constant one, zeros, one below FP16 and one with an outlier."""
    rows = np.random.default_rng(width).standard_normal((20, width))
    rows *= 10.0 ** np.arange(-10, 10)[:, None] / 1e6
    rows[9], rows[10], rows[11], rows[12, 0] = 0, 0.37, -1e-9, 500
    return torch.from_numpy(rows)


@pytest.mark.parametrize("width", [16, 64, 100, 128, 200])
@pytest.mark.parametrize("mode", ["h_int8", "h_int4"])
def test_hidden_states_come_back_as_defined(mode: str, width: int) -> None:
    rows = _awkward(width)
    assert torch.equal(stored_hidden(rows, mode), _quantized_hidden(rows, mode))


@pytest.mark.parametrize("head_dim", [16, 128, 256])
def test_keys_and_values_have_one_scale_a_head_of_a_token(head_dim: int) -> None:
    rows = _awkward(head_dim)
    by_head = stored_keys_or_values(torch.stack((rows, rows.flip(0))), "int8")
    assert torch.equal(by_head[0], _by_groups(rows, head_dim, "int8"))
    assert torch.equal(by_head[1], _by_groups(rows.flip(0), head_dim, "int8"))


class _QuantizingOracle(LoopedLlamaOracle):
    """Quantizes where a cache would: keys after rotation, or the normed input that keys and values read."""

    mode = "fp16"

    def attention(self, name: str, x: torch.Tensor) -> torch.Tensor:
        stored = _quantized_hidden(x, self.mode)
        q, k, v = (
            self.heads(self.linear(x if part == "q" else stored, f"{name}.self_attn.{part}_proj"))
            for part in "qkv"
        )
        q, k = self.turned(q, pairs=False), self.turned(k, pairs=False)
        if self.mode == "int8":
            k, v = (torch.stack([_by_groups(head, 16, "int8") for head in part]) for part in (k, v))
        return self.linear(self.attend(name, q, k, v), f"{name}.self_attn.o_proj")


@pytest.mark.parametrize("mode", ["fp16", "int8", "h_fp16", "h_int8", "h_int4"])
def test_every_pass_reads_its_own_tokens_as_stored(mode: str) -> None:
    descriptor = tiny_descriptor("nanbeige", ffn_size=80, head_dim=16)
    theirs = looped_llama_tensors(NANBEIGE_CONFIG)
    tensors = random_tensors(descriptor, 0)
    tensors |= {
        ours: theirs[name].numpy()
        for ours, name in {
            "embed": "model.embed_tokens.weight",
            "final_norm": "model.norm.weight",
            "head": "lm_head.weight",
        }.items()
    }
    for i in range(2):
        layer = f"model.layers.{i}"
        for ours, parts in {
            "qkv": [f"self_attn.{part}_proj" for part in "qkv"],
            "o": ["self_attn.o_proj"],
            "gate_up": ["mlp.gate_proj", "mlp.up_proj"],
            "down": ["mlp.down_proj"],
            "norm_attn_in": ["input_layernorm"],
            "norm_ffn_in": ["post_attention_layernorm"],
        }.items():
            tensors[f"layers.{i}.{ours}"] = np.concatenate(
                [theirs[f"{layer}.{part}.weight"].numpy() for part in parts]
            )
    oracle = _QuantizingOracle(NANBEIGE_CONFIG, theirs, torch.from_numpy(tensors["rope.inv_freq"]))
    oracle.mode = mode
    expected = oracle.logits(torch.from_numpy(IDS.astype(np.int64)), 2).numpy()
    found = Reference(descriptor, tensors, cache_mode=mode).logits(IDS, 2)
    # Both in float64; no code may differ, for one would show by far more.
    assert np.abs(found - expected).max() < 1e-9
    exact = Reference(descriptor, tensors).logits(IDS, 2)
    rounded = np.abs(found - exact).max(axis=1)
    assert (rounded.max() > 1e-3) == (mode not in ("fp16", "h_fp16"))
    if mode == "h_int4":  # the first tokens are kept, and read nothing that is not
        assert rounded[:8].max() == 0 < rounded[8:].min()


# --- the seeded state ---

_MASK = 2**64 - 1


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def _drawn(seed: int, position: int, channel: int) -> float:
    golden, normal = 0x9E3779B97F4A7C15, NormalDist()
    row = _mix((_mix((seed + golden) & _MASK) + position * golden) & _MASK)
    bits = _mix((row + channel * 0xD1B54A32D192ED03) & _MASK)
    u = ((bits >> 40) + 0.5) / 2**24
    low = normal.cdf(-3)
    return normal.inv_cdf(low + u * (1 - 2 * low))


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1])
def test_state_is_the_defined_function_of_seed_position_and_channel(seed: int) -> None:
    state = normal_state(seed, 50, 40, 0.5)
    for position, channel in [(0, 0), (0, 39), (49, 0), (7, 23), (49, 39)]:
        assert float(state[position, channel]) == pytest.approx(
            0.5 * _drawn(seed, position, channel), abs=1e-6
        )


def test_state_is_a_cut_normal_that_any_seed_or_place_draws_anew() -> None:
    state = normal_state(3, 500, 400, 1.0)
    # The standard deviation of a standard normal cut at three.
    assert float(state.std()) == pytest.approx(0.98658, abs=0.005)
    assert abs(float(state.mean())) < 0.01
    assert 2.99 < float(state.abs().max()) < 3
    assert len(state.unique()) > 0.98 * state.numel()
    assert torch.equal(state[:20], normal_state(3, 20, 400, 1.0))
    for other in (normal_state(4, 500, 400, 1.0), state.roll(1, 0), state.roll(1, 1)):
        assert abs(float(torch.corrcoef(torch.stack((state.ravel(), other.ravel())))[0, 1])) < 0.01


def test_another_state_or_seed_gives_other_logits() -> None:
    descriptor = tiny_descriptor("huginn")
    tensors = random_tensors(descriptor, 0)
    own = Reference(descriptor, tensors).logits(IDS, 2)
    assert np.array_equal(
        own, Reference(descriptor, tensors, state_seed=0, state_init="normal").logits(IDS, 2)
    )
    for options in ({"state_seed": 1}, {"state_init": "zero"}):
        assert np.abs(own - Reference(descriptor, tensors, **options).logits(IDS, 2)).max() > 1e-3  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("family", "options", "named"),
    [
        ("llama", {"state_init": "zero"}, "state_init"),
        ("huginn_zero", {"state_init": "normal"}, "state_init"),
        ("huginn", {"state_init": "input"}, "state_init"),
        ("llama", {"cache_mode": "fp8"}, "cache_mode"),
    ],
)
def test_option_that_a_model_does_not_have_is_refused(
    family: str, options: dict[str, str], named: str
) -> None:
    descriptor = tiny_descriptor(family)
    with pytest.raises(ValueError, match=named):
        Reference(descriptor, random_tensors(descriptor, 0), **options)  # type: ignore[arg-type]


def test_prompt_of_a_model_without_prefix_lm_is_refused() -> None:
    descriptor = tiny_descriptor("llama")
    with pytest.raises(ValueError, match="prompt_len"):
        Reference(descriptor, random_tensors(descriptor, 0)).logits(IDS, 1, 5)


# --- what holds in every family ---


@pytest.mark.parametrize("family", FAMILIES)
def test_shallower_runs_and_earlier_tokens_are_part_of_the_whole(family: str) -> None:
    descriptor = tiny_descriptor(family)
    reference = Reference(descriptor, random_tensors(descriptor, 1))
    by_depth = reference.logprobs_by_depth(IDS, 3)
    for depth in (1, 2, 3):
        assert np.array_equal(by_depth[depth - 1], reference.logprobs(IDS, depth))
    assert np.allclose(by_depth[:, :16], reference.logprobs_by_depth(IDS[:17], 3), atol=1e-11)
    assert np.abs(by_depth[2] - by_depth[1]).max() > 1e-3


def test_tokens_of_an_open_prompt_read_what_comes_later() -> None:
    descriptor = tiny_descriptor("hrm_text")
    reference = Reference(descriptor, random_tensors(descriptor, 1))
    open_prompt, causal = reference.logits(IDS, 2, 10), reference.logits(IDS, 2)
    assert np.abs(open_prompt - causal)[:9].max(axis=1).min() > 1e-3
    changed = IDS.copy()
    changed[9] = (changed[9] + 1) % 61
    assert np.abs(reference.logits(changed, 2, 10) - open_prompt)[0].max() > 1e-3
    assert np.array_equal(reference.logits(changed, 2)[:9], causal[:9])
