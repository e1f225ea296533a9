"""One stack of layers under Llama's names, plain or looped as a whole (ouro, nanbeige)."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import replace
from typing import cast

from ..descriptor import Descriptor
from ..records import Value
from ..source import ConvertError, real
from ..weights import Float32Array
from .family import HARMLESS, Config, Family, Layer, Part
from .fields import flag_field, frequencies, integer_field

USED = frozenset(
    {
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_theta",
        "rope_scaling", "rope_parameters", "tie_word_embeddings",
    }
)  # fmt: skip
ONLY: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "pretraining_tp": (1,),
    "sliding_window": (None,),
    "use_sliding_window": (False,),
    "partial_rotary_factor": (1.0,),
    "rope_interleaved": (False,),
    "quantization_config": (None,),
}
# What the family has meant by leaving rope_theta out.
DEFAULT_THETA = 10000.0

Q, K, V = (Part(f"self_attn.{name}_proj.weight", (name,)) for name in "qkv")
GATE_UP = tuple(Part(f"mlp.{name}_proj.weight", (name,)) for name in ("gate", "up"))
MATRICES: Layer = {
    "qkv": (Q, K, V),
    "o": (Part("self_attn.o_proj.weight"),),
    "gate_up": GATE_UP,
    "down": (Part("mlp.down_proj.weight"),),
}
PRE_NORMS: Layer = {
    "norm_attn_in": (Part("input_layernorm.weight"),),
    "norm_ffn_in": (Part("post_attention_layernorm.weight"),),
}
SANDWICH_NORMS: Layer = {
    **PRE_NORMS,
    "norm_attn_out": (Part("input_layernorm_2.weight"),),
    "norm_ffn_out": (Part("post_attention_layernorm_2.weight"),),
}
BRANCH_NORMS: Layer = {
    "norm_attn_out": (Part("post_attention_layernorm.weight"),),
    "norm_ffn_out": (Part("post_feedforward_layernorm.weight"),),
}
QK_NORMS: Layer = {f"{name}_norm": (Part(f"self_attn.{name}_norm.weight"),) for name in "qk"}
BIAS: Layer = {"qkv_bias": tuple(Part(f"self_attn.{name}_proj.bias", (name,)) for name in "qkv")}
EXIT_GATE: Layer = {
    "exit_gate.weight": (Part("model.early_exit_gate.weight", dims=(1, "hidden_size")),),
    "exit_gate.bias": (Part("model.early_exit_gate.bias"),),
}
OUTSIDE: Layer = {
    "embed": (Part("model.embed_tokens.weight"),),
    "final_norm": (Part("model.norm.weight"),),
    "head": (Part("lm_head.weight"),),
}

Describe = Callable[[Config, Set[str]], dict[str, Value]]


def sizes(config: Config) -> dict[str, Value]:
    """The keys that every config with Llama's field names gives."""
    heads, hidden = integer_field(config, "num_attention_heads"), integer_field(config, "hidden_size")
    return {
        "vocab_size": integer_field(config, "vocab_size"),
        "hidden_size": hidden,
        "ffn_size": integer_field(config, "intermediate_size"),
        "n_q_heads": heads,
        "n_kv_heads": integer_field(config, "num_key_value_heads", default=heads),
        "head_dim": integer_field(config, "head_dim", default=hidden // max(1, heads)),
        "max_positions": integer_field(config, "max_position_embeddings"),
        "norm_eps": real(config.get("rms_norm_eps"), "config rms_norm_eps"),
        "rope_style": "half",
        "tied_head": flag_field(config, "tie_word_embeddings"),
    }


def _plain(family: str, **overrides: Value) -> Describe:
    def describe(config: Config, names: Set[str]) -> dict[str, Value]:
        return {
            "family": family,
            **sizes(config),
            "n_layers": integer_field(config, "num_hidden_layers"),
            "loops": 1,
            "norm_placement": "pre",
            "loop_norm": True,
            "exit_gate": False,
            "attn_bias": False,
            **overrides,
        }

    return describe


def _mistral(config: Config, names: Set[str]) -> dict[str, Value]:
    if "sliding_window" not in config:
        raise ConvertError(
            "config sliding_window: missing, which means 4096 in this family; only null can be converted"
        )
    return _plain("llama")(config, names)


def _ouro(config: Config, names: Set[str]) -> dict[str, Value]:
    """The normed state after each loop is what the next one starts from, and what the gate reads."""
    looped: dict[str, Value] = {"norm_placement": "sandwich", "exit_gate": True}
    loops = integer_field(config, "total_ut_steps")
    return {**_plain("ouro", **looped)(config, names), "loops": loops}


def _qwen3(config: Config, names: Set[str]) -> dict[str, Value]:
    """Its head size is 128 where the config is silent, not hidden_size / heads: the config has to say."""
    return _plain("qwen3", qk_norm="head", head_dim=integer_field(config, "head_dim"))(config, names)


def _nanbeige(config: Config, names: Set[str]) -> dict[str, Value]:
    """Llama's stack, run again; its head size is not hidden_size / heads and must be given."""
    head_dim = integer_field(config, "head_dim", "kv_channels")
    loop_norm = not flag_field(config, "skip_loop_final_norm")
    loops = integer_field(config, "num_loops")
    return {**_plain("nanbeige", head_dim=head_dim, loop_norm=loop_norm)(config, names), "loops": loops}


def _names(layer: Layer, more: Layer | None = None) -> Callable[[Set[str]], tuple[Layer, Layer]]:
    return lambda names: ({**OUTSIDE, **(more or {})}, layer)


def llama_frequencies(config: Config, descriptor: Descriptor) -> Float32Array:
    return frequencies(config, cast(int, descriptor["head_dim"]), DEFAULT_THETA)


OFF: tuple[object, ...] = (None, False, 0, [])
# Switches of the Nanbeige modelling code for which we have no arithmetic; the release has all of them off.
NANBEIGE_OFF = dict.fromkeys(
    (
        "qk_layernorm", "emb_neighbor_num", "insert_ngram_layer_idx", "ngram_insert_all_layers",
        "enable_double_loop_split", "loop_middle_layers", "loop_share_kv", "enable_hyper_connection",
        "enable_mhc", "enable_h_res_identity", "enable_depth_attention", "loop_loss_weights",
        "emb_split_num", "ngram_vocab_size_ratio", "ngram_compressed_tokenizer", "loop_middle_repeats",
        "mhc_diff_for_loop", "mhc_double_stream_position_for_loop",
    ),
    OFF,
)  # fmt: skip

_LLAMA = Family(
    describe=_plain("llama"),
    names=_names({**MATRICES, **PRE_NORMS}),
    frequencies=llama_frequencies,
    used=USED,
    only=ONLY,
)
FAMILIES: dict[str, Family] = {
    "llama": _LLAMA,
    "mistral": replace(_LLAMA, describe=_mistral),
    "qwen2": replace(
        _LLAMA,
        describe=_plain("qwen2", attn_bias=True),
        names=_names({**MATRICES, **BIAS, **PRE_NORMS}),
    ),
    "qwen3": replace(_LLAMA, describe=_qwen3, names=_names({**MATRICES, **QK_NORMS, **PRE_NORMS})),
    "olmo2": replace(
        _LLAMA,
        describe=_plain("olmo2", norm_placement="branch", qk_norm="full"),
        names=_names({**MATRICES, **QK_NORMS, **BRANCH_NORMS}),
    ),
    "ouro": replace(
        _LLAMA,
        describe=_ouro,
        names=_names({**MATRICES, **SANDWICH_NORMS}, EXIT_GATE),
        used=USED | {"total_ut_steps"},
        harmless=HARMLESS | {"early_exit_threshold"},
    ),
    "nanbeige": replace(
        _LLAMA,
        describe=_nanbeige,
        used=USED | {"num_loops", "skip_loop_final_norm", "kv_channels"},
        harmless=HARMLESS | {"num_residual_streams"},  # of hyper-connections, which are off
        only={**ONLY, **NANBEIGE_OFF},
    ),
}
