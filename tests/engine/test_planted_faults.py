"""Faults planted in the worker and in the master's core, each of which undoes one guard: the simulator finds them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from elasticdl.master.core import events
from elasticdl.master.core.ledger.work import Work
from elasticdl.protocol import Shard
from elasticdl.worker.allreduce.batch_source import LeasedBatches
from elasticdl.worker.allreduce.group_session import GroupSession
from elasticdl.worker.allreduce.prefetchers import BatchPrefetcher
from elasticdl.worker.ledger import Ledger
from elasticdl.worker.tasks import HeldLease
from elasticdl_client.choices import DistributionStrategy
from elasticdl_client.job_spec import JobSpec
from tests.engine.aimed_schedules import play_aimed
from tests.engine.arithmetic import Troubles
from tests.engine.engine_job import EngineJob, make_job
from tests.engine.hostile_schedules import play_hostile
from tests.engine.member import installed
from tests.engine.points import Point, watched
from tests.engine.scheduler import Process
from tests.engine.schedules import MINIBATCH
from tests.engine.test_engine_schedules import begin, plain_job

_HELD_S = 3.0
_MORE_SEEDS = 20  # a change of the engine moves the seeds at which a fault does harm
_restart = BatchPrefetcher.restart
_synchronize = GroupSession._synchronize


class PlayedOutError(Exception):
    """The job has ended before the schedule came to its point."""


def step_until(job: EngineJob, is_so: Callable[[], bool]) -> None:
    while not is_so():
        if job.end is not None:
            raise PlayedOutError
        job.scheduler.step()


def is_found(play: Callable[[int], None], message: str, num_seeds: int = 3) -> bool:
    """Whether the simulator finds a fault at one of some seeds; a schedule may never come to its point.

    Raises:
        AssertionError: it finds another one.
    """
    for seed in range(num_seeds):
        try:
            play(seed)
        except PlayedOutError:
            continue
        except AssertionError as error:
            if message not in str(error):
                raise
            return True
    return False


def play_joiner_left_alone(seed: int) -> None:
    """A member is cut off for some steps of the others, comes back, and loses them while it takes the model over."""
    job = plain_job(seed, 3, num_records=3000)
    job.room.links.has_room = True
    reached: set[Point] = set()
    outside: list[Process] = []

    def hold(point: Point, process: Process) -> float | None:
        is_held = point is Point.MODEL_IS_COPIED and process in outside
        if is_held or (reached and process not in outside):
            reached.add(point)
        return _HELD_S if is_held else None

    def steps() -> int:
        return max(member.steps for member in job.members.values())

    with installed(job.room, job.members.__getitem__), watched(job.scheduler, hold):
        begin(job)
        alone, links, cut = list(job.members)[2], job.room.links, job.calls_of_workers.cut
        links.cut.add(alone)
        cut.add(alone)
        before = job.job._groups.formed
        step_until(job, lambda: job.job._groups.formed is not before)
        last = steps()
        step_until(job, lambda: steps() > last + 2)
        outside.append(alone)
        cut.discard(alone)
        links.heal(alone)
        step_until(job, lambda: Point.GROUP_WAS_REPORTED in reached)
        for process in job.living_processes():
            if process is not alone:
                job.kill(process, "Killed")
        number = job.job._groups.num_formed
        step_until(job, lambda: job.job._groups.num_formed > number)


def play_lost_restorer(seed: int) -> None:
    """All members lose the model, and rank 0 dies when the others have the restored one, before it reports it."""
    spec = JobSpec(
        job_name="j",
        distribution_strategy=DistributionStrategy.ALL_REDUCE,
        training_data="records",
        minibatch_size=3,
        num_workers=2,
        num_ps_pods=0,
        max_task_failures=100,
        checkpoint_dir="/checkpoints",
        checkpoint_steps=4,
    )
    job = make_job(seed, spec, (Shard("a", 0, 3000),), Troubles(random.Random(seed), compute_s=0.1))
    job.room.links.has_room = True
    restorers: list[Process] = []

    def hold(point: Point, process: Process) -> float | None:
        if point is Point.GROUP_IS_REPORTED and job.room.written.num_read > 1 and not restorers:
            restorers.append(process)
            return _HELD_S
        return None

    with installed(job.room, job.members.__getitem__), watched(job.scheduler, hold):
        step_until(job, lambda: bool(job.room.written.found))
        job.room.troubles.num_spoiled = 100
        step_until(job, lambda: bool(restorers))
        job.room.troubles.num_spoiled = 0
        other = next(member for process, member in job.members.items() if process is not restorers[0])
        number = job.job._groups.num_formed
        step_until(job, lambda: _is_inside(other))
        job.kill(restorers[0], "Killed")
        step_until(job, lambda: job.job._groups.num_formed > number)


def play_second_lease(seed: int) -> None:
    """Rank 0 is granted a task again in the same group, while it alone has the newest step in its model.

    So it is if a lease crosses the registration with a restarted master, which lacks it.
    """
    job = plain_job(seed, 2, fixed_global_batch=2 * MINIBATCH)
    first: list[Process] = []

    def hold(point: Point, process: Process) -> float | None:
        rank = job.members[process].loop._session.rank if first else None
        if point is Point.STEP_IS_APPLIED and rank == 0:
            return _HELD_S
        return 2 * _HELD_S if point is Point.SUMS_HAVE_COME and rank else None

    def steps() -> set[int]:
        return {member.steps for member in job.members.values()}

    with installed(job.room, job.members.__getitem__), watched(job.scheduler, hold):
        begin(job)
        first += [process for process, member in job.members.items() if member.loop._session.rank == 0]
        step_until(job, lambda: len(steps()) > 1)
        work, worker_id = job.job._work, job.members[first[0]]._worker_id
        for lease in work.leases.of_worker(worker_id):
            work.give_back(lease)
        job.tell(events.Tick())
        step_until(job, lambda: len(steps()) == 1)


def _is_inside(member: Any) -> bool:
    """Whether it waits for the first header of the others."""
    return member.loop._session.version > 0 and member.loop._clock._now == "world"


def receive_unmarked(session: Any, source: int, is_needed: bool) -> None:
    gives = session._rank == source
    arrays = session._elastic_group.broadcast(session._state.arrays() if gives else None, source)
    data = session._elastic_group.broadcast_bytes(session.ledger.to_bytes() if gives else None, source)
    if is_needed and not gives:
        session._state.load(arrays)
        session.ledger = Ledger.from_bytes(data)


def synchronize_and_hold(session: Any, group: Any) -> None:
    _synchronize(session, group)
    session._holds_model = True


def pass_known(batches: Any) -> None:
    if batches._at_hand is not None and batches._at_hand[0] in batches._session.ledger.applied:
        batches._pass(batches._at_hand[1])


def restart_with_early_list(prefetcher: BatchPrefetcher, again: Callable[[], Iterable[HeldLease]]) -> None:
    listed = list(again())
    _restart(prefetcher, lambda: listed)


def play_all(play: Callable[[int], object], seeds: Iterable[int]) -> None:
    for seed in seeds:
        play(seed)


def test_a_model_of_an_earlier_group_that_is_a_source_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    message = ": all members of the last one had"
    assert not is_found(play_joiner_left_alone, message)
    monkeypatch.setattr(GroupSession, "_receive", receive_unmarked)
    assert is_found(play_joiner_left_alone, message, _MORE_SEEDS)


def test_a_restored_model_that_is_a_source_before_it_is_reported_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    message = "all members of the last one had"  # more steps
    assert not is_found(play_lost_restorer, message)
    monkeypatch.setattr(GroupSession, "_synchronize", synchronize_and_hold)
    assert is_found(play_lost_restorer, message, _MORE_SEEDS)


def test_a_newest_step_that_is_reported_before_all_have_it_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    message = "committed, and not in the model of"
    assert not is_found(play_second_lease, message)
    monkeypatch.setattr(GroupSession, "is_proven", lambda session, name: name in session.ledger.applied)
    assert is_found(play_second_lease, message, _MORE_SEEDS)


def test_leases_that_outlive_the_model_that_they_were_granted_for_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Work, "model_was_lost", lambda work: None)
    with pytest.raises(AssertionError, match="the model is an older one, and leases are in force"):
        play_all(play_hostile, range(60))


_AN_OLDER_MODEL = range(8)
_A_LATE_LEASE = range(104, 107)
_OTHERS = range(200, 600)  # where a change of the engine moves what those of a fault come to


@pytest.mark.parametrize("seeds", [_AN_OLDER_MODEL, _A_LATE_LEASE])
def test_whenever_faults_are_aimed_every_record_is_in_the_model_once(seeds: range) -> None:
    play_all(play_aimed, seeds)


@pytest.mark.parametrize(
    ("owner", "name", "planted", "seeds"),
    [
        pytest.param(LeasedBatches, "_begin_again", pass_known, _AN_OLDER_MODEL, id="input-not-begun-anew"),
        pytest.param(BatchPrefetcher, "restart", restart_with_early_list, _A_LATE_LEASE, id="leases-listed-early"),
    ],
)
def test_input_that_does_not_follow_the_model_is_found_by_aimed_faults(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, planted: Callable[..., None], seeds: range
) -> None:
    monkeypatch.setattr(owner, name, planted)
    with pytest.raises(AssertionError, match="the job does not end"):
        play_all(play_aimed, (*seeds, *_OTHERS))
