"""How one PS process comes to its end: told by the master, asked by SIGTERM, or by an error of its own.

It only keeps what was said and wakes who waits; may be used from any thread, but not from a signal handler.
"""

from __future__ import annotations

import signal
import threading
import time

TERMINATED = 128 + signal.SIGTERM


class Departure:
    """Undecided until `leave`; the first exit code counts."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._exit_code: int | None = None
        self._asked_at: float | None = None

    @property
    def exit_code(self) -> int:
        return self._exit_code or 0

    @property
    def asked_at(self) -> float | None:
        """When SIGTERM came, on the monotonic clock; None before."""
        return self._asked_at

    def ask(self) -> None:
        """SIGTERM: leave once the master says that nothing is lost by it."""
        with self._changed:
            if self._asked_at is None:
                self._asked_at = time.monotonic()
                self._changed.notify_all()

    def leave(self, exit_code: int) -> None:
        """Leave now."""
        with self._changed:
            if self._exit_code is None:
                self._exit_code = exit_code
                self._changed.notify_all()

    def leave_in_order(self) -> None:
        """Leave now, at the master's word."""
        self.leave(0 if self._asked_at is None else TERMINATED)

    def wait(self, timeout_s: float) -> bool:
        """Waits a while, but not after SIGTERM or the end have been told; True: leave now."""
        with self._changed:
            before = self._asked_at
            self._changed.wait_for(lambda: self._exit_code is not None or self._asked_at != before, timeout_s)
            return self._exit_code is not None
