"""Return the diagnoses of `elasticdl explain` for a job in a directory."""

from __future__ import annotations

import time
from pathlib import Path

from elasticdl_client.explain.diagnosis import Diagnosis, Facts, Trouble
from elasticdl_client.explain.explanation import Explanation, Question, explain
from elasticdl_client.jobs.local_jobs import LocalJobs


def explained(job_dir: Path, question: Question | None = None) -> Explanation:
    """The explanation of the job in a directory, as the command makes it."""
    store = LocalJobs(job_dir)
    (job,) = store.list()
    return explain(Facts(job, store.journal(job).history, time.time()), question)


def the_trouble(job_dir: Path, trouble: Trouble) -> Diagnosis:
    """The diagnosis of one kind."""
    found = explained(job_dir)
    named = [diagnosis for diagnosis in found.diagnoses if diagnosis.trouble is trouble]
    assert len(named) == 1, found.to_plain()
    return named[0]
