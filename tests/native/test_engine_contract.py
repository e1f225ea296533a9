"""Loading all or nothing, exact memory, handles in any order, and errors that say what to do."""

from __future__ import annotations

import ast
import contextlib
import gc
import itertools
import os
import re
import struct
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinyloop.native._core as core
import tinyloop.native.engine as engine
from engine_cases import random_ids, rounded, score_items, write_calm, write_overflowing
from tinyloop.native import (
    ClosedHandleError,
    ConcurrentUseError,
    InvalidInputError,
    LoadError,
    MismatchError,
    Model,
    OutOfMemoryError,
    RowBudgetError,
    load_model,
)
from tinyloop.native.records import FormatError
from tinyloop.native.reference import Reference


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_calm(tmp_path_factory.mktemp("m") / "m.tloop", "ouro", bits=4)


@pytest.fixture
def model(path: Path) -> Iterator[Model]:
    with load_model(path, max_seq_len=64) as loaded:
        yield loaded


# ---- files ---------------------------------------------------------------------------------------


def reload_damaged(path: Path, tmp_path: Path, data: bytes) -> str:
    """What load_model says of a damaged copy. It must be a LoadError: no crash, no other error."""
    copy = tmp_path / "damaged.tloop"
    copy.write_bytes(data)
    with pytest.raises(LoadError) as caught:
        load_model(copy, max_seq_len=64)
    return str(caught.value)


def test_truncated_files_are_load_errors(path: Path, tmp_path: Path) -> None:
    data = path.read_bytes()
    cuts = {1, 7, 8, 63, 64, 65, 100, len(data) // 2, len(data) - 1}
    cuts |= set(np.random.default_rng(0).integers(1, len(data), 60).tolist())
    for cut in cuts:
        assert "file_bytes" in reload_damaged(path, tmp_path, data[:cut]) or cut < 64


def test_padded_file_is_a_load_error(path: Path, tmp_path: Path) -> None:
    assert "file_bytes" in reload_damaged(path, tmp_path, path.read_bytes() + b"\0")


def test_every_flipped_bit_is_a_load_error_with_a_field(path: Path, tmp_path: Path) -> None:
    """A bit flipped anywhere: preamble, header, any blob, any padding."""
    data = path.read_bytes()
    header_end = 64 + struct.unpack_from("<Q", data, 16)[0]
    rng = np.random.default_rng(1)
    places = [
        *range(64),
        *rng.integers(64, header_end, 80).tolist(),
        *rng.integers(header_end, len(data), 120).tolist(),
    ]
    for place in places:
        damaged = bytearray(data)
        damaged[place] ^= 1 << int(rng.integers(8))
        message = reload_damaged(path, tmp_path, bytes(damaged))
        assert "cannot read the model file: " in message


def test_flipped_header_bytes_with_a_right_checksum_never_crash(path: Path, tmp_path: Path) -> None:
    """Hostile headers: the checksum is made to match, so every later check has to hold on its own."""
    data = path.read_bytes()
    header_bytes = struct.unpack_from("<Q", data, 16)[0]
    rng = np.random.default_rng(2)
    copy = tmp_path / "hostile.tloop"
    loaded = 0
    for _ in range(400):
        damaged = bytearray(data)
        for _ in range(int(rng.integers(1, 4))):
            damaged[64 + int(rng.integers(header_bytes))] = int(rng.integers(256))
        struct.pack_into("<I", damaged, 12, zlib.crc32(bytes(damaged[64 : 64 + header_bytes])))
        copy.write_bytes(bytes(damaged))
        try:
            load_model(copy, max_seq_len=64).close()
            loaded += 1  # a changed name in the metadata, an epsilon, another id
        except LoadError:
            continue
        except OutOfMemoryError:
            pytest.fail("a hostile header made the engine allocate before its sizes were checked")
    assert loaded < 200


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"max_seq_len": 0}, "max_seq_len=0"),
        ({"max_seq_len": 257}, "max_seq_len=257"),
        ({"prefill_chunk": -1}, "prefill_chunk=-1"),
        ({"prefill_chunk": 65}, "prefill_chunk=65"),
        ({"device": "tpu"}, "device='tpu'"),
        ({"device": "cuda:x"}, "device='cuda:x'"),
        ({"cache_mode": "int3"}, "cache_mode='int3'"),
        ({"device": "cpu", "fp16_cache": "all"}, "fp16_cache='all'"),
        ({"fp16_cache": "some"}, "fp16_cache='some'"),
        pytest.param({"cpu_isa": "neon"}, "'neon'", marks=pytest.mark.cpu),
        ({"numeric_mode": "fp8"}, "numeric_mode='fp8'"),
        ({"threads": 0}, "threads=0"),
        ({"budget_bytes": 0}, "budget_bytes=0"),
    ],
)
def test_bad_options_are_load_errors(path: Path, options: dict[str, Any], named: str) -> None:
    with pytest.raises(LoadError, match=named.replace("'", ".")):
        load_model(path, **{"max_seq_len": 64, **options})


