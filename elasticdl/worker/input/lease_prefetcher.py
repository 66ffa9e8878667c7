"""Draws leases from the master in a thread of its own, for whoever wants all that there are.

They are held from the moment they come, so that heartbeats renew them however late they are taken.
"""

from __future__ import annotations

import threading
from collections import deque

from elasticdl.worker.input.batch_prefetcher import InterruptibleLeases
from elasticdl.worker.leases import HeldLease


class Drawer:
    """`take` is called by one thread."""

    def __init__(self, requests: InterruptibleLeases) -> None:
        self._requests = requests
        self._changed = threading.Condition()
        self._drawn: deque[HeldLease | None] = deque()
        self._error: BaseException | None = None  # why nothing comes any more

    def start(self) -> None:
        threading.Thread(target=self._run, name="drawer", daemon=True).start()

    def take(self, timeout_s: float) -> list[HeldLease | None]:
        """All that came, waiting for something; None: the job is over.

        Raises:
            MasterGone: nothing comes any more.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._drawn or self._error, timeout_s)
            taken = list(self._drawn)
            self._drawn.clear()
            if self._error is not None and not taken:
                raise self._error
            return taken

    def _run(self) -> None:
        try:
            while True:
                held = self._requests.request_lease()
                with self._changed:
                    self._drawn.append(held)
                    self._changed.notify_all()
                if held is None:
                    return
        except BaseException as error:  # noqa: BLE001  raised again by `take`
            with self._changed:
                self._error = error
                self._changed.notify_all()
