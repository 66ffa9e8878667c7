"""Number, sum, sum of squares, minimum and maximum of numbers, added up exactly.

So the order in which parts are put together changes no bit of the mean and the deviation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64] | npt.NDArray[np.int64]

_MANTISSA_BITS = 53
_ROOT_BITS = 64
_SCALE = 1074 + _MANTISSA_BITS  # every double is a whole number of 2 ** -_SCALE


@dataclass(slots=True)
class Moments:
    """Of no numbers, at first.

    Attributes:
        total: sum, in units of 2 ** -_SCALE.
        squares: sum of squares, in units of 2 ** (-2 * _SCALE).
    """

    count: int = 0
    total: int = 0
    squares: int = 0
    smallest: float = float("inf")
    largest: float = float("-inf")

    def add(self, numbers: Numbers) -> None:
        """Adds finite numbers."""
        if not len(numbers):
            return
        self.count += len(numbers)
        self.smallest = min(self.smallest, numbers.min().item())
        self.largest = max(self.largest, numbers.max().item())
        if numbers.dtype.kind == "i":
            self._add(numbers, _SCALE)
            return
        mantissas, exponents = np.frexp(numbers)
        whole = np.ldexp(mantissas, _MANTISSA_BITS).astype(np.int64)
        for exponent in np.unique(exponents).tolist():
            self._add(whole[exponents == exponent], exponent - _MANTISSA_BITS + _SCALE)

    def _add(self, whole: npt.NDArray[Any], shift: int) -> None:
        values = whole.tolist()
        self.total += sum(values) << shift
        self.squares += sum(value * value for value in values) << (2 * shift)

    def merge(self, other: Moments) -> None:
        """Adds what another has."""
        self.count += other.count
        self.total += other.total
        self.squares += other.squares
        self.smallest = min(self.smallest, other.smallest)
        self.largest = max(self.largest, other.largest)

    @property
    def mean(self) -> float:
        return float(Fraction(self.total, self.count << _SCALE))

    @property
    def deviation(self) -> float:
        """The standard deviation of these numbers: the sum of squares is divided by their number, not by one less."""
        square = self.count * self.squares - self.total**2  # of count times the deviation; floats are too small for it
        return float(Fraction(math.isqrt(square << (2 * _ROOT_BITS)), self.count << (_SCALE + _ROOT_BITS)))

    def dump(self) -> list[Any]:
        """For JSON."""
        return [self.count, hex(self.total), hex(self.squares), self.smallest, self.largest]

    @classmethod
    def load(cls, saved: list[Any]) -> Moments:
        count, total, squares, smallest, largest = saved
        return cls(count, int(total, 16), int(squares, 16), smallest, largest)
