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

from .descriptor import Descriptor, check_descriptor, integer
from .records import FormatError, Value
from .safetensors_folder import SafetensorsFolder
from .source import ConvertError, SourceModel, inverse_frequencies, reading, real, scaled_frequencies
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
    with reading(str(path)):
        values = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise ConvertError(f"read {path}: expected an object, found {type(values).__name__}")
    return values


def _check_config(config: Config) -> None:
    family = config.get("model_type")
    if not isinstance(family, str) or family not in _FAMILIES:
        raise ConvertError(f"config model_type {family!r}: {sorted(_FAMILIES)} can be converted")
    for key, value in config.items():
        # A window that the config itself switches off has no effect.
        if key == "sliding_window" and config.get("use_sliding_window") is False:
            continue
        if key == "layer_types":
            full = isinstance(value, list) and value and all(kind == "full_attention" for kind in value)
            if value is not None and not full:
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


def _flag(config: Config, key: str) -> bool:
    value = config.get(key, False)
    if not isinstance(value, bool):
        raise ConvertError(f"config {key}: expected true or false, found {value!r}")
    return value


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
        "norm_eps": real(config.get("rms_norm_eps"), "config rms_norm_eps"),
        "norm_placement": "sandwich" if family == "ouro" else "pre",
        "loop_norm": True,
        "rope_style": "half",
        "exit_gate": family == "ouro",
        "tied_head": _flag(config, "tie_word_embeddings"),
        "attn_bias": False,
        "bos_id": bos_id,
        "eos_ids": _eos_ids(config, folder),
        "add_bos": _adds_bos(folder, tokenizer_json, bos_id),
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
    ids = found if isinstance(found, list) else [found]
    if any(isinstance(value, bool) or not isinstance(value, int) for value in ids):
        raise ConvertError(f"config eos_token_id: expected an integer or a list of them, found {found!r}")
    return tuple(ids)


def _read_tokenizer(folder: Path) -> bytes:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConvertError(f"read {path}: missing; save the model's fast tokenizer there")
    values = _read_json(path)
    with reading(str(path)):
        # Without its indentation a tokenizer is half the size.
        return json.dumps(values, ensure_ascii=False, separators=(",", ":")).encode()


def _adds_bos(folder: Path, tokenizer_json: bytes, bos_id: int) -> bool:
    with reading(str(folder / "tokenizer.json")):
        encoded = Tokenizer.from_str(tokenizer_json.decode()).encode("a").ids
    return bos_id >= 0 and encoded[:1] == [bos_id]


def _chat_template(folder: Path) -> str:
    path = folder / "chat_template.jinja"
    if path.is_file():
        with reading(str(path)):
            return path.read_text(encoding="utf-8")
    path = folder / "tokenizer_config.json"
    template = _read_json(path).get("chat_template") if path.is_file() else None
    if isinstance(template, list):  # several, by name
        with reading(f"chat_template in {path}"):
            template = next((item["template"] for item in template if item.get("name") == "default"), None)
    return template if isinstance(template, str) else ""


def _frequencies(config: Config, head_dim: int) -> Float32Array:
    """Newer configs hold theta and scaling in one record, older ones in two fields."""
    record = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(record, dict):
        raise ConvertError(f"config rope_scaling: expected an object, found {record!r:.60}")
    scaling = dict(record)
    theta = scaling.pop("rope_theta", config.get("rope_theta"))
    if scaling.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ConvertError("config rope_parameters partial_rotary_factor: only 1.0 can be converted")
    if theta is None:
        theta = 10000.0  # what the Llama family has meant by leaving it out
    theta = real(theta, "config rope_theta", positive=True)
    return scaled_frequencies(inverse_frequencies(head_dim, theta), scaling)


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
        d, f, vocab = (integer(self.descriptor, key) for key in ("hidden_size", "ffn_size", "vocab_size"))
        head_dim, q, kv = (integer(self.descriptor, key) for key in ("head_dim", "n_q_heads", "n_kv_heads"))
        loads = {
            "embed": self._rows({"model.embed_tokens.weight": (vocab, d)}),
            "final_norm": self._rows({"model.norm.weight": (d,)}),
        }
        sandwich = self.descriptor["norm_placement"] == "sandwich"
        norms = {**_NORMS, **_BRANCH_NORMS} if sandwich else _NORMS
        heads = {"q": q, "k": kv, "v": kv}
        for i in range(integer(self.descriptor, "n_layers")):
            theirs, ours = f"model.layers.{i}", f"layers.{i}"
            loads[f"{ours}.qkv"] = self._rows(
                {f"{theirs}.self_attn.{name}_proj.weight": (n * head_dim, d) for name, n in heads.items()}
            )
            loads[f"{ours}.o"] = self._rows({f"{theirs}.self_attn.o_proj.weight": (d, q * head_dim)})
            loads[f"{ours}.gate_up"] = self._rows(
                {f"{theirs}.mlp.{name}_proj.weight": (f, d) for name in ("gate", "up")}
            )
            loads[f"{ours}.down"] = self._rows({f"{theirs}.mlp.down_proj.weight": (d, f)})
            for norm, name in norms.items():
                loads[f"{ours}.{norm}"] = self._rows({f"{theirs}.{name}.weight": (d,)})
        if self.descriptor["exit_gate"]:
            gate = self._rows({"model.early_exit_gate.weight": (1, d)})
            loads["exit_gate.weight"] = lambda: gate().reshape(-1)
            loads["exit_gate.bias"] = self._rows({"model.early_exit_gate.bias": (1,)})
        if not self.descriptor["tied_head"]:
            loads["head"] = self._rows({"lm_head.weight": (vocab, d)})
        return loads

    def _rows(self, parts: Mapping[str, tuple[int, ...]]) -> Callable[[], Float32Array]:
        """The source tensors one below the other, their names and the dims that the config gives them."""
        for name, dims in parts.items():
            if name not in self.weights.names():
                raise ConvertError(f"tensor {name!r}: missing, the config's family has it")
            if self.weights.shape(name) != dims:
                found = list(self.weights.shape(name))
                raise ConvertError(f"tensor {name!r}: the file has {found}, the config gives {list(dims)}")
            self.used.add(name)
        return lambda: np.concatenate([self.weights.read(name) for name in parts])
