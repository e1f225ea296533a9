"""A model file described for people, with every checksum verified."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from .descriptor import integer
from .format import Header, read_blob, read_header

_KEY_WIDTH = 16


def describe(path: Path) -> str:
    """What the file holds: family, sizes, planes, cache bytes a token, tensors by kind, metadata.

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
    n_layers, loops, kv_heads, head_dim = (
        integer(d, key) for key in ("n_layers", "loops", "n_kv_heads", "head_dim")
    )
    planes = n_layers * loops
    ids = f"bos {d['bos_id']}{' (added)' if d['add_bos'] else ''}, eos {list(_ids(header)) or 'none'}"
    head = "tied to the embedding" if d["tied_head"] else "own matrix"
    facts = {
        "family": f"{d['family']}, {d['norm_placement']} norms{', exit gate' if d['exit_gate'] else ''}",
        "parameters": f"{_parameters(header):,}",
        "vocabulary": f"{d['vocab_size']:,}, head {head}; {ids}",
        "width": f"{d['hidden_size']}, feed-forward {d['ffn_size']}",
        "heads": f"{d['n_q_heads']} query, {kv_heads} key-value, of {head_dim}",
        "positions": f"{d['max_positions']:,}",
        "planes": f"{planes} = {n_layers} layers x {loops} loops",
        "cache": f"{_size(planes * 2 * kv_heads * head_dim * 2)} a token in FP16, all {loops} loops",
        "weights": _weight_bits(header),
        "tokenizer": _size(len(header.tokenizer_json)) if header.tokenizer_json else "none",
        "chat template": f"{len(str(d['chat_template']))} characters" if d["chat_template"] else "none",
        "digest": header.digest,
    }
    return facts | {key: value for key, value in header.metadata.items() if value}


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
