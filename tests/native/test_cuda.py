"""What is about a GPU alone: its numbers beside the CPU's, its books beside the driver's, its processes.

The engine's other tests run on a GPU under TINYLOOP_DEVICE=cuda.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_cases import random_ids, score_items, write_calm
from numpy.typing import NDArray
from tinyloop.native import GenerateRequest, LoadError, Model, OutOfMemoryError, devices, load_model
from tinyloop.native.models import default_model_path

# CPU and GPU round FP16 activations at the same places, and the GPU rounds matrices to FP16 besides: each is
# within FP16_RMS (5e-3) and FP16_MAX (3e-2) of the reference, so they are within twice that of each other.
PAIR_RMS, PAIR_MAX = 1e-2, 6e-2
# Float32 sums in another order.
FLOAT_MAX = 1e-4
# The driver's own books move in steps of 2 MiB; other processes' do not move while these tests run.
DRIVER_BYTES = 4 << 20
MODES = ("fp16", "int8", "h_fp16", "h_int8", "h_int4")


def rms(x: NDArray[np.float64]) -> float:
    return float(np.sqrt(np.mean(x**2)))


def run_python(text: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", text],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def test_without_a_driver_the_import_works_and_there_are_no_devices() -> None:
    text = "import tinyloop.native as t; print(t.devices())"
    assert run_python(text, CUDA_VISIBLE_DEVICES="") == "[]"


def test_a_device_that_is_not_there_is_a_load_error() -> None:
    with pytest.raises(LoadError, match="cuda:77"):
        load_model(default_model_path(), device="cuda:77")


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:cache_mode:UserWarning")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("family", "bits"), [("ouro", 4), ("olmo2", 8), ("huginn", 16), ("hrm_text", 4)])
def test_the_gpu_says_what_the_cpu_says(tmp_path: Path, family: str, bits: int, mode: str) -> None:
    path = write_calm(tmp_path / "m.tloop", family, bits=bits, seed=bits)
    ids = random_ids(60)

    def scored(device: str, numeric_mode: Any) -> NDArray[np.float64]:
        with load_model(path, 64, device=device, numeric_mode=numeric_mode, cache_mode=mode) as model:
            return model.score_tokens(ids).astype(np.float64)

    full, half = scored("cpu", "fp32"), scored("cpu", "fp16")
    full_apart, half_apart = np.abs(scored("cuda", "fp32") - full), np.abs(scored("cuda", "fp16") - half)
    if mode in ("fp16", "h_fp16"):
        assert full_apart.max() <= FLOAT_MAX
        assert half_apart.max() <= PAIR_MAX
    else:
        # A value on the border of two codes falls to either side, and moves what follows. How far, the CPU's
        # own two modes say: they differ by as many such falls.
        assert np.median(full_apart) <= FLOAT_MAX
        assert rms(half_apart) <= PAIR_RMS + 3 * rms(half - full)


@pytest.mark.gpu
def test_the_shipped_model_scores_and_generates_as_on_the_cpu() -> None:
    ids = random_ids(400, vocab=4000)
    prompt = ids[:50]
    path = default_model_path()
    with load_model(path, device="cpu") as cpu, load_model(path, device="cuda") as gpu:
        apart = cpu.score_tokens(ids) - gpu.score_tokens(ids)
        assert np.sqrt(np.mean(apart**2)) <= PAIR_RMS
        assert np.abs(apart).max() <= PAIR_MAX
        (there,) = gpu.generate([GenerateRequest(prompt, 40, stop_ids=())])
        whole = np.concatenate([prompt, there.token_ids]).astype(np.int32)
        assert np.array_equal(gpu.score_tokens(whole)[49:], there.logprobs)
        greedy = score_items(cpu, [(whole, 40)]).greedy
    # Two near logits may change places between devices; most are far apart.
    assert greedy.mean() >= 0.9


@pytest.mark.gpu
@pytest.mark.parametrize("fp16_cache", ["off", "loop", "all"])
def test_copies_of_weights_change_memory_and_no_bit(fp16_cache: str) -> None:
    ids = random_ids(700, vocab=4000)
    path = default_model_path()
    with (
        load_model(path, device="cuda", fp16_cache="off") as plain,
        load_model(path, device="cuda", fp16_cache=fp16_cache) as other,
    ):
        assert np.array_equal(plain.score_tokens(ids), other.score_tokens(ids))
        held = {model: model.memory_report()["weights"] for model in (plain, other)}
    assert (held[other] > held[plain]) == (fp16_cache != "off")


@pytest.mark.gpu
def test_without_the_library_the_bits_are_the_same() -> None:
    """Sums by our own kernels, by the library, by one row or by many: one class of numbers."""
    text = (
        "import hashlib, numpy as np; from tinyloop.native import load_model; "
        "from tinyloop.native.models import default_model_path; "
        "m = load_model(default_model_path(), device='cuda', fp16_cache='all'); "
        "ids = np.random.default_rng(0).integers(0, 4000, 900).astype(np.int32); "
        "print(m.numerics_id.split('/')[2].split('-')[0], "
        "hashlib.sha256(m.score_tokens(ids).tobytes()).hexdigest())"
    )
    library, with_library = run_python(text).split()
    own, without = run_python(text, TINYLOOP_CUBLASLT="off").split()
    assert (library, own) == ("cublaslt", "own")
    assert without == with_library


@pytest.mark.gpu
def test_a_named_library_that_is_not_there_is_a_load_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINYLOOP_CUBLASLT", "/nonexistent/libcublasLt.so")
    with pytest.raises(LoadError, match=r"TINYLOOP_CUBLASLT='/nonexistent/libcublasLt\.so'"):
        load_model(default_model_path(), device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [4, 8, 16])
def test_the_fast_class_moves_decoded_tokens_alone(tmp_path: Path, kind: int) -> None:
    """Sums in parts are rounded otherwise, and nothing else changes: scoring keeps every bit."""
    path = write_calm(tmp_path / "m.tloop", "ouro", bits=kind, seed=kind)
    ids, prompt = random_ids(60), random_ids(20)
    with (
        load_model(path, 64, device="cuda") as exact,
        load_model(path, 64, device="cuda", deterministic=False) as fast,
    ):
        assert "/fast/" in fast.numerics_id
        assert "/fast/" not in exact.numerics_id
        assert np.array_equal(exact.score_tokens(ids), fast.score_tokens(ids))
        (told,) = exact.generate([GenerateRequest(prompt, 30, stop_ids=())])
        (quick,) = fast.generate([GenerateRequest(prompt, 30, stop_ids=())])
        whole = np.concatenate([prompt, quick.token_ids]).astype(np.int32)
        apart = exact.score_tokens(whole)[19:] - quick.logprobs
        (again,) = fast.generate([GenerateRequest(prompt, 30, stop_ids=())])
    assert np.abs(apart).max() <= PAIR_MAX
    assert np.array_equal(quick.logprobs, again.logprobs)
    # The first token comes of a prefill, which is not decoded.
    assert told.token_ids[0] == quick.token_ids[0]
    assert told.logprobs[0] == quick.logprobs[0]


@pytest.mark.gpu
@pytest.mark.parametrize("together", [1, 8])
def test_a_steady_step_waits_once_and_allocates_nothing(together: int) -> None:
    with load_model(default_model_path(), device="cuda") as model:

        def cost(new: int) -> tuple[int, int]:
            before = model.counters
            requests = [GenerateRequest(random_ids(20), new, stop_ids=()) for _ in range(together)]
            model.generate(requests, max_batch=together)
            after = model.counters
            return (
                after["device_waits"] - before["device_waits"],
                after["allocations"] - before["allocations"],
            )

        cost(40)  # the steps are recorded
        short, long = cost(20), cost(40)
    assert long[0] - short[0] == 20  # for the tokens of each further step
    assert long[1] == short[1]


# ---- memory --------------------------------------------------------------------------------------


def used_by_device() -> int:
    text = subprocess.run(
        ["nvidia-smi", "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return int(text) << 20


def near(books: int, device: int) -> bool:
    return abs(device - books) <= max(DRIVER_BYTES, books // 100)


@pytest.mark.gpu
def test_the_books_are_the_devices_own() -> None:
    path = default_model_path()
    load_model(path, 256, device="cuda").close()  # the context, and what the library keeps
    before = used_by_device()
    model = load_model(path, 2048, device="cuda")
    assert near(model.vram_usage_bytes, used_by_device() - before)
    prefixes = [model.prefix(random_ids(2000, seed=i, vocab=4000)) for i in range(6)]
    handle = model.start(random_ids(500, vocab=4000), 2, 4)
    assert near(model.vram_usage_bytes, used_by_device() - before)
    for held in [*prefixes, handle]:
        held.close()
    assert near(model.vram_usage_bytes, used_by_device() - before)
    model.close()
    assert near(0, used_by_device() - before)


@pytest.mark.gpu
def test_loads_that_fail_leave_nothing_on_the_device() -> None:
    path = default_model_path()
    options: dict[str, Any] = {"device": "cuda", "fp16_cache": "off"}  # auto would go by the budget
    with load_model(path, 512, **options) as model:
        needs = model.vram_usage_bytes
    before = used_by_device()
    for budget in np.linspace(1, needs - 1, 20).astype(int):
        with pytest.raises(OutOfMemoryError, match="cannot allocate"):
            load_model(path, 512, budget_bytes=int(budget), **options)
    assert near(0, used_by_device() - before)
    with load_model(path, 512, budget_bytes=needs, **options) as model:
        model.score_tokens(random_ids(40))


@pytest.mark.gpu
def test_more_than_the_device_has_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    path = write_calm(tmp_path / "m.tloop", "ouro", bits=4, max_positions=1 << 30)
    with load_model(default_model_path(), 256, device="cuda") as bystander:
        expected = bystander.score_tokens(random_ids(40))
        with pytest.raises(OutOfMemoryError, match=r"cannot allocate \d+ bytes for .*GPU 0"):
            load_model(path, 1 << 30, device="cuda")
        assert np.array_equal(bystander.score_tokens(random_ids(40)), expected)


# ---- processes -----------------------------------------------------------------------------------

LOADED = (
    "import os, numpy as np; from tinyloop.native import *; "
    "from tinyloop.native.models import default_model_path; "
    "m = load_model(default_model_path(), 256, device='cuda'); ids = np.arange(30, dtype=np.int32); "
    "p = m.prefix(ids); "
)


@pytest.mark.gpu
def test_a_process_may_end_with_live_handles() -> None:
    assert run_python(LOADED + "print('ended')") == "ended"
    assert run_python(LOADED + "del m; print('ended')") == "ended"
    assert run_python(LOADED + "del p; m.close(); print('ended')") == "ended"


@pytest.mark.gpu
def test_a_forked_child_is_refused_and_may_end() -> None:
    text = LOADED + (
        "child = os.fork()\n"
        "if child == 0:\n"
        "    try:\n"
        "        m.score_tokens(ids)\n"
        "    except ConcurrentUseError as error:\n"
        "        del p, m\n"
        "        os._exit(7 if 'fork' in str(error) else 8)\n"
        "    os._exit(9)\n"
        "_, status = os.waitpid(child, 0)\n"
        "print(os.waitstatus_to_exitcode(status), np.isfinite(m.score_tokens(ids)).all())"
    )
    assert run_python(text) == "7 True"


@pytest.mark.gpu
def test_two_models_share_a_device() -> None:
    path, ids = default_model_path(), random_ids(100, vocab=4000)
    models: list[Model] = [load_model(path, 256, device="cuda") for _ in range(2)]
    expected = models[0].score_tokens(ids)
    models[0].close()
    assert np.array_equal(models[1].score_tokens(ids), expected)
    models[1].close()


@pytest.mark.gpu
def test_devices_name_what_can_be_loaded_on() -> None:
    for device in devices():
        with load_model(default_model_path(), 64, device=device.device) as model:
            assert f"/sm{device.capability[0]}{device.capability[1]}/" in model.numerics_id
