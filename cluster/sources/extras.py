"""Packages that only some files need: imported when one is met, named when one is missing."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ..errors import UsageError


def need(module: str, extra: str, purpose: str) -> Any:
    """Import a package of an extra. Raises: UsageError that says how to install it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise UsageError(
            f"{purpose} needs the package {module.partition('.')[0]}, which cannot be imported ({error}): "
            f"pip install 'tinyloop-pool[{extra}]'"
        ) from error


def parquet(purpose: str) -> Any:
    """pyarrow.parquet. Raises: UsageError."""
    return need("pyarrow.parquet", "files", purpose)
