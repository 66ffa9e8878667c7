"""From the core's view of a job to the status that the client reads."""

from __future__ import annotations

import dataclasses
import time

from elasticdl_client.job_status import EpochCoverage, JobStatus, LostPod, PodStatus

MAX_EPOCHS = 100  # one by one, 20 kB of the status; it is written once a second, on Kubernetes into a ConfigMap


def to_job_status(
    status: JobStatus, started_at: float, pods: tuple[PodStatus, ...] = (), lost_pods: tuple[LostPod, ...] = ()
) -> JobStatus:
    """Return the core's view as of now, with the pods as the cluster has shown them."""
    earlier, newest = status.coverage[:-MAX_EPOCHS], status.coverage[-MAX_EPOCHS:]
    return dataclasses.replace(
        status,
        coverage=(EpochCoverage.total(earlier), *newest) if earlier else newest,
        pods=pods,
        lost_pods=lost_pods,
        started_at=started_at,
        updated_at=time.time(),
    )
