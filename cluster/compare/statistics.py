"""Statistics of pairs, in memory that does not grow with their number. Pure; every formula is named."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

# Width of a bucket of differences: a quantile is at most so much above the true one.
RESOLUTION = 0.02
# Two-sided 95 % of a normal distribution.
Z95 = 1.959964


def mcnemar_exact(only_a: int, only_b: int) -> float:
    """Two-sided exact p-value of McNemar's test.

    The chance of a split of the discordant pairs at least as uneven as this, if each fell to either side like
    a fair coin: min(1, 2 sum_{k <= min} C(n, k) / 2^n), n = only_a + only_b. 1 without discordant pairs.
    """
    n, least = only_a + only_b, min(only_a, only_b)
    if n == 0:
        return 1.0
    log_term = math.lgamma(n + 1) - math.lgamma(least + 1) - math.lgamma(n - least + 1) - n * math.log(2)
    # From the largest term down; each is the one above times k / (n - k + 1).
    total = ratio = 1.0
    for k in range(least, 0, -1):
        ratio *= k / (n - k + 1)
        total += ratio
        if ratio < 1e-17 * total:
            break
    return min(1.0, 2 * math.exp(log_term) * total)


def paired_interval(only_a: int, only_b: int, n: int) -> tuple[float, float]:
    """95 % interval of accuracy B less accuracy A over n pairs.

    Wald's for paired shares: d +- 1.96 sqrt((b + c) - (b - c)^2 / n) / n, d = (c - b) / n, with b pairs that
    A alone has right and c that B alone has.
    """
    if n == 0:
        return 0.0, 0.0
    difference = (only_b - only_a) / n
    variance = (only_a + only_b) - (only_b - only_a) ** 2 / n
    half = Z95 * math.sqrt(max(0.0, variance)) / n
    return difference - half, difference + half


@dataclass(slots=True)
class Mean:
    """Mean and variance of a stream (Welford's recurrence)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        delta = value - self.mean
        self.mean += delta / self.count
        self.squares += delta * (value - self.mean)

    @property
    def half_width(self) -> float:
        """Half of the 95 % interval of the mean: 1.96 s / sqrt(n), by the central limit theorem."""
        if self.count < 2:
            return 0.0
        return Z95 * math.sqrt(self.squares / (self.count - 1) / self.count)


@dataclass(slots=True)
class Magnitudes:
    """Sizes of differences: how many are exactly zero, the largest, quantiles to within 2 %."""

    count: int = 0
    zeros: int = 0
    largest: float = 0.0
    total: float = 0.0
    buckets: Counter[int] = field(default_factory=Counter)

    def add(self, size: float) -> None:
        """size: finite, not negative."""
        self.count += 1
        self.total += size
        self.largest = max(self.largest, size)
        if size == 0.0:
            self.zeros += 1
        else:
            self.buckets[math.floor(math.log(size) / math.log1p(RESOLUTION))] += 1

    def quantile(self, share: float) -> float:
        """The smallest bucket's end that at least this share of the sizes do not exceed."""
        wanted, found = math.ceil(share * self.count), self.zeros
        if found >= wanted:
            return 0.0
        for bucket, number in sorted(self.buckets.items()):
            found += number
            if found >= wanted:
                return min(self.largest, (1 + RESOLUTION) ** (bucket + 1))
        return self.largest
