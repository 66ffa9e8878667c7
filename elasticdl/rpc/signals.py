"""Signals as bytes of a pipe, for a thread that waits for them.

A handler of Python's runs in the main thread, between two of its bytecodes: it waits as long as the main thread is in
native code or waits for a lock, if the signal came just before the lock, or if the kernel gave it to another thread;
and it may interrupt the main thread where that holds the lock that the handler needs.  The pipe has none of this.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable


def signal_pipe(*numbers: int) -> int:
    """The end to read of a pipe that gets the number of each signal of these, and of others with a handler, as a byte.

    To be called in the main thread, once in a process.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    for number in numbers:
        # The handler is for user code that has put a descriptor of its own in the place of ours.
        signal.signal(number, lambda number, frame: os.write(writer, bytes([number])) and None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    return reader


def on_signals(handle: Callable[[int], None], *numbers: int) -> None:
    """Call `handle` with a number of these for each such signal, at least once, in a thread of its own.

    To be called in the main thread, once in a process.
    """
    reader = signal_pipe(*numbers)

    def wait() -> None:
        while received := os.read(reader, 1):
            if received[0] in numbers:
                handle(received[0])

    threading.Thread(target=wait, name="signals", daemon=True).start()
