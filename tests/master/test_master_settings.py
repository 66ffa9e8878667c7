"""The settings that lives of a master share, and those of the core."""

from __future__ import annotations

import dataclasses

import pytest

from elasticdl.master.metrics import Snapshot
from elasticdl.master.settings import check_fixed_flags, describe, fixed_flags, settings_of
from elasticdl_client.errors import JobError
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.job_status import JobStatus

SPEC = JobSpec.from_flags(
    "train", {"job_name": "j", "runtime": "local", "model_def": "m.f", "training_data": "/d", "num_ps_pods": 2}
)


def test_a_job_continues_with_what_may_change() -> None:
    check_fixed_flags(fixed_flags(SPEC), dataclasses.replace(SPEC, num_workers=9, num_epochs=5, step_timeout=1.0))


def test_another_number_of_servers_is_refused_with_what_works_instead() -> None:
    with pytest.raises(JobError, match="--num_ps_pods=2, not 3") as caught:
        check_fixed_flags(fixed_flags(SPEC), dataclasses.replace(SPEC, num_ps_pods=3))
    assert "--checkpoint_dir_for_init" in caught.value.hint


def test_the_number_of_processes_is_fixed_and_one_in_the_journals_that_do_not_say_it() -> None:
    several = dataclasses.replace(SPEC, processes_per_worker=2)
    with pytest.raises(JobError, match="--processes_per_worker=2, not 1"):
        check_fixed_flags(fixed_flags(several), SPEC)
    older = {name: value for name, value in fixed_flags(SPEC).items() if name != "processes_per_worker"}
    check_fixed_flags(older, SPEC)
    with pytest.raises(JobError, match="--processes_per_worker=1, not 2") as caught:
        check_fixed_flags(older, several)
    assert caught.value.hint.startswith("gpu=1 in --worker_resource_request continues this job")
    with pytest.raises(JobError) as caught:
        check_fixed_flags(older, dataclasses.replace(several, model_def="", job_command="python train.py"))
    assert caught.value.hint.startswith("--processes_per_worker=1 continues this job")


def test_every_flag_that_differs_is_named() -> None:
    with pytest.raises(JobError, match="--seed=0, not 1, and --training_data=/d, not /e"):
        check_fixed_flags(fixed_flags(SPEC), dataclasses.replace(SPEC, seed=1, training_data="/e"))


def test_what_changes_the_records_of_a_minibatch_is_fixed() -> None:
    for name, value in {"shuffle": True, "records_per_shard": 7, "data_reader_params": "key=id"}.items():
        with pytest.raises(JobError, match=f"--{name}="):
            check_fixed_flags(fixed_flags(SPEC), dataclasses.replace(SPEC, **{name: value}))  # type: ignore[arg-type]


def test_the_core_is_given_the_policy_and_the_servers() -> None:
    settings = settings_of(dataclasses.replace(SPEC, nan_policy="skip"))
    assert (settings.num_ps, settings.nan_policy) == (2, "skip")


def test_servers_are_those_of_tensorflow_with_a_command_alone() -> None:
    ours = dataclasses.replace(SPEC, need_tf_config=True)
    scripts = dataclasses.replace(ours, model_def="", job_command="python train.py")
    assert [settings_of(spec).has_tensorflow_servers for spec in (ours, scripts)] == [False, True]
    assert [Snapshot(spec, JobStatus(spec.job_name), {}).has_ps for spec in (ours, scripts)] == [True, False]


def test_the_log_begins_with_the_flags_that_were_given_and_hides_what_is_secret() -> None:
    heading, *lines = describe(dataclasses.replace(SPEC, training_data="postgresql://me:secret@host/db?table=t"))
    assert "train" in heading
    assert {line.split("=")[0].strip(): line.split("=", 1)[1] for line in lines} == {
        "--job_name": "j",
        "--runtime": "local",
        "--model_def": "m.f",
        "--num_ps_pods": "2",
        "--training_data": "postgresql://me:***@host/db?table=t",
    }
