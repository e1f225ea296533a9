"""Loading a model: the keywords, and the digest that names the file."""

from __future__ import annotations

import hashlib
import os
from typing import Literal

from ._core import LoadError, Model
from ._core import load_model as _load_model

PREAMBLE_BYTES = 64
# What the C++ side holds in 32 bits; anything larger is as wrong as anything negative.
LARGEST_INT = 2**31 - 1


def header_digest(path: str | bytes | os.PathLike[str]) -> str:
    """SHA-256 (hex) of a model file's preamble and header.

    The header holds the CRC of every tensor, so this names the weights without reading them.
    A file too short for its own header is hashed as far as it goes: load_model then says what is wrong.
    """
    with open(path, "rb") as file:
        preamble = file.read(PREAMBLE_BYTES)
        header_bytes = int.from_bytes(preamble[16:24], "little")
        left = os.fstat(file.fileno()).st_size - PREAMBLE_BYTES
        return hashlib.sha256(preamble + file.read(max(0, min(header_bytes, left)))).hexdigest()


def load_model(
    path: str | bytes | os.PathLike[str],
    max_seq_len: int = 2048,
    prefill_chunk: int = 0,
    *,
    device: str | None = None,
    cache_mode: str | None = None,
    fp16_cache: str | None = None,
    budget_bytes: int | None = None,
    threads: int | None = None,
    numeric_mode: Literal["fp16", "fp32"] = "fp16",
    cpu_isa: str | None = None,
) -> Model:
    """Load one model, all or nothing.

    Args:
        path: a .tloop file. It must not be changed while it is loaded.
        max_seq_len: rows (new tokens of all sequences) of one pass, 1..the model's positions.
        prefill_chunk: rows of the FP16 scratch, 0..max_seq_len; 0 means all. Less memory, same numbers.
        device: "cpu". Default: the switch TINYLOOP_DEVICE, else "cpu".
        cache_mode: how keys and values are stored, "fp16". Default: TINYLOOP_KV, else "fp16".
        fp16_cache: FP16 copies of hot weights, "off" or "auto". Default: TINYLOOP_FP16_CACHE, else "auto".
        budget_bytes: hard limit on everything the model and its handles hold; None: no limit.
        threads: compute threads, at least 1; None: as many as the process may run on.
        numeric_mode: "fp16" is the product; "fp32" keeps activations and K/V in float32 and is for tests.
        cpu_isa: "avx512", "avx2" or "portable", all with the same bits. Default: TINYLOOP_CPU_ISA, else the
            best one here.
    Raises:
        LoadError: the file or an option is unusable; the message names the phase and the field.
        OutOfMemoryError: the budget or the machine is too small; nothing is kept.
    Blocks until loaded; the GIL is released.
    """
    if budget_bytes is not None and not 0 < budget_bytes < 2**63:
        raise LoadError(
            f"cannot load with budget_bytes={budget_bytes}: it must be positive and fit 63 bits, "
            "or None for no limit"
        )
    if threads is not None and threads <= 0:
        raise LoadError(f"cannot load with threads={threads}: it must be at least 1, or None for all cores")
    for name, value in (("max_seq_len", max_seq_len), ("prefill_chunk", prefill_chunk), ("threads", threads)):
        if value is not None and abs(value) > LARGEST_INT:
            raise LoadError(f"cannot load with {name}={value}: it does not fit 32 bits")
    file = os.fsencode(path)
    digest = header_digest(file) if b"\0" not in file and os.path.isfile(file) else ""
    return _load_model(
        file,
        digest=digest,
        max_seq_len=max_seq_len,
        prefill_chunk=prefill_chunk,
        device=device or "",
        cache_mode=cache_mode or "",
        fp16_cache=fp16_cache or "",
        budget_bytes=budget_bytes or 0,
        threads=threads or 0,
        numeric_mode=numeric_mode,
        cpu_isa=cpu_isa or "",
    )
