"""A PS's parts of the flat vectors: changed by the optimizer's rule, read whole, and frozen for a checkpoint.

To freeze takes no longer for a gigabyte than for a byte: values change in other memory, to which each block moves when
it is changed for the first time, and what was frozen is never written again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np

from elasticdl.frameworks.framework import Floats
from elasticdl.kernels import _native
from elasticdl.ps.optim.optimizers import OptimizerConfig

_BLOCK = 1 << 16  # floats: what has just been moved is still in the cache when the rule changes it
_TOUCHED_AT_ONCE = 1 << 20


@dataclass(frozen=True, slots=True)
class DenseSnapshot:
    """Trainable values [t], each slot [t], non-trainable values [n]."""

    trainable: Floats
    slots: tuple[Floats, ...]
    non_trainable: Floats


class DenseValues:
    """Thread-safe: a reader never sees half of an update."""

    def __init__(
        self, trainable: Floats, slots: Mapping[str, Floats], non_trainable: Floats, config: OptimizerConfig
    ) -> None:
        """Copies what it is given; a slot that is missing starts fresh."""
        self._lock = threading.Lock()
        self._rule = _native.Optimizer(config.kind, config.options)
        self._clip = config.clip_value
        weights = np.array(trainable, np.float32)
        self._trainable = _Vectors(
            [
                weights,
                *(
                    np.array(slots[slot.name], np.float32)
                    if slot.name in slots
                    else np.full_like(weights, np.float32(slot.initial))
                    for slot in config.slots
                ),
            ]
        )
        self._non_trainable = _Vectors([np.array(non_trainable, np.float32)])

    @property
    def shapes(self) -> tuple[tuple[int], tuple[int]]:
        """Of trainable and non-trainable values."""
        return (self._trainable.size,), (self._non_trainable.size,)

    def apply(
        self,
        gradient: Floats,
        change: Floats,
        parts: Sequence[tuple[Sequence[slice], Sequence[slice], Sequence[float]]],
    ) -> None:
        """One update.

        Args:
            gradient, change: whole.
            parts: what of the two vectors changes, with the optimizer's scalars for it.
        """
        with self._lock:
            for trainable, non_trainable, scalars in parts:
                for piece in self._trainable.moved(trainable):
                    weights, *slots = (vector[piece] for vector in self._trainable.vectors)
                    self._rule.apply(weights, slots, gradient[piece], scalars, self._clip)
                for piece in self._non_trainable.moved(non_trainable):
                    self._non_trainable.vectors[0][piece] += change[piece]

    def read(self) -> list[Floats]:
        """Copies of trainable and non-trainable values."""
        with self._lock:
            return [self._trainable.first(), self._non_trainable.first()]

    def room(self, threads: Executor) -> DenseSnapshot:
        """For `freeze`: memory for all values, its pages in place already."""
        trainable, non_trainable = (
            [np.empty_like(vector) for vector in group.vectors] for group in (self._trainable, self._non_trainable)
        )
        blocks = (
            array[start : start + _TOUCHED_AT_ONCE]
            for array in (*trainable, *non_trainable)
            for start in range(0, len(array), _TOUCHED_AT_ONCE)
        )
        list(threads.map(lambda block: block.fill(0.0), blocks))
        return DenseSnapshot(trainable[0], tuple(trainable[1:]), non_trainable[0])

    def freeze(self, room: DenseSnapshot) -> DenseSnapshot:
        """The values as they are now; they do not change any more.  Takes `room` over."""
        self.thaw()
        with self._lock:
            trainable = self._trainable.freeze([room.trainable, *room.slots])
            (non_trainable,) = self._non_trainable.freeze([room.non_trainable])
        return DenseSnapshot(trainable[0], tuple(trainable[1:]), non_trainable)

    def thaw(self) -> None:
        """Release the frozen copy: its memory goes with the last reference."""
        for group in (self._trainable, self._non_trainable):
            is_more = True
            while is_more:
                with self._lock:
                    is_more = group.settle()


class _Vectors:
    """Vectors of one length that change at the same places.  Callers hold a lock."""

    def __init__(self, vectors: list[Floats]) -> None:
        self.vectors = vectors
        self._frozen: list[Floats] = []
        self._waiting: set[int] = set()  # blocks whose values are still where they were frozen

    @property
    def size(self) -> int:
        return len(self.vectors[0])

    def moved(self, parts: Iterable[slice]) -> Iterator[slice]:
        """The parts, in pieces whose values may be changed."""
        for part in parts:
            if not self._waiting:
                yield part
                continue
            for block in range(part.start // _BLOCK, -(-part.stop // _BLOCK)):
                self._move(block)
                yield slice(max(part.start, block * _BLOCK), min(part.stop, (block + 1) * _BLOCK))

    def first(self) -> Floats:
        """A copy of the first vector."""
        copied = self.vectors[0].copy()
        for block in self._waiting:
            place = slice(block * _BLOCK, (block + 1) * _BLOCK)
            copied[place] = self._frozen[0][place]
        return copied

    def freeze(self, room: list[Floats]) -> list[Floats]:
        self._frozen, self.vectors = self.vectors, room
        self._waiting = set(range(-(-self.size // _BLOCK)))
        return self._frozen

    def settle(self) -> bool:
        """Moves one more block; False: all have moved."""
        if self._waiting:
            self._move(next(iter(self._waiting)))
        if not self._waiting:
            self._frozen = []
        return bool(self._waiting)

    def _move(self, block: int) -> None:
        if block in self._waiting:
            place = slice(block * _BLOCK, (block + 1) * _BLOCK)
            for live, frozen in zip(self.vectors, self._frozen, strict=True):
                live[place] = frozen[place]
            self._waiting.remove(block)
