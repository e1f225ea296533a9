"""Going deeper later: an upgraded handle has the bits of a run that was that deep from the start."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from engine_cases import random_ids, rounded
from stateful_cases import (
    KINDS,
    MODES,
    Ids,
    assert_same_bits,
    fail_every_allocation,
    flat,
    load_family,
    score_one,
)
from tiny_models import FAMILIES
from tinyloop.native import (
    ClosedHandleError,
    InvalidInputError,
    MismatchError,
    Model,
    PrefixCache,
    ResumeHandle,
)

IDS = random_ids(150)
TAIL = random_ids(20, seed=2)
DEPTHS = (1, 2, 3, 4)


@pytest.fixture
def ouro() -> Iterator[Model]:
    with load_family("ouro") as model:
        yield model


def disturb(model: Model) -> None:
    """Foreign forwards over every buffer: what a handle needs must be its own."""
    model.score_tokens(random_ids(256, seed=77), depth=3)
    with model.prefix(random_ids(200, seed=78), depth=2):
        pass


def start_on(
    model: Model, ids: Ids, depth: int, prefix: PrefixCache | None, *, keep_cache: bool = True
) -> ResumeHandle:
    return model.start(ids, depth, max(DEPTHS), prefix, keep_cache=keep_cache)


# ---- the bits of a full run ----------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_upgrades_have_the_bits_of_a_full_run(family: str, mode: str) -> None:
    """Chunked, with and without a cache of its own, by one loop and by two, with foreign calls between."""
    with load_family(family, mode, prefill_chunk=48) as model:
        full = {depth: model.score_tokens(IDS, depth=depth) for depth in DEPTHS}
        assert not np.array_equal(full[2], full[3])
        for keep_cache in (False, True):
            with start_on(model, IDS, 1, None, keep_cache=keep_cache) as handle:
                assert_same_bits(handle.logprobs, full[1])
                for depth in (2, 4):
                    disturb(model)
                    handle.upgrade(depth)
                    assert handle.depth == depth
                    assert_same_bits(handle.logprobs, full[depth])


@pytest.mark.parametrize("family", KINDS)
def test_greedy_flags_follow_the_depth(family: str) -> None:
    with load_family(family) as model, model.start(IDS, 1, 4) as handle:
        at_start = handle.greedy
        for depth in (1, 3):
            if depth > 1:
                handle.upgrade(depth)
            expected = model.score(*flat([(IDS, len(IDS) - 1)]), depth=depth)
            assert_same_bits(handle.greedy, expected.greedy)
        assert not np.array_equal(at_start, handle.greedy)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "hrm_text"])
def test_handles_on_a_prefix_go_deeper_with_it(family: str, mode: str) -> None:
    """On a chain of two prefixes that is itself upgraded: the planes come in pieces from four handles."""
    full = {}
    with load_family(family, mode, prefill_chunk=48) as model:
        for depth in (2, 4):
            full[depth] = score_one(model, IDS, 49, depth)
        states = {"depth": 2, "upgradable": True}
        with model.prefix(IDS[:40], **states) as a, model.prefix(IDS[40:100], parent=a, **states) as b:
            with start_on(model, IDS[100:], 2, b) as handle:
                assert_same_bits(handle.logprobs, full[2])
                with a.upgrade(4) as deep_a, b.upgrade(4, parent=deep_a) as deep_b:
                    disturb(model)
                    assert_same_bits(score_one(model, IDS[100:], 49, 4, prefix=deep_b), full[4])
                    handle.upgrade(4, prefix=deep_b)
                    assert_same_bits(handle.logprobs, full[4])
                # The prefixes it stands on are closed: it holds its share of them.
                with handle.prefix() as whole:
                    expected = score_one(model, np.concatenate([IDS[:-1], TAIL]), 19, 4)
                    assert_same_bits(score_one(model, TAIL, 19, 4, prefix=whole), expected)
            assert_same_bits(score_one(model, IDS[100:], 49, 2, prefix=b), full[2])  # as it was


@pytest.mark.parametrize("mode", ["fp16", "h_int4"])
@pytest.mark.parametrize("family", KINDS)
def test_a_packed_upgrade_is_each_by_itself(family: str, mode: str) -> None:
    """Handles at different depths, with and without prefixes, in more rows than one pass holds."""
    lengths = (2, 3, 64, 65, 120, 150)
    with load_family(family, mode, prefill_chunk=48) as model:
        handles, expected = [], []
        prefix = None if family == "hrm_text" else model.prefix(random_ids(70), depth=4, upgradable=False)
        shared = prefix if prefix is not None and not model.descriptor["n_coda"] else None
        for i, n in enumerate(lengths):
            ids = random_ids(n, seed=n)
            base = shared if i % 2 else None
            handles.append(start_on(model, ids, 1 + i % 3, base, keep_cache=bool(i % 2)))
            expected.append(score_one(model, ids, n - 1, 4, prefix=base))
        passes = model.counters["passes"]
        model.upgrade(handles[::-1], 4)
        assert model.counters["passes"] - passes < len(handles)
        for handle, logprobs in zip(handles, expected, strict=True):
            assert handle.depth == 4
            assert_same_bits(handle.logprobs, logprobs)
            handle.close()


@pytest.mark.parametrize("n_scored", [1, 7, 149])
def test_only_the_scored_ids_are_kept(ouro: Model, n_scored: int) -> None:
    with ouro.start(IDS, 1, 3, n_scored=n_scored) as handle:
        handle.upgrade(3)
        assert_same_bits(handle.logprobs, score_one(ouro, IDS, n_scored, 3))
        assert handle.greedy.shape == (n_scored,)
        assert (handle.length, handle.max_depth) == (149, 3)


def test_start_many_is_start_for_each(ouro: Model) -> None:
    items = [(random_ids(n, seed=n), n // 2) for n in (2, 50, 90, 200, 11)]
    handles = ouro.start_many(*flat(items), 2, 4)
    for (ids, n_scored), handle in zip(items, handles, strict=True):
        assert_same_bits(handle.logprobs, score_one(ouro, ids, n_scored, 2))
    ouro.upgrade(handles, 4)
    for (ids, n_scored), handle in zip(items, handles, strict=True):
        assert_same_bits(handle.logprobs, score_one(ouro, ids, n_scored, 4))


@pytest.mark.parametrize("mode", ["fp16", "h_int8"])
def test_starting_and_deepening_pack_as_scoring_does(mode: str) -> None:
    """One rule cuts passes for all of them: the same rows on the same prefixes are the same passes."""
    with load_family("ouro", mode) as model:
        passes = model.counters["passes"]

        def ran() -> int:
            nonlocal passes
            before, passes = passes, model.counters["passes"]
            return passes - before

        # Too many rows for one pass, and too many prefixes for the rebuilt keys of a hidden mode.
        bases = [model.prefix(random_ids(150, seed=seed), depth=2) for seed in range(3)]
        prefixes = [(None, *bases)[i % 4] for i in range(16)]
        items = [(random_ids(20 + i, seed=i), 3) for i in range(16)]
        ran()
        model.score(*flat(items), prefixes=prefixes, depth=2)
        scored = ran()
        handles = model.start_many(*flat(items), 1, 2, prefixes=prefixes)
        assert ran() == scored > 1
        model.upgrade(handles, 2)
        assert ran() == scored


def test_the_same_handle_twice_in_one_upgrade_is_upgraded_once(ouro: Model) -> None:
    with ouro.start(IDS, 1, 4) as handle:
        size = handle.bytes
        ouro.upgrade([handle, handle], 3)
        assert_same_bits(handle.logprobs, ouro.score_tokens(IDS, depth=3))
        assert handle.bytes == size


def test_nothing_to_start_or_upgrade_is_nothing(ouro: Model) -> None:
    assert ouro.start_many(*flat([(IDS[:0], 1)])[:1], np.zeros(1, np.int64), np.zeros(0, np.int32), 1) == []
    ouro.upgrade([], 3)


def test_an_upgrade_runs_only_the_missing_loops() -> None:
    """The price is the missing loops': a wrong old state that survives says that nothing was recomputed."""
    with load_family("huginn") as model, model.start(IDS, 1, 4, keep_cache=False) as handle:
        rows = model.counters["rows"]
        handle.upgrade(4)
        assert model.counters["rows"] - rows == len(IDS) - 1


