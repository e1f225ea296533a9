"""Loading a model: the keywords, the digest that names the file, and the memory that it will take."""

from __future__ import annotations

import hashlib
import os
import warnings
from dataclasses import dataclass
from typing import Literal

from . import _core
from ._core import InvalidInputError, LoadError, Model
from .arguments import text, whole_number
from .devices import wheel_folder
from .regular_file import check_regular

PREAMBLE_BYTES = 64
# What the C++ side holds in 32 bits; anything larger is as wrong as anything negative.
LARGEST_INT = 2**31 - 1
MAX_DEPTH = 4096


def header_digest(path: str | bytes | os.PathLike[str]) -> str:
    """SHA-256 (hex) of a model file's preamble and header.

    The header holds the CRC of every tensor, so this names the weights without reading them.
    A file too short for its own header is hashed as far as it goes: load_model then says what is wrong.
    Raises: FormatError for what is no regular file; OSError when it cannot be read.
    """
    check_regular(path)
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
    deterministic: bool | None = None,
    budget_bytes: int | None = None,
    threads: int | None = None,
    numeric_mode: Literal["fp16", "bf16", "fp32"] = "fp16",
    cpu_isa: str | None = None,
    state_init: Literal["zero", "normal"] | None = None,
    state_seed: int = 0,
) -> Model:
    """Load one model, all or nothing.

    Args:
        path: a .tloop file. It must not be changed while it is loaded.
        max_seq_len: rows (new tokens of all sequences) of one pass, 1..the model's positions.
        prefill_chunk: rows of the FP16 scratch, 0..max_seq_len; 0 means all. Less memory, same numbers.
        device: "cpu", or a GPU as "cuda" (the first) or "cuda:N". Default: the switch TINYLOOP_DEVICE, else
            "cpu".
        cache_mode: how handles store tokens: "fp16" or "int8" keys and values, or the layers' inputs as
            "h_fp16", "h_int8" or "h_int4", from which keys and values are rebuilt. Default: TINYLOOP_KV, else
            "fp16".
        fp16_cache: FP16 copies of weights, which products of many rows read on a GPU: "off", "loop" (those of
            the looped layers), "all", or "auto": "loop", unless a budget is given and weights with copies
            would take more than half of it; "off" on the CPU. Same numbers. Default: TINYLOOP_FP16_CACHE,
            else "auto".
        deterministic: False lets a GPU decode few sequences with sums in several parts: faster, and the bits
            of a generated token then depend on how many are decoded beside it, and are not those of scoring.
            Everything else is as with True. Default: TINYLOOP_DETERMINISTIC ("0" or "1"), else True.
        budget_bytes: hard limit on everything the model and its handles hold; None: no limit.
        threads: the CPU's compute threads, at least 1; None: as many as the process may run on. A GPU has no
            use for them.
        numeric_mode: "fp16" is the product; "bf16" holds the same in memory and multiplies in the tile unit
            (AMX) of processors that have one, with bits of its own that every processor gives, those without
            the unit at a fifth of the speed of "fp16"; "fp32" keeps activations and K/V in float32 and is for
            tests.
        cpu_isa: of the CPU alone: "avx512", "avx2" or "portable", all with the same bits, or "amx" in
            the mode "bf16". Default: TINYLOOP_CPU_ISA, else the best one here.
        state_init: what the loops start from, for models that leave it open: "zero", or "normal" drawn for
            each token from (state_seed, position). Default: the model's own.
        state_seed: 0..2**64 - 1.
    Raises:
        LoadError: the file or an option is unusable; the message names the phase and the field.
        OutOfMemoryError: the budget or the machine is too small; nothing is kept.
        TypeError: an option is of the wrong type; the message names it.
    Warns: UserWarning with the numbers, where the cache mode loses memory on this model.
    Blocks until loaded; the GIL is released.
    """
    options = _options(
        max_seq_len=max_seq_len,
        prefill_chunk=prefill_chunk,
        device=device,
        cache_mode=cache_mode,
        fp16_cache=fp16_cache,
        deterministic=deterministic,
        budget_bytes=budget_bytes,
        threads=threads,
        numeric_mode=numeric_mode,
        cpu_isa=cpu_isa,
        state_init=state_init,
        state_seed=state_seed,
    )
    file = os.fsencode(path)
    digest = header_digest(file) if b"\0" not in file and os.path.isfile(file) else ""
    model = _core.load_model(file, digest=digest, options=options)
    if warning := model.cache_mode_warning:
        warnings.warn(warning, stacklevel=2)
    return model