@pytest.mark.parametrize(
    ("option", "value", "wanted"),
    [
        ("max_seq_len", 2.5, "an integer, not float"),
        ("max_seq_len", None, "an integer, not NoneType"),
        ("max_seq_len", "x", "an integer, not str"),
        ("max_seq_len", float("nan"), "an integer, not float"),
        ("max_seq_len", True, "an integer, not bool"),
        ("prefill_chunk", 1.5, "an integer, not float"),
        ("budget_bytes", 1e8, "an integer, or None for no limit, not float"),
        ("threads", 1.5, "an integer, or None for all cores, not float"),
        ("state_seed", 1.5, "an integer, not float"),
        ("cache_mode", 3, "a string, or None for the default, not int"),
        ("cache_mode", b"int8", "a string, or None for the default, not bytes"),
        ("numeric_mode", None, "a string, not NoneType"),
        ("device", 1, "a string, or None for the default, not int"),
        ("fp16_cache", False, "a string, or None for the default, not bool"),
    ],
)
def test_options_of_the_wrong_type_are_named(path: Path, option: str, value: object, wanted: str) -> None:
    message = re.escape(f"{option}={value!r}: it must be {wanted}")
    with pytest.raises(TypeError, match=message):
        load_model(path, **{"max_seq_len": 64, option: value})  # type: ignore[arg-type]
    if option in ("max_seq_len", "prefill_chunk", "cache_mode", "threads"):
        with pytest.raises(TypeError, match=message):
            engine.plan(path, **{"max_seq_len": 64, option: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(("option", "value"), [("depth", 1.5), ("depth", True), ("prefix_length", None)])
def test_prefixes_of_the_wrong_type_are_named(path: Path, option: str, value: object) -> None:
    with pytest.raises(TypeError, match=re.escape(f"{option}={value!r}: it must be an integer")):
        engine.plan(path, max_seq_len=64, **{option: value})  # type: ignore[arg-type]


def test_integers_of_numpy_are_integers(path: Path) -> None:
    load_model(
        path,
        np.int64(64),
        np.int32(16),
        budget_bytes=np.int64(10**9),
        threads=np.int8(1),
        state_seed=np.uint64(2**64 - 1),
    ).close()
    planned = engine.plan(path, np.int64(64), depth=np.int16(2), prefix_length=np.uint32(5))
    assert planned == engine.plan(path, 64, depth=2, prefix_length=5)


def test_text_that_is_no_unicode_is_a_load_error(path: Path) -> None:
    with pytest.raises(LoadError, match="cache_mode="):
        load_model(path, cache_mode="\ud800")


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("TINYLOOP_DEVICE", "tpu"),
        ("TINYLOOP_KV", "int2"),
        ("TINYLOOP_FP16_CACHE", "some"),
        pytest.param("TINYLOOP_CPU_ISA", "mmx", marks=pytest.mark.cpu),
    ],
)
def test_environment_switches_are_read_and_keywords_win(
    path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(LoadError, match=value):
        load_model(path, max_seq_len=64)
    load_model(
        path, max_seq_len=64, device="cpu", cache_mode="fp16", fp16_cache="off", cpu_isa="portable"
    ).close()


def test_missing_file_and_folder_are_load_errors(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"phase 'header'.*nothing.tloop"):
        load_model(tmp_path / "nothing.tloop")
    with pytest.raises(LoadError, match="not a regular file"):
        load_model(tmp_path)


# ---- memory --------------------------------------------------------------------------------------


def test_usage_is_the_sum_of_its_owners_and_returns_to_the_start(model: Model) -> None:
    start = model.vram_usage_bytes
    assert start == sum(model.memory_report().values())
    handles = [model.prefix(random_ids(n), upgradable=n < 64) for n in (1, 30, 64)]
    expected = 0
    for handle in handles:
        planes = 2 * 4  # layers x loops
        keys_and_values = 2 * planes * handle.own_length * 64 * 2  # FP16
        states = handle.own_length * 48 * 4 if handle.upgradable else 0  # FP32
        assert handle.bytes == sum(rounded(part) for part in (keys_and_values, states))
        expected += handle.bytes
    assert model.vram_usage_bytes == start + expected == sum(model.memory_report().values())
    model.score_tokens(random_ids(60))
    assert model.vram_usage_bytes == start + expected  # scoring keeps nothing
    for handle in handles:
        handle.close()
    assert model.vram_usage_bytes == start


def test_load_under_a_budget_is_all_or_nothing(path: Path) -> None:
    with load_model(path, max_seq_len=64) as model:
        needed = model.vram_usage_bytes
        ids = random_ids(50)
        expected = model.score_tokens(ids)
    with pytest.raises(OutOfMemoryError, match=r"phase '.*cannot allocate \d+ bytes for"):
        load_model(path, max_seq_len=64, budget_bytes=needed - 1)
    with load_model(path, max_seq_len=64, budget_bytes=needed) as model:
        assert np.array_equal(model.score_tokens(ids), expected)
        with pytest.raises(OutOfMemoryError, match="prefix"):
            model.prefix(ids)
        assert model.vram_usage_bytes == needed
        assert np.array_equal(model.score_tokens(ids), expected)


def test_load_fails_clean_under_every_budget(path: Path) -> None:
    """Each budget cuts the load at another allocation: every phase is reached, none crashes."""
    with load_model(path, max_seq_len=64) as model:
        needed = model.vram_usage_bytes
    phases = set()
    for budget in np.linspace(1, needed - 1, 40, dtype=int).tolist():
        with pytest.raises(OutOfMemoryError) as caught:
            load_model(path, max_seq_len=64, budget_bytes=budget)
        phases.add(str(caught.value).split("'")[3])
    assert phases == {"weights", "buffers"}


def test_failed_allocation_in_a_call_changes_nothing(model: Model) -> None:
    start = model.vram_usage_bytes
    model._fail_allocation(1)
    with pytest.raises(OutOfMemoryError):
        model.prefix(random_ids(10))
    assert model.vram_usage_bytes == start
    with model.prefix(random_ids(10)) as prefix:
        assert model.vram_usage_bytes == start + prefix.bytes


# ---- handles -------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(itertools.permutations(["model", "parent", "child"])))
def test_handles_may_go_in_any_order(path: Path, order: tuple[str, ...]) -> None:
    model = load_model(path, max_seq_len=64)
    parent = model.prefix(random_ids(10))
    things = {"model": model, "parent": parent, "child": model.prefix(random_ids(5), parent=parent)}
    del model, parent
    for name in order:
        things[name].close()
        things[name].close()  # a second time is allowed
        assert things[name].closed
    things.clear()
    gc.collect()


def test_a_closed_handle_says_so(path: Path) -> None:
    model = load_model(path, max_seq_len=64)
    kept = model.prefix(random_ids(10))
    closed = model.prefix(random_ids(10))
    closed.close()
    with pytest.raises(ClosedHandleError, match="prefix"):
        score_items(model, [(random_ids(3), 1)], prefixes=[closed])
    with pytest.raises(ClosedHandleError):
        _ = closed.length
    model.close()
    with pytest.raises(ClosedHandleError, match="model"):
        model.score_tokens(random_ids(3))
    with pytest.raises(ClosedHandleError, match="its model was closed"):
        _ = kept.length


def test_a_prefix_of_another_model_or_depth_is_a_mismatch(path: Path, model: Model) -> None:
    with load_model(path, max_seq_len=64) as other, other.prefix(random_ids(10)) as foreign:
        with pytest.raises(MismatchError, match="another model"):
            score_items(model, [(random_ids(3), 1)], prefixes=[foreign])
        with pytest.raises(MismatchError, match="another model"):
            model.prefix(random_ids(3), parent=foreign)
    with model.prefix(random_ids(10), depth=2) as shallow:
        with pytest.raises(MismatchError, match="depth 2"):
            score_items(model, [(random_ids(3), 1)], prefixes=[shallow], depth=3)
        with pytest.raises(MismatchError, match="depth 2"):
            model.prefix(random_ids(3), depth=1, parent=shallow)


# ---- inputs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [-1, 61, 2**31 - 1])
def test_token_ids_outside_the_vocabulary_are_named(model: Model, bad: int) -> None:
    ids = random_ids(10)
    ids[7] = bad
    for call in (model.score_tokens, model.prefix):
        with pytest.raises(InvalidInputError, match=rf"token id {bad} at index 7"):
            call(ids)
    assert issubclass(InvalidInputError, ValueError)


@pytest.mark.parametrize("depth", [0, -1, 5000])
def test_depths_out_of_range_are_refused(model: Model, depth: int) -> None:
    with pytest.raises(InvalidInputError, match=f"depth {depth}"):
        model.score_tokens(random_ids(5), depth=depth)


def test_rows_beyond_the_budget_are_named(model: Model) -> None:
    assert len(model.score_tokens(random_ids(65))) == 64
    with pytest.raises(RowBudgetError, match="65 new rows, a pass has 64"):
        model.score_tokens(random_ids(66))
    with pytest.raises(RowBudgetError, match="65 new rows"):
        model.prefix(random_ids(65))


def test_positions_beyond_the_model_are_refused(model: Model) -> None:
    prefix = None
    for _ in range(4):  # 4 x 64 = all 256 positions
        prefix = model.prefix(random_ids(64), parent=prefix)
    with pytest.raises(InvalidInputError, match="position 257"):
        score_items(model, [(random_ids(2), 1)], prefixes=[prefix])


@pytest.mark.parametrize(
    ("offsets", "n_scored"),
    [
        ([0, 3], [0]),
        ([0, 3], [3]),
        ([0, 3], [-1]),
        ([1, 3], [1]),
        ([0, 2], [1]),
        ([0, 2, 1, 3], [1, 1, 1]),
        ([0], [1]),
        ([0, 3, 3], [1, 1]),
    ],
)
def test_ragged_arrays_that_do_not_fit_are_refused(
    model: Model, offsets: list[int], n_scored: list[int]
) -> None:
    with pytest.raises(InvalidInputError):
        model.score(random_ids(3), np.array(offsets, np.int64), np.array(n_scored, np.int32))


def test_arrays_of_another_type_are_refused_and_read_only_ones_taken(model: Model) -> None:
    ids = random_ids(5)
    for wrong in (ids.astype(np.int64), ids.tolist(), ids[::2], ids[None]):
        with pytest.raises(TypeError, match="token_ids must be"):
            model.score_tokens(wrong)
    ids.setflags(write=False)
    assert len(model.score_tokens(ids)) == 4


def test_nothing_to_score_gives_nothing(model: Model) -> None:
    assert len(model.score_tokens(random_ids(1))) == 0
    empty = model.score(np.empty(0, np.int32), np.zeros(1, np.int64), np.empty(0, np.int32))
    assert len(empty.logprobs) == 0


def test_an_error_in_one_item_scores_none_and_harms_nothing(model: Model) -> None:
    good = (random_ids(10), 9)
    before = score_items(model, [good]).logprobs
    rows = model.counters["rows"]
    with pytest.raises(InvalidInputError, match="item 1"):
        score_items(model, [good, (np.array([1, 99], np.int32), 1)])
    assert model.counters["rows"] == rows
    assert np.array_equal(score_items(model, [good]).logprobs, before)


# ---- threads and processes -----------------------------------------------------------------------


def test_a_second_concurrent_call_is_refused_at_once(path: Path) -> None:
    with load_model(path, max_seq_len=256, threads=1) as model:
        ids = random_ids(200)
        expected = model.score_tokens(ids)
        stop = threading.Event()
        wrong: list[str] = []

        def hammer() -> None:
            while not stop.is_set():
                try:
                    if not np.array_equal(model.score_tokens(ids), expected):
                        wrong.append("other bits")
                except ConcurrentUseError:
                    refused.append(1)
                    if len(refused) >= 20:
                        stop.set()

        refused: list[int] = []
        threads = [threading.Thread(target=hammer) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        assert not wrong
        assert len(refused) >= 20


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_forked_child_is_refused(model: Model) -> None:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            model.score_tokens(random_ids(5))
            os.write(write, b"computed")
        except ConcurrentUseError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read) as answer:
        assert "load it again after a fork" in answer.read()
    assert len(model.score_tokens(random_ids(5))) == 4


# ---- the typed face ------------------------------------------------------------------------------


def test_the_stub_has_the_names_of_the_built_module() -> None:
    stub = ast.parse((Path(engine.__file__).parent / "_core.pyi").read_text())
    for node in stub.body:
        if isinstance(node, ast.ClassDef) and not issubclass(getattr(core, node.name), Exception):
            declared = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
            built = {
                name
                for name in vars(getattr(core, node.name))
                if not name.startswith("__") or name in declared
            }
            assert declared == built - {"_pybind11_conduit_v1_"}
    names = {name for name in vars(core) if not name.startswith("__")}
    assert names == {node.name for node in stub.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}


def parameters(function: ast.FunctionDef) -> list[str]:
    """Names in order, the star where keywords begin, and defaults: what a caller may write."""
    args = function.args
    defaults = [None] * (len(args.args) - len(args.defaults)) + list(args.defaults)
    named = [*zip(args.args, defaults, strict=True), (None, None)]
    named += zip(args.kwonlyargs, args.kw_defaults, strict=True)
    return [
        "*" if name is None else name.arg + (f"={ast.unparse(default)}" if default else "")
        for name, default in named
    ]


def test_the_stub_has_the_signatures_of_the_built_module() -> None:
    stub = ast.parse((Path(engine.__file__).parent / "_core.pyi").read_text())
    compared = 0
    for node in ast.walk(stub):
        owner = getattr(core, node.name) if isinstance(node, ast.ClassDef) else core
        for declared in node.body if isinstance(node, ast.ClassDef | ast.Module) else ():
            if not isinstance(declared, ast.FunctionDef) or declared.decorator_list:
                continue
            signature = (getattr(owner, declared.name).__doc__ or "").splitlines()[0]
            (built,) = ast.parse(f"def {signature}: ...").body
            assert isinstance(built, ast.FunctionDef)
            if built.args.vararg is None and "arg0" not in signature:  # those have no names to compare
                assert parameters(declared) == parameters(built), f"{owner.__name__}.{declared.name}"
                compared += 1
    assert compared > 40


# ---- found by breaking it ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "overrides",
    [
        {"n_q_heads": 129, "n_kv_heads": 1, "head_dim": 2},
        {"norm_eps": 1.5},
        {"head_dim": 258},
        {"loop_norm": False},
        {"max_positions": 2**31},
        {"loops": 5000},
    ],
)
def test_what_the_writer_takes_the_engine_loads(tmp_path: Path, overrides: dict[str, Any]) -> None:
    """Both readers have the same limits: the writer refuses what the engine would."""
    with pytest.raises(FormatError):
        write_calm(tmp_path / "m.tloop", "ouro", bits=8, **overrides)


