"""From the core's view of a job to the status that the client reads."""

from __future__ import annotations

import dataclasses
import time

from elasticdl.master.core.status import Status
from elasticdl_client.job_status import EpochCoverage, JobPhase, JobStatus, LostPod, PodStatus

MAX_EPOCHS = 100  # one by one, 20 kB of the status; it is written once a second, on Kubernetes into a ConfigMap


def to_job_status(
    job_name: str,
    started_at: float,
    status: Status,
    pods: tuple[PodStatus, ...] = (),
    lost_pods: tuple[LostPod, ...] = (),
) -> JobStatus:
    """The core's view, and the pods as the cluster has shown them, as of now."""
    known = {field.name for field in dataclasses.fields(JobStatus)}
    values = {name: getattr(status, name) for name in (f.name for f in dataclasses.fields(status)) if name in known}
    values["phase"] = JobPhase(status.phase)
    values["metrics"], values["records"] = dict(status.metrics), dict(status.records)
    values["event_counts"] = dict(status.event_counts)
    values["pods_lost"] = {role: dict(reasons) for role, reasons in status.pods_lost.items()}
    values["worker_seconds"] = dict(status.worker_seconds)
    values["ps_seconds"] = dict(status.ps_seconds)
    earlier, newest = status.coverage[:-MAX_EPOCHS], status.coverage[-MAX_EPOCHS:]
    values["coverage"] = (EpochCoverage.total(earlier), *newest) if earlier else newest
    values |= {"pods": pods, "lost_pods": lost_pods}
    return JobStatus(job_name=job_name, started_at=started_at, updated_at=time.time(), **values)
