"""Which source tensors make up ours: names and shapes checked at once, values read one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

import numpy as np

from .descriptor import Descriptor, expected_tensors, integer
from .families.family import SEGMENTS, Family, Layer, Part, segment_rows
from .safetensors_folder import SafetensorsFolder
from .source import ConvertError
from .weights import Float32Array


class TensorPlan:
    """The parts of every tensor that the descriptor calls for; `used` collects every source name."""

    def __init__(self, family: Family, descriptor: Descriptor, weights: SafetensorsFolder) -> None:
        self.family, self.descriptor, self.weights = family, descriptor, weights
        self.used: set[str] = set()
        self.rows = segment_rows(descriptor)
        self.outside, self.layer = family.names(weights.names())

    def loads(self) -> dict[str, Callable[[], Float32Array]]:
        """Our tensor name -> a call that reads it; all but rope.inv_freq.

        Raises: ConvertError naming the source tensor that is missing or of another shape.
        """
        loads = {}
        prefixes = list(self._layer_prefixes())
        for name, dims in expected_tensors(self.descriptor).items():
            if name == "rope.inv_freq":
                continue
            if name.startswith("layers."):
                _, layer, part = name.split(".")
                loads[name] = self._load(part, f"{prefixes[int(layer)]}.", self.layer, dims)
            else:
                loads[name] = self._load(name, "", self.outside, dims)
        return loads

    def repeated(self, frequencies: Float32Array) -> set[str]:
        """Stored tensors that repeat what is known: rotation tables, and the copy of a tied head."""
        names = self.weights.names()
        repeated = {name for name in names if name.endswith("self_attn.rotary_emb.inv_freq")}
        for table, agrees in self.family.tables.items():
            if table in names:
                if not agrees(self.weights.read(table), frequencies):
                    raise ConvertError(f"tensor {table!r}: is not the rotation that the config gives")
                repeated.add(table)
        head, embed = (self.outside[name][0].name for name in ("head", "embed"))
        if self.descriptor["tied_head"] and head in names:
            if not np.array_equal(self.weights.read(head), self.weights.read(embed)):
                raise ConvertError(f"tensor {head!r}: differs from the embedding, yet the config ties them")
            repeated.add(head)
        return repeated

    def _layer_prefixes(self) -> Iterator[str]:
        """Where each of our layers lies in the source, stack after stack."""
        n_layers, n_prelude, n_coda, n_low = (
            integer(self.descriptor, key) for key in ("n_layers", "n_prelude", "n_coda", "n_low")
        )
        counts = {
            1: (n_layers,),
            2: (n_low, n_layers - n_low),
            3: (n_prelude, n_layers - n_prelude - n_coda, n_coda),
        }[len(self.family.stacks)]
        for stack, count in zip(self.family.stacks, counts, strict=True):
            yield from (f"{stack}.{i}" for i in range(count))

    def _load(
        self, ours: str, prefix: str, places: Layer, dims: tuple[int, ...]
    ) -> Callable[[], Float32Array]:
        parts = {f"{prefix}{part.name}": part for part in places[ours]}
        for name, part in parts.items():
            self._check(name, part, dims)
            self.used.add(name)
        order = SEGMENTS.get(ours, ("all",))

        def load() -> Float32Array:
            segments: dict[str, Float32Array] = {}
            for name, part in parts.items():
                segments |= self._split(self.weights.read(name), part, dims)
            # Only the values' bias may have no part: then it is zero.
            wanted = [name for name in order if name in segments or ours == "qkv_bias"]
            absent = {name: np.zeros(self.rows[name], np.float32) for name in wanted if name not in segments}
            return np.concatenate([{**segments, **absent}[name] for name in wanted])

        return load

    def _heights(self, part: Part, dims: tuple[int, ...]) -> list[int]:
        return [dims[0] if segment == "all" else self.rows[segment] for segment in part.segments]

    def _check(self, name: str, part: Part, dims: tuple[int, ...]) -> None:
        if name not in self.weights.names():
            raise ConvertError(f"tensor {name!r}: missing, the config's family has it")
        expected = tuple(cast(int, self.descriptor.get(str(dim), dim)) for dim in part.dims) or (
            sum(self._heights(part, dims)),
            *dims[1:],
        )
        if self.weights.shape(name) != expected:
            found = list(self.weights.shape(name))
            raise ConvertError(f"tensor {name!r}: the file has {found}, the config gives {list(expected)}")

    def _split(self, values: Float32Array, part: Part, dims: tuple[int, ...]) -> dict[str, Float32Array]:
        rows = values.reshape(-1, *dims[1:])
        ends = np.cumsum(self._heights(part, dims))[:-1]
        return dict(zip(part.segments, np.split(rows, ends), strict=True))
