"""The forward pass of every family in plain PyTorch: clear rather than fast, the oracle of the engine.

Written from the models' definitions; shares no arithmetic with the engine. One sequence at a time, no
cache, every loop from scratch. Linear weights are [out, in] and have no bias.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from .descriptor import integer
from .format import read_header, read_tensor
from .records import Value

Float64Array = NDArray[np.float64]


class Reference:
    """A model as float tensors. depth: the loops to run, also more than the model was made for."""

    def __init__(
        self,
        descriptor: Mapping[str, Value],
        tensors: Mapping[str, NDArray[np.float32]],
        dtype: torch.dtype = torch.float64,
    ) -> None:
        """tensors: the names of the model file, as float arrays; dtype is that of all arithmetic."""
        self.descriptor = descriptor
        self.dtype = dtype
        self.weights = {name: torch.from_numpy(np.array(value)).to(dtype) for name, value in tensors.items()}
        self.head = self.weights["embed" if descriptor["tied_head"] else "head"]

    @classmethod
    def load(cls, path: Path, dtype: torch.dtype = torch.float64) -> Reference:
        """The weights of a model file, dequantized."""
        header = read_header(path)
        tensors = {entry.name: read_tensor(path, header, entry.name) for entry in header.tensors}
        return cls(header.descriptor, tensors, dtype)

    def states(self, token_ids: NDArray[np.int32], depth: int) -> list[torch.Tensor]:
        """Normed state after each loop: depth tensors [n, D]. Each is also what the next loop starts from."""
        state = self.weights["embed"][torch.from_numpy(np.asarray(token_ids, np.int64))]
        angles = torch.outer(torch.arange(len(state), dtype=self.dtype), self.weights["rope.inv_freq"])
        states = []
        for _ in range(depth):
            for layer in range(integer(self.descriptor, "n_layers")):
                state = self._layer(f"layers.{layer}", state, angles)
            state = self._norm(state, "final_norm")
            states.append(state)
        return states

    @torch.no_grad()
    def logits(self, token_ids: NDArray[np.int32], depth: int) -> Float64Array:
        """float64 [n, V] after `depth` loops."""
        return _array(self.states(token_ids, depth)[-1] @ self.head.T)

    @torch.no_grad()
    def logprobs_by_depth(self, token_ids: NDArray[np.int32], depth: int) -> Float64Array:
        """log p(token[i + 1] | token[..i]) after each loop: float64 [depth, n - 1]."""
        following = torch.from_numpy(np.asarray(token_ids, np.int64))[1:, None]
        return np.stack(
            [
                _array(torch.log_softmax(state[:-1] @ self.head.T, dim=-1).gather(1, following)[:, 0])
                for state in self.states(token_ids, depth)
            ]
        )

    def logprobs(self, token_ids: NDArray[np.int32], depth: int) -> Float64Array:
        """log p(token[i + 1] | token[..i]) after `depth` loops: float64 [n - 1]."""
        by_depth: Float64Array = self.logprobs_by_depth(token_ids, depth)[-1]
        return by_depth

    @torch.no_grad()
    def gates(self, token_ids: NDArray[np.int32], depth: int) -> Float64Array:
        """The exit gate's probability after each loop: float64 [depth, n]."""
        weight, bias = self.weights["exit_gate.weight"], self.weights["exit_gate.bias"]
        return np.stack(
            [_array(torch.sigmoid(state @ weight + bias)) for state in self.states(token_ids, depth)]
        )

    def _layer(self, name: str, state: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """Attention, then gated feed-forward, each on a normed copy; "sandwich" also norms what each adds."""
        attended = self._attention(name, self._norm(state, f"{name}.norm_attn_in"), angles)
        state = state + self._branch(attended, f"{name}.norm_attn_out")
        fed = self._feed_forward(name, self._norm(state, f"{name}.norm_ffn_in"))
        return state + self._branch(fed, f"{name}.norm_ffn_out")

    def _branch(self, branch: torch.Tensor, norm: str) -> torch.Tensor:
        return self._norm(branch, norm) if self.descriptor["norm_placement"] == "sandwich" else branch

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        eps = self.descriptor["norm_eps"]
        assert isinstance(eps, float)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * self.weights[name]

    def _attention(self, name: str, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """Causal attention; each key-value head serves n_q_heads / n_kv_heads query heads in a row."""
        n_q, n_kv, head_dim = (
            integer(self.descriptor, key) for key in ("n_q_heads", "n_kv_heads", "head_dim")
        )
        heads = (x @ self.weights[f"{name}.qkv"].T).view(len(x), n_q + 2 * n_kv, head_dim).transpose(0, 1)
        query, key, value = torch.split(heads, [n_q, n_kv, n_kv])
        query, key = rotate_halves(query, angles), rotate_halves(key, angles)
        key, value = (part.repeat_interleave(n_q // n_kv, dim=0) for part in (key, value))
        scores = query @ key.transpose(1, 2) / head_dim**0.5
        future = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        mixed = torch.softmax(scores.masked_fill(future, -torch.inf), dim=-1) @ value
        return mixed.transpose(0, 1).reshape(len(x), n_q * head_dim) @ self.weights[f"{name}.o"].T

    def _feed_forward(self, name: str, x: torch.Tensor) -> torch.Tensor:
        gate, up = (x @ self.weights[f"{name}.gate_up"].T).chunk(2, dim=-1)
        return (F.silu(gate) * up) @ self.weights[f"{name}.down"].T


def rotate_halves(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotate element j with element j + head_dim / 2 by angles [n, head_dim / 2]. x: [heads, n, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _array(tensor: torch.Tensor) -> Float64Array:
    return tensor.to(torch.float64).numpy()
