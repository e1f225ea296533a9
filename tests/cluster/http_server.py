"""A real server for the tests of the HTTP face: a tiny model, a named pool, and the command in a process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import ray
from tiny_models import random_tensors, stored, tiny_descriptor
from tiny_tokenizer import tiny_tokenizer
from tinyloop.cluster import registry
from tinyloop.cluster.config import PoolConfig
from tinyloop.cluster.pool import ReplicaPool
from tinyloop.native.format import write_model

WINDOW = 256
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
START_S = 90.0
END_S = 60.0


def write_talker(path: Path, template: str = TEMPLATE) -> Path:
    """A tiny looped model of random weights with a byte-level tokenizer, so that it says any bytes."""
    tokenizer = tiny_tokenizer()
    descriptor = tiny_descriptor(
        "ouro",
        vocab_size=tokenizer.get_vocab_size(),
        bos_id=0,
        eos_ids=(1,),
        max_positions=WINDOW,
        chat_template=template,
    )
    tensors = stored(random_tensors(descriptor, seed=5), 16)
    write_model(path, descriptor, tensors, tokenizer.to_str().encode(), {"name": "talker"})
    return path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def named_pool(name: str, model: Path) -> Iterator[None]:
    """A pool that is up while this lasts."""
    ReplicaPool.up(PoolConfig(model=model, threads=1, max_seq_len=WINDOW), name).close()
    try:
        yield
    finally:
        if name in registry.pool_names():
            registry.reap(name)


def command(*arguments: str) -> list[str]:
    """`tinyloop serve` on the session of the tests."""
    address = ray.get_runtime_context().gcs_address
    start = [sys.executable, "-c", "from tinyloop.cluster.guardian import main; main()", "serve"]
    return [*start, "--address", address, *arguments]


class Server:
    """The command as a process of its own. log: what it printed."""

    def __init__(self, port: int, log: Path, *arguments: str) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        with log.open("wb") as file:
            full = command("--port", str(port), *arguments)
            self.process = subprocess.Popen(full, stdout=file, stderr=subprocess.STDOUT)

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            try:
                if httpx.get(f"{self.url}/ready").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.05)

    def stop(self) -> int:
        """Ctrl-C. Returns the exit code."""
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGINT)
        return self.process.wait(END_S)
