"""Typed reads of a config's fields; a value that cannot be meant is refused by the field's name."""

from __future__ import annotations

from ..source import ConvertError, inverse_frequencies, real, scaled_frequencies
from ..weights import Float32Array
from .family import Config


def integer_field(config: Config, *names: str, default: object = None) -> int:
    """The field under any of its names; where several are given they must agree."""
    found = {name: config[name] for name in names if config.get(name) is not None}
    if len(set(map(repr, found.values()))) > 1:
        raise ConvertError(f"config {names[0]}: {found} name the same number and differ")
    value = next(iter(found.values()), default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConvertError(f"config {next(iter(found), names[0])}: expected an integer, found {value!r:.60}")
    return value


def flag_field(config: Config, name: str, *, default: bool = False) -> bool:
    value = config.get(name, default)
    if not isinstance(value, bool):
        raise ConvertError(f"config {name}: expected true or false, found {value!r:.60}")
    return value


def frequencies(config: Config, head_dim: int, default_theta: float | None = None) -> Float32Array:
    """Newer configs hold theta and scaling in one record, older ones in two fields."""
    record = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(record, dict):
        raise ConvertError(f"config rope_scaling: expected an object, found {record!r:.60}")
    scaling = dict(record)
    theta = scaling.pop("rope_theta", config.get("rope_theta"))
    if scaling.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ConvertError("config rope_parameters partial_rotary_factor: only 1.0 can be converted")
    theta = real(default_theta if theta is None else theta, "config rope_theta", positive=True)
    return scaled_frequencies(inverse_frequencies(head_dim, theta), scaling)