def plan(
    path: str | bytes | os.PathLike[str],
    max_seq_len: int = 2048,
    prefill_chunk: int = 0,
    *,
    device: str | None = None,
    cache_mode: str | None = None,
    fp16_cache: str | None = None,
    threads: int | None = None,
    depth: int | None = None,
    prefix_length: int = 0,
) -> MemoryPlan:
    """What a load with these options would hold, from the file's header alone: exact to the byte.

    A GPU need not be there, but the build must have its backend.

    Args: as load_model; depth and prefix_length (tokens) are those of the prefixes that are to be held, depth
    None being the model's own.
    Raises: LoadError and TypeError, as a load would; InvalidInputError for a depth or a prefix length that
    no prefix can have.
    """
    options = _options(
        max_seq_len=max_seq_len,
        prefill_chunk=prefill_chunk,
        device=device,
        cache_mode=cache_mode,
        fp16_cache=fp16_cache,
        threads=threads,
        numeric_mode="fp16",
    )
    loops = whole_number("depth", depth, "the model's own")
    n_tokens = whole_number("prefix_length", prefix_length)
    if loops is not None and not 1 <= loops <= MAX_DEPTH:
        raise InvalidInputError(
            f"cannot plan with depth={loops}: it must be 1..{MAX_DEPTH}, or None for the model's own"
        )
    if not 0 <= n_tokens < 2**63:
        raise InvalidInputError(
            f"cannot plan with prefix_length={n_tokens}: it must be 0..the model's positions"
        )
    return MemoryPlan(**_core.plan(os.fsencode(path), options, loops or 0, n_tokens))


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of a model that is not loaded yet.

    owners: right after the load, as Model.memory_report() gives them; total: their sum.
    logit_rows: on top, from the first sampled generation on.
    prefix_bytes: one upgradable prefix of the length and depth asked for; cache_token_bytes: one more token
    of it, keys and values (or hidden states) alone.
    """

    owners: dict[str, int]
    total: int
    logit_rows: int
    prefix_bytes: int
    cache_token_bytes: int
    warnings: list[str]


def _options(
    *,
    max_seq_len: int,
    prefill_chunk: int,
    numeric_mode: str,
    device: str | None = None,
    cache_mode: str | None = None,
    fp16_cache: str | None = None,
    deterministic: bool | None = None,
    budget_bytes: int | None = None,
    threads: int | None = None,
    cpu_isa: str | None = None,
    state_init: str | None = None,
    state_seed: int = 0,
) -> dict[str, str | int]:
    """The options as the extension takes them: an empty text means the default, 0 none."""
    max_seq_len = whole_number("max_seq_len", max_seq_len)
    prefill_chunk = whole_number("prefill_chunk", prefill_chunk)
    budget_bytes = whole_number("budget_bytes", budget_bytes, "no limit")
    threads = whole_number("threads", threads, "all cores")
    state_seed = whole_number("state_seed", state_seed)
    if deterministic is not None and not isinstance(deterministic, bool):
        raise TypeError(f"deterministic is {deterministic!r}, it must be True, False or None")
    texts = {
        "device": text("device", device),
        "cache_mode": text("cache_mode", cache_mode),
        "fp16_cache": text("fp16_cache", fp16_cache),
        "numeric_mode": text("numeric_mode", numeric_mode, optional=False),
        "deterministic": "" if deterministic is None else str(int(deterministic)),
        "cpu_isa": text("cpu_isa", cpu_isa),
        "state_init": text("state_init", state_init),
    }
    for name, chosen in texts.items():
        # A lone surrogate would not even get through, and a NUL would cut the message short.
        if not chosen.isascii() or "\0" in chosen:
            raise LoadError(f"cannot load with {name}={chosen!r}: there is no such choice")
    if budget_bytes is not None and not 0 < budget_bytes < 2**63:
        raise LoadError(
            f"cannot load with budget_bytes={budget_bytes}: it must be positive and fit 63 bits, "
            "or None for no limit"
        )
    if threads is not None and threads <= 0:
        raise LoadError(f"cannot load with threads={threads}: it must be at least 1, or None for all cores")
    if not 0 <= state_seed < 2**64:
        raise LoadError(f"cannot load with state_seed={state_seed}: it must be 0..2**64 - 1")
    for name, value in (("max_seq_len", max_seq_len), ("prefill_chunk", prefill_chunk), ("threads", threads)):
        if value is not None and abs(value) > LARGEST_INT:
            raise LoadError(f"cannot load with {name}={value}: it does not fit 32 bits")
    return {
        **texts,
        "max_seq_len": max_seq_len,
        "prefill_chunk": prefill_chunk,
        "budget_bytes": budget_bytes or 0,
        "threads": threads or 0,
        "state_seed": state_seed,
        "packages": wheel_folder(),
    }
