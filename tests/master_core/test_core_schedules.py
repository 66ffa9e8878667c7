"""Random schedules of everything that can happen to a job: no record is lost, none is counted twice, it ends."""

from __future__ import annotations

import pytest
from core_simulation import SimJob
from hypothesis import given, settings
from hypothesis import strategies as st
from schedules import UNHURRIED, Schedule, check_coverage, happen, play, schedules_of

from elasticdl.master.core.settings import JobSettings
from elasticdl.master.core.values import Lease, PodState, TaskType
from elasticdl.protocol import Role, Shard
from elasticdl_client.choices import NanPolicy

SHARDS = (Shard("a", 0, 21), Shard("b", 0, 8))

ACTIONS = [
    *["start pod"] * 4,
    *["request"] * 6,
    *["step"] * 24,
    *["deliver"] * 12,
    "deliver again",
    *["shell"] * 4,
    "shell fails",
    *["second"] * 3,
    "long time",
    "kill worker",
    "kill ps",
    "worker fails",
    "worker leaves",
    "scale",
    "ps leaves",
    "out of memory",
    "node lost",
    "blocked",
    "stop worker",
    "continue worker",
    "restart master",
]


def act(job: SimJob, action: str, pick: int) -> None:
    """One thing happens."""
    match action:
        case "shell fails":
            job.shell_work(pick, fail=True)
        case "kill ps":
            servers = [pod for pod in job.pods.values() if pod.role is Role.PS and pod.phase is PodState.RUNNING]
            if servers and job.losses < 4:
                job.end_pod(servers[pick % len(servers)], "Killed")
        case "ps leaves":
            if job.ps and job.losses < 4:
                job.leave_ps(list(job.ps.values())[pick % len(job.ps)])
        case "blocked":
            job.block(pick)
        case "node lost" | "out of memory":
            pods = [pod for pod in job.pods.values() if pod.phase is PodState.RUNNING]
            if pods and job.losses < 4:
                job.end_pod(pods[pick % len(pods)], "NodeLost" if action == "node lost" else "OOMKilled")
        case _:
            happen(job, action, pick)


def check(job_settings: JobSettings, schedule: Schedule, filtered: bool, bad: frozenset[int]) -> None:
    """Lets everything happen, and looks at what the model holds.

    Args:
        job_settings: of the job.
        schedule: its events.
        filtered: `feed` makes of some tasks fewer samples than they have records, and of one more.
        bad: the gradients of these minibatches, counted over epochs and tasks in turn, are not finite.
    """
    job = SimJob(
        job_settings,
        SHARDS,
        (lambda task: (2, 0, 11, 5)[task % 4]) if filtered else None,
        lambda epoch, task, n: 12 * epoch + 2 * task + n in bad,
    )
    play(job, schedule, act)
    for epoch in range(max(1, job_settings.num_epochs)):
        check_coverage(job, epoch, records_of_bad(job, epoch))
    if not job.losses:
        assert not any("open again" in line for line in job.log)
    for server in job.ps.values():
        assert server.num_applies == sum(len(names) for names in server.names.values())


def records_of_bad(sim: SimJob, epoch: int) -> int:
    """Records of the minibatches of an epoch whose gradients are not finite."""
    total = 0
    for task, shard in enumerate(sim.job._work.tasks.slices):
        lease = Lease(0, TaskType.TRAINING, epoch, task, shard)
        samples, size = sim.num_samples(lease), sim.num_minibatches(lease)
        bad = sum(min(3, samples - 3 * n) for n in range(size) if sim.is_bad(epoch, task, n))
        total += min(bad, samples, len(shard))
    return total


JOBS = st.builds(
    JobSettings,
    job_name=st.just("j"),
    num_workers=st.integers(1, 3),
    num_ps=st.integers(1, 3),
    has_validation_data=st.just(True),
    minibatch_size=st.just(3),
    num_minibatches_per_task=st.just(2),
    input_workers=st.sampled_from([0, 0, 1, 4]),
    num_epochs=st.integers(1, 3),
    evaluation_steps=st.sampled_from([0, 7]),
    checkpoint_dir=st.sampled_from(["", "checkpoints"]),
    checkpoint_steps=st.sampled_from([0, 4]),
    output=st.sampled_from(["", "export"]),
    max_task_failures=st.just(10_000),
    seed=st.integers(0, 3),
    nan_policy=st.just(NanPolicy.SKIP),
)
BAD = st.frozensets(st.integers(0, 35), max_size=8)
SCHEDULES = schedules_of(ACTIONS)


@settings(UNHURRIED, max_examples=150)
@given(job=JOBS, schedule=SCHEDULES, filtered=st.booleans(), bad=BAD)
def test_whatever_happens_every_record_is_committed_exactly_once(
    job: JobSettings, schedule: Schedule, filtered: bool, bad: frozenset[int]
) -> None:
    check(job, schedule, filtered, bad)


@pytest.mark.full
@pytest.mark.timeout(900)
@settings(UNHURRIED, max_examples=3000, derandomize=False)
@given(job=JOBS, schedule=SCHEDULES, filtered=st.booleans(), bad=BAD)
def test_whatever_happens_for_long_every_record_is_committed_exactly_once(
    job: JobSettings, schedule: Schedule, filtered: bool, bad: frozenset[int]
) -> None:
    check(job, schedule, filtered, bad)
