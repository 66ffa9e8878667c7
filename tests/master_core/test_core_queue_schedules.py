"""Random schedules of a job with less quota than it wants, in a queue or a namespace, which takes pods in any order."""

from __future__ import annotations

from dataclasses import replace

import pytest
from core_simulation import SimJob
from hypothesis import example, given, settings
from hypothesis import strategies as st
from schedules import UNHURRIED, Schedule, check_coverage, play
from simulated_processes import SimPod
from test_core_schedules import JOBS, SCHEDULES, SHARDS, act

from elasticdl.master.core import commands as c
from elasticdl.master.core import events as e
from elasticdl.master.core.settings import JobSettings
from elasticdl.master.core.values import PodState
from elasticdl.protocol import Role


class QueuedJob(SimJob):
    """A simulated job with a limit of pods that run at a time.

    Args:
        settings: of the job.
        quota: this number of pods; at least one more than servers.
    """

    def __init__(self, settings: JobSettings, quota: int) -> None:
        self._quota = quota
        super().__init__(settings, SHARDS)

    def start_pod(self, pick: int = 0) -> None:
        if self._has_quota():
            super().start_pod(pick)

    def start_pods(self) -> None:
        """Start what the quota allows, workers before servers."""
        while self._has_quota() and (waiting := self._waiting()):
            workers = [n for n, pod in enumerate(waiting) if pod.role is Role.WORKER]
            self.start_pod(workers[0] if workers else 0)

    def pass_time(self, seconds: int) -> None:
        for _ in range(seconds):
            for pod in self._waiting():
                self.tell(replace(self._pod_event(pod), queue="team-a"))
            super().pass_time(1)

    def _has_quota(self) -> bool:
        return sum(pod.phase is PodState.RUNNING for pod in self.pods.values()) < self._quota

    def _waiting(self) -> list[SimPod]:
        return [pod for pod in self.pods.values() if pod.phase is PodState.PENDING]


class JobWithQuota(SimJob):
    """A simulated job in a namespace with a limit of pods that exist at a time; see `QueuedJob`."""

    def __init__(self, settings: JobSettings, quota: int) -> None:
        self._quota = quota
        super().__init__(settings, SHARDS)

    def create_pod(self, command: c.CreatePod) -> None:
        if sum(pod.phase in (PodState.PENDING, PodState.RUNNING) for pod in self.pods.values()) < self._quota:
            super().create_pod(command)
        else:
            self.jobs_for_shell.append(e.PodNotCreated(command.name, "exceeded quota: all", lacks_quota=True))


def check(
    job_settings: JobSettings, schedule: Schedule, more_than_servers: int, kind: type[QueuedJob | JobWithQuota]
) -> None:
    job = kind(job_settings, job_settings.num_ps + more_than_servers)
    play(job, schedule, act)
    for epoch in range(max(1, job_settings.num_epochs)):
        check_coverage(job, epoch)


QUEUED = st.builds(replace, JOBS, has_queue=st.booleans(), num_workers=st.integers(2, 4))
MORE = st.integers(1, 3)
KINDS = st.sampled_from([QueuedJob, JobWithQuota])
LOST_SERVER: Schedule = [("start pod", 0), ("second", 0)] * 8 + [("kill ps", 0)]
SMALL = JobSettings(
    "j", num_workers=4, num_ps=2, has_validation_data=True, minibatch_size=3, num_minibatches_per_task=2
)


@settings(UNHURRIED, max_examples=25)
@example(job=SMALL, schedule=[], more_than_servers=1, kind=QueuedJob)
@example(job=SMALL, schedule=LOST_SERVER, more_than_servers=1, kind=QueuedJob)
@example(job=replace(SMALL, has_queue=True), schedule=LOST_SERVER, more_than_servers=1, kind=QueuedJob)
@example(job=SMALL, schedule=LOST_SERVER, more_than_servers=1, kind=JobWithQuota)
@given(job=QUEUED, schedule=SCHEDULES, more_than_servers=MORE, kind=KINDS)
def test_a_job_with_less_quota_than_it_wants_ends_whatever_happens(
    job: JobSettings, schedule: Schedule, more_than_servers: int, kind: type[QueuedJob | JobWithQuota]
) -> None:
    check(job, schedule, more_than_servers, kind)


@pytest.mark.full
@pytest.mark.timeout(900)
@settings(UNHURRIED, max_examples=3000, derandomize=False)
@given(job=QUEUED, schedule=SCHEDULES, more_than_servers=MORE, kind=KINDS)
def test_a_job_with_less_quota_than_it_wants_ends_whatever_happens_for_long(
    job: JobSettings, schedule: Schedule, more_than_servers: int, kind: type[QueuedJob | JobWithQuota]
) -> None:
    check(job, schedule, more_than_servers, kind)
