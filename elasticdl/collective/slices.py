"""How arrays are cut for sending: large ones into pieces, small ones put together into one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

PIECE_BYTES = 16 << 20
SMALL_BYTES = 256 << 10  # an array below it is copied into a piece with its neighbours


@dataclass(frozen=True, slots=True)
class ArraySlice:
    """Bytes [start, end) of the array of that number."""

    array: int
    start: int
    end: int


Piece = Sequence[ArraySlice]


def pieces_of(sizes: Sequence[int]) -> Iterator[Piece]:
    """All bytes of arrays of these sizes, each once and in order; the same pieces in every member."""
    together: list[ArraySlice] = []
    size_together = 0
    for number, size in enumerate(sizes):
        if size == 0:
            continue
        if together and (size >= SMALL_BYTES or size_together + size > PIECE_BYTES):
            yield together
            together, size_together = [], 0
        if size < SMALL_BYTES:
            together.append(ArraySlice(number, 0, size))
            size_together += size
        else:
            for start in range(0, size, PIECE_BYTES):
                yield [ArraySlice(number, start, min(start + PIECE_BYTES, size))]
    if together:
        yield together
