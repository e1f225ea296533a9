"""What a model is, as data: the descriptor's keys, the rules between them, and the tensors they call for.

Every reader of the project holds the same rules; a file whose descriptor and tensor table disagree is
refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from .records import FormatError, Value

Descriptor = dict[str, Value]

# In the order the writer puts them.
KEYS: dict[str, type] = {
    "family": str,
    "vocab_size": int,
    "hidden_size": int,
    "ffn_size": int,
    "n_q_heads": int,
    "n_kv_heads": int,
    "head_dim": int,
    "n_layers": int,
    "max_positions": int,
    "loops": int,
    "norm_eps": float,
    "norm_placement": str,
    "loop_norm": bool,
    "rope_style": str,
    "exit_gate": bool,
    "tied_head": bool,
    "attn_bias": bool,
    "bos_id": int,
    "eos_ids": tuple,
    "add_bos": bool,
    "chat_template": str,
}

# The largest value of each count, the same as the engine's reader has: what can be written can be loaded.
_LARGEST = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 20,
    "ffn_size": 1 << 20,
    "n_q_heads": 1 << 12,
    "n_kv_heads": 1 << 12,
    "head_dim": 256,
    "n_layers": 1 << 12,
    "max_positions": 1 << 30,
    "loops": 1 << 12,
}
_MAX_GROUPED_HEADS = 128
_CHOICES: dict[str, tuple[Value, ...]] = {
    "family": ("llama", "ouro"),
    "norm_placement": ("pre", "sandwich"),
    "rope_style": ("half",),
    "attn_bias": (False,),
}


def check_descriptor(values: Mapping[str, Value]) -> Descriptor:
    """A copy of `values` in the writer's order; FormatError names the first key that is wrong."""
    for key in values:
        if key not in KEYS:
            raise FormatError(f"descriptor {key!r}: unknown key")
    for key, kind in KEYS.items():
        if key not in values:
            raise FormatError(f"descriptor {key!r}: missing")
        if type(values[key]) is not kind:
            found = type(values[key]).__name__
            raise FormatError(f"descriptor {key!r}: expected {kind.__name__}, found {found}")
    descriptor = {key: values[key] for key in KEYS}
    _check_values(descriptor)
    return descriptor


def _check_values(descriptor: Descriptor) -> None:
    for key, largest in _LARGEST.items():
        if not 1 <= integer(descriptor, key) <= largest:
            raise FormatError(f"descriptor {key!r}: {descriptor[key]} is outside 1 to {largest}")
    for key, allowed in _CHOICES.items():
        if descriptor[key] not in allowed:
            raise FormatError(f"descriptor {key!r}: {descriptor[key]!r} is not one of {list(allowed)}")
    eps = cast(float, descriptor["norm_eps"])
    if not 0 < eps < 1:
        raise FormatError(f"descriptor 'norm_eps': {eps} is not between 0 and 1")
    heads, kv_heads = integer(descriptor, "n_q_heads"), integer(descriptor, "n_kv_heads")
    if heads % kv_heads:
        raise FormatError(f"descriptor 'n_kv_heads': {kv_heads} does not divide n_q_heads {heads}")
    if heads // kv_heads > _MAX_GROUPED_HEADS:
        raise FormatError(
            f"descriptor 'n_kv_heads': {heads // kv_heads} query heads on one K/V head, at most "
            f"{_MAX_GROUPED_HEADS} are known"
        )
    if integer(descriptor, "head_dim") % 2:
        raise FormatError(f"descriptor 'head_dim': {descriptor['head_dim']} is odd, rotation pairs halves")
    if not descriptor["loop_norm"]:
        raise FormatError("descriptor 'loop_norm': must be true in version 1")
    _check_token_ids(descriptor)


def _check_token_ids(descriptor: Descriptor) -> None:
    vocab_size, bos_id = integer(descriptor, "vocab_size"), integer(descriptor, "bos_id")
    if not -1 <= bos_id < vocab_size:
        raise FormatError(f"descriptor 'bos_id': {bos_id} is outside -1 to {vocab_size - 1}")
    if descriptor["add_bos"] and bos_id < 0:
        raise FormatError("descriptor 'add_bos': true, but there is no bos_id")
    for eos_id in cast("tuple[int, ...]", descriptor["eos_ids"]):
        if not 0 <= eos_id < vocab_size:
            raise FormatError(f"descriptor 'eos_ids': {eos_id} is outside 0 to {vocab_size - 1}")


def integer(descriptor: Mapping[str, Value], key: str) -> int:
    """descriptor[key] of a checked descriptor, typed."""
    return cast(int, descriptor[key])


def tensor_count(descriptor: Mapping[str, Value]) -> int:
    """How many tensors expected_tensors names, without building them: n_layers may still be a lie."""
    layer = 4 + (4 if descriptor["norm_placement"] == "sandwich" else 2)
    return (
        3
        + (not descriptor["tied_head"])
        + 2 * bool(descriptor["exit_gate"])
        + layer * integer(descriptor, "n_layers")
    )


def expected_tensors(descriptor: Mapping[str, Value]) -> dict[str, tuple[int, ...]]:
    """Name -> dims of every tensor of a model with this checked descriptor, in file order."""
    d, f, vocab, head_dim, q, kv, layers = (
        integer(descriptor, key)
        for key in (
            "hidden_size",
            "ffn_size",
            "vocab_size",
            "head_dim",
            "n_q_heads",
            "n_kv_heads",
            "n_layers",
        )
    )
    norms = ["norm_attn_in", "norm_ffn_in"]
    if descriptor["norm_placement"] == "sandwich":
        norms += ["norm_attn_out", "norm_ffn_out"]
    tensors: dict[str, tuple[int, ...]] = {"embed": (vocab, d), "rope.inv_freq": (head_dim // 2,)}
    for i in range(layers):
        layer = f"layers.{i}"
        tensors[f"{layer}.qkv"] = ((q + 2 * kv) * head_dim, d)
        tensors[f"{layer}.o"] = (d, q * head_dim)
        tensors[f"{layer}.gate_up"] = (2 * f, d)
        tensors[f"{layer}.down"] = (d, f)
        tensors.update({f"{layer}.{norm}": (d,) for norm in norms})
    tensors["final_norm"] = (d,)
    if descriptor["exit_gate"]:
        tensors["exit_gate.weight"] = (d,)
        tensors["exit_gate.bias"] = (1,)
    if not descriptor["tied_head"]:
        tensors["head"] = (vocab, d)
    return tensors
