"""A Ray cluster of one node with its job server, in a home of its own, with a token or without."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

UP_S = 90.0
DOWN_S = 30.0
COMMAND_S = 150.0


@dataclass(frozen=True)
class RayHead:
    """A running head node. environment: of clients that have its token, if it asks for one."""

    address: str
    job_server: str
    environment: dict[str, str]
    folder: Path

    def run(self, words: Sequence[str], **changes: str) -> subprocess.CompletedProcess[str]:
        """A command as a client of this cluster; output and errors in stdout."""
        return subprocess.run(
            list(words),
            env=self.environment | changes,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )

    def begin(self, words: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        """The same, not waited for."""
        with log.open("wb") as file:
            return subprocess.Popen(list(words), env=self.environment, stdout=file, stderr=file)


@contextmanager
def ray_head(folder: Path, *, token: bool, cpus: int = 4) -> Iterator[RayHead]:
    """Start a head node as `ray start --head` does, and end it and all that it started.

    folder: a short path, since Ray puts sockets below it.
    """
    home, programs = folder / "home", folder / "bin"
    home.mkdir(parents=True)
    programs.mkdir()
    # What an environment has into which the packages are installed, also where tests run from the sources.
    for name, module in (("tinyloop", "tinyloop.cluster"), ("ray", "ray.scripts.scripts")):
        script = programs / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {module} "$@"\n')
        script.chmod(0o755)
    ray = str(programs / "ray")
    path = [str(programs), str(Path(sys.executable).parent), os.environ["PATH"]]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"HOME": str(home), "PATH": os.pathsep.join(path), "RAY_USAGE_STATS_ENABLED": "0"}
    environment |= {"RAY_worker_niceness": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    if token:
        subprocess.run(
            [ray, "get-auth-token", "--generate"], env=environment, check=True, stdout=subprocess.DEVNULL
        )
    ports = free_ports(4)
    options = [f"--port={ports[0]}", f"--dashboard-port={ports[1]}", f"--ray-client-server-port={ports[2]}"]
    options += [f"--dashboard-agent-listen-port={ports[3]}", "--dashboard-host=127.0.0.1"]
    options += [f"--num-cpus={cpus}", f"--temp-dir={folder / 'ray'}", "--node-ip-address=127.0.0.1"]
    mode = {"RAY_AUTH_MODE": "token" if token else "disabled"}
    with ExitStack() as stack:
        log = stack.enter_context((folder / "head.log").open("wb"))
        head = subprocess.Popen(
            [ray, "start", "--head", "--block", *options],
            env=environment | mode,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        stack.callback(end_head, head)
        wait_for_port(ports[1], head, folder / "head.log")
        yield RayHead(f"127.0.0.1:{ports[0]}", f"http://127.0.0.1:{ports[1]}", environment, folder)


def end_head(head: subprocess.Popen[bytes]) -> None:
    """--block makes the command end what it started when it is told to."""
    head.send_signal(signal.SIGTERM)
    try:
        head.wait(timeout=DOWN_S)
    except subprocess.TimeoutExpired:
        os.killpg(head.pid, signal.SIGKILL)
        head.wait()


def wait_for_port(port: int, head: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + UP_S
    while True:
        assert head.poll() is None, log.read_text()
        assert time.monotonic() < deadline_s, log.read_text()
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.1)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on just now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]
