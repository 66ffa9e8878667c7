"""The oracles of the native kernels: the same in NumPy and dictionaries, one row at a time where that is clearer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.kernels.quantiles import TWO_SIGMA_TAIL, normal_quantile

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
Update = Callable[[Floats, Sequence[Floats], Floats], None]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix64(values: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """splitmix64's finalizer."""
    mixed = values.view(np.uint64) + GOLDEN
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def unmix64(hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The inverse of `mix64`."""
    values = hashes ^ hashes >> np.uint64(31) ^ hashes >> np.uint64(62)
    values = values * np.uint64(0x319642B2D24D8EC3)
    values = values ^ values >> np.uint64(27) ^ values >> np.uint64(54)
    values = values * np.uint64(0x96DE1B173F119089)
    values = values ^ values >> np.uint64(30) ^ values >> np.uint64(60)
    return values - GOLDEN


def initial_rows(kind: str, key: int, a: float, b: float, ids: Ids, dim: int) -> Floats:
    """Return the rows of `Initializer(kind, key, a, b).rows(ids, dim)`, bit by bit."""
    if kind == "constant":
        return np.full((len(ids), dim), a, np.float32)
    row_keys = mix64(mix64(ids) ^ np.uint64(key))
    columns = np.arange(dim, dtype=np.uint64) * GOLDEN
    uniform = (mix64(row_keys[:, None] + columns[None, :]) >> np.uint64(11)).astype(np.float64)
    uniform += 0.5
    uniform *= 2.0**-53
    if kind == "uniform":
        return (a + (b - a) * uniform).astype(np.float32)
    if kind == "truncated_normal":
        uniform = TWO_SIGMA_TAIL + (1.0 - 2.0 * TWO_SIGMA_TAIL) * uniform
    return (a + b * normal_quantile(uniform)).astype(np.float32)


class DictionaryTable:
    """`Table` as dictionaries of rows."""

    def __init__(
        self, dim: int, fresh: Callable[[Ids, int], Floats], update: Update, slot_initial: Sequence[float]
    ) -> None:
        self._dim, self._fresh, self._update, self._slot_initial = dim, fresh, update, slot_initial
        self.rows: dict[int, Floats] = {}
        self.slots: dict[int, list[Floats]] = {}

    def row(self, one: int, create: bool) -> Floats:
        if one in self.rows:
            return self.rows[one]
        values = self._fresh(np.array([one], np.int64), self._dim)[0]
        if create:
            self.rows[one] = values
            self.slots[one] = [np.full(self._dim, initial, np.float32) for initial in self._slot_initial]
        return values

    def pull(self, ids: Ids, create: bool) -> Floats:
        return np.array([self.row(one, create) for one in ids.tolist()], np.float32).reshape(-1, self._dim)

    def apply(self, ids: Ids, gradients: Floats) -> None:
        sums: dict[int, Floats] = {}
        for one, gradient in zip(ids.tolist(), gradients, strict=True):
            sums[one] = sums[one] + gradient if one in sums else gradient.copy()
        for one, gradient in sums.items():
            self._update(self.row(one, create=True), self.slots[one], gradient)


def crc32c(data: bytes) -> int:
    """Bit by bit."""
    remainder = 0xFFFFFFFF
    for byte in data:
        remainder ^= byte
        for _ in range(8):
            remainder = remainder >> 1 ^ (0x82F63B78 if remainder & 1 else 0)
    return remainder ^ 0xFFFFFFFF
