"""Keys, values and hidden states as a cache of each mode gives them back: quantized, then read.

All arithmetic of quantizing is float32; scales and least values are rounded to float16, as they are stored.
"""

from __future__ import annotations

import torch

CACHE_MODES = ("fp16", "int8", "h_fp16", "h_int8", "h_int4")
INT8_HIDDEN_GROUP = 128
INT4_HIDDEN_GROUP = 64
# The first positions of a sequence stay as they are in h_int4: attention gathers on them.
SINK_TOKENS = 8


def stored_keys_or_values(x: torch.Tensor, cache_mode: str) -> torch.Tensor:
    """x: [heads, n, head_dim], keys after their rotation. In int8 a head of a token has one scale."""
    return _int8(x, x.shape[-1]) if cache_mode == "int8" else x


def stored_hidden(h: torch.Tensor, cache_mode: str) -> torch.Tensor:
    """h: [n, D], the input of the q, k and v products; what comes back is what keys and values read."""
    if cache_mode == "h_int8":
        return _int8(h, INT8_HIDDEN_GROUP)
    if cache_mode == "h_int4":
        return torch.cat((h[:SINK_TOKENS], _int4(h[SINK_TOKENS:], INT4_HIDDEN_GROUP)))
    return h


def _int8(x: torch.Tensor, group: int) -> torch.Tensor:
    """Codes -127 to 127 around zero, a scale for each group of the last axis."""
    pieces = []
    for piece in torch.split(x.float(), group, dim=-1):
        scale = _half(piece.abs().amax(-1, keepdim=True) / 127)
        codes = (piece / _divisor(scale)).round().clamp(-127, 127)
        pieces.append(torch.where(scale == 0, 0, codes) * scale)
    return torch.cat(pieces, dim=-1).to(x.dtype)


def _int4(x: torch.Tensor, group: int) -> torch.Tensor:
    """Codes 0 to 15 above a least value, a scale and a least value for each group of the last axis."""
    pieces = []
    for piece in torch.split(x.float(), group, dim=-1):
        low, high = piece.amin(-1, keepdim=True), piece.amax(-1, keepdim=True)
        least, scale = _half(low), _half((high - low) / 15)
        codes = ((piece - least) / _divisor(scale)).round().clamp(0, 15)
        pieces.append(torch.where(scale == 0, 0, codes) * scale + least)
    return torch.cat(pieces, dim=-1).to(x.dtype)


def _half(x: torch.Tensor) -> torch.Tensor:
    return x.half().float()


def _divisor(scale: torch.Tensor) -> torch.Tensor:
    """A group whose scale rounds to zero has only zero codes, whatever it is divided by."""
    return torch.where(scale == 0, 1, scale)
