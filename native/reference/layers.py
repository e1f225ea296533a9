"""One transformer block: norms wherever a family puts them, attention, feed-forward. No loop, no cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

from ..descriptor import integer, real
from ..records import Value
from .stored import stored_hidden, stored_keys_or_values


class Layers:
    """The blocks of a model, by number. Linear weights are [out, in]."""

    def __init__(
        self, descriptor: Mapping[str, Value], weights: Mapping[str, torch.Tensor], cache_mode: str
    ) -> None:
        self.descriptor, self.weights, self.cache_mode = descriptor, weights, cache_mode
        self.n_q, self.n_kv, self.head_dim = (
            integer(descriptor, key) for key in ("n_q_heads", "n_kv_heads", "head_dim")
        )

    def run(self, layer: int, x: torch.Tensor, hidden_keys: torch.Tensor) -> torch.Tensor:
        """x: the residual [n, D]; hidden_keys: bool [n, n], true where a row may not see a key."""
        name = f"layers.{layer}"
        x = self._branch(x, f"{name}.norm_attn", lambda h: self._attention(name, h, hidden_keys))
        return self._branch(x, f"{name}.norm_ffn", lambda h: self._feed_forward(name, h))

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Root-mean-square norm over the last axis, with the weight of that name if norms have weights."""
        normed = self._rms(x)
        return normed * self.weights[name] if self.descriptor["norm_weight"] else normed

    def _rms(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + real(self.descriptor, "norm_eps"))

    def _branch(
        self, x: torch.Tensor, norm: str, branch: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        placement = self.descriptor["norm_placement"]
        added = branch(x if placement == "branch" else self.norm(x, f"{norm}_in"))
        if placement == "pre":
            return x + added
        if placement == "sum":
            return self.norm(x + added, f"{norm}_out")
        return x + self.norm(added, f"{norm}_out")  # sandwich, branch

    def _attention(self, name: str, h: torch.Tensor, hidden_keys: torch.Tensor) -> torch.Tensor:
        """Each key-value head serves n_q_heads / n_kv_heads query heads in a row."""
        query, key, value, gate = self._products(name, h)
        angles = torch.outer(torch.arange(len(h), dtype=h.dtype), self.weights["rope.inv_freq"])
        query, key = self._rotate(self._heads(query), angles), self._rotate(self._heads(key), angles)
        key, value = (
            stored_keys_or_values(part, self.cache_mode).repeat_interleave(self.n_q // self.n_kv, dim=0)
            for part in (key, self._heads(value))
        )
        scores = query @ key.transpose(1, 2) / self.head_dim**0.5
        mixed = torch.softmax(scores.masked_fill(hidden_keys, -torch.inf), dim=-1) @ value
        mixed = mixed.transpose(0, 1).reshape(len(h), -1)
        if gate is not None:
            mixed = mixed * torch.sigmoid(gate)
        return mixed @ self.weights[f"{name}.o"].T

    def _products(
        self, name: str, h: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """q, k, v with bias and norm, not yet rotated, and the gate. Keys and values read h as stored."""
        q, kv = self.n_q * self.head_dim, self.n_kv * self.head_dim
        weight = self.weights[f"{name}.qkv"]
        stored = stored_hidden(h, self.cache_mode)
        query = h @ weight[:q].T
        key, value = stored @ weight[q : q + kv].T, stored @ weight[q + kv : q + 2 * kv].T
        gate = h @ weight[q + 2 * kv :].T if self.descriptor["attn_gate"] else None
        if self.descriptor["attn_bias"]:
            bias = torch.split(self.weights[f"{name}.qkv_bias"], [q, kv, kv])
            query, key, value = query + bias[0], key + bias[1], value + bias[2]
        return self._qk_norm(query, f"{name}.q_norm"), self._qk_norm(key, f"{name}.k_norm"), value, gate

    def _qk_norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """x: [n, heads * head_dim]. `head` norms each head by itself, `full` the whole width at once."""
        kind = self.descriptor["qk_norm"]
        if kind == "none":
            return x
        parts = x.view(len(x), -1, self.head_dim) if kind == "head" else x
        return (self._rms(parts) * self.weights[name]).view(len(x), -1)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(len(x), -1, self.head_dim).transpose(0, 1)

    def _rotate(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """Turn each pair by its angle. x: [heads, n, head_dim], angles: [n, head_dim / 2].

        half: element j pairs with element j + head_dim / 2; pair: element 2j with element 2j + 1.
        """
        cos, sin = angles.cos(), angles.sin()
        half = self.descriptor["rope_style"] == "half"
        first, second = x.chunk(2, dim=-1) if half else (x[..., 0::2], x[..., 1::2])
        turned = (first * cos - second * sin, second * cos + first * sin)
        return torch.cat(turned, dim=-1) if half else torch.stack(turned, dim=-1).flatten(-2)

    def _feed_forward(self, name: str, h: torch.Tensor) -> torch.Tensor:
        gate, up = (h @ self.weights[f"{name}.gate_up"].T).chunk(2, dim=-1)
        return (F.silu(gate) * up) @ self.weights[f"{name}.down"].T
