"""Ray that cannot be reached or started is an error that says where, soon; its own messages are kept off."""

from __future__ import annotations

import inspect
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray._private import worker as ray_worker
from tinyloop.cluster import session as subject
from tinyloop.cluster.fleet import PoolError


class FakeRay:
    """Ray whose init fails some times."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.calls: list[dict[str, Any]] = []

    def init(self, **options: Any) -> None:
        self.calls.append(options)
        if self.failures:
            self.failures -= 1
            raise Exception("The current node timed out during startup")

    def is_initialized(self) -> bool:
        return False

    def shutdown(self) -> None:
        pass


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port of this host that nobody listens on and nobody else gets."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_an_address_where_nobody_listens_is_named_at_once(
    scheme: str, closed_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeRay(0)
    monkeypatch.setattr(subject, "ray", fake)
    address = f"{scheme}127.0.0.1:{closed_port}"
    start_s = time.monotonic()
    with pytest.raises(PoolError, match=rf"{address}' \(ray_address\): .*refused"):
        subject.connect(address)
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(PoolError, match=rf"{address}' \(RAY_ADDRESS\): .*unset it"):
        subject.connect(None)
    assert time.monotonic() - start_s < 2 * subject.CONNECT_S
    assert fake.calls == []


def test_a_cluster_that_ray_cannot_join_is_a_pool_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "ray", FakeRay(1))
    with pytest.raises(PoolError, match=r"'auto' \(ray_address\): Exception: The current node"):
        subject.connect("auto")


def test_a_cluster_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    released, fake = threading.Event(), FakeRay(0)
    monkeypatch.setattr(fake, "init", lambda **options: released.wait(60))
    monkeypatch.setattr(subject, "ray", fake)
    monkeypatch.setattr(subject, "JOIN_S", 0.1)
    with pytest.raises(PoolError, match=r"'auto' \(ray_address\): no answer in 0 s"):
        subject.connect("auto")
    released.set()


def test_a_slow_start_is_tried_again_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    slow, broken = FakeRay(1), FakeRay(9)
    monkeypatch.setattr(subject, "ray", slow)
    assert subject.connect(None)
    assert [call["address"] for call in slow.calls] == ["local", "local"]
    monkeypatch.setattr(subject, "ray", broken)
    with pytest.raises(PoolError, match=r"cannot start Ray.*timed out during startup.*tried 2 times"):
        subject.connect(None)
    assert len(broken.calls) == 2


def test_what_ray_prints_of_dead_processes_is_kept_off(
    session: None, capfd: pytest.CaptureFixture[str]
) -> None:
    assert ray.is_initialized()
    ray_worker.print_to_stdstream({"lines": ["died"], "pid": "raylet", "is_err": False}, ignore_prefix=False)
    assert capfd.readouterr() == ("", "")
    # The thread that prints them finds the function by this name when it has something to print.
    assert "print_to_stdstream" in inspect.unwrap(ray_worker.listen_error_messages).__code__.co_names
