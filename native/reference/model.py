"""A whole model: embedding, prelude, loops, coda, head, in the order that the descriptor gives."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ..descriptor import integer, real
from ..format import read_header, read_tensor
from ..records import Value
from .layers import Layers
from .state import normal_state
from .stored import CACHE_MODES

Float64Array = NDArray[np.float64]
Int32Array = NDArray[np.int32]


class Reference:
    """A model as float tensors. depth: the loops to run, also more than the model was made for.

    prompt_len: in a prefix-LM, tokens before it see each other in both directions.
    """

    def __init__(
        self,
        descriptor: Mapping[str, Value],
        tensors: Mapping[str, NDArray[np.float32]],
        dtype: torch.dtype = torch.float64,
        *,
        cache_mode: str = "fp16",
        state_init: str | None = None,
        state_seed: int = 0,
    ) -> None:
        """
        Args:
            tensors: the names of the model file, as float arrays; dtype is that of all arithmetic.
            cache_mode: fp16 and h_fp16 hold keys and values as they are; int8, h_int8 and h_int4 quantize.
            state_init: "zero" or "normal" in place of what a model with such a state says.
            state_seed: of the normal state.
        Raises: ValueError for an unknown mode, or a state that the model does not have.
        """
        if cache_mode not in CACHE_MODES:
            raise ValueError(f"cache_mode {cache_mode!r}: choose one of {CACHE_MODES}")
        self.descriptor = descriptor
        self.dtype = dtype
        self.weights = {name: torch.from_numpy(np.array(value)).to(dtype) for name, value in tensors.items()}
        self.head = self.weights["embed" if descriptor["tied_head"] else "head"]
        self.state_init = _state_init(descriptor, state_init)
        self.state_seed = state_seed
        self._layers = Layers(descriptor, self.weights, cache_mode)

    @classmethod
    def load(
        cls,
        path: Path,
        dtype: torch.dtype = torch.float64,
        *,
        cache_mode: str = "fp16",
        state_init: str | None = None,
        state_seed: int = 0,
        half_matrices: bool = False,
    ) -> Reference:
        """The weights of a model file, dequantized.

        half_matrices: and the matrices rounded to float16, which is what a GPU multiplies.
        """
        header = read_header(path)
        tensors = {entry.name: read_tensor(path, header, entry.name) for entry in header.tensors}
        if half_matrices:
            tensors = {
                name: values.astype(np.float16).astype(np.float32) if values.ndim == 2 else values
                for name, values in tensors.items()
            }
        return cls(
            header.descriptor,
            tensors,
            dtype,
            cache_mode=cache_mode,
            state_init=state_init,
            state_seed=state_seed,
        )

    @torch.no_grad()
    def states(self, token_ids: Int32Array, depth: int, prompt_len: int = 0) -> list[torch.Tensor]:
        """What the head reads if the model stops after each loop: depth tensors [n, D].

        Where a norm ends the loop this is the loop's own output, which the next loop starts from.
        """
        if prompt_len and not self.descriptor["prefix_lm"]:
            raise ValueError(f"prompt_len {prompt_len}: the model is no prefix-LM, leave it 0")
        ids = torch.from_numpy(np.asarray(token_ids, np.int64))
        embedded = self.weights["embed"][ids] * real(self.descriptor, "embed_scale")
        hidden_keys = _hidden_keys(len(ids), prompt_len)
        if integer(self.descriptor, "n_low"):
            return self._two_stacks(embedded, depth, hidden_keys)
        return self._one_stack(embedded, depth, hidden_keys)

    def _one_stack(self, embedded: torch.Tensor, depth: int, hidden_keys: torch.Tensor) -> list[torch.Tensor]:
        """Prelude once, the core in every loop, the coda after each loop that could be the last."""
        d = self.descriptor
        prelude = integer(d, "n_prelude")
        core_end = integer(d, "n_layers") - integer(d, "n_coda")
        given = self._run(0, prelude, embedded, hidden_keys)
        state = self._first_state(given)
        outputs = []
        for _ in range(depth):
            if d["inject"] == "linear":
                state = torch.cat((state, given), dim=-1) @ self.weights["adapter"].T
            state = self._run(prelude, core_end, state, hidden_keys)
            if d["loop_norm"]:
                state = self._final_norm(state)
                outputs.append(state)
            else:
                outputs.append(self._read_out(state, core_end, hidden_keys))
        return outputs

    def _first_state(self, given: torch.Tensor) -> torch.Tensor:
        if self.state_init == "input":
            return given
        if self.state_init == "zero":
            return torch.zeros_like(given)
        std = real(self.descriptor, "state_std")
        return normal_state(self.state_seed, len(given), given.shape[1], std).to(self.dtype)

    def _read_out(self, state: torch.Tensor, coda: int, hidden_keys: torch.Tensor) -> torch.Tensor:
        if self.descriptor["exit_norm"]:
            state = self._final_norm(state)
        state = self._run(coda, integer(self.descriptor, "n_layers"), state, hidden_keys)
        return self._final_norm(state)

    def _two_stacks(
        self, embedded: torch.Tensor, depth: int, hidden_keys: torch.Tensor
    ) -> list[torch.Tensor]:
        """A low stack that runs several times for each run of the high one; each adds the other's state."""
        n_low, n_layers = integer(self.descriptor, "n_low"), integer(self.descriptor, "n_layers")
        high, low = embedded, self.weights["low_init"].expand_as(embedded)
        outputs = []
        for _ in range(depth):
            for _ in range(integer(self.descriptor, "low_cycles")):
                low = self._final_norm(self._run(0, n_low, low + high, hidden_keys))
            high = self._final_norm(self._run(n_low, n_layers, high + low, hidden_keys))
            outputs.append(high)
        return outputs

    def _run(self, begin: int, end: int, state: torch.Tensor, hidden_keys: torch.Tensor) -> torch.Tensor:
        for layer in range(begin, end):
            state = self._layers.run(layer, state, hidden_keys)
        return state

    def _final_norm(self, state: torch.Tensor) -> torch.Tensor:
        return self._layers.norm(state, "final_norm")

    def logits(self, token_ids: Int32Array, depth: int, prompt_len: int = 0) -> Float64Array:
        """float64 [n, V] after `depth` loops."""
        return _array(self.states(token_ids, depth, prompt_len)[-1] @ self.head.T)

    def logprobs_by_depth(self, token_ids: Int32Array, depth: int, prompt_len: int = 0) -> Float64Array:
        """log p(token[i + 1] | token[..i]) after each loop: float64 [depth, n - 1]."""
        following = torch.from_numpy(np.asarray(token_ids, np.int64))[1:, None]
        return np.stack(
            [
                _array(torch.log_softmax(state[:-1] @ self.head.T, dim=-1).gather(1, following)[:, 0])
                for state in self.states(token_ids, depth, prompt_len)
            ]
        )

    def logprobs(self, token_ids: Int32Array, depth: int, prompt_len: int = 0) -> Float64Array:
        """log p(token[i + 1] | token[..i]) after `depth` loops: float64 [n - 1]."""
        by_depth: Float64Array = self.logprobs_by_depth(token_ids, depth, prompt_len)[-1]
        return by_depth

    def gates(self, token_ids: Int32Array, depth: int, prompt_len: int = 0) -> Float64Array:
        """The exit gate's probability after each loop: float64 [depth, n]. Only models with a gate."""
        gate, bias = self.weights["exit_gate.weight"], self.weights["exit_gate.bias"]
        states = self.states(token_ids, depth, prompt_len)
        return np.stack([_array(torch.sigmoid(state @ gate + bias)) for state in states])


def _state_init(descriptor: Mapping[str, Value], wanted: str | None) -> Value:
    own = descriptor["state_init"]
    if wanted is None:
        return own
    if wanted not in ("zero", "normal") or own == "input" or (wanted == "normal" and own == "zero"):
        raise ValueError(
            f"state_init {wanted!r}: the model's own is {own!r}; 'normal' may become 'zero', nothing else"
        )
    return wanted


def _hidden_keys(n: int, prompt_len: int) -> torch.Tensor:
    """bool [n, n]: what lies ahead, but for keys of the prompt."""
    ahead = torch.ones(n, n, dtype=torch.bool).triu(1)
    ahead[:, :prompt_len] = False
    return ahead


def _array(tensor: torch.Tensor) -> Float64Array:
    return tensor.to(torch.float64).numpy()
