"""A GGUF file of the llama, qwen2 or qwen3 architecture as a source model.

Of llama, GGUF stores the rows of Q and K permuted for rotation of adjacent pairs; ours rotates halves, so
they are put back. Rows of quantized blocks move whole, which is why blocks of the asked bits can be taken
over with their own scales.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from .descriptor import Descriptor, check_descriptor, integer
from .gguf_tokenizer import bos_and_eos, tokenizer_json
from .quantize import import_q4_1
from .records import FormatError, Value
from .source import ConvertError, SourceModel, inverse_frequencies, reading, real, scaled_frequencies
from .weights import Float32Array, QuantWeight, concatenate_rows

Fields = Mapping[str, Any]
Load = Callable[[], Float32Array | QuantWeight]

_USED = {
    "vocab_size", "block_count", "context_length", "embedding_length", "feed_forward_length",
    "attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon",
    "rope.freq_base", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "attention.key_length", "attention.value_length",
}  # fmt: skip
# Of each architecture: descriptor keys that differ from llama's, whether rows of Q and K are permuted.
_ARCHITECTURES: dict[str, tuple[dict[str, Value], bool]] = {
    "llama": ({}, True),
    "qwen2": ({"attn_bias": True}, False),
    "qwen3": ({"qk_norm": "head"}, False),
}
# Values under which the key changes nothing.
_ONLY: dict[str, object] = {"expert_count": 0, "expert_used_count": 0, "attention.causal": True}


def open_gguf(path: Path, bits: int, group: int) -> SourceModel:
    """Understand the file; weights are read later, one at a time.

    Args: bits, group: what will be stored. Blocks of exactly that kind are handed over undecoded.
    Raises: ConvertError naming the field or tensor that cannot be converted exactly.
    """
    from gguf import GGUFReader

    with reading(path.name):
        reader = GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    own = _own_fields(fields)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    tokenizer, add_bos = tokenizer_json(fields)
    descriptor = _descriptor(fields, own, "output.weight" not in tensors, add_bos)
    _, permuted = _ARCHITECTURES[own.name]
    plan = _Plan(descriptor, tensors, (bits, group), permuted, set())
    load = plan.loads(_frequencies(own, cast(int, descriptor["head_dim"])))
    if left := sorted(set(tensors) - plan.used):
        raise ConvertError(f"tensor {left[0]!r}: not part of the architecture ({len(left)} such tensors)")
    metadata = {
        "name": str(fields.get("general.name", path.stem)),
        "license": str(fields.get("general.license", "")),
        "source": f"GGUF file {path.name}",
    }
    return SourceModel(descriptor, load, tokenizer, metadata)


@dataclass(frozen=True, slots=True)
class _Own:
    """The fields of the file's architecture, without its name in front."""

    name: str
    values: Fields

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConvertError(f"{self.name}.{key}: expected an integer, found {value!r}")
        return value

    def real(self, key: str, default: float | None = None, *, positive: bool = False) -> float:
        return real(self.values.get(key, default), f"{self.name}.{key}", positive=positive)


def _own_fields(fields: Fields) -> _Own:
    architecture = fields.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise ConvertError(
            f"general.architecture {architecture!r}: {sorted(_ARCHITECTURES)} can be converted"
        )
    prefix = f"{architecture}."
    own = {name.removeprefix(prefix): value for name, value in fields.items() if name.startswith(prefix)}
    for key, value in own.items():
        if key not in _USED and key not in _ONLY:
            raise ConvertError(f"{prefix}{key}: unknown field, it could change the arithmetic")
        if key in _ONLY and value != _ONLY[key]:
            raise ConvertError(f"{prefix}{key} {value!r}: only {_ONLY[key]!r} can be converted")
    return _Own(architecture, own)


