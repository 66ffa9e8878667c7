"""What the journal of a job on this machine says has happened."""

from __future__ import annotations

from elasticdl_client.job_events import EventKind, JobEvent, read_journal
from tests.chaos.job import LocalJob


def events_of(job: LocalJob, kind: EventKind) -> list[JobEvent]:
    history = read_journal((job.job_dir / "journal.json").read_bytes())
    return [event for event in history.events if event.kind is kind]
