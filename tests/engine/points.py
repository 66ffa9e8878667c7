"""Named points of the worker's protocol, at which a schedule can stop a thread and let something happen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import pytest

from elasticdl.worker.allreduce.world_session import WorldSession
from tests.engine.collectives import SimulatedGroup
from tests.engine.scheduler import Process, Scheduler


class Point(Enum):
    """A method that begins or, where the last value says so, has ended."""

    MODEL_IS_COPIED = (SimulatedGroup, "broadcast", False)
    GROUP_IS_REPORTED = (WorldSession, "_tell", False)
    GROUP_WAS_REPORTED = (WorldSession, "_tell", True)


@contextmanager
def watched(scheduler: Scheduler, reached: Callable[[Point, Process], float]) -> Iterator[None]:
    """Inside of the block, say which process has come to which point.

    Args:
        reached: called in the thread that comes to a point; it returns for how long that thread stays there.
    """

    def stopping(point: Point, is_end: bool, method: Callable[..., Any]) -> Callable[..., Any]:
        def stop() -> None:
            held_s = reached(point, scheduler.running.process)
            if held_s:
                scheduler.sleep(held_s)

        def call(*arguments: Any) -> Any:
            if not is_end:
                stop()
            result = method(*arguments)
            if is_end:
                stop()
            return result

        return call

    with pytest.MonkeyPatch.context() as patch:
        for point in Point:
            owner, name, is_end = point.value
            patch.setattr(owner, name, stopping(point, is_end, getattr(owner, name)))
        yield
