"""A model file and a Ray pool as the backend of a job."""

from __future__ import annotations

import hashlib
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ..native.format import FormatError, Header, read_header
from ..native.models import default_model_path
from ..native.tokenizer import load_tokenizer
from .encoding import Encoder, EncodingPolicy
from .errors import InfrastructureError, UsageError
from .items import Failed, Items, Scored
from .job import Backend
from .progress import PoolFigures
from .score import ModelChoice
from .settings import ScoreSettings

DEFAULT_MAX_SEQ_LEN = 2048
VERSIONS_OF = ("tinyloop-pool", "numpy", "ray", "tokenizers")


@dataclass(frozen=True, slots=True)
class PoolRequest:
    """What the command line says of the pool. None: the default."""

    model: Path | None = None
    replicas: int | None = None
    max_seq_len: int | None = None
    kv: str = "fp16"
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class ChosenModel:
    """A model file that was read and found fit for a job."""

    path: Path
    depth: int
    max_seq_len: int
    encoder: Encoder
    choice: ModelChoice
    warnings: tuple[str, ...]


def choose_model(settings: ScoreSettings, request: PoolRequest) -> ChosenModel:
    """Read the model's header and tokenizer, and hold the settings against them.

    Raises: UsageError if the file cannot be read or a setting does not fit it.
    """
    path = request.model or default_model_path()
    try:
        header = read_header(path)
        tokenizer = load_tokenizer(header)
    except (FormatError, OSError) as error:
        raise UsageError(f"cannot use model {str(path)!r}: {error}") from error
    descriptor: dict[str, Any] = dict(header.descriptor)
    depth, warnings = _depth(settings.depth, descriptor["loops"])
    max_seq_len = _max_seq_len(request.max_seq_len, descriptor["max_positions"])
    policy = EncodingPolicy.of_model(
        descriptor,
        max_seq_len,
        add_bos=settings.add_bos,
        prefix_token=settings.prefix_token,
        target_delimiter=settings.target_delimiter,
        empty_continuation=settings.empty_continuation,
    )
    identity = {
        "digest": header.digest,
        "tokenizer": hashlib.sha256(header.tokenizer_json).hexdigest(),
        "depth": depth,
        "max_seq_len": max_seq_len,
        "kv": request.kv,
    }
    choice = ModelChoice(identity, policy, _about(path, header))
    return ChosenModel(path, depth, max_seq_len, Encoder(tokenizer, policy), choice, warnings)


def _depth(asked: int | None, loops: int) -> tuple[int, tuple[str, ...]]:
    depth = loops if asked is None else asked
    if depth <= loops:
        return depth, ()
    if loops == 1:
        raise UsageError(f"--depth is {depth}, the model is not a looped one: leave it out")
    return depth, (f"depth {depth} is beyond the {loops} loops the model was made for: scores get worse",)


def _max_seq_len(asked: int | None, max_positions: int) -> int:
    if asked is not None and asked > max_positions:
        raise UsageError(f"--max-seq-len is {asked}, the model has {max_positions} positions: ask for at most those")
    return asked or min(DEFAULT_MAX_SEQ_LEN, max_positions)


def _about(path: Path, header: Header) -> dict[str, Any]:
    return {
        "command": sys.argv,
        "model": {"file": str(path), **header.metadata},
        "versions": {name: version(name) for name in VERSIONS_OF} | {"python": platform.python_version()},
    }
