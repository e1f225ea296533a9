"""Model folders as their publishers write them: config.json, safetensors, tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors


def tiny_tokenizer(*, bos: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab={"<s>": 0, "a": 1, "b": 2, "ab": 3}, merges=[("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def write_folder(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Path:
    folder.mkdir()
    save_file(
        {name: value.contiguous().clone() for name, value in tensors.items()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps(config))
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


# Published config fields, at tiny sizes. Fields without a meaning for us stand as published too.
HUGINN_CONFIG: dict[str, Any] = {
    "model_type": "huginn_raven", "architectures": ["RavenForCausalLM"], "n_embd": 48, "n_heads": 4,
    "n_layers": 5, "n_layers_in_prelude": 1, "n_layers_in_recurrent_block": 2, "n_layers_in_coda": 2,
    "intermediate_size": 80, "vocab_size": 61, "padding_multiple": 4096, "block_size": 64,
    "rope_base": 50000, "norm_eps": 1e-6, "qk_bias": True, "bias": False, "tie_embeddings": True,
    "injection_type": "linear", "state_init": "like-init", "mean_recurrence": 32, "nonlin_name": "SiLU",
    "block_class_name": "SandwichBlock", "norm_class_name": "RMSNorm_llama", "mlp_class_name": "GatedMLP",
    "architecture_class_name": "RecurrentGPT", "init_strategy": "takase", "init_orthogonal": False,
    "mean_backprop_depth": 8, "sampling_scheme": "poisson-lognormal-filling", "test_time_noise": 0,
    "test_time_noise_type": "fixed", "activation_checkpoint_impl": "per-iteration",
    "torch_dtype": "float32",
}  # fmt: skip
RETROFIT_CONFIG: dict[str, Any] = {
    **HUGINN_CONFIG, "qk_bias": False, "tie_embeddings": False, "tie_word_embeddings": True,
    "num_key_value_heads": 2, "head_dim": 12, "norm_eps": 1e-5, "max_position_embeddings": 256,
    "rope_theta": 10000.0, "rope_base": 500000.0, "mean_recurrence": 8, "effective_expected_depth": 19,
    "init_values": {"std": 0.0087, "out_proj": 0.0005, "embedding": 0.0087, "embed_scale": 1.0},
}  # fmt: skip
LOOPED_LLAMA_CONFIG: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "hidden_act": "silu",
    "max_position_embeddings": 256, "rope_theta": 10000.0, "rope_scaling": None, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
OURO_CONFIG = {
    **LOOPED_LLAMA_CONFIG, "model_type": "ouro", "total_ut_steps": 4, "early_exit_threshold": 1.0,
    "num_key_value_heads": 4, "use_sliding_window": False, "sliding_window": None,
    "layer_types": ["full_attention"] * 2,
}  # fmt: skip
NANBEIGE_CONFIG = {
    **LOOPED_LLAMA_CONFIG, "model_type": "nanbeige", "num_loops": 2, "skip_loop_final_norm": False,
    "loop_loss_weights": [], "kv_channels": 16, "attention_bias": False, "pretraining_tp": 1,
    "enable_hyper_connection": False, "loop_share_kv": False, "rms_norm_eps": 1e-5,
}  # fmt: skip


def _draw(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, torch.Tensor]:
    """Weights of healthy scale, in what 16 bits hold exactly."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator)
        if name.endswith(("norm.weight", "ln_f.weight")) or "norm_" in name or "layernorm" in name:
            values = 1 + 0.2 * values
        elif len(shape) == 2 and "wte" not in name:
            values = values / shape[1] ** 0.5
        elif name.endswith(("qk_bias", "gate.bias")):
            values = values / 2
        tensors[name] = values.half().float()
    return tensors


def raven_tensors(config: Mapping[str, Any], kind: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """kind: huginn, retrofit or retrofit_olmo; under the published names."""
    d, f, heads = config["n_embd"], config["intermediate_size"], config["n_heads"]
    head_dim = d // heads
    kv = config.get("num_key_value_heads", heads) * head_dim
    block: dict[str, tuple[int, ...]] = {
        "attn.Wqkv.weight": (d + 2 * kv, d),
        "attn.proj.weight": (d, d),
        "mlp.fc.weight": (2 * f, d),
        "mlp.proj.weight": (d, f),
        "norm_1.weight": (d,),
        "norm_2.weight": (d,),
    }
    if kind == "huginn":
        block |= {"norm_3.weight": (d,), "norm_4.weight": (d,), "attn.qk_bias": (2, 1, heads, head_dim)}
    if kind == "retrofit_olmo":
        block |= {"attn.q_norm.weight": (d,), "attn.k_norm.weight": (kv,)}
    stacks = {"prelude": "prelude", "core_block": "recurrent_block", "coda": "coda"}
    layers = [
        f"transformer.{stack}.{i}"
        for stack, field in stacks.items()
        for i in range(config[f"n_layers_in_{field}"])
    ]
    shapes = {f"{layer}.{name}": shape for layer in layers for name, shape in block.items()}
    shapes["transformer.wte.weight"] = (config["vocab_size"], d)
    shapes["transformer.adapter.weight"] = (d, 2 * d)
    shapes["transformer.ln_f.weight"] = (d,)
    tensors = _draw({**shapes, "lm_head.weight": (config["vocab_size"], d)}, seed)
    tensors["transformer.wte.weight"] = (tensors["transformer.wte.weight"] / d**0.5).half().float()
    if config["tie_embeddings"]:
        tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()
    return tensors


def looped_llama_tensors(config: Mapping[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Ouro's or Nanbeige's, under the published names."""
    d, f, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    block: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (q, d),
        "self_attn.k_proj.weight": (kv, d),
        "self_attn.v_proj.weight": (kv, d),
        "self_attn.o_proj.weight": (d, q),
        "mlp.gate_proj.weight": (f, d),
        "mlp.up_proj.weight": (f, d),
        "mlp.down_proj.weight": (d, f),
        "input_layernorm.weight": (d,),
        "post_attention_layernorm.weight": (d,),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.norm.weight": (d,)}
    if config["model_type"] == "ouro":
        block |= {"input_layernorm_2.weight": (d,), "post_attention_layernorm_2.weight": (d,)}
        shapes |= {"model.early_exit_gate.weight": (1, d), "model.early_exit_gate.bias": (1,)}
    for i in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in block.items()}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        shapes[name] = (config["vocab_size"], d)
    return _draw(shapes, seed)
