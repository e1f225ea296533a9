"""Prelude, core and coda under Huginn's names: Huginn itself, and plain models retrofitted with its loop.

All carry model_type huginn_raven, and the config of a retrofitted model began as Huginn's. What tells them
apart is the layer: norm_3 exists only in Huginn's, q_norm only in a retrofitted OLMo's.
"""

from __future__ import annotations

import math
from collections.abc import Set
from typing import cast

import numpy as np

from ..descriptor import Descriptor
from ..records import Value
from ..source import ConvertError, inverse_frequencies, real
from ..weights import Float32Array
from .family import HARMLESS, Config, Family, Layer, Part
from .fields import flag_field, frequencies, integer_field

STACKS = ("transformer.prelude", "transformer.core_block", "transformer.coda")
OUTSIDE: Layer = {
    "embed": (Part("transformer.wte.weight"),),
    "adapter": (Part("transformer.adapter.weight"),),
    "final_norm": (Part("transformer.ln_f.weight"),),
    "head": (Part("lm_head.weight"),),
}
MATRICES: Layer = {
    "qkv": (Part("attn.Wqkv.weight", ("q", "k", "v")),),
    "o": (Part("attn.proj.weight"),),
    "gate_up": (Part("mlp.fc.weight", ("gate", "up")),),
    "down": (Part("mlp.proj.weight"),),
}
# The values have no bias: their segment is zero.
QK_BIAS: Layer = {"qkv_bias": (Part("attn.qk_bias", ("q", "k"), (2, 1, "n_q_heads", "head_dim")),)}
SUM_NORMS: Layer = {
    "norm_attn_in": (Part("norm_1.weight"),),
    "norm_attn_out": (Part("norm_2.weight"),),
    "norm_ffn_in": (Part("norm_3.weight"),),
    "norm_ffn_out": (Part("norm_4.weight"),),
}
PRE_NORMS: Layer = {"norm_attn_in": (Part("norm_1.weight"),), "norm_ffn_in": (Part("norm_2.weight"),)}
BRANCH_NORMS: Layer = {"norm_attn_out": (Part("norm_1.weight"),), "norm_ffn_out": (Part("norm_2.weight"),)}
QK_NORMS: Layer = {f"{name}_norm": (Part(f"attn.{name}_norm.weight"),) for name in "qk"}

LAYERS: dict[str, Layer] = {
    "huginn": {**MATRICES, **QK_BIAS, **SUM_NORMS},
    "retrofit": {**MATRICES, **PRE_NORMS},
    "retrofit_olmo": {**MATRICES, **QK_NORMS, **BRANCH_NORMS},
}
KEYS: dict[str, dict[str, Value]] = {
    "huginn": {"norm_placement": "sum", "rope_style": "pair", "exit_norm": True},
    "retrofit": {"norm_placement": "pre", "rope_style": "half", "exit_norm": False},
    "retrofit_olmo": {
        "norm_placement": "branch",
        "rope_style": "half",
        "exit_norm": False,
        "qk_norm": "full",
    },
}
# Half a unit of bfloat16's last place at 1: how far a stored rotation table may be from the computed one.
TABLE_TOLERANCE = 2.0**-8


def _family(names: Set[str]) -> str:
    def has(tensor: str) -> bool:
        return any(name.endswith(tensor) for name in names)

    if has(".norm_3.weight"):
        return "huginn"
    return "retrofit_olmo" if has(".attn.q_norm.weight") else "retrofit"


def _names(names: Set[str]) -> tuple[Layer, Layer]:
    return OUTSIDE, LAYERS[_family(names)]


