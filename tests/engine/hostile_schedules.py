"""Small random jobs with hostile faults at chosen moments, so that models move and become older ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from elasticdl.protocol import Shard
from tests.engine.arithmetic import Troubles
from tests.engine.engine_job import EngineJob, make_job
from tests.engine.member import Member
from tests.engine.scheduler import Process
from tests.engine.schedules import (
    MINIBATCH,
    SHORT,
    draw_fault,
    draw_spec,
    draw_troubles,
    replayed_by,
    run_to_end,
)

_SIZES = ((2, 2), (3, 2), (5, 2), (2, 4))  # tasks, and minibatches of each
_SHARE_TROUBLED = 0.3
_SHARE_BAD = 0.3
_SHARE_SHARDED = 0.25  # where several members that die make the model of those that live an older one
_MOST_EVENTS = 300  # for which a fault waits for its moment
_CUT_S = (1.0, 2.5, 4.5)  # shorter and longer than a lease lasts
_RESTART_S = (0.1, 1.0)


@dataclass(frozen=True, slots=True)
class HostileRun:
    """A job that has ended.

    Attributes:
        num_moved: how often a member took over a model from another one or from a checkpoint, after the first group.
        num_restored: how often a group began with a checkpoint, or anew, after the first one.
    """

    num_moved: int
    num_restored: int


def play_hostile(seed: int) -> HostileRun:
    """Run a job of a few minibatches with a few faults, close upon each other: most errors show in small groups.

    Raises:
        AssertionError: something that must hold does not; the message names the seed.
    """
    draw = random.Random(f"small {seed}")
    job = draw_job(seed, draw, _SIZES)
    with replayed_by(job, f"python -m tests.engine hostile {seed}"):
        if draw.random() < 0.9:  # else something happens before there is a group
            while job.job._groups.formed is None:
                job.scheduler.step()
        _Faults(job, draw).run()
        run_to_end(job)
        run = run_of(job)
        job.check_end()
    return run


def draw_job(seed: int, draw: random.Random, sizes: Sequence[tuple[int, int]]) -> EngineJob:
    """Return a job of a few minibatches, whose network and disk are good or bad.

    Args:
        sizes: tasks, and minibatches of each; the job has one of these.
    """
    num_tasks, per_task = draw.choice(sizes)
    is_sharded = draw.random() < _SHARE_SHARDED
    spec = replace(
        draw_spec(draw),
        num_minibatches_per_task=per_task,
        num_workers=draw.choice([3, 4]) if is_sharded else draw.choice([2, 2, 2, 3]),
        num_epochs=draw.choice([1, 1, 1, 1, 2]),
        validation_data="records" if draw.random() < 0.1 else "",
        evaluation_steps=draw.choice([0, 2]),
        checkpoint_dir=draw.choice(["", "/checkpoints", "/checkpoints"]),
        checkpoint_steps=draw.choice([1, 2, 3, 100]),
        fixed_global_batch=draw.choice([0, 0, 1, 2]) * MINIBATCH,
        shard_optimizer=is_sharded,
        collective_timeout=2.0,
        lease_timeout=draw.choice([2.0, 4.0]),
    )
    shards = (Shard("a", 0, num_tasks * per_task * MINIBATCH),)
    troubles = Troubles(random.Random(draw.random()))
    if draw.random() < _SHARE_TROUBLED:
        troubles = draw_troubles(draw, shards[-1].end, spec)
    if draw.random() < _SHARE_BAD:
        troubles = replace(troubles, bad=frozenset([draw.randrange(shards[-1].end)]))
    troubles = replace(troubles, compute_s=draw.choice([0.02, 0.2, 1.0]))
    job = make_job(seed, spec, shards, troubles)
    job.is_checked_whole = False
    job.room.links.has_room = random.Random(f"room {seed}").random() < 0.5
    job.calls_of_workers.share_lost = draw.choice([0.0, 0.0, 0.05, 0.2])
    job.calls_of_workers.late_s = draw.choice([0.01, 0.01, 0.5])
    job.room.written.writing_s = draw.choice([0.01, 0.3, 2.0])
    return job


def run_of(job: EngineJob) -> HostileRun:
    """Return how often the model has moved until now."""
    num_loaded = sum(member.framework.num_loaded for member in job.members.values())
    return HostileRun(num_loaded - job.room.plan.spec.num_workers, job.room.written.num_read - 1)


class _Faults:
    """The faults of one job."""

    def __init__(self, job: EngineJob, draw: random.Random) -> None:
        self._job = job
        self._draw = draw
        self._moments: list[Callable[[], Process | None]] = [self._uneven, self._forming, self._behind, self._writing]
        self._moments += [self._uneven, self._behind]

    def run(self) -> None:
        draw = self._draw
        for _ in range(draw.choice([1, 2, 2, 3])):
            self._let_pass(draw.choice([5, 20, 60]))
            if self._job.end is not None:
                return
            what = draw.random()
            if what < 0.25:
                self._come_back()
            elif what < 0.4:
                self._lose_leases()
            elif what < 0.47:
                self._spoil()
            elif what < 0.88:
                self._strike(self._await(draw.choice(self._moments)) if draw.random() < 0.6 else None)
            else:
                draw_fault(self._job, draw, SHORT)

    # When -------------------------------------------------------------------------------------------------------------

    def _let_pass(self, num_events: float) -> None:
        for _ in range(1 + int(self._draw.expovariate(1 / num_events))):
            if self._job.end is None:
                self._job.scheduler.step()

    def _await(self, moment: Callable[[], Process | None]) -> Process | None:
        """Return the process that a moment concerns, or None if it does not come."""
        for _ in range(_MOST_EVENTS):
            if self._job.end is not None:
                return None
            process = moment()
            if process is not None:
                return process
            self._job.scheduler.step()
        return None

    def _inside(self) -> list[Member]:
        """Return the living members of the newest group that has formed, by rank."""
        formed = self._job.job._groups.formed
        if formed is None or formed.version not in self._job.room.links.groups:
            return []
        seats = self._job.room.links.groups[formed.version].seats
        members = [self._job.members[seats[rank].process] for rank in sorted(seats)]
        return [one for one in members if not one.process.is_over and one.loop is not None]

    def _uneven(self) -> Process | None:
        """A step is in the model of one member, and not in that of another one."""
        steps = {one.process: one.steps for one in self._inside() if one.steps >= 0}
        if len(set(steps.values())) < 2:
            return None
        return self._draw.choice([max, min])(steps, key=lambda process: steps[process])

    def _forming(self) -> Process | None:
        for process in self._job.living_processes():
            loop = self._job.members[process].loop
            if loop is not None and loop._session._is_forming:
                return process
        return None

    def _behind(self) -> Process | None:
        """The master takes a group for formed in which a member still lacks the model."""
        for member in self._inside():
            if self._job._is_synchronizing(member):
                return member.process
        return None

    def _receiving(self) -> Process | None:
        """As `_behind`, and the member knows that it is to take the model over."""
        for member in self._inside():
            seats = self._job.room.links.groups[self._job.job._groups.formed.version].seats
            mine = next(seat for seat in seats.values() if seat.process is member.process)
            if mine.num_begun > 1 and self._job._is_synchronizing(member):
                return member.process
        return None

    def _writing(self) -> Process | None:
        writers = self._job.room.written.writers
        return writers[0] if writers else None

    # What -------------------------------------------------------------------------------------------------------------

    def _strike(self, process: Process | None) -> None:
        """Do something to a process, or to all others."""
        job, draw = self._job, self._draw
        living = job.living_processes()
        if job.end is not None or not living:
            return
        process = process or draw.choice(living)
        what = draw.choice(
            [
                "kill",
                "kill",
                "kill all",
                "kill all",
                "kill others",
                "kill others",
                "isolate",
                "mute",
                "slow",
                "full",
                "both",
            ]
        )
        if what in ("kill", "both"):
            self._kill([process])
        elif what == "kill all":
            self._kill(living)
        elif what == "kill others":
            others = [one for one in living if one is not process]
            self._kill(draw.sample(others, draw.randint(min(2, len(others)), len(others))))
        elif what == "isolate":
            self._isolate(process)
        elif what == "mute":
            self._mute(process)
        elif what == "slow":
            process.pace_s = draw.choice([0.05, 0.3])
        elif what == "full":
            job.room.written.is_full = True
            job.scheduler.at(draw.choice([0.5, 3.0]), self._make_room)
        if what == "both" or draw.random() < 0.15:
            job.stop_master(draw.choice(_RESTART_S))

    def _kill(self, processes: list[Process]) -> None:
        if not self._job.calls_of_workers.is_down:
            for process in processes:
                if not process.is_over:
                    self._job.kill(process, self._draw.choice(["Killed", "Preempted", "Evicted"]))

    def _mute(self, process: Process) -> None:
        """Cut a process off from the master, not from the other members."""
        cut = self._job.calls_of_workers.cut
        cut.add(process)
        self._job.scheduler.at(self._draw.choice(_CUT_S), lambda: cut.discard(process))

    def _isolate(self, process: Process) -> None:
        """Cut a process off from all others."""
        links, cut = self._job.room.links, self._job.calls_of_workers.cut
        links.cut.add(process)
        cut.add(process)
        self._job.scheduler.at(self._draw.choice(_CUT_S), lambda: self._heal(process))

    def _heal(self, process: Process) -> None:
        self._job.calls_of_workers.cut.discard(process)
        self._job.room.links.heal(process)

    def _make_room(self) -> None:
        self._job.room.written.is_full = False

    def _come_back(self) -> None:
        """Cut a member off from the others; they continue without it; as it comes back, the next thing happens."""
        job, draw = self._job, self._draw
        inside = self._inside()
        if job.end is not None or len(inside) < 2:
            return
        process = inside[0].process if draw.random() < 0.6 else draw.choice(inside).process
        if draw.random() < 0.3:
            self._await(self._uneven)
        if process.is_over or job.end is not None:
            return
        links, cut = job.room.links, job.calls_of_workers.cut
        links.cut.add(process)
        cut.add(process)
        before = job.job._groups.formed
        self._await(lambda: process if job.job._groups.formed is not before else None)
        steps = max((one.steps for one in self._inside()), default=0)
        if draw.random() < 0.7:
            self._await(lambda: process if any(one.steps > steps + 1 for one in self._inside()) else None)
        if draw.random() < 0.3:
            job.stop_master(draw.choice(_RESTART_S))
        self._heal(process)
        process.pace_s = draw.choice([0.0, 0.3, 0.3])
        if draw.random() < 0.8:
            found = self._await(draw.choice([self._behind, self._receiving, self._receiving, self._receiving]))
            if found is not None and draw.random() < 0.8:
                self._kill([one for one in job.living_processes() if one is not found])

    def _lose_leases(self) -> None:
        """Cut rank 0 off from the master for longer than its leases last, while the others are slow."""
        job, draw = self._job, self._draw
        inside = self._inside()
        if not inside:
            return
        first, *others = [one.process for one in inside]
        job.room.troubles.compute_s = 1.0  # else all is trained before
        cut = job.calls_of_workers.cut
        cut.add(first)
        job.scheduler.at(job.settings.lease_timeout * draw.uniform(1.0, 2.0), lambda: cut.discard(first))
        for process in others:
            process.pace_s = draw.choice([0.0, 0.3])

    def _spoil(self) -> None:
        """The updates of members fail, maybe of all, so that they live and hold no model."""
        job, draw = self._job, self._draw
        living = job.living_processes()
        before = job.room.written.num_read
        job.room.troubles.num_spoiled = draw.choice([1, len(living), 3 * len(living)])
        if living and draw.random() < 0.3:
            self._mute(draw.choice(living))
        self._await(lambda: living[0] if living and job.room.written.num_read > before else None)
        job.room.troubles.num_spoiled = 0
