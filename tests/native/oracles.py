"""Second implementations of the families that no installed library has, on tensors under published names.

Written apart from the reference, with torch's own norm and attention and complex rotations. Each takes
faults: mistakes that ports have made, so that a test can show that it would notice them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

SHARED_PLANE = "the first loop's keys and values serve all loops"
NORM_ELSEWHERE = "norms act on branches where sums are meant, or the other way round"
OTHER_ROTATION = "halves are rotated where pairs are meant, or the other way round"
NO_LOOP_NORM = "the norm between loops, or after them, is left out"
Tensors = Mapping[str, torch.Tensor]


class Oracle:
    """What every family shares: rotation, and attention over a plane of keys and values."""

    def __init__(
        self, tensors: Tensors, eps: float, n_heads: int, inv_freq: torch.Tensor, fault: str
    ) -> None:
        self.weights = {name: value.double() for name, value in tensors.items()}
        self.eps, self.n_heads, self.inv_freq, self.fault = eps, n_heads, inv_freq.double(), fault
        self.planes: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, self.weights[f"{name}.weight"])

    def rms(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weights[f"{name}.weight"], self.eps)

    def turned(self, x: torch.Tensor, *, pairs: bool) -> torch.Tensor:
        """x: [heads, n, head_dim]."""
        angles = torch.outer(torch.arange(x.shape[1]).double(), self.inv_freq)
        turn = torch.polar(torch.ones_like(angles), angles)
        if pairs != (self.fault == OTHER_ROTATION):
            turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * turn
            return torch.view_as_real(turned).flatten(-2)
        turned = torch.complex(*x.contiguous().chunk(2, dim=-1)) * turn
        return torch.cat((turned.real, turned.imag), dim=-1)

    def attend(self, layer: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self.fault == SHARED_PLANE:
            k, v = self.planes.setdefault(layer, (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return mixed.transpose(0, 1).flatten(1)

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, 2 * len(self.inv_freq))).transpose(0, 1)


class RavenOracle(Oracle):
    """Huginn and the models retrofitted with its loop. kind: huginn, retrofit or retrofit_olmo."""

    def __init__(
        self, config: Mapping[str, Any], tensors: Tensors, kind: str, inv_freq: torch.Tensor, fault: str = ""
    ) -> None:
        super().__init__(tensors, config["norm_eps"], config["n_heads"], inv_freq, fault)
        self.config, self.kind = config, kind

    def logits(
        self, ids: torch.Tensor, steps: int, first_state: torch.Tensor, embed_scale: float
    ) -> torch.Tensor:
        given = embed_scale * self.weights["transformer.wte.weight"][ids]
        for i in range(self.config["n_layers_in_prelude"]):
            given = self.block(f"transformer.prelude.{i}", given)
        state = first_state.double()
        for _ in range(steps):
            state = self.linear(torch.cat((state, given), dim=-1), "transformer.adapter")
            for i in range(self.config["n_layers_in_recurrent_block"]):
                state = self.block(f"transformer.core_block.{i}", state)
        if (self.kind == "huginn") != (self.fault == NO_LOOP_NORM):
            state = self.rms(state, "transformer.ln_f")
        for i in range(self.config["n_layers_in_coda"]):
            state = self.block(f"transformer.coda.{i}", state)
        return self.linear(self.rms(state, "transformer.ln_f"), "lm_head")

    def block(self, name: str, x: torch.Tensor) -> torch.Tensor:
        def norm(i: int, value: torch.Tensor) -> torch.Tensor:
            return self.rms(value, f"{name}.norm_{i}")

        kind = self.kind
        if self.fault == NORM_ELSEWHERE:
            kind = {"huginn": "sandwich", "retrofit": "retrofit_olmo", "retrofit_olmo": "retrofit"}[kind]
        if kind == "huginn":
            x = norm(2, x + self.attention(name, norm(1, x)))
            return norm(4, x + self.mlp(name, norm(3, x)))
        if kind == "sandwich":
            x = x + norm(2, self.attention(name, norm(1, x)))
            return x + norm(4, self.mlp(name, norm(3, x)))
        if kind == "retrofit":
            x = x + self.attention(name, norm(1, x))
            return x + self.mlp(name, norm(2, x))
        x = x + norm(1, self.attention(name, x))
        return x + norm(2, self.mlp(name, x))

    def attention(self, name: str, x: torch.Tensor) -> torch.Tensor:
        width = self.config["n_embd"]
        rest = (len(self.weights[f"{name}.attn.Wqkv.weight"]) - width) // 2
        q, k, v = torch.split(self.linear(x, f"{name}.attn.Wqkv"), [width, rest, rest], dim=-1)
        if self.kind == "retrofit_olmo":
            q, k = self.rms(q, f"{name}.attn.q_norm"), self.rms(k, f"{name}.attn.k_norm")
        q, k, v = self.heads(q), self.heads(k), self.heads(v)
        if self.kind == "huginn":
            bias = self.weights[f"{name}.attn.qk_bias"].transpose(1, 2)
            q, k = q + bias[0], k + bias[1]
        pairs = self.kind == "huginn"
        mixed = self.attend(name, self.turned(q, pairs=pairs), self.turned(k, pairs=pairs), v)
        return self.linear(mixed, f"{name}.attn.proj")

    def mlp(self, name: str, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.linear(x, f"{name}.mlp.fc").chunk(2, dim=-1)
        return self.linear(F.silu(gate) * up, f"{name}.mlp.proj")


class LoopedLlamaOracle(Oracle):
    """Ouro (four norms a layer, a gate) and Nanbeige (Llama's layer): the whole stack, again and again."""

    def __init__(
        self, config: Mapping[str, Any], tensors: Tensors, inv_freq: torch.Tensor, fault: str = ""
    ) -> None:
        super().__init__(tensors, config["rms_norm_eps"], config["num_attention_heads"], inv_freq, fault)
        self.config, self.ouro = config, config["model_type"] == "ouro"

    def states(self, ids: torch.Tensor, loops: int) -> list[torch.Tensor]:
        """The normed state after each loop."""
        x, states = self.weights["model.embed_tokens.weight"][ids], []
        for _ in range(loops):
            for i in range(self.config["num_hidden_layers"]):
                x = self.block(f"model.layers.{i}", x)
            states.append(self.rms(x, "model.norm"))
            x = x if self.fault == NO_LOOP_NORM else states[-1]
        return states

    def logits(self, ids: torch.Tensor, loops: int) -> torch.Tensor:
        return self.linear(self.states(ids, loops)[-1], "lm_head")

    def gates(self, ids: torch.Tensor, loops: int) -> torch.Tensor:
        gate, bias = (self.weights[f"model.early_exit_gate.{name}"] for name in ("weight", "bias"))
        return torch.stack([torch.sigmoid(F.linear(s, gate, bias))[:, 0] for s in self.states(ids, loops)])

    def block(self, name: str, x: torch.Tensor) -> torch.Tensor:
        a = self.attention(name, self.rms(x, f"{name}.input_layernorm"))
        x = self.added(x, a, f"{name}.input_layernorm_2")
        m = self.rms(x, f"{name}.post_attention_layernorm")
        m = F.silu(self.linear(m, f"{name}.mlp.gate_proj")) * self.linear(m, f"{name}.mlp.up_proj")
        return self.added(x, self.linear(m, f"{name}.mlp.down_proj"), f"{name}.post_attention_layernorm_2")

    def added(self, x: torch.Tensor, branch: torch.Tensor, norm: str) -> torch.Tensor:
        if not self.ouro:
            return x + branch
        if self.fault == NORM_ELSEWHERE:
            return self.rms(x + branch, norm)
        return x + self.rms(branch, norm)

    def attention(self, name: str, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (self.heads(self.linear(x, f"{name}.self_attn.{part}_proj")) for part in "qkv")
        mixed = self.attend(name, self.turned(q, pairs=False), self.turned(k, pairs=False), v)
        return self.linear(mixed, f"{name}.self_attn.o_proj")
