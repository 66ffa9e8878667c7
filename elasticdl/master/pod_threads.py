"""The threads that create, delete and list pods.

Work on different pods is concurrent, work on one pod in the order of requests.  Workers are
created after the servers that were asked for before them: where there is not room for all, servers must get it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

Work = Callable[[], None]


class PodThreads:
    """The work must not raise.

    Args:
        num_threads: 1: everything in the order in which it was asked for, but for the servers.
    """

    def __init__(self, num_threads: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="pods")
        self._lock = threading.Lock()  # guards everything below
        self._queues: dict[str, deque[Work]] = {}  # of pods with work, by name; its first is under way or held back
        self._num_servers = 0  # whose creation is asked for and not done
        self._held: list[str] = []  # workers that wait for them
        self._waiting: list[Work] = []  # for a moment without creations
        self._num_asked = 0
        self._num_done = 0
        self._is_closed = False

    @property
    def num_asked(self) -> int:
        """Creations asked for so far."""
        with self._lock:
            return self._num_asked

    @property
    def num_done(self) -> int:
        """Creations that are over, well or not."""
        with self._lock:
            return self._num_done

    def create(self, name: str, work: Work, is_server: bool) -> None:
        """Runs the creation of a pod."""

        def create() -> None:
            try:
                work()
            finally:
                self._created(is_server)

        with self._lock:
            self._num_asked += 1
            self._num_servers += is_server
            self._add(name, create, is_held=not is_server and self._num_servers > 0)

    def delete(self, name: str, work: Work) -> None:
        """Runs the deletion of a pod, after its creation if that is asked for."""
        with self._lock:
            self._add(name, work, is_held=False)

    def between_creations(self, work: Work) -> None:
        """Runs something when every creation that was asked for is done."""
        with self._lock:
            self._waiting.append(work)
            self._start_waiting()

    def close(self) -> None:
        """Waits for what is under way; workers that are held back are not created any more."""
        with self._lock:
            self._is_closed = True
        self._threads.shutdown(wait=True)

    def _add(self, name: str, work: Work, is_held: bool) -> None:
        queue = self._queues.get(name)
        if queue is not None:
            queue.append(work)
            return
        self._queues[name] = deque([work])
        if is_held:
            self._held.append(name)
        else:
            self._start(partial(self._drain, name))

    def _drain(self, name: str) -> None:
        while True:
            with self._lock:
                queue = self._queues[name]
                if not queue:
                    del self._queues[name]
                    return
                work = queue.popleft()
            work()

    def _created(self, is_server: bool) -> None:
        with self._lock:
            self._num_done += 1
            self._num_servers -= is_server
            if self._num_servers == 0:
                held, self._held = self._held, []
                for name in held:
                    self._start(partial(self._drain, name))
            self._start_waiting()

    def _start_waiting(self) -> None:
        if self._num_done == self._num_asked:
            waiting, self._waiting = self._waiting, []
            for work in waiting:
                self._start(work)

    def _start(self, work: Work) -> None:
        if not self._is_closed:
            self._threads.submit(work)
