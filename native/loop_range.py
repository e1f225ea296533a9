"""A plain model made to loop some of its layers: the same weights, another schedule."""

from __future__ import annotations

from dataclasses import replace

from .descriptor import check_descriptor, integer
from .digits import is_digits
from .source import ConvertError, SourceModel

# What a model has that runs every layer once.
_PLAIN = {"loops": 1, "n_prelude": 0, "n_coda": 0, "n_low": 0, "inject": "none", "exit_gate": False}


def parse_range(written: str) -> tuple[int, int]:
    """Read A:B, two numbers in ASCII digits. Raises: ValueError that says what is wrong."""
    parts = written.split(":")
    if len(parts) != 2:
        raise ValueError(f"it has {len(parts) - 1} colons and needs one, as 4:12")
    for part, side in zip(parts, ("before", "after"), strict=True):
        if not part:
            raise ValueError(f"there is no layer number {side} the colon: write both, as 4:12")
        if not is_digits(part):
            raise ValueError(f"{part!r} is no layer number: write it in the digits 0-9 alone, as 4:12")
        if len(part) > 9:
            raise ValueError(
                f"the layer number {side} the colon has {len(part)} digits: no model has such a layer"
            )
    return int(parts[0]), int(parts[1])


def with_loop_range(model: SourceModel, begin: int, end: int, loops: int) -> SourceModel:
    """Layers begin to end - 1 run `loops` times, the others once; no norm stands between the loops.

    Raises: ConvertError when the model already loops, or has no such layers.
    """
    descriptor, what = model.descriptor, f"loop layers {begin}:{end} {loops} times"
    for key, value in _PLAIN.items():
        if descriptor[key] != value:
            raise ConvertError(
                f"{what}: the model has {key} {descriptor[key]!r}: only a model that runs every layer once "
                "can be given a loop"
            )
    n_layers = integer(descriptor, "n_layers")
    if not 0 <= begin < end <= n_layers:
        raise ConvertError(f"{what}: the model has layers 0:{n_layers}: choose a range inside that")
    if not 1 <= loops <= 1 << 12:
        raise ConvertError(f"{what}: choose 1 to {1 << 12} loops")
    looped = {
        **descriptor,
        "n_prelude": begin,
        "n_coda": n_layers - end,
        "loops": loops,
        "loop_norm": False,
    }
    return replace(
        model,
        descriptor=check_descriptor(looped),
        metadata={**model.metadata, "loop": f"layers {begin} to {end - 1} run {loops} times"},
    )
