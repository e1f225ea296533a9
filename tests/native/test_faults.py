"""Faults: every allocation fails once, every order of closing, a fork, an exit, two threads."""

from __future__ import annotations

import copy
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinyloop.native._core as core
from engine_cases import ON_GPU, random_ids
from numpy.typing import NDArray
from stateful_cases import (
    KINDS,
    NO_STOP,
    Ids,
    assert_same_bits,
    fail_every_allocation,
    family_path,
    flat,
    load_family,
    score_one,
)
from tinyloop.native import (
    ClosedHandleError,
    ConcurrentUseError,
    GenerateRequest,
    Model,
    OutOfMemoryError,
    PrefixPool,
    load_model,
)

IDS = random_ids(60)
TAIL = random_ids(11, seed=5)
FAULT_MODES = ("fp16", "int8", "h_int4")


# ---- every allocation fails once -----------------------------------------------------------------


@pytest.fixture(params=list(itertools.product(KINDS, FAULT_MODES)), ids="-".join)
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    family, mode = request.param
    with load_family(family, mode) as loaded:
        yield loaded


def expected_tail(model: Model, depth: int) -> NDArray[np.float32]:
    prompt = len(IDS) if model.descriptor["prefix_lm"] else 0
    return score_one(model, np.r_[IDS, TAIL], 10, depth, prompt_len=prompt)


def test_a_prefix_or_its_upgrade_fails_clean(model: Model) -> None:
    expected = {depth: expected_tail(model, depth) for depth in (2, 4)}
    prefix, failures = fail_every_allocation(model, lambda: model.prefix(IDS, depth=2, upgradable=True))
    assert failures == 2  # planes and states
    deeper, failures = fail_every_allocation(
        model,
        lambda: prefix.upgrade(4),
        lambda: assert_same_bits(score_one(model, TAIL, 10, 2, prefix=prefix), expected[2]),
    )
    assert failures == 2 + (model.descriptor["n_coda"] > 0)
    assert_same_bits(score_one(model, TAIL, 10, 4, prefix=deeper), expected[4])
    assert_same_bits(score_one(model, TAIL, 10, 2, prefix=prefix), expected[2])


@pytest.mark.parametrize("mode", FAULT_MODES)
@pytest.mark.parametrize("family", [family for family in KINDS if family != "hrm_text"])
def test_a_child_fails_clean(family: str, mode: str) -> None:
    with load_family(family, mode) as model, model.prefix(IDS[:40], depth=2) as parent:
        child, failures = fail_every_allocation(
            model, lambda: model.prefix(IDS[40:], 2, parent, upgradable=True)
        )
        assert failures == 2
        assert_same_bits(score_one(model, TAIL, 10, 2, prefix=child), expected_tail(model, 2))


def test_handles_fail_clean_and_all_together(model: Model) -> None:
    items = [(IDS, 59), (TAIL, 10)]
    (handle, other), failures = fail_every_allocation(
        model, lambda: model.start_many(*flat(items), 1, 4, keep_cache=True)
    )
    assert failures == 4
    single, failures = fail_every_allocation(model, lambda: model.start(IDS, 1, 4, keep_cache=False))
    assert failures == 1
    before = handle.logprobs

    def nothing_changed() -> None:
        assert [h.depth for h in (handle, other, single)] == [1, 1, 1]
        assert_same_bits(handle.logprobs, before)

    _, failures = fail_every_allocation(
        model, lambda: model.upgrade([handle, other, single], 3), nothing_changed
    )
    assert failures == 3 + 2 * (model.descriptor["n_coda"] > 0)
    for one, ids in ((handle, IDS), (other, TAIL), (single, IDS)):
        assert_same_bits(one.logprobs, model.score_tokens(ids, depth=3))
    with handle.prefix() as rows:
        expected = score_one(model, np.r_[IDS[:-1], TAIL], 10, 3)
        assert_same_bits(score_one(model, TAIL, 10, 3, prefix=rows), expected)


