"""Random jobs and faults, each a function of its seed, and a run of one of them to its end."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from elasticdl.frameworks.callback_rules import Rules
from elasticdl.protocol import Shard
from elasticdl_client.choices import DistributionStrategy, NanPolicy
from elasticdl_client.job_spec import JobSpec
from tests.engine.arithmetic import Troubles, Violation
from tests.engine.engine_job import EngineJob, make_job
from tests.engine.member import installed
from tests.engine.scheduler import Process

MINIBATCH = 3
_SHARE_SHARDED = 0.3
_SHARE_TROUBLED = 0.2  # of small jobs
_SHARE_SEVERAL = 0.3  # of jobs with several processes in a pod


@dataclass(frozen=True, slots=True)
class Durations:
    """How long temporary faults last, in seconds."""

    restart_s: tuple[float, ...]
    pause_s: tuple[float, ...]
    cut_s: tuple[float, ...]


_LONG = Durations((0.1, 2.0, 8.0), (0.5, 5.0, 20.0), (1.0, 12.0))
SHORT = Durations((0.1, 1.0), (0.2, 3.0), (0.5, 3.0))
_RESTARTS_S = (0.1, 0.5, 1.0, 2.0, 4.0, 8.0)  # while all pods are ending: they have 10 s
_LIMIT_S = 150.0  # after the last fault: no remedy of the master for workers that hang helps before


def play(seed: int) -> EngineJob:
    """Run the job of a seed to its end, and check what it has become.

    Raises:
        AssertionError: something that must hold does not; the message names the seed.
    """
    draw = random.Random(seed)
    spec, shards = _sized(seed, draw)
    job = make_job(seed, spec, shards, draw_troubles(draw, shards[-1].end, spec))
    with replayed_by(job, f"python -m tests.engine {seed}"):
        _run(job, draw)
        job.check_end()
    return job


def play_small(seed: int) -> EngineJob:
    """Run a job of a few minibatches with few faults, close upon each other: most errors show in small groups.

    Raises:
        AssertionError: something that must hold does not; the message names the seed.
    """
    draw = random.Random(f"small {seed}")
    num_tasks = draw.choice([1, 2, 2, 3])
    spec = replace(
        draw_spec(draw),
        num_workers=draw.choice([2, 2, 2, 3]),
        num_epochs=draw.choice([1, 1, 1, 1, 2]),
        validation_data="",
        evaluation_steps=0,
        checkpoint_steps=draw.choice([2, 100]),
        shard_optimizer=draw.random() < _SHARE_SHARDED / 2,
        collective_timeout=2.0,
        lease_timeout=4.0,
    )
    shards = (Shard("a", 0, num_tasks * 2 * MINIBATCH),)
    troubles = Troubles(random.Random(draw.random()), compute_s=draw.choice([0.02, 0.2]))
    if draw.random() < _SHARE_TROUBLED:
        troubles = replace(draw_troubles(draw, shards[-1].end, spec), compute_s=troubles.compute_s)
    job = make_job(seed, spec, shards, troubles)
    job.is_checked_whole = False
    with replayed_by(job, f"python -m tests.engine small {seed}"):
        scheduler = job.scheduler
        while job.job._groups.formed is None:
            scheduler.step()
        for _ in range(draw.choice([1, 1, 2, 3])):
            for _ in range(1 + int(draw.expovariate(1 / draw.choice([8, 60])))):
                if job.end is None:
                    scheduler.step()
            if job.end is None:
                draw_fault(job, draw, SHORT)
        run_to_end(job)
        job.check_end()
    return job


def play_user_code(seed: int) -> EngineJob:
    """Run a job whose flags forgive less, with callbacks; where its data must end it, check that they do.

    Raises:
        AssertionError: something that must hold does not; the message names the seed.
    """
    draw = random.Random(f"user code {seed}")
    spec, shards = _sized(seed, draw)
    troubles, limit = draw_troubles(draw, shards[-1].end, spec), draw.choice([0, 0, 1, 100])
    spec = replace(spec, max_bad_records=limit, nan_policy=draw.choice([NanPolicy.FAIL, NanPolicy.SKIP]))
    bad = troubles.bad - troubles.dropped
    if len(bad) > limit:  # the task fails again and again, and nothing else may end the job
        spec = replace(spec, max_task_failures=20)
        troubles = replace(troubles, share_unreadable=0.0, share_raising=0.0)
    is_fatal = len(bad) > limit
    is_fatal |= spec.nan_policy is NanPolicy.FAIL and bool(troubles.not_finite - troubles.dropped - bad)
    rules = Rules(calls_epoch_end=draw.random() < 0.7)
    what = draw.choice(["nothing", "nothing", "steps", "metric"])
    if what == "steps":
        rules.max_steps = draw.randint(1, 20)
    elif what == "metric":
        rule = {"metric": "accuracy", "maximize": True, "min_delta": 0.0, "patience": 1, "baseline": None}
        rules.stopping.append({**rule, "start_from": 0})
    job = make_job(seed, spec, shards, troubles, draw.choice([None, rules, rules]))
    with replayed_by(job, f"python -m tests.engine user_code {seed}"):
        _run(job, draw)
        assert job.end is not None
        if is_fatal and (job.end.exit_code or what == "nothing"):
            assert re.search("ugly|nan", job.end.message), f"{job.end} {job.log[-5:]}"
        else:
            job.check_end()
    return job


def _sized(seed: int, draw: random.Random) -> tuple[JobSpec, tuple[Shard, ...]]:
    """Return a job's flags and data."""
    spec, middle = draw_spec(draw), draw.choice([21, 40])
    spec = replace(spec, shard_optimizer=random.Random(f"shards {seed}").random() < _SHARE_SHARDED)
    several = random.Random(f"processes {seed}")
    if several.random() < _SHARE_SEVERAL:
        spec = replace(spec, processes_per_worker=several.choice([2, 3]), num_workers=min(spec.num_workers, 3))
    shards = (Shard("a", 0, middle), Shard("b", middle, middle + 8))
    num_minibatches = spec.num_epochs * sum(-(-(shard.end - shard.start) // MINIBATCH) for shard in shards)
    every = random.Random(f"checkpoints {seed}").choice([4, num_minibatches])  # in all of them: one after the last step
    spec = replace(spec, checkpoint_steps=every)
    return spec, shards


@contextmanager
def replayed_by(job: EngineJob, how: str) -> Iterator[None]:
    """The job runs inside of the block; a failure names how to replay it."""
    try:
        with installed(job.room, job.members.__getitem__):
            yield
    except (Exception, Violation) as error:
        states = job.scheduler.describe(job.living_processes())
        raise AssertionError(f"{how}\n{error!r}\n{states}") from error


def play_end(seed: int) -> EngineJob:
    """Run the job of a seed without faults, but tell all its pods within a moment to end; successors end it.

    Raises:
        AssertionError: they do not continue from the last step; the message names the seed.
    """
    return _play_ending("end", seed, _SHARE_SHARDED, lambda draw: None)


def play_killed_end(seed: int) -> EngineJob:
    """Do as `play_end`, and kill one of the pods meanwhile; each member holds the whole model.

    Raises:
        AssertionError: they do not continue from the last step; the message names the seed.
    """
    return _play_ending("killed end", seed, 0.0, lambda draw: _Losses(draw.random() * 1.5))


def play_lost_end(seed: int) -> EngineJob:
    """Do as `play_killed_end`, and restart the master at that moment; maybe the writer of the checkpoint is killed.

    Raises:
        AssertionError: they do not continue from the last step; the message names the seed.
    """
    return _play_ending(
        "lost end",
        seed,
        0.0,
        lambda draw: _Losses(draw.choice([None, None, draw.random() * 1.5]), draw.choice(_RESTARTS_S)),
    )


def _play_ending(
    name: str, seed: int, share_sharded: float, draw_losses: Callable[[random.Random], _Losses | None]
) -> EngineJob:
    draw = random.Random(f"{name} {seed}")
    job = _ending_job(seed, draw, share_sharded)
    with replayed_by(job, f"python -m tests.engine {name.replace(' ', '_')} {seed}"):
        _end_all(job, draw, draw_losses(draw))
    return job


def _ending_job(seed: int, draw: random.Random, share_sharded: float) -> EngineJob:
    spec = replace(
        draw_spec(draw), checkpoint_dir="/checkpoints", checkpoint_steps=draw.choice([4, 1000]), num_epochs=1
    )
    spec = replace(spec, num_workers=draw.choice([2, 3, 4]), processes_per_worker=draw.choice([1, 1, 2]))
    spec = replace(spec, shard_optimizer=draw.random() < share_sharded)
    shards = (Shard("a", 0, 240),)
    troubles = replace(draw_troubles(draw, shards[-1].end, spec), share_unreadable=0.0, share_raising=0.0)
    return make_job(seed, spec, shards, troubles)


@dataclass(frozen=True, slots=True)
class _Losses:
    """The faults while all pods are ending.

    Attributes:
        kill_s: when a pod is killed; None: that of the writer of the last checkpoint, while it writes.
        restart_s: for how long there is no master from then on; 0: it stays.
    """

    kill_s: float | None
    restart_s: float = 0.0


def _end_all(job: EngineJob, draw: random.Random, losses: _Losses | None) -> None:
    settings, scheduler, num_steps = job.settings, job.scheduler, draw.randint(1, 8)
    num_members = settings.num_workers * settings.processes_per_worker
    while len(job.job.status().world) < num_members or min(one.steps for one in job.members.values()) < num_steps:
        scheduler.step()
    told = dict(job.members)
    assert len(told) == num_members
    for worker in {worker.pod.index: worker for worker in job.workers}.values():
        scheduler.at(draw.random() * draw.choice([0.0, 0.8]), lambda worker=worker: job.leave(worker))
    killed: set[Process] = set()
    victim = draw.choice(list(told))
    is_writer_awaited, before = losses is not None and losses.kill_s is None, job.room.written.begun

    def lose(victim: Process, restart_s: float) -> None:
        others = {one for one in told if not one.is_over and job._pods[one] is not job._pods[victim]}
        if not victim.is_over and others:  # else no other could have saved what it holds
            killed.update(one for one in told if not one.is_over and one not in others)
            job.kill(victim, "Killed")
            if restart_s:
                job.stop_master(restart_s)

    if losses is not None and losses.kill_s is not None:
        scheduler.at(losses.kill_s, lambda: lose(victim, losses.restart_s))
    while not all(process.is_over for process in told) and job.room.written.num_read < 2:
        begun = job.room.written.begun
        if losses is not None and is_writer_awaited and begun not in (None, before) and job._terminating >= told.keys():
            is_writer_awaited = False
            lose(begun[0], losses.restart_s)
        scheduler.step()
    last = max(member.steps for process, member in told.items() if process not in killed)
    limit = scheduler.now + _LIMIT_S
    has_continued = False
    while job.end is None:
        if not has_continued and job.room.written.num_read == 2:
            has_continued = True
            newest = job.room.written.latest()
            assert newest is not None, "there is no checkpoint"
            assert newest.ledger.steps == last or (losses is not None and newest.ledger.steps > last), (
                f"after step {last} it continues from {newest.ledger.steps}"
            )
        assert scheduler.now < limit, f"the job does not end: {job.job.status()} {job.log[-5:]}"
        scheduler.step()
    job.check_end()


def draw_spec(draw: random.Random) -> JobSpec:
    per_step = draw.choice([0, 0, 1, 3, 4])
    return JobSpec(
        job_name="j",
        distribution_strategy=DistributionStrategy.ALL_REDUCE,
        training_data="records",
        validation_data=draw.choice(["", "records"]),
        minibatch_size=MINIBATCH,
        num_minibatches_per_task=2,
        num_workers=draw.choice([1, 1, 2, 3, 4]),
        num_epochs=draw.choice([1, 2]),
        num_ps_pods=0,
        fixed_global_batch=per_step * MINIBATCH,
        shuffle=draw.random() < 0.5,
        seed=draw.randrange(4),
        evaluation_steps=draw.choice([0, 5]),
        checkpoint_dir=draw.choice(["", "/checkpoints"]),
        checkpoint_steps=4,
        nan_policy=NanPolicy.SKIP,
        max_bad_records=100,
        max_task_failures=10_000,
        collective_timeout=5.0,
    )


def draw_troubles(draw: random.Random, num_records: int, spec: JobSpec) -> Troubles:
    def some(share: float) -> frozenset[int]:
        return frozenset(draw.sample(range(num_records), 2)) if draw.random() < share else frozenset()

    return Troubles(
        random.Random(draw.random()),
        not_finite=some(0.3),
        bad=some(0.2),
        dropped=some(0.2),
        share_unreadable=draw.choice([0.0, 0.0, 0.1]),
        share_raising=draw.choice([0.0, 0.0, 0.03]),
        compute_s=draw.choice([0.02, 0.2]),
    )


def _run(job: EngineJob, draw: random.Random) -> None:
    scheduler = job.scheduler
    job.calls_of_workers.share_lost = draw.choice([0.0, 0.05])
    left, between = draw.choice([500, 2000, 5000]), draw.choice([50, 150, 400])
    while left > 0 and job.end is None:
        is_close = draw.random() < 0.4  # upon the fault before
        pause = 1 + int(draw.expovariate(1 / (8 if is_close else between)))
        left -= pause
        for _ in range(pause):
            if job.end is None:
                scheduler.step()
        if job.end is None and job.members:
            draw_fault(job, draw)
    run_to_end(job)


def run_to_end(job: EngineJob) -> None:
    scheduler = job.scheduler
    _heal(job)
    limit = scheduler.now + _LIMIT_S
    while job.end is None:
        assert scheduler.now < limit, f"the job does not end: {job.job.status()} {job.log[-5:]}"
        scheduler.step()


def draw_fault(job: EngineJob, draw: random.Random, lasts: Durations = _LONG) -> None:
    """One thing goes wrong, or right again."""
    living = job.living_processes()
    process = draw.choice(living) if living else None
    what = draw.choice(
        ["kill", "kill", "leave", "leave several", "pause", "slow", "cut", "cut members", "master", "scale", "heal"]
    )
    if what == "master":
        job.stop_master(draw.choice(lasts.restart_s))
    elif what == "scale" and not job.calls_of_workers.is_down:
        job.scale(draw.randint(1, 4))
    elif process is None or job.calls_of_workers.is_down:
        return
    elif what == "kill":
        job.kill(process, draw.choice(["Killed", "Preempted", "Evicted", "OOMKilled"]))
    elif what == "leave":
        job.leave(next(worker for worker in job.workers if worker.pod is job._pods[process] and not worker.is_gone))
    elif what == "leave several":
        workers = list({worker.pod.index: worker for worker in job.workers if not worker.is_gone}.values())
        for worker in draw.sample(workers, draw.randint(1, len(workers))):
            job.scheduler.at(draw.random(), lambda worker=worker: job.leave(worker))
    elif what == "pause":
        process.is_stopped = True
        job.scheduler.at(draw.choice(lasts.pause_s), lambda: _continue(job, process))
    elif what == "slow":
        process.pace_s = draw.choice([0.01, 0.2])
    elif what == "cut":
        job.calls_of_workers.cut.add(process)
        job.scheduler.at(draw.choice(lasts.cut_s), lambda: job.calls_of_workers.cut.discard(process))
    elif what == "cut members":
        job.room.links.cut.add(process)
        job.scheduler.at(draw.choice(lasts.cut_s), lambda: job.room.links.heal(process))


def _continue(job: EngineJob, process: object) -> None:
    for one in job.living_processes():
        if one is process:
            one.is_stopped = False


def _heal(job: EngineJob) -> None:
    """No more faults; the job must come to its end."""
    job.room.troubles.end()
    job.calls_of_workers.share_lost = 0.0
    job.calls_of_workers.cut.clear()
    for process in job.living_processes():
        process.is_stopped, process.pace_s = False, 0.0
        job.room.links.heal(process)
