"""Submits a job: checks, creates its objects, or writes them down instead; with --wait it is followed."""

from __future__ import annotations

from elasticdl_client.job_spec import JobSpec


def run(spec: JobSpec) -> int:
    """Submits a job; the exit code for the shell.

    Raises:
        ElasticDLError: it could not be submitted.
    """
    raise NotImplementedError(spec.job_name)
