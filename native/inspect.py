"""A model file described for people, with every checksum verified."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from .cache_size import cache_bytes, planes
from .descriptor import Descriptor, integer
from .format import Header, read_blob, read_header

_KEY_WIDTH = 16
_OTHER_MODES = ("int8", "h_fp16", "h_int8", "h_int4")


def describe(path: Path) -> str:
    """What the file holds: family, sizes, planes, cache bytes a token by mode, tensors by kind, metadata.

    Reads all of the file. Raises: FormatError naming the field that is damaged; OSError when it cannot be
    read.
    """
    header = read_header(path)
    for entry in header.tensors:
        read_blob(path, entry)
    lines = [f"{path.name}: {_size(header.file_bytes)}, .tloop version 1", ""]
    lines += [f"{key:<{_KEY_WIDTH}} {value}" for key, value in _facts(header).items()]
    lines += ["", "tensors", *_tensor_lines(header), ""]
    lines.append(f"checked: header, {len(header.tensors)} tensors, tokenizer and gaps match their checksums")
    return "\n".join(lines)


def _facts(header: Header) -> dict[str, str]:
    d = header.descriptor
    ids = f"bos {d['bos_id']}{' (added)' if d['add_bos'] else ''}, eos {list(_ids(header)) or 'none'}"
    head = "tied to the embedding" if d["tied_head"] else "own matrix"
    facts = {
        "family": ", ".join([str(d["family"]), f"{d['norm_placement']} norms", *_traits(d)]),
        "parameters": f"{_parameters(header):,}",
        "vocabulary": f"{d['vocab_size']:,}, head {head}; {ids}",
        "width": f"{d['hidden_size']}, feed-forward {d['ffn_size']}",
        "heads": f"{d['n_q_heads']} query, {d['n_kv_heads']} key-value, of {d['head_dim']}",
        "positions": f"{d['max_positions']:,}",
        "planes": _planes_line(d),
        "cache": f"{_size(cache_bytes(d, 'fp16'))} a token in FP16, all {d['loops']} loops",
        "other caches": ", ".join(f"{mode} {_size(cache_bytes(d, mode))}" for mode in _OTHER_MODES),
        "weights": _weight_bits(header),
        "tokenizer": _size(len(header.tokenizer_json)) if header.tokenizer_json else "none",
        "chat template": f"{len(str(d['chat_template']))} characters" if d["chat_template"] else "none",
        "digest": header.digest,
    }
    return facts | {key: value for key, value in header.metadata.items() if value}


def _traits(d: Descriptor) -> list[str]:
    """What sets the model apart from a plain one, in words."""
    start = f"{d['state_init']} state" + (f" of {d['state_std']:g}" if d["state_init"] == "normal" else "")
    traits = {
        "no norm weights": not d["norm_weight"],
        "pair rotation": d["rope_style"] == "pair",
        f"{d['qk_norm']} q and k norm": d["qk_norm"] != "none",
        "q, k, v bias": d["attn_bias"],
        "attention gate": d["attn_gate"],
        "prefix-LM": d["prefix_lm"],
        f"{start}, input injected": d["inject"] == "linear",
        "exit gate": d["exit_gate"],
    }
    return [text for text, present in traits.items() if present]


def _planes_line(d: Descriptor) -> str:
    n_layers, loops, n_low, cycles = (integer(d, k) for k in ("n_layers", "loops", "n_low", "low_cycles"))
    once = integer(d, "n_prelude") + integer(d, "n_coda")
    looped = f"{n_layers - once} layers"
    if n_low:
        looped = f"({n_low} low layers x {cycles} cycles + {n_layers - n_low} high layers)"
    return f"{planes(d)} = {looped} x {loops} loops{f' + {once} layers once' if once else ''}"


def _ids(header: Header) -> tuple[int, ...]:
    ids = header.descriptor["eos_ids"]
    assert isinstance(ids, tuple)
    return ids


def _parameters(header: Header) -> int:
    """What was trained: every tensor but the rotation table."""
    total = 0
    for entry in header.tensors:
        if entry.name != "rope.inv_freq":
            total += entry.dims[0] * (entry.dims[1] if len(entry.dims) == 2 else 1)
    return total


def _weight_bits(header: Header) -> str:
    """Bits a stored matrix value, scales and zeros counted."""
    matrices = [entry for entry in header.tensors if len(entry.dims) == 2]
    values = sum(entry.dims[0] * entry.dims[1] for entry in matrices)
    return f"{8 * sum(entry.n_bytes for entry in matrices) / values:.2f} bits a matrix value"


def _tensor_lines(header: Header) -> list[str]:
    counts: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
    for entry in header.tensors:
        label = f"{entry.kind} group {entry.group}" if entry.group else entry.kind
        counts[label][0] += 1
        counts[label][1] += entry.n_bytes
    return [f"  {label:<14} {n:>5}  {_size(size)}" for label, (n, size) in sorted(counts.items())]


def _size(n_bytes: int) -> str:
    """Decimal megabytes from one megabyte up, else kibibytes or bytes, as caches are counted."""
    if n_bytes >= 10**6:
        return f"{n_bytes / 10**6:.1f} MB"
    return f"{n_bytes / 1024:.1f} KiB" if n_bytes >= 1024 else f"{n_bytes} bytes"
