"""Real local jobs whose parameter servers hold the workers up, and what `explain` says about the kind of their load."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from elasticdl.protocol import Role
from elasticdl_client.explain.diagnosis import Diagnosis, Trouble
from elasticdl_client.explain.slowness import PsLoad
from tests.chaos.job import REPOSITORY, LocalJob
from tests.chaos.jobs import NUMPY_DIGITS
from tests.explain import heavy_digits
from tests.explain.explained import explained
from tests.hangs.control_group import cpu_quota

LONG = replace(NUMPY_DIGITS, num_epochs=1000, num_workers=1, pace_s=0)
HEAVY = {"model_zoo": REPOSITORY, "model_def": f"{heavy_digits.__name__}.custom_model"}


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return NUMPY_DIGITS.make_data(tmp_path_factory.mktemp("data"))


def synchronous(job_dir: Path, data: Path, environment: dict[str, str], **flags: object) -> LocalJob:
    """A job that hides no call behind computing."""
    job = LONG.local_job(job_dir, data, validation_data="", use_async=False, **flags)
    job.environment.update(environment)
    return job.start()


def overloaded(job: LocalJob, cause: PsLoad) -> Diagnosis:
    """The diagnosis, as soon as there is one with that cause."""
    found: list[Diagnosis] = []

    def is_there() -> bool:
        named = (one for one in explained(job.job_dir).diagnoses if one.trouble is Trouble.PS_OVERLOADED)
        found[:] = [one for one in named if one.evidence["cause"] == cause]
        return bool(found)

    job.wait_for_version(1)
    job.wait_until(f"servers that are overloaded by {cause}", is_there, 200)
    return found[0]


def check(diagnosis: Diagnosis) -> None:
    assert diagnosis.cost.is_open
    assert diagnosis.subject == "ps-0"
    assert float(diagnosis.evidence["waiting"]) > 0.25


@pytest.mark.parametrize(
    ("cause", "environment", "flags"),
    [
        (PsLoad.CALLS, {}, {"minibatch_size": 1, "num_minibatches_per_task": 128}),
        (PsLoad.BYTES, {"BALLAST": str(4 << 20)}, HEAVY),
        (PsLoad.HOT_ROWS, {"HOT_ROWS": "512"}, {**HEAVY, "num_ps_pods": 2}),
        (PsLoad.BUSY, {"NEW_ROWS": "256"}, HEAVY),
    ],
)
def test_servers_that_workers_wait_for_are_reported_with_the_kind_of_their_load(
    cause: PsLoad, environment: dict[str, str], flags: dict[str, object], tmp_path: Path, digits: Path
) -> None:
    job = synchronous(tmp_path / "job", digits, environment, **flags)
    try:
        check(overloaded(job, cause))
    finally:
        job.end()


def test_a_server_that_its_cpu_limit_holds_back_is_reported_so(tmp_path: Path, digits: Path) -> None:
    job = synchronous(tmp_path / "job", digits, {"BALLAST": str(1 << 20)}, **HEAVY)
    try:
        job.wait_for_version(1)
        with cpu_quota(0.05) as procs:
            procs.write_text(str(job.pods(Role.PS)[0].pid))
            diagnosis = overloaded(job, PsLoad.THROTTLED)
    finally:
        job.end()
    check(diagnosis)
    assert float(diagnosis.evidence["throttled"]) > 0.1
