"""--config: a TOML file of a command's options. What the command line says wins; unknown names are errors."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import typer

from .errors import UsageError


def read_options(context: typer.Context, path: Path | None) -> Path | None:
    """Make the file's values the defaults of the command. Eager: it runs before other options are read.

    Raises: UsageError if the file cannot be read or does not fit the command.
    """
    if path is None:
        return None
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"--config {str(path)!r} cannot be read: {error}") from error
    by_name = _options(context.command)
    defaults: dict[str, Any] = {}
    for key, value in content.items():
        option = by_name.get(key)
        if option is None:
            known = ", ".join(sorted(by_name))
            raise UsageError(f"--config {str(path)!r} has {key!r}, which is no option here: one of {known}")
        defaults[str(option.name)] = _checked(option, key, value, path)
    context.default_map = {**(context.default_map or {}), **defaults}
    return path


def _options(command: Any) -> dict[str, Any]:
    """Options by their long names without the dashes; --config itself and --help are not among them."""
    return {
        spelled.removeprefix("--"): option
        for option in command.params
        if option.param_type_name == "option" and not option.is_eager
        for spelled in option.opts
        if spelled.startswith("--")
    }


def _checked(option: Any, key: str, value: Any, path: Path) -> Any:
    """A value of TOML as the option takes it. What the option's own type refuses, that refuses later."""
    values = value if isinstance(value, list) else [value]
    wants = "true or false" if option.is_flag else "a list of values" if option.multiple else "one value"
    fits = (
        isinstance(value, list) == bool(option.multiple)
        and all(isinstance(one, str | int | float) for one in values)
        and all(isinstance(one, bool) == bool(option.is_flag) for one in values)
    )
    if not fits:
        raise UsageError(f"--config {str(path)!r}: {key} is {value!r}: {wants} is needed")
    if option.is_flag:
        return value
    shown = [str(one) for one in values]
    return shown if option.multiple else shown[0]
