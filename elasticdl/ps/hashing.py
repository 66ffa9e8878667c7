"""The 64-bit mix that places ids and draws initial values: splitmix64's finalizer, vectorised.

Everything that must come out the same in every process and in every implementation of the kernels starts here.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def mix64(values: npt.NDArray[Any]) -> Hashes:
    """A bijection of 64-bit integers (int64 or uint64, any shape) whose every output bit depends on every input bit."""
    mixed = values.view(np.uint64) + GOLDEN
    mixed ^= mixed >> np.uint64(30)
    mixed *= _FIRST
    mixed ^= mixed >> np.uint64(27)
    mixed *= _SECOND
    mixed ^= mixed >> np.uint64(31)
    return mixed


def hash_key(*parts: str | int) -> int:
    """A key, of 64 bits, of a sequence of names and numbers."""
    text = "\0".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
