"""Random schedules of everything that can happen to the worker's own code: every record is in the model once, it ends.

A failure names its seed: `python -m tests.engine SEED` replays it with its log.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from elasticdl.protocol import Shard
from elasticdl.worker.ledger import Ledger
from elasticdl_client.choices import DistributionStrategy, NanPolicy
from elasticdl_client.job_spec import JobSpec
from tests.engine.arithmetic import Troubles
from tests.engine.engine_job import EngineJob, make_job
from tests.engine.member import Member, installed
from tests.engine.scheduler import Process
from tests.engine.schedules import play, play_end, play_killed_end, play_lost_end, play_user_code

_AT_ONCE = 8  # schedules of a test: the suite runs in several processes


def play_all(seeds: Iterable[int]) -> None:
    for seed in seeds:
        play(seed)


@pytest.mark.parametrize("first", range(0, 64, _AT_ONCE))
def test_whatever_happens_to_members_every_record_is_in_the_model_once(first: int) -> None:
    play_all(range(first, first + _AT_ONCE))


def test_a_minibatch_that_a_checkpoint_lacks_is_skipped_in_whatever_model_it_is_left_out_of() -> None:
    play(3134)  # a checkpoint that was being written when its group went back to an older one is the newest later


@pytest.mark.parametrize("first", range(0, 16, _AT_ONCE))
def test_callbacks_see_whole_epochs_in_order_and_data_that_must_end_a_job_do(first: int) -> None:
    for seed in range(first, first + _AT_ONCE):
        play_user_code(seed)


@pytest.mark.parametrize("seed", [49, 224, 267, 200981])  # beside an earlier epoch; while it was open again
def test_schedules_that_once_called_the_end_of_an_epoch_too_early(seed: int) -> None:
    play_user_code(seed)


def test_a_task_that_fails_while_the_model_becomes_an_older_one_is_not_held() -> None:
    play_user_code(201733)


def test_a_lease_of_a_member_that_comes_back_as_another_rank_than_0_is_not_held() -> None:
    play_user_code(202565)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_for_long_callbacks_see_whole_epochs_in_order_and_data_that_must_end_a_job_do() -> None:
    for seed in range(1000, 1400):
        play_user_code(seed)


@pytest.mark.full  # six minutes: cases that 64 schedules do not reach
@pytest.mark.timeout(1800)
def test_whatever_happens_to_members_for_long_every_record_is_in_the_model_once() -> None:
    play_all(range(1000, 3400))


@pytest.mark.parametrize("seed", range(4))
def test_the_last_pod_writes_a_checkpoint_when_all_its_processes_are_asked_to_end(seed: int) -> None:
    job = plain_job(seed, 1, 2, Troubles(random.Random(seed), compute_s=0.2), num_records=300)
    with installed(job.room, job.members.__getitem__):
        while min((member.steps for member in job.members.values()), default=0) < 3:
            job.scheduler.step()
        told = dict(job.members)
        assert len(told) == 2
        job.leave(job.workers[0])
        while not all(process.is_over for process in told):
            job.scheduler.step()
    (left,) = job.room.written.found
    first, second = told.values()
    assert left.ledger.steps == first.steps == second.steps
    assert (left.arrays["counts"] == first.framework.counts).all()


def plain_job(
    seed: int,
    num_workers: int,
    num_processes: int = 1,
    troubles: Troubles | None = None,
    num_records: int = 600,
    **flags: Any,
) -> EngineJob:
    """A job whose members hold the whole model each, unless a flag says otherwise."""
    spec = JobSpec(
        job_name="j",
        distribution_strategy=DistributionStrategy.ALL_REDUCE,
        training_data="records",
        minibatch_size=3,
        num_workers=num_workers,
        processes_per_worker=num_processes,
        num_ps_pods=0,
        checkpoint_dir="/checkpoints",
        **flags,
    )
    return make_job(seed, spec, (Shard("a", 0, num_records),), troubles or Troubles(random.Random(seed), compute_s=0.1))


@pytest.mark.parametrize("seed", range(4))
def test_leases_lost_with_their_answers_are_granted_again_long_before_they_time_out(seed: int) -> None:
    job = plain_job(seed, 2, num_records=60, lease_timeout=600.0, num_minibatches_per_task=1)
    job.calls_of_workers.share_lost = 0.3
    with installed(job.room, job.members.__getitem__):
        while job.end is None:
            job.scheduler.step()
            assert job.scheduler.now < 300.0, "a task waits for the end of a lost lease"
    job.check_end()


@pytest.mark.parametrize("fixed_global_batch", [0, 6])
@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_user_code_that_always_raises_ends_a_job_before_its_first_step(
    num_workers: int, fixed_global_batch: int
) -> None:
    troubles = Troubles(random.Random(0), share_raising=1.0, compute_s=0.2)
    flags = {"num_minibatches_per_task": 2, "fixed_global_batch": fixed_global_batch}
    job = plain_job(0, num_workers, troubles=troubles, num_records=24, **flags)
    with installed(job.room, job.members.__getitem__):
        while job.end is None:
            assert job.job._groups.num_formed < 10, "groups form without end"
            job.scheduler.step()
    assert job.end.exit_code == 1
    assert "the user's code raises" in job.end.message


@pytest.mark.parametrize("num_workers", [2, 3])
def test_first_minibatches_that_are_not_finite_are_left_out_once_a_member_is_lost(num_workers: int) -> None:
    troubles = Troubles(random.Random(0), not_finite=frozenset(range(24)), compute_s=0.5)
    flags = {"num_minibatches_per_task": 2, "nan_policy": NanPolicy.SKIP}
    job = plain_job(0, num_workers, troubles=troubles, num_records=24, **flags)
    with installed(job.room, job.members.__getitem__):
        while job.job._groups.formed is None or len(job.job._work.leases.all()) < num_workers:
            job.scheduler.step()
        job.kill(job.living_processes()[-1], "Killed")
        while job.end is None:
            assert job.job._groups.num_formed < 6, "groups form without end"
            job.scheduler.step()
        job.check_end()


def end_all(job: EngineJob, seed: int, moments: list[float]) -> EngineJob:
    """All pods are asked to end at one of these moments each, and the job ends with their successors."""
    draw = random.Random(seed)
    with installed(job.room, job.members.__getitem__):
        begin(job)
        told = dict(job.members)
        for worker in {worker.pod.index: worker for worker in job.workers}.values():
            job.scheduler.at(draw.choice(moments), lambda worker=worker: job.leave(worker))
        while not all(process.is_over for process in told):
            job.scheduler.step()
        last = max(member.steps for member in told.values())
        while job.room.written.num_read < 2:
            assert job.end is None
            job.scheduler.step()
        newest = job.room.written.latest()
        assert newest is not None, "no checkpoint"
        assert newest.ledger.steps == last
        while job.end is None:
            job.scheduler.step()
        job.check_end()
    return job


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("num_workers", "num_processes", "moments"),
    [
        (4, 1, [0.0]),
        (4, 1, [0.0, 0.3, 0.8]),
        (2, 1, [0.0]),
        (2, 1, [0.0, 1.2]),  # the other has left: this one writes it alone
        (2, 2, [0.0, 0.8]),
        (2, 2, [0.0, 1.2]),
    ],
)
def test_successors_continue_from_the_last_step_of_pods_that_are_asked_to_end_within_a_moment(
    num_workers: int, num_processes: int, moments: list[float], seed: int
) -> None:
    end_all(plain_job(seed, num_workers, num_processes), seed, moments)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("num_workers", "num_processes"), [(2, 1), (3, 1), (2, 2)])
@pytest.mark.parametrize("loses_master", [False, True])
def test_another_member_writes_the_last_checkpoint_if_the_writer_is_killed(
    num_workers: int, num_processes: int, loses_master: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = plain_job(seed, num_workers, num_processes)
    with installed(job.room, job.members.__getitem__):
        begin(job)
        told = dict(job.members)
        for worker in {worker.pod.index: worker for worker in job.workers}.values():
            job.leave(worker)
        monkeypatch.setattr(EngineJob, "_run", lambda self, pod: None)  # no successor takes the model over
        while job.room.written.begun is None:
            job.scheduler.step()
        if loses_master:  # it plans no other group
            job.stop_master(60.0)
        job.kill(job.room.written.begun[0], "Killed")
        while not all(process.is_over for process in told):
            job.scheduler.step()
    newest = job.room.written.latest()
    assert newest is not None
    assert newest.ledger.steps == max(member.steps for member in told.values())


def assert_last_step_is_kept(job: EngineJob, told: Mapping[Process, Member], killed: Process) -> None:
    """The members that were asked to end, but for a killed one, leave a checkpoint of their newest step."""
    while not all(process.is_over for process in told):
        job.scheduler.step()
    newest = job.room.written.latest()
    assert newest is not None
    assert newest.ledger.steps == max(member.steps for process, member in told.items() if process is not killed)


@pytest.mark.parametrize("seed", range(4))
def test_members_that_are_asked_to_end_wait_seconds_for_the_group_in_which_they_agree(seed: int) -> None:
    job = plain_job(seed, 3)
    with installed(job.room, job.members.__getitem__):
        begin(job)
        told = dict(job.members)
        for worker in job.workers:
            job.leave(worker)
        killed = random.Random(seed).choice(list(told))
        job.kill(killed, "Killed")
        job.calls_of_workers.share_late, job.calls_of_workers.late_s = 1.0, 1.5  # on a busy node
        assert_last_step_is_kept(job, told, killed)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_workers", [2, 3, 4])
def test_those_that_are_left_of_min_workers_agree_on_the_last_checkpoint(
    num_workers: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = plain_job(seed, num_workers, min_workers=num_workers)
    with installed(job.room, job.members.__getitem__):
        begin(job)
        told = dict(job.members)
        for worker in job.workers:
            job.leave(worker)
        monkeypatch.setattr(EngineJob, "_run", lambda self, pod: None)  # no successor makes a group with them
        killed = random.Random(seed).choice(list(told))
        job.kill(killed, "Killed")
        assert_last_step_is_kept(job, told, killed)


@pytest.mark.parametrize("seed", range(4))
def test_a_member_about_to_leave_saves_if_the_only_one_that_was_to_stay_is_killed(seed: int) -> None:
    job = plain_job(seed, 2)
    with installed(job.room, job.members.__getitem__):
        begin(job)
        leaver, other = job.members
        job.leave(job.workers[0])
        job.scheduler.at(0.5, lambda: job.kill(other, "Killed"))
        while not leaver.is_over:
            job.scheduler.step()
    newest = job.room.written.latest()
    assert newest is not None
    assert newest.ledger.steps == job.members[leaver].steps


@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_job_whose_pods_all_die_in_its_last_checkpoint_does_its_last_steps_again(
    num_workers: int, is_sharded: bool
) -> None:
    job = plain_job(1, num_workers, num_records=60, shard_optimizer=is_sharded)
    written = job.room.written
    with installed(job.room, job.members.__getitem__):
        while written.begun is None or written.begun[1] < 20:
            job.scheduler.step()
        assert job.end is None
        for process in job.living_processes():
            job.kill(process, "Killed")
        while job.end is None:
            job.scheduler.step()
        job.check_end()
    assert [one.ledger.applied.num_names for one in written.found] == [20]


@pytest.mark.parametrize("first", range(0, 16, _AT_ONCE // 2))
def test_successors_of_whatever_job_continue_from_the_last_step_of_pods_that_all_end(first: int) -> None:
    for seed in range(first, first + _AT_ONCE // 2):
        play_end(seed)


@pytest.mark.parametrize("seed", [6, 13, 26, 28, 35, 37, 46, 58])  # each lost its last steps once
def test_pods_that_all_end_agree_on_the_last_checkpoint_in_the_next_group_if_one_is_killed(seed: int) -> None:
    play_killed_end(seed)


@pytest.mark.parametrize("seed", [26, 63, 89, 93, 128, 129, 132, 174, 180, 198])  # as above
def test_pods_that_all_end_save_their_last_step_if_one_and_the_master_are_killed(seed: int) -> None:
    play_lost_end(seed)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_for_long_pods_that_all_end_save_their_last_step_if_one_and_the_master_are_killed() -> None:
    for seed in range(1000, 1500):
        play_lost_end(seed)


@pytest.mark.parametrize("is_master_lost", [False, True])
def test_a_last_checkpoint_that_takes_longer_than_the_grace_is_warned_of(
    is_master_lost: bool, caplog: pytest.LogCaptureFixture
) -> None:
    job = plain_job(3, 3)
    with installed(job.room, job.members.__getitem__):
        begin(job)
        told = dict(job.members)
        job.room.written.writing_s = 60.0
        for worker in job.workers:
            job.leave(worker)
        if is_master_lost:
            job.stop_master(60.0)
            job.kill(next(iter(told)), "Killed")
        while not all(process.is_over for process in told):
            job.scheduler.step()
    assert not job.room.written.found
    warned = [line for line in caplog.messages if "is not written before this worker ends" in line]
    assert len(warned) == (2 if is_master_lost else 1)


class Steady(random.Random):
    """Draws the most that there is, so that all steps are equally long."""

    def random(self) -> float:
        return 1.0


def sharded_job(seed: int, num_workers: int, num_processes: int = 1, troubles: Troubles | None = None) -> EngineJob:
    """A job whose members hold the optimizer's state in shards."""
    return plain_job(seed, num_workers, num_processes, troubles, shard_optimizer=True)


