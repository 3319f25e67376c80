"""How long responses are where only their mean and their bound are known."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Lengths:
    """The maximum-entropy distribution of lengths in [0, bound] with a given mean: density ~ exp(-rate * x).

    rate: 0 is uniform; below 0 most lengths are near the bound (Jaynes, Phys. Rev. 106, 1957).
    """

    rate: float
    bound: float

    @classmethod
    def with_mean(cls, mean: float, bound: float) -> Lengths:
        """Find the rate by bisection. A mean at the bound itself gives the steepest slope that is tried."""
        low, high = -200 / bound, 200 / bound
        for _ in range(80):
            middle = (low + high) / 2
            low, high = (middle, high) if cls(middle, bound).mean > mean else (low, middle)
        return cls((low + high) / 2, bound)

    @property
    def mean(self) -> float:
        """1 / rate - bound / (exp(rate * bound) - 1)."""
        steepness = self.rate * self.bound
        if abs(steepness) < 1e-6:
            return self.bound / 2
        return 1 / self.rate - self.bound / math.expm1(steepness)

    def survival(self, length: float) -> float:
        """Return the share of responses longer than `length`."""
        if length >= self.bound:
            return 0.0
        if abs(self.rate * self.bound) < 1e-6:
            return 1 - length / self.bound
        whole = math.expm1(-self.rate * self.bound)
        return (math.exp(-self.rate * length) - 1 - whole) / -whole

    def quantile(self, share: float) -> float:
        """Return the length that `share` of the responses do not exceed."""
        if abs(self.rate * self.bound) < 1e-6:
            return share * self.bound
        return -math.log1p(share * math.expm1(-self.rate * self.bound)) / self.rate
