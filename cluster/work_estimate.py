"""How long a job will take: tokens to compute, multiply-adds a token, and a rate that says where it is from.

Pure. Multiply-adds are those of the matrices; attention over long texts comes on top.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Measured:
    """A documented measurement. multiply_adds_per_s: of one replica, of one thread on a CPU."""

    what: str
    multiply_adds_per_s: float


# Scoring with every token's log-probability, as native/GUIDE.md and cluster/FILES.md give it.
OURO_1_4B = {
    "hidden_size": 2048, "ffn_size": 5632, "n_q_heads": 16, "n_kv_heads": 16, "head_dim": 128, "n_layers": 24,
    "n_prelude": 0, "n_coda": 0, "n_low": 0, "low_cycles": 0, "vocab_size": 49152,
}  # fmt: skip
SHIPPED = {
    "hidden_size": 512, "ffn_size": 1408, "n_q_heads": 8, "n_kv_heads": 8, "head_dim": 64, "n_layers": 6,
    "n_prelude": 0, "n_coda": 0, "n_low": 0, "low_cycles": 0, "vocab_size": 8192,
}  # fmt: skip
H200_TOKENS_PER_S = 47_000
CPU_TOKENS_PER_S, CPU_THREADS = 1_151, 2


def multiply_adds(descriptor: Mapping[str, Any], depth: int) -> int:
    """Multiply-adds of all matrices for one token at a depth, the head included."""
    width, ffn = int(descriptor["hidden_size"]), int(descriptor["ffn_size"])
    q = int(descriptor["n_q_heads"]) * int(descriptor["head_dim"])
    kv = int(descriptor["n_kv_heads"]) * int(descriptor["head_dim"])
    layer = width * (2 * q + 2 * kv) + 3 * width * ffn
    once = int(descriptor["n_prelude"]) + int(descriptor["n_coda"])
    n_layers, n_low = int(descriptor["n_layers"]), int(descriptor["n_low"])
    looped = n_low * int(descriptor["low_cycles"]) + n_layers - n_low if n_low else n_layers - once
    return (once + depth * looped) * layer + width * int(descriptor["vocab_size"])


def measured_for(device: str) -> Measured:
    """The documented measurement for a class of device."""
    if device == "cuda":
        return Measured(
            f"{H200_TOKENS_PER_S:,} tokens/s measured on one H200 with a model of Ouro-1.4B's shape at 4 "
            "loops, documents of 2,048 tokens, by multiply-adds",
            H200_TOKENS_PER_S * multiply_adds(OURO_1_4B, 4),
        )
    return Measured(
        f"{CPU_TOKENS_PER_S:,} tokens/s measured on {CPU_THREADS} threads of a Sapphire Rapids with the "
        "shipped model at 4 loops, texts of 512 tokens, by multiply-adds and threads",
        CPU_TOKENS_PER_S * multiply_adds(SHIPPED, 4) / CPU_THREADS,
    )


@dataclass(frozen=True, slots=True)
class Estimate:
    """hours: of the whole job on its replicas. tokens_per_s: of one of them. source: where that is from."""

    hours: float
    tokens_per_s: float
    replicas: int
    source: str


def estimate(
    tokens: int,
    descriptor: Mapping[str, Any],
    *,
    depth: int,
    device: str,
    replicas: int,
    threads: int,
    rate: float | None,
) -> Estimate:
    """tokens: to be computed. threads: of a replica. rate: tokens/s of one replica, if the user knows it."""
    if rate is not None:
        source = "--rate"
    else:
        measured = measured_for(device)
        scale = 1 if device == "cuda" else threads
        rate = measured.multiply_adds_per_s * scale / multiply_adds(descriptor, depth)
        source = measured.what
    return Estimate(tokens / rate / replicas / 3600, rate, replicas, source)
