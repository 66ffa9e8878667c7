"""The data of the page: jobs, one job, its events and series, as values of JSON.  Computes nothing that costs I/O."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from elasticdl_client import goodput, progress, scaling
from elasticdl_client.dashboard.lanes import Lane
from elasticdl_client.dashboard.observer import JobDetail
from elasticdl_client.job_events import JobEvent, describe
from elasticdl_client.job_series import SeriesPoint
from elasticdl_client.jobs import words
from elasticdl_client.jobs.job import JobInfo, Phase

Plain = dict[str, Any]


def job_row(job_id: str, job: JobInfo) -> Plain:
    """A job in the list of all."""
    status = job.status
    return {
        "id": job_id,
        **job.identity,
        "phase": job.phase.value,
        "message": " ".join(" ".join([*words.messages(job), words.waiting_for(job)]).split())[:300],
        "created_at": job.created_at,
        "elapsed": status.elapsed_seconds,
        "updated_at": status.updated_at,
        "epoch": status.epoch,
        "num_epochs": status.num_epochs,
        "records_done": status.records_done,
        "records_total": status.records_total,
        "rate": status.records_per_second if job.phase is Phase.RUNNING else 0.0,
        "eta": status.eta_seconds if job.phase is Phase.RUNNING else None,
        "step": status.model_version,
        "loss": status.loss,
        "metrics": status.metrics,
        "workers": [status.workers_alive, status.workers_wanted],
        "processes_per_worker": status.processes_per_worker,
        "ps": [status.ps_alive, status.ps_wanted],
        "goodput": goodput.goodput(status.worker_seconds) if status.worker_seconds else None,
    }


def job_page(job_id: str, job: JobInfo, detail: JobDetail) -> Plain:
    """A job's page but for its events, which are sent once each."""
    status = job.status
    prefix = f"elasticdl-{job.name}-"
    scaled = scaling.describe(status) if job.phase is Phase.RUNNING else ""
    notes = [words.waiting_for(job), words.what_to_do(job), f"Workers follow the gain: {scaled}." if scaled else ""]
    return {
        **job_row(job_id, job),
        "directory": job.directory,
        "notes": [*words.messages(job), *filter(None, notes)],
        "problem": detail.problem,
        "generation": status.generation,
        "exit_code": status.exit_code,
        "metrics_step": status.metrics_step,
        "coverage": [
            {**dataclasses.asdict(one), "title": one.title, "text": str(one)} for one in reversed(status.coverage)
        ],
        "pods": [{**dataclasses.asdict(pod), "name": pod.name.removeprefix(prefix)} for pod in status.pods],
        "servers": [dataclasses.asdict(server) for server in sorted(status.ps, key=lambda server: server.id)],
        "devices": [dataclasses.asdict(device) for device in status.devices],
        "staleness": list(status.staleness),
        "staleness_text": progress.staleness_text(status),
        "group": list(status.world),
        "num_groups": status.num_worlds,
        "engine": status.engine,
        "worker_seconds": [
            [state, goodput.label(state), share] for state, share in goodput.shares(status.worker_seconds)
        ],
        "ps_seconds": [[state, goodput.label(state), share] for state, share in goodput.shares(status.ps_seconds)],
        "goodput_text": goodput.summary(status.worker_seconds),
        "diagnoses": [diagnosis.to_plain() for diagnosis in detail.diagnoses],
        "lanes": [_lane(lane) for lane in detail.lanes],
        "pod_times": _pod_times(detail),
        "series": series(detail.points),
        "summed_up": dict(detail.history.summed_up),
        "actions": sorted(detail.actions),
    }


def event_row(event: JobEvent) -> list[Any]:
    """An event: number, time, kind, subject, text, cause, whether it is a trouble."""
    return [
        event.number,
        round(event.at, 3),
        event.kind.value,
        event.subject,
        event.message if "\n" in event.message else describe(event) or event.message,
        event.cause,
        int(event.is_trouble),
    ]


def series(points: Iterable[SeriesPoint]) -> Plain:
    """Points as columns, as the charts want them."""
    found = list(points)
    metrics = sorted({name for point in found for name in point.metrics})
    states = sorted({state for point in found for state in point.worker_seconds})
    return {
        "at": [round(point.at, 2) for point in found],
        "step": [point.step for point in found],
        "records": [point.records for point in found],
        "loss": [point.loss for point in found],
        "workers": [point.workers for point in found],
        "ps": [point.ps for point in found],
        "ps_busy": [round(point.ps_busy, 3) for point in found],
        "metrics_step": [point.metrics_step for point in found],
        "metrics": {name: [point.metrics.get(name) for point in found] for name in metrics},
        "seconds": {state: [round(point.worker_seconds.get(state, 0.0), 2) for point in found] for state in states},
        "labels": {state: goodput.label(state) for state in states},
    }


def _pod_times(detail: JobDetail) -> Plain:
    """Return how workers spent their time, in cells as the journal has them (see `PodTimes`)."""
    labels = {state.value: goodput.label(state) for state in goodput.SlotState}
    return {**detail.pod_times.to_journal(), "began_at": detail.began_at, "labels": labels}


def _lane(lane: Lane) -> Plain:
    return {
        "name": lane.name,
        "spans": [[span.state.value, round(span.begin, 2), round(span.end, 2)] for span in lane.spans],
        "endings": [[one.how.value, round(one.at, 2), one.why, one.event] for one in lane.endings],
    }
