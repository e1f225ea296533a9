"""A model of SmolLM2-135M's shape with seeded random weights, for machines that its file does not reach."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM

SHAPE = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192,
    "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
NAME = "SmolLM2-135M's shape, random weights"


def save_random_llama(folder: Path) -> Path:
    """The model as transformers saves it; speed does not depend on what the weights are."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE)).to(torch.float16).save_pretrained(folder)
    Tokenizer(WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2}, "<unk>")).save(str(folder / "tokenizer.json"))
    return folder
