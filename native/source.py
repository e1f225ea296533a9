"""A foreign model, understood: what every converter of a source format hands to convert."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from .descriptor import Descriptor
from .weights import Float32Array, QuantWeight


class ConvertError(ValueError):
    """A source model that cannot be converted exactly. The message names the field or tensor."""


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Whatever a parser raises at foreign bytes, as a ConvertError that names what was read.

    Parsers have no common error type: some raise plain Exception, and a panic of a Rust library is not even
    one.
    """
    try:
        yield
    except (ConvertError, MemoryError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ConvertError(f"read {what}: {type(error).__name__}: {error}") from error


@dataclass(frozen=True, slots=True)
class SourceModel:
    """A model in our own terms, its weights still in their source.

    load: our tensor name -> a call that reads it, so that one tensor at a time is in memory. A call may
    give a QuantWeight where
        the source's own codes are taken over.
    metadata: name, license, source: what the source says of itself.
    """

    descriptor: Descriptor
    load: Mapping[str, Callable[[], Float32Array | QuantWeight]]
    tokenizer_json: bytes
    metadata: dict[str, str]


def inverse_frequencies(head_dim: int, theta: float) -> Float32Array:
    """Rotation angles a position, float32 [head_dim / 2]: theta ** (-2j / head_dim)."""
    return (theta ** -(np.arange(0, head_dim, 2) / head_dim)).astype(np.float32)


def scaled_frequencies(frequencies: Float32Array, scaling: Mapping[str, object]) -> Float32Array:
    """The frequencies under a Hugging Face `rope_scaling` record: none, linear or llama3.

    llama3 leaves short wavelengths as they are, divides long ones by the factor, and blends between.
    Raises: ConvertError for any other type, or a key that the type does not have.
    """
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    known = {"default": [], "linear": ["factor"], "llama3": _LLAMA3_KEYS}.get(str(kind))
    if known is None:
        raise ConvertError(f"rope_scaling type {kind!r}: default, linear and llama3 are supported")
    for key in scaling:
        if key not in (*known, "rope_type", "type"):
            raise ConvertError(f"rope_scaling {key!r}: unknown for type {kind!r}")
    numbers = {key: _positive(scaling, key) for key in known}
    if kind == "llama3" and numbers["high_freq_factor"] <= numbers["low_freq_factor"]:
        raise ConvertError("rope_scaling 'high_freq_factor': must be above low_freq_factor")
    if kind == "linear":
        return (frequencies / numbers["factor"]).astype(np.float32)
    if kind == "llama3":
        return _llama3(frequencies, numbers)
    return frequencies


_LLAMA3_KEYS = ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]


def _llama3(frequencies: Float32Array, numbers: Mapping[str, float]) -> Float32Array:
    factor, low, high, context = (numbers[key] for key in _LLAMA3_KEYS)
    turns = context * frequencies.astype(np.float64) / (2 * math.pi)  # over the original context
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    blended = (1 - smooth) * frequencies / factor + smooth * frequencies
    return blended.astype(np.float32)


def _positive(scaling: Mapping[str, object], key: str) -> float:
    return real(scaling.get(key), f"rope_scaling {key!r}", positive=True)


def real(value: object, what: str, *, positive: bool = False) -> float:
    """A number of a source as a finite float. Raises: ConvertError that begins with `what`."""
    if not isinstance(value, bool) and isinstance(value, int | float | np.floating):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number) and (number > 0 or not positive):
            return number
    raise ConvertError(f"{what}: expected a {'positive ' if positive else ''}number, found {value!r:.60}")
