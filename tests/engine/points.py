"""Named points of the worker's protocol, at which a schedule can stop a thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import pytest

from elasticdl.worker.allreduce.group_session import GroupSession
from elasticdl.worker.allreduce.prefetchers import InterruptibleLeases
from elasticdl.worker.allreduce.replica import Replica
from elasticdl.worker.reporter import Reporter
from tests.engine.collectives import SimulatedGroup
from tests.engine.scheduler import Process, Scheduler


class Point(Enum):
    """A method that begins or, where the last value says so, has ended."""

    GROUP_IS_CONNECTED = (GroupSession, "_form", True)
    MODEL_IS_RESTORED = (Replica, "start_over", True)
    MODEL_IS_COPIED = (SimulatedGroup, "broadcast", False)
    GROUP_IS_REPORTED = (GroupSession, "_report_group", False)
    GROUP_WAS_REPORTED = (GroupSession, "_report_group", True)
    INPUT_IS_INTERRUPTED = (InterruptibleLeases, "interrupt", False)
    LEASE_HAS_COME = (InterruptibleLeases, "request_lease", True)
    STEP_IS_PLANNED = (GroupSession, "plan_step", True)
    SUM_IS_BEGUN = (SimulatedGroup, "begin_reduce", False)
    SUMS_HAVE_COME = (GroupSession, "finish_reduce", True)
    STEP_IS_APPLIED = (GroupSession, "commit", True)
    COMMIT_IS_REPORTED = (Reporter, "_report", False)


@contextmanager
def watched(scheduler: Scheduler, reached: Callable[[Point, Process], float | None]) -> Iterator[None]:
    """Inside of the block, say which process has come to which point.

    Args:
        reached: called in the thread that comes to a point; it returns for how long that thread stays there;
            None: it does not stop.
    """

    def stopping(point: Point, is_end: bool, method: Callable[..., Any]) -> Callable[..., Any]:
        def stop() -> None:
            held_s = reached(point, scheduler.running.process) if scheduler.is_inside else None
            if held_s is not None:
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
