"""HRM-Text: a low and a high stack at two timescales, norms without weights, gated attention."""

from __future__ import annotations

import re
from collections.abc import Set

from ..records import Value
from ..source import ConvertError, real
from .family import HARMLESS, Config, Family, Layer, Part
from .fields import flag_field, integer_field
from .llama import MATRICES, ONLY, USED, K, Q, V, llama_frequencies, sizes

LOW, HIGH = "model.L_module.layers", "model.H_module.layers"
OUTSIDE: Layer = {
    "embed": (Part("model.embed_tokens.weight"),),
    "low_init": (Part("model.z_L_init"),),
    "head": (Part("lm_head.weight"),),
}
SPLIT: Layer = {**MATRICES, "qkv": (Part("self_attn.gate_proj.weight", ("attn_gate",)), Q, K, V)}
# As the authors' own exporter writes it; the gate comes first.
FUSED: Layer = {
    "qkv": (Part("attn.gqkv_proj.weight", ("attn_gate", "q", "k", "v")),),
    "o": (Part("attn.o_proj.weight"),),
    "gate_up": (Part("mlp.gate_up_proj.weight", ("gate", "up")),),
    "down": (Part("mlp.down_proj.weight"),),
}
DEFAULT_INITIALIZER_RANGE = 0.02


def _names(names: Set[str]) -> tuple[Layer, Layer]:
    return OUTSIDE, FUSED if f"{LOW}.0.attn.gqkv_proj.weight" in names else SPLIT


def _describe(config: Config, names: Set[str]) -> dict[str, Value]:
    low_cycles, loops = integer_field(config, "L_cycles"), integer_field(config, "H_cycles")
    n_low = _layers_per_stack(config, names, low_cycles, loops)
    return {
        "family": "hrm_text",
        **sizes(config),
        "n_layers": 2 * n_low,
        "n_low": n_low,
        "low_cycles": low_cycles,
        "loops": loops,
        "norm_placement": "pre",
        "norm_weight": False,
        "loop_norm": True,
        "embed_scale": _embed_scale(config),
        "exit_gate": False,
        "attn_bias": False,
        "attn_gate": True,
        "prefix_lm": flag_field(config, "prefix_lm", default=True),
    }


def _layers_per_stack(config: Config, names: Set[str], low_cycles: int, loops: int) -> int:
    """num_hidden_layers may count one stack, both, or every run of every layer; the tensors tell which."""
    found = {
        int(match[1]) for name in names if (match := re.match(rf"{re.escape(LOW)}\.([0-9]{{1,4}})\.", name))
    }
    n_layers = max(found, default=-1) + 1
    if "num_layers_per_stack" in config:
        stated = integer_field(config, "num_layers_per_stack")
        allowed = {n_layers}
    else:
        stated = integer_field(config, "num_hidden_layers")
        allowed = {n_layers, 2 * n_layers, n_layers * loops * (low_cycles + 1)}
    if n_layers == 0 or stated not in allowed:
        raise ConvertError(
            f"config num_hidden_layers: {stated} layers, but the low stack of the tensors has {n_layers}"
        )
    return n_layers


def _embed_scale(config: Config) -> float:
    if config.get("embedding_scale") is not None:
        return real(config["embedding_scale"], "config embedding_scale", positive=True)
    spread = config.get("initializer_range", DEFAULT_INITIALIZER_RANGE)
    return 1 / real(spread, "config initializer_range", positive=True)


FAMILIES = {
    "hrm_text": Family(
        describe=_describe,
        names=_names,
        frequencies=llama_frequencies,
        stacks=(LOW, HIGH),
        used=USED
        | {
            "H_cycles",
            "L_cycles",
            "embedding_scale",
            "initializer_range",
            "num_layers_per_stack",
            "prefix_lm",
        },
        harmless=HARMLESS | {"L_bp_cycles", "L_bp_steps"},
        only=ONLY,
    )
}
