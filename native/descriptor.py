"""What a model is, as data: the descriptor's keys, the rules between them, and the tensors they call for.

Every reader of the project holds the same rules; a file whose descriptor and tensor table disagree is
refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
    "n_prelude": int,
    "n_coda": int,
    "n_low": int,
    "low_cycles": int,
    "max_positions": int,
    "loops": int,
    "norm_eps": float,
    "norm_placement": str,
    "norm_weight": bool,
    "loop_norm": bool,
    "exit_norm": bool,
    "state_init": str,
    "state_std": float,
    "inject": str,
    "embed_scale": float,
    "rope_style": str,
    "qk_norm": str,
    "exit_gate": bool,
    "tied_head": bool,
    "attn_bias": bool,
    "attn_gate": bool,
    "prefix_lm": bool,
    "bos_id": int,
    "eos_ids": tuple,
    "add_bos": bool,
    "chat_template": str,
}
# What a file means that lacks the key: files of the first families were written without it.
DEFAULTS: dict[str, Value] = {
    "n_prelude": 0,
    "n_coda": 0,
    "n_low": 0,
    "low_cycles": 0,
    "norm_weight": True,
    "exit_norm": False,
    "state_init": "input",
    "state_std": 0.0,
    "inject": "none",
    "embed_scale": 1.0,
    "qk_norm": "none",
    "attn_gate": False,
    "prefix_lm": False,
}

# The range of each count, the same as the engine's reader has: what can be written can be loaded.
_RANGES = {
    "vocab_size": (1, 1 << 24),
    "hidden_size": (1, 1 << 20),
    "ffn_size": (1, 1 << 20),
    "n_q_heads": (1, 1 << 12),
    "n_kv_heads": (1, 1 << 12),
    "head_dim": (2, 256),
    "n_layers": (1, 1 << 12),
    "n_prelude": (0, 1 << 12),
    "n_coda": (0, 1 << 12),
    "n_low": (0, 1 << 12),
    "low_cycles": (0, 1 << 12),
    "max_positions": (1, 1 << 30),
    "loops": (1, 1 << 12),
}
_MAX_GROUPED_HEADS = 128
_MAX_FAMILY_CHARACTERS = 64
# Both are float32 in the engine.
_MAX_REAL = 3.4028234663852886e38
_CHOICES: dict[str, tuple[str, ...]] = {
    "norm_placement": ("pre", "sandwich", "branch", "sum"),
    "state_init": ("input", "zero", "normal"),
    "inject": ("none", "linear"),
    "rope_style": ("half", "pair"),
    "qk_norm": ("none", "head", "full"),
}
# The one arithmetic that is known for two stacks.
_TWO_STACKS: dict[str, Value] = {
    "n_prelude": 0,
    "n_coda": 0,
    "inject": "none",
    "state_init": "input",
    "loop_norm": True,
    "exit_norm": False,
    "norm_weight": False,
    "exit_gate": False,
}


def check_descriptor(values: Mapping[str, Value]) -> Descriptor:
    """A copy of `values` in the writer's order, with defaults for what older files lack.

    Raises: FormatError naming the first key that is wrong.
    """
    for key in values:
        if key not in KEYS:
            raise FormatError(f"descriptor {key!r}: unknown key")
    complete = {**DEFAULTS, **values}
    for key, kind in KEYS.items():
        if key not in complete:
            raise FormatError(f"descriptor {key!r}: missing")
        if type(complete[key]) is not kind:
            found = type(complete[key]).__name__
            raise FormatError(f"descriptor {key!r}: expected {kind.__name__}, found {found}")
    descriptor = {key: complete[key] for key in KEYS}
    _check_values(descriptor)
    _check_heads(descriptor)
    for key, problem in _broken_rules(descriptor):
        raise FormatError(f"descriptor {key!r}: {problem}")
    _check_token_ids(descriptor)
    return descriptor


def _check_values(descriptor: Descriptor) -> None:
    family = cast(str, descriptor["family"])
    if not (1 <= len(family) <= _MAX_FAMILY_CHARACTERS and family.isascii() and family.isprintable()):
        raise FormatError(
            f"descriptor 'family': {family!r:.80} is not 1 to {_MAX_FAMILY_CHARACTERS} "
            "printable ASCII characters"
        )
    for key, (least, largest) in _RANGES.items():
        if not least <= integer(descriptor, key) <= largest:
            raise FormatError(f"descriptor {key!r}: {descriptor[key]} is outside {least} to {largest}")
    for key, allowed in _CHOICES.items():
        if descriptor[key] not in allowed:
            raise FormatError(f"descriptor {key!r}: {descriptor[key]!r} is not one of {list(allowed)}")
    eps, scale = real(descriptor, "norm_eps"), real(descriptor, "embed_scale")
    if not 0 < eps < 1:
        raise FormatError(f"descriptor 'norm_eps': {eps} is not between 0 and 1")
    if not 0 < scale <= _MAX_REAL:
        raise FormatError(f"descriptor 'embed_scale': {scale} is not a positive finite number")


def _check_heads(descriptor: Descriptor) -> None:
    heads, kv_heads = integer(descriptor, "n_q_heads"), integer(descriptor, "n_kv_heads")
    if heads % kv_heads:
        raise FormatError(f"descriptor 'n_kv_heads': {kv_heads} does not divide n_q_heads {heads}")
    if heads // kv_heads > _MAX_GROUPED_HEADS:
        raise FormatError(
            f"descriptor 'n_kv_heads': {heads // kv_heads} query heads on one K/V head, at most "
            f"{_MAX_GROUPED_HEADS} are known"
        )
    if integer(descriptor, "head_dim") % 2:
        raise FormatError(f"descriptor 'head_dim': {descriptor['head_dim']} is odd, rotation takes pairs")


def _broken_rules(d: Descriptor) -> Iterator[tuple[str, str]]:
    """(key, what is wrong) for every rule between keys that does not hold, in the order of both readers."""
    n_layers, n_low, n_coda = (integer(d, key) for key in ("n_layers", "n_low", "n_coda"))
    if integer(d, "n_prelude") + n_coda >= n_layers:
        yield "n_prelude", f"{d['n_prelude']} and n_coda {n_coda} leave no layer of {n_layers} to loop"
    if n_low >= n_layers:
        yield "n_low", f"{n_low} leaves no layer of {n_layers} for the high stack"
    if (n_low > 0) != (integer(d, "low_cycles") > 0):
        yield "low_cycles", f"{d['low_cycles']} does not go with n_low {n_low}: both or neither"
    for key, value in _TWO_STACKS.items():
        if n_low > 0 and d[key] != value:
            yield key, f"must be {value!r} in a model of two stacks"
    if d["inject"] == "none" and d["state_init"] != "input":
        yield "state_init", f"{d['state_init']!r} without inject: the input would never be read"
    std = real(d, "state_std")
    if not (0 < std <= _MAX_REAL if d["state_init"] == "normal" else std == 0):
        yield "state_std", f"{std} with state_init {d['state_init']!r}: positive with normal, 0 otherwise"
    if d["exit_norm"] and (d["loop_norm"] or n_coda == 0):
        yield "exit_norm", "needs a coda and no loop_norm"
    if d["loop_norm"] and n_coda > 0:
        yield "loop_norm", "must be false in a model with a coda"
    if d["exit_gate"] and not d["loop_norm"]:
        yield "exit_gate", "needs loop_norm: it reads the normed state after each loop"


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


def real(descriptor: Mapping[str, Value], key: str) -> float:
    """descriptor[key] of a checked descriptor, typed."""
    return cast(float, descriptor[key])


def layer_norms(descriptor: Mapping[str, Value]) -> list[str]:
    """The norms of a layer that have weights, in file order."""
    placement = descriptor["norm_placement"]
    norms = [] if placement == "branch" else ["norm_attn_in", "norm_ffn_in"]
    norms += [] if placement == "pre" else ["norm_attn_out", "norm_ffn_out"]
    return norms if descriptor["norm_weight"] else []


def tensor_count(descriptor: Mapping[str, Value]) -> int:
    """How many tensors expected_tensors names, without building them: n_layers may still be a lie."""
    layer = 4 + bool(descriptor["attn_bias"]) + 2 * (descriptor["qk_norm"] != "none")
    return (
        2
        + (descriptor["inject"] == "linear")
        + (integer(descriptor, "n_low") > 0)
        + bool(descriptor["norm_weight"])
        + 2 * bool(descriptor["exit_gate"])
        + (not descriptor["tied_head"])
        + (layer + len(layer_norms(descriptor))) * integer(descriptor, "n_layers")
    )


def expected_tensors(descriptor: Mapping[str, Value]) -> dict[str, tuple[int, ...]]:
    """Name -> dims of every tensor of a model with this checked descriptor, in file order."""
    d, vocab = integer(descriptor, "hidden_size"), integer(descriptor, "vocab_size")
    tensors = {"embed": (vocab, d), "rope.inv_freq": (integer(descriptor, "head_dim") // 2,)}
    if descriptor["inject"] == "linear":
        tensors["adapter"] = (d, 2 * d)
    if integer(descriptor, "n_low"):
        tensors["low_init"] = (d,)
    layer = _layer_tensors(descriptor)
    for i in range(integer(descriptor, "n_layers")):
        tensors.update({f"layers.{i}.{name}": dims for name, dims in layer.items()})
    if descriptor["norm_weight"]:
        tensors["final_norm"] = (d,)
    if descriptor["exit_gate"]:
        tensors |= {"exit_gate.weight": (d,), "exit_gate.bias": (1,)}
    if not descriptor["tied_head"]:
        tensors["head"] = (vocab, d)
    return tensors


def _layer_tensors(descriptor: Mapping[str, Value]) -> dict[str, tuple[int, ...]]:
    d, f, head_dim, n_q, n_kv = (
        integer(descriptor, key) for key in ("hidden_size", "ffn_size", "head_dim", "n_q_heads", "n_kv_heads")
    )
    q, kv = n_q * head_dim, n_kv * head_dim
    gate = q if descriptor["attn_gate"] else 0
    tensors: dict[str, tuple[int, ...]] = {"qkv": (q + 2 * kv + gate, d)}
    if descriptor["attn_bias"]:
        tensors["qkv_bias"] = (q + 2 * kv,)
    if descriptor["qk_norm"] != "none":
        full = descriptor["qk_norm"] == "full"
        tensors |= {"q_norm": (q if full else head_dim,), "k_norm": (kv if full else head_dim,)}
    tensors |= {"o": (d, q), "gate_up": (2 * f, d), "down": (d, f)}
    return tensors | dict.fromkeys(layer_norms(descriptor), (d,))
