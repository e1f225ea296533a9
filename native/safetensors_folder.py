"""The tensors of a Hugging Face folder, one file or sharded, read one at a time as float32 without torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .source import ConvertError, reading
from .weights import Float32Array

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


@dataclass(frozen=True, slots=True)
class _Place:
    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int


class SafetensorsFolder:
    """Names and shapes are known at once; values are read on demand."""

    def __init__(self, folder: Path) -> None:
        """Raises: ConvertError when the folder holds no readable weights."""
        self._places: dict[str, _Place] = {}
        for path in _files(folder):
            for name, place in _read_places(path).items():
                if name in self._places:
                    raise ConvertError(
                        f"tensor {name!r}: in {self._places[name].path.name} and in {path.name}"
                    )
                self._places[name] = place

    def names(self) -> set[str]:
        return set(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._places[name].shape

    def read(self, name: str) -> Float32Array:
        """The tensor as float32 with its own shape."""
        place = self._places[name]
        with reading(f"tensor {name!r} in {place.path.name}"):
            raw = np.memmap(place.path, _DTYPES[place.dtype], "r", place.offset, place.shape)
        if place.dtype == "BF16":  # the upper half of a float32
            widened: Float32Array = (raw.astype(np.uint32) << 16).view(np.float32)
            return widened
        return raw.astype(np.float32)


def _files(folder: Path) -> list[Path]:
    if (folder / _INDEX).is_file():
        with reading(_INDEX):
            index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
        places = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(places, dict) or not places:
            raise ConvertError(f"read {_INDEX}: expected an object weight_map of tensors and their files")
        for name in places.values():
            if not isinstance(name, str) or not name or Path(name).name != name:
                raise ConvertError(f"read {_INDEX}: shard {name!r} is not a plain file name")
        return [folder / name for name in sorted(set(places.values()))]
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    raise ConvertError(f"read weights in {folder}: there is neither {_SINGLE} nor {_INDEX}")


def _read_places(path: Path) -> dict[str, _Place]:
    from safetensors import safe_open

    with reading(f"weights in {path.name}"):
        with safe_open(path, framework="np"):  # checks the whole header: what follows may trust it
            pass
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(header_bytes))
    header.pop("__metadata__", None)
    places = {}
    for name, entry in header.items():
        if entry["dtype"] not in _DTYPES:
            raise ConvertError(f"tensor {name!r}: dtype {entry['dtype']}, {sorted(_DTYPES)} can be converted")
        offset = 8 + header_bytes + entry["data_offsets"][0]
        places[name] = _Place(path, entry["dtype"], tuple(entry["shape"]), offset)
    return places
