"""Diagnoses of `elasticdl explain` for pods of a test, by way of the master's core and its events."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from elasticdl.cluster.cluster import PodEvent
from elasticdl.master.core.events import PodNotCreated, PodsListed
from elasticdl.master.core.job import Job
from elasticdl.master.core.settings import JobSettings
from elasticdl.master.effects import pod_changed
from elasticdl_client.choices import DistributionStrategy, Runtime
from elasticdl_client.explain.diagnosis import Diagnosis, Facts
from elasticdl_client.explain.explanation import explain
from elasticdl_client.job_status import JobStatus
from elasticdl_client.jobs.store import JobInfo, Phase

_WORKER = "elasticdl-j-worker-0"
_JOB = JobInfo("j", Runtime.KUBERNETES, Phase.RUNNING, JobStatus("j"))


def _core() -> Job:
    """Of a job that wants one worker and has asked for it."""
    core = Job(JobSettings("j", DistributionStrategy.LOCAL, num_ps=0, max_task_failures=1), 1, 0.0)
    core.handle(PodsListed(()), 0.0)
    return core


def _diagnoses(core: Job) -> list[Diagnosis]:
    return list(explain(Facts(_JOB, core.events, 100.0)).diagnoses)


def diagnoses_of(seen: Iterable[PodEvent], name: str) -> list[Diagnosis]:
    """The troubles of a job whose worker 0 is the pod of that name."""
    core = _core()
    for event in seen:
        if event.pod.name == name:
            pod = dataclasses.replace(event.pod, name=_WORKER, index=0)
            changed = pod_changed(PodEvent(event.type, pod))
            assert changed is not None
            core.handle(changed, 1.0)
    return _diagnoses(core)


def diagnosis_of(seen: Iterable[PodEvent], name: str) -> Diagnosis:
    """The only trouble of a pod."""
    found = diagnoses_of(seen, name)
    assert len(found) == 1, found
    return found[0]


def refusal_of(message: str) -> Diagnosis:
    """The trouble of a job whose worker 0 could not be created."""
    core = _core()
    core.handle(PodNotCreated(_WORKER, message), 1.0)
    (found,) = _diagnoses(core)
    return found