@pytest.mark.parametrize("heads", [16, 127, 128])
def test_many_query_heads_on_one_kv_head_match_the_reference(tmp_path: Path, heads: int) -> None:
    """Up to the most heads that an attention work item holds: one more once wrote past its scratch."""
    path = write_calm(tmp_path / "m.tloop", "llama", bits=16, n_q_heads=heads, n_kv_heads=1, head_dim=2)
    ids = random_ids(40)
    with load_model(path, max_seq_len=64, numeric_mode="fp32") as model:
        assert np.abs(model.score_tokens(ids) - Reference.load(path).logprobs(ids, 1)).max() <= 1e-4


def test_a_header_with_too_many_grouped_heads_is_refused(tmp_path: Path) -> None:
    path = write_calm(tmp_path / "m.tloop", "llama", bits=16, n_q_heads=128, n_kv_heads=1, head_dim=2)
    data = bytearray(path.read_bytes())
    header_bytes = struct.unpack_from("<Q", data, 16)[0]
    place = bytes(data).index(b"n_q_heads") + len(b"n_q_heads") + 1
    struct.pack_into("<q", data, place, 129)
    struct.pack_into("<I", data, 12, zlib.crc32(bytes(data[64 : 64 + header_bytes])))
    assert "129 query heads" in reload_damaged(path, tmp_path, bytes(data))


