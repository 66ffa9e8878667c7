"""Small random jobs whose faults are aimed: each happens when a process comes to a named point of the protocol.

A seed chooses the points, the processes, how long the thread that comes there stays, and the faults.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from elasticdl.master.core import events
from tests.engine.engine_job import EngineJob
from tests.engine.hostile_schedules import HostileRun, draw_job, run_of
from tests.engine.points import Point, watched
from tests.engine.scheduler import Process
from tests.engine.schedules import MINIBATCH, replayed_by, run_to_end

_SIZES = ((5, 2), (3, 4), (4, 4))
_MOST_EVENTS = 800  # for which a fault waits for its point
_SHARE_DRAWN = 0.2  # of the jobs in which the first fault may happen anywhere
_HELD_S = (0.0, 0.02, 0.3, 1.5)
_CUT_S = (0.5, 2.5, 4.5)  # shorter and longer than a lease lasts
_RESTART_S = (0.1, 1.0)
_EXILE_S = 8.0  # at most
_STEPPING = (
    Point.STEP_IS_PLANNED,
    Point.SUM_IS_BEGUN,
    Point.SUM_IS_BEGUN,
    Point.SUMS_HAVE_COME,
    Point.STEP_IS_APPLIED,
    Point.COMMIT_IS_REPORTED,
    Point.LEASE_HAS_COME,
)
_ENTERING = (
    Point.GROUP_IS_CONNECTED,
    Point.MODEL_IS_RESTORED,
    Point.MODEL_IS_COPIED,
    Point.GROUP_IS_REPORTED,
    Point.GROUP_WAS_REPORTED,
    Point.INPUT_IS_INTERRUPTED,
    Point.INPUT_IS_INTERRUPTED,
)

Deed = Callable[[Process], None]


def play_aimed(seed: int) -> HostileRun:
    """Run a job of a few minibatches in which some processes come to a point, and something happens there.

    Raises:
        AssertionError: something that must hold does not; the message names the seed.
    """
    draw = random.Random(f"aimed {seed}")
    job = draw_job(seed, draw, _SIZES)
    with replayed_by(job, f"python -m tests.engine aimed {seed}"):
        aims = _Aims(job, draw)
        with watched(job.scheduler, aims.reached):
            aims.run()
            run_to_end(job)
        run = run_of(job)
        job.check_end()
    return run


@dataclass(eq=False)
class _Aim:
    """A point that is waited for, and the deeds that follow.

    Attributes:
        is_right: whether a process that comes to the point is the one that is waited for.
        num_before: such processes that come to it before.
        held_s: for how long the thread stays there.
        victim: the process that has come.
    """

    point: Point
    is_right: Callable[[Process], bool]
    num_before: int
    held_s: float
    deeds: list[Deed]
    victim: Process | None = None


class _Aims:
    """The faults of one job, one after another."""

    def __init__(self, job: EngineJob, draw: random.Random) -> None:
        self._job = job
        self._draw = draw
        self._aims: deque[_Aim] = deque()
        self._breaks: list[Deed] = [self._kill_others, self._exile, self._spoil, self._expire]
        self._deeds = [*self._breaks, self._kill, self._kill_all, self._mute, self._part, self._break_feed]
        self._deeds += [self._hamper_others, self._stop_master, self._wait]

    def reached(self, point: Point, process: Process) -> float | None:
        """See `watched`."""
        aim = self._aims[0] if self._aims else None
        if aim is None or aim.point is not point or aim.victim is not None or not aim.is_right(process):
            return None
        aim.num_before -= 1
        if aim.num_before >= 0:
            return None
        aim.victim = process
        return aim.held_s

    def run(self) -> None:
        draw, job = self._draw, self._job
        while job.job._groups.formed is None:
            job.scheduler.step()
        is_shared, is_drawn = bool(job.room.plan.spec.fixed_global_batch), draw.random() < _SHARE_DRAWN
        if not is_shared and not is_drawn:
            self._aims.append(_Aim(Point.SUM_IS_BEGUN, self._is_last_to_come, self._some_steps(), 0.0, [self._exile]))
        elif not is_drawn:
            self._aims.append(_Aim(Point.SUM_IS_BEGUN, self._is_first, self._some_steps(), 0.0, [self._expire]))
            self._aims.append(_Aim(Point.GROUP_WAS_REPORTED, self._is_any, 0, 0.0, [self._wait]))
            self._aims.append(
                _Aim(Point.SUM_IS_BEGUN, self._is_last_and_first, draw.choice([0, 0, 2]), 0.05, [self._part])
            )
        else:
            self._aims.append(self._drawn(_STEPPING, self._breaks, self._some_steps()))
        for _ in range(draw.choice([1, 1, 2])):
            self._aims.append(self._drawn(_ENTERING if draw.random() < 0.6 else _STEPPING, self._deeds, 0))
        while self._aims and job.end is None:
            aim = self._aims[0]
            for _ in range(_MOST_EVENTS):
                if aim.victim is not None or job.end is not None:
                    break
                job.scheduler.step()
            self._aims.popleft()
            for do in aim.deeds:
                if aim.victim is not None and job.end is None:
                    do(aim.victim)
        self._aims.clear()

    def _drawn(self, points: tuple[Point, ...], deeds: list[Deed], num_before: int) -> _Aim:
        draw = self._draw
        is_right = draw.choice([self._is_any, self._is_first, self._is_other, self._is_last_to_come])
        return _Aim(draw.choice(points), is_right, num_before, draw.choice(_HELD_S), [draw.choice(deeds)])

    def _some_steps(self) -> int:
        """Draw a step of the job, the last ones as often as the first ones."""
        spec = self._job.room.plan.spec
        per_step = spec.fixed_global_batch // MINIBATCH or spec.num_workers
        return self._draw.randrange(self._job.room.plan.num_records // MINIBATCH // per_step + 1)

    # Which process ----------------------------------------------------------------------------------------------------

    def _is_any(self, process: Process) -> bool:
        return True

    def _is_first(self, process: Process) -> bool:
        return self._rank(process) <= 0

    def _is_other(self, process: Process) -> bool:
        return self._rank(process) != 0

    def _is_last_to_come(self, process: Process) -> bool:
        """All others have begun the next collective: if it is cut off now, it alone comes to the end of that."""
        loop = self._job.members[process].loop
        group = self._job.room.links.groups.get(loop._session.version) if loop is not None else None
        if group is None:
            return True
        mine = next((seat.num_begun for seat in group.seats.values() if seat.process is process), 0)
        return all(seat.num_begun > mine for seat in group.seats.values() if seat.process is not process)

    def _is_last_and_first(self, process: Process) -> bool:
        return self._rank(process) == 0 and self._is_last_to_come(process)

    def _rank(self, process: Process) -> int:
        loop = self._job.members[process].loop
        return -1 if loop is None or not loop._session.version else loop._session.rank

    # Deeds -----------------------------------------------------------------------------------------------------------

    def _others(self, process: Process) -> list[Process]:
        return [one for one in self._job.living_processes() if one is not process]

    def _end(self, processes: list[Process]) -> None:
        if not self._job.calls_of_workers.is_down:
            for process in processes:
                if not process.is_over:
                    self._job.kill(process, self._draw.choice(["Killed", "Preempted", "Evicted"]))

    def _kill(self, process: Process) -> None:
        self._end([process])

    def _kill_others(self, process: Process) -> None:
        self._end(self._others(process))

    def _kill_all(self, process: Process) -> None:
        self._end(self._job.living_processes())

    def _exile(self, process: Process) -> None:
        """Cut a process off until the others have formed a group; maybe the master restarts before it comes back."""
        job, before, end = self._job, self._job.job._groups.formed, self._job.scheduler.now + _EXILE_S
        links, cut = job.room.links, job.calls_of_workers.cut
        links.cut.add(process)
        cut.add(process)
        restart_s = self._draw.choice([0.0, *_RESTART_S])
        job.room.troubles.compute_s = 1.0  # else all is trained before it comes back
        more_s = self._draw.choice([0.0, 0.3, 1.5]) if not restart_s else 0.0

        def heal() -> None:
            cut.discard(process)
            links.heal(process)

        def look() -> None:
            if job.job._groups.formed is not before or job.scheduler.now > end:
                if restart_s:
                    job.stop_master(restart_s)
                    self._draw.choice([self._wait, self._hamper_others])(process)
                job.scheduler.at(more_s, heal)
            elif not process.is_over:
                job.scheduler.at(0.1, look)

        look()
        if self._draw.random() < 0.5:
            held_s = self._draw.choice([0.3, 1.5])
            aim = _Aim(Point.INPUT_IS_INTERRUPTED, lambda one: one is process, 0, held_s, [self._break_feed])
            self._aims.appendleft(aim)

    def _mute(self, process: Process) -> None:
        """Cut a process off from the master alone."""
        cut = self._job.calls_of_workers.cut
        cut.add(process)
        self._job.scheduler.at(self._draw.choice(_CUT_S), lambda: cut.discard(process))

    def _part(self, process: Process) -> None:
        """Cut a process off from the other members, not from the master."""
        links = self._job.room.links
        links.cut.add(process)
        self._job.scheduler.at(self._draw.choice(_CUT_S), lambda: links.heal(process))

    def _expire(self, process: Process) -> None:
        """End the leases of a process, as if its heartbeats had been lost; it may get new ones at once."""
        job = self._job
        worker_id = job.members[process]._worker_id
        for holding in job.job._work.leases._by_worker.get(worker_id, {}).values():
            holding.renewed_at = float("-inf")
        job.tell(events.Tick())

    def _spoil(self, process: Process) -> None:
        """The next update raises in all processes, so that they live and hold no model."""
        self._job.room.troubles.num_spoiled = len(self._job.living_processes())

    def _break_feed(self, process: Process) -> None:
        """`feed` raises in all processes, for a time."""
        troubles = self._job.room.troubles
        troubles.is_feed_broken = True
        self._job.scheduler.at(self._draw.choice([0.3, 2.0]), lambda: setattr(troubles, "is_feed_broken", False))

    def _hamper_others(self, process: Process) -> None:
        for other in self._others(process):
            other.pace_s = 0.3

    def _stop_master(self, process: Process) -> None:
        self._job.stop_master(self._draw.choice(_RESTART_S))

    def _wait(self, process: Process) -> None:
        """Nothing but the wait."""
