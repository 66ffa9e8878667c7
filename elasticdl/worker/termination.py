"""SIGTERM: finish the current minibatch, report it to the master, and end the process, all within the grace period.

This runs in a thread of its own, since the main thread may be inside the framework for long.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from elasticdl.activities import Activity, ActivityClock
from elasticdl.rpc.signals import on_signals

EXIT_CODE = 128 + signal.SIGTERM
# Times since SIGTERM; a pod has 10 s before SIGKILL.
PATIENCE_S = 5.0  # limit for the current minibatch
_GROUP_S = 4.0  # limit for a group to agree on the last checkpoint: takes 0.1 s to seconds, on a busy node
SAVED_S = 7.0  # limit for the checkpoint being written
_WARNING_S = 0.3  # before the end, to log that the checkpoint is not written
FAREWELL_S = 1.5  # before the end, for the farewell to the master: without it the pod counts as failed
LIMIT_S = 9.0
_LAST_REPORTS_S = 1.0

_log = logging.getLogger("elasticdl.worker")


class Termination:
    """Ends this process after SIGTERM.

    Args:
        clock: The activities of the main thread; a compilation is not waited for.
    """

    def __init__(self, clock: ActivityClock) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._asked_at: float | None = None
        self._is_busy = False
        self._farewell: Callable[[bool], None] = lambda is_idle: None
        self._shut_out: Callable[[], bool] = lambda: False
        self._announce: Callable[[], None] = lambda: None

    @property
    def is_asked(self) -> bool:
        """Whether SIGTERM has come: begin nothing new."""
        return self._asked_at is not None

    @property
    def seconds(self) -> float:
        """Seconds since SIGTERM; 0 before."""
        return 0.0 if self._asked_at is None else time.monotonic() - self._asked_at

    @property
    def saving_s(self) -> float:
        """How long to wait for a last checkpoint from now on, before the farewell."""
        return max(0.0, SAVED_S - self.seconds)

    @property
    def rest_s(self) -> float:
        """How long to wait for a last checkpoint from now on, after the farewell."""
        return max(0.0, LIMIT_S - _WARNING_S - self.seconds)

    @property
    def reports_s(self) -> float:
        """How long to wait for the last reports from now on; the farewell comes after them."""
        return max(0.0, min(_LAST_REPORTS_S, LIMIT_S - FAREWELL_S - self.seconds))

    def install(self) -> None:
        """Install the handler of SIGTERM; call this once, in the main thread."""
        on_signals(self._end, signal.SIGTERM)
        # Block signals during a fork, until the child has handlers of its own.
        os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_forget)

    def before_end(self, farewell: Callable[[bool], None]) -> None:
        """Set the last action, called in the termination thread with whether the main thread is idle."""
        self._farewell = farewell

    def at_once(self, announce: Callable[[], None]) -> None:
        """Set the first action, called in the termination thread."""
        self._announce = announce

    def enters_groups(self, shut_out: Callable[[], bool]) -> None:
        """Set the action that ends a wait for a group that does not come; see `GroupSession.shut_out`."""
        self._shut_out = shut_out

    @contextmanager
    def unbroken(self) -> Iterator[None]:
        """Delay the end by SIGTERM until the block ends; after SIGTERM, never enter or leave the block."""
        self._set_busy(True)
        try:
            yield
        finally:
            self._set_busy(False)

    def _set_busy(self, is_busy: bool) -> None:
        with self._changed:
            if self.is_asked:
                self._is_busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: False)  # until the process ends
            self._is_busy = is_busy

    def _end(self, _number: int) -> NoReturn:
        limit = threading.Timer(LIMIT_S, os._exit, (EXIT_CODE,))
        limit.daemon = True
        limit.start()
        try:
            self._leave()
            logging.shutdown()
            sys.stdout.flush()
        finally:
            os._exit(EXIT_CODE)

    def _leave(self) -> None:
        with self._changed:
            self._asked_at = time.monotonic()
            self._announce()
            activity, _ = self._clock.read()
            if self._is_busy and activity is not Activity.COMPILE:
                _log.info("SIGTERM: this worker leaves after the present minibatch")
                self._changed.wait_for(lambda: not self._is_busy, _GROUP_S)
                if not self._shut_out():
                    self._changed.wait_for(lambda: not self._is_busy, PATIENCE_S - self.seconds)
                if self._clock.read()[0] is Activity.CHECKPOINT:
                    self._changed.wait_for(lambda: not self._is_busy, SAVED_S - self.seconds)
            is_idle = not self._is_busy
        self._farewell(is_idle)
        _log.info("SIGTERM: this worker has left")


def _hold() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))


def _release() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))


def _forget() -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _release()