def _describe(config: Config, names: Set[str]) -> dict[str, Value]:
    family = _family(names)
    heads, width = integer_field(config, "n_heads", "num_attention_heads"), _width(config)
    return {
        "family": family,
        "vocab_size": integer_field(config, "vocab_size", "padded_vocab_size"),
        "hidden_size": width,
        "ffn_size": integer_field(config, "intermediate_size"),
        "n_q_heads": heads,
        "n_kv_heads": integer_field(config, "num_key_value_heads", default=heads),
        "head_dim": integer_field(config, "head_dim", default=width // max(1, heads)),
        **_layer_counts(config),
        "max_positions": _positions(config, family),
        "loops": integer_field(config, "mean_recurrence"),
        "norm_eps": real(config.get("norm_eps"), "config norm_eps"),
        "loop_norm": False,
        "inject": "linear",
        **_state(config),
        "exit_gate": False,
        "tied_head": flag_field(config, "tie_embeddings", default=True),
        "attn_bias": _has_bias(config, family),
        **KEYS[family],
    }


def _width(config: Config) -> int:
    return integer_field(config, "n_embd", "hidden_size")


def _layer_counts(config: Config) -> dict[str, Value]:
    prelude, core, coda = (
        integer_field(config, f"n_layers_in_{part}") for part in ("prelude", "recurrent_block", "coda")
    )
    total = integer_field(config, "n_layers", "num_hidden_layers", default=prelude + core + coda)
    if total != prelude + core + coda:
        raise ConvertError(
            f"config n_layers {total}: prelude, recurrent block and coda are {prelude + core + coda} layers"
        )
    return {"n_layers": total, "n_prelude": prelude, "n_coda": coda}


def _positions(config: Config, family: str) -> int:
    """Huginn's limit is its rotation table. A retrofitted config still has Huginn's block_size."""
    return integer_field(config, "block_size" if family == "huginn" else "max_position_embeddings")


def _has_bias(config: Config, family: str) -> bool:
    bias = flag_field(config, "qk_bias", default=True)
    if bias != (family == "huginn"):
        raise ConvertError(
            f"config qk_bias {bias}: the tensors are those of {family}, which has it otherwise"
        )
    return bias


def _state(config: Config) -> dict[str, Value]:
    """The embedding's scale, and the random state: cut first, then scaled as the embedding is."""
    mode = config.get("initial_state_mode", "random")
    if mode not in ("random", "embed-init"):
        raise ConvertError(f"config initial_state_mode {mode!r}: random and embed-init can be converted")
    values = config.get("init_values")
    width = min(max(1, _width(config)), 1 << 20)  # what lies outside is refused with the descriptor
    if values is None:  # derived from the width unless the config says otherwise
        values = {"std": math.sqrt(2 / (5 * width)), "embed_scale": math.sqrt(width)}
    if not isinstance(values, dict):
        raise ConvertError(f"config init_values: expected an object, found {values!r:.60}")
    scale = real(values.get("embed_scale"), "config init_values embed_scale", positive=True)
    std = real(values.get("std"), "config init_values std")
    if mode == "embed-init":
        return {"embed_scale": scale, "state_init": "input"}
    if std < 0:
        raise ConvertError(f"config init_values std: {std} is negative")
    return {"embed_scale": scale, "state_init": "normal" if std else "zero", "state_std": std * scale}


def _frequencies(config: Config, descriptor: Descriptor) -> Float32Array:
    """rope_base is Huginn's. A retrofitted config has one too, but rotates by rope_theta and its scaling."""
    head_dim = cast(int, descriptor["head_dim"])
    if descriptor["family"] == "huginn":
        return inverse_frequencies(head_dim, real(config.get("rope_base"), "config rope_base", positive=True))
    return frequencies(config, head_dim)


def _table_agrees(table: Float32Array, inv_freq: Float32Array) -> bool:
    """table: [1, positions, 1, head_dim / 2, 2], cosine and sine of every angle."""
    if table.ndim != 5 or table.shape[::2] != (1, 1, 2) or table.shape[3] != len(inv_freq):
        return False
    angles = np.outer(np.arange(table.shape[1], dtype=np.float32), inv_freq)
    turns = np.stack([np.cos(angles), np.sin(angles)], axis=-1)
    return bool(np.abs(table[0, :, 0] - turns).max(initial=0) <= TABLE_TOLERANCE)


FAMILIES = {
    "huginn_raven": Family(
        describe=_describe,
        names=_names,
        frequencies=_frequencies,
        stacks=STACKS,
        used=frozenset(
            {
                "vocab_size", "padded_vocab_size", "n_embd", "hidden_size", "intermediate_size", "n_heads",
                "num_attention_heads", "num_key_value_heads", "head_dim", "n_layers", "num_hidden_layers",
                "n_layers_in_prelude", "n_layers_in_recurrent_block", "n_layers_in_coda", "block_size",
                "max_position_embeddings", "mean_recurrence", "norm_eps", "tie_embeddings", "qk_bias",
                "init_values", "initial_state_mode", "rope_base", "rope_theta", "rope_scaling",
                "rope_parameters",
            }
        ),
        harmless=HARMLESS
        | {
            # How it was trained, and what follows from other fields. The modelling code ties by
            # tie_embeddings alone; the library's own flag may say anything.
            "name", "hf_config", "padding_multiple", "init_strategy", "init_orthogonal", "sampling_scheme",
            "mean_backprop_depth", "activation_checkpoint_impl", "effective_expected_depth",
            "test_time_noise_type", "tie_word_embeddings",
        },
        only={
            "bias": (False,),
            "architecture_class_name": ("RecurrentGPT",),
            "block_class_name": ("SandwichBlock",),
            "norm_class_name": ("RMSNorm_llama",),
            "mlp_class_name": ("GatedMLP",),
            "nonlin_name": ("SiLU",),
            "state_init": ("like-init",),
            "injection_type": ("linear",),
            "test_time_noise": (0,),
            "quantization_config": (None,),
        },
        tables={"freqs_cis": _table_agrees},
    )
}  # fmt: skip