@pytest.mark.parametrize("chunk", [0, 1, 16])
@pytest.mark.parametrize("place", [5, 60, 64, 70])
def test_a_token_that_overflows_leaves_the_rows_before_it_alone(
    tmp_path: Path, chunk: int, place: int
) -> None:
    """Values beyond FP16 become infinite in the cache; no earlier row may meet them, not even times zero."""
    path, huge = write_overflowing(tmp_path / "m.tloop")
    ids = random_ids(100, vocab=huge)
    ids[place] = huge
    with load_model(path, max_seq_len=128, prefill_chunk=chunk) as model:
        whole = model.score_tokens(ids)
        assert np.isnan(whole[place:]).all()
        assert np.array_equal(whole[: place - 1], model.score_tokens(ids[:place]))


@pytest.mark.cpu
def test_threads_that_the_system_refuses_are_a_load_error(path: Path) -> None:
    """Under a small address space the system stops giving threads: the load must fail, not hang."""
    script = (
        "import resource, sys\n"
        "from tinyloop.native import LoadError, OutOfMemoryError, load_model\n"
        "load_model(sys.argv[1], max_seq_len=64, threads=1).close()\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, used + 2**28))\n"
        "try:\n"
        "    load_model(sys.argv[1], max_seq_len=64, threads=900)\n"
        "except (LoadError, OutOfMemoryError) as error:\n"
        "    print('refused:', error)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert "refused: " in ended.stdout, ended
    with pytest.raises(LoadError, match="threads=2000"):
        load_model(path, max_seq_len=64, threads=2000)


def test_a_forked_child_may_drop_a_model_it_inherited(path: Path) -> None:
    script = (
        "import os, sys\n"
        "from tinyloop.native import load_model\n"
        "model = load_model(sys.argv[1], max_seq_len=64, threads=3)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    model.close()\n"
        "    os._exit(7)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    for _ in range(5):
        ended = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", script, str(path)], timeout=60, check=False
        )
        assert ended.returncode == 7


def test_an_interpreter_may_exit_while_daemon_threads_score(path: Path) -> None:
    script = (
        "import sys, threading\n"
        "import numpy as np\n"
        "from tinyloop.native import load_model\n"
        "model = load_model(sys.argv[1], max_seq_len=64, threads=1)\n"
        "ids = np.arange(20, dtype=np.int32)\n"
        "began = threading.Event()\n"
        "def loop():\n"
        "    while True:\n"
        "        model.score_tokens(ids)\n"
        "        began.set()\n"
        "threading.Thread(target=loop, daemon=True).start()\n"
        "began.wait(30)\n"
    )
    for _ in range(8):
        ended = subprocess.run(
            [sys.executable, "-c", script, str(path)], capture_output=True, timeout=60, check=False
        )
        assert ended.returncode == 0, ended.stderr


def test_ids_that_change_during_a_call_harm_nothing(path: Path) -> None:
    """The caller's mistake, but never a read outside the model: an error or a score of some mix of ids."""
    with load_model(path, max_seq_len=64, threads=1) as model:
        ids = random_ids(64 * 200)
        offsets = np.arange(0, len(ids) + 1, 64, dtype=np.int64)
        n_scored = np.full(len(offsets) - 1, 63, np.int32)
        stop = threading.Event()

        def scribble() -> None:
            while not stop.is_set():
                ids[-64:] = 2**30
                ids[-64:] = 1

        thread = threading.Thread(target=scribble)
        thread.start()
        try:
            for _ in range(5):
                with contextlib.suppress(InvalidInputError):
                    model.score(ids, offsets, n_scored)
        finally:
            stop.set()
            thread.join()
        assert len(model.score_tokens(random_ids(10))) == 9


def test_a_long_chain_of_prefixes_holds_what_it_accounts_for(tmp_path: Path) -> None:
    """1,000 links: their own keys and values and a fixed bit each, not a list of all ancestors each."""
    path = write_calm(tmp_path / "m.tloop", "ouro", bits=8, max_positions=4096)
    pages = Path("/proc/self/statm")
    with load_model(path, max_seq_len=64, threads=1) as model:
        held = [model.prefix(random_ids(1))]
        before = int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        accounted = model.vram_usage_bytes
        for i in range(1000):
            held.append(model.prefix(random_ids(1, seed=i), depth=4, parent=held[-1]))
        grown = int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") - before
        accounted = model.vram_usage_bytes - accounted
        assert grown < accounted + 1000 * 2048
        del held[:-1]
        held.clear()  # the whole chain goes at once


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_seq_len", 2**31), ("prefill_chunk", -(2**40)), ("threads", 2**31), ("budget_bytes", 2**65)],
)
def test_numbers_that_no_machine_has_are_load_errors(path: Path, name: str, value: int) -> None:
    with pytest.raises(LoadError, match=name):
        load_model(path, **{"max_seq_len": 64, name: value})


def test_odd_paths_load_or_say_why(path: Path, tmp_path: Path) -> None:
    odd = os.fsencode(tmp_path) + b"/m\xff.tloop"
    with open(odd, "wb") as file:
        file.write(path.read_bytes())
    load_model(odd, max_seq_len=64).close()
    load_model(os.fsdecode(odd), max_seq_len=64).close()
    with pytest.raises(LoadError, match=r"nothing\?"):
        load_model(os.fsencode(tmp_path) + b"/nothing\xff")
    with pytest.raises(LoadError, match="zero byte"):
        load_model(str(path) + "\0zzz")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(LoadError, match="not a regular file"):
        load_model(pipe)