def begin(job: EngineJob) -> None:
    """Until all have made some steps together."""
    num_members = job.settings.num_workers * job.settings.processes_per_worker
    while len(job.job.status().world) < num_members or min(member.steps for member in job.members.values()) < 3:
        job.scheduler.step()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("num_workers", "num_processes"), [(4, 1), (2, 1), (2, 2), (1, 4)])
def test_shards_are_saved_when_all_pods_are_asked_to_end_within_a_moment(
    num_workers: int, num_processes: int, seed: int
) -> None:
    job = sharded_job(seed, num_workers, num_processes)
    draw = random.Random(seed)
    with installed(job.room, job.members.__getitem__):
        begin(job)
        told = dict(job.members)
        assert len(told) == num_workers * num_processes
        for worker in {worker.pod.index: worker for worker in job.workers}.values():
            job.scheduler.at(draw.choice([0.0, 0.8]), lambda worker=worker: job.leave(worker))
        while not all(process.is_over for process in told):
            job.scheduler.step()
    newest = job.room.written.latest()
    assert newest is not None
    last = max(told.values(), key=lambda member: member.steps)
    assert newest.ledger.steps == last.steps
    assert (newest.arrays["counts"] == last.framework.counts).all()
    last.framework.check_checkpoint(newest.arrays)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    ("num_workers", "num_processes", "moments"),
    [(5, 1, [0.0, 0.5, 0.5]), (5, 1, [0.0, 0.1, 1.1, 1.2]), (3, 2, [0.0, 0.6]), (3, 1, [0.0, 0.0])],
)
def test_pods_that_are_asked_to_end_within_a_moment_leave_their_shards(
    num_workers: int, num_processes: int, moments: list[float], seed: int
) -> None:
    job = sharded_job(seed, num_workers, num_processes)
    with installed(job.room, job.members.__getitem__):
        begin(job)
        told = random.Random(seed).sample(range(num_workers), len(moments))
        for pod, moment in zip(told, moments, strict=True):
            worker = next(one for one in job.workers if one.pod.index == pod)
            job.scheduler.at(moment, lambda worker=worker: job.leave(worker))
        end = job.scheduler.now + 20.0
        while job.scheduler.now < end and job.end is None:
            job.scheduler.step()
    assert job.room.written.num_read == 1


