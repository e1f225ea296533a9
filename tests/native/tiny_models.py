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
FAMILIES = {"llama": _LLAMA, "ouro": _OURO}


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
    tensors: TensorMap = {}
    for name, dims in expected_tensors(descriptor).items():
        if name == "rope.inv_freq":
            values = 10000.0 ** -(np.arange(dims[0]) / dims[0])
        elif name in ("embed", "exit_gate.bias"):
            values = rng.standard_normal(dims)
        elif len(dims) == 2 or name == "exit_gate.weight":
            values = rng.standard_normal(dims) / np.sqrt(dims[-1])
        else:
            values = 1 + 0.2 * rng.standard_normal(dims)
        tensors[name] = values.astype(np.float32)
    for i in range(integer(descriptor, "n_layers")):
        _add_layer_outliers(tensors, descriptor, f"layers.{i}", outlier_channels, rng)
    channels = rng.choice(len(tensors["final_norm"]), outlier_channels, replace=False)
    tensors["embed" if descriptor["tied_head"] else "head"][:, channels] *= OUTLIER
    tensors["final_norm"][channels] /= OUTLIER
    return tensors


def _add_layer_outliers(
    tensors: TensorMap, descriptor: Descriptor, layer: str, count: int, rng: np.random.Generator
) -> None:
    for matrix, norm in (("qkv", "norm_attn_in"), ("gate_up", "norm_ffn_in")):
        channels = rng.choice(integer(descriptor, "hidden_size"), count, replace=False)
        tensors[f"{layer}.{matrix}"][:, channels] *= OUTLIER
        tensors[f"{layer}.{norm}"][channels] /= OUTLIER
    n_q, n_kv, head_dim, ffn = (
        integer(descriptor, key) for key in ("n_q_heads", "n_kv_heads", "head_dim", "ffn_size")
    )
    channels = rng.choice(head_dim, min(count, head_dim), replace=False)
    by_head = tensors[f"{layer}.o"].reshape(-1, n_q, head_dim)
    by_head[:, :, channels] *= OUTLIER
    values = tensors[f"{layer}.qkv"][(n_q + n_kv) * head_dim :].reshape(n_kv, head_dim, -1)
    values[:, channels] /= OUTLIER
    channels = rng.choice(ffn, count, replace=False)
    tensors[f"{layer}.down"][:, channels] *= OUTLIER
    tensors[f"{layer}.gate_up"][ffn + channels] /= OUTLIER


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
    path: Path, family: str, *, bits: int, group: int = 64, seed: int = 0, **overrides: Value
) -> Header:
    """A tiny random model as a file, without a tokenizer."""
    descriptor = tiny_descriptor(family, **overrides)
    tensors = stored(random_tensors(descriptor, seed), bits, group)
    return write_model(path, descriptor, tensors, b"", {"name": f"tiny-{family}"})