# ---- a handle's rows as a prefix -----------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", KINDS)
def test_a_handles_prefix_outlives_it_and_its_upgrades(family: str, mode: str) -> None:
    with load_family(family, mode) as model:
        longer = np.concatenate([IDS[:-1], TAIL])
        expected = {depth: score_one(model, longer, 19, depth) for depth in (2, 3, 4)}
        handle = start_on(model, IDS, 2, None)
        early = handle.prefix()
        handle.upgrade(4)
        late = handle.prefix()
        handle.close()
        disturb(model)
        assert (early.depth, late.depth) == (2, 4)
        assert_same_bits(score_one(model, TAIL, 19, 2, prefix=early), expected[2])
        assert_same_bits(score_one(model, TAIL, 19, 4, prefix=late), expected[4])
        # Its own upgrade must not write where the handle's went.
        with early.upgrade(3) as between:
            assert_same_bits(score_one(model, TAIL, 19, 3, prefix=between), expected[3])
        assert_same_bits(score_one(model, TAIL, 19, 4, prefix=late), expected[4])


@pytest.mark.parametrize("mode", MODES)
def test_a_prompt_stays_a_prompt_when_its_handle_or_prefix_goes_deeper(mode: str) -> None:
    """A prefix-LM handle whose first 20 ids see each other both ways, and what is made of it."""
    prompt = np.array([20], np.int32)
    longer = np.concatenate([IDS[:-1], TAIL])
    with load_family("hrm_text", mode, prefill_chunk=16) as model:
        expected = score_one(model, longer, 19, 4, prompt_len=20)
        assert not np.array_equal(expected, score_one(model, longer, 19, 4))
        (handle,) = model.start_many(*flat([(IDS, 149)]), 1, 4, keep_cache=True, prompt_lens=prompt)
        with handle.prefix() as shallow, shallow.upgrade(4) as deep:
            assert_same_bits(score_one(model, TAIL, 19, 4, prefix=deep), expected)
        handle.upgrade(4)
        assert_same_bits(handle.logprobs, score_one(model, IDS, 149, 4, prompt_len=20))
        with handle.prefix() as prefix:
            assert_same_bits(score_one(model, TAIL, 19, 4, prefix=prefix), expected)


