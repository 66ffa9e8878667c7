"""Flow: how many raw calls run at once, and how many bytes of their frames lie in memory meanwhile.

A frame takes its bytes before it is read and a call takes its place when its frame is there, so an unfinished frame
keeps no other call from being served: it costs memory, of which there is a fixed amount, and only until its deadline.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from elasticdl.rpc.resource_use import available_bytes

_LEAST_BYTES = 1 << 30


class Flow:
    """Of one server, over all roads to it.  Thread-safe.

    Attributes:
        max_calls: that run at once.
        max_bytes: of all frames together, and so of the largest.
    """

    def __init__(self, max_calls: int, max_bytes: int = 0) -> None:
        """
        Args:
            max_bytes: 0: half of the memory that is free now, but not less than 1 GiB.
        """
        self.max_calls = max_calls
        self.max_bytes = max_bytes or max(_LEAST_BYTES, available_bytes() // 2)
        self._changed = threading.Condition()
        self._num_calls = 0
        self._num_bytes = 0

    @contextmanager
    def frame(self, size: int) -> Iterator[Held]:
        """Waits until `size` bytes, at most `max_bytes`, may be held, and holds them."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_bytes + size <= self.max_bytes)
            self._num_bytes += size
        held = Held(self, size)
        try:
            yield held
        finally:
            held.become(0)

    @contextmanager
    def call(self, wait: bool) -> Iterator[bool]:
        """A place among the calls that run.

        Args:
            wait: until there is one; otherwise it may be False that there is.
        """
        with self._changed:
            has_place = self._changed.wait_for(self._has_place, None if wait else 0)
            self._num_calls += has_place
        try:
            yield has_place
        finally:
            with self._changed:
                self._num_calls -= has_place
                self._changed.notify_all()

    def _has_place(self) -> bool:
        """Not while replies that are not fetched fill the memory."""
        return self._num_calls < self.max_calls and self._num_bytes <= self.max_bytes

    def change(self, size_bytes: int) -> None:
        """Change the count by a number of bytes; do not wait."""
        with self._changed:
            self._num_bytes += size_bytes
            if size_bytes < 0:
                self._changed.notify_all()


class Held:
    """The bytes of one call."""

    __slots__ = ("_flow", "_size")

    def __init__(self, flow: Flow, size: int) -> None:
        self._flow = flow
        self._size = size

    def become(self, size: int) -> None:
        """As many as these: the request has made room for its reply."""
        self._flow.change(size - self._size)
        self._size = size
