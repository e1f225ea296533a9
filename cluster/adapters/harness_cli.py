"""The command that runs lm-evaluation-harness with TinyLoop as one of its models.

The harness finds only models that were registered in its own process, so a command of ours registers this one
and hands everything else to the harness's own command line.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ..errors import UsageError

MODEL_NAME = "tinyloop"
TARGET = "tinyloop.cluster.adapters.harness:HarnessModel"
NOT_INSTALLED = "lm-evaluation-harness is not installed: pip install '.[lm-eval]'"


def add_commands(app: typer.Typer) -> None:
    """Put the command into the command line."""
    # Its --help and all options are the harness's own.
    settings = {"ignore_unknown_options": True, "help_option_names": []}
    app.command("lm-eval", context_settings=settings)(lm_eval)


def lm_eval(
    arguments: Annotated[list[str] | None, typer.Argument(help="As for lm_eval itself.")] = None,
) -> None:
    """Run lm-evaluation-harness; --model tinyloop is a pool (cluster/ADAPTERS.md)."""
    register()
    from lm_eval.__main__ import cli_evaluate

    from .harness_errors import HarnessError

    sys.argv = ["tinyloop lm-eval", *(arguments or ["--help"])]
    try:
        cli_evaluate()
    except HarnessError as error:
        raise UsageError(str(error)) from error


def register() -> None:
    """Make `tinyloop` a model of the harness in this process. Twice is harmless. Raises: UsageError."""
    try:
        from lm_eval.api.registry import model_registry
    except ImportError as error:
        raise UsageError(NOT_INSTALLED) from error
    if MODEL_NAME not in model_registry:
        model_registry.register(MODEL_NAME, target=TARGET)