@pytest.mark.parametrize("mode", MODES)
def test_a_whole_prompt_prefix_goes_deeper(mode: str) -> None:
    with load_family("hrm_text", mode, prefill_chunk=16) as model, model.prefix(IDS, depth=1) as prefix:
        expected = score_one(model, np.concatenate([IDS, TAIL]), 19, 3, prompt_len=len(IDS))
        with prefix.upgrade(2) as deeper, deeper.upgrade(3) as deepest:
            assert_same_bits(score_one(model, TAIL, 19, 3, prefix=deepest), expected)
            with pytest.raises(MismatchError, match="prefix-LM"):
                model.prefix(TAIL, depth=3, parent=deepest)


# ---- failures change nothing ---------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["fp16", "h_int4"])
@pytest.mark.parametrize("family", KINDS)
def test_a_failed_upgrade_leaves_depth_numbers_and_memory(family: str, mode: str) -> None:
    with load_family(family, mode) as model:
        handles = [
            start_on(model, IDS[:n], 1, None, keep_cache=keep) for n, keep in ((90, True), (60, False))
        ]
        before = [handle.logprobs for handle in handles]
        sizes = [handle.bytes for handle in handles]

        def nothing_changed() -> None:
            for handle, logprobs, size in zip(handles, before, sizes, strict=True):
                assert (handle.depth, handle.bytes) == (1, size)
                assert_same_bits(handle.logprobs, logprobs)

        _, failures = fail_every_allocation(model, lambda: model.upgrade(handles, 3), nothing_changed)
        assert failures >= 2  # the states of each
        for handle, n in zip(handles, (90, 60), strict=True):
            assert_same_bits(handle.logprobs, model.score_tokens(IDS[:n], depth=3))


