"""Tiny random models of every family, with outlier channels, for tests of files, engine and reference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tinyloop.native.descriptor import Descriptor, check_descriptor, expected_tensors, integer
from tinyloop.native.format import Header, write_model
from tinyloop.native.quantize import quantize
from tinyloop.native.records import Value
from tinyloop.native.weights import Tensor

TensorMap = dict[str, NDArray[np.float32]]
OUTLIER = np.float32(30)

_LLAMA: Descriptor = {
    "family": "llama",
    "vocab_size": 61,
    "hidden_size": 48,
    "ffn_size": 96,
    "n_q_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 16,
    "n_layers": 2,
    "max_positions": 256,
    "loops": 1,
    "norm_eps": 1e-5,
    "norm_placement": "pre",
    "loop_norm": True,
    "rope_style": "half",
    "exit_gate": False,
    "tied_head": True,
    "attn_bias": False,
    "bos_id": 1,
    "eos_ids": (2,),
    "add_bos": False,
    "chat_template": "",
}
_OURO: Descriptor = {
    **_LLAMA,
    "family": "ouro",
    "n_kv_heads": 4,
    "loops": 4,
    "norm_eps": 1e-6,
    "norm_placement": "sandwich",
    "exit_gate": True,
    "tied_head": False,
    "bos_id": 0,
    "eos_ids": (0,),
}
_HUGINN: Descriptor = {
    **_LLAMA,
    "family": "huginn",
    "n_kv_heads": 4,
    "n_layers": 4,
    "n_prelude": 1,
    "n_coda": 1,
    "loops": 4,
    "norm_eps": 1e-6,
    "norm_placement": "sum",
    "loop_norm": False,
    "exit_norm": True,
    "state_init": "normal",
    "state_std": 0.632,
    "inject": "linear",
    "embed_scale": 48.0**0.5,
    "rope_style": "pair",
    "attn_bias": True,
}
_RETROFIT: Descriptor = {
    **_HUGINN,
    "family": "retrofit",
    "n_kv_heads": 2,
    "norm_eps": 1e-5,
    "norm_placement": "pre",
    "exit_norm": False,
    "embed_scale": 1.0,
    "rope_style": "half",
    "attn_bias": False,
    "tied_head": False,
}
_HRM_TEXT: Descriptor = {
    **_LLAMA,
    "family": "hrm_text",
    "n_kv_heads": 4,
    "n_layers": 3,
    "n_low": 1,
    "low_cycles": 3,
    "loops": 2,
    "norm_eps": 1e-6,
    "norm_weight": False,
    "embed_scale": 50.0,
    "attn_gate": True,
    "prefix_lm": True,
    "tied_head": False,
}
FAMILIES: dict[str, Descriptor] = {
    "llama": _LLAMA,
    "qwen2": {**_LLAMA, "family": "qwen2", "attn_bias": True},
    "qwen3": {**_LLAMA, "family": "qwen3", "qk_norm": "head", "head_dim": 24},
    "olmo2": {**_LLAMA, "family": "olmo2", "qk_norm": "full", "norm_placement": "branch", "tied_head": False},
    "ouro": _OURO,
    "nanbeige": {**_LLAMA, "family": "nanbeige", "loops": 2, "head_dim": 24, "tied_head": False},
    "loop_range": {**_LLAMA, "n_layers": 4, "n_prelude": 1, "n_coda": 1, "loops": 3, "loop_norm": False},
    "huginn": _HUGINN,
    "huginn_zero": {**_HUGINN, "state_init": "zero", "state_std": 0.0},
    "retrofit": _RETROFIT,
    "retrofit_olmo": {**_RETROFIT, "family": "retrofit_olmo", "norm_placement": "branch", "qk_norm": "full"},
    "hrm_text": _HRM_TEXT,
}


def tiny_descriptor(family: str, /, **overrides: Value) -> Descriptor:
    """A checked descriptor of the family's tiny model, with some keys replaced."""
    return check_descriptor({**FAMILIES[family], **overrides})


