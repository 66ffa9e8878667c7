"""A synthetic click log of any size, the same for the same seed: learnable, skewed, and cheap to make.

Each record has `ids` (ten categories, Zipf-distributed over one id space; every field has its own popular ids),
`dense` (thirteen standard normal floats) and `label`.  The label is drawn with the probability that a hidden logistic
model of all ids and floats gives, so the best possible AUC is about 0.85.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from elasticdl.data.datasets.split import Split
from elasticdl.data.example import encode_examples

NUM_FIELDS = 10
NUM_DENSE = 13

_BLOCK_SIZE = 8192
_ZIPF_EXPONENT = 1.1
_ID_WEIGHT = 0.9
_DENSE_WEIGHT = 0.35
_BIAS = -0.6
_LARGE_PRIME = 2_654_435_761


@dataclass(frozen=True, slots=True)
class ClickLog:
    """A synthetic click log.

    Attributes:
        num_records: to train; a tenth as many, at most 100,000, to validate.
        num_ids: size of the id space.
        seed: of the hidden model and of the records.
    """

    num_records: int
    num_ids: int = 1_000_000
    seed: int = 0

    def splits(self) -> list[Split]:
        sizes = [("train", self.num_records), ("validation", min(100_000, max(1, self.num_records // 10)))]
        return [Split(name, size, self._blocks(number, size)) for number, (name, size) in enumerate(sizes)]

    def columns(self, split: int, block: int, size: int) -> dict[str, NDArray[np.float32] | NDArray[np.int64]]:
        """One block of records as arrays."""
        random = np.random.default_rng([self.seed, split, block])
        ids = self._ids(random, size)
        dense = random.standard_normal((size, NUM_DENSE), np.float32)
        clicked = random.random(size) < 1 / (1 + np.exp(-self._logits(ids, dense)))
        return {"ids": ids, "dense": dense, "label": clicked.astype(np.int64)}

    def _blocks(self, split: int, num_records: int) -> Iterator[list[bytes]]:
        for block, start in enumerate(range(0, num_records, _BLOCK_SIZE)):
            yield encode_examples(self.columns(split, block, min(_BLOCK_SIZE, num_records - start)))

    def _ids(self, random: np.random.Generator, size: int) -> NDArray[np.int64]:
        """Zipf ranks by inversion of the continuous distribution, each field's ranks spread over the ids anew."""
        power = 1 - _ZIPF_EXPONENT
        largest = (self.num_ids + 1) ** power - 1
        ranks = (1 + random.random((size, NUM_FIELDS)) * largest) ** (1 / power)
        ranks_from_zero = np.clip(ranks.astype(np.int64) - 1, 0, self.num_ids - 1)
        field_offsets = np.arange(NUM_FIELDS, dtype=np.int64) * (self.num_ids // NUM_FIELDS)
        spread: NDArray[np.int64] = (ranks_from_zero * self._stride() + field_offsets) % self.num_ids
        return spread

    def _stride(self) -> int:
        """A number coprime to the number of ids, so that ranks times it hit every id."""
        stride = _LARGE_PRIME % self.num_ids
        while math.gcd(stride, self.num_ids) != 1:
            stride += 1
        return stride

    def _logits(self, ids: NDArray[np.int64], dense: NDArray[np.float32]) -> NDArray[np.float64]:
        hidden = np.random.default_rng([self.seed, 2]).standard_normal(NUM_DENSE)
        logits: NDArray[np.float64] = (
            _BIAS + _ID_WEIGHT * self._id_weights(ids).sum(axis=1) + dense @ (_DENSE_WEIGHT * hidden)
        )
        return logits

    def _id_weights(self, ids: NDArray[np.int64]) -> NDArray[np.float64]:
        """A hidden weight for each id, uniform in [-1, 1): SplitMix64 of id and seed (Steele et al., 2014)."""
        state = ids.astype(np.uint64) + np.uint64((self.seed * 0x9E3779B97F4A7C15) & ((1 << 64) - 1))
        state = state * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
        weights: NDArray[np.float64] = (state >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1
        return weights