def test_one_bad_handle_fails_all(ouro: Model) -> None:
    good, shallow = ouro.start(IDS, 1, 4), ouro.start(IDS, 1, 2)
    before = good.logprobs
    with pytest.raises(MismatchError, match=r"handle 1 to depth 3: it was started with max_depth=2"):
        ouro.upgrade([good, shallow], 3)
    assert good.depth == 1
    assert_same_bits(good.logprobs, before)


# ---- what is refused -----------------------------------------------------------------------------


def test_depths_that_no_handle_has_are_refused(ouro: Model) -> None:
    with pytest.raises(InvalidInputError, match=r"depth 3 with max_depth=2"):
        ouro.start(IDS, 3, 2)
    for depth in (0, -1, 100_000):
        with pytest.raises(InvalidInputError, match=f"depth {depth}"):
            ouro.start(IDS, depth, 100_000)
    with ouro.start(IDS, 2, 3) as handle:
        with pytest.raises(MismatchError, match=r"to depth 4: it was started with max_depth=3"):
            handle.upgrade(4)
        for depth in (1, 2):
            with pytest.raises(MismatchError, match=rf"from depth 2 to {depth}: it must be greater"):
                handle.upgrade(depth)
        with pytest.raises(InvalidInputError, match="depth 0"):
            handle.upgrade(0)
        assert handle.depth == 2


@pytest.mark.parametrize("n_scored", [0, -1, 150])
def test_counts_of_scored_ids_out_of_range_are_refused(ouro: Model, n_scored: int) -> None:
    with pytest.raises(InvalidInputError, match=f"{n_scored}"):
        ouro.start(IDS, 1, n_scored=n_scored)


def test_a_handle_of_another_model_is_refused(ouro: Model) -> None:
    with load_family("ouro") as other, other.start(IDS, 1) as foreign, other.prefix(IDS[:5]) as prefix:
        with pytest.raises(MismatchError, match="handle 0: it belongs to another model"):
            ouro.upgrade([foreign], 2)
        with pytest.raises(MismatchError, match="belongs to another model"):
            ouro.start(IDS, 1, prefix=prefix)
        with ouro.start(IDS, 1) as own, pytest.raises(MismatchError, match="belongs to another model"):
            own.upgrade(2, prefix=prefix)


def test_a_prefix_of_other_tokens_is_refused(ouro: Model) -> None:
    other = IDS[:30].copy()
    other[29] ^= 1
    with ouro.prefix(IDS[:30], depth=2) as right, ouro.start(IDS[30:], 2, prefix=right) as handle:
        for ids in (other, IDS[:29], IDS[:31]):
            with ouro.prefix(ids, depth=4) as wrong:
                with pytest.raises(MismatchError, match="its token ids are not those"):
                    handle.upgrade(4, prefix=wrong)
                with pytest.raises(MismatchError, match="its token ids are not those"):
                    right.upgrade(4, parent=wrong)
        with pytest.raises(MismatchError, match="upgrade the prefix first"):
            handle.upgrade(4)
        # The same tokens, cut elsewhere, are the same prefix.
        with ouro.prefix(IDS[:11], depth=4) as a, ouro.prefix(IDS[11:30], depth=4, parent=a) as b:
            handle.upgrade(4, prefix=b)
        assert_same_bits(handle.logprobs, score_one(ouro, IDS, 119, 4))


def test_a_handle_stays_on_the_prefix_of_its_last_upgrade(ouro: Model) -> None:
    with ouro.prefix(IDS[:70], depth=1) as prefix, ouro.start(IDS[70:], 1, prefix=prefix) as handle:
        with prefix.upgrade(4) as deep:
            handle.upgrade(2, prefix=deep)
        handle.upgrade(3)
        assert_same_bits(handle.logprobs, score_one(ouro, IDS, 79, 3))


def test_prefixes_for_handles_are_one_for_each(ouro: Model) -> None:
    with ouro.start(IDS, 1) as handle, pytest.raises(InvalidInputError, match="1 handles on 2 prefixes"):
        ouro.upgrade([handle], 2, prefixes=[None, None])


def test_a_handle_without_a_cache_is_no_prefix(ouro: Model) -> None:
    with ouro.start(IDS, 1, keep_cache=False) as handle, pytest.raises(MismatchError, match="keep_cache"):
        handle.prefix()


