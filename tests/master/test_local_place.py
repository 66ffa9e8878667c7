"""Pods of one machine share its cores."""

from __future__ import annotations

import os

from elasticdl.master.local_environment import shares_of_machine
from elasticdl_client.choices import FrameworkName
from elasticdl_client.job_spec import JobSpec

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
