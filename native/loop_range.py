"""A plain model made to loop some of its layers: the same weights, another schedule."""

from __future__ import annotations

from dataclasses import replace

from .descriptor import check_descriptor, integer
from .source import ConvertError, SourceModel

# What a model has that runs every layer once.
_PLAIN = {"loops": 1, "n_prelude": 0, "n_coda": 0, "n_low": 0, "inject": "none", "exit_gate": False}


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