def test_generation_fails_clean_or_gets_by(model: Model) -> None:
    """Where a sequence can be put back instead, a failure is no failure, and the numbers are the same."""
    with model.prefix(IDS, depth=2) as prefix:
        requests = [
            GenerateRequest(TAIL, 270, depth=2, prefix=prefix, stop_ids=NO_STOP),
            GenerateRequest(TAIL[:3], 6, depth=2, temperature=1.0, stop_ids=NO_STOP),
        ]
        first, failures = fail_every_allocation(model, lambda: model.generate(requests[1:]))
        # Logits, which a GPU gives to memory of the host's, then a block of keys and values.
        assert failures == (1 if ON_GPU else 2)
        expected = model.generate(requests)
        assert_same_bits(expected[1].token_ids, first[0].token_ids)
        outcomes = set()
        for n in range(1, 6):
            model._fail_allocation(n)
            try:
                found = model.generate(requests)
            except OutOfMemoryError:
                outcomes.add("failed")
                continue
            outcomes.add("came through")
            for one, wanted in zip(found, expected, strict=True):
                assert_same_bits(one.token_ids, wanted.token_ids)
                assert_same_bits(one.logprobs, wanted.logprobs)
        assert outcomes == {"failed", "came through"}
        model._fail_allocation(0)


@pytest.mark.parametrize("family", ["ouro", "huginn"])
@pytest.mark.parametrize("mode", ["h_fp16", "h_int8", "h_int4"])
def test_a_rebuild_that_must_grow_fails_clean(family: str, mode: str) -> None:
    """A chain that is longer than any pass: scoring on it needs a larger buffer, once."""
    ids = random_ids(150)
    with load_family(family, mode) as large:
        expected = score_one(large, np.r_[ids, TAIL], 10, 2)
    with load_family(family, mode, max_seq_len=50) as model:
        parent = None
        for begin in (0, 50, 100):
            parent = model.prefix(ids[begin : begin + 50], 2, parent)
        report = model.memory_report()
        logprobs, failures = fail_every_allocation(
            model,
            lambda: score_one(model, TAIL, 10, 2, prefix=parent),
            lambda: assert_is(model.memory_report(), report),
        )
        assert failures == 2  # rebuilt keys and values, and their rotations
        assert_same_bits(logprobs, expected)
        grown = model.vram_usage_bytes
        assert_same_bits(score_one(model, TAIL, 10, 2, prefix=parent), expected)
        assert model.vram_usage_bytes == grown


def assert_is(found: object, expected: object) -> None:
    assert found == expected


def test_a_pool_fails_clean(model: Model) -> None:
    pool = PrefixPool(model, None)
    key, failures = fail_every_allocation(
        model,
        lambda: pool.create(IDS, 2, upgradable=True),
        lambda: assert_is((pool.keys(), pool.bytes, pool.evicted()), ([], 0, [])),
    )
    assert failures == 2
    with pool.get(key) as prefix:
        assert_same_bits(score_one(model, TAIL, 10, 2, prefix=prefix), expected_tail(model, 2))


def test_scoring_has_no_allocation_to_fail(model: Model) -> None:
    expected = model.score_tokens(IDS, depth=2)
    model._fail_allocation(1)
    assert_same_bits(model.score_tokens(IDS, depth=2), expected)
    with pytest.raises(OutOfMemoryError):
        model.prefix(IDS)


# ---- closing, in any order -----------------------------------------------------------------------


def test_a_model_and_its_handles_may_go_in_any_order() -> None:
    """All orders of six, a second close each; what it comes to is counted from outside in test_memory.py."""
    names = ("model", "parent", "child", "deeper", "handle", "pool")
    for order in itertools.permutations(names):
        model = load_family("ouro", max_seq_len=16)
        start = model.vram_usage_bytes
        parent = model.prefix(IDS[:4], depth=1)
        child = model.prefix(IDS[4:6], 1, parent)
        handle = model.start(TAIL[:4], 1, 2, child)
        pool = PrefixPool(model, None)
        pool.put(child)
        things: dict[str, Any] = {"model": model, "parent": parent, "child": child, "handle": handle}
        things |= {"deeper": parent.upgrade(2), "pool": pool}
        for name in order:
            things[name].close()
            things[name].close()
            assert things[name].closed
            if name != "model" and not model.closed:
                assert model.vram_usage_bytes >= start
        if order[-1] == "model":
            continue
        with pytest.raises(ClosedHandleError):
            model.score_tokens(TAIL)


@pytest.mark.parametrize("order", list(itertools.permutations(range(5))))
def test_the_memory_of_handles_goes_with_the_last_that_needs_it(order: tuple[int, ...]) -> None:
    with load_family("huginn", max_seq_len=16) as model:
        start = model.vram_usage_bytes
        parent = model.prefix(IDS[:4], depth=2)
        child = model.prefix(IDS[4:6], 2, parent)
        handle = model.start(TAIL[:4], 2, 3, child)
        things = [parent, child, handle, handle.prefix(), PrefixPool(model, None)]
        things[4].put(child)
        held = [model.vram_usage_bytes]
        for i in order:
            things[i].close()
            held.append(model.vram_usage_bytes)
        assert held == sorted(held, reverse=True)
        assert held[-1] == start < held[-2]


