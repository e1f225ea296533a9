"""Random models of the installed library, small, every weight in what 16 bits hold exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from source_folders import tiny_tokenizer

COMMON = {
    "vocab_size": 61, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
    "num_attention_heads": 4, "max_position_embeddings": 256, "initializer_range": 0.3, "bos_token_id": 0,
    "eos_token_id": 1, "pad_token_id": None,
}  # fmt: skip
# A smaller spread: the library norms in float32, and 24 layers deep that would grow beyond the limit.
HRM_FIELDS = {
    "num_hidden_layers": 2, "head_dim": 12, "H_cycles": 2, "L_cycles": 3, "initializer_range": 0.12,
}  # fmt: skip
OFFICIAL: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"num_key_value_heads": 2}),
    "mistral": ("Mistral", {"num_key_value_heads": 2, "sliding_window": None}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 2}),
    "qwen3": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 24}),
    "olmo2": ("Olmo2", {"num_key_value_heads": 2}),
    "hrm_text": ("HrmText", HRM_FIELDS),
}
CAUSAL = [name for name in OFFICIAL if name != "hrm_text"]


def official_model(family: str, **overrides: Any) -> Any:
    torch.manual_seed(0)
    name, fields = OFFICIAL[family]
    config = getattr(transformers, f"{name}Config")(**(COMMON | fields | overrides))
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if key.endswith(("bias", "z_L_init")) or "norm" in key:  # else all zeros, or all ones
                weight.copy_(float("norm" in key) + 0.3 * torch.randn_like(weight))
            weight.copy_(weight.half().float())
    return model


def save_official(folder: Path, model: Any) -> Path:
    model.save_pretrained(folder)
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    return folder
