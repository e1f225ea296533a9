"""The model that ships with the package, used when no other is named. Its card is README.md beside it."""

from __future__ import annotations

from pathlib import Path


def default_model_path() -> Path:
    """The shipped model file."""
    return Path(__file__).with_name("tinyloop-27m-q4.tloop")
