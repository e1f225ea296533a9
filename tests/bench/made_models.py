"""Models of real shapes with random weights, so that speed can be measured without anybody's checkpoint.

    python tests/bench/made_models.py ouro-1.4b ouro.tloop --bits 4 --group 128

The weights of a layer are drawn once and used for all layers: a kernel cannot tell, and 1.4 billion values
are written in seconds. A trained model has other logits, not another speed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from tinyloop.native.descriptor import Descriptor, check_descriptor, expected_tensors
from tinyloop.native.format import write_model
from tinyloop.native.records import Value
from tinyloop.native.weights import QuantWeight, Tensor

_PLAIN: dict[str, Value] = {
    "loops": 1,
    "norm_eps": 1e-6,
    "norm_placement": "pre",
    "loop_norm": True,
    "rope_style": "half",
    "exit_gate": False,
    "tied_head": False,
    "attn_bias": False,
    "bos_id": 0,
    "eos_ids": (),
    "add_bos": False,
    "chat_template": "",
}
_OURO = {
    **_PLAIN,
    "family": "ouro",
    "vocab_size": 49152,
    "hidden_size": 2048,
    "ffn_size": 5632,
    "n_q_heads": 16,
    "n_kv_heads": 16,
    "head_dim": 128,
    "max_positions": 65536,
    "loops": 4,
    "norm_placement": "sandwich",
    "exit_gate": True,
}
# Sizes as in the configurations of the published checkpoints.
SHAPES: dict[str, dict[str, Value]] = {
    "ouro-1.4b": {**_OURO, "n_layers": 24},
    "ouro-2.6b": {**_OURO, "n_layers": 48},
    # The stack of ouro-1.4b run once: what a looped model's speed is compared with.
    "ouro-1.4b-plain": {**_OURO, "n_layers": 24, "loops": 1},
    "huginn-0125": {
        **_PLAIN,
        "family": "huginn",
        "vocab_size": 65536,
        "hidden_size": 5280,
        "ffn_size": 17920,
        "n_q_heads": 55,
        "n_kv_heads": 55,
        "head_dim": 96,
        "n_layers": 8,
        "n_prelude": 2,
        "n_coda": 2,
        "max_positions": 4096,
        "loops": 32,
        "norm_placement": "sum",
        "loop_norm": False,
        "exit_norm": True,
        "state_init": "normal",
        "state_std": 0.632,
        "inject": "linear",
        "embed_scale": 5280.0**0.5,
        "rope_style": "pair",
        "attn_bias": True,
        "tied_head": True,
    },
    "nanbeige-3b": {
        **_PLAIN,
        "family": "nanbeige",
        "vocab_size": 166144,
        "hidden_size": 3072,
        "ffn_size": 10752,
        "n_q_heads": 48,
        "n_kv_heads": 8,
        "head_dim": 128,
        "n_layers": 22,
        "max_positions": 65536,
        "loops": 2,
    },
    "llama-1b": {
        **_PLAIN,
        "family": "llama",
        "vocab_size": 128256,
        "hidden_size": 2048,
        "ffn_size": 8192,
        "n_q_heads": 32,
        "n_kv_heads": 8,
        "head_dim": 64,
        "n_layers": 16,
        "max_positions": 131072,
        "tied_head": True,
    },
    "smollm2-135m": {
        **_PLAIN,
        "family": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "ffn_size": 1536,
        "n_q_heads": 9,
        "n_kv_heads": 3,
        "head_dim": 64,
        "n_layers": 30,
        "max_positions": 8192,
        "tied_head": True,
    },
}
WEIGHT_STD = 0.02  # what models of these sizes are initialised with
ROPE_BASE = 10000.0


def make(path: Path, shape: str, *, bits: int = 4, group: int = 128, seed: int = 0) -> Path:
    """Write the model, unless `path` exists. bits: 4, 8 or 16 for all matrices."""
    if not path.exists():
        descriptor = check_descriptor(SHAPES[shape])
        tensors = _tensors(descriptor, bits, group, np.random.default_rng(seed))
        write_model(path, descriptor, tensors, b"", {"name": f"{shape}, random weights, {bits} bits"})
    return path


def _tensors(descriptor: Descriptor, bits: int, group: int, rng: np.random.Generator) -> dict[str, Tensor]:
    drawn: dict[tuple[int, ...], Tensor] = {}
    tensors: dict[str, Tensor] = {}
    for name, dims in expected_tensors(descriptor).items():
        if len(dims) == 1:
            tensors[name] = _vector(name, dims[0])
        elif dims not in drawn:
            drawn[dims] = tensors[name] = _matrix(dims, bits, group, rng)
        else:
            tensors[name] = drawn[dims]
    return tensors


def _vector(name: str, size: int) -> Tensor:
    if name == "rope.inv_freq":
        return (ROPE_BASE ** (-np.arange(size) / size)).astype(np.float32)
    # A gate that is nearly closed, a bias of nothing, norms of one.
    if name.startswith("exit_gate"):
        return np.full(size, -2.0 if name.endswith("bias") else 0.0, np.float32)
    return np.full(size, 0.0 if name.endswith("_bias") else 1.0, np.float32)


def _matrix(dims: tuple[int, ...], bits: int, group: int, rng: np.random.Generator) -> Tensor:
    rows, columns = dims
    if bits == 16:
        return (rng.standard_normal(dims, np.float32) * np.float32(WEIGHT_STD)).astype(np.float16)
    codes = rng.integers(0, 2**bits, dims, np.uint8)
    groups = -(-columns // group)
    middle = (2**bits - 1) / 2
    deviation = np.sqrt((4.0**bits - 1) / 12)  # of a uniform code
    scales = np.full((rows, groups), WEIGHT_STD / deviation, np.float16)
    zeros = np.full((rows, groups), middle, np.float16)
    return QuantWeight(codes, scales, zeros, bits, group)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("path", type=Path)
    parser.add_argument("--bits", type=int, choices=(4, 8, 16), default=4)
    parser.add_argument("--group", type=int, choices=(32, 64, 128), default=128)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    make(options.path, options.shape, bits=options.bits, group=options.group, seed=options.seed)


if __name__ == "__main__":
    main()
