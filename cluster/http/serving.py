"""From the command to a server that answers, and from Ctrl-C to its orderly end."""

from __future__ import annotations

import logging
import signal
import socket
import threading
from collections.abc import Callable

import ray
from ray import serve
from ray.serve.exceptions import RayServeException

from ..errors import InfrastructureError, UsageError
from .deployment import FaceConfig, application

APP = "tinyloop"


def serve_until_stopped(
    config: FaceConfig, host: str, port: int, say: Callable[[str], None], *, every_node: bool
) -> None:
    """Serve until SIGINT or SIGTERM, then let what is on its way end.

    Raises: UsageError if Serve runs already or the port is taken; InfrastructureError if it cannot start.
    """
    _refuse_second_serve()
    _refuse_taken_port(host, port)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    try:
        _start(config, host, port, every_node=every_node)
        name = config.served_model_name or config.pool
        say(f"serving {name} at http://{host}:{port}/v1 from pool {config.pool}: Ctrl-C ends it")
        _wait(stop, config.pool)
        say("no new requests are taken; those on their way end")
        serve.delete(APP)
    finally:
        serve.shutdown()


def _start(config: FaceConfig, host: str, port: int, *, every_node: bool) -> None:
    try:
        serve.start(
            proxy_location="EveryNode" if every_node else "HeadOnly",
            http_options={"host": host, "port": port},
            logging_config={"log_level": "ERROR", "enable_access_log": False},
        )
        serve.run(application(config), name=APP, route_prefix="/")
    except Exception as error:
        # Serve raises many types here; the reason stands in its status.
        raise InfrastructureError(f"cannot serve pool {config.pool!r}: {_reason() or error}") from error


def _reason() -> str:
    """Why Serve says that the deployment did not start; empty if it does not."""
    try:
        found = serve.status().applications.get(APP)
    except Exception:
        return ""
    if found is None:
        return ""
    parts = [found.message, *(one.message for one in found.deployments.values())]
    return "; ".join(part for part in parts if part)[-2000:]


def _wait(stop: threading.Event, pool: str) -> None:
    while not stop.wait(0.5):
        if not ray.is_initialized():
            raise InfrastructureError(f"Ray has gone, and the server of pool {pool!r} with it")


def _refuse_second_serve() -> None:
    try:
        running = sorted(serve.status().applications)
        has_controller = bool(ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve"))
    except (ValueError, RayServeException):
        return
    if has_controller:
        there = ", ".join(running) or "none"
        raise UsageError(
            f"Ray Serve runs on this cluster already (applications: {there}), and there is one of it: put "
            "this application into its file (configs/serve/http.yaml), or end it: serve shutdown"
        )


def _refuse_taken_port(host: str, port: int) -> None:
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        with socket.socket(infos[0][0], socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(infos[0][4])
    except OSError as error:
        raise UsageError(
            f"cannot listen at {host}:{port}: {error}: choose another --port or --host"
        ) from error
