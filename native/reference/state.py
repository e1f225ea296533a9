"""The seeded random state that some loops start from: a pure function of seed, position and channel."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_CHANNEL = np.uint64(0xD1B54A32D192ED03)


def normal_state(seed: int, n: int, width: int, std: float) -> torch.Tensor:
    """float32 [n, width]: std times a standard normal that is cut at three standard deviations.

    key = mix(seed + golden), bits = mix(mix(key + position * golden) + channel * odd constant), modulo 2**64;
    the upper 24 bits become u in (0, 1), and the normal is the inverse CDF of Phi(-3) + u (1 - 2 Phi(-3)).
    """
    key = _mix(np.array([seed % 2**64], np.uint64) + _GOLDEN)
    rows = _mix(key + np.arange(n, dtype=np.uint64) * _GOLDEN)
    bits = _mix(rows[:, None] + np.arange(width, dtype=np.uint64) * _CHANNEL)
    u = torch.from_numpy(((bits >> np.uint64(40)).astype(np.float64) + 0.5) * 2.0**-24)
    tail = torch.special.ndtr(torch.tensor(-3.0, dtype=torch.float64))
    standard: torch.Tensor = torch.special.ndtri(tail + u * (1 - 2 * tail)).float()
    return std * standard


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of splitmix64: every bit of z reaches every bit of the result."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