def _descriptor(fields: Fields, own: _Own, tied: bool, add_bos: bool) -> Descriptor:
    hidden, heads = own.integer("embedding_length"), own.integer("attention.head_count")
    head_dim = own.integer("attention.key_length", hidden // max(1, heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if own.integer(key, head_dim) != head_dim:
            raise ConvertError(
                f"{own.name}.{key} {own.values[key]}: only the head size {head_dim} can be converted"
            )
    bos_id, eos_ids = bos_and_eos(fields)
    differing, _ = _ARCHITECTURES[own.name]
    values: dict[str, Value] = {
        "family": own.name,
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "ffn_size": own.integer("feed_forward_length"),
        "n_q_heads": heads,
        "n_kv_heads": own.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "n_layers": own.integer("block_count"),
        "max_positions": own.integer("context_length"),
        "loops": 1,
        # Stored as float32: the shortest decimal of that float32 is the number its author wrote.
        "norm_eps": float(str(np.float32(own.real("attention.layer_norm_rms_epsilon")))),
        "norm_placement": "pre",
        "loop_norm": True,
        "rope_style": "half",
        "exit_gate": False,
        "tied_head": tied,
        "attn_bias": False,
        "bos_id": bos_id,
        "eos_ids": eos_ids,
        "add_bos": add_bos,
        "chat_template": str(fields.get("tokenizer.chat_template", "")),
        **differing,
    }
    try:
        return check_descriptor(values)
    except FormatError as error:
        raise ConvertError(f"fields: {error}") from None


def _frequencies(own: _Own, head_dim: int) -> Float32Array:
    frequencies = inverse_frequencies(head_dim, own.real("rope.freq_base", 10000.0, positive=True))
    kind = own.values.get("rope.scaling.type", "none")
    if kind == "none":
        return frequencies
    return scaled_frequencies(frequencies, {"type": kind, "factor": own.values.get("rope.scaling.factor")})


@dataclass(slots=True)
class _Plan:
    """Which source tensors make up ours; `used` collects every source name asked for."""

    descriptor: Descriptor
    tensors: Mapping[str, Any]
    stored_as: tuple[int, int]
    permuted: bool
    used: set[str]

    def loads(self, frequencies: Float32Array) -> dict[str, Load]:
        d, f, vocab = (integer(self.descriptor, key) for key in ("hidden_size", "ffn_size", "vocab_size"))
        head_dim, q, kv = (integer(self.descriptor, key) for key in ("head_dim", "n_q_heads", "n_kv_heads"))
        if "rope_freqs.weight" in self.tensors:  # llama3 scaling, precomputed as divisors
            divisors = cast(Float32Array, self._rows({"rope_freqs.weight": (head_dim // 2,)})())
            if not (np.isfinite(divisors).all() and (divisors > 0).all()):
                raise ConvertError("tensor 'rope_freqs.weight': holds a value that is not a positive number")
            frequencies = frequencies / divisors
        loads: dict[str, Load] = {
            "rope.inv_freq": lambda: frequencies,
            "embed": self._rows({"token_embd.weight": (vocab, d)}),
            "final_norm": self._rows({"output_norm.weight": (d,)}),
        }
        if not self.descriptor["tied_head"]:
            loads["head"] = self._rows({"output.weight": (vocab, d)})
        heads = {"q": q, "k": kv, "v": kv}
        for i in range(integer(self.descriptor, "n_layers")):
            theirs, ours = f"blk.{i}", f"layers.{i}"
            loads[f"{ours}.qkv"] = self._rows(
                {f"{theirs}.attn_{name}.weight": (n * head_dim, d) for name, n in heads.items()}
            )
            loads[f"{ours}.o"] = self._rows({f"{theirs}.attn_output.weight": (d, q * head_dim)})
            loads[f"{ours}.gate_up"] = self._rows(
                {f"{theirs}.ffn_{name}.weight": (f, d) for name in ("gate", "up")}
            )
            loads[f"{ours}.down"] = self._rows({f"{theirs}.ffn_down.weight": (d, f)})
            if self.descriptor["attn_bias"]:
                loads[f"{ours}.qkv_bias"] = self._rows(
                    {f"{theirs}.attn_{name}.bias": (n * head_dim,) for name, n in heads.items()}
                )
            if self.descriptor["qk_norm"] == "head":
                for name in ("q_norm", "k_norm"):
                    loads[f"{ours}.{name}"] = self._rows({f"{theirs}.attn_{name}.weight": (head_dim,)})
            loads[f"{ours}.norm_attn_in"] = self._rows({f"{theirs}.attn_norm.weight": (d,)})
            loads[f"{ours}.norm_ffn_in"] = self._rows({f"{theirs}.ffn_norm.weight": (d,)})
        return loads

    def _rows(self, parts: Mapping[str, tuple[int, ...]]) -> Load:
        """The source tensors one below the other: their own blocks if all are as stored, else floats.

        parts: their names and the dims that the fields give them.
        """
        for name, dims in parts.items():
            if name not in self.tensors:
                raise ConvertError(f"tensor {name!r}: missing, the architecture has it")
            # Columns come first there.
            found = tuple(int(size) for size in reversed(self.tensors[name].shape))
            if found != dims:
                raise ConvertError(
                    f"tensor {name!r}: the file has {list(found)}, the fields give {list(dims)}"
                )
            self.used.add(name)

        def load() -> Float32Array | QuantWeight:
            blocks = [self._blocks(name) for name in parts]
            kept = [block for block in blocks if block is not None]
            if len(kept) == len(parts):
                return concatenate_rows(kept)
            return np.concatenate([self._floats(name) for name in parts])

        return load

    def _order(self, name: str) -> NDArray[np.int64] | None:
        """Row order that undoes the permutation of Q and K: half-split row j of a head was stored at 2j."""
        heads = {"attn_q": "n_q_heads", "attn_k": "n_kv_heads"}.get(name.split(".")[-2])
        if heads is None or not self.permuted:
            return None
        n_heads, head_dim = cast(int, self.descriptor[heads]), cast(int, self.descriptor["head_dim"])
        stored = np.arange(n_heads * head_dim).reshape(n_heads, head_dim // 2, 2)
        return stored.swapaxes(1, 2).reshape(-1)

    def _floats(self, name: str) -> Float32Array:
        from gguf.quants import dequantize

        tensor, order = self.tensors[name], self._order(name)
        values: Float32Array = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        return values if order is None else values[order]

    def _blocks(self, name: str) -> QuantWeight | None:
        tensor, order = self.tensors[name], self._order(name)
        unpack = {("Q4_1", 4, 32): _q4_1, ("Q8_0", 8, 32): _q8_0}.get(
            (tensor.tensor_type.name, *self.stored_as)
        )
        if unpack is None:
            return None
        weight = unpack(np.asarray(tensor.data))
        return weight if order is None else weight.take_rows(order)


def _q4_1(data: NDArray[np.uint8]) -> QuantWeight:
    """Blocks of 20 bytes: FP16 step, FP16 minimum, 16 bytes whose low nibbles are the first 16 codes."""
    blocks = data.reshape(len(data), -1, 20)
    halves = np.ascontiguousarray(blocks[:, :, :4]).view("<f2").astype(np.float32)
    nibbles = blocks[:, :, 4:]
    codes = np.concatenate([nibbles & 15, nibbles >> 4], axis=2).reshape(len(data), -1)
    return import_q4_1(codes, halves[:, :, 0], halves[:, :, 1])


def _q8_0(data: NDArray[np.uint8]) -> QuantWeight:
    """Blocks of 34 bytes: FP16 step, 32 signed bytes. Exact: the zero is 128."""
    blocks = data.reshape(len(data), -1, 34)
    scales = np.ascontiguousarray(blocks[:, :, :2]).view("<f2")[:, :, 0].astype(np.float16)
    codes = np.bitwise_xor(blocks[:, :, 2:], 0x80).astype(np.uint8).reshape(len(data), -1)
    return QuantWeight(codes, scales, np.full_like(scales, 128), 8, 32)
