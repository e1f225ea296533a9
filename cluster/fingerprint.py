"""What must be the same for a job to go on where it stopped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from .encoding import EncodingPolicy
from .errors import UsageError
from .inputs import InputFile

# Raised when a line of results.jsonl or the journal would come out differently for the same scores.
FORMAT_VERSION = 1

Fingerprint = dict[str, Any]


def fingerprint(
    identity: Mapping[str, Any],
    policy: EncodingPolicy,
    options: Any,
    files: Sequence[InputFile],
    settings: Mapping[str, Any],
) -> Fingerprint:
    """A flat mapping of everything that decides a byte of the results.

    identity: model digest, tokenizer hash, numerics_id, depth; options: a dataclass, of the kind of work;
    settings: limit and other settings of reading.
    """
    flat: Fingerprint = {"format_version": FORMAT_VERSION}
    flat |= {f"model.{key}": value for key, value in identity.items()}
    flat |= {f"encoding.{key}": value for key, value in asdict(policy).items()}
    for key, value in asdict(options).items():
        flat |= (
            {f"task.{key}.{k}": v for k, v in value.items()}
            if isinstance(value, dict)
            else {f"task.{key}": value}
        )
    flat |= {f"read.{key}": value for key, value in settings.items()}
    flat["inputs.count"] = len(files)
    for i, file in enumerate(files):
        flat[f"inputs.{i}.label"] = file.label
        flat[f"inputs.{i}.sha256"] = file.sha256
    # As it will be read again: JSON has no tuples.
    return {key: list(value) if isinstance(value, tuple) else value for key, value in flat.items()}


def refuse_differences(old: Fingerprint, new: Fingerprint) -> None:
    """Raises: UsageError that lists every key that differs, with both values."""
    keys = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
    if keys:
        shown = "; ".join(f"{key} was {old.get(key)!r}, is {new.get(key)!r}" for key in keys)
        raise UsageError(
            f"cannot resume: the job in this folder had other settings: {shown}: use the same settings, or "
            "--overwrite"
        )
