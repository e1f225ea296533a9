"""The sampler against a plain NumPy one: the same ids and log-probabilities, the stated frequencies."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tinyloop.native import InvalidInputError, TinyLoopError
from tinyloop.native._core import _sample

Logits = NDArray[np.float32]
Ids = NDArray[np.int32]
NOTHING_SEEN: Ids = np.zeros(0, np.int32)
MASK = 2**64 - 1

# Sums of some thousand doubles in another order: a border of the cumulative sum moves by no more.
SUM_RTOL = 1e-12
# float32 of a double: one rounding of a value below 2**7 in size.
LOGPROB_ATOL = 2.0**-18


@dataclass(frozen=True)
class Options:
    repetition_penalty: float = 1.0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def draw(logits: Logits, options: Options, seen: Ids = NOTHING_SEEN, seed: int = 0, position: int = 0) -> int:
    return _sample(logits, seen, seed=seed, position=position, **asdict(options))[0]


def mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def uniform(seed: int, position: int) -> float:
    key = mix((seed + 0x9E3779B97F4A7C15) & MASK)
    row = mix((key + position * 0x9E3779B97F4A7C15) & MASK)
    return (mix((row + 2**63 * 0xD1B54A32D192ED03) & MASK) >> 11) * 2.0**-53


def penalized(logits: Logits, penalty: float, seen: Ids) -> NDArray[np.float64]:
    values = logits.astype(np.float64)
    for i in set(seen.tolist()):
        values[i] = values[i] / penalty if values[i] > 0 else values[i] * penalty
    return values


def distribution(logits: Logits, options: Options, seen: Ids) -> tuple[Ids, NDArray[np.float64]]:
    """Ids in the order of the draw and their probabilities; everything sorted, nothing clever."""
    values = penalized(logits, options.repetition_penalty, seen)
    order = np.lexsort((np.arange(len(values)), -values)).astype(np.int32)
    if options.temperature == 0:
        return order[:1], np.ones(1)
    weights = np.exp((values[order] - values.max()) / options.temperature)
    if options.top_k:
        order, weights = order[: options.top_k], weights[: options.top_k]
    if options.top_p < 1:
        shares = np.cumsum(weights / weights.sum())
        kept = 1 + int(np.searchsorted(shares, options.top_p * (1 - SUM_RTOL)))
        order, weights = order[:kept], weights[:kept]
    large = weights >= options.min_p * weights[0]
    return order[large], weights[large] / weights[large].sum()


options_strategy = st.builds(
    Options,
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7, 2.5]),
    temperature=st.sampled_from([0.0, 1e-6, 0.3, 1.0, 2.0, 50.0]),
    top_k=st.sampled_from([0, 1, 2, 7, 64, 65, 1000]),
    top_p=st.sampled_from([1.0, 1e-9, 0.1, 0.5, 0.9, 0.999999]),
    min_p=st.sampled_from([0.0, 1e-3, 0.05, 0.5, 1.0]),
)


@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 700),
    st.booleans(),
    options_strategy,
    st.integers(0, MASK),
    st.integers(0, 2**40),
)
@settings(max_examples=400, deadline=None)
def test_draw_is_the_one_of_the_plain_sampler(
    rng_seed: int, vocab: int, coarse: bool, options: Options, seed: int, position: int
) -> None:
    rng = np.random.default_rng(rng_seed)
    logits = (4 * rng.standard_normal(vocab)).astype(np.float32)
    if coarse:  # many ties
        logits = np.rint(logits)
    seen = rng.integers(0, vocab, rng.integers(0, 20)).astype(np.int32)
    ids, shares = distribution(logits, options, seen)
    sums = np.cumsum(shares)
    u = uniform(seed, position)
    found = draw(logits, options, seen, seed, position)
    # A draw within rounding of a border may fall to either side; so may the last id of a top-p set.
    at = int(np.searchsorted(sums, u, side="right"))
    near = {
        ids[min(i, len(ids) - 1)] for i in (at, *np.flatnonzero(np.abs(sums - u) < SUM_RTOL), len(ids) - 1)
    }
    exact = np.abs(sums - u).min() > SUM_RTOL
    assert found == ids[at] if exact else found in near


@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 5, 300, 5000]), st.sampled_from([1.0, 1.7]))
@settings(max_examples=60, deadline=None)
def test_logprob_is_of_the_logits_as_given(rng_seed: int, vocab: int, penalty: float) -> None:
    rng = np.random.default_rng(rng_seed)
    logits = (6 * rng.standard_normal(vocab)).astype(np.float32)
    seen = rng.integers(0, vocab, 3).astype(np.int32)
    found, logprob = _sample(
        logits, seen, temperature=3.0, repetition_penalty=penalty, top_k=40, seed=rng_seed, position=3
    )
    wide = logits.astype(np.float64)
    expected = wide[found] - wide.max() - np.log(np.exp(wide - wide.max()).sum())
    assert abs(logprob - expected) <= LOGPROB_ATOL
    assert logprob == np.float32(logprob)


def chi_square(counts: NDArray[np.int64], shares: NDArray[np.float64]) -> float:
    expected = shares * counts.sum()
    return float(np.sum((counts - expected) ** 2 / expected))


# With 11 degrees of freedom a fair sampler is above this once in 10**4; the seeds are fixed.
CHI_SQUARE_11 = 37.4
DRAWS = 20000


@pytest.mark.parametrize("by", ["position", "seed"])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_frequencies_are_the_probabilities(by: str, temperature: float) -> None:
    logits = np.random.default_rng(5).standard_normal(12).astype(np.float32)
    options = Options(temperature=temperature)
    found = [draw(logits, options, **{by: i}) for i in range(DRAWS)]
    ids, shares = distribution(logits, options, NOTHING_SEEN)
    counts = np.bincount(found, minlength=12)[ids]
    assert chi_square(counts, shares) < CHI_SQUARE_11


def test_neighbouring_draws_do_not_depend_on_each_other() -> None:
    """Pairs of draws at consecutive positions: 16 cells, 15 degrees of freedom, once in 10**4 above 44.3."""
    logits = np.zeros(4, np.float32)
    options = Options(temperature=1.0)
    found = np.array([draw(logits, options, seed=9, position=i) for i in range(DRAWS)])
    pairs = np.bincount(4 * found[:-1] + found[1:], minlength=16)
    assert chi_square(pairs, np.full(16, 1 / 16)) < 44.3


def test_frequencies_within_a_nucleus_are_renormalised() -> None:
    """8 ids left of 40 by top-k, then fewer by top-p and min-p."""
    logits = np.random.default_rng(8).standard_normal(40).astype(np.float32)
    options = Options(temperature=1.2, top_k=12, top_p=0.9, min_p=0.2)
    ids, shares = distribution(logits, options, NOTHING_SEEN)
    assert 3 <= len(ids) < 12
    found = np.array([draw(logits, options, seed=1, position=i) for i in range(DRAWS)])
    assert set(found) == set(ids.tolist())
    assert chi_square(np.bincount(found, minlength=40)[ids], shares) < CHI_SQUARE_11


def test_temperature_zero_takes_the_largest_and_the_lower_id_on_ties() -> None:
    logits = np.array([1, 3, -2, 3, 0], np.float32)
    assert draw(logits, Options()) == 1
    assert draw(logits, Options(repetition_penalty=2.0), np.array([1], np.int32)) == 3
    # 3 / 2 for both, then 1 for id 0: the penalty is not applied once more for a repeated id.
    assert draw(logits, Options(repetition_penalty=2.0), np.array([3, 1, 1, 1, 1], np.int32)) == 1


def test_penalty_moves_negative_logits_down() -> None:
    logits = np.array([-1, -1.5], np.float32)
    assert draw(logits, Options(repetition_penalty=2.0), np.array([0], np.int32)) == 1


def test_lower_ids_win_at_the_border_of_top_k() -> None:
    logits = np.array([0, 2, 1, 1, 1, 1], np.float32)
    found = {draw(logits, Options(temperature=5.0, top_k=3), position=i) for i in range(200)}
    assert found == {1, 2, 3}


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.125])).astype(np.float32)

    def kept(top_p: float) -> set[int]:
        return {draw(logits, Options(temperature=1.0, top_p=top_p), position=i) for i in range(400)}

    assert kept(1e-12) == {0}
    assert kept(0.49) == {0}
    assert kept(0.51) == {0, 1}
    assert kept(0.76) == {0, 1, 2}
    assert kept(1.0) == {0, 1, 2, 3}


def test_min_p_is_relative_to_the_largest() -> None:
    logits = np.log(np.array([0.6, 0.29, 0.11])).astype(np.float32)
    found = {draw(logits, Options(temperature=1.0, min_p=0.45), position=i) for i in range(400)}
    assert found == {0, 1}


def test_ids_at_minus_infinity_never_come() -> None:
    logits = np.full(300, -np.inf, np.float32)
    logits[[7, 200]] = 0
    found = {draw(logits, Options(temperature=1.0), position=i) for i in range(200)}
    assert found == {7, 200}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_without_a_distribution_are_refused(bad: float, temperature: float) -> None:
    logits = np.zeros(100, np.float32)
    logits[50] = bad
    with pytest.raises(TinyLoopError, match="100 logits"):
        draw(logits, Options(temperature=temperature))
    with pytest.raises(TinyLoopError, match="3 logits"):
        draw(np.full(3, -np.inf, np.float32), Options(temperature=temperature))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("temperature", -0.5),
        ("temperature", float("inf")),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", float("nan")),
        ("min_p", -1e-9),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
    ],
)
def test_option_out_of_range_is_named_with_its_value(option: str, value: float) -> None:
    with pytest.raises(InvalidInputError, match=rf"{option}={value:g}: it must be"):
        _sample(np.zeros(4, np.float32), NOTHING_SEEN, **{option: value})  # type: ignore[arg-type]


def test_seen_id_outside_the_vocabulary_is_named() -> None:
    for bad in (-1, 4):
        with pytest.raises(InvalidInputError, match=f"seen id {bad} .* vocabulary of 4"):
            draw(np.zeros(4, np.float32), Options(repetition_penalty=1.1), np.array([bad], np.int32))
