"""Random schedules of everything that can happen to an AllReduce job: every minibatch is in the model once, it ends."""

from __future__ import annotations

from dataclasses import replace

import pytest
from group_simulation import GroupJob
from hypothesis import given, settings
from hypothesis import strategies as st
from schedules import UNHURRIED, Schedule, check_coverage, happen, play, schedules_of
from simulated_members import Name, SimMember, Where

from elasticdl.master.core.settings import JobSettings
from elasticdl.protocol import Shard, task_order
from elasticdl_client.choices import DistributionStrategy

SHARDS = (Shard("a", 0, 21), Shard("b", 0, 8))

ACTIONS = [
    *["start pod"] * 3,
    *["request"] * 6,
    *["act"] * 40,
    *["step"] * 10,
    *["deliver"] * 14,
    "deliver again",
    *["all act"] * 8,
    *["shell"] * 2,
    *["second"] * 4,
    "some seconds",
    "long time",
    "kill worker",
    "kill worker",
    "worker fails",
    "worker leaves",
    "scale",
    "node lost",
    "stop worker",
    "continue worker",
    "restart master",
    "save",
]


def act(job: GroupJob, action: str, pick: int) -> None:
    """One thing happens."""
    living = job.members()
    member = living[pick % len(living)] if living else None
    match action:
        case "some seconds":
            job.pass_time(2 + pick % 5)
        case "save":
            job.save()
        case _ if member is None:
            happen(job, action, pick)
        case "act":
            job.act(member, pick)
        case "node lost":
            job.end_pod(member.pod, "NodeLost")
        case "all act":
            for one in living:
                job.request(one)
                job.act(one, pick)
                job.step(one, pick)
            for _ in range(len(job.mail)):
                job.deliver()
        case _:
            happen(job, action, pick)


def check(job_settings: JobSettings, schedule: Schedule, filtered: bool) -> None:
    """Lets everything happen, and looks at what the model holds."""
    job_settings = replace(job_settings, min_workers=min(job_settings.min_workers, job_settings.num_workers))
    most = 5 if job_settings.fixed_global_batch else 11  # there is no place for minibatches beyond the plan
    job = GroupJob(job_settings, SHARDS, (lambda task: (2, 0, most, 5)[task % 4]) if filtered else None)
    play(job, schedule, act)
    for epoch in range(job_settings.num_epochs):
        check_coverage(job, epoch)
    if not job.num_lost_models:
        assert not any("open again" in line for line in job.log)
    survivors = who_survived(job)
    assert all(all_names(job) <= member.model.names for member in survivors)
    if job_settings.fixed_global_batch:
        expected = steps_in_order(job)
        assert all(member.model.steps == expected for member in survivors)


def who_survived(job: GroupJob) -> list[SimMember]:
    """The members of the last group at the end of the job."""
    formed = job.job._groups.formed
    members = [one for one in job.workers if isinstance(one, SimMember) and one.planned == formed]
    members = [one for one in members if not one.is_gone or one.pod.reason == "Completed"]
    return [one for one in members if one.where in (Where.HEADER, Where.REDUCE)]


def all_names(job: GroupJob) -> set[Name]:
    """Every minibatch of the job."""
    return {
        (epoch.number, task, n)
        for epoch in job.job._work.tasks.epochs
        for task in epoch.order
        for n in range(epoch.applied(task).watermark)
    }


def steps_in_order(job: GroupJob) -> list[tuple[Name, ...]]:
    """--fixed_global_batch: every step holds the next minibatches of the epoch's order."""
    size = job.settings.fixed_global_batch // job.settings.minibatch_size
    slices = job.job._work.tasks.slices
    steps: list[tuple[Name, ...]] = []
    for epoch in range(job.settings.num_epochs):
        names = [
            (epoch, task, n)
            for task in task_order(job.settings.seed, epoch, len(slices))
            for n in range(-(-len(slices[task]) // job.settings.minibatch_size))
        ]
        steps += [tuple(names[i : i + size]) for i in range(0, len(names), size)]
    return steps


JOBS = st.builds(
    JobSettings,
    job_name=st.just("j"),
    strategy=st.just(DistributionStrategy.ALL_REDUCE),
    num_workers=st.integers(1, 4),
    processes_per_worker=st.sampled_from([1, 1, 1, 2, 3]),
    num_ps=st.just(0),
    has_validation_data=st.just(True),
    minibatch_size=st.just(3),
    num_minibatches_per_task=st.just(2),
    input_workers=st.sampled_from([0, 0, 1, 4]),
    num_epochs=st.integers(1, 3),
    evaluation_steps=st.sampled_from([0, 7]),
    min_workers=st.sampled_from([1, 1, 2, 4]),
    fixed_global_batch=st.sampled_from([0, 0, 3, 9, 12]),
    output=st.sampled_from(["", "export"]),
    max_task_failures=st.just(10_000),
    seed=st.integers(0, 3),
)
SCHEDULES = schedules_of(ACTIONS)


@settings(UNHURRIED, max_examples=100)
@given(job=JOBS, schedule=SCHEDULES, filtered=st.booleans())
def test_whatever_happens_to_a_group_every_minibatch_is_in_the_model_once(
    job: JobSettings, schedule: Schedule, filtered: bool
) -> None:
    check(job, schedule, filtered)


@pytest.mark.full
@pytest.mark.timeout(900)
@settings(UNHURRIED, max_examples=3000, derandomize=False)
@given(job=JOBS, schedule=SCHEDULES, filtered=st.booleans())
def test_whatever_happens_to_a_group_for_long_every_minibatch_is_in_the_model_once(
    job: JobSettings, schedule: Schedule, filtered: bool
) -> None:
    check(job, schedule, filtered)
