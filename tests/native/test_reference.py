"""The PyTorch reference against transformers, and against the looped models' own identities."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tinyloop.native.descriptor import Descriptor
from tinyloop.native.reference import Reference
from tinyloop.native.source import inverse_frequencies, scaled_frequencies
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from .tiny_models import TensorMap, random_tensors, tiny_descriptor

IDS = np.random.default_rng(5).integers(0, 61, 40).astype(np.int32)
# Both sides compute in float64; transformers keeps its rotation angles in float32 (2**-24 of an angle up to
# 40).
FLOAT32_LIMIT = 2e-5
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def _transformers_llama(descriptor: Descriptor, tensors: TensorMap, rope: dict[str, Any]) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=descriptor["vocab_size"],
        hidden_size=descriptor["hidden_size"],
        intermediate_size=descriptor["ffn_size"],
        num_hidden_layers=descriptor["n_layers"],
        num_attention_heads=descriptor["n_q_heads"],
        num_key_value_heads=descriptor["n_kv_heads"],
        head_dim=descriptor["head_dim"],
        max_position_embeddings=descriptor["max_positions"],
        rms_norm_eps=descriptor["norm_eps"],
        rope_parameters={"rope_theta": 10000.0, **rope},
        tie_word_embeddings=descriptor["tied_head"],
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config).to(torch.float64).eval()
    q, kv = 4 * 16, 2 * 16
    state = {"model.embed_tokens.weight": tensors["embed"], "model.norm.weight": tensors["final_norm"]}
    for i in range(2):
        theirs, ours = f"model.layers.{i}", f"layers.{i}"
        parts = np.split(tensors[f"{ours}.qkv"], [q, q + kv])
        state.update({f"{theirs}.self_attn.{n}_proj.weight": w for n, w in zip("qkv", parts, strict=True)})
        state[f"{theirs}.self_attn.o_proj.weight"] = tensors[f"{ours}.o"]
        gate, up = np.split(tensors[f"{ours}.gate_up"], 2)
        state |= {f"{theirs}.mlp.gate_proj.weight": gate, f"{theirs}.mlp.up_proj.weight": up}
        state[f"{theirs}.mlp.down_proj.weight"] = tensors[f"{ours}.down"]
        state[f"{theirs}.input_layernorm.weight"] = tensors[f"{ours}.norm_attn_in"]
        state[f"{theirs}.post_attention_layernorm.weight"] = tensors[f"{ours}.norm_ffn_in"]
    state["lm_head.weight"] = tensors["embed" if descriptor["tied_head"] else "head"]
    model.load_state_dict({name: torch.from_numpy(value) for name, value in state.items()}, strict=True)
    return model


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "rope",
    [{"rope_type": "default"}, LLAMA3, {"rope_type": "linear", "factor": 4.0}],
    ids=lambda r: r["rope_type"],
)
def test_llama_equals_transformers(tied: bool, rope: dict[str, Any]) -> None:
    descriptor = tiny_descriptor("llama", tied_head=tied)
    tensors = random_tensors(descriptor, 3)
    tensors["rope.inv_freq"] = scaled_frequencies(inverse_frequencies(16, 10000.0), rope)
    theirs = _transformers_llama(descriptor, tensors, rope)
    with torch.no_grad():
        expected = theirs(torch.from_numpy(IDS.astype(np.int64))[None]).logits[0].numpy()
    found = Reference(descriptor, tensors).logits(IDS, 1)
    assert np.abs(found - expected).max() < FLOAT32_LIMIT * np.abs(expected).max()


class _TrainerLayer(nn.Module):
    """The looped block as its trainer writes it: separate projections, torch's own norm and attention."""

    def __init__(self, tensors: TensorMap, layer: int) -> None:
        super().__init__()
        weights = {
            key.removeprefix(f"layers.{layer}."): torch.from_numpy(value).double()
            for key, value in tensors.items()
            if key.startswith(f"layers.{layer}.")
        }
        self.q, self.k, self.v = weights["qkv"].chunk(3)
        self.gate, self.up = weights["gate_up"].chunk(2)
        self.o, self.down = weights["o"], weights["down"]
        self.norms = [weights[n] for n in ("norm_attn_in", "norm_attn_out", "norm_ffn_in", "norm_ffn_out")]

    def forward(self, x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
        """turn: complex [n, head_dim / 2], a unit rotation a position and pair."""

        def rms(value: torch.Tensor, i: int) -> torch.Tensor:
            return torch.nn.functional.rms_norm(value, (value.shape[-1],), self.norms[i], 1e-6)

        def rotated(value: torch.Tensor) -> torch.Tensor:
            pairs = torch.complex(*value.chunk(2, dim=-1)) * turn
            return torch.cat((pairs.real, pairs.imag), dim=-1)

        a = rms(x, 0)
        q, k, v = ((a @ w.T).view(len(x), 4, 16).transpose(0, 1) for w in (self.q, self.k, self.v))
        mixed = torch.nn.functional.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        x = x + rms(mixed.transpose(0, 1).reshape(len(x), 64) @ self.o.T, 1)
        m = rms(x, 2)
        return x + rms((torch.nn.functional.silu(m @ self.gate.T) * (m @ self.up.T)) @ self.down.T, 3)


def _trainer_states(tensors: TensorMap, ids: NDArray[np.int32], loops: int) -> list[NDArray[np.float64]]:
    layers = [_TrainerLayer(tensors, i) for i in range(2)]
    x = torch.from_numpy(tensors["embed"]).double()[torch.from_numpy(ids.astype(np.int64))]
    angles = torch.outer(torch.arange(len(ids)).double(), torch.from_numpy(tensors["rope.inv_freq"]).double())
    turn = torch.polar(torch.ones_like(angles), angles)
    states = []
    for _ in range(loops):
        for layer in layers:
            x = layer(x, turn)
        x = torch.nn.functional.rms_norm(x, (48,), torch.from_numpy(tensors["final_norm"]).double(), 1e-6)
        states.append(x.numpy())
    return states


def test_looped_equals_the_trainers_forward_at_every_depth() -> None:
    descriptor = tiny_descriptor("ouro")
    tensors = random_tensors(descriptor, 11)
    expected = _trainer_states(tensors, IDS, 4)
    found = Reference(descriptor, tensors).states(IDS, 4)
    for theirs, ours in zip(expected, found, strict=True):
        assert np.abs(ours.numpy() - theirs).max() < 1e-10
    gate = tensors["exit_gate.weight"].astype(np.float64), tensors["exit_gate.bias"].astype(np.float64)
    by_hand = [1 / (1 + np.exp(-(state @ gate[0] + gate[1]))) for state in expected]
    assert np.allclose(Reference(descriptor, tensors).gates(IDS, 4), by_hand, atol=1e-10)


def test_a_prefix_of_a_deep_run_is_the_shallow_run() -> None:
    descriptor = tiny_descriptor("ouro")
    reference = Reference(descriptor, random_tensors(descriptor, 12))
    by_depth = reference.logprobs_by_depth(IDS, 4)
    for depth in range(1, 5):
        assert np.array_equal(by_depth[depth - 1], reference.logprobs(IDS, depth))


def test_later_tokens_do_not_change_earlier_logprobs() -> None:
    descriptor = tiny_descriptor("ouro")
    reference = Reference(descriptor, random_tensors(descriptor, 13))
    whole, part = reference.logprobs(IDS, 2), reference.logprobs(IDS[:17], 2)
    assert np.allclose(whole[:16], part, atol=1e-12)


def test_logprobs_are_those_of_the_logits() -> None:
    descriptor = tiny_descriptor("llama")
    reference = Reference(descriptor, random_tensors(descriptor, 14))
    logits = reference.logits(IDS, 1)
    expected = logits - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True))
    expected -= logits.max(1, keepdims=True)
    assert np.allclose(reference.logprobs(IDS, 1), expected[np.arange(39), IDS[1:]], atol=1e-12)
