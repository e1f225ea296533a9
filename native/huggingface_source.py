"""A Hugging Face folder of the Llama or Ouro family as a source model.

A config field is either used, known to be harmless, or must have the one value we compute with; anything
else could change the arithmetic and is refused by name. The same goes for tensors: each is used or refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
from tokenizers import Tokenizer

from .descriptor import Descriptor, check_descriptor
from .records import FormatError, Value
from .safetensors_folder import SafetensorsFolder
from .source import ConvertError, SourceModel, inverse_frequencies, scaled_frequencies
from .weights import Float32Array

Config = Mapping[str, object]

_FAMILIES = {"llama": "llama", "mistral": "llama", "ouro": "ouro"}
_USED = {
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps",
    "rope_theta", "rope_scaling", "rope_parameters", "tie_word_embeddings", "bos_token_id",
    "eos_token_id", "total_ut_steps",
}  # fmt: skip
_HARMLESS = {
    "architectures", "auto_map", "torch_dtype", "dtype", "transformers_version", "use_cache",
    "initializer_range", "attention_dropout", "pad_token_id", "_name_or_path", "_attn_implementation",
    "_attn_implementation_autoset", "is_llama_config", "transformers.js_config", "max_window_layers",
    "early_exit_threshold", "id2label", "label2id", "output_attentions", "output_hidden_states",
    "return_dict", "chunk_size_feed_forward", "problem_type", "is_encoder_decoder", "unsloth_fixed",
    "unsloth_version",
}  # fmt: skip
_ONLY: dict[str, tuple[object, ...]] = {
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
_NORMS = {"norm_attn_in": "input_layernorm", "norm_ffn_in": "post_attention_layernorm"}
_BRANCH_NORMS = {"norm_attn_out": "input_layernorm_2", "norm_ffn_out": "post_attention_layernorm_2"}


def open_huggingface(folder: Path) -> SourceModel:
    """Understand the folder; weights are read later, one at a time.

    Raises: ConvertError naming the config field or tensor that cannot be converted exactly.
    """
    config = _read_json(folder / "config.json")
    _check_config(config)
    weights = SafetensorsFolder(folder)
    tokenizer_json = _read_tokenizer(folder)
    descriptor = _descriptor(config, folder, tokenizer_json)
    plan = _Plan(descriptor, weights)
    frequencies = _frequencies(config, cast(int, descriptor["head_dim"]))
    load = {"rope.inv_freq": lambda: frequencies, **plan.loads()}
    if left := sorted(weights.names() - plan.used - _derived(weights, descriptor)):
        raise ConvertError(f"tensor {left[0]!r}: not part of the family ({len(left)} such tensors)")
    metadata = {"name": folder.resolve().name, "license": "", "source": "Hugging Face folder"}
    return SourceModel(descriptor, load, tokenizer_json, metadata)


def _read_json(path: Path) -> dict[str, object]:
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConvertError(f"read {path}: {error}") from None
    if not isinstance(values, dict):
        raise ConvertError(f"read {path}: expected an object, found {type(values).__name__}")
    return values


def _check_config(config: Config) -> None:
    family = config.get("model_type")
    if family not in _FAMILIES:
        raise ConvertError(f"config model_type {family!r}: {sorted(_FAMILIES)} can be converted")
    for key, value in config.items():
        # A window that the config itself switches off has no effect.
        if key == "sliding_window" and config.get("use_sliding_window") is False:
            continue
        if key == "layer_types":
            if value is not None and set(cast("list[str]", value)) != {"full_attention"}:
                raise ConvertError(f"config layer_types {value!r}: only full_attention can be converted")
        elif key in _ONLY:
            if value not in _ONLY[key]:
                raise ConvertError(f"config {key} {value!r}: only {_ONLY[key][0]!r} can be converted")
        elif key not in _USED | _HARMLESS:
            raise ConvertError(f"config {key!r}: unknown field, it could change the arithmetic")
    if family == "mistral" and "sliding_window" not in config:
        raise ConvertError(
            "config sliding_window: missing, which means 4096 in this family; only null can be converted"
        )
    if family != "ouro" and "total_ut_steps" in config:
        raise ConvertError(f"config total_ut_steps: belongs to ouro, the model_type is {family!r}")


def _integer(config: Config, key: str, default: object = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConvertError(f"config {key}: expected an integer, found {value!r}")
    return value


def _real(config: Config, key: str) -> float:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConvertError(f"config {key}: expected a number, found {value!r}")
    return float(value)


def _descriptor(config: Config, folder: Path, tokenizer_json: bytes) -> Descriptor:
    family = _FAMILIES[str(config["model_type"])]
    heads, hidden = _integer(config, "num_attention_heads"), _integer(config, "hidden_size")
    bos_id = _integer(config, "bos_token_id", -1)
    values: dict[str, Value] = {
        "family": family,
        "vocab_size": _integer(config, "vocab_size"),
        "hidden_size": hidden,
        "ffn_size": _integer(config, "intermediate_size"),
        "n_q_heads": heads,
        "n_kv_heads": _integer(config, "num_key_value_heads", heads),
        "head_dim": _integer(config, "head_dim", hidden // max(1, heads)),
        "n_layers": _integer(config, "num_hidden_layers"),
        "max_positions": _integer(config, "max_position_embeddings"),
        "loops": _integer(config, "total_ut_steps") if family == "ouro" else 1,
        "norm_eps": _real(config, "rms_norm_eps"),
        "norm_placement": "sandwich" if family == "ouro" else "pre",
        "loop_norm": True,
        "rope_style": "half",
        "exit_gate": family == "ouro",
        "tied_head": bool(config.get("tie_word_embeddings", False)),
        "attn_bias": False,
        "bos_id": bos_id,
        "eos_ids": _eos_ids(config, folder),
        "add_bos": _adds_bos(tokenizer_json, bos_id),
        "chat_template": _chat_template(folder),
    }
    try:
        return check_descriptor(values)
    except FormatError as error:
        raise ConvertError(f"config: {error}") from None


def _eos_ids(config: Config, folder: Path) -> tuple[int, ...]:
    """generation_config.json knows the chat model's stop ids; config.json is the fallback."""
    generation = folder / "generation_config.json"
    found = _read_json(generation).get("eos_token_id") if generation.is_file() else None
    found = config.get("eos_token_id") if found is None else found
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list) else (cast(int, found),)


