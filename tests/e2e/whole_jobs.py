"""Jobs on real data from beginning to end, undisturbed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.jobs import RealJob
from tests.chaos.scenarios import assert_exact


def train(job: RealJob, tmp_path: Path, **flags: object) -> dict[str, float]:
    """The metrics of the last evaluation; every record was trained once."""
    if not job.available():
        pytest.skip(f"the data of {job.dataset} is not here")
    running = job.local_job(tmp_path / "job", job.make_data(tmp_path), **flags).start()
    assert running.wait(600) == 0, running.story()
    assert_exact(running, job)
    return running.metrics()