@pytest.mark.parametrize("seed", range(4))
def test_a_member_about_to_leave_hands_its_shards_over_although_the_other_holder_is_killed(seed: int) -> None:
    job = sharded_job(seed, 4)
    with installed(job.room, job.members.__getitem__):
        begin(job)
        holder, leaver = job.workers[2], job.workers[1]
        victim = next(process for process, pod in job._pods.items() if pod is holder.pod)
        job.leave(leaver)
        job.scheduler.at(0.5, lambda: job.kill(victim, "Killed"))
        end = job.scheduler.now + 20.0
        while job.scheduler.now < end and job.end is None:
            job.scheduler.step()
    assert job.room.written.num_read == 1


@pytest.mark.parametrize("seed", range(4))
def test_members_whose_steps_take_long_leave_their_shards_after_the_present_one(seed: int) -> None:
    compute_s = 4.9
    job = sharded_job(seed, 3, troubles=Troubles(Steady(), compute_s=compute_s))
    with installed(job.room, job.members.__getitem__):
        begin(job)
        steps = max(member.steps for member in job.members.values())
        while max(member.steps for member in job.members.values()) == steps:
            job.scheduler.step()
        for worker in job.workers[:2]:
            job.scheduler.at(compute_s - 0.2, lambda worker=worker: job.leave(worker))
        end = job.scheduler.now + 20.0
        while job.scheduler.now < end:
            job.scheduler.step()
    assert job.room.written.num_read == 1


def test_a_seed_replays_its_schedule() -> None:
    assert [play(7).log, play(7).scheduler.now] == [play(7).log, play(7).scheduler.now]


def test_a_snapshot_stays_what_it_was_whatever_happens_later(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[dict[str, Any], str]] = []
    persist = EngineJob._persist

    def persist_and_note(job: EngineJob) -> None:
        persist(job)
        taken.append((job.disk, json.dumps(job.disk)))

    monkeypatch.setattr(EngineJob, "_persist", persist_and_note)
    play_all(range(3))
    assert len(taken) > 100
    assert all(json.dumps(snapshot) == text for snapshot, text in taken)


def test_a_ledger_that_forgets_is_found_with_the_seed_that_replays_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Ledger, "add", lambda ledger, *added: None)
    found = r"^python -m tests\.engine \d+\n.*(in the model twice|committed, and not in the model)"
    with pytest.raises(AssertionError, match=found):
        play_all(range(10))
