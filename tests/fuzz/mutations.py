"""Damage to bytes: bits flipped, an end cut off or added, a piece put elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from random import Random


def flip(data: bytes, random: Random) -> bytes:
    """Changes one to eight bytes."""
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 8))):
        changed[random.randrange(len(data))] ^= random.randrange(1, 256)
    return bytes(changed)


def truncate(data: bytes, random: Random) -> bytes:
    """Cuts the end off, often a short one."""
    return data[: random.choice((random.randrange(len(data)), len(data) - random.randrange(1, min(len(data), 64) + 1)))]


def extend(data: bytes, random: Random) -> bytes:
    """Adds random bytes, or the begin once more, behind the end."""
    size = random.choice((1, 8, 1000))
    return data + random.choice((random.randbytes(size), data[:size]))


def splice(data: bytes, random: Random) -> bytes:
    """Replaces, removes or repeats a piece in the middle."""
    begin = random.randrange(len(data))
    size = random.choice((1, 4, 8, 100))
    source = random.randrange(len(data))
    piece = random.choice((b"", random.randbytes(size), b"\xff" * size, bytes(size), data[source : source + size]))
    return data[:begin] + piece + data[begin + random.choice((0, size)) :]


_KINDS: tuple[Callable[[bytes, Random], bytes], ...] = (flip, flip, truncate, extend, splice)


def damage(data: bytes, random: Random) -> bytes:
    """Other bytes than ``data``, which must not be empty, one mutation away."""
    while True:
        changed = random.choice(_KINDS)(data, random)
        if changed != data:
            return changed
