"""Signals as bytes in a pipe, for a thread that waits for them.

Python runs a signal handler in the main thread, between two bytecodes.  So the handler is delayed while the main thread
is in native code, or waits for a lock, if the signal came just before that or was delivered to another thread; and it
may interrupt the main thread while that holds a lock that the handler needs.  The pipe has none of these problems.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable


def signal_pipe(*numbers: int) -> int:
    """Return the read end of a pipe that gets the number of each of these signals as a byte.

    It also gets the numbers of other signals with handlers.

    Call it in the main thread, once per process.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    for number in numbers:
        # The handler writes, too, in case user code has replaced the wakeup descriptor.
        signal.signal(number, lambda number, frame: os.write(writer, bytes([number])) and None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    return reader


def on_signals(handle: Callable[[int], None], *numbers: int) -> None:
    """Call `handle` with the number of each of these signals that comes, at least once, in a thread of its own.

    Call it in the main thread, once per process.
    """
    reader = signal_pipe(*numbers)

    def wait() -> None:
        while received := os.read(reader, 1):
            if received[0] in numbers:
                handle(received[0])

    threading.Thread(target=wait, name="signals", daemon=True).start()
