"""A pool's configuration as a TOML file: the keys of PoolConfig, nothing else."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..native.format import FormatError, read_header
from ..native.models import default_model_path
from .config import PoolConfig
from .errors import UsageError


def read_config(path: Path) -> PoolConfig:
    """Read and check a pool's file. A relative model is looked for beside the file; none is the shipped one.

    max_seq_len, if it is not given, is what the model has positions for, at most the default.
    Raises UsageError naming file, key and what is allowed.
    """
    try:
        given = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"cannot read pool configuration {str(path)!r}: {error}") from error
    model = given.get("model")
    given["model"] = (path.parent / model).resolve() if isinstance(model, str) else default_model_path()
    try:
        config = PoolConfig.model_validate(given)
    except ValidationError as error:
        raise UsageError(f"pool configuration {str(path)!r}: {shown(error)}") from error
    return config if "max_seq_len" in given else _within_positions(config)


def shown(error: ValidationError) -> str:
    """What is wrong with which key, in one line."""
    parts: list[str] = []
    for item in error.errors():
        key, message = ".".join(map(str, item["loc"])), item["msg"].removeprefix("Value error, ")
        parts.append(f"{key} is {item['input']!r}: {message.lower()}" if key else message)
    return "; ".join(parts)


def _within_positions(config: PoolConfig) -> PoolConfig:
    try:
        header = read_header(config.model)
    except (FormatError, OSError):
        return config  # a replica says what is wrong with it, and a test's model has no header
    positions: Any = header.descriptor["max_positions"]
    return config.model_copy(update={"max_seq_len": min(config.max_seq_len, int(positions))})
