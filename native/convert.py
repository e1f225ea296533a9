"""Foreign model folders and files into .tloop files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from .descriptor import expected_tensors
from .format import Header, check_destination, write_model
from .loop_range import with_loop_range
from .quantize import QuantizeError, quantize, to_float16
from .source import ConvertError, SourceModel, reading
from .weights import GROUPS, Float32Array, QuantWeight, Tensor, dequantize

__all__ = ["ConvertError", "convert"]


def convert(
    source: Path,
    destination: Path,
    bits: int = 4,
    group: int = 64,
    *,
    overwrite: bool = False,
    metadata: Mapping[str, str] | None = None,
    loop_range: tuple[int, int, int] | None = None,
) -> Header:
    """Convert a Hugging Face safetensors folder or a GGUF file; write the whole file or none.

    Args:
        bits: 4, 8 or 16 for every matrix, embedding and head included; norms and vectors stay float32.
        group: 32, 64 or 128 weights of a row share a scale and a zero; at 16 bits it has no meaning. A GGUF
        file's
            blocks of the asked bits are taken over with their own scales at group 32.
        metadata: texts that replace or join what the source says of itself.
        loop_range: (a, b, n): the file runs layers a to b - 1 of a plain model n times, the others once.
    Raises: ConvertError naming what cannot be converted exactly; FileExistsError without overwrite;
        FileNotFoundError where the destination's folder does not exist.
    """
    if bits not in (4, 8, 16) or group not in GROUPS:
        raise ConvertError(
            f"convert to {bits} bits in groups of {group}: 4, 8 or 16 bits, groups of {GROUPS}"
        )
    check_destination(destination)
    if destination.exists() and not overwrite:
        raise FileExistsError(
            f"convert to {destination}: the file exists: choose another name or overwrite it"
        )
    if _is_of_source(destination, source):
        raise ConvertError(f"convert to {destination}: it belongs to the source: choose another name")
    with reading(str(source)):
        model = _open(source, bits, group)
        if loop_range is not None:
            model = with_loop_range(model, *loop_range)
    tensors, taken_over = _tensors(model, bits, group)
    texts = {**model.metadata, "recipe": _recipe(bits, group, taken_over), "notes": "", **(metadata or {})}
    return write_model(
        destination, model.descriptor, tensors, model.tokenizer_json, texts, overwrite=overwrite
    )


def _is_of_source(destination: Path, source: Path) -> bool:
    """Whether writing there would take away what is read; model files may lie beside the source's."""
    if not (destination.exists() and source.exists()):
        return False
    beside = destination.suffix != ".tloop" and destination.parent.samefile(source)
    return beside or destination.samefile(source)


def _open(source: Path, bits: int, group: int) -> SourceModel:
    if source.is_dir():
        from .huggingface_source import open_huggingface

        return open_huggingface(source)
    if source.is_file() and source.suffix == ".gguf":
        from .gguf_source import open_gguf

        return open_gguf(source, bits, group)
    raise ConvertError(f"convert {source}: expected a folder with config.json or a file that ends in .gguf")


def _tensors(model: SourceModel, bits: int, group: int) -> tuple[dict[str, Tensor], int]:
    """All tensors as they will be stored, and how many of them kept the source's own codes."""
    tensors: dict[str, Tensor] = {}
    taken_over = 0
    for name, dims in expected_tensors(model.descriptor).items():
        with reading(f"tensor {name!r}"):
            value = model.load[name]()
        shape = value.dims if isinstance(value, QuantWeight) else value.shape
        if shape != dims:
            raise ConvertError(f"tensor {name!r}: the source gives {list(shape)}, the config {list(dims)}")
        taken_over += isinstance(value, QuantWeight)
        try:
            tensors[name] = _stored(name, value, bits, group)
        except QuantizeError as error:
            raise ConvertError(f"tensor {name!r}: {error}") from None
    return tensors, taken_over


def _stored(name: str, value: Float32Array | QuantWeight, bits: int, group: int) -> Tensor:
    if isinstance(value, QuantWeight):
        if (value.bits, value.group) == (bits, group):
            return value
        value = dequantize(value)
    if not np.isfinite(value).all():
        raise ConvertError(f"tensor {name!r}: holds a value that is not finite")
    if value.ndim == 1:
        return value.astype(np.float32)
    return to_float16(name, value) if bits == 16 else quantize(value, bits, group)


def _recipe(bits: int, group: int, taken_over: int) -> str:
    if bits == 16:
        return "float16 matrices, float32 vectors"
    search = "least squared error over clipped and refitted ranges" if bits == 4 else "full range"
    recipe = f"{bits} bits, asymmetric, groups of {group}, float16 scale and zero, {search}"
    if taken_over:
        recipe += f"; {taken_over} matrices keep the source's own codes and scales (zero rounded to float16)"
    return recipe
