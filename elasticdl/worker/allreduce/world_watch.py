"""What the master says of worlds, heard by a thread of its own for as long as the process lives."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.worker.master_link import MasterLink

_log = logging.getLogger("elasticdl.worker")
_LOOK_AGAIN_S = 1.0


class WorldWatch:
    """The newest world planned."""

    def __init__(self, link: MasterLink, heard: Callable[[pb.World], None]) -> None:
        """
        Args:
            heard: called in the thread of the watch with every new world, and, with an empty one, when the job is over.
        """
        self._link = link
        self._heard = heard
        self._changed = threading.Condition()
        self._world = pb.World()
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="world watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def world(self) -> pb.World:
        """The newest one; version 0: none yet."""
        return self._world

    @property
    def is_over(self) -> bool:
        """The job is over."""
        return self._is_over

    def await_own(self, newer_than: int, timeout_s: float = _LOOK_AGAIN_S) -> pb.World | None:
        """Waits for a world newer than a version that has this process among its members; None: not yet, or never."""

        def is_there() -> bool:
            return self._is_over or self._is_own(newer_than)

        with self._changed:
            self._changed.wait_for(is_there, timeout_s)
            return self._world if self._is_own(newer_than) and not self._is_over else None

    def _is_own(self, newer_than: int) -> bool:
        return self._world.version > newer_than and any(map(self._link.is_me, self._world.members))

    def _run(self) -> None:
        while not self._is_over:
            reply = self._link.watch_world(self._world.version)
            match reply.WhichOneof("answer"):
                case "world":
                    self._take(reply.world)
                case "end":
                    self._end()
                case "unknown":
                    self._link.register()
                case _:
                    pass

    def _take(self, world: pb.World) -> None:
        if world.version <= self._world.version:
            return
        with self._changed:
            self._world = world
            self._changed.notify_all()
        _log.debug("World %d is planned: %s", world.version, [member.worker_id for member in world.members])
        self._heard(world)

    def _end(self) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        self._heard(pb.World())