# ---- exit and fork -------------------------------------------------------------------------------

EVERY_HANDLE = """
import sys
import numpy as np
from tinyloop.native import GenerateRequest, PrefixPool, load_model
model = load_model(sys.argv[1], max_seq_len=64, threads=2)
ids = np.arange(20, dtype=np.int32)
parent = model.prefix(ids, depth=2)
child = model.prefix(ids, 2, parent)
deeper = parent.upgrade(3)
handle = model.start(ids, 1)
handle.upgrade(2)
rows = handle.prefix()
pool = PrefixPool(model, None)
key = pool.create(ids)
pool.put(child)
request = GenerateRequest(ids, 5, prefix=child, depth=2)
completion = model.generate([request])[0]
result = model.score(ids, np.array([0, 20]), np.array([3], np.int32))
"""


@pytest.mark.parametrize(
    "ending",
    ["", "del model", "model.close()", "sys.modules['kept'] = [model, child, handle, pool]", "1 / 0"],
)
def test_an_interpreter_may_exit_with_live_handles(ending: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", EVERY_HANDLE + ending, family_path("ouro")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if ending == "1 / 0":
        assert done.returncode == 1
        assert done.stderr.strip().endswith("ZeroDivisionError: division by zero")
    else:
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_every_handle_says_no_in_a_forked_child() -> None:
    model = load_family("ouro", threads=2)
    prefix, handle, pool = model.prefix(IDS, depth=2), model.start(IDS, 1), PrefixPool(model, None)
    key = pool.create(TAIL)
    before = model.vram_usage_bytes
    calls: list[Callable[[], object]] = [
        lambda: model.score_tokens(IDS),
        lambda: model.prefix(IDS),
        lambda: model.start(IDS, 1),
        lambda: model.upgrade([handle], 2),
        lambda: model.generate([GenerateRequest(IDS, 2)]),
        lambda: model.vram_usage_bytes,
        lambda: prefix.upgrade(3),
        lambda: prefix.bytes,
        lambda: handle.upgrade(2),
        lambda: handle.logprobs,
        lambda: handle.prefix(),
        lambda: PrefixPool(model, None),
        lambda: pool.create(IDS),
        lambda: pool.get(key),
        lambda: pool.find(TAIL),
        lambda: pool.evict(key),
        lambda: pool.bytes,
    ]
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        answer = "refused all"
        try:
            for i, call in enumerate(calls):
                try:
                    answer = f"call {i} gave {call()}"
                    break
                except ConcurrentUseError as error:
                    if "load it again after a fork" not in str(error):
                        answer = f"call {i}: {error}"
                        break
            for thing in (pool, handle, prefix, model):  # giving up is allowed
                thing.close()
        except BaseException as error:
            answer = repr(error)
        os.write(write, answer.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as said:
        assert said.read() == "refused all"
    os.waitpid(child, 0)
    assert model.vram_usage_bytes == before
    handle.upgrade(2)
    assert_same_bits(handle.logprobs, model.score_tokens(IDS, depth=2))
    with pool.get(key) as kept, prefix.upgrade(4) as deeper:
        assert_same_bits(kept.token_ids, TAIL)
        assert deeper.depth == 4
    model.close()


# ---- two threads ---------------------------------------------------------------------------------


def in_threads(*bodies: Callable[[], None]) -> None:
    """Runs them at once; what any of them raises, this does."""
    errors: list[BaseException] = []

    def run(body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    for error in errors:
        raise error


def test_a_handle_may_be_read_while_another_thread_upgrades_it() -> None:
    """A reader meets the numbers of one depth or of the next, whole."""
    with load_family("ouro") as model:
        expected = {depth: model.score_tokens(IDS, depth=depth) for depth in range(1, 41)}
        handle = model.start(IDS, 1, 40)
        met = set()
        reads, met_two = threading.Event(), threading.Event()

        def upgrade() -> None:
            assert reads.wait(60)
            for depth in range(2, 40):
                handle.upgrade(depth)
            assert met_two.wait(60)
            handle.upgrade(40)

        def read() -> None:
            while handle.depth < 40:
                logprobs, depth = handle.logprobs, handle.depth
                near = [d for d in range(1, depth + 1) if np.array_equal(logprobs, expected[d])]
                assert near
                met.add(near[-1])
                reads.set()
                if len(met) >= 2:
                    met_two.set()
                with handle.prefix() as rows:
                    assert rows.depth >= depth

        in_threads(upgrade, read)
        assert_same_bits(handle.logprobs, expected[40])


def test_two_threads_that_upgrade_one_handle_leave_it_whole() -> None:
    """Each call either runs or is refused at once; a refusal changes nothing."""
    with load_family("ouro") as model:
        expected = {depth: model.score_tokens(IDS, depth=depth) for depth in (1, 2, 3, 4)}
        refused = []

        def work(handles: list[Any]) -> None:
            for handle in handles:
                while handle.depth < 4:
                    try:
                        model.upgrade([handle], handle.depth + 1)
                    except ConcurrentUseError:
                        refused.append(1)
                    except Exception as error:
                        # The other thread came first.
                        if "it must be greater" not in str(error) and "max_depth=4" not in str(error):
                            raise
                    # Read at one moment: no bytecode of the other thread lies between.
                    assert any(np.array_equal(handle.logprobs, e) for e in expected.values())

        handles = [model.start(IDS, 1, 4, keep_cache=i % 2 == 0) for i in range(40)]
        start = model.memory_report()["resume"]
        in_threads(lambda: work(handles), lambda: work(handles[::-1]))
        assert model.memory_report()["resume"] == start
        for handle in handles:
            assert_same_bits(handle.logprobs, expected[4])


def test_handles_may_be_closed_while_another_thread_uses_them() -> None:
    with load_family("ouro", "h_int8") as model:
        start = model.vram_usage_bytes
        prefix, handle = model.prefix(IDS, depth=4), model.start(IDS, 1, 4)
        expected = model.generate([GenerateRequest(TAIL, 40, prefix=prefix, stop_ids=NO_STOP)])
        began = threading.Event()
        found = []

        def generate() -> None:
            request = GenerateRequest(TAIL, 40, prefix=prefix, stop_ids=NO_STOP)
            found.extend(model.generate([request], on_token=lambda *_: began.set()))

        def close() -> None:
            assert began.wait(60)
            prefix.close()
            handle.close()
            with pytest.raises(ClosedHandleError):
                handle.upgrade(2)

        in_threads(generate, close)
        assert_same_bits(found[0].logprobs, expected[0].logprobs)
        assert model.vram_usage_bytes == start


def test_a_model_may_be_closed_while_another_thread_generates() -> None:
    for _ in range(5):
        model = load_family("ouro")
        began = threading.Event()
        found = []

        def generate(model: Model = model, began: threading.Event = began, found: Any = found) -> None:
            request = GenerateRequest(TAIL, 100, stop_ids=NO_STOP)
            found.extend(model.generate([request], on_token=lambda *_: began.set()))

        def close(model: Model = model, began: threading.Event = began) -> None:
            assert began.wait(60)
            model.close()
            with pytest.raises(ClosedHandleError):
                model.score_tokens(IDS)

        in_threads(generate, close)
        assert len(found[0].token_ids) == 100


def test_two_models_of_one_file_do_not_meet(tmp_path: Path) -> None:
    with load_family("ouro") as one, load_model(family_path("ouro"), 64, threads=1) as other:
        expected = one.score_tokens(IDS)

        def work(model: Model) -> None:
            for _ in range(50):
                assert_same_bits(model.score_tokens(IDS), expected)

        in_threads(lambda: work(one), lambda: work(other))


# ---- interrupts and instances from nowhere --------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        "model.generate([GenerateRequest(ids[:20], 2000, stop_ids=[])] * 64)",
        "model.score_tokens(ids, depth=4000)",
        "model.prefix(ids, depth=2000)",
        "model.start(ids, 4000, keep_cache=False)",
    ],
)
def test_a_signal_ends_a_long_call_and_leaves_nothing(call: str) -> None:
    """The alarm's handler raises, as Ctrl-C's does; a call that did not look would take minutes."""
    program = f"""
import signal, sys
import numpy as np
from tinyloop.native import GenerateRequest, load_model

class Stop(Exception): ...
def stop(*_): raise Stop
signal.signal(signal.SIGALRM, stop)
ids = np.arange(50, dtype=np.int32)
with load_model({str(family_path("ouro"))!r}, 64, threads=1) as model:
    before = model.vram_usage_bytes
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        {call}
        sys.exit("the call ended by itself: make it longer")
    except Stop:
        pass
    assert model.vram_usage_bytes == before, model.memory_report()
    assert model.score_tokens(ids, depth=1).shape == (49,)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, timeout=100, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


LONG_CALLS = [
    "model.generate([GenerateRequest(ids[:20], 2000, stop_ids=[])] * 64)",
    "model.score_tokens(ids, depth=4000)",
    "model.prefix(ids, depth=4000)",
    "model.start(ids, 4000, keep_cache=False)",
    "pool.create(ids, depth=4000)",
    "shallow.upgrade(4000)",
    "other.generate([GenerateRequest(ids, 3, stop_ids=[])], on_token=score_long)",
]


@pytest.mark.parametrize("call", LONG_CALLS)
def test_a_long_call_of_a_daemon_thread_does_not_hold_the_exit_up(call: str) -> None:
    """The process ends at the call's next layer: not after the call, not by a crash, and in silence."""
    program = f"""
import threading
import numpy as np
from tinyloop.native import GenerateRequest, PrefixPool, load_model

ids = np.arange(50, dtype=np.int32)
path = {str(family_path("ouro"))!r}
model, other = load_model(path, 64, threads=1), load_model(path, 64, threads=1)
pool, shallow = PrefixPool(model, None), model.start(ids, 1, 4000, keep_cache=False)

def score_long(*_):
    model.score_tokens(ids, depth=4000)

def work():
    {call}
    print("the call ended by itself: make it longer")

passes = model.counters["passes"]
threading.Thread(target=work, daemon=True).start()
while model.counters["passes"] == passes:
    pass
"""
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, timeout=60, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


BOUND = [
    kind for kind in vars(core).values() if isinstance(kind, type) and not issubclass(kind, BaseException)
]


@pytest.mark.parametrize("kind", BOUND)
def test_no_bound_type_gives_an_object_with_nothing_behind_it(kind: type) -> None:
    """Neither by hand, nor through a subclass, nor as a copy: its first use would end the process."""

    class Sub(kind):  # type: ignore[misc, valid-type]
        pass

    for made in (kind, Sub):
        for make in (made.__new__, object.__new__):
            with pytest.raises(TypeError):
                make(made)
        with pytest.raises(TypeError):
            made()


def test_the_bound_types_are_the_ones_that_were_checked() -> None:
    made_by_the_engine = {"Model", "PrefixCache", "ResumeHandle", "ScoreResult", "Completion"}
    made_by_the_engine |= {"Generation", "GenerationStep"}
    names = {kind.__name__ for kind in BOUND}
    assert names == made_by_the_engine | {"GenerateRequest", "PrefixPool", "_PoolLedger"}
    for name in made_by_the_engine:
        with pytest.raises(TypeError, match="the engine's calls make them"):
            getattr(core, name)()


def test_what_has_a_constructor_is_made_by_it_alone() -> None:
    class Named(GenerateRequest):
        def __init__(self, name: str, ids: Ids) -> None:
            super().__init__(ids, 2, stop_ids=[])
            self.name = name

    plain, named = GenerateRequest(IDS[:5], 2, stop_ids=[]), Named("a", IDS[:5])
    with load_family("ouro") as model, PrefixPool(model, None) as pool:
        expected, found = model.generate([plain, named])
        assert_same_bits(found.token_ids, expected.token_ids)
        for whole in (plain, named, pool):
            with pytest.raises(TypeError):
                copy.copy(whole)
            with pytest.raises(TypeError):
                type(whole).__new__(type(whole), IDS[:5], 2)


def test_a_request_keeps_its_own_ids() -> None:
    with load_family("ouro") as model:
        ids = IDS[:20].copy()
        request = GenerateRequest(ids, 5, stop_ids=[])
        expected = model.generate([request])[0].token_ids
        ids[:] = 1
        assert_same_bits(model.generate([request])[0].token_ids, expected)


def test_daemon_threads_that_close_models_do_not_break_the_exit() -> None:
    """Closing takes the interpreter's lock back too, where an interpreter that ends would end the thread."""
    text = (
        "import threading; from tinyloop.native import load_model; "
        "from tinyloop.native.models import default_model_path as path; "
        "models = [load_model(path(), 64, threads=2) for _ in range(20)]; "
        "threading.Thread(target=lambda: [m.close() for m in models], daemon=True).start()"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_child_forked_beside_a_running_call_can_end() -> None:
    text = """
import os, sys, threading, numpy as np
from tinyloop.native import load_model
from tinyloop.native.models import default_model_path
model, ids = load_model(default_model_path(), 512, threads=1), np.arange(100, 500, dtype=np.int32)
started = threading.Event()
def work():
    while True:
        started.set()
        model.score_tokens(ids)
threading.Thread(target=work, daemon=True).start()
started.wait()
child = os.fork()
if child == 0:
    sys.exit(7)  # through the exit hooks, which must not wait for the parent's thread
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "7")