def test_a_closed_handle_says_so() -> None:
    model = load_family("ouro")
    closed, kept = model.start(IDS, 1), model.start(IDS, 1)
    closed.close()
    closed.close()
    assert closed.closed
    for use in (
        lambda: closed.upgrade(2),
        lambda: closed.logprobs,
        lambda: closed.prefix(),
        lambda: model.upgrade([kept, closed], 2),
    ):
        with pytest.raises(ClosedHandleError, match=r"(resume handle|handle 1): it was closed"):
            use()
    assert kept.depth == 1
    model.close()
    for use in (lambda: kept.upgrade(2), lambda: kept.greedy, lambda: kept.prefix(), lambda: kept.bytes):
        with pytest.raises(ClosedHandleError, match="its model was closed"):
            use()
    kept.close()


# ---- prefixes that go deeper ---------------------------------------------------------------------


def test_a_prefix_is_upgraded_on_a_parent_that_is_deep_enough(ouro: Model) -> None:
    a = ouro.prefix(IDS[:40], depth=2)
    b = ouro.prefix(IDS[40:70], depth=2, parent=a)
    c = ouro.prefix(IDS[70:100], depth=2, parent=b)
    with pytest.raises(MismatchError, match="built at depth 2; upgrade the prefix first"):
        c.upgrade(3)
    deep_b = b.upgrade(4, parent=a.upgrade(4))
    deep_c = c.upgrade(3, parent=deep_b)  # shallower than its parent, which is allowed
    assert (deep_c.depth, deep_c.length, deep_c.own_length) == (3, 100, 30)
    assert_same_bits(deep_c.token_ids, IDS[:100])
    for depth in (1, 2, 3):
        found = score_one(ouro, IDS[100:], 49, depth, prefix=deep_c)
        assert_same_bits(found, score_one(ouro, IDS, 49, depth))
    with pytest.raises(MismatchError, match="depth 4"):
        score_one(ouro, IDS[100:], 49, 4, prefix=deep_c)


def test_a_prefix_without_states_stays_as_deep_as_it_is(ouro: Model) -> None:
    with ouro.prefix(IDS, depth=2, upgradable=False) as prefix:
        assert not prefix.upgradable
        with pytest.raises(MismatchError, match="kept no states"):
            prefix.upgrade(3)
    with load_family("llama") as plain, plain.prefix(IDS) as prefix:
        assert not prefix.upgradable  # one loop: nowhere to go unless asked for
        with plain.prefix(IDS, upgradable=True) as kept, kept.upgrade(2) as deeper:
            assert deeper.depth == 2


def test_an_upgraded_prefix_shares_the_planes_of_the_old_one(ouro: Model) -> None:
    start = ouro.vram_usage_bytes
    old = ouro.prefix(IDS, depth=2)
    new = old.upgrade(4)
    # Keys and values of two layers and two loops in FP16, of the old loops and of the new ones.
    planes = 2 * rounded(len(IDS) * 2 * 2 * 2 * 64 * 2)
    states = rounded(len(IDS) * 48 * 4)
    assert new.bytes == planes + states
    assert ouro.vram_usage_bytes - start == planes + 2 * states  # the planes once, the states twice
    old.close()
    assert ouro.vram_usage_bytes - start == planes + states
    assert_same_bits(score_one(ouro, TAIL, 19, 4, prefix=new), score_one(ouro, np.r_[IDS, TAIL], 19, 4))


@pytest.mark.parametrize("family", ["loop_range", "huginn"])
def test_a_coda_serves_its_own_depth_alone(family: str) -> None:
    with load_family(family) as model, model.prefix(IDS, depth=3) as prefix, prefix.upgrade(4) as deeper:
        for depth in (1, 2, 4):
            with pytest.raises(MismatchError, match=r"belong to that depth alone|upgrade the prefix first"):
                score_one(model, TAIL, 19, depth, prefix=prefix)
        for depth, handle in ((3, prefix), (4, deeper)):
            expected = score_one(model, np.r_[IDS, TAIL], 19, depth)
            assert_same_bits(score_one(model, TAIL, 19, depth, prefix=handle), expected)
