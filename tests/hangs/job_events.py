"""The events in the journal of a job on this machine."""

from __future__ import annotations

from elasticdl_client.job_events import EventKind, JobEvent
from elasticdl_client.job_series import JobJournal
from tests.chaos.job import LocalJob


def events_of(job: LocalJob, kind: EventKind) -> list[JobEvent]:
    history = JobJournal.read((job.job_dir / "journal.json").read_bytes()).history
    return [event for event in history.events if event.kind is kind]
