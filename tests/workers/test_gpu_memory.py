"""When a model may be loaded on a GPU, from outputs of nvidia-smi as it prints them."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

import pytest
from tinyloop.workers.engine_thread import EngineThread
from tinyloop.workers.gpu_memory import (
    GPU_QUERY,
    LEAVING_S,
    UNSEEN_S,
    GpuTaken,
    own_gpu,
    parse_gpus,
    parse_processes,
    wait_until_free,
)
from tinyloop.workers.model import ReplicaSettings

A, B = "GPU-1f3c9a52-90b1-7c1e-5a6e-0d6f2d1b7a10", "GPU-77aa0e0c-3a9d-cc01-2b11-9c0d0e0f1a2b"
IDLE = f"0, {A}, 4, 143771\n1, {B}, 4, 143771\n"
HELD = f"0, {A}, 91240, 143771\n1, {B}, 4, 143771\n"
DYING = f"{A}, 4711, ray::Replica, 91200\n"
FOREIGN = f"{A}, 815, /usr/bin/python3, train.py, 91200\n{B}, 816, python, 10\n"
UNKNOWN_SIZE = f"{A}, 815, [Not Found], [N/A]\n"
GIB = 1 << 30


class Smi:
    """Says one pair of outputs after the other, the last one for ever; the clock moves with each pause."""

    def __init__(self, *outputs: tuple[str, str]) -> None:
        self.outputs = list(outputs)
        self.now_s = 0.0

    def __call__(self, arguments: Sequence[str]) -> str:
        gpus, processes = self.outputs[0]
        if tuple(arguments) == GPU_QUERY:
            return gpus
        if len(self.outputs) > 1:
            self.outputs.pop(0)
        return processes

    def pause(self, seconds: float) -> None:
        self.now_s += seconds

    def wait(self, need_bytes: int | None = None, visible: str = "0") -> str:
        environment = {"CUDA_VISIBLE_DEVICES": visible}
        return wait_until_free(
            need_bytes, query=self, clock=lambda: self.now_s, pause=self.pause, environment=environment
        )


def test_an_idle_gpu_is_taken_at_once_and_nothing_is_said() -> None:
    smi = Smi((IDLE, ""))
    assert smi.wait() == ""
    assert smi.now_s == 0.0


def test_a_replacement_waits_until_the_dead_replica_has_left() -> None:
    smi = Smi((HELD, DYING), (HELD, DYING), (HELD, ""), (IDLE, ""))
    assert smi.wait() == ""
    assert smi.now_s > 0.0


def test_a_replica_that_does_not_leave_is_named_and_the_start_refused() -> None:
    smi = Smi((HELD, DYING))
    with pytest.raises(
        GpuTaken, match=r"GPU 0 \(91,240 of 143,771 MiB.*process 4711 \(ray::Replica\) with 91,200"
    ):
        smi.wait()
    assert smi.now_s >= LEAVING_S


def test_a_foreign_process_is_named_and_refused_only_where_it_leaves_too_little() -> None:
    said = Smi((HELD, FOREIGN)).wait()
    assert "process 815 (/usr/bin/python3,train.py) with 91,200 MiB, not of this pool" in said
    assert "816" not in said
    assert Smi((HELD, FOREIGN)).wait(40 * GIB) == said
    with pytest.raises(GpuTaken, match=r"bytes are free, 64,424,509,440 needed: end it"):
        Smi((HELD, FOREIGN)).wait(60 * GIB)
    assert Smi((HELD, FOREIGN)).wait(visible=B).startswith("GPU 1")


def test_what_cannot_be_seen_is_waited_for_and_then_said() -> None:
    smi = Smi((HELD, ""))
    assert "no process that can be seen from here" in smi.wait()
    assert smi.now_s >= UNSEEN_S
    assert "process 815 ([Not Found]) with memory of unknown size" in Smi((HELD, UNKNOWN_SIZE)).wait()


def test_without_an_answer_nothing_is_checked_and_that_is_said() -> None:
    def missing(_: Sequence[str]) -> str:
        raise FileNotFoundError("nvidia-smi")

    def failing(_: Sequence[str]) -> str:
        raise subprocess.CalledProcessError(9, "nvidia-smi")

    assert "was not checked: nvidia-smi: FileNotFoundError" in wait_until_free(None, query=missing)
    assert "was not checked: nvidia-smi: CalledProcessError" in wait_until_free(None, query=failing)
    assert "does not list this process's device" in Smi((IDLE, "")).wait(visible="MIG-1")
    assert "was not checked" in Smi(("No devices were found\n", "")).wait()


def test_the_first_visible_device_is_the_own_one() -> None:
    gpus = parse_gpus(IDLE)
    assert [gpu and gpu.index for gpu in (own_gpu(gpus, v) for v in (None, "1,0", B, "7"))] == [0, 1, 1, None]
    assert [process.pid for process in parse_processes(DYING + UNKNOWN_SIZE)] == [4711, 815]


def test_a_taken_gpu_is_a_failed_load_with_its_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(_: int | None) -> str:
        raise GpuTaken("GPU 0 is held by process 815")

    monkeypatch.setattr("tinyloop.workers.engine_thread.wait_until_free", taken)
    thread = EngineThread(ReplicaSettings("m", "fake_model:load_model", 1, 0, {"device": "cuda"}))
    thread.loaded.result(10)
    status = thread.status()
    assert (status.state, status.phase) == ("unfit", "GPU memory")
    assert status.message == "GpuTaken: GPU 0 is held by process 815"
