"""The command of the HTTP face: serve."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .errors import UsageError
from .pool_cli import DEFAULT_NAME, Address, on_ray
from .whole_option import real, whole


def add_commands(app: typer.Typer) -> None:
    """Put this command into the command line."""
    app.command()(serve)


def serve(
    pool: Annotated[str, typer.Option(help="Name of a pool that is up.")] = DEFAULT_NAME,
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, whole(1, 65535, help="Port to listen at.")] = 8000,
    served_model_name: Annotated[
        str | None, typer.Option(help="What clients call the model; default: the pool's name.")
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="File of keys, one a line; without it all may ask.")
    ] = None,
    model: Annotated[Path | None, typer.Option(help="A copy of the pool's model file.")] = None,
    replicas: Annotated[int, whole(1, 256, help="Processes that answer.")] = 1,
    every_node: Annotated[
        bool, typer.Option("--every-node", help="Listen on every node of the cluster.")
    ] = False,
    deadline: Annotated[float, real(help="Seconds that a request may take.")] = 600.0,
    max_queue: Annotated[int, whole(1, help="Completions and texts on their way in a process.")] = 4096,
    max_body_bytes: Annotated[int, whole(1024, help="Size of a request.")] = 16 << 20,
    drain: Annotated[float, real(help="Seconds that requests have to end after Ctrl-C.")] = 20.0,
    address: Address = None,
) -> None:
    """Answer OpenAI's API from a pool: completions, chat and scores over HTTP. cluster/HTTP.md says more."""
    try:
        import ray.serve  # noqa: F401
        import starlette  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"the HTTP face is not installed ({error}): pip install 'tinyloop-pool[http]'"
        ) from None
    with on_ray(address, pool):
        from pydantic import ValidationError

        from .config_file import shown
        from .http.deployment import FaceConfig, KeyFileError, with_hashed_keys
        from .http.serving import serve_until_stopped
        from .registry import find_router

        find_router(pool)
        try:
            config = with_hashed_keys(
                FaceConfig(
                    pool=pool,
                    model=None if model is None else model.resolve(),
                    served_model_name=served_model_name,
                    api_key_file=api_key_file,
                    replicas=replicas,
                    deadline_s=deadline,
                    max_queue=max_queue,
                    max_body_bytes=max_body_bytes,
                    drain_s=drain,
                )
            )
        except ValidationError as error:
            raise UsageError(f"cannot serve as asked: {shown(error)}") from error
        except KeyFileError as error:
            raise UsageError(str(error)) from error
        serve_until_stopped(config, host, port, typer.echo, every_node=every_node)