def _read_tokenizer(folder: Path) -> bytes:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConvertError(f"read {path}: missing; save the model's fast tokenizer there")
    # Without its indentation a tokenizer is half the size.
    return json.dumps(_read_json(path), ensure_ascii=False, separators=(",", ":")).encode()


def _adds_bos(tokenizer_json: bytes, bos_id: int) -> bool:
    encoded = Tokenizer.from_str(tokenizer_json.decode()).encode("a").ids
    return bos_id >= 0 and encoded[:1] == [bos_id]


def _chat_template(folder: Path) -> str:
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text()
    path = folder / "tokenizer_config.json"
    template = _read_json(path).get("chat_template") if path.is_file() else None
    if isinstance(template, list):  # several, by name
        template = next((item["template"] for item in template if item.get("name") == "default"), None)
    return template if isinstance(template, str) else ""


def _frequencies(config: Config, head_dim: int) -> Float32Array:
    """Newer configs hold theta and scaling in one record, older ones in two fields."""
    record = config.get("rope_parameters") or config.get("rope_scaling") or {}
    scaling = dict(cast("Mapping[str, object]", record))
    theta = scaling.pop("rope_theta", config.get("rope_theta"))
    if scaling.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ConvertError("config rope_parameters partial_rotary_factor: only 1.0 can be converted")
    if theta is None:
        theta = 10000.0  # what the Llama family has meant by leaving it out
    return scaled_frequencies(
        inverse_frequencies(head_dim, _real({"rope_theta": theta}, "rope_theta")), scaling
    )


def _derived(weights: SafetensorsFolder, descriptor: Descriptor) -> set[str]:
    """Stored tensors that repeat what is known: old rotation tables, and the copy of a tied head."""
    derived = {name for name in weights.names() if name.endswith("self_attn.rotary_emb.inv_freq")}
    if descriptor["tied_head"] and "lm_head.weight" in weights.names():
        if not np.array_equal(weights.read("lm_head.weight"), weights.read("model.embed_tokens.weight")):
            raise ConvertError(
                "tensor 'lm_head.weight': differs from the embedding, yet the config ties them"
            )
        derived.add("lm_head.weight")
    return derived


@dataclass(slots=True)
class _Plan:
    """Which source tensors make up ours; `used` collects every source name asked for."""

    descriptor: Descriptor
    weights: SafetensorsFolder
    used: set[str]

    def __init__(self, descriptor: Descriptor, weights: SafetensorsFolder) -> None:
        self.descriptor, self.weights, self.used = descriptor, weights, set()

    def loads(self) -> dict[str, Callable[[], Float32Array]]:
        loads = {
            "embed": self._rows("model.embed_tokens.weight"),
            "final_norm": self._rows("model.norm.weight"),
        }
        sandwich = self.descriptor["norm_placement"] == "sandwich"
        norms = {**_NORMS, **_BRANCH_NORMS} if sandwich else _NORMS
        for i in range(cast(int, self.descriptor["n_layers"])):
            theirs, ours = f"model.layers.{i}", f"layers.{i}"
            loads[f"{ours}.qkv"] = self._rows(*(f"{theirs}.self_attn.{n}_proj.weight" for n in "qkv"))
            loads[f"{ours}.o"] = self._rows(f"{theirs}.self_attn.o_proj.weight")
            loads[f"{ours}.gate_up"] = self._rows(*(f"{theirs}.mlp.{n}_proj.weight" for n in ("gate", "up")))
            loads[f"{ours}.down"] = self._rows(f"{theirs}.mlp.down_proj.weight")
            for norm, name in norms.items():
                loads[f"{ours}.{norm}"] = self._rows(f"{theirs}.{name}.weight")
        if self.descriptor["exit_gate"]:
            gate = self._rows("model.early_exit_gate.weight")
            loads["exit_gate.weight"] = lambda: gate().reshape(-1)
            loads["exit_gate.bias"] = self._rows("model.early_exit_gate.bias")
        if not self.descriptor["tied_head"]:
            loads["head"] = self._rows("lm_head.weight")
        return loads

    def _rows(self, *names: str) -> Callable[[], Float32Array]:
        """The source tensors one below the other."""
        for name in names:
            if name not in self.weights.names():
                raise ConvertError(f"tensor {name!r}: missing, the config's family has it")
            self.used.add(name)
        return lambda: np.concatenate([self.weights.read(name) for name in names])
