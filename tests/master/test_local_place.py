"""The place of a local job: its pods share the cores of the machine, and its files are whole."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from elasticdl.master.local_environment import port_here, shares_of_machine
from elasticdl_client.choices import FrameworkName
from elasticdl_client.errors import JobError
from elasticdl_client.job_spec import JobSpec
from tests.master.small_disk import small_disk

VARIABLE = "TF_NUM_INTRAOP_THREADS"
MODEL = "module.custom_model"


def test_each_pod_has_its_share_of_the_cores_and_at_least_one() -> None:
    cores = len(os.sched_getaffinity(0))
    alone = JobSpec(model_def=MODEL, num_workers=1, num_ps_pods=0)
    crowd = JobSpec(model_def=MODEL, num_workers=cores, num_ps_pods=cores)
    assert shares_of_machine(alone, {}) == {VARIABLE: str(cores)}
    assert shares_of_machine(crowd, {}) == {VARIABLE: "1"}


def test_the_users_own_number_is_left_alone() -> None:
    assert shares_of_machine(JobSpec(model_def=MODEL), {VARIABLE: "3"}) == {}
    assert shares_of_machine(JobSpec(model_def=MODEL, envs=f"{VARIABLE}=3"), {}) == {}


def test_what_is_shared_is_that_of_the_jobs_framework() -> None:
    cores = str(len(os.sched_getaffinity(0)))
    torch = JobSpec(model_def=MODEL, num_workers=1, num_ps_pods=0, framework=FrameworkName.TORCH)
    command = JobSpec(num_workers=1, num_ps_pods=0, job_command="python train.py")
    assert shares_of_machine(torch, {}) == {"OMP_NUM_THREADS": cores}
    assert shares_of_machine(command, {}) == {VARIABLE: cores, "OMP_NUM_THREADS": cores}


def test_the_ports_of_a_job_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", size_kib=64) as disk:
        with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as filler:
            while filler.write(bytes(4096)):
                pass
        for _ in range(2):
            with pytest.raises(JobError, match="No space left"):
                port_here(disk)
        (disk / "filler").unlink()
        (disk / "master_port").touch()  # as earlier versions left it
        assert port_here(disk) == port_here(disk)
