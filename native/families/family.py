"""What a family of source models is made of: config fields that are known, and where its tensors lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field

from ..descriptor import Descriptor, integer
from ..records import Value
from ..weights import Float32Array

Config = Mapping[str, object]

# Fields that say where a model came from or how it is trained or served; no arithmetic depends on them.
HARMLESS = frozenset(
    {
        "architectures", "auto_map", "torch_dtype", "dtype", "transformers_version", "use_cache",
        "initializer_range", "attention_dropout", "pad_token_id", "_name_or_path", "_attn_implementation",
        "_attn_implementation_autoset", "is_llama_config", "transformers.js_config", "max_window_layers",
        "id2label", "label2id", "output_attentions", "output_hidden_states", "return_dict",
        "chunk_size_feed_forward", "problem_type", "unsloth_fixed", "unsloth_version",
        "bos_token_id", "eos_token_id",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Part:
    """A source tensor whose rows are these segments of ours, one below the other.

    dims: the shape that the source stores, where it is not [rows, columns]: numbers, or descriptor keys.
    """

    name: str
    segments: tuple[str, ...] = ("all",)
    dims: tuple[int | str, ...] = ()


# Our fused tensors by segment, in the order of their rows; any other tensor is one segment, "all".
SEGMENTS: dict[str, tuple[str, ...]] = {
    "qkv": ("q", "k", "v", "attn_gate"),
    "qkv_bias": ("q", "k", "v"),
    "gate_up": ("gate", "up"),
}


def segment_rows(descriptor: Descriptor) -> dict[str, int]:
    """Rows of every segment."""
    head_dim, ffn = integer(descriptor, "head_dim"), integer(descriptor, "ffn_size")
    q, kv = integer(descriptor, "n_q_heads") * head_dim, integer(descriptor, "n_kv_heads") * head_dim
    return {"q": q, "k": kv, "v": kv, "attn_gate": q, "gate": ffn, "up": ffn}


# Our tensor of one layer -> the parts of it under the layer's name in the source.
Layer = Mapping[str, tuple[Part, ...]]


@dataclass(frozen=True, slots=True)
class Family:
    """One model_type of config.json.

    describe: config and tensor names -> the descriptor's keys but for token ids and chat template.
    names: tensor names -> (where our tensors outside the layers lie, where those of one layer do).
    stacks: where layers lie in the source, in the order of ours: prelude, core, coda, or low, high.
    frequencies: config and descriptor -> rotation angles a position.
    only: field -> the values under which it changes nothing.
    tables: rotation tables that repeat the frequencies: their values and ours -> whether they agree.
    """

    describe: Callable[[Config, Set[str]], dict[str, Value]]
    names: Callable[[Set[str]], tuple[Layer, Layer]]
    frequencies: Callable[[Config, Descriptor], Float32Array]
    stacks: tuple[str, ...] = ("model.layers",)
    used: frozenset[str] = frozenset()
    harmless: frozenset[str] = HARMLESS
    only: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    tables: Mapping[str, Callable[[Float32Array, Float32Array], bool]] = field(default_factory=dict)