def random_tensors(descriptor: Descriptor, seed: int, outlier_channels: int = 2) -> TensorMap:
    """Random weights of healthy scale, in which some input channels of every matrix are 30 times larger.

    Real models have such channels, and they are what breaks a careless quantizer or a sum in too low a
    precision. What feeds an outlier channel is made 30 times smaller, so that attention and logits keep their
    scale: otherwise the model would amplify any rounding, and a comparison would measure that instead.
    """
    rng = np.random.default_rng(seed)
    tensors = {name: _random(name, dims, rng) for name, dims in expected_tensors(descriptor).items()}
    tensors["embed"] /= np.float32(descriptor["embed_scale"])
    # Where matrices read normed values the norm before each can make room for its outliers.
    normed = descriptor["norm_weight"] and descriptor["norm_placement"] != "branch"
    for i in range(integer(descriptor, "n_layers")):
        if normed:
            _add_input_outliers(tensors, descriptor, f"layers.{i}", outlier_channels, rng)
        _add_inner_outliers(tensors, descriptor, f"layers.{i}", outlier_channels, rng)
    channels = rng.choice(integer(descriptor, "hidden_size"), outlier_channels, replace=False)
    if normed:
        tensors["embed" if descriptor["tied_head"] else "head"][:, channels] *= OUTLIER
        tensors["final_norm"][channels] /= OUTLIER
    else:
        _add_residual_outliers(tensors, descriptor, channels)
    return tensors


def _random(name: str, dims: tuple[int, ...], rng: np.random.Generator) -> NDArray[np.float32]:
    if name == "rope.inv_freq":
        values = 10000.0 ** -(np.arange(dims[0]) / dims[0])
    elif name in ("embed", "exit_gate.bias", "low_init"):
        values = rng.standard_normal(dims)
    elif len(dims) == 2 or name == "exit_gate.weight":
        values = rng.standard_normal(dims) / np.sqrt(dims[-1])
    elif name.endswith("qkv_bias"):
        values = 0.5 * rng.standard_normal(dims)
    else:
        values = 1 + 0.2 * rng.standard_normal(dims)
    return values.astype(np.float32)


def _add_input_outliers(
    tensors: TensorMap, descriptor: Descriptor, layer: str, count: int, rng: np.random.Generator
) -> None:
    for matrix, norm in (("qkv", "norm_attn_in"), ("gate_up", "norm_ffn_in")):
        channels = rng.choice(integer(descriptor, "hidden_size"), count, replace=False)
        tensors[f"{layer}.{matrix}"][:, channels] *= OUTLIER
        tensors[f"{layer}.{norm}"][channels] /= OUTLIER


def _add_inner_outliers(
    tensors: TensorMap, descriptor: Descriptor, layer: str, count: int, rng: np.random.Generator
) -> None:
    n_q, n_kv, head_dim, ffn = (
        integer(descriptor, key) for key in ("n_q_heads", "n_kv_heads", "head_dim", "ffn_size")
    )
    channels = rng.choice(head_dim, min(count, head_dim), replace=False)
    by_head = tensors[f"{layer}.o"].reshape(-1, n_q, head_dim)
    by_head[:, :, channels] *= OUTLIER
    value_rows = slice((n_q + n_kv) * head_dim, (n_q + 2 * n_kv) * head_dim)
    for name in ("qkv", "qkv_bias"):
        if f"{layer}.{name}" in tensors:
            values = tensors[f"{layer}.{name}"][value_rows].reshape(n_kv, head_dim, -1)
            values[:, channels] /= OUTLIER
    channels = rng.choice(ffn, count, replace=False)
    tensors[f"{layer}.down"][:, channels] *= OUTLIER
    tensors[f"{layer}.gate_up"][ffn + channels] /= OUTLIER


def _add_residual_outliers(tensors: TensorMap, descriptor: Descriptor, channels: NDArray[np.int64]) -> None:
    """The same channels of every matrix that reads the residual; all that writes them is made smaller."""
    branch = descriptor["norm_placement"] == "branch"
    for name, tensor in tensors.items():
        part = name.split(".")[-1]
        if part in ("qkv", "gate_up", "head"):
            tensor[:, channels] *= OUTLIER
        elif part == "embed":
            tensor[:, channels] /= OUTLIER
        elif part in (
            "adapter",
            "low_init",
            *(("norm_attn_out", "norm_ffn_out") if branch else ("o", "down")),
        ):
            tensor[channels] /= OUTLIER


def stored(tensors: TensorMap, bits: int, group: int = 64) -> dict[str, Tensor]:
    """The tensors as a file holds them: matrices at `bits` (32, 16, 8 or 4), vectors in float32."""
    if bits == 32:
        return dict(tensors)
    return {
        name: tensor
        if tensor.ndim == 1
        else tensor.astype(np.float16)
        if bits == 16
        else quantize(tensor, bits, group)
        for name, tensor in tensors.items()
    }


def write_tiny(
    path: Path, family: str, /, *, bits: int, group: int = 64, seed: int = 0, **overrides: Value
) -> Header:
    """A tiny random model as a file, without a tokenizer."""
    descriptor = tiny_descriptor(family, **overrides)
    tensors = stored(random_tensors(descriptor, seed), bits, group)
    return write_model(path, descriptor, tensors, b"", {"name": f"tiny-{family}"})
