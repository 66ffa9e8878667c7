"""The specs of a job's pods."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticdl.master.core.commands import CreatePod
from elasticdl.master.pod_specs import PodSpecs
from elasticdl.protocol import Role
from elasticdl_client.choices import DistributionStrategy, FrameworkName, JobType
from elasticdl_client.job_spec import JobSpec

VARIABLE = "GOMP_SPINCOUNT"


def variables(spec: JobSpec, role: Role) -> dict[str, str]:
    return dict(PodSpecs(spec, "python", "master:1").of(CreatePod("pod", role, 0, slot=0)).env)


def test_threads_of_workers_spin_for_a_moment_unless_the_user_says_for_how_long() -> None:
    spec = JobSpec(job_command="python train.py")
    assert 0 < int(variables(spec, Role.WORKER)[VARIABLE]) < 100_000  # about a millisecond
    assert VARIABLE not in variables(spec, Role.PS)
    assert variables(JobSpec(job_command="true", envs=f"{VARIABLE}=7"), Role.WORKER)[VARIABLE] == "7"


def test_keras_runs_on_tensorflow_in_workers_of_modules_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    assert variables(JobSpec(model_def="m.model"), Role.WORKER)["KERAS_BACKEND"] == "tensorflow"
    for spec in (JobSpec(job_command="true"), JobSpec(model_def="m.model", framework=FrameworkName.TORCH)):
        assert "KERAS_BACKEND" not in variables(spec, Role.WORKER)


def test_a_worker_with_eight_gpus_has_eight_processes_with_ids_that_follow_each_other() -> None:
    spec = JobSpec(
        model_def="m.model",
        num_workers=3,
        distribution_strategy=DistributionStrategy.ALL_REDUCE,
        worker_resource_request="cpu=8,memory=64Gi,amd.com/gpu=8",
    )
    pod = PodSpecs(spec, "python", "master:1").of(CreatePod("pod", Role.WORKER, 2, slot=0))
    assert pod.command == ("python", "-P", "-m", "elasticdl.worker.processes", "8", "8", "elasticdl.worker")
    assert (pod.env["WORKER_ID"], pod.env["WORKER_NUM"]) == ("16", "24")
    assert pod.num_gpus == 8


def test_a_command_runs_in_each_process_of_a_worker() -> None:
    spec = JobSpec(job_command="python train.py", processes_per_worker=2)
    pod = PodSpecs(spec, "python", "master:1").of(CreatePod("pod", Role.WORKER, 0, slot=0))
    command = ("elasticdl.worker.command", ".", "python", "train.py")
    assert pod.command == ("python", "-P", "-m", "elasticdl.worker.processes", "2", "0", *command)


def test_a_variable_that_a_pod_inherits_encrypts_nothing() -> None:
    """ELASTICDL_ENCRYPT=false is the default of a flag in the user's shell, and the local runtime hands it on."""
    assert not variables(JobSpec(envs="ELASTICDL_ENCRYPT=false"), Role.PS)["ELASTICDL_ENCRYPT"]
    assert variables(JobSpec(encrypt=True), Role.PS)["ELASTICDL_ENCRYPT"] == "true"


def test_the_model_is_parsed_before_threads_create_pods(tmp_path: Path) -> None:
    """Python 3.11.2 raises SystemError in a thread that parses while another one does."""
    module = tmp_path / "m.py"
    module.write_text("import torch\n")
    specs = PodSpecs(JobSpec(model_zoo=str(tmp_path), model_def="m.model"), "python", "master:1")
    module.unlink()
    assert specs.of(CreatePod("pod", Role.WORKER, 0, slot=0)).framework == "torch"


@pytest.mark.parametrize(
    ("job_type", "preloaded"),
    [(JobType.TRAIN, "tensorflow+torch"), (JobType.EVALUATE, "tensorflow"), (JobType.PREDICT, "tensorflow")],
)
def test_a_standby_imports_torch_for_a_keras_model_only_where_workers_have_collectives(
    job_type: JobType, preloaded: str
) -> None:
    spec = JobSpec(
        job_type=job_type,
        model_zoo=str(Path(__file__).parents[2] / "model_zoo"),
        model_def="digits.digits_functional.custom_model",
        distribution_strategy=DistributionStrategy.ALL_REDUCE,
    )
    assert PodSpecs(spec, "python", "master:1").of(CreatePod("pod", Role.WORKER, 0, slot=0)).framework == preloaded
